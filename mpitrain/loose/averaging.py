"""Groups of ranks that train independently and average their parameters periodically.

    data-parallel ranks   0 1 | 2 3 | 4 5          parallel.local_group = 2: three groups, each one replica
    a global batch of 7   0-2 | 3-4 | 5-6          contiguous, nearly equal parts of the batch of parallel.mode sync

If a replica has pipeline stages or tensor ranks, each data-parallel rank above is (stages x tensor ranks) ranks.

An averaging round is a number of steps that the groups take alone. Let theta_i be the parameters of group i, w_i its
fraction of each global batch (the w_i add up to 1) and A the anchor, the parameters that all groups share:

    plain                  theta_i <- sum_i w_i theta_i                              at the end of each round
    with an anchor         D <- sum_i w_i (theta_i - A);  A <- outer(A, D);  theta_i <- A          at the same time
    overlapping            at the start of a round, with T_i <- theta_i:  start D <- sum_i w_i (T_i - A)
                           at its end:                          A <- outer(A, D);  theta_i <- A + (theta_i - T_i)

An anchor is used with an outer optimizer or a compression, which then works on the differences. With overlapping, each
round's differences are applied one round late, and each once; at the end of training, the remaining ones are applied
at once. Between two rounds the model has the values of A, which are evaluated and saved; theta_i is kept beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch

from mpitrain.comm import Communicator, Work
from mpitrain.comm.compression import Bucket
from mpitrain.config.parallel import ParallelSection
from mpitrain.errors import refusal
from mpitrain.layout.boxes import split
from mpitrain.layout.mesh import axes_of, shape_of

_MULTIPLE = 16  # slices begin at multiples of this number of elements


@dataclass(frozen=True)
class Grouping:
    """This rank's group, one of several groups of equal size.

    Attributes:
        count: Number of groups.
        number: Number of this rank's group.
        each: Number of data-parallel ranks in a group.
        batch: Number of samples of a global batch.
    """

    count: int
    number: int
    each: int
    batch: int

    @staticmethod
    def of(world: Communicator, parallel: ParallelSection, batch: int) -> Grouping:
        """Return the group of this rank, as set by parallel.local_group.

        Args:
            world: Communicator of all ranks.
            parallel: Settings of the parallel section.
            batch: Number of samples of a global batch.

        Raises:
            InputError: On all ranks, if the group size does not divide the data-parallel ranks, there is only one
                group, or a group would get no sample of a batch.
        """
        shape, model = shape_of(axes_of(parallel), world.size), parallel.ranks_per_data
        data = prod(shape.values()) // model
        if parallel.local_group == "node":
            each, number = _of_node(world, model), list(dict.fromkeys(world.nodes)).index(world.node)
        else:
            each, number = parallel.local_group, world.rank // (parallel.local_group * model)
        if data % each:
            raise refusal(
                f"parallel.local_group {each} does not divide the {data} data-parallel ranks; give a divisor of {data}"
            )
        count = data // each
        if count == 1:
            raise refusal(
                f"parallel.mode local with parallel.local_group {parallel.local_group} makes one group of all {data} "
                "data-parallel ranks, which is the same as parallel.mode sync; use that, or smaller groups"
            )
        if batch < count:
            raise refusal(
                f"train.batch {batch} has no sample for some of the {count} groups of parallel.mode local; set "
                f"it to at least {count}"
            )
        return Grouping(count, number, each, batch)

    def part(self, size: int) -> tuple[int, int]:
        """Return the bounds [first, last) of this group's samples in a global batch of `size` samples."""
        bounds = split(size, self.count)
        return bounds[self.number], bounds[self.number + 1]

    @property
    def weight(self) -> float:
        """Fraction of a global batch that this group has, which is its weight in averages."""
        first, last = self.part(self.batch)
        return (last - first) / self.batch


def _of_node(world: Communicator, model: int) -> int:
    """Return the data-parallel ranks on each node. Raises InputError if nodes differ, or a replica spans nodes."""
    counts = {world.nodes.count(node) for node in world.nodes}
    if len(counts) > 1 or max(counts) % model:
        shown = ", ".join(map(str, sorted(counts)))
        raise refusal(
            "parallel.local_group node needs the same number of ranks on every node, a multiple of the "
            f"{model} that the model is divided over, but the nodes have {shown}; start as many ranks on every "
            "node, or set parallel.local_group to a number"
        )
    return max(counts) // model


