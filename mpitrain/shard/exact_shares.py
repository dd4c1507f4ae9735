"""Exact shares of parameters that ranks gather in a compressed form (`comm.parameter_compression`).

Every rank computes with the same rounded parameters. The owner of a share updates and saves the exact values, which it
keeps beside them (Wang et al. 2023, ZeRO++, section 3.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
    """

    def __init__(self, groups: Sequence[FlatGroup], flats: Sequence[torch.Tensor], rank: int) -> None:
        self._groups, self._rank = groups, rank
        self._flats = []
        for group, flat in zip(groups, flats, strict=True):
            bounds = [group.layout.share(b, rank) for b in range(group.layout.buckets)]
            self._flats.append(torch.cat([flat[lo:hi] for lo, hi in bounds]))

    def view(self, group: int, lo: int, hi: int) -> torch.Tensor:
        """Return elements [lo, hi) of a group's layout as a view; they lie in one share of the rank."""
        begin = self._groups[group].in_shares(lo, self._rank)
        return self._flats[group][begin : begin + hi - lo]

    def nbytes(self) -> int:
        """Return the bytes of the shares."""
        return sum(flat.nbytes for flat in self._flats)


def bucket_lengths(groups: Sequence[FlatGroup], parts: int = 1) -> Iterator[tuple[FlatGroup, int]]:
    """Yield each group with the elements of one of `parts` equal parts of each of its buckets."""
    return ((group, (hi - lo) // parts) for group in groups for lo, hi in pairwise(group.layout.bounds))


def bytes_gathered(lengths: Iterable[tuple[FlatGroup, int]], ranks: int, compression: Compression | None = None) -> int:
    """Return the bytes of parameters that ranks gather from each other.

    Args:
        lengths: Group and number of elements of each operation.
        ranks: Number of ranks, each of which has an equal part of the elements.
        compression: Compression of the parameters; None to gather them as they are.
    """
    if compression is None:
        return sum(numel * group.dtype.itemsize for group, numel in lengths)
    return ranks * sum(compression.bytes_on_wire(numel // ranks, group.dtype) for group, numel in lengths)
