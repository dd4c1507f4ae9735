"""Gradients: where a rank keeps them, and how buckets of them are reduced.

    gradients              a rank keeps                  reduced                several passes, then one reduction
    WholeGradients         all, in flat memory           at the end, or bucket  yes
                                                         by bucket
    ShardedGradients       its shares of the sums        bucket by bucket       no: `reduces_each_pass`

Which stage of ZeRO takes which is said in `mpitrain.shard.sharding`. The groups, buckets and shares that the methods
speak of are those of `mpitrain.shard.flat` and `mpitrain.layout.boxes.Flat`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from mpitrain.comm import Arena, Communicator, Work
from mpitrain.comm.compression import Bucket, Compression
from mpitrain.shard.flat import FlatGroup, adopt, numbered
from mpitrain.shard.placement import DEFERRING, slot_count


class Gradients(ABC):
    """The gradients of parameters, which are taken and reduced in buckets numbered through all groups.

    Methods that are not abstract do nothing where `start` takes the gradients from the parameters' `.grad`.

    A bucket is started when a backward pass has finished all its parameters, in the same order on every rank; `end`
    completes what was started.

    Attributes:
        groups: The parameters and where each lies.
        reduction: Over which ranks gradients are reduced, and how.
        reduces_each_pass: Whether every backward pass must be reduced, because no rank has room for all gradients.
        at_once: Flat tensors, one a group, that hold everything and may be reduced by one operation each at the end of
            backward; None where buckets must be started one by one.
        reduced: Called with the number of a bucket when this rank's share of it has been reduced in some pass, as far
            as that happens bucket by bucket.
    """

    groups: Sequence[FlatGroup]
    reduction: BucketReduction
    reduces_each_pass: bool
    at_once: list[torch.Tensor] | None
    reduced: Callable[[int], object] | None = None

    @property
    @abstractmethod
    def flat(self) -> list[torch.Tensor]:
        """What this rank keeps, one flat tensor a group: all gradients, or its shares of the reduced ones."""

    @abstractmethod
    def place(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Memory in the parameter's shape in which its next gradient can be computed, to become its `.grad`.

        None where something is there already; given away at most once a pass.
        """

    def arrived(self, parameter: nn.Parameter) -> None:
        """Autograd has finished the parameter's gradient in this backward pass."""
        return

    @abstractmethod
    def start(self, bucket: int, background: bool) -> Work | None:
        """Take a bucket's gradients and begin to reduce them; background: while backward goes on."""

    @abstractmethod
    def end(self, works: Sequence[Work | None]) -> None:
        """Complete the reductions started since the last `end`; works: what `start` returned for them."""

    @abstractmethod
    def zero(self) -> None:
        """Forget all gradients, for the next step."""

    def settle(self) -> None:
        """Take over what the parameters' `.grad` are now, with zeros where there is none."""
        return

    def scale(self, factor: float) -> None:
        """Multiply the reduced gradients, in place."""
        for flat in self.flat:
            flat.mul_(factor)

    @abstractmethod
    def own(self, group: int, lo: int, hi: int) -> torch.Tensor:
        """The reduced gradients [lo, hi) of a group's layout, which lie in one share of this rank; a view."""

    @abstractmethod
    def nbytes(self) -> tuple[int, int]:
        """Bytes of gradients, and of the buffers they are reduced in."""

    @abstractmethod
    def free(self) -> None:
        """Release the memory. Collective."""


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
        overlaps: Whether a core is free to reduce one bucket while backward makes the next.
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
            # The first operation makes the memory in which ranks meet: not beside the training, see FileLayout.
            work = comm.all_reduce(torch.zeros(1), async_op=True)
            assert work is not None
            work.wait()

    def sum(self, x: torch.Tensor, number: int, shapes: Bucket | None, *, background: bool) -> Work | None:
        """All-reduce a bucket in place.

        Args:
            x: The bucket's gradients, flat.
            number: Of the bucket, through all groups.
            shapes: What compression knows of the bucket; None to reduce it uncompressed.
            background: Return at once, with a Work to wait for.
        """
        return self.comms[number % len(self.comms)].all_reduce(
            x, self.op, self.algorithm, background, compression=shapes, reproducible=self.reproducible
        )

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's share of a bucket, a view."""
        length = x.numel() // self.comm.size
        return x[self.comm.rank * length : (self.comm.rank + 1) * length]

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


