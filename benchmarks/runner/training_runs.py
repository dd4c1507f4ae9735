"""Measures what steps of training take, for the benchmarks `plan` and `strategies`: seconds, and bytes of each rank.

Each run trains by itself, one after the other in the same processes, several times over in turns; what is timed is a
step with its batch. A first turn is for memory and for bytes sent: the most memory that a rank took above what it had
before there was a model. In that turn the C library is told to take each large piece of
memory from the system and to give it back, so that the pages are those in use, without the holes between them that it
keeps otherwise (the planner's category `allocator`).

While a model is made that is the most of a rank's own pages and of its part of the pages that the ranks of its node
share, both together; in training the most of its own pages, and its part of the shared ones at the end. A page that k
ranks have touched counts 1/k in each, so that a sum over the ranks of a node is what the node gives.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch

from benchmarks.runner.jobs import quiet
from mpitrain.comm import Communicator
from mpitrain.data.on_device import on_device
from mpitrain.storage import proc
from mpitrain.trainer.data import batches
from mpitrain.trainer.trainer import Trainer

KINDS = ("parameters", "gradients", "states", "activations", "buffers")
_LOOPBACK = "/sys/class/net/lo/statistics/tx_bytes"  # of this network namespace
PIECE, LARGE = 128 << 10, 32 << 20  # bytes from which on glibc takes memory from the system: at first, and at most
_MMAP_THRESHOLD = -3  # the number of that setting
_EVERY = 0.005  # seconds between two looks at memory
WARM = 2  # steps before those that count
_WATCHED = 3  # steps whose memory and bytes sent are measured

Values = Mapping[str, Mapping[str, Any]]  # of a configuration


class TrainingRun(Protocol):
    """A model in training, of ours or of a peer. All of it is collective."""

    def prepare(self) -> None:
        """Make the model and its optimizer, and draw nothing yet."""

    def step(self) -> float:
        """Take the next step, with its batch; the mean loss over the global batch."""

    def account(self) -> dict[str, float]:
        """Bytes on this rank by category: parameters, gradients, states, activations, buffers."""

    def close(self) -> None:
        """Give everything back."""


class TrainerRun:
    """Training by the trainer itself, as a configuration says."""

    def __init__(self, world: Communicator, config: Mapping[str, Any]) -> None:
        self._trainer = Trainer(config, world=world)
        self._batches = ExitStack()

    def prepare(self) -> None:
        """See `TrainingRun`."""
        trainer = self._trainer
        trainer.prepare()
        share = trainer.places.workers.share
        loader = self._batches.enter_context(batches(trainer.config, share, trainer.data, 0, trainer.device))
        self._coming = on_device(loader, trainer.device)

    def step(self) -> float:
        """See `TrainingRun`."""
        taken = self._trainer.train_step(next(self._coming))
        self._trainer.step = taken.number
        return taken.loss

    def account(self) -> dict[str, float]:
        """See `TrainingRun`."""
        account = self._trainer.engine.memory()
        return {kind: float(getattr(account, kind)) for kind in KINDS}

    def close(self) -> None:
        """See `TrainingRun`."""
        self._batches.close()
        self._trainer.engine.close()
        self._trainer.places.mesh.free()
        self._trainer.let_go()


def measured_runs(
    world: Communicator,
    makes: Mapping[str, Callable[[], TrainingRun]],
    rounds: int,
    steps: int,
    seconds: float,
) -> dict[str, dict[str, Any]]:
    """What the steps of each run take, all of which are taken once before: libraries take memory at their first use.

    Collective.

    Args:
        world: The ranks.
        makes: By name, what makes a run.
        rounds: How often each is measured, in turns.
        steps: Of one measurement.
        seconds: That one measurement may take; fewer steps are taken where they are slow.

    Returns:
        By name {"seconds": of each round, every step's; "memory": bytes of the rank with most; "account": by category
        on rank 0; "largest": likewise, each of the rank that has most of it; "losses": of the first steps; "sent": see
        `SentBytes.told`}.
    """
    found: dict[str, dict[str, Any]] = {}
    names = list(makes)
    take_from_system(PIECE)
    for make in makes.values():
        _one(world, make, 1, 1.0)
    for name, make in makes.items():
        found[name] = {"seconds": [], **_one(world, make, _WATCHED, 1.0, watching=True)[1]}
    take_from_system(LARGE)
    for turn in range(rounds):
        for number, name in list(enumerate(names, 1))[:: -1 if turn % 2 else 1]:
            times, _ = _one(world, makes[name], steps, seconds)
            found[name]["seconds"].append(times)
            if world.rank == 0:
                which = f"{number} of {len(names)}" + (f", {name}" if name != str(number) else "")
                print(f"  {which}: {statistics.median(times):.4f} s", flush=True)
    return found


def step_seconds(of: Mapping[str, Any]) -> float:
    """Return a step's, of the round whose median is lowest: other work on the machine only ever adds to it."""
    return float(min(map(statistics.median, of["seconds"])))


