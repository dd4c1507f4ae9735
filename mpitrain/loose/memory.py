"""Where workers have parameters and gradients, where servers have theirs, and how these get from one to the other.

Every trained parameter lies in the one flat layout, in buckets of equal shares, one a server. A worker has all of it,
in an arena that the servers of its node map: they read gradients there and write parameters there, so that each
element is moved once and nobody sends anything. With a server on another node the same stretches travel as messages.

    worker   | bucket 0: share 0 | share 1 | bucket 1: share 0 | share 1 |      parameters, and gradients alike
    server 0 | share 0 of bucket 0 | share 0 of bucket 1 |
    server 1 | share 1 of bucket 0 | share 1 of bucket 1 |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mpitrain.comm import Arena, Communicator
from mpitrain.shard.flat import FlatGroup, numbered


@dataclass(frozen=True)
class Roles:
    """Who works and who serves.

    Attributes:
        workers: Their ranks, in order.
        servers: Those of the servers, in the order of their shares; on a rank that does both it is in both.
    """

    workers: tuple[int, ...]
    servers: tuple[int, ...]

    @staticmethod
    def of(ranks: int, servers: int) -> Roles:
        """The roles of so many ranks, of which the last `servers` only serve; 0: all do both."""
        everyone = tuple(range(ranks))
        return Roles(everyone[: ranks - servers], everyone[ranks - servers :] if servers else everyone)


class SharedFlats:
    """Parameters and gradients of all workers, as this rank sees them, in host memory. Collective to make.

    Args:
        groups: The parameters and where each lies, with as many shares as there are servers.
        world: All ranks.

    Attributes:
        buckets: (number of the group, number in the group) of every bucket, in the order in which backward finishes.
        parameters, gradients: This rank's arenas, one for each group.
    """

    def __init__(self, groups: Sequence[FlatGroup], world: Communicator) -> None:
        self.groups, self._world = groups, world
        self.buckets = numbered(groups)
        self.parameters, self.gradients = ([world.arena(g.layout.numel, g.dtype) for g in groups] for _ in range(2))

    def sees(self, rank: int) -> bool:
        """Whether this rank shares memory with another one; it does with itself."""
        other = self._world.world_ranks[rank]
        return rank == self._world.rank or all(other in arena.segments for arena in (*self.parameters, *self.gradients))

    def parameter_share(self, rank: int, bucket: int, share: int) -> torch.Tensor:
        """A share of a bucket of a rank's parameters, which this rank must see: a view."""
        return self._share(self.parameters, rank, bucket, share)

    def gradient_share(self, rank: int, bucket: int, share: int) -> torch.Tensor:
        """One rank's share of a bucket's gradients."""
        return self._share(self.gradients, rank, bucket, share)

    def share_bounds(self, bucket: int, share: int) -> tuple[int, int]:
        """[lo, hi) of a share of a bucket in its group's layout."""
        g, b = self.buckets[bucket]
        return self.groups[g].layout.share(b, share)

    def _share(self, arenas: Sequence[Arena], rank: int, bucket: int, share: int) -> torch.Tensor:
        lo, hi = self.share_bounds(bucket, share)
        arena = arenas[self.buckets[bucket][0]]
        flat = arena.tensor if rank == self._world.rank else arena.peer(self._world.world_ranks[rank])
        return flat[lo:hi]

    def free(self) -> None:
        """Release the parameters' memory; whoever has the gradients releases theirs. Collective."""
        for arena in self.parameters:
            arena.free()


class OwnShares:
    """A server's shares of something laid out like the parameters.

    They lie end to end in private memory; on a rank that only serves, which has the whole of it as workers have and
    uses no other part, in place there.

    Args:
        groups: The parameters.
        share: The number of the shares.
        dtypes: Of the elements of each group.
        whole: Memory of all elements of each group, in which its shares are to lie; None: in memory of their own.

    Attributes:
        share: The number of the shares.
    """

    def __init__(
        self,
        groups: Sequence[FlatGroup],
        share: int,
        dtypes: Sequence[torch.dtype],
        whole: Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        self._groups, self.share = groups, share
        self._whole = [None] * len(groups) if whole is None else whole
        lengths = [
            group.layout.numel // group.layout.parts if of is None else 0
            for group, of in zip(groups, self._whole, strict=True)
        ]
        self._flats = [torch.zeros(n, dtype=dtype) for n, dtype in zip(lengths, dtypes, strict=True)]
        self._buckets = numbered(groups)

    def between(self, group: int, lo: int, hi: int) -> torch.Tensor:
        """Elements [lo, hi) of a group's layout, which lie in one of the shares: a view."""
        whole = self._whole[group]
        if whole is not None:
            return whole[lo:hi]
        at = self._groups[group].in_shares(lo, self.share) if hi > lo else 0
        return self._flats[group][at : at + hi - lo]

    def bucket(self, number: int) -> torch.Tensor:
        """The share of a bucket: a view."""
        g, b = self._buckets[number]
        return self.between(g, *self._groups[g].layout.share(b, self.share))

    def nbytes(self) -> int:
        """Bytes of memory of its own."""
        return sum(flat.nbytes for flat in self._flats)
