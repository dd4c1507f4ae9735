"""Proof, without MPI, that a program is right: every rank ends with every contribution exactly once.

The program of every rank is run symbolically. A memory cell holds a chunk's number and the set of ranks
whose contributions it sums (a bit mask); adding a contribution twice, reading a cell nobody wrote, sending
one chunk where another is expected, touching another node's memory, two ranks touching one shared cell
between two fences, and finishing a chunk twice are errors. Sends are synchronous (they complete only when the
receiver has posted its receive), so a program that passes cannot deadlock on any MPI.

Programs that use shared memory are run several times over, the caller writing into its vector in between, so
that a program which is safe only once is found out.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from mpitrain.comm.programs.program import (
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
    Step,
)


class ProgramError(Exception):
    """The program is wrong: says at which rank and step."""


@dataclass(frozen=True)
class Value:
    """Content of a cell: `chunk`'s sum over the ranks in the bit mask `ranks`."""

    chunk: int
    ranks: int
    run: int
    finished: bool = False


@dataclass(frozen=True)
class _Begin:
    """The caller has the result of the run before, and gives new values."""

    run: int


@dataclass(frozen=True)
class _End:
    """The caller looks at the result."""

    run: int


@dataclass
class _Rank:
    rank: int
    steps: list[Step | _Begin | _End]
    at: int = 0
    run: int = 0
    outgoing: list[Value] | None = None  # values of the send in flight, taken when the step began
    sent: bool = False
    received: bool = False
    memory: dict[tuple[str, int], Value] = field(default_factory=dict)

    @property
    def step(self) -> Step | _Begin | _End | None:
        return self.steps[self.at] if self.at < len(self.steps) else None

    def advance(self) -> None:
        self.at, self.outgoing, self.sent, self.received = self.at + 1, None, False, False


def verify(program: Program) -> None:
    """Raise ProgramError unless the program does what its collective says, without deadlock or race."""
    _Verifier(program).run()


