"""Compilation of a program for one rank: the calls to make, in order, on memory whose addresses are given later.

A plan depends on sizes, not on addresses. A caller whose tensors are at new addresses each time pays only for
binding: one view and one call per chunk. A message that is to be reduced is received into scratch memory. While it is
added, the next messages are already posted, as long as they use other chunks (`_CallOrder`).

A chunk of WORK is read from where it currently is: at first from the caller's input, and from the output once it was
written. So nothing is copied before the first reduction, and inputs do not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.job.traffic import Volume
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

_IN_FLIGHT = 2  # largest number of exchanges that are posted and not yet waited for
_LANDINGS = _IN_FLIGHT + 1  # scratch areas for messages to be reduced: those in flight and the one being added


@dataclass(frozen=True)
class _Entry:
    """One call of a plan.

    Attributes:
        kind: "post", "wait", "local" or "barrier".
        call: Makes the call for the addresses of a binding.
        reads, writes: Memory that the call reads and writes.
    """

    kind: str
    call: Maker
    reads: Sequence[Region] = ()
    writes: Sequence[Region] = ()


def _overlap(a: Sequence[Region], b: Sequence[Region]) -> bool:
    """Return True if any of the regions `a` overlaps any of the regions `b`."""
    return any(m == n and lo < end and start < hi for m, lo, hi in a for n, start, end in b)


class _CallOrder:
    """The calls of a plan in order, with the posting of each exchange moved ahead.

    Calls are added in program order, with the memory they read and write. A posting is moved ahead, but never past
    another posting (messages between two ranks match in order), a barrier or a call that uses the same memory. At most
    `_IN_FLIGHT` exchanges are posted and not yet waited for.
    """

    def __init__(self) -> None:
        self.entries: list[_Entry] = []

    def local(self, call: Maker, reads: Sequence[Region], writes: Sequence[Region]) -> None:
        """Add a call that involves this rank alone.

        Args:
            call: Makes the call.
            reads, writes: Memory that it reads and writes.
        """
        self.entries.append(_Entry("local", call, reads, writes))

    def barrier(self, call: Maker) -> None:
        """Add a call that no posting may be moved past."""
        self.entries.append(_Entry("barrier", call))

    def exchange(self, number: int, messages: list[Message], reads: Sequence[Region], writes: Sequence[Region]) -> None:
        """Add an exchange of messages. Its messages are posted as early as the entries before it allow.

        Args:
            number: Number of the exchange in the program.
            messages: Messages that are sent and received.
            reads, writes: Memory that is sent and received into.
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

    It can be bound several times, but only one of the bound programs may run at a time, because they share scratch
    memory.
    """

    def __init__(
        self,
        program: Program,
        comm: MPI.Comm,
        layout: Layout,
        reduction: Reduction | None,
        meet: Call,
        sync: Sequence[Call] = (),
        naps: bool = False,
    ) -> None:
        """Compile a program.

        Args:
            program: The program.
            comm: MPI communicator of the program's ranks.
            layout: Any layout with the shape (`Layout.shape`) that the plan is for.
            reduction: Arithmetic of the program; None if it combines nothing.
            meet: Returns when all ranks of the node have called it.
            sync: Calls that make writes to the node's shared memory visible (MPI-4.1, section 12.7). They are made
                before this rank notifies others of its writes, and after others have notified it of theirs.
            naps: True if waits for messages nap, because ranks share cores (see `waiting`).
        """
        self._computes = reduction is not None and (layout.dtype.is_floating_point or layout.dtype.is_complex)
        self._comm, self._program, self._layout, self._reduction = comm, program, layout, reduction
        self._scale = reduction.scale if reduction is not None else None
        self._sync, self._fence = sync, [*sync, meet, *sync]
        self._naps = naps
        self._rank, self._item = comm.rank, layout.dtype.itemsize
        in_place = layout.source == layout.target
        self._inside = self._between = 0  # intra-node and inter-node bytes of the phase being compiled
        self._written = bytearray([in_place]) * program.chunks  # 1 for each chunk of WORK that is in the target by now
        self._phases: list[tuple[list[Maker], str, Volume]] = []  # makers, event awaited before them, bytes moved
        self._scratch: list[torch.Tensor] = []
        self._exchanges = 0
        self._landings: list[int] = []  # numbers of scratch areas
        self._fetches: list[int] = []
        self._transfers = Transfers(layout.neighbours) if layout.neighbours is not None else None
        self._local_places: list[Place] = []  # this rank's side of each transfer
        self._inbox_bounds = layout.inbox_bounds or [i * layout.slot for i in range(program.inbox + 1)]
        nbytes = 0 if layout.inbox else self._inbox_bounds[-1]
        self._inbox = self._new_scratch(nbytes) if nbytes else NONE  # in scratch memory, unless the layout has an inbox
        phases = program.phases(self._rank)
        for steps in phases:
            self._order = _CallOrder()
            self._compile(steps)
            if steps is phases[-1]:
                self._copy_unwritten_blocks()
            awaited = steps[0].event if steps and isinstance(steps[0], Await) else ""
            volume = Volume(program.name.split()[0], self._inside, self._between)
            self._phases.append(([entry.call for entry in self._order.entries], awaited, volume))
            self._inside = self._between = 0

    def bind(self, layout: Layout) -> Compiled:
        """Bind a program of one phase to the addresses of a layout. Only one bound program may run at a time."""
        (only,) = self.bind_phases(layout)
        return only

    def bind_phases(self, layout: Layout) -> list[Compiled]:
        """Bind each phase of the program to the addresses of a layout. Only one bound program may run at a time."""
        meets = layout.board is not None
        binding = executor.Binding(self._comm, layout, self._scratch, self._transfers, self._local_places, self._naps)
        bound: list[Compiled] = []
        for makers, event, volume in self._phases:
            first = len(binding.all_requests)
            calls = [call for make in makers for call in make(binding)]
            awaited_signal = binding.event_signal(event) if event else None
            requests = binding.all_requests[first:]
            bound.append(Compiled(calls, [self], requests, self._computes, meets, awaited_signal, volume))
        return bound

    def _compile(self, steps: Sequence[Step]) -> None:
        finished = False  # true if the step was already done with the one before it
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
            elif isinstance(step, Compare):  # this call also does the two steps before it, Tell and Fence
                self._order.barrier(partial(executor.meet, self._fence))

    def _count(self, other: int, numel: int) -> None:
        """Count the bytes of `numel` elements, if they move between this rank and another."""
        if other != self._rank:
            here = self._program.nodes[other] == self._program.nodes[self._rank]
            self._inside += numel * self._item * here
            self._between += numel * self._item * (not here)

    def _new_scratch(self, numel: int) -> int:
        """Allocate a scratch area of `numel` elements, and return its number."""
        self._scratch.append(torch.empty(numel, dtype=self._layout.dtype, device=self._layout.device))
        return len(self._scratch) - 1

    def _elements(self, span: Span) -> tuple[int, int]:
        """Return the offset and the number of elements of a span in its memory."""
        lo, hi = int(span.lo), int(span.hi)
        if hi <= lo:
            return 0, 0
        if span.memory == SLOT:
            return lo * self._layout.slot, (hi - lo) * self._layout.slot
        bounds = self._layout.bounds if span.memory == WORK else self._inbox_bounds
        return bounds[lo], bounds[hi] - bounds[lo]

    def _place(self, owner: int, span: Span, numel: int, *, written: bool = False) -> Place:
        """Return the place from which a span of a rank's memory is read, or to which it is written."""
        start = self._elements(span)[0]
        if span.memory == INBOX and self._inbox != NONE:
            return Place(SCRATCH, self._inbox, start, numel)
        if span.memory != WORK:
            return Place(span.memory, owner, start, numel)
        if owner != self._rank:
            return Place(PEER, owner, start, numel)
        bounds = self._layout.bounds  # empty chunks are left out: they are never written, so never marked as arrived
        arrived = [self._written[c] for c in range(int(span.lo), int(span.hi)) if bounds[c] < bounds[c + 1]]
        if written or all(arrived):
            return Place(TARGET, owner, start, numel)
        if any(arrived):
            raise AssertionError(f"{self._program.name}: a span lies half in the input and half in the output")
        return Place(SOURCE, owner, start, numel)

    def _mark_written(self, span: Span) -> None:
        """Mark the chunks of a span as written to the target."""
        if span.memory == WORK:
            lo, hi = int(span.lo), int(span.hi)
            self._written[lo:hi] = b"\1" * (hi - lo)

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
        self._mark_written(step.recv)

    def _landing(self, slot: int) -> int:
        """Return the number of a scratch area for a message that is to be reduced."""
        if not self._landings:
            steps = self._program.executed(self._rank)
            arriving = [s for s in steps if isinstance(s, Exchange) and s.reduce and int(s.source) != NONE]
            largest = max(self._elements(step.recv)[1] for step in arriving)
            self._landings = [self._new_scratch(largest) for _ in range(_LANDINGS)]
        return self._landings[slot]

    def _is_remote(self, owner: int, span: Span) -> bool:
        """Return True if a span is in the WORK of another process and reached by system calls."""
        return owner != self._rank and span.memory == WORK and self._transfers is not None

    def _transfer(self, local: Place, owner: int, span: Span, *, write: bool) -> Maker:
        """Add the copies between a place here and a span of another process's WORK; return the maker of their calls."""
        assert self._transfers is not None
        start, first, most = self._elements(span)[0], len(self._local_places), LARGEST_COUNT // self._item
        for lo in range(0, local.numel, most):
            numel = min(most, local.numel - lo)
            self._local_places.append(local._replace(start=local.start + lo, numel=numel))
            self._transfers.add(owner, (start + lo) * self._item, numel * self._item, write=write)
        return partial(executor.transfer, slice(first, len(self._local_places)))

    def _fetch_buffer(self, slot: int, numel: int) -> Place:
        """Return scratch memory for data that is read from another process before it is combined."""
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
        # one by one, a single landing area in the cache is enough; 16-bit sums would lose digits by repeated rounding
        one_by_one = self._reduction.dtype not in HALVES and not step.tree
        parts: list[Place] = []
        makers: list[Maker] = []
        for number, (owner, span) in enumerate(present):
            self._count(owner, numel)
            if not self._is_remote(owner, span):
                parts.append(self._place(owner, span, numel))
                continue
            landing = self._fetch_buffer(0 if one_by_one else number, numel)
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
        self._mark_written(step.into)

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
            source_place = self._place(source, step.of, numel)
            make = partial(executor.copy, self._place(dest, step.into, numel, written=True), source_place)
        self._count(source if dest == self._rank else dest, numel)
        self._order.local(make, [_region(step.of)], [_region(step.into)])
        if dest == self._rank:
            self._mark_written(step.into)

    def _finish(self, step: Finish) -> None:
        (_, numel), scale, region = self._elements(step.span), self._scale, _region(step.span)
        if numel and scale is not None:
            place = self._place(self._rank, step.span, numel)
            self._order.local(lambda binding: executor.make_scaling(binding.view(place), scale), [region], [region])

    def _copy_unwritten_blocks(self) -> None:
        """Fill the blocks of this rank's output that no step writes: copy them from the caller's input."""
        segments = self._program.segments
        for goal in self._program.collective.ends(self._rank):
            if goal.memory == WORK and not any(self._written[goal.cell * segments : (goal.cell + 1) * segments]):
                block = Span(goal.cell * segments, (goal.cell + 1) * segments)
                self._copy(Copy(self._rank, block, self._rank, block))


def _region(span: Span) -> Region:
    return span.memory, int(span.lo), int(span.hi)