class WholeGradients(Gradients):
    """All gradients in flat arenas; each parameter's `.grad` is a view of its place there. Collective to make.

    The first gradient of a step is copied to its place as soon as it is complete, while it is still in the cache;
    autograd adds later ones there. The arenas are never cleared: that would cost a pass over them, and adding to the
    zeros another.

    Args:
        groups: The parameters and where each lies.
        reduction: Over which ranks gradients are reduced, and how.
        sharded: Reduce this rank's shares alone, as an optimizer with sharded states needs.
        dtype: In which gradients are added up, where it is not the parameters' own; `.grad` is then empty after
            backward.
    """

    reduces_each_pass = False

    def __init__(
        self, groups: Sequence[FlatGroup], reduction: BucketReduction, *, sharded: bool, dtype: torch.dtype | None
    ) -> None:
        self.groups, self.reduction, self.sharded = groups, reduction, sharded
        self._arenas = self._allocate(dtype)
        for flat in self.flat:
            flat.zero_()
        self._stale: set[nn.Parameter] = set()  # whose place in another dtype the next gradient overwrites
        self._given: set[nn.Parameter] = set()  # whose place holds a gradient that is not yet its `.grad`
        self._views: dict[nn.Parameter, tuple[torch.Tensor, bool]] = {}  # its place, and whether of another dtype
        for group, flat in zip(groups, self.flat, strict=True):
            for parameter, view in zip(group.parameters, group.views(flat), strict=True):
                self._views[parameter] = (view, flat.dtype != group.dtype)
        self._buckets = [b for g, group in enumerate(groups) for b in group.buckets(self._arenas[g].tensor)]
        self._compressed = [reduction.compressed(groups[g], b, (g, b)) for g, b in numbered(groups)]
        self.at_once = self.flat if not sharded and reduction.compression is None and not reduction.overlaps else None

    def _allocate(self, dtype: torch.dtype | None) -> list[Arena]:
        """Memory for each group."""
        return [self.reduction.comm.arena(g.layout.numel, dtype or g.dtype, g.device) for g in self.groups]

    @property
    def flat(self) -> list[torch.Tensor]:
        return [arena.tensor for arena in self._arenas]

    def place(self, parameter: nn.Parameter) -> torch.Tensor | None:
        view, apart = self._views[parameter]
        if apart or parameter.grad is not None or parameter in self._given:
            return None
        self._given.add(parameter)
        return view.view_as(view)  # a tensor of its own: autograd keeps it only if nobody else does

    def arrived(self, parameter: nn.Parameter) -> None:
        view, apart = self._views[parameter]
        self._given.discard(parameter)
        if not apart:
            adopt(parameter, view)
        elif parameter.grad is not None:
            if parameter in self._stale:
                self._stale.remove(parameter)
                view.copy_(parameter.grad)
            else:
                view.add_(parameter.grad)
            parameter.grad = None

    def start(self, bucket: int, background: bool) -> Work | None:
        x, shapes = self._buckets[bucket], self._compressed[bucket]
        if self.sharded:
            return self.reduction.scatter(self.reduction.own(x), x, bucket, shapes, background=background, defer=False)
        return self.reduction.sum(x, bucket, shapes, background=background)

    def end(self, works: Sequence[Work | None]) -> None:
        for work in filter(None, works):
            work.wait()
        for bucket in self._buckets:
            self.reduction.among_replicas(self.reduction.own(bucket))

    def zero(self) -> None:
        self._given.clear()
        for parameter, (_, apart) in self._views.items():
            parameter.grad = None
            if apart:
                self._stale.add(parameter)

    def settle(self) -> None:
        for parameter, (view, apart) in self._views.items():
            self.arrived(parameter)
            if apart and parameter in self._stale:
                self._stale.remove(parameter)
                view.zero_()

    def own(self, group: int, lo: int, hi: int) -> torch.Tensor:
        return self._arenas[group].tensor[lo:hi]

    def nbytes(self) -> tuple[int, int]:
        return sum(flat.nbytes for flat in self.flat), 0

    def free(self) -> None:
        for parameter, (view, _) in self._views.items():
            if parameter.grad is not None and parameter.grad.data_ptr() == view.data_ptr():
                parameter.grad = None
        for arena in self._arenas:
            arena.free()


