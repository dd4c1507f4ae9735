"""Where gradients are kept and reduced: whole on every rank, or each rank's shares alone.

Both kinds take gradients bucket by bucket. A bucket is started when backward has finished all its parameters, in the
same order on every rank; `end` completes what was started.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import nn

from mpitrain.comm import Arena, Communicator, Work
from mpitrain.comm.compression import Bucket, Compression
from mpitrain.shard.flat import FlatGroup, adopt

_LAGGING = 3  # slots in which buckets are reduced one behind the other
_UNDER_WAY = 2  # reductions that may be under way at once


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
            work = comm.deferred_reduce_scatter(into, x, self.op)
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


class Gradients(Protocol):
    """Buckets are numbered through all groups."""

    groups: Sequence[FlatGroup]

    def place(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Where its next gradient can be computed at once, if nothing is there; given away at most once a pass."""

    def arrived(self, parameter: nn.Parameter) -> None:
        """Its gradient of this backward pass is complete."""

    def start(self, bucket: int, background: bool) -> Work | None: ...

    def end(self, works: Sequence[Work | None]) -> None:
        """Complete the reductions started since the last `end`."""

    def zero(self) -> None:
        """Forget all gradients."""

    def settle(self) -> None:
        """Take over what the parameters' gradients are now."""

    def scale(self, factor: float) -> None: ...

    def own(self, group: int, lo: int, hi: int) -> torch.Tensor:
        """The reduced gradients [lo, hi) of a group, within one of this rank's shares."""

    def nbytes(self) -> tuple[int, int]:
        """Bytes of gradients, and of communication buffers."""

    def free(self) -> None: ...


def numbered(groups: Sequence[FlatGroup]) -> list[tuple[int, int]]:
    """(group, bucket in it) of every bucket."""
    return [(g, b) for g, group in enumerate(groups) for b in range(group.layout.buckets)]


class WholeGradients:
    """Every rank keeps all gradients, in arenas; each parameter's `.grad` is its place there.

    The first gradient of a step is copied there when it is complete, and still in the cache; later ones are added
    there by autograd. Arenas are never cleared: that would cost a pass over them, and autograd another.

    sharded: reduce only this rank's shares. dtype: None for the parameters' own; else gradients are added up in
    that type and `.grad` is empty after backward. Collective to make.
    """

    def __init__(
        self, groups: Sequence[FlatGroup], reduction: Reduction, *, sharded: bool, dtype: torch.dtype | None = None
    ) -> None:
        self.groups, self.reduction, self.sharded = groups, reduction, sharded
        self._arenas = [reduction.comm.arena(g.layout.numel, dtype or g.dtype, g.device) for g in groups]
        for arena in self._arenas:
            arena.tensor.zero_()
        self._apart = [arena.tensor.dtype != g.dtype for arena, g in zip(self._arenas, groups, strict=True)]
        self._stale: set[nn.Parameter] = set()  # whose place in another dtype the next gradient replaces
        self._given: set[nn.Parameter] = set()  # whose place is where a gradient on its way lies
        self._views: dict[nn.Parameter, tuple[torch.Tensor, bool]] = {}
        for g, group in enumerate(groups):
            for parameter, view in zip(group.parameters, group.views(self._arenas[g].tensor), strict=True):
                self._views[parameter] = (view, self._apart[g])
        self.buckets = [b for g, group in enumerate(groups) for b in group.buckets(self._arenas[g].tensor)]
        self._compressed = [reduction.compressed(groups[g], b, (g, b)) for g, b in numbered(groups)]
        whole = not sharded and reduction.compression is None and not reduction.overlaps
        self.at_once = [arena.tensor for arena in self._arenas] if whole else None

    def place(self, parameter: nn.Parameter) -> torch.Tensor | None:
        view, apart = self._views[parameter]
        if apart or parameter.grad is not None or parameter in self._given:
            return None
        self._given.add(parameter)
        return view.view_as(view)

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
        x, shapes = self.buckets[bucket], self._compressed[bucket]
        if self.sharded:
            return self.reduction.scatter(self.reduction.own(x), x, bucket, shapes, background=background, lag=False)
        return self.reduction.sum(x, bucket, shapes, background=background)

    def end(self, works: Sequence[Work | None]) -> None:
        for work in works:
            if work is not None:
                work.wait()
        if self.reduction.replicas is not None:
            for bucket in self.buckets:
                self.reduction.among_replicas(self.reduction.own(bucket))

    def zero(self) -> None:
        self._given.clear()
        for parameter, (_, apart) in self._views.items():
            parameter.grad = None
            if apart:
                self._stale.add(parameter)

    def settle(self) -> None:
        """Where no gradient came there are zeros afterwards."""
        for parameter, (view, apart) in self._views.items():
            self.arrived(parameter)
            if apart and parameter in self._stale:
                self._stale.remove(parameter)
                view.zero_()

    @property
    def flat(self) -> list[torch.Tensor]:
        """All gradients, one flat tensor a group."""
        return [arena.tensor for arena in self._arenas]

    def own(self, group: int, lo: int, hi: int) -> torch.Tensor:
        return self._arenas[group].tensor[lo:hi]

    def nbytes(self) -> tuple[int, int]:
        return sum(a.tensor.numel() * a.tensor.element_size() for a in self._arenas), 0

    def scale(self, factor: float) -> None:
        for arena in self._arenas:
            arena.tensor.mul_(factor)

    def free(self) -> None:
        for parameter, (view, _) in self._views.items():
            if parameter.grad is not None and parameter.grad.data_ptr() == view.data_ptr():
                parameter.grad = None
        for arena in self._arenas:
            arena.free()


