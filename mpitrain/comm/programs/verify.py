"""Proof, without MPI, that a program is correct: every rank ends with every contribution exactly once.

The programs of all ranks are run symbolically. A memory cell has the number of a chunk and the set of ranks whose
contributions it sums (a bit mask). These are errors:

- adding a contribution twice, or finishing a chunk twice;
- reading a cell that nobody has written;
- sending one chunk where another is expected;
- accessing the memory of another node;
- accessing one shared cell from two ranks, neither of which has waited for the other in between (a race).

Sends are synchronous: they complete only when the receiver has posted its receive. A program that passes therefore
cannot deadlock in any MPI library.

Vector clocks (Fidge 1988, Mattern 1989) record the order between ranks. A fence, or a signal and the wait for it,
makes the earlier actions of a rank known to the others. Two accesses are ordered if the later rank knew of the earlier
access. Otherwise they race, whatever their order in this proof.

Programs that use shared memory are run several times, and the caller writes to its vector between the runs, to find
programs that are only correct once. Programs with phases and several vectors are also run with the phases of
different runs interleaved as far as the vectors allow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from mpitrain.comm.programs.program import (
    BOARD,
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
    Tell,
)

_MAX_CHUNKS = 256  # largest number of chunks over all ranks; a proof takes about a millisecond per chunk

Order = Callable[[int], Iterable[tuple[int, int]]]
"""Function that returns, for a rank, the pairs (run, phase) in the order in which the caller starts them."""

_Cell = tuple[str, int, int]  # memory, vector, number


class ProgramError(Exception):
    """A program is wrong; the message names the rank and the step."""


@dataclass(frozen=True)
class Value:
    """Contents of a cell in the symbolic run: the sum of the contributions of some ranks to a chunk.

    Attributes:
        chunk: Number of the chunk.
        ranks: Ranks that have contributed, as a bit mask.
        run: Run of the program that the contributions come from.
        finished: True after a `Finish`.
    """

    chunk: int
    ranks: int
    run: int
    finished: bool = False


@dataclass(frozen=True)
class _Begin:
    """Start of a run: the caller has finished with the previous result in this vector and writes new values."""


@dataclass(frozen=True)
class _End:
    """End of a run: the caller reads the result."""


_Step = Step | _Begin | _End


@dataclass
class _Rank:
    """State of one rank.

    Attributes:
        rank: Number of the rank.
        steps: Steps, each with the run that it belongs to.
        clock: Vector clock: for each rank, the number of its intervals between meetings that this rank knows of, its
            own current interval included.
        index: Index of the current step.
        outgoing: Values of the send in progress, read when the step began; None if no exchange has begun.
        sent, received: True if that half of the current exchange is complete.
        memory: Values of the cells.
    """

    rank: int
    steps: list[tuple[int, _Step]]
    clock: list[int]
    index: int = 0
    outgoing: list[Value] | None = None
    sent: bool = False
    received: bool = False
    memory: dict[_Cell, Value] = field(default_factory=dict)

    @property
    def step(self) -> _Step | None:
        """Current step; None after the last one."""
        return self.steps[self.index][1] if self.index < len(self.steps) else None

    @property
    def run(self) -> int:
        """Run that the current step belongs to."""
        return self.steps[self.index][0]

    def advance(self) -> None:
        """Go to the next step."""
        self.index, self.outgoing, self.sent, self.received = self.index + 1, None, False, False

    def merge_clocks(self, clocks: Iterable[Sequence[int]]) -> None:
        """Merge the clocks of other ranks into this rank's clock."""
        self.clock = [max(known) for known in zip(self.clock, *clocks, strict=True)]


@dataclass
class _Access:
    """Last accesses to a cell. Each is identified by the rank and the number of the interval of its steps.

    Attributes:
        write: (rank, interval) of the last write.
        reads: Interval of each rank's last read since that write, by rank.
    """

    write: tuple[int, int] | None = None
    reads: dict[int, int] = field(default_factory=dict)


def verify(program: Program, order: Order | None = None) -> None:
    """Prove that a program is correct, by running the steps of all its ranks symbolically.

    Args:
        program: The program.
        order: Order in which the caller runs the phases of several runs. By default one run follows another; if there
            are several vectors and phases, a second proof has each phase as late as the vectors allow.

    Raises:
        ProgramError: The program does not fulfil its specification, or has a deadlock or a race.
    """
    for each in [order] if order is not None else _orders(program):
        _Verifier(program, each).run()