_UNDER_WAY = 2  # reductions that may be under way at once


class ShardedGradients(Gradients):
    """This rank's shares of the reduced gradients; a parameter's whole gradient lasts until its bucket is reduced.

    A bucket is copied into a slot, which is an arena as long as the longest bucket, and reduced from there. So the
    memory beside the shares is constant: one slot; two where communication overlaps backward; three where a bucket is
    reduced after the next one was made (in split phases), so that a rank which is a little late keeps nobody waiting.

        backward    bucket 0 | bucket 1 | bucket 2 | bucket 3 ...
        slot        0          1          2          0              with three slots

    The first backward pass of a step reduces each bucket into its share; further passes reduce it within the slot and
    add the result to the share. Collective to make.

    Args:
        groups: The parameters and where each lies.
        reduction: Over which ranks gradients are reduced, and how.
        dtype: In which gradients are added up and reduced; None: the parameters' own.
        taken: Called with the number of a bucket in its group when its parameters' gradients have been copied.
    """

    reduces_each_pass = True
    at_once = None

    def __init__(
        self,
        groups: Sequence[FlatGroup],
        reduction: BucketReduction,
        *,
        dtype: torch.dtype | None = None,
        taken: Callable[[int], None] | None = None,
    ) -> None:
        self.groups, self.reduction, self._taken = groups, reduction, taken
        self._numbers = numbered(groups)
        self._compressed = [reduction.compressed(groups[g], b, (g, b)) for g, b in self._numbers]
        parts = groups[0].layout.parts if groups else 1
        self._shards = [torch.zeros(g.layout.numel // parts, dtype=dtype or g.dtype, device=g.device) for g in groups]
        longest = [max((hi - lo for lo, hi in pairwise(g.layout.bounds)), default=0) for g in groups]
        self._slots = [_slots(reduction, n, s.dtype, s.device) for n, s in zip(longest, self._shards, strict=True)]
        # by slot, the last reduction that reads it: to be released before the slot is written again
        self._readers: list[list[Work | None]] = [[None] * len(slots) for slots in self._slots]
        self._stale: set[int] = set()  # buckets whose shares the next reduction overwrites
        self._started: list[tuple[int, torch.Tensor, Work]] = []  # (bucket, reduced share, work) not yet added
        self._next = 0  # the bucket to be started next
        self._given: set[nn.Parameter] = set()  # whose place in a slot holds a gradient that is not yet its `.grad`
        placed = [groups[g].members(b) for g, b in self._numbers]
        self._members = [[p for p, _ in of] for of in placed]
        self._where = {p: (bucket, n) for bucket, of in enumerate(self._members) for n, p in enumerate(of)}
        self._views = [_Slot.of(self._slot(bucket), of) for bucket, of in enumerate(placed)]

    @property
    def flat(self) -> list[torch.Tensor]:
        return self._shards

    def place(self, parameter: nn.Parameter) -> torch.Tensor | None:
        bucket, number = self._where[parameter]
        view = self._views[bucket].views[number]
        if bucket != self._next or view.dtype != parameter.dtype:
            return None
        if parameter.grad is not None or parameter in self._given:
            return None
        if self.reduction.replicas is not None and len(self._started) >= _UNDER_WAY:
            return None  # making room is collective over the replicas, and not every rank's data may come by here
        self._make_room(bucket)
        self._given.add(parameter)
        return view.view_as(view)  # a tensor of its own: autograd keeps it only if nobody else does

    def start(self, bucket: int, background: bool) -> Work | None:
        g, b = self._numbers[bucket]
        slots = self._slots[g]
        self._make_room(bucket)
        self._next = bucket + 1
        slot = self._slot(bucket)
        self._fill(bucket, self._views[bucket])
        if self._taken is not None:
            self._taken(b)
        shapes = self._compressed[bucket]
        share = self._share(bucket) if bucket in self._stale and shapes is None else self.reduction.own(slot)
        defer = len(slots) == DEFERRING
        work = self.reduction.scatter(share, slot, bucket, shapes, background=background, defer=defer)
        if work is None:
            self._collect(bucket, share)
        else:
            self._started.append((bucket, share, work))
            self._readers[g][bucket % len(slots)] = work
        return work

    def _slot(self, bucket: int) -> torch.Tensor:
        """The bucket's slot, as far as the bucket reaches."""
        g, b = self._numbers[bucket]
        lo, hi = self.groups[g].layout.bounds[b : b + 2]
        return self._slots[g][bucket % len(self._slots[g])].tensor[: hi - lo]

    def _make_room(self, bucket: int) -> None:
        """Complete older reductions until the slot of the bucket to be started next may be written."""
        while len(self._started) >= _UNDER_WAY:
            self._collect(*self._started.pop(0))
        readers = self._readers[self._numbers[bucket][0]]
        reader, readers[bucket % len(readers)] = readers[bucket % len(readers)], None
        if reader is not None:
            reader.release()

    def _fill(self, bucket: int, slot: _Slot) -> None:
        """Copy a bucket's gradients into the slot, with zeros for missing ones and gaps, and drop them."""
        empty, into, of = list(slot.gaps), [], []
        for parameter, view in zip(self._members[bucket], slot.views, strict=True):
            gradient = parameter.grad
            if gradient is None:
                empty.append(view)
                continue
            if gradient.data_ptr() != view.data_ptr():
                into.append(view)
                of.append(gradient)
            parameter.grad = None
        self._given.difference_update(self._members[bucket])
        if into:
            torch._foreach_copy_(into, of)
        if empty:
            torch._foreach_zero_(empty)

    def _collect(self, bucket: int, share: torch.Tensor, work: Work | None = None) -> None:
        """Put the reduced share of a bucket where this rank keeps it, or add it there."""
        if work is not None:
            work.wait()
        self.reduction.among_replicas(share)
        kept = self._share(bucket)
        if bucket not in self._stale:
            kept.add_(share)
        elif share.data_ptr() != kept.data_ptr():
            kept.copy_(share)
        self._stale.discard(bucket)
        if self.reduced is not None:
            self.reduced(bucket)

    def _share(self, bucket: int) -> torch.Tensor:
        """Where this rank keeps its share of a bucket."""
        g, b = self._numbers[bucket]
        layout = self.groups[g].layout
        return self._shards[g][layout.bounds[b] // layout.parts : layout.bounds[b + 1] // layout.parts]

    def end(self, works: Sequence[Work | None]) -> None:
        for started in self._started:
            self._collect(*started)
        self._started.clear()
        self._next = 0

    def zero(self) -> None:
        self._given.clear()
        self._next = 0
        for group in self.groups:
            for parameter in group.parameters:
                parameter.grad = None
        self._stale = set(range(len(self._numbers)))  # every reduction takes all buckets, so none stays stale

    def own(self, group: int, lo: int, hi: int) -> torch.Tensor:
        begin = self.groups[group].in_shares(lo, self.reduction.comm.rank)
        return self._shards[group][begin : begin + hi - lo]

    def nbytes(self) -> tuple[int, int]:
        return sum(s.nbytes for s in self._shards), sum(s.tensor.nbytes for slots in self._slots for s in slots)

    def free(self) -> None:
        for readers in self._readers:
            for reader in filter(None, readers):
                reader.release()
        for slots in self._slots:
            for slot in slots:
                slot.free()


class _Slot(NamedTuple):
    """A slot as a bucket sees it: a view for each of its parameters, in order, and the gaps between and after them."""

    views: list[torch.Tensor]
    gaps: list[torch.Tensor]

    @staticmethod
    def of(flat: torch.Tensor, members: Sequence[tuple[nn.Parameter, int]]) -> _Slot:
        """The views of a bucket whose members begin at their offsets of `flat`."""
        views, gaps, at = [], [], 0
        for parameter, begin in members:
            gaps.append(flat[at:begin])
            at = begin + parameter.numel()
            views.append(flat[begin:at].view(parameter.shape))
        gaps.append(flat[at:])
        return _Slot(views, [gap for gap in gaps if gap.numel()])


def _slots(reduction: BucketReduction, numel: int, dtype: torch.dtype, device: torch.device) -> list[Arena]:
    """The slots of one group, of `numel` elements each. Collective."""
    comm = reduction.comm
    first = comm.arena(numel, dtype, device)
    in_order = reduction.compression is not None or reduction.reproducible  # each bucket by itself, in no split phases
    count = slot_count(reduction.overlaps, in_order, first.kind == "shared", comm.num_nodes)
    return [first, *(comm.arena(numel, dtype, device) for _ in range(count - 1))]
