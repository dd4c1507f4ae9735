"""The reduction of one bucket of gradients: over which ranks and communicators, by which algorithm, how compressed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from mpitrain.comm import Communicator, Work
from mpitrain.comm.compression import Bucket, Compression
from mpitrain.shard.flat import FlatGroup


class BucketReduction:
    """Options and communicators of the reduction of every bucket.

    Args:
        comms: Communicators over the same ranks; buckets use them in turn.
        op: "sum" or "avg".
        algorithm: Algorithm of the all-reduce; "auto" to choose it by size and memory.
        compression: Compression of gradients during communication; None to send them uncompressed.
        replicas: Ranks that keep the same shares as this one, over which a reduced share is summed once more.
        reproducible: If true, add in an order that does not depend on the number of ranks.

    Attributes:
        comm: First of the communicators, for operations that are not done bucket by bucket.
        overlaps: If true, a core is free to reduce one bucket while backward computes the next.
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
        self.overlaps = self.comm.overlaps
        self.compression, self.replicas, self.reproducible = compression, replicas, reproducible
        for comm in self.comms if self.overlaps else ():
            # The first operation allocates shared memory; do it now, not in the background of training: see FileLayout.
            work = comm.all_reduce(torch.zeros(1), async_op=True)
            assert work is not None
            work.wait()

    def sum(self, x: torch.Tensor, number: int, shapes: Bucket | None, *, background: bool) -> Work | None:
        """All-reduce a bucket in place. Collective.

        Args:
            x: Gradients of the bucket, flat.
            number: Number of the bucket, counted through all groups.
            shapes: Compression of the bucket; None to reduce it uncompressed.
            background: If true, return immediately with a Work to wait for.
        """
        return self.comms[number % len(self.comms)].all_reduce(
            x, self.op, self.algorithm, background, compression=shapes, reproducible=self.reproducible
        )

    def local_share(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of a bucket as a view."""
        length = x.numel() // self.comm.size
        return x[self.comm.rank * length : (self.comm.rank + 1) * length]

    def scatter(
        self, into: torch.Tensor, x: torch.Tensor, number: int, shapes: Bucket | None, *, background: bool, defer: bool
    ) -> Work | None:
        """Reduce a bucket so that this rank gets its share of the result. The contents of `x` are lost. Collective.

        Args:
            into: Memory for the share: the part of `x` that is this rank's share, or memory of the same length
                elsewhere.
            x: Gradients of the bucket, flat.
            number: Number of the bucket, counted through all groups.
            shapes: Compression of the bucket; only allowed if `into` is a part of `x`. None to reduce it uncompressed.
            background: If true, return immediately with a Work to wait for.
            defer: If true, the share may be computed later, when the next bucket is started (a reduction in split
                phases).
        """
        if shapes is not None:
            return self.sum(x, number, replace(shapes, whole=False), background=background)
        comm = self.comms[number % len(self.comms)]
        if defer:
            work = comm.deferred_reduce_scatter(into, x, self.op)
            if work is not None:
                return work
        return comm.reduce_scatter(into, x, self.op, async_op=background, reproducible=self.reproducible)

    def reduce_replicas(self, share: torch.Tensor, number: int) -> None:
        """Sum a reduced share in place over the ranks that keep the same share. Collective over these ranks.

        Args:
            share: The share.
            number: Number of the bucket, counted through all groups.
        """
        if self.replicas is None:
            return
        compressed = self.compression.bucket((number,)) if self.compression and self.compression.two_level else None
        reproducible = self.reproducible and compressed is None
        self.replicas.all_reduce(share, self.op, compression=compressed, reproducible=reproducible)

    def compression_of(self, group: FlatGroup, number: int, key: object) -> Bucket | None:
        """Return the compression of a group's bucket, which gets the shapes of its parameters; None without
        compression.

        Args:
            group: Group of parameters.
            number: Number of the bucket in the group.
            key: Key under which the compression keeps its state of the bucket from step to step.
        """
        if self.compression is None or (self.compression.two_level and self.replicas is not None):
            return None  # compressed between nodes alone, see `reduce_replicas`
        return self.compression.bucket(key, [(offset, tuple(p.shape)) for p, offset in group.members(number)])