class _Verifier:
    def __init__(self, program: Program) -> None:
        self.program = program
        runs = 3 if program.fenced else 1
        self.ranks = [_Rank(r, _repeated(program, r, runs)) for r in range(program.size)]
        self.limit = {WORK: program.chunks, SLOT: program.slots, INBOX: program.inbox}
        # (owner, memory, cell) -> {rank that touched it: wrote it?}, for the current epoch of the owner's node
        self.touched: dict[int, dict[tuple[int, str, int], dict[int, bool]]] = defaultdict(lambda: defaultdict(dict))

    def run(self) -> None:
        progress = True
        while progress:
            progress = False
            for state in self.ranks:
                while self._try(state):
                    progress = True
        stuck = [s for s in self.ranks if s.step is not None]
        if stuck:
            where = "; ".join(f"rank {s.rank} at step {s.at}: {s.step}" for s in stuck[:4])
            raise ProgramError(f"{self.program.name} on {self.program.size} ranks deadlocks: {where}")

    def _try(self, state: _Rank) -> bool:
        """Run the rank's current step if it can run now."""
        step = state.step
        if step is None:
            return False
        if isinstance(step, Exchange):
            return self._exchange(state, step)
        if isinstance(step, Fence):
            return self._fence(state)
        if isinstance(step, _Begin):
            self._begin(state, step.run)
        elif isinstance(step, _End):
            self._check_goal(state)
        elif isinstance(step, Combine):
            self._combine(state, step)
        elif isinstance(step, Copy):
            self._copy(state, step)
        else:
            self._finish(state, step)
        state.advance()
        return True

    def _begin(self, state: _Rank, run: int) -> None:
        state.run = run
        for chunk in range(self.program.chunks):
            self._touch(state, state.rank, (WORK, chunk), wrote=True)
            state.memory.pop((WORK, chunk), None)
            if self.program.collective.holds(state.rank, chunk // self.program.segments):
                state.memory[WORK, chunk] = Value(chunk, 1 << state.rank, run)

    def _exchange(self, state: _Rank, step: Exchange) -> bool:
        to, source = int(step.to), int(step.source)
        changed = state.outgoing is None
        if state.outgoing is None:
            if (
                NONE not in (to, source)
                and not step.reduce
                and set(self._cells(step.send)) & set(self._cells(step.recv))
            ):
                raise self._error(state, "sends and receives the same cell")
            state.outgoing = [self._read(state, state.rank, c) for c in self._cells(step.send)] if to != NONE else []
            state.sent, state.received = to == NONE, source == NONE
        if not state.sent:
            peer = self.ranks[to]
            wanted = peer.step
            posted = peer.outgoing is not None and not peer.received
            if posted and isinstance(wanted, Exchange) and int(wanted.source) == state.rank:
                self._deliver(peer, wanted, state.outgoing)
                state.sent = peer.received = changed = True
        if state.sent and state.received:
            state.advance()
            return True
        return changed

    def _deliver(self, peer: _Rank, wanted: Exchange, values: list[Value]) -> None:
        cells = self._cells(wanted.recv)
        if len(cells) != len(values):
            raise self._error(peer, f"expects {len(cells)} chunks, rank {wanted.source} sends {len(values)}")
        for cell, value in zip(cells, values, strict=True):
            if cell[0] == WORK and cell[1] != value.chunk:
                raise self._error(peer, f"receives chunk {value.chunk} where chunk {cell[1]} belongs")
            if wanted.reduce:
                value = self._add(peer, self._read(peer, peer.rank, cell), value)
            self._write(peer, peer.rank, cell, value)

    def _fence(self, state: _Rank) -> bool:
        node = self.program.nodes[state.rank]
        members = [s for s in self.ranks if self.program.nodes[s.rank] == node]
        if not all(isinstance(s.step, Fence) for s in members):
            return False
        for member in members:
            member.advance()
        self.touched[node].clear()
        return True

    def _combine(self, state: _Rank, step: Combine) -> None:
        for offset, cell in enumerate(self._cells(step.into)):
            total: Value | None = None
            for owner, span in step.parts:
                if int(owner) == NONE:
                    continue
                part = self._read(state, int(owner), list(self._cells(span))[offset])
                total = part if total is None else self._add(state, total, part)
            if total is None:
                raise self._error(state, "combines nothing")
            self._write(state, state.rank, cell, total)

    def _copy(self, state: _Rank, step: Copy) -> None:
        dest, source = int(step.dest), int(step.source)
        if dest == NONE:
            return
        if state.rank not in (dest, source):
            raise self._error(state, "copies between two other ranks")
        for to, of in zip(self._cells(step.into), self._cells(step.of), strict=True):
            self._write(state, dest, to, self._read(state, source, of))

    def _finish(self, state: _Rank, step: Finish) -> None:
        for cell in self._cells(step.span):
            value = self._read(state, state.rank, cell)
            if value.finished:
                raise self._error(state, f"finishes chunk {value.chunk} twice")
            self._write(state, state.rank, cell, Value(value.chunk, value.ranks, value.run, True))

    def _check_goal(self, state: _Rank) -> None:
        program = self.program
        for goal in program.collective.ends(state.rank):
            whole = sum(1 << r for r in goal.ranks)
            for s in range(program.segments):
                cell = goal.memory, goal.cell * program.segments + s
                wanted = Value(goal.block * program.segments + s, whole, state.run, program.collective.reduces)
                found = self._read(state, state.rank, cell)
                if found != wanted:
                    raise self._error(state, f"ends with {found} in {cell}, not with {wanted}")

    def _cells(self, span: Span) -> list[tuple[str, int]]:
        return [(span.memory, i) for i in range(int(span.lo), int(span.hi))]

    def _read(self, state: _Rank, owner: int, cell: tuple[str, int]) -> Value:
        self._touch(state, owner, cell, wrote=False)
        value = self.ranks[owner].memory.get(cell)
        if value is None:
            raise self._error(state, f"reads {cell} of rank {owner}, which holds nothing")
        return value

    def _write(self, state: _Rank, owner: int, cell: tuple[str, int], value: Value) -> None:
        self._touch(state, owner, cell, wrote=True)
        self.ranks[owner].memory[cell] = value

    def _touch(self, state: _Rank, owner: int, cell: tuple[str, int], wrote: bool) -> None:
        if not 0 <= cell[1] < self.limit[cell[0]]:
            raise self._error(state, f"touches {cell}, outside the {self.limit[cell[0]]} cells there are")
        node = self.program.nodes[owner]
        if node != self.program.nodes[state.rank]:
            raise self._error(state, f"touches memory of rank {owner}, which is on another node")
        if owner != state.rank and cell[0] == INBOX:
            raise self._error(state, f"touches the private inbox of rank {owner}")
        memory, index = cell
        users = self.touched[node][owner, memory, index]
        if any(rank != state.rank and (wrote or other) for rank, other in users.items()):
            raise self._error(state, f"touches {cell} of rank {owner} together with ranks {sorted(users)}: no fence")
        users[state.rank] = wrote or users.get(state.rank, False)

    def _add(self, state: _Rank, a: Value, b: Value) -> Value:
        if (a.chunk, a.run) != (b.chunk, b.run):
            raise self._error(state, f"adds chunk {b.chunk} of run {b.run} to chunk {a.chunk} of run {a.run}")
        if a.ranks & b.ranks:
            raise self._error(state, f"adds contributions {a.ranks & b.ranks:b} to chunk {a.chunk} twice")
        if a.finished or b.finished:
            raise self._error(state, f"adds to chunk {a.chunk}, which is finished")
        return Value(a.chunk, a.ranks | b.ranks, a.run)

    def _error(self, state: _Rank, what: str) -> ProgramError:
        at = f"rank {state.rank}, step {state.at} ({state.step})"
        return ProgramError(f"{self.program.name} on {self.program.size} ranks: {at} {what}")


def _repeated(program: Program, rank: int, runs: int) -> list[Step | _Begin | _End]:
    steps: list[Step | _Begin | _End] = []
    for run in range(runs):
        steps += [_Begin(run), *program.steps(rank), _End(run)]
    return steps