class FlatSlice:
    """This rank's slice of concatenated tensors, which it averages with the other groups.

    Tensors that several ranks of a group have are divided into equal slices. Each of these ranks averages its own slice
    with the ranks at the same position in the other groups, and then the slices are gathered inside the group:

        group 0, rank 0   [A] b     all-reduce of A with group 1's rank 0      A B
                 rank 1    a [B]    all-reduce of B with group 1's rank 1      A B    all-gather in the group

    Parameters are therefore sent between groups once for each group, not once for each rank.

    Args:
        tensors: Tensors of one dtype on one device, with equal values on the ranks of `holders`.
        holders: Communicator of the ranks that have all these tensors; None for this rank alone.

    Attributes:
        length: Number of elements of each rank's slice; elements after the last tensor are zeros.
        intervals: Tuples (tensor number, first, last, place): elements [first, last) of the tensor start at `place` of
            the slice.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], holders: Communicator | None) -> None:
        self._tensors, self._holders = list(tensors), holders if holders is not None and holders.size > 1 else None
        total = sum(t.numel() for t in self._tensors)
        ranks, rank = (self._holders.size, self._holders.rank) if self._holders is not None else (1, 0)
        self.length = -(-total // (ranks * _MULTIPLE)) * _MULTIPLE
        self.intervals = list(self._within(rank * self.length, (rank + 1) * self.length))
        self._everything = list(self._within(0, ranks * self.length))

    def _within(self, lo: int, hi: int) -> Iterable[tuple[int, int, int, int]]:
        """Yield the parts of tensors in elements [lo, hi) of the whole, as in `intervals`, with places from lo."""
        begin = 0
        for number, tensor in enumerate(self._tensors):
            first, last = max(lo, begin), min(hi, begin + tensor.numel())
            if first < last:
                yield number, first - begin, last - begin, first - lo
            begin += tensor.numel()

    def empty(self) -> torch.Tensor:
        """Return zeros of the slice's length, dtype and device."""
        return torch.zeros(self.length, dtype=self._tensors[0].dtype, device=self._tensors[0].device)

    @torch.no_grad()
    def read(self) -> torch.Tensor:
        """Return a copy of the slice's present values."""
        values = self.empty()
        for number, first, last, place in self.intervals:
            tensor = self._tensors[number].detach().contiguous().view(-1)
            values[place : place + last - first].copy_(tensor[first:last])
        return values

    @torch.no_grad()
    def write(self, values: torch.Tensor) -> None:
        """Write the slices of all holders into the tensors. Collective over the holders.

        Args:
            values: Values of this rank's slice, `length` elements.
        """
        whole, intervals = values, self.intervals
        if self._holders is not None:
            whole, intervals = values.new_empty(self._holders.size * self.length), self._everything
            self._holders.all_gather(whole, values)
        for number, first, last, place in intervals:
            tensor = self._tensors[number].detach()
            dense = tensor if tensor.is_contiguous() else tensor.contiguous()
            dense.view(-1)[first:last].copy_(whole[place : place + last - first])
            if dense is not tensor:
                tensor.copy_(dense)


class OuterOptimizer:
    """Optimizer of the parameters that all groups share. Its momentum covers this rank's slices.

    The notation is that of Douillard et al. 2023 (DiLoCo). A round starts at the parameters theta, the groups end it
    at theta_i, and the outer gradient is theta - mean(theta_i). `step` gets its negative, the mean difference.

        average    theta + mean difference, which is mean(theta_i): local SGD (Stich 2019)
        nesterov   one step of SGD with Nesterov momentum, as computed by `torch.optim.SGD(nesterov=True)`

    Args:
        parallel: Settings outer, outer_lr and outer_momentum.
        slices: One tensor for each slice, which gives its length, dtype and device.

    Attributes:
        momenta: Momentum of each slice, equal in all groups; empty without momentum.
    """

    def __init__(self, parallel: ParallelSection, slices: Sequence[torch.Tensor]) -> None:
        self.momenta = [torch.zeros_like(s) for s in slices] if parallel.outer == "nesterov" else []
        self._lr, self._momentum = parallel.outer_lr, parallel.outer_momentum

    def step(self, number: int, anchor: torch.Tensor, difference: torch.Tensor) -> None:
        """Update a slice of the shared parameters in place.

        Args:
            number: Number of the slice.
            anchor: Shared parameters in the slice.
            difference: Mean difference of the groups' parameters from the shared ones; overwritten.
        """
        if not self.momenta:
            anchor.add_(difference)
            return
        gradient, buffer = difference.neg_(), self.momenta[number]
        buffer.mul_(self._momentum).add_(gradient)
        anchor.add_(gradient.add_(buffer, alpha=self._momentum), alpha=-self._lr)


