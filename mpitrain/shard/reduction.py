"""How a bucket of gradients is reduced: over which ranks, with which operation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpitrain.comm import Communicator, Work
from mpitrain.comm.compression import Bucket, Compression
from mpitrain.shard.flat import FlatGroup


class BucketReduction:
    """The reduction that every bucket of some gradients goes through.

    Args:
        comms: Communicators over the same ranks; buckets use them in turn.
        op: "sum" or "avg".
        algorithm: Of the all-reduce; "auto" for what fits the size and the memory.
        compression: What gradients are compressed with on their way; None to send them as they are.
        replicas: Ranks that keep the same shares as this one, over which a reduced share is summed once more.
        reproducible: Add in an order that does not depend on the number of ranks.

    Attributes:
        comm: The first of the communicators, for what is not done bucket by bucket.
    """

    def __init__(
        self,
        comms: Sequence[Communicator],
        op: str,
        *,
        algorithm: str = "auto",
        compression: Compression | None = None,
        replicas: Communicator | None = None,
        reproducible: bool = False,
    ) -> None:
        self.comms, self.op, self.algorithm = list(comms), op, algorithm
        self.comm = self.comms[0]
        self.compression, self.replicas, self.reproducible = compression, replicas, reproducible
        for comm in self.comms if self.overlaps else ():
            # The first operation makes the memory in which ranks meet: not beside the training, see FileLayout.
            work = comm.all_reduce(torch.zeros(1), async_op=True)
            assert work is not None
            work.wait()

    @property
    def overlaps(self) -> bool:
        """Whether a core is free to reduce one bucket while backward makes the next."""
        return self.comm.overlaps

    def sum(self, x: torch.Tensor, number: int, shapes: Bucket | None, *, background: bool) -> Work | None:
        """All-reduce a bucket in place.

        Args:
            x: The bucket's gradients, flat.
            number: Of the bucket, through all groups.
            shapes: What compression knows of the bucket; None to reduce it uncompressed.
            background: Return at once, with a Work to wait for.
        """
        comm = self.comms[number % len(self.comms)]
        return comm.all_reduce(
            x, self.op, self.algorithm, background, compression=shapes, reproducible=self.reproducible
        )

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's share of a bucket, a view."""
        length = x.numel() // self.comm.size
        return x[self.comm.rank * length : (self.comm.rank + 1) * length]

    @property
    def in_order(self) -> bool:
        """Whether each bucket is reduced by itself, not in split phases (see `mpitrain.comm.runtime.split_phase`)."""
        return self.compression is not None or self.reproducible

    def scatter(
        self, into: torch.Tensor, x: torch.Tensor, number: int, shapes: Bucket | None, *, background: bool, defer: bool
    ) -> Work | None:
        """Reduce a bucket such that this rank gets its share of the result. What x held is lost.

        Args:
            into: Where the share goes: that share of x, or memory of as many elements elsewhere.
            x: The bucket's gradients, flat.
            number: Of the bucket, through all groups.
            shapes: What compression knows of the bucket; given only where `into` is a part of x.
            background: Return at once, with a Work to wait for.
            defer: The share may be computed later, when the next bucket is started (the reduction in split phases).
        """
        if shapes is not None:
            return self.sum(x, number, shapes, background=background)
        comm = self.comms[number % len(self.comms)]
        if defer:
            work = comm.deferred_reduce_scatter(into, x, self.op)
            if work is not None:
                return work
        return comm.reduce_scatter(into, x, self.op, async_op=background, reproducible=self.reproducible)

    def among_replicas(self, share: torch.Tensor) -> None:
        """Sum a reduced share over the ranks that keep the same one, in place. Collective over those."""
        if self.replicas is not None:
            self.replicas.all_reduce(share, self.op, reproducible=self.reproducible)

    def compressed(self, group: FlatGroup, number: int, key: object) -> Bucket | None:
        """The compression of a group's bucket, which is told the parameters in it; None without compression.

        Args:
            group: The parameters.
            number: Of the bucket in the group.
            key: What the compression remembers the bucket by from step to step.
        """
        if self.compression is None:
            return None
        return self.compression.bucket(key, [(offset, tuple(p.shape)) for p, offset in group.members(number)])