class ShardedGradients:
    """Every rank keeps its shares of the reduced gradients; a parameter's own lasts until its bucket is reduced.

    Buckets pass through slots in arenas, so the memory beside the shares is constant: one slot; two where communication
    overlaps backward; three where a bucket is reduced after the next one was made, so that a rank which is a little
    late keeps nobody waiting. The first backward pass of a step reduces buckets into the shares, further ones within
    the slot, and add that. Collective to make.
    """

    def __init__(self, groups: Sequence[FlatGroup], reduction: Reduction, *, dtype: torch.dtype | None = None) -> None:
        self.groups, self.reduction = groups, reduction
        self.at_once = None
        self.taken: Callable[[int], None] | None = None  # told when the gradients of a bucket have been taken
        self._numbers = numbered(groups)
        self._compressed = [reduction.compressed(groups[g], b, (g, b)) for g, b in self._numbers]
        parts = groups[0].layout.parts if groups else 1
        self._shards = [torch.zeros(g.layout.numel // parts, dtype=dtype or g.dtype, device=g.device) for g in groups]
        longest = [
            max((b.numel() for b in g.buckets(torch.empty(g.layout.numel, device="meta"))), default=0) for g in groups
        ]
        self._slots = [
            _slots(reduction, n, shard.dtype, shard.device) for n, shard in zip(longest, self._shards, strict=True)
        ]
        self._readers: list[list[Work | None]] = [[None] * len(slots) for slots in self._slots]
        self._stale: set[int] = set()  # buckets whose shares the next reduction replaces
        self._started: list[tuple[int, torch.Tensor, Work]] = []  # (bucket, reduced share, work) not yet added
        self._members: list[list[nn.Parameter]] = [[] for _ in self._numbers]
        self._next = 0  # the bucket to be started next
        self._given: set[nn.Parameter] = set()  # whose place in a slot is where a gradient on its way lies
        self._where: dict[nn.Parameter, tuple[int, int]] = {}  # (bucket, number in it)
        offsets: list[list[int]] = [[] for _ in self._numbers]  # of the members in the bucket
        first = 0
        for group in groups:
            for parameter, place in zip(group.parameters, group.layout.places, strict=True):
                bucket = first + place.bucket
                self._where[parameter] = bucket, len(self._members[bucket])
                self._members[bucket].append(parameter)
                offsets[bucket].append(place.offset - group.layout.bounds[place.bucket])
            first += group.layout.buckets
        self._views = [  # by bucket, of the slot it passes through
            _Slot.of(self._slot(bucket), self._members[bucket], offsets[bucket]) for bucket in range(len(self._numbers))
        ]

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
        return

    def settle(self) -> None:
        return

    def start(self, bucket: int, background: bool) -> Work | None:
        g, b = self._numbers[bucket]
        slots = self._slots[g]
        self._make_room(bucket)
        self._next = bucket + 1
        slot = self._slot(bucket)
        self._fill(bucket, self._views[bucket])
        if self.taken is not None:
            self.taken(b)
        shapes = self._compressed[bucket]
        share = self._share(bucket) if bucket in self._stale and shapes is None else self.reduction.own(slot)
        lag = len(slots) == _LAGGING
        work = self.reduction.scatter(share, slot, bucket, shapes, background=background, lag=lag)
        if work is None:
            self._collect(bucket, share)
        else:
            self._started.append((bucket, share, work))
            self._readers[g][bucket % len(slots)] = work
        return work

    def _slot(self, bucket: int) -> torch.Tensor:
        """What the bucket takes of its slot."""
        g, b = self._numbers[bucket]
        lo, hi = self.groups[g].layout.bounds[b : b + 2]
        return self._slots[g][bucket % len(self._slots[g])].tensor[: hi - lo]

    def _make_room(self, bucket: int) -> None:
        """Have the slot of the bucket to be started next free."""
        while len(self._started) >= _UNDER_WAY:
            self._collect(*self._started.pop(0))
        readers = self._readers[self._numbers[bucket][0]]
        reader, readers[bucket % len(readers)] = readers[bucket % len(readers)], None
        if reader is not None:
            reader.release()

    def _fill(self, bucket: int, slot: _Slot) -> None:
        """Move the gradients of a bucket into the slot; missing ones and gaps are zeros."""
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
        if work is not None:
            work.wait()
        self.reduction.among_replicas(share)
        kept = self._share(bucket)
        if bucket not in self._stale:
            kept.add_(share)
        elif share.data_ptr() != kept.data_ptr():
            kept.copy_(share)
        self._stale.discard(bucket)

    def _share(self, bucket: int) -> torch.Tensor:
        """Where this rank keeps its share of a bucket."""
        g, b = self._numbers[bucket]
        return self._shards[g][self._at(g, b) : self._at(g, b + 1)]

    def _at(self, group: int, bucket: int) -> int:
        """Where a bucket's share begins in this rank's shard."""
        return self.groups[group].layout.bounds[bucket] // self.groups[group].layout.parts

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
        layout = self.groups[group].layout
        bucket = next(b for b in range(layout.buckets) if layout.bounds[b] <= lo < layout.bounds[b + 1])
        first, _ = layout.share(bucket, self.reduction.comm.rank)
        begin = self._at(group, bucket) + lo - first
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
    """A slot as a bucket sees it. views: of its parameters, in order. gaps: what is between them and after."""

    views: list[torch.Tensor]
    gaps: list[torch.Tensor]

    @staticmethod
    def of(flat: torch.Tensor, members: Sequence[nn.Parameter], offsets: Sequence[int]) -> _Slot:
        views, gaps, at = [], [], 0
        for parameter, begin in zip(members, offsets, strict=True):
            gaps.append(flat[at:begin])
            at = begin + parameter.numel()
            views.append(flat[begin:at].view(parameter.shape))
        gaps.append(flat[at:])
        return _Slot(views, [gap for gap in gaps if gap.numel()])


def _slots(reduction: Reduction, numel: int, dtype: torch.dtype, device: torch.device) -> list[Arena]:
    """Collective."""
    first = reduction.comm.arena(numel, dtype, device)
    count = _LAGGING if reduction.lags(first) else 2 if reduction.overlaps else 1
    return [first, *(reduction.comm.arena(numel, dtype, device) for _ in range(count - 1))]
