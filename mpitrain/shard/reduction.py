"""How a bucket of gradients is reduced: over which ranks, with which operation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpitrain.comm import Arena, Communicator, Work
from mpitrain.comm.compression import Bucket, Compression
from mpitrain.shard.flat import FlatGroup


class Reduction:
    """How a bucket is reduced: over which ranks, with which operation.

    comms: communicators over the same ranks, used in turn. replicas: ranks that keep the same shares as this one,
    over which a share is reduced further.
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
        self.compression, self.replicas, self.reproducible = compression, replicas, reproducible

    @property
    def comm(self) -> Communicator:
        return self.comms[0]

    @property
    def overlaps(self) -> bool:
        return self.comm.overlaps

    def sum(self, x: torch.Tensor, number: int, shapes: Bucket | None, *, background: bool) -> Work | None:
        """All-reduce a bucket, the number-th, in place."""
        comm = self.comms[number % len(self.comms)]
        return comm.all_reduce(
            x, self.op, self.algorithm, background, compression=shapes, reproducible=self.reproducible
        )

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's share of a bucket."""
        length = x.numel() // self.comm.size
        return x[self.comm.rank * length : (self.comm.rank + 1) * length]

    def lags(self, arena: Arena) -> bool:
        """Whether buckets in such an arena can be reduced one behind the other (see `runtime.split_phase`)."""
        plain = self.compression is None and not self.reproducible and not self.overlaps
        return plain and arena.kind == "shared" and self.comm.num_nodes == 1

    def scatter(
        self, into: torch.Tensor, x: torch.Tensor, number: int, shapes: Bucket | None, *, background: bool, lag: bool
    ) -> Work | None:
        """Reduce this rank's share of a bucket, `into` being that share or other memory; x becomes meaningless.

        shapes: only where `into` is that share. lag: the reduction may be one behind.
        """
        if shapes is not None:
            return self.sum(x, number, shapes, background=background)
        comm = self.comms[number % len(self.comms)]
        if lag:
            work = comm.lagging_reduce_scatter(into, x, self.op)
            if work is not None:
                return work
        return comm.reduce_scatter(into, x, self.op, async_op=background, reproducible=self.reproducible)

    def among_replicas(self, share: torch.Tensor) -> None:
        if self.replicas is not None:
            self.replicas.all_reduce(share, self.op, reproducible=self.reproducible)

    def compressed(self, group: FlatGroup, number: int, key: object) -> Bucket | None:
        """The compression of a bucket, which knows the parameters in it."""
        if self.compression is None:
            return None
        layout = group.layout
        shapes = [
            (place.offset - layout.bounds[number], tuple(p.shape))
            for place, p in zip(layout.places, group.parameters, strict=True)
            if place.bucket == number
        ]
        return self.compression.bucket(key, shapes)