@quiet()
def _one(
    world: Communicator, make: Callable[[], TrainingRun], steps: int, seconds: float, *, watching: bool = False
) -> tuple[list[float], dict[str, Any]]:
    """Return the seconds of steps, and what else `measured_runs` tells of a run."""
    run, memory = make(), PeakMemory(world, watching)
    with memory.making():
        run.prepare()
    with memory.training():
        times, losses = list[float](), list[float]()
        count, meter = WARM + steps, SentBytes(world)
        while len(times) < count:
            if not watching:  # when what a step sends is counted, nothing else is to be sent
                world.barrier()
            began = time.perf_counter()
            losses.append(run.step())
            took = time.perf_counter() - began
            times.append(took if watching else _slowest(world, took))
            if len(times) == WARM and watching:
                meter.start()
            elif len(times) == WARM:
                count = WARM + min(steps, max(3, int(seconds / times[-1])))
    sent = meter.told(count - WARM) if watching else None
    account = run.account()
    own = torch.tensor([memory.taken, *account.values()], dtype=torch.float64)
    world.all_reduce(own, "max")
    run.close()
    taken, *largest = own.tolist()
    told = {"memory": taken, "account": account, "largest": dict(zip(account, largest, strict=True))}
    return times[WARM:], told | {"losses": losses[: WARM + 1], "sent": sent}


def _slowest(world: Communicator, seconds: float) -> float:
    found = torch.tensor([seconds], dtype=torch.float64)
    world.all_reduce(found, "max")
    return float(found)


def merged(first: Values, second: Values) -> dict[str, dict[str, Any]]:
    """Nested values of configurations, of which the second win."""
    return {section: {**first.get(section, {}), **second.get(section, {})} for section in {**first, **second}}


class SentBytes:
    """What ranks send from `start` to `told`, both collective: as the journal of communication counts it, and sockets.

    The journal knows what goes through mpitrain, by operation, axis and tier. What peers send over gloo goes through
    sockets: on one node that is the loopback interface, on which nothing else of such a job goes; its count is divided
    by the ranks, and has the headers of TCP in it, some percent. On several nodes peers' bytes are not measured.
    """

    def __init__(self, world: Communicator) -> None:
        self._world = world
        self._loopback = 0

    def start(self) -> None:
        """Count from here."""
        self._world.barrier()
        self._loopback = _loopback_bytes()
        self._world.barrier()
        self._world.journal.start()

    def told(self, steps: int) -> Mapping[str, Any]:
        """What was sent in so many steps, and stop counting.

        Returns:
            inside, between: bytes a step, to ranks of the same node and of others, of the rank that sends most. rows:
            of rank 0 [operation, axis, algorithm, calls, bytes inside, bytes between] a step. loopback: bytes a step
            and rank that went through sockets on this node; None on several nodes.
        """
        world = self._world
        rows = world.journal.account()
        world.journal.stop()
        world.barrier()
        loopback = _loopback_bytes() - self._loopback
        inside, between = (sum(getattr(row, tier) for row in rows) / steps for tier in ("inside", "between"))
        most = torch.tensor([inside, between], dtype=torch.float64)
        world.all_reduce(most, "max")
        own = [
            [row.operation, row.axis, row.algorithm, row.calls / steps, row.inside / steps, row.between / steps]
            for row in rows
        ]
        return {
            "inside": float(most[0]),
            "between": float(most[1]),
            "rows": own,
            "loopback": loopback / steps / world.size if world.num_nodes == 1 else None,
        }


def _loopback_bytes() -> int:
    """Bytes sent through the loopback interface so far; 0 where the system does not tell."""
    try:
        with open(_LOOPBACK, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0


# -- memory ------------------------------------------------------------------------------------------------


class PeakMemory:
    """The most memory of this rank while a model is made, and then trained. Collective to make.

    Args:
        world: The ranks.
        watching: Whether to look at all: a thread that looks now and then slows the others down.
    """

    def __init__(self, world: Communicator, watching: bool = True) -> None:
        self._watching = watching
        gc.collect()
        give_back()
        world.barrier()
        self._own, self._shared = _own_bytes(), _part_of("Pss_Shmem")
        self.taken = 0  # bytes above those before

    @contextmanager
    def making(self) -> Iterator[None]:
        """Watch while the model is made."""
        with self._peak(lambda: _own_bytes() + _part_of("Pss_Shmem")) as most:
            yield
        self._take(most[0])

    @contextmanager
    def training(self) -> Iterator[None]:
        """Watch while it is trained."""
        with self._peak(_own_bytes) as most:
            yield
            shared = _part_of("Pss_Shmem")
        self._take(most[0] + max(shared, self._shared))

    def process(self) -> int:
        """Return the most bytes of the whole process, libraries included."""
        return self._own + self._shared + self.taken + _part_of("Pss_File")

    def _take(self, nbytes: int) -> None:
        self.taken = max(self.taken, nbytes - self._own - self._shared)

    @contextmanager
    def _peak(self, nbytes: Callable[[], int]) -> Iterator[list[int]]:
        """Yield a list of one figure, the most that `nbytes` has returned so far."""
        most, done = [nbytes()], threading.Event()
        if not self._watching:
            yield most
            return

        def watch() -> None:
            while not done.wait(_EVERY):
                most[0] = max(most[0], nbytes())

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield most
        finally:
            done.set()
            thread.join()


def give_back() -> None:
    """Have glibc give freed memory back to the system, which else counts as taken in what is measured next."""
    _glibc("malloc_trim", 0)


def take_from_system(nbytes: int) -> None:
    """Have glibc take pieces of at least so many bytes from the system, and give them back when they are freed."""
    _glibc("mallopt", _MMAP_THRESHOLD, nbytes)


def _glibc(name: str, *arguments: int) -> None:
    """Call one of its functions; do nothing where the C library is another."""
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*arguments)


def _own_bytes() -> int:
    """Bytes of pages that no other process has: what was allocated, not what is shared with the node's ranks."""
    return proc.nbytes_of("self/status", "RssAnon") or 0


def _part_of(kind: str) -> int:
    """This process' part of memory that processes share, each page divided by those that have touched it; proc(5)."""
    return proc.nbytes_of("self/smaps_rollup", kind) or 0
