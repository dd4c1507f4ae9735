"""Gradients of which each rank keeps its shares of the sums alone (stages 2 and 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from mpitrain.comm import Arena, Work
from mpitrain.shard.flat import FlatGroup, numbered
from mpitrain.shard.placement import DEFERRING, slot_count
from mpitrain.shard.protocols import Gradients
from mpitrain.shard.reduction import BucketReduction

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

    def arrived(self, parameter: nn.Parameter) -> None:
        """Nothing is to be done: `start` takes it."""

    def settle(self) -> None:
        """Nothing is to be done: `start` takes them, and zeros where there are none."""

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
        slots = sum(s.tensor.numel() * s.tensor.element_size() for slots in self._slots for s in slots)
        return sum(s.numel() * s.element_size() for s in self._shards), slots

    def scale(self, factor: float) -> None:
        for shard in self._shards:
            shard.mul_(factor)

    def free(self) -> None:
        for readers in self._readers:
            for reader in readers:
                if reader is not None:
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
    count = slot_count(reduction.overlaps, reduction.in_order, first.kind == "shared", comm.num_nodes)
    return [first, *(comm.arena(numel, dtype, device) for _ in range(count - 1))]
