"""Programs compiled for one rank: what is to be called, in which order, on memory whose addresses come later.

A plan knows sizes and no addresses, so that a caller whose tensors lie elsewhere each time only pays for binding: a
view and a call for each chunk. A message that is to be reduced is received into scratch memory; while it is added, the
next messages are already posted, as far as they touch other chunks (`_CallOrder`).

A chunk of WORK is read where it currently is: at first in the caller's input, and after it was written once, in the
output. So nothing is copied before the first reduction, and inputs stay as they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.job.traffic import Moved
from mpitrain.comm.memory.elements import HALVES, LARGEST_COUNT
from mpitrain.comm.programs.program import (
    CALLER,
    INBOX,
    NONE,
    SLOT,
    WORK,
    Await,
    Combine,
    Compare,
    Copy,
    Exchange,
    Fence,
    Finish,
    Program,
    Signal,
    Span,
    Step,
)
from mpitrain.comm.runtime import executor
from mpitrain.comm.runtime.agreement import Call
from mpitrain.comm.runtime.executor import (
    PEER,
    SCRATCH,
    SOURCE,
    TARGET,
    Compiled,
    Layout,
    Maker,
    Message,
    Place,
    Reduction,
)
from mpitrain.comm.runtime.remote import Transfers

Region = tuple[str, int, int]  # memory, first cell, last cell + 1

_IN_FLIGHT = 2  # exchanges posted and not yet waited for
_LANDINGS = _IN_FLIGHT + 1  # scratch areas for messages to be reduced: those in flight and the one being added


@dataclass(frozen=True)
class _Entry:
    kind: str  # "post", "wait", "local" or "barrier"
    call: Maker
    reads: Sequence[Region] = ()
    writes: Sequence[Region] = ()


def _overlap(a: Sequence[Region], b: Sequence[Region]) -> bool:
    return any(m == n and lo < end and start < hi for m, lo, hi in a for n, start, end in b)


class _CallOrder:
    """Entries in the order in which they are to be called, with the posting of each exchange moved ahead.

    They are put down in program order with the memory they read and write. A posting never passes another posting
    (messages between two ranks match in order), a barrier or an entry it conflicts with, and at most `_IN_FLIGHT`
    exchanges are posted and not yet waited for.
    """

    def __init__(self) -> None:
        self.entries: list[_Entry] = []

    def local(self, call: Maker, reads: Sequence[Region], writes: Sequence[Region]) -> None:
        """Add a call of this rank alone, with the memory that it reads and writes."""
        self.entries.append(_Entry("local", call, reads, writes))

    def barrier(self, call: Maker) -> None:
        """Add a call that nothing may be moved past."""
        self.entries.append(_Entry("barrier", call))

    def exchange(self, number: int, messages: list[Message], reads: Sequence[Region], writes: Sequence[Region]) -> None:
        """Add an exchange of messages, whose posting may move ahead.

        Args:
            number: Which exchange of the program it is.
            messages: What is sent and received.
            reads, writes: The memory that is sent and received.
        """
        post = _Entry("post", partial(executor.start, number, messages), reads, writes)
        at, waiting = len(self.entries), 1
        while at > 0:
            earlier = self.entries[at - 1]
            conflict = _overlap(earlier.writes, [*post.reads, *post.writes]) or _overlap(earlier.reads, post.writes)
            waiting += earlier.kind == "wait"
            if earlier.kind in ("post", "barrier") or conflict or waiting > _IN_FLIGHT:
                break
            at -= 1
        self.entries.insert(at, post)
        self.entries.append(_Entry("wait", partial(executor.wait, number, messages), reads, writes))


class Plan:
    """A program compiled for this rank, for memory of one shape at any addresses.

    It may be bound to several places, but of all that were bound one may run at a time, since they share scratch
    memory.
    """

    def __init__(
        self,
        program: Program,
        comm: MPI.Comm,
        layout: Layout,
        reduction: Reduction | None,
        meet: Call = lambda: None,
        sync: Sequence[Call] = (),
    ) -> None:
        """Compile a program.

        Args:
            program: The program.
            comm: Its ranks are those of the program.
            layout: Any layout of the shape (`Layout.shape`) that the plan is for.
            reduction: What combines values; None if the program combines none.
            meet: Returns when all ranks of the node have called it.
            sync: What makes writes to memory that the node shares visible (MPI-4.1, section 12.7), called before this
                rank tells others of them, and after others have told it of theirs.
        """
        self._computes = reduction is not None and (layout.dtype.is_floating_point or layout.dtype.is_complex)
        self._comm, self._program, self._layout, self._reduction = comm, program, layout, reduction
        self._scale = reduction.scale if reduction is not None else None
        self._sync, self._fence = sync, [*sync, meet, *sync]
        self._rank, self._item = comm.rank, layout.dtype.itemsize
        in_place = layout.source == layout.target
        self._inside = self._between = 0  # bytes, by the phase that is compiled
        self._arrived = bytearray([in_place]) * program.chunks  # which chunks of WORK lie in the target by now
        self._phases: list[tuple[list[Maker], str, Moved]] = []  # with the event before each, and what it moves
        self._scratch: list[torch.Tensor] = []
        self._exchanges = 0
        self._landings: list[int] = []  # numbers of scratch areas
        self._fetches: list[int] = []
        self._transfers = Transfers(layout.neighbours) if layout.neighbours is not None else None
        self._locals: list[Place] = []  # this rank's side of each transfer
        self._inbox_bounds = layout.inbox_bounds or [i * layout.slot for i in range(program.inbox + 1)]
        own = 0 if layout.inbox else self._inbox_bounds[-1]
        self._inbox = self._new_scratch(own) if own else NONE  # in scratch memory, unless the caller gave one
        phases = program.phases(self._rank)
        for steps in phases:
            self._order = _CallOrder()
            self._compile(steps)
            if steps is phases[-1]:
                self._bring_home()
            awaited = steps[0].event if steps and isinstance(steps[0], Await) else ""
            moved = Moved(program.name.split()[0], self._inside, self._between)
            self._phases.append(([entry.call for entry in self._order.entries], awaited, moved))
            self._inside = self._between = 0

    def bind(self, layout: Layout) -> Compiled:
        """Bind a program of one phase to a layout's addresses. Of all that were bound, one may run at a time."""
        (only,) = self.bind_phases(layout)
        return only

    def bind_phases(self, layout: Layout) -> list[Compiled]:
        """Bind each phase of the program to a layout's addresses. Of all that were bound, one may run at a time."""
        meets = layout.board is not None
        binding = executor.Binding(self._comm, layout, self._scratch, self._transfers, self._locals)
        bound: list[Compiled] = []
        for makers, event, moved in self._phases:
            first = len(binding.made)
            calls = [call for make in makers for call in make(binding)]
            awaits = binding.telling(event) if event else None
            bound.append(Compiled(calls, [self], binding.made[first:], self._computes, meets, awaits, moved))
        return bound

    def _compile(self, steps: Sequence[Step]) -> None:
        finished = False  # whether the step was done with the one before it
        for step, following in zip(steps, [*steps[1:], None], strict=True):
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
            elif isinstance(step, Fence) and not isinstance(following, Compare):
                self._order.barrier(lambda binding: self._fence)
            elif isinstance(step, Signal):
                self._order.barrier(lambda binding: self._sync)
                self._order.barrier(partial(executor.signal, step.event))
            elif isinstance(step, Await):
                self._order.barrier(partial(executor.wait_for_all, step.event))
                self._order.barrier(lambda binding: self._sync)
            elif isinstance(step, Compare):  # and so are the two steps before it
                self._order.barrier(partial(executor.meet, self._fence))

    def _count(self, other: int, numel: int) -> None:
        """Elements go to another rank, or between its memory and this rank's; none are counted that stay here."""
        if other != self._rank:
            here = self._program.nodes[other] == self._program.nodes[self._rank]
            self._inside += numel * self._item * here
            self._between += numel * self._item * (not here)

    def _new_scratch(self, numel: int) -> int:
        self._scratch.append(torch.empty(numel, dtype=self._layout.dtype, device=self._layout.device))
        return len(self._scratch) - 1

    def _elements(self, span: Span) -> tuple[int, int]:
        """Offset and number of elements of a span in its memory."""
        lo, hi = int(span.lo), int(span.hi)
        if hi <= lo:
            return 0, 0
        if span.memory == SLOT:
            return lo * self._layout.slot, (hi - lo) * self._layout.slot
        bounds = self._layout.bounds if span.memory == WORK else self._inbox_bounds
        return bounds[lo], bounds[hi] - bounds[lo]

    def _place(self, owner: int, span: Span, numel: int, *, written: bool = False) -> Place:
        """Where a span of a rank's memory is to be read (or written)."""
        start = self._elements(span)[0]
        if span.memory == INBOX and self._inbox != NONE:
            return Place(SCRATCH, self._inbox, start, numel)
        if span.memory != WORK:
            return Place(span.memory, owner, start, numel)
        if owner != self._rank:
            return Place(PEER, owner, start, numel)
        bounds = self._layout.bounds  # a chunk without elements lies nowhere: nothing was written there
        arrived = [self._arrived[c] for c in range(int(span.lo), int(span.hi)) if bounds[c] < bounds[c + 1]]
        if written or all(arrived):
            return Place(TARGET, owner, start, numel)
        if any(arrived):
            raise AssertionError(f"{self._program.name}: a span lies half in the input and half in the output")
        return Place(SOURCE, owner, start, numel)

    def _mark(self, span: Span) -> None:
        if span.memory == WORK:
            lo, hi = int(span.lo), int(span.hi)
            self._arrived[lo:hi] = b"\1" * (hi - lo)

    def _exchange(self, step: Exchange) -> None:
        to, source = int(step.to), int(step.source)
        leaving = self._elements(step.send)[1] if to != NONE else 0
        arriving = self._elements(step.recv)[1] if source != NONE else 0
        sends, receives = leaving > 0, arriving > 0
        if not sends and not receives:
            return
        number = self._exchanges
        slot = number % _LANDINGS
        self._exchanges += 1
        reads: list[Region] = []
        writes: list[Region] = []
        messages: list[Message] = []
        landing = self._place(self._rank, step.recv, arriving, written=True)
        if receives:
            if step.reduce:
                landing = Place(SCRATCH, self._landing(slot), 0, arriving)
                writes.append((SCRATCH, slot, slot + 1))
            else:
                writes.append(_region(step.recv))
            messages.append(Message(False, landing, source))
        if sends:
            reads.append(_region(step.send))
            messages.append(Message(True, self._place(self._rank, step.send, leaving), to))
            self._count(to, leaving)
        self._order.exchange(number, messages, reads, writes)
        if not receives:
            return
        if step.reduce:
            assert self._reduction is not None
            current = self._place(self._rank, step.recv, arriving)
            into = self._place(self._rank, step.recv, arriving, written=True)
            region = _region(step.recv)
            make = partial(executor.combine, self._reduction, [current, landing], into, False, None)
            self._order.local(make, [(SCRATCH, slot, slot + 1), region], [region])
        self._mark(step.recv)

    def _landing(self, slot: int) -> int:
        if not self._landings:
            steps = self._program.executed(self._rank)
            arriving = [s for s in steps if isinstance(s, Exchange) and s.reduce and int(s.source) != NONE]
            largest = max(self._elements(step.recv)[1] for step in arriving)
            self._landings = [self._new_scratch(largest) for _ in range(_LANDINGS)]
        return self._landings[slot]

    def _is_remote(self, owner: int, span: Span) -> bool:
        return owner != self._rank and span.memory == WORK and self._transfers is not None

    def _transfer(self, local: Place, owner: int, span: Span, *, write: bool) -> Maker:
        """Copies between a place here and a span of another process's WORK."""
        assert self._transfers is not None
        start, first, most = self._elements(span)[0], len(self._locals), LARGEST_COUNT // self._item
        for lo in range(0, local.numel, most):
            numel = min(most, local.numel - lo)
            self._locals.append(local._replace(start=local.start + lo, numel=numel))
            self._transfers.add(owner, (start + lo) * self._item, numel * self._item, write=write)
        return partial(executor.transfer, slice(first, len(self._locals)))

    def _fetched(self, slot: int, numel: int) -> Place:
        """Memory for what is read from another process before it is combined."""
        while len(self._fetches) <= slot:
            self._fetches.append(self._new_scratch(max(self._layout.slot, numel)))
        return Place(SCRATCH, self._fetches[slot], 0, numel)

    def _combine(self, step: Combine, scale: float | None) -> None:
        assert self._reduction is not None
        present = [(int(owner), span) for owner, span in step.parts if int(owner) != NONE]
        numel = min(self._elements(span)[1] for span in (step.into, *(span for _, span in present)))
        if numel == 0:
            return
        into = self._place(self._rank, step.into, numel, written=True)
        # then one landing place in the cache is enough; 16-bit sums would lose digits by rounding after each pair
        one_by_one = self._reduction.dtype not in HALVES and not step.tree
        parts: list[Place] = []
        makers: list[Maker] = []
        for number, (owner, span) in enumerate(present):
            self._count(owner, numel)
            if not self._is_remote(owner, span):
                parts.append(self._place(owner, span, numel))
                continue
            landing = self._fetched(0 if one_by_one else number, numel)
            makers.append(self._transfer(landing, owner, span, write=False))
            parts.append(landing)
            if one_by_one and len(parts) == 2:
                last = scale if number == len(present) - 1 else None
                makers.append(partial(executor.combine, self._reduction, parts, into, False, last))
                parts = [into]
        if len(parts) > 1 or len(present) == 1:
            makers.append(partial(executor.combine, self._reduction, parts, into, step.tree, scale))
        for make in makers:
            self._order.local(make, [_region(span) for _, span in present], [_region(step.into)])
        self._mark(step.into)

    def _copy(self, step: Copy) -> None:
        dest, source = int(step.dest), int(step.source)
        if dest == NONE or CALLER in (step.into.memory, step.of.memory):
            return
        numel = min(self._elements(step.into)[1], self._elements(step.of)[1])  # a slot may be larger than a chunk
        if numel == 0:
            return
        if self._is_remote(source, step.of):
            make = self._transfer(self._place(self._rank, step.into, numel, written=True), source, step.of, write=False)
        elif self._is_remote(dest, step.into):
            make = self._transfer(self._place(self._rank, step.of, numel), dest, step.into, write=True)
        else:
            of = self._place(source, step.of, numel)
            make = partial(executor.copy, self._place(dest, step.into, numel, written=True), of)
        self._count(source if dest == self._rank else dest, numel)
        self._order.local(make, [_region(step.of)], [_region(step.into)])
        if dest == self._rank:
            self._mark(step.into)

    def _finish(self, step: Finish) -> None:
        (_, numel), scale, region = self._elements(step.span), self._scale, _region(step.span)
        if numel and scale is not None:
            place = self._place(self._rank, step.span, numel)
            self._order.local(lambda binding: executor.scaling(binding.view(place), scale), [region], [region])

    def _bring_home(self) -> None:
        """Blocks this rank must end with that were never written are still in the caller's input: copy them."""
        segments = self._program.segments
        for goal in self._program.collective.ends(self._rank):
            if goal.memory == WORK and not any(self._arrived[goal.cell * segments : (goal.cell + 1) * segments]):
                block = Span(goal.cell * segments, (goal.cell + 1) * segments)
                self._copy(Copy(self._rank, block, self._rank, block))


def _region(span: Span) -> Region:
    return span.memory, int(span.lo), int(span.hi)