class Averaging:
    """Averages of a group's parameters with those of the other groups. Every rank averages its own slices.

    Args:
        slices: Slices of the trained parameters.
        peers: Communicator of the ranks that have the same slices in the other groups. It must not be used for anything
            else during a round.
        weight: Fraction of a global batch that this group has.
        parallel: Settings of parallel.mode local.
        buckets: Compression of each slice's differences; empty for none.
        reproducible: If true, the order of summation is the same for every element of a slice.
        on_write: Function called after parameters were written, to show them to the group. Collective over the group.

    Attributes:
        outer: Optimizer of the shared parameters.
        ahead: With overlapping, this group's own parameters at the end of the last round, one tensor for each slice;
            None if they equal the shared ones.
    """

    def __init__(
        self,
        slices: Sequence[FlatSlice],
        peers: Communicator,
        weight: float,
        parallel: ParallelSection,
        buckets: Sequence[Bucket] = (),
        *,
        reproducible: bool,
        on_write: Callable[[], None],
    ) -> None:
        self.slices, self.outer = list(slices), OuterOptimizer(parallel, [s.empty() for s in slices])
        self.ahead: list[torch.Tensor] | None = None
        self._peers, self._weight, self._on_write = peers, weight, on_write
        self._buckets: list[Bucket | None] = list(buckets) or [None] * len(self.slices)
        self._overlap, self._reproducible = parallel.overlap, reproducible
        self._anchored = parallel.overlap or bool(buckets) or bool(self.outer.momenta)
        self._anchors: list[torch.Tensor] = []
        self._differences: list[torch.Tensor] = []
        self._works: list[Work | None] = []

    @torch.no_grad()
    def begin(self) -> None:
        """Begin a round. Collective."""
        if self._anchored and not self._anchors:  # the model has the shared parameters now
            self._anchors = [s.read() for s in self.slices]
        if self.ahead is not None:
            self._set_parameters(self.ahead)
            self._start(self.ahead, background=True)

    @torch.no_grad()
    def end(self, *, final: bool) -> None:
        """End a round. Collective.

        Afterwards the models of all groups have equal parameters.

        Args:
            final: True if no further round follows.
        """
        theta = [s.read() for s in self.slices]
        if not self._overlap:
            if self._anchored:
                self._start(theta, background=False)
                self._finish()
                theta = self._anchors
            else:
                for values in theta:
                    self._sum(values.mul_(self._weight), None, background=False)
            self._set_parameters(theta)
            return
        if self.ahead is not None:
            self._finish()
            for now, before, anchor in zip(theta, self.ahead, self._anchors, strict=True):
                now.sub_(before).add_(anchor)
        self.ahead = theta
        if final:
            self._start(theta, background=False)
            self._finish()
            self.ahead = None
        self._set_parameters(self._anchors)

    def reset(self) -> None:
        """Discard the state of earlier averages, after other parameters were loaded."""
        self._anchors, self.ahead = [], None

    def _start(self, theta: Sequence[torch.Tensor], *, background: bool) -> None:
        """Start summing the groups' weighted differences from the shared parameters."""
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
        """Wait for the sums of the differences, and let the outer optimizer use them."""
        for work in filter(None, self._works):
            work.wait()
        for number, (anchor, difference) in enumerate(zip(self._anchors, self._differences, strict=True)):
            self.outer.step(number, anchor, difference)
        self._works, self._differences = [], []

    def _set_parameters(self, values: Sequence[torch.Tensor]) -> None:
        """Write the slices into the model, and show them to the group."""
        for part, tensor in zip(self.slices, values, strict=True):
            part.write(tensor)
        self._on_write()

    def nbytes(self) -> int:
        """Return the bytes of the state kept between rounds."""
        tensors = [*self._anchors, *self._differences, *(self.ahead or []), *self.outer.momenta]
        return sum(tensor.nbytes for tensor in tensors)

    def bytes_sent(self) -> float:
        """Return the bytes that this rank sends for one average, computed by formula."""
        ranks = self._peers.size
        total = 0.0
        for part, bucket in zip(self.slices, self._buckets, strict=True):
            like = part.empty()
            if bucket is None:
                total += 2 * (ranks - 1) / ranks * like.numel() * like.element_size()
                continue
            total += bucket.compression.bytes_sent(self._peers.nodes, like.numel(), like.dtype, bucket.shapes)
        return total
