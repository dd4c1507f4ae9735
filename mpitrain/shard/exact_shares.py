"""Exact shares of parameters that ranks gather in a compressed form (`comm.parameter_compression`).

Every rank computes with the same rounded parameters. The owner of a share updates and saves the exact values, which it
keeps beside them (Wang et al. 2023, ZeRO++, section 3.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from mpitrain.comm.compression import Compression
from mpitrain.shard.flat import FlatGroup


class ExactShares:
    """One rank's shares of the parameters, which are gathered in a compressed form.

    Args:
        groups: Parameters and their places in flat memory.
        flats: All parameters, one tensor for each group.
        rank: Number of the rank's share.
        compression: Compression of the gathered parameters.
    """

    def __init__(
        self, groups: Sequence[FlatGroup], flats: Sequence[torch.Tensor], rank: int, compression: Compression
    ) -> None:
        self._groups, self._rank, self.compression = groups, rank, compression
        shares = [
            [flat[slice(*g.layout.share(b, rank))] for b in range(g.layout.buckets)]
            for g, flat in zip(groups, flats, strict=True)
        ]
        self._flats = [torch.cat(of) for of in shares]

    def view(self, group: int, lo: int, hi: int) -> torch.Tensor:
        """Return elements [lo, hi) of a group's layout as a view; they lie in one share of the rank."""
        begin = self._groups[group].in_shares(lo, self._rank)
        return self._flats[group][begin : begin + hi - lo]

    def nbytes(self) -> int:
        """Return the bytes of the shares."""
        return sum(flat.nbytes for flat in self._flats)


def bounds_of(group: FlatGroup) -> Iterator[tuple[int, int]]:
    """Return the bounds [lo, hi) of each bucket of a group."""
    return pairwise(group.layout.bounds)


def bytes_gathered(group: FlatGroup, numel: int, ranks: int, compression: Compression | None) -> int:
    """Return the bytes of elements of a group that ranks gather from each other, each an equal part."""
    if compression is None:
        return numel * group.dtype.itemsize
    return ranks * compression.bytes_on_wire(numel // ranks, group.dtype)
