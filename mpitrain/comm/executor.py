"""Runs programs: compiled once into bound calls for given memory, then a bare loop over them.

Compiling turns each step into calls on addresses. Messages are persistent requests of raw bytes. A receive
to be reduced lands in scratch memory; while it is added, the next messages are already posted, as far as
they touch other chunks (`_Schedule`).

A chunk of WORK is read where it currently is: at first in the caller's input, and after it was written
once, in the output. So nothing is copied before the first reduction, and inputs stay as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from mpi4py import MPI

from mpitrain.comm.buffers import LARGEST_COUNT, bytes_at, tensor_at
from mpitrain.comm.kernels import Reduction, copying, scaling
from mpitrain.comm.program import (
    INBOX,
    NONE,
    SLOT,
    WORK,
    Combine,
    Copy,
    Exchange,
    Fence,
    Finish,
    Program,
    Span,
)
from mpitrain.comm.remote import Neighbours, Table
from mpitrain.comm.schedule import IN_FLIGHT, Call, Region, Schedule

_LANDINGS = IN_FLIGHT + 1  # scratch areas for messages to be reduced: those in flight and the one being added


@dataclass(frozen=True)
class Layout:
    """Where a program's memories lie, for this rank and its neighbours. Addresses in bytes, bounds in elements.

    bounds: offsets of the chunks in WORK, chunks + 1 of them.
    source, target: WORK as the caller gave it and as the caller gets it (the same for operations in place).
    peers(rank): WORK of another rank of this node, where it is mapped; else neighbours reach it by its address,
    and `seen` is the one this rank shows them. slots(rank): its staging slots, a chunk's largest size each.
    inbox, inbox_bounds: address and cell offsets of INBOX; without an address the executor allocates it.
    """

    dtype: torch.dtype
    bounds: Sequence[int]
    source: int
    target: int
    peers: Callable[[int], int] | None = None
    neighbours: Neighbours | None = None
    seen: int = 0
    slots: Callable[[int], int] | None = None
    inbox: int = 0
    inbox_bounds: Sequence[int] = ()
    device: torch.device | None = None

    @property
    def slot(self) -> int:
        """Elements of a staging slot."""
        return max((hi - lo for lo, hi in pairwise(self.bounds)), default=0)


class Compiled:
    """A program bound to memory: call it to run it.

    keeps: what must live as long (buffers), and the compiled programs this one is made of. computes: whether it
    does floating-point arithmetic, of which NumPy would report overflows that torch and MPI pass on in silence.
    """

    __slots__ = ("_calls", "_computes", "_keeps", "_requests")

    def __init__(
        self,
        calls: Sequence[Call],
        keeps: Sequence[object] = (),
        requests: Sequence[MPI.Prequest] = (),
        computes: bool = False,
    ) -> None:
        self._calls = tuple(calls)
        self._keeps = keeps
        self._requests = requests
        self._computes = computes

    def __call__(self) -> None:
        if self._computes:
            with np.errstate(all="ignore"):
                for call in self._calls:
                    call()
        else:
            for call in self._calls:
                call()

    def free(self) -> None:
        """Release the requests. The program must not run again."""
        for request in self._requests:
            request.Free()
        for kept in self._keeps:
            if isinstance(kept, Compiled):
                kept.free()
        self._calls = ()


def compile_program(
    program: Program,
    comm: MPI.Comm,
    layout: Layout,
    reduction: Reduction | None,
    *,
    fence: Sequence[Call] = (),
    before_post: Call | None = None,
) -> Compiled:
    """Bind a program to memory on this rank.

    comm: its ranks are the program's. fence: the calls of a `Fence`. before_post: called before messages are posted.
    """
    return _Compiler(program, comm, layout, reduction, fence, before_post).compile()


class _Compiler:
    def __init__(
        self,
        program: Program,
        comm: MPI.Comm,
        layout: Layout,
        reduction: Reduction | None,
        fence: Sequence[Call],
        before_post: Call | None,
    ) -> None:
        self.program, self.comm, self.layout, self.reduction = program, comm, layout, reduction
        self.fence = fence
        self.rank = comm.rank
        self.item = layout.dtype.itemsize
        in_place = layout.source == layout.target
        self.moved = bytearray([in_place]) * program.chunks  # which chunks of WORK lie in the target by now
        self.keeps: list[object] = []
        self.requests: list[MPI.Prequest] = []
        self.schedule = Schedule(before_post)
        self.exchanges = 0
        self.steps = list(program.steps(self.rank))
        self.landings: list[int] = []
        self.fetches: list[int] = []
        self.table = Table(layout.neighbours) if layout.neighbours is not None else None
        self.looked_up = False  # whether the neighbours' addresses are known by now
        self.inbox_bounds = layout.inbox_bounds or [i * layout.slot for i in range(program.inbox + 1)]
        self.inbox = layout.inbox or self._allocate(self.inbox_bounds[-1])

    def compile(self) -> Compiled:
        finished = False  # whether the step was done with the one before it
        for step, following in zip(self.steps, [*self.steps[1:], None], strict=True):
            if finished:
                finished = False
            elif isinstance(step, Exchange):
                self._exchange(step)
            elif isinstance(step, Combine):  # a Finish of the same span is best done while it is in the cache
                finished = isinstance(following, Finish) and _region(following.span) == _region(step.into)
                self._combine(step, self._scale if finished else None)
            elif isinstance(step, Copy):
                self._copy(step)
            elif isinstance(step, Finish):
                self._finish(step)
            elif isinstance(step, Fence):
                self._fence()
        self._bring_home()
        computes = self.reduction is not None and (self.layout.dtype.is_floating_point or self.layout.dtype.is_complex)
        return Compiled(self.schedule.calls(), self.keeps, self.requests, computes)

    @property
    def _scale(self) -> float | None:
        return self.reduction.scale if self.reduction else None

    def _allocate(self, numel: int) -> int:
        if numel == 0:
            return 0
        memory = torch.empty(numel, dtype=self.layout.dtype, device=self.layout.device)
        self.keeps.append(memory)
        return memory.data_ptr()

    def _elements(self, span: Span) -> tuple[int, int]:
        """Offset and number of elements of a span in its memory."""
        lo, hi = int(span.lo), int(span.hi)
        if hi <= lo:
            return 0, 0
        if span.memory == SLOT:
            return lo * self.layout.slot, (hi - lo) * self.layout.slot
        bounds = self.layout.bounds if span.memory == WORK else self.inbox_bounds
        return bounds[lo], bounds[hi] - bounds[lo]

    def _address(self, owner: int, span: Span, *, written: bool = False) -> int:
        """Where a span of a rank's memory is to be read (or written)."""
        offset = self._elements(span)[0] * self.item
        if span.memory == SLOT:
            assert self.layout.slots is not None
            return self.layout.slots(owner) + offset
        if span.memory == INBOX:
            return self.inbox + offset
        if owner != self.rank:
            assert self.layout.peers is not None
            return self.layout.peers(owner) + offset
        moved = self.moved[int(span.lo) : int(span.hi)]
        if written or all(moved):
            return self.layout.target + offset
        if any(moved):
            raise AssertionError(f"{self.program.name}: a span lies half in the input and half in the output")
        return self.layout.source + offset

    def _tensor(self, owner: int, span: Span, numel: int, *, written: bool = False) -> torch.Tensor:
        return tensor_at(self._address(owner, span, written=written), numel, self.layout.dtype, self.layout.device)

    def _mark(self, span: Span) -> None:
        if span.memory == WORK:
            lo, hi = int(span.lo), int(span.hi)
            self.moved[lo:hi] = b"\1" * (hi - lo)

    def _exchange(self, step: Exchange) -> None:
        to, source = int(step.to), int(step.source)
        leaving = self._elements(step.send)[1] if to != NONE else 0
        arriving = self._elements(step.recv)[1] if source != NONE else 0
        sends, receives = leaving > 0, arriving > 0
        if not sends and not receives:
            return
        slot = self.exchanges % _LANDINGS
        self.exchanges += 1
        reads: list[Region] = []
        writes: list[Region] = []
        requests: list[MPI.Prequest] = []
        if receives:
            if step.reduce:
                landing = self._landing(slot)
                writes.append(("scratch", slot, slot + 1))
            else:
                landing = self._address(self.rank, step.recv, written=True)
                writes.append(_region(step.recv))
            requests += self._messages(self.comm.Recv_init, landing, arriving, source)
        if sends:
            reads.append(_region(step.send))
            requests += self._messages(self.comm.Send_init, self._address(self.rank, step.send), leaving, to)
        self.schedule.exchange(requests, reads, writes)
        if not receives:
            return
        if step.reduce:
            assert self.reduction is not None
            received = tensor_at(landing, arriving, self.layout.dtype, self.layout.device)
            current = self._tensor(self.rank, step.recv, arriving)
            into = self._tensor(self.rank, step.recv, arriving, written=True)
            region = _region(step.recv)
            for call in self.reduction.combine([current, received], into, tree=False, scale=None):
                self.schedule.local(call, [("scratch", slot, slot + 1), region], [region])
        self._mark(step.recv)

    def _messages(self, init: Callable[..., MPI.Prequest], address: int, numel: int, peer: int) -> list[MPI.Prequest]:
        nbytes = numel * self.item
        made = [
            init(bytes_at(address + lo, min(LARGEST_COUNT, nbytes - lo)), peer)
            for lo in range(0, nbytes, LARGEST_COUNT)
        ]
        self.requests += made
        return made

    def _landing(self, slot: int) -> int:
        if not self.landings:
            arriving = [s for s in self.steps if isinstance(s, Exchange) and s.reduce and int(s.source) != NONE]
            largest = max(self._elements(step.recv)[1] for step in arriving)
            self.landings = [self._allocate(largest) for _ in range(_LANDINGS)]
        return self.landings[slot]

    def _fence(self) -> None:
        first = self.table is not None and not self.looked_up
        if first and self.table is not None:
            self.schedule.barrier(self.table.publish(self.rank, self.layout.seen))
        for call in self.fence:
            self.schedule.barrier(call)
        if first and self.table is not None:
            self.schedule.barrier(self.table.load)
            self.looked_up = True

    def _is_remote(self, owner: int, span: Span) -> bool:
        return owner != self.rank and span.memory == WORK and self.table is not None

    def _transfer(self, local: int, numel: int, owner: int, span: Span, *, write: bool) -> list[Call]:
        """Copies between an address here and a span of another process's WORK."""
        assert self.table is not None
        offset, nbytes = self._elements(span)[0] * self.item, numel * self.item
        return list(self.table.transfers(local, nbytes, owner, offset, write=write))

    def _fetched(self, slot: int, numel: int) -> int:
        """Memory for what is read from another process before it is combined."""
        while len(self.fetches) <= slot:
            self.fetches.append(self._allocate(max(self.layout.slot, numel)))
        return self.fetches[slot]

    def _combine(self, step: Combine, scale: float | None) -> None:
        assert self.reduction is not None
        present = [(int(owner), span) for owner, span in step.parts if int(owner) != NONE]
        numel = min(self._elements(span)[1] for span in (step.into, *(span for _, span in present)))
        if numel == 0:
            return
        into = self._tensor(self.rank, step.into, numel, written=True)
        one_by_one = self.reduction.pairwise and not step.tree  # then one landing place in the cache is enough
        parts: list[torch.Tensor] = []
        calls: list[Call] = []
        for number, (owner, span) in enumerate(present):
            if not self._is_remote(owner, span):
                parts.append(self._tensor(owner, span, numel))
                continue
            landing = self._fetched(0 if one_by_one else number, numel)
            calls += self._transfer(landing, numel, owner, span, write=False)
            parts.append(tensor_at(landing, numel, self.layout.dtype))
            if one_by_one and len(parts) == 2:
                last = scale if number == len(present) - 1 else None
                calls += self.reduction.combine(parts, into, tree=False, scale=last)
                parts = [into]
        if len(parts) > 1 or len(present) == 1:
            calls += self.reduction.combine(parts, into, tree=step.tree, scale=scale)
        for call in calls:
            self.schedule.local(call, [_region(span) for _, span in present], [_region(step.into)])
        self._mark(step.into)

    def _copy(self, step: Copy) -> None:
        dest, source = int(step.dest), int(step.source)
        if dest == NONE:
            return
        numel = min(self._elements(step.into)[1], self._elements(step.of)[1])  # a slot may be larger than a chunk
        if numel == 0:
            return
        reads, writes = [_region(step.of)], [_region(step.into)]
        if self._is_remote(source, step.of):
            local = self._address(self.rank, step.into, written=True)
            calls = self._transfer(local, numel, source, step.of, write=False)
        elif self._is_remote(dest, step.into):
            calls = self._transfer(self._address(self.rank, step.of), numel, dest, step.into, write=True)
        else:
            of = self._tensor(source, step.of, numel)
            into = self._tensor(dest, step.into, numel, written=True)
            calls = [copying(into, of)] if of.data_ptr() != into.data_ptr() else []
        for call in calls:
            self.schedule.local(call, reads, writes)
        if dest == self.rank:
            self._mark(step.into)

    def _finish(self, step: Finish) -> None:
        _, numel = self._elements(step.span)
        if numel:
            for call in scaling(self._tensor(self.rank, step.span, numel), self._scale):
                self.schedule.local(call, [_region(step.span)], [_region(step.span)])

    def _bring_home(self) -> None:
        """Blocks this rank must end with that were never written are still in the caller's input: copy them."""
        segments = self.program.segments
        for goal in self.program.collective.ends(self.rank):
            if goal.memory == WORK and not any(self.moved[goal.cell * segments : (goal.cell + 1) * segments]):
                block = Span(goal.cell * segments, (goal.cell + 1) * segments)
                self._copy(Copy(self.rank, block, self.rank, block))


def _region(span: Span) -> Region:
    return span.memory, int(span.lo), int(span.hi)