def _orders(program: Program) -> list[Order]:
    """Return the orders of phases in which a program is proved by default."""
    phases, vectors = max(len(program.phases(rank)) for rank in range(program.size)), program.vectors
    meets = any(isinstance(step, Fence | Signal) for step in program.steps(0))
    runs = 1 if not meets else 3 if vectors == 1 else 2 * vectors + 1
    orders: list[Order] = [lambda rank: [(run, phase) for run in range(runs) for phase in range(phases)]]
    if phases > 1 and vectors > 1:
        late: list[tuple[int, int]] = []
        for run in range(runs + vectors):
            if run >= vectors:
                late += [(run - vectors, phase) for phase in range(1, phases)]
            if run < runs:
                late.append((run, 0))
        orders.append(lambda rank: late)
    return orders


class _Verifier:
    """Symbolic run of one program in one order of phases.

    Attributes:
        program: The program.
        ranks: State of each rank.
        limit: Number of cells of each memory.
        accesses: Last accesses by (owner, cell).
        signals: For (node, run, event), the clock of each rank at its signal.
    """

    def __init__(self, program: Program, order: Order) -> None:
        self.program = program
        self.ranks = [_Rank(r, _steps(program, r, order), _begin_clock(r, program.size)) for r in range(program.size)]
        self.limit = {WORK: program.chunks, SLOT: program.slots, INBOX: program.inbox, CALLER: program.chunks, BOARD: 1}
        self.accesses: dict[tuple[int, _Cell], _Access] = defaultdict(_Access)
        self.signals: dict[tuple[int, int, str], dict[int, list[int]]] = defaultdict(dict)

    def run(self) -> None:
        """Run all ranks until each has done its last step.

        Raises:
            ProgramError: The program is wrong, or no rank can continue.
        """
        progress = True
        while progress:
            progress = False
            for state in self.ranks:
                while self._try(state):
                    progress = True
        stuck = [s for s in self.ranks if s.step is not None]
        if stuck:
            where = "; ".join(f"rank {s.rank} at step {s.index}: {s.step}" for s in stuck[:4])
            raise ProgramError(f"{self.program.name} on {self.program.size} ranks deadlocks: {where}")

    def _try(self, state: _Rank) -> bool:
        """Run the rank's current step if it can run now; return True if anything changed."""
        step = state.step
        if step is None:
            return False
        if isinstance(step, Exchange):
            return self._exchange(state, step)
        if isinstance(step, Fence):
            return self._fence(state)
        if isinstance(step, Await):
            return self._await(state, step)
        if isinstance(step, Signal):
            self._signal(state, step)
        elif isinstance(step, _Begin):
            self._begin(state)
        elif isinstance(step, _End):
            self._check_goal(state)
        elif isinstance(step, Combine):
            self._combine(state, step)
        elif isinstance(step, Copy):
            self._copy(state, step)
        elif isinstance(step, Finish):
            self._finish(state, step)
        else:
            self._use_board(state, step)
        state.advance()
        return True

    def _begin(self, state: _Rank) -> None:
        program = self.program
        for chunk in range(program.chunks):
            has_block = program.collective.holds(state.rank, chunk // program.segments)
            for cell in (self._cell(state, WORK, chunk), self._cell(state, CALLER, chunk)):
                self._access(state, state.rank, cell, wrote=True)
                state.memory.pop(cell, None)
                if has_block:
                    state.memory[cell] = Value(chunk, 1 << state.rank, state.run)

    def _exchange(self, state: _Rank, step: Exchange) -> bool:
        to, source = int(step.to), int(step.source)
        changed = state.outgoing is None
        if state.outgoing is None:
            if (
                NONE not in (to, source)
                and not step.reduce
                and set(self._cells(state, step.send)) & set(self._cells(state, step.recv))
            ):
                raise self._error(state, "sends and receives the same cell")
            leaving = self._cells(state, step.send) if to != NONE else []
            state.outgoing = [self._read(state, state.rank, cell) for cell in leaving]
            state.sent, state.received = to == NONE, source == NONE
        if not state.sent:
            peer = self.ranks[to]
            peer_step = peer.step
            posted = peer.outgoing is not None and not peer.received
            if posted and isinstance(peer_step, Exchange) and int(peer_step.source) == state.rank:
                self._deliver(peer, peer_step, state.outgoing)
                state.sent = peer.received = changed = True
        if state.sent and state.received:
            state.advance()
            return True
        return changed

    def _deliver(self, peer: _Rank, step: Exchange, values: list[Value]) -> None:
        cells = self._cells(peer, step.recv)
        if len(cells) != len(values):
            raise self._error(peer, f"expects {len(cells)} chunks, but rank {step.source} sends {len(values)}")
        for cell, value in zip(cells, values, strict=True):
            if cell[0] == WORK and cell[2] != value.chunk:
                raise self._error(peer, f"receives chunk {value.chunk} where chunk {cell[2]} belongs")
            if step.reduce:
                value = self._add(peer, self._read(peer, peer.rank, cell), value)
            self._write(peer, peer.rank, cell, value)

    def _members(self, state: _Rank) -> list[_Rank]:
        """Return the ranks of the node of this rank."""
        node = self.program.nodes[state.rank]
        return [other for other in self.ranks if self.program.nodes[other.rank] == node]

    def _fence(self, state: _Rank) -> bool:
        members = self._members(state)
        if not all(isinstance(member.step, Fence) for member in members):
            return False
        state.merge_clocks([member.clock for member in members])
        for member in members:
            member.clock = list(state.clock)
            member.clock[member.rank] += 1
            member.advance()
        return True

    def _signal(self, state: _Rank, step: Signal) -> None:
        clocks = self.signals[self.program.nodes[state.rank], state.run, step.event]
        if state.rank in clocks:
            raise self._error(state, f"signals {step.event} twice in a run")
        clocks[state.rank] = list(state.clock)
        state.clock[state.rank] += 1

    def _await(self, state: _Rank, step: Await) -> bool:
        clocks = self.signals[self.program.nodes[state.rank], state.run, step.event]
        if len(clocks) < len(self._members(state)):
            return False
        state.merge_clocks(clocks.values())
        state.advance()
        return True

    def _use_board(self, state: _Rank, step: Tell | Compare) -> None:
        if isinstance(step, Compare):
            for member in self._members(state):
                row = self._read(state, member.rank, (BOARD, 0, 0))
                if row.run != state.run:
                    raise self._error(state, f"compares with the operation of rank {member.rank} in run {row.run}")
        else:
            self._write(state, state.rank, (BOARD, 0, 0), Value(0, 1 << state.rank, state.run))

    def _combine(self, state: _Rank, step: Combine) -> None:
        for offset, cell in enumerate(self._cells(state, step.into)):
            total: Value | None = None
            for owner, span in step.parts:
                if int(owner) == NONE:
                    continue
                part = self._read(state, int(owner), self._cells(state, span)[offset])
                total = part if total is None else self._add(state, total, part)
            if total is None:
                raise self._error(state, "combines no operands")
            self._write(state, state.rank, cell, total)

    def _copy(self, state: _Rank, step: Copy) -> None:
        dest, source = int(step.dest), int(step.source)
        if dest == NONE:
            return
        if state.rank not in (dest, source):
            raise self._error(state, "copies between two other ranks")
        for target_cell, source_cell in zip(self._cells(state, step.into), self._cells(state, step.of), strict=True):
            self._write(state, dest, target_cell, self._read(state, source, source_cell))

    def _finish(self, state: _Rank, step: Finish) -> None:
        for cell in self._cells(state, step.span):
            value = self._read(state, state.rank, cell)
            if value.finished:
                raise self._error(state, f"finishes chunk {value.chunk} twice")
            self._write(state, state.rank, cell, Value(value.chunk, value.ranks, value.run, True))

    def _check_goal(self, state: _Rank) -> None:
        program = self.program
        for goal in program.collective.ends(state.rank):
            whole = sum(1 << r for r in goal.ranks)
            for s in range(program.segments):
                cell = self._cell(state, goal.memory, goal.cell * program.segments + s)
                expected = Value(goal.block * program.segments + s, whole, state.run, program.collective.reduces)
                actual = self._read(state, state.rank, cell)
                if actual != expected:
                    raise self._error(state, f"ends with {actual} in {cell}, not with {expected}")

    def _cell(self, state: _Rank, memory: str, number: int) -> _Cell:
        return memory, state.run % self.program.vectors if memory in (WORK, CALLER) else 0, number

    def _cells(self, state: _Rank, span: Span) -> list[_Cell]:
        return [self._cell(state, span.memory, number) for number in range(int(span.lo), int(span.hi))]

    def _read(self, state: _Rank, owner: int, cell: _Cell) -> Value:
        self._access(state, owner, cell, wrote=False)
        value = self.ranks[owner].memory.get(cell)
        if value is None:
            raise self._error(state, f"reads {cell} of rank {owner}, which nobody has written")
        return value

    def _write(self, state: _Rank, owner: int, cell: _Cell, value: Value) -> None:
        self._access(state, owner, cell, wrote=True)
        self.ranks[owner].memory[cell] = value

    def _access(self, state: _Rank, owner: int, cell: _Cell, wrote: bool) -> None:
        memory, _, number = cell
        if not 0 <= number < self.limit[memory]:
            raise self._error(state, f"accesses {cell}, but this memory has {self.limit[memory]} cells")
        if self.program.nodes[owner] != self.program.nodes[state.rank]:
            raise self._error(state, f"accesses memory of rank {owner}, which is on another node")
        if memory in (INBOX, CALLER):
            if owner != state.rank:
                raise self._error(state, f"accesses the private {memory} of rank {owner}")
            return
        access, interval = self.accesses[owner, cell], state.clock[state.rank]
        earlier = [access.write] if access.write is not None else []
        earlier += access.reads.items() if wrote else []
        unknown = sorted(rank for rank, when in earlier if rank != state.rank and state.clock[rank] < when)
        if unknown:
            raise self._error(state, f"accesses {cell} of rank {owner} while ranks {unknown} may use it: nobody waits")
        if wrote:
            access.write = state.rank, interval
            access.reads.clear()
        else:
            access.reads[state.rank] = interval

    def _add(self, state: _Rank, a: Value, b: Value) -> Value:
        if (a.chunk, a.run) != (b.chunk, b.run):
            raise self._error(state, f"adds chunk {b.chunk} of run {b.run} to chunk {a.chunk} of run {a.run}")
        if a.ranks & b.ranks:
            raise self._error(
                state, f"adds the contributions of ranks {a.ranks & b.ranks:b} (bit mask) to chunk {a.chunk} twice"
            )
        if a.finished or b.finished:
            raise self._error(state, f"adds to chunk {a.chunk}, which is finished")
        return Value(a.chunk, a.ranks | b.ranks, a.run)

    def _error(self, state: _Rank, what: str) -> ProgramError:
        at = f"rank {state.rank}, step {state.index} ({state.step})"
        return ProgramError(f"{self.program.name} on {self.program.size} ranks: {at} {what}")


def _begin_clock(rank: int, size: int) -> list[int]:
    """Return the initial clock of a rank, which knows only of its own first interval."""
    return [int(other == rank) for other in range(size)]


def _steps(program: Program, rank: int, order: Order) -> list[tuple[int, _Step]]:
    """Return a rank's steps with their runs, in the order of the phases."""
    phases, last = program.phases(rank), max(len(program.phases(r)) for r in range(program.size)) - 1
    phases += [[] for _ in range(last + 1 - len(phases))]  # a wrong program may have fewer on some ranks
    steps: list[tuple[int, _Step]] = []
    for run, phase in order(rank):
        mine: list[_Step] = [_Begin()] if phase == 0 else []
        mine += phases[phase]
        if phase == last:
            mine += [_End(), Fence()] if program.meets_between else [_End()]
        steps += [(run, step) for step in mine]
    return steps


class Proofs:
    """Programs that a process has proved, each of them once; used in debug mode."""

    def __init__(self) -> None:
        self._proved: set[Hashable] = set()

    def prove(self, program: Program) -> None:
        """Prove a program unless it was proved before. A program that is too large to prove here is accepted.

        Raises:
            ProgramError: The program is wrong.
        """
        shape = program.name, program.size, program.nodes, program.blocks, program.segments
        if shape in self._proved or program.size * program.chunks > _MAX_CHUNKS:
            return
        verify(program)
        self._proved.add(shape)
