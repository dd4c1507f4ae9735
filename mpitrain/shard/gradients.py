"""Gradients: where a rank keeps them, and how buckets of them are reduced.

    gradients              a rank keeps                  reduced                several passes, then one reduction
    WholeGradients         all, in flat memory           at the end, or bucket  yes
                                                         by bucket
    ShardedGradients       its shares of the sums        bucket by bucket       no: `reduces_each_pass`

`mpitrain.shard.sharding` lists which stage of ZeRO uses which class. Groups, buckets and shares are defined in
`mpitrain.shard.flat` and `mpitrain.layout.boxes.Flat`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle, pairwise
from typing import NamedTuple

import torch
from torch import nn

from mpitrain.comm import Arena, Work
from mpitrain.shard.bucket_reduction import BucketReduction
from mpitrain.shard.flat import FlatGroup, bucket_indices, move_gradient
from mpitrain.shard.placement import DEFERRING, slot_count

_SMALL = 1 << 14  # elements of a gradient that may stay outside its place until backward has ended


class Gradients(ABC):
    """Gradients of parameters in buckets, which are numbered through all groups.

    A bucket is started when a backward pass has finished all its parameters, in the same order on every rank. `end`
    completes the reductions that were started. `mark_ready` and `copy_in` do nothing in subclasses whose `start` takes
    the gradients from the parameters' `.grad`.

    Attributes:
        groups: Parameters and their places in flat memory.
        reduction: Ranks over which gradients are reduced, and the options of the reduction.
        reduces_each_pass: If true, every backward pass must be reduced, because no rank has memory for all gradients.
        reduced_at_end: Flat tensors, one per group, that contain all gradients and may be reduced with one operation
            each at the end of backward; None if buckets must be started one by one.
        on_reduced: Callback with the number of a bucket, called when this rank's share of it has been reduced in a
            pass; only called if buckets are reduced one by one.
        order: Numbers of the buckets in the order in which they are started, the same on every rank.
    """

    groups: Sequence[FlatGroup]
    reduction: BucketReduction
    reduces_each_pass: bool
    reduced_at_end: list[torch.Tensor] | None
    on_reduced: Callable[[int], object] | None = None
    order: Sequence[int]

    def set_order(self, order: Sequence[int]) -> None:
        """Start buckets in another order from the next backward pass on."""
        self.order = order

    def agree(self, numbers: Sequence[int]) -> list[int]:
        """Return the numbers of the first of all ranks that reduce these gradients. Collective over them."""
        agreed = torch.tensor(numbers, dtype=torch.int32)
        for comm in filter(None, (self.reduction.comm, self.reduction.replicas)):
            comm.broadcast(agreed, 0)
        return agreed.tolist()

    @property
    @abstractmethod
    def flat(self) -> list[torch.Tensor]:
        """Flat tensors that this rank keeps, one per group: all gradients, or its shares of the reduced gradients."""

    @abstractmethod
    def place(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return memory in the parameter's shape in which its next gradient can be computed, to become its `.grad`.

        The result is None if a gradient is already there, or if this memory cannot be used now. The same memory is
        returned at most once per backward pass.
        """

    def late_place(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the view that `copy_in` makes the parameter's `.grad`; None if `mark_ready` must be called before."""
        return None

    def mark_ready(self, parameter: nn.Parameter) -> None:
        """Record that autograd has finished the parameter's gradient in this backward pass."""
        return

    @abstractmethod
    def start(self, bucket: int, background: bool) -> Work | None:
        """Take a bucket's gradients and start their reduction.

        Args:
            bucket: Number of the bucket.
            background: If true, reduce while backward continues.

        Returns:
            The operation to wait for; None if it is already complete.
        """

    @abstractmethod
    def skip(self, bucket: int) -> None:
        """Set a bucket's gradients to zero instead of reducing them, because no rank has any in this pass."""

    @abstractmethod
    def end(self, works: Sequence[Work | None]) -> None:
        """Complete the reductions that were started since the last `end`.

        Args:
            works: Results of `start` for these reductions.
        """

    @abstractmethod
    def zero(self) -> None:
        """Forget all gradients, before the next step."""

    def copy_in(self) -> None:
        """Copy the current `.grad` of every parameter into flat memory, with zeros for missing ones."""
        return

    def scale(self, factor: float | torch.Tensor) -> None:
        """Multiply the reduced gradients by a factor, in place."""
        for flat in self.flat:
            flat.mul_(factor)

    @abstractmethod
    def local_view(self, group: int, lo: int, hi: int) -> torch.Tensor:
        """Return the reduced gradients [lo, hi) of a group's layout as a view.

        Args:
            group: Number of the group.
            lo, hi: Range of elements in the layout; it lies in one share of this rank.
        """

    @abstractmethod
    def nbytes(self) -> tuple[int, int]:
        """Return the bytes of the gradients, and of the buffers in which they are reduced."""

    @abstractmethod
    def free(self) -> None:
        """Release the memory. Collective."""


class WholeGradients(Gradients):
    """All gradients, in flat arenas; each parameter's `.grad` is a view of its place there.

    The constructor is collective. The first gradient of a step is copied to its place as soon as it is complete, while
    it is still in the cache; small ones may be copied together at the end of backward. Autograd adds later gradients to
    it there. The arenas are never cleared, which saves one pass to clear them and another to add to the zeros.

    Args:
        groups: Parameters and their places in flat memory.
        reduction: Ranks over which gradients are reduced, and the options of the reduction.
        sharded: If true, reduce only this rank's shares, for an optimizer with sharded states.
        dtype: Dtype in which gradients are added up, if it differs from the parameters' dtype; `.grad` is then None
            after backward. None: the parameters' dtype.
    """

    reduces_each_pass = False

    def __init__(
        self, groups: Sequence[FlatGroup], reduction: BucketReduction, *, sharded: bool, dtype: torch.dtype | None
    ) -> None:
        self.groups, self.reduction, self.sharded = groups, reduction, sharded
        self._arenas = self._allocate(dtype)
        for flat in self.flat:
            flat.zero_()
        self._stale: set[nn.Parameter] = set()  # parameters whose next gradient overwrites their place
        self._pending: set[nn.Parameter] = set()  # parameters whose place has a gradient that is not yet `.grad`
        self._views: dict[nn.Parameter, tuple[torch.Tensor, bool]] = {}  # place, and whether its dtype is another
        for group, flat in zip(groups, self.flat, strict=True):
            for parameter, view in zip(group.parameters, group.views(flat), strict=True):
                self._views[parameter] = (view, flat.dtype != group.dtype)
        self._same = [(p, view) for p, (view, separate) in self._views.items() if not separate]  # views become `.grad`
        self._buckets = [b for g, group in enumerate(groups) for b in group.buckets(self._arenas[g].tensor)]
        self.order = range(len(self._buckets))
        self._compressed = [reduction.compression_of(groups[g], b, (g, b)) for g, b in bucket_indices(groups)]
        self.reduced_at_end = (
            self.flat if not sharded and reduction.compression is None and not reduction.overlaps else None
        )

    def _allocate(self, dtype: torch.dtype | None) -> list[Arena]:
        """Return the memory of each group. Collective."""
        return [self.reduction.comm.arena(g.layout.numel, dtype or g.dtype, g.device) for g in self.groups]

    @property
    def flat(self) -> list[torch.Tensor]:
        return [arena.tensor for arena in self._arenas]

    def place(self, parameter: nn.Parameter) -> torch.Tensor | None:
        view, separate = self._views[parameter]
        if separate or parameter.grad is not None or parameter in self._pending:
            return None
        self._pending.add(parameter)
        return view.view_as(view)  # a new tensor object: autograd keeps it only if it has no other reference

    def late_place(self, parameter: nn.Parameter) -> torch.Tensor | None:
        view, separate = self._views[parameter]
        return None if separate or parameter.numel() > _SMALL else view

    def mark_ready(self, parameter: nn.Parameter) -> None:
        view, separate = self._views[parameter]
        self._pending.discard(parameter)
        if not separate:
            move_gradient(parameter, view)
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
            return self.reduction.scatter(
                self.reduction.local_share(x), x, bucket, shapes, background=background, defer=False
            )
        return self.reduction.sum(x, bucket, shapes, background=background)

    def skip(self, bucket: int) -> None:
        self._buckets[bucket].zero_()

    def end(self, works: Sequence[Work | None]) -> None:
        for work in filter(None, works):
            work.wait()
        for number, bucket in enumerate(self._buckets):
            self.reduction.reduce_replicas(self.reduction.local_share(bucket), number)

    def zero(self) -> None:
        self._pending.clear()
        for parameter, (_, separate) in self._views.items():
            parameter.grad = None
            if separate:
                self._stale.add(parameter)

    def copy_in(self) -> None:
        self._pending.clear()
        new = [(p, view, grad) for p, view in self._same if (grad := p.grad) is not view]
        into, of = [view for _, view, grad in new if grad is not None], [grad for *_, grad in new if grad is not None]
        empty = [view for _, view, grad in new if grad is None]
        for parameter, (view, _) in self._views.items() if len(self._same) < len(self._views) else ():
            self.mark_ready(parameter)
            if parameter in self._stale:
                self._stale.remove(parameter)
                empty.append(view)
        with torch.no_grad():
            if into:
                torch._foreach_copy_(into, of)
            if empty:
                torch._foreach_zero_(empty)
        for parameter, view, _ in new:
            parameter.grad = view

    def holds_all(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Return whether these gradients, and no others, are all in their places; the place of a missing one is zeroed.

        Args:
            parameters: Parameters whose `.grad` is looked at.
        """
        for parameter in parameters:
            view, grad = self._views.get(parameter, (None, False))[0], parameter.grad
            if grad is None and view is not None:
                view.zero_()
            elif grad is not None and (view is None or grad.data_ptr() != view.data_ptr()):
                return False
        return True

    def local_view(self, group: int, lo: int, hi: int) -> torch.Tensor:
        return self._arenas[group].tensor[lo:hi]

    def nbytes(self) -> tuple[int, int]:
        return sum(flat.nbytes for flat in self.flat), 0

    def free(self) -> None:
        for parameter, (view, _) in self._views.items():
            if parameter.grad is not None and parameter.grad.data_ptr() == view.data_ptr():
                parameter.grad = None
        for arena in self._arenas:
            arena.free()


_MAX_UNFINISHED = 2  # maximum number of unfinished reductions


class ShardedGradients(Gradients):
    """This rank's shares of the reduced gradients; a whole gradient exists only until its bucket is reduced.

    The constructor is collective. A bucket is copied into a slot, an arena as long as the longest bucket, and reduced
    from there. The memory in addition to the shares is therefore constant: one slot; two if communication overlaps
    backward; three if a bucket is reduced after the next one was computed (in split phases), so that other ranks do not
    wait for a rank that is slightly late.

        backward    bucket 0 | bucket 1 | bucket 2 | bucket 3 ...
        slot        0          1          2          0              with three slots

    The first backward pass of a step reduces each bucket into its share. Further passes reduce it within the slot and
    add the result to the share.

    Args:
        groups: Parameters and their places in flat memory.
        reduction: Ranks over which gradients are reduced, and the options of the reduction.
        dtype: Dtype in which gradients are added up and reduced; None for the parameters' dtype.
        on_copied: Callback with the number of a bucket in its group, called when the gradients of its parameters have
            been copied.
    """

    reduces_each_pass = True
    reduced_at_end = None

    def __init__(
        self,
        groups: Sequence[FlatGroup],
        reduction: BucketReduction,
        *,
        dtype: torch.dtype | None = None,
        on_copied: Callable[[int], None] | None = None,
    ) -> None:
        self.groups, self.reduction, self._on_copied = groups, reduction, on_copied
        self._numbers = bucket_indices(groups)
        self._compressed = [reduction.compression_of(groups[g], b, (g, b)) for g, b in self._numbers]
        parts = groups[0].layout.parts if groups else 1
        self._shards = [torch.zeros(g.layout.numel // parts, dtype=dtype or g.dtype, device=g.device) for g in groups]
        longest = [max((hi - lo for lo, hi in pairwise(g.layout.bounds)), default=0) for g in groups]
        self._slots = [_slots(reduction, n, s.dtype, s.device) for n, s in zip(longest, self._shards, strict=True)]
        # by slot, the last reduction that reads it, which must be released before the slot is written again
        self._readers: list[list[Work | None]] = [[None] * len(slots) for slots in self._slots]
        self._stale: set[int] = set()  # buckets whose shares the next reduction overwrites
        self._started: list[tuple[int, torch.Tensor, Work]] = []  # (bucket, reduced share, work) not yet added
        self._pending: set[nn.Parameter] = set()  # parameters whose place has a gradient that is not yet `.grad`
        self._placed = [groups[g].members(b) for g, b in self._numbers]
        self._members = [[p for p, _ in of] for of in self._placed]
        self._where = {p: (bucket, n) for bucket, of in enumerate(self._members) for n, p in enumerate(of)}
        self.set_order(range(len(self._placed)))

    @property
    def flat(self) -> list[torch.Tensor]:
        return self._shards

    def set_order(self, order: Sequence[int]) -> None:
        super().set_order(order)
        turns = [cycle(range(len(slots))) for slots in self._slots]
        self._slot_of = {bucket: next(turns[self._numbers[bucket][0]]) for bucket in order}
        self._views = {bucket: _Slot.of(self._slot(bucket), self._placed[bucket]) for bucket in order}
        self._next = 0  # position in the order of the bucket to be started next

    def place(self, parameter: nn.Parameter) -> torch.Tensor | None:
        bucket, number = self._where[parameter]
        view = self._views[bucket].views[number]
        if self._next == len(self.order) or bucket != self.order[self._next] or view.dtype != parameter.dtype:
            return None
        if parameter.grad is not None or parameter in self._pending:
            return None
        if self.reduction.replicas is not None and len(self._started) >= _MAX_UNFINISHED:
            return None  # making room is collective over the replicas, and some ranks' data may not reach this line
        self._make_room(bucket)
        self._pending.add(parameter)
        return view.view_as(view)  # a new tensor object: autograd keeps it only if it has no other reference

    def start(self, bucket: int, background: bool) -> Work | None:
        g, b = self._numbers[bucket]
        slots = self._slots[g]
        self._make_room(bucket)
        self._next += 1
        slot = self._slot(bucket)
        self._fill(bucket, self._views[bucket])
        if self._on_copied is not None:
            self._on_copied(b)
        shapes = self._compressed[bucket]
        share = self._share(bucket) if bucket in self._stale and shapes is None else self.reduction.local_share(slot)
        defer = len(slots) == DEFERRING
        work = self.reduction.scatter(share, slot, bucket, shapes, background=background, defer=defer)
        if work is None:
            self._collect(bucket, share)
        else:
            self._started.append((bucket, share, work))
            self._readers[g][self._slot_of[bucket]] = work
        return work

    def skip(self, bucket: int) -> None:
        self._next += 1
        if self._on_copied is not None:
            self._on_copied(self._numbers[bucket][1])
        if bucket in self._stale:
            self._share(bucket).zero_()
            self._stale.remove(bucket)
        if self.on_reduced is not None:
            self.on_reduced(bucket)

    def _slot(self, bucket: int) -> torch.Tensor:
        """Return the bucket's slot, cut to the length of the bucket."""
        g, b = self._numbers[bucket]
        lo, hi = self.groups[g].layout.bounds[b : b + 2]
        return self._slots[g][self._slot_of[bucket]].tensor[: hi - lo]

    def _make_room(self, bucket: int) -> None:
        """Complete older reductions until the slot of the next bucket may be written."""
        while len(self._started) >= _MAX_UNFINISHED:
            self._collect(*self._started.pop(0))
        readers, slot = self._readers[self._numbers[bucket][0]], self._slot_of[bucket]
        reader, readers[slot] = readers[slot], None
        if reader is not None:
            reader.release()

    def _fill(self, bucket: int, slot: _Slot) -> None:
        """Move a bucket's gradients into the slot, with zeros for gaps and missing gradients, and clear `.grad`."""
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
        self._pending.difference_update(self._members[bucket])
        if into:
            torch._foreach_copy_(into, of)
        if empty:
            torch._foreach_zero_(empty)

    def _collect(self, bucket: int, share: torch.Tensor, work: Work | None = None) -> None:
        """Store the reduced share of a bucket in this rank's shares, or add it to the share that is already there."""
        if work is not None:
            work.wait()
        self.reduction.reduce_replicas(share, bucket)
        own_share = self._share(bucket)
        if bucket not in self._stale:
            own_share.add_(share)
        elif share.data_ptr() != own_share.data_ptr():
            own_share.copy_(share)
        self._stale.discard(bucket)
        if self.on_reduced is not None:
            self.on_reduced(bucket)

    def _share(self, bucket: int) -> torch.Tensor:
        """Return this rank's share of a bucket as a view."""
        g, b = self._numbers[bucket]
        layout = self.groups[g].layout
        return self._shards[g][layout.bounds[b] // layout.parts : layout.bounds[b + 1] // layout.parts]

    def end(self, works: Sequence[Work | None]) -> None:
        for started in self._started:
            self._collect(*started)
        self._started.clear()
        self._next = 0

    def zero(self) -> None:
        self._pending.clear()
        self._next = 0
        for group in self.groups:
            for parameter in group.parameters:
                parameter.grad = None
        self._stale = set(range(len(self._numbers)))  # every reduction includes all buckets, so none stays stale

    def local_view(self, group: int, lo: int, hi: int) -> torch.Tensor:
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
    """Views of a slot for one bucket: one view per parameter, in order, and the gaps between and after them."""

    views: list[torch.Tensor]
    gaps: list[torch.Tensor]

    @staticmethod
    def of(flat: torch.Tensor, members: Sequence[tuple[nn.Parameter, int]]) -> _Slot:
        """Return the views of a bucket.

        Args:
            flat: Slot, cut to the length of the bucket.
            members: Parameters of the bucket and their offsets in `flat`.
        """
        views, gaps, at = [], [], 0
        for parameter, begin in members:
            gaps.append(flat[at:begin])
            at = begin + parameter.numel()
            views.append(flat[begin:at].view(parameter.shape))
        gaps.append(flat[at:])
        return _Slot(views, [gap for gap in gaps if gap.numel()])


def _slots(reduction: BucketReduction, numel: int, dtype: torch.dtype, device: torch.device) -> list[Arena]:
    """Return the slots of one group, each with `numel` elements. Collective."""
    comm = reduction.comm
    first = comm.arena(numel, dtype, device)
    in_order = reduction.compression is not None or reduction.reproducible  # each bucket alone, without split phases
    count = slot_count(reduction.overlaps, in_order, first.kind == "shared", comm.num_nodes)
    return [first, *(comm.arena(numel, dtype, device) for _ in range(count - 1))]
