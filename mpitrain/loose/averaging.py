"""When groups of ranks average what they trained apart, and what each of them then goes on from.

A period is some steps that the groups take by themselves. With theta_i the parameters of group i, w_i its part of each
global batch (the w_i add up to 1) and A what all groups share:

    plain                  theta_i <- sum_i w_i theta_i                              at the end of each period
    with an anchor         D <- sum_i w_i (theta_i - A);  A <- outer(A, D);  theta_i <- A          at the same time
    overlapping            as a period begins, with T_i <- theta_i:       D <- sum_i w_i (T_i - A) is begun
                           as it ends:                     A <- outer(A, D);  theta_i <- A + (theta_i - T_i)

There is an anchor where there is an outer optimizer or a compression, which then works on the differences. Overlapping,
each period's differences are used one period late, and each once; at the end of training all that is left is used at
once. From the end of a period to the beginning of the next the model then holds A, which is what is evaluated and
saved; theta_i is kept beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mpitrain.comm import Communicator, Work
from mpitrain.comm.compression import Bucket
from mpitrain.loose.flat_slice import FlatSlice
from mpitrain.loose.outer import OuterAverage, OuterOptimizer


class Averaging:
    """The averages of a group's parameters with those of other groups. Every rank averages its own slices.

    Args:
        slices: Of the parameters that are trained.
        peers: The ranks that have the same slices in the other groups. Nothing else may use this communicator while a
            period lasts.
        weight: This group's part of a global batch.
        outer: What becomes of the mean difference.
        buckets: Of each slice, the compression of its differences; empty for none.
        overlap: Average while the next period is trained.
        reproducible: Average in an order that does not depend on where in a slice an element is.
        wrote: Called when parameters were written, to show them to the group. Collective in it.

    Attributes:
        ahead: Overlapping, this group's own parameters at the end of the last period, one tensor a slice; None where
            they are the shared ones.
    """

    def __init__(
        self,
        slices: Sequence[FlatSlice],
        peers: Communicator,
        weight: float,
        outer: OuterOptimizer,
        buckets: Sequence[Bucket] = (),
        *,
        overlap: bool,
        reproducible: bool,
        wrote: Callable[[], None],
    ) -> None:
        self.slices, self.outer = list(slices), outer
        self.ahead: list[torch.Tensor] | None = None
        self._peers, self._weight, self._wrote = peers, weight, wrote
        self._buckets: list[Bucket | None] = list(buckets) or [None] * len(self.slices)
        self._overlap, self._reproducible = overlap, reproducible
        self._anchored = overlap or bool(buckets) or not isinstance(outer, OuterAverage)
        self._anchors: list[torch.Tensor] = []
        self._differences: list[torch.Tensor] = []
        self._works: list[Work | None] = []

    @torch.no_grad()
    def begin(self) -> None:
        """A period begins. Collective."""
        if self._anchored and not self._anchors:  # all groups are alike now, or the model holds what they share
            self._anchors = [s.read() for s in self.slices]
        if self.ahead is not None:
            self._put(self.ahead)
            self._start(self.ahead, background=True)

    @torch.no_grad()
    def end(self, *, final: bool) -> None:
        """A period has ended. Collective.

        Afterwards the model holds the same in all groups. final: no further period follows.
        """
        if not self._overlap:
            self._average()
            return
        theta = [s.read() for s in self.slices]
        if self.ahead is not None:
            self._finish()
            for now, before, anchor in zip(theta, self.ahead, self._anchors, strict=True):
                now.sub_(before).add_(anchor)
        self.ahead = theta
        if final:
            self._start(theta, background=False)
            self._finish()
            self.ahead = None
        self._put(self._anchors)

    def forget(self) -> None:
        """Other parameters were loaded: what was averaged before does not count any more."""
        self._anchors, self.ahead = [], None

    def _average(self) -> None:
        """Average at once."""
        theta = [s.read() for s in self.slices]
        if self._anchored:
            self._start(theta, background=False)
            self._finish()
            theta = self._anchors
        else:
            for values in theta:
                self._sum(values.mul_(self._weight), None, background=False)
        self._put(theta)

    def _start(self, theta: Sequence[torch.Tensor], *, background: bool) -> None:
        """Begin to sum the groups' weighted differences from what they share."""
        pairs = zip(theta, self._anchors, strict=True)
        self._differences = [(values - anchor).mul_(self._weight) for values, anchor in pairs]
        self._works = [
            self._sum(x, bucket, background=background)
            for x, bucket in zip(self._differences, self._buckets, strict=True)
        ]

    def _sum(self, x: torch.Tensor, bucket: Bucket | None, *, background: bool) -> Work | None:
        """Sum over the groups, in place."""
        return self._peers.all_reduce(
            x, "sum", async_op=background, compression=bucket, reproducible=self._reproducible and bucket is None
        )

    def _finish(self) -> None:
        """Let the outer optimizer use the differences, once they are summed."""
        for work in self._works:
            if work is not None:
                work.wait()
        for number, (anchor, difference) in enumerate(zip(self._anchors, self._differences, strict=True)):
            self.outer.step(number, anchor, difference)
        self._works, self._differences = [], []

    def _put(self, values: Sequence[torch.Tensor]) -> None:
        """Write the slices into the model, and show them to the group."""
        for part, tensor in zip(self.slices, values, strict=True):
            part.write(tensor)
        self._wrote()

    def nbytes(self) -> int:
        """Bytes of what is kept from period to period."""
        kept = [*self._anchors, *self._differences, *(self.ahead or []), *self.outer.momenta]
        return sum(tensor.nbytes for tensor in kept)

    def bytes_sent(self) -> float:
        """Bytes that this rank sends for one average, by formula."""
        ranks = self._peers.size
        total = 0.0
        for part, bucket in zip(self.slices, self._buckets, strict=True):
            like = part.empty()
            if bucket is None:
                total += 2 * (ranks - 1) / ranks * like.numel() * like.element_size()
                continue
            nbytes = bucket.compression.bytes_on_wire(like.numel(), like.dtype, bucket.shapes)
            total += nbytes * (ranks - 1) * (1 if bucket.compression.name == "topk" else 2 / ranks)
        return total
