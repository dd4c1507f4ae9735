"""Collectives whose ranks pass different arguments, on guarded memory; for test_unequal_arguments.py.

    python unequal.py SEED FIRST LAST FOLDER       under mpirun: cases FIRST to LAST - 1, a line of JSON a case and rank

Every buffer ends or begins at a page without access rights. The rest of its pages has a known pattern, and so has the
rest of an arena of which a part is passed. A case that does not end on all ranks in time ends the job with EXIT_CODE.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import random
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

import mpitrain
from mpitrain.comm import Arena, Communicator
from mpitrain.errors import MpitrainError

EXIT_CODE = 17
MAX_NUMEL = 1_000_000  # elements
ARENA = 4 * MAX_NUMEL + 8192  # bytes
_LIMIT = 3.0  # seconds for a case
_PATTERN = 0xA5
_DTYPES = (torch.float32, torch.int32, torch.float64, torch.int64, torch.bfloat16, torch.uint8)
_SHARING_ALGORITHMS = ("shared", "two_level")  # algorithms by which ranks touch each other's memory
_ALGORITHMS = {
    "all_reduce": ("auto", "mpi", "ring", "tree", "halving", *_SHARING_ALGORITHMS),
    "reduce": ("auto", "mpi", "tree", "shared"),
    "reduce_scatter": ("auto", "mpi", "ring", "halving", "pairwise", "shared"),
    "deferred reduce_scatter": ("shared",),
    "broadcast": ("auto", "mpi", "tree", "shared"),
    "all_gather": ("auto", "mpi", "ring", "halving", "shared"),
    "gather": ("mpi",),
    "scatter": ("mpi",),
    "all_to_all": ("mpi",),
}


@dataclass(frozen=True)
class Arguments:
    """One rank's call.

    Attributes:
        numel: Elements of the whole vector; a block has 1/size of them.
        place: "guarded", or the name of an arena.
    """

    operation: str
    numel: int
    dtype: torch.dtype
    op: str
    root: int
    algorithm: str
    place: str
    offset: int = 0  # bytes
    reproducible: bool = False

    @property
    def meets(self) -> bool:
        """True where ranks are certain to touch each other's memory."""
        if self.operation == "deferred reduce_scatter":
            return False  # they do, but find out in messages
        return self.algorithm == "shared" or (self.algorithm == "two_level" and not self.reproducible)

    def elements(self, size: int) -> int:
        """Return `numel`, limited in an arena to what fits into half of it."""
        return (
            self.numel if self.place == "guarded" else min(self.numel, ARENA // 2 // self.dtype.itemsize // size * size)
        )

    def must_match(self, size: int) -> tuple[object, ...]:
        """Return the arguments that must be the same on all ranks."""
        reduces = "reduce" in self.operation
        rooted = self.operation in ("reduce", "broadcast", "gather", "scatter")
        return (
            self.operation,
            self.elements(size),
            self.dtype,
            self.op if reduces else "",
            self.root if rooted else 0,
            self.algorithm,
            self.place,
            self.offset if self.place != "guarded" else 0,
            self.reproducible,
        )


def make_case(seed: int, number: int, size: int, *, meeting: bool = False) -> list[Arguments]:
    """Return each rank's arguments, the same on all ranks in one case of six.

    meeting: Choose only operations in which ranks touch each other's memory.
    """
    rng = random.Random(f"{seed} {number} {size}")

    def algorithms_of(operation: str) -> list[str]:
        return [name for name in _ALGORITHMS[operation] if not meeting or name in _SHARING_ALGORITHMS]

    def draw() -> Arguments:
        operation = rng.choice(
            [name for name in _ALGORITHMS if algorithms_of(name) and not (meeting and "deferred" in name)]
        )
        algorithm = rng.choice(algorithms_of(operation))
        return Arguments(
            operation,
            numel=-(-round(10 ** rng.uniform(0, 6)) // size) * size,
            dtype=rng.choice(_DTYPES),
            op=rng.choice(["sum", "max", "product"]),
            root=rng.randrange(size),
            algorithm=algorithm,
            place=rng.choice(["first", "second"] if "deferred" in operation else ["guarded", "guarded", "first"]),
            offset=64 * rng.randrange(64),
            reproducible=operation == "all_reduce" and algorithm != "two_level" and rng.random() < 0.2,
        )

    first, other = draw(), draw()
    ranks = [first] * size
    if rng.random() < 1 / 6:
        return ranks
    kind = rng.choice(["numel", "numel", "numel", "dtype", "op", "root", "place", "offset", "algorithm", "all"])
    if kind == "all":
        changed = other
    elif kind == "numel":
        doubled, near = min(2 * first.numel, MAX_NUMEL // size * size), first.numel + size
        changed = replace(first, numel=rng.choice([other.numel, doubled, near]))
    elif kind == "algorithm":
        algorithm = rng.choice(algorithms_of(first.operation))
        changed = replace(first, algorithm=algorithm, reproducible=first.reproducible and algorithm != "two_level")
    else:
        changed = replace(first, **{kind: getattr(other, kind)})
    for rank in rng.sample(range(size), rng.randrange(1, size)):
        ranks[rank] = changed
    return ranks


class Guarded:
    """Memory between pages without access rights; the rest of its own pages has the pattern."""

    def __init__(self, nbytes: int, *, at_end: bool) -> None:
        page = mmap.PAGESIZE
        inner = max(1, -(-nbytes // page)) * page
        self._map = mmap.mmap(-1, inner + 2 * page)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        for guard in (base, base + page + inner):
            assert protect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0) == 0, ctypes.get_errno()
        whole = np.frombuffer(self._map, dtype=np.uint8)[page : page + inner]
        whole[:] = _PATTERN
        first = inner - nbytes if at_end else 0
        self.bytes = torch.from_numpy(whole[first : first + nbytes])
        self._rest = (whole[:first], whole[first + nbytes :])

    def count_changes_outside(self) -> int:
        """Return the number of changed bytes around the buffer."""
        return sum(int(np.count_nonzero(part != _PATTERN)) for part in self._rest)


class InArena:
    """Bytes of an arena, the rest of which has the pattern."""

    def __init__(self, arena: Arena, offset: int, nbytes: int) -> None:
        self.bytes = arena.tensor[offset : offset + nbytes]


class Cases:
    """Runner of cases on a communicator with two arenas."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.arenas = {name: comm.arena(ARENA, torch.uint8) for name in ("first", "second")}
        for arena in self.arenas.values():
            assert arena.kind == "shared"
            arena.tensor.fill_(_PATTERN)
        self._buffers: list[Guarded | InArena] = []

    def free(self) -> None:
        for arena in self.arenas.values():
            arena.free()

    def prepare(self, arguments: Arguments) -> None:
        """Allocate the memory of a case, before any rank begins with it."""
        item, size = arguments.dtype.itemsize, self.comm.size
        numel = arguments.elements(size)
        at_end = (arguments.numel // size) % 2 == 0
        whole: Guarded | InArena
        if arguments.place == "guarded":
            whole = Guarded(numel * item, at_end=at_end)
        else:
            whole = InArena(self.arenas[arguments.place], arguments.offset, numel * item)
        block = Guarded(numel // size * item, at_end=not at_end)
        second = Guarded(numel * item, at_end=at_end)
        self._buffers = [whole, block, second]
        self._tensors = [buffer.bytes.view(arguments.dtype).fill_(self.comm.rank + 1) for buffer in self._buffers]

    def perform(self, arguments: Arguments) -> None:
        comm, root = self.comm, arguments.root
        whole, block, second = self._tensors
        if arguments.operation == "all_reduce":
            comm.all_reduce(whole, arguments.op, arguments.algorithm, reproducible=arguments.reproducible)
        elif arguments.operation == "reduce":
            comm.reduce(whole, root, arguments.op, arguments.algorithm)
        elif arguments.operation == "reduce_scatter":
            comm.reduce_scatter(block, whole, arguments.op, arguments.algorithm)
        elif arguments.operation == "deferred reduce_scatter":
            work = comm.deferred_reduce_scatter(block, whole, arguments.op)
            if work is not None:
                work.release()
        elif arguments.operation == "broadcast":
            comm.broadcast(whole, root, arguments.algorithm)
        elif arguments.operation == "all_gather":
            x = whole[: block.numel()] if arguments.algorithm == "shared" and arguments.place != "guarded" else block
            comm.all_gather(second, x, arguments.algorithm)
        elif arguments.operation == "gather":
            comm.gather(whole if comm.rank == root else None, block, root)
        elif arguments.operation == "scatter":
            comm.scatter(block, whole if comm.rank == root else None, root)
        else:
            comm.all_to_all(second, whole)

    def count_changes_outside(self) -> int:
        """Return the number of changed bytes outside of this rank's buffers, unused arenas included."""
        arenas = [arena.tensor for arena in self.arenas.values()]
        for buffer in self._buffers:
            if isinstance(buffer, InArena):
                buffer.bytes.fill_(_PATTERN)
        changed = sum(int(np.count_nonzero(tensor.numpy() != _PATTERN)) for tensor in arenas)
        return changed + sum(buffer.count_changes_outside() for buffer in self._buffers if isinstance(buffer, Guarded))


class States:
    """Progress of all ranks in a file that they all map: each rank's latest number, and how its case ended.

    A rank may reach the next number before another has read the outcome, so the previous outcome is kept, too.
    """

    RUNNING, DONE, AGREED, ALONE = range(4)

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        path = folder / "states"
        if rank == 0:
            np.zeros((size, 3), dtype=np.int64).tofile(path)
        mpitrain.init().barrier()
        self._all, self._rank = np.memmap(path, dtype=np.int64, mode="r+", shape=(size, 3)), rank

    def set_state(self, number: int, state: int) -> None:
        self._all[self._rank, 1 + number % 2] = state
        self._all[self._rank, 0] = number

    def wait(self, number: int) -> list[int]:
        """Wait until all ranks have reached this number, and return their states."""
        while not (self._all[:, 0] >= number).all():
            time.sleep(2e-4)
        return self._all[:, 1 + number % 2].tolist()


def main(seed: int, first: int, last: int, folder: Path) -> None:
    world = mpitrain.init(timeout=60)
    rank, states = world.rank, States(folder, world.rank, world.size)
    comm = world.split(0)
    assert comm is not None
    cases, started = Cases(comm), [0.0]
    log = open(folder / f"rank-{rank}.jsonl", "a", encoding="utf-8")  # noqa: SIM115

    def log_outcome(number: int, outcome: str) -> None:
        log.write(
            json.dumps({"case": number, "rank": rank, "outcome": outcome, "outside": cases.count_changes_outside()})
            + "\n"
        )
        log.flush()

    def abort_case(number: int, outcome: str) -> None:
        log_outcome(number, outcome)
        time.sleep(1.0)  # until the others have looked at their memory, too
        os._exit(EXIT_CODE)

    current = [first, "not ended"]

    def watch() -> None:
        while True:
            time.sleep(0.05)
            if started[0] and time.monotonic() - started[0] > _LIMIT:
                abort_case(int(current[0]), str(current[1]))

    threading.Thread(target=watch, daemon=True).start()
    for number in range(first, last):
        arguments = make_case(seed, number, world.size)[rank]
        cases.prepare(arguments)
        states.set_state(2 * number + 1, States.RUNNING)
        current[:] = number, "not ended"
        started[0] = time.monotonic()
        states.wait(2 * number + 1)
        try:
            cases.perform(arguments)
            state, current[1] = States.DONE, "done"
        except MpitrainError as error:
            state = States.AGREED if "ranks call different operations" in str(error) else States.ALONE
            current[1] = f"{type(error).__name__}: {error}"
        states.set_state(2 * number + 2, state)
        ended = states.wait(2 * number + 2)
        started[0] = 0.0
        log_outcome(number, str(current[1]))
        if set(ended) != {States.AGREED} and len(set(make_case(seed, number, world.size))) > 1:
            renewed = world.split(0)  # the old one may have pending messages
            assert renewed is not None
            cases.comm = renewed
    os._exit(EXIT_CODE)  # pending messages would keep MPI_Finalize from returning


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), Path(sys.argv[4]))
