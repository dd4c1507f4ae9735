"""Measures what steps of training take, for the benchmarks `plan` and `strategies`: seconds, and bytes of each rank.

Each run trains by itself, one after the other in the same processes, several times over in turns; what is timed is a
step with its batch. A first turn is for memory and for bytes sent: the most memory that a rank took above what it had
before there was a model. In training that is the most of its own pages, and its part of the pages that the ranks of its
node share at the end; before, while the model is made, of both together. In that turn the C library is
told to take each large piece of memory from the system and to give it back, so that the pages are those in use, without
the holes between them that it keeps otherwise (the planner's category `allocator`).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch

from benchmarks.runner.freed_memory import give_back
from benchmarks.runner.sent_bytes import SentBytes
from mpitrain.comm import Communicator
from mpitrain.data.on_device import on_device
from mpitrain.trainer.data import batches
from mpitrain.trainer.trainer import Trainer

KINDS = ("parameters", "gradients", "states", "activations", "buffers")
WARM = 2  # steps before those that count
_WATCHED = 3  # steps whose memory and bytes sent are measured
_EVERY = 0.005  # seconds between two looks at memory
_PIECE, _LARGE = 128 << 10, 32 << 20  # bytes from which on glibc takes memory from the system: at first, and at most
_MMAP_THRESHOLD = -3  # the number of that setting

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
        self._batches = contextlib.ExitStack()

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


def measured(
    world: Communicator, configs: Sequence[Mapping[str, Any]], rounds: int, steps: int, seconds: float
) -> list[dict[str, Any]]:
    """What each configuration's steps take, see `measured_runs`. Collective."""
    makes = {str(number): partial(TrainerRun, world, config) for number, config in enumerate(configs, 1)}
    first = {_libraries(config): str(number) for number, config in enumerate(configs, 1)}
    return list(measured_runs(world, makes, rounds, steps, seconds, list(first.values())).values())


def measured_runs(
    world: Communicator,
    makes: Mapping[str, Callable[[], TrainingRun]],
    rounds: int,
    steps: int,
    seconds: float,
    first: Sequence[str] | None = None,
) -> dict[str, dict[str, Any]]:
    """What the steps of each run take. Collective.

    Args:
        world: The ranks.
        makes: By name, what makes a run.
        rounds: How often each is measured, in turns.
        steps: Of one measurement.
        seconds: That one measurement may take; fewer steps are taken where they are slow.
        first: The runs that are taken once before, since libraries take memory when they are used first; None: all.

    Returns:
        By name {"seconds": of each round, every step's; "memory": bytes of the rank with most; "account": by category
        on rank 0; "largest": likewise, each of the rank that has most of it; "losses": of the first steps; "sent": see
        `benchmarks.runner.sent_bytes`}.
    """
    found: dict[str, dict[str, Any]] = {}
    names = list(makes)
    _take_from_system(_PIECE)
    for name in names if first is None else first:
        with contextlib.redirect_stdout(io.StringIO()):
            _one(world, makes[name](), 1, 1.0)
    for name, make in makes.items():
        with contextlib.redirect_stdout(io.StringIO()):
            _, told = _one(world, make(), _WATCHED, 1.0, watching=True)
        found[name] = {"seconds": [], **told}
    _take_from_system(_LARGE)
    for turn in range(rounds):
        for number, name in list(enumerate(names, 1))[:: -1 if turn % 2 else 1]:
            with contextlib.redirect_stdout(io.StringIO()):
                times, _ = _one(world, makes[name](), steps, seconds)
            found[name]["seconds"].append(times)
            if world.rank == 0:
                which = f"{number} of {len(names)}" + (f", {name}" if name != str(number) else "")
                print(f"  {which}: {statistics.median(times):.4f} s", flush=True)
    return found


def _libraries(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """What decides which libraries a run uses."""
    parallel, train = config.get("parallel", {}), config.get("train", {})
    return parallel.get("pipeline", 1) > 1, parallel.get("tensor", 1) > 1, train.get("recompute", False)


def _one(
    world: Communicator, run: TrainingRun, steps: int, seconds: float, *, watching: bool = False
) -> tuple[list[float], dict[str, Any]]:
    """The seconds of steps, and what else `measured_runs` tells of a run."""
    gc.collect()
    give_back()
    world.barrier()
    before, shared_before = _own_bytes(), _shared_bytes()
    with _watched(lambda: _own_bytes() + _shared_bytes(), watching) as first:
        run.prepare()
    with _watched(_own_bytes, watching) as most:
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
        shared = _shared_bytes()
    sent = meter.told(count - WARM) if watching else None
    account = run.account()
    both = most[0] + max(shared, shared_before), first[0]
    own = torch.tensor([max(both) - before - shared_before, *account.values()], dtype=torch.float64)
    world.all_reduce(own, "max")
    run.close()
    memory, *largest = own.tolist()
    told = {"memory": memory, "account": account, "largest": dict(zip(account, largest, strict=True))}
    return times[WARM:], told | {"losses": losses[: WARM + 1], "sent": sent}


def _slowest(world: Communicator, seconds: float) -> float:
    found = torch.tensor([seconds], dtype=torch.float64)
    world.all_reduce(found, "max")
    return float(found)


@contextmanager
def _watched(nbytes: Callable[[], int], watching: bool) -> Iterator[list[int]]:
    """The most bytes that there are meanwhile, in a list of one; as at the beginning if nobody is to watch."""
    most, done = [nbytes()], threading.Event()
    if not watching:  # a thread that looks now and then slows the others down
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


def _take_from_system(nbytes: int) -> None:
    """Have glibc take pieces of at least so many bytes from the system, and give them back; nothing without glibc."""
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    if option is not None:
        option(_MMAP_THRESHOLD, nbytes)


def _own_bytes() -> int:
    """Bytes of pages that no other process has: what was allocated, not what is shared with the node's ranks."""
    with open("/proc/self/statm") as file:
        _, resident, shared, *_ = map(int, file.read().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def _shared_bytes() -> int:
    """This process' part of the memory that processes share, each page divided by those that have touched it."""
    with open("/proc/self/smaps_rollup") as file:
        for line in file:
            if line.startswith("Pss_Shmem:"):
                return int(line.split()[1]) << 10
    return 0


def merged(first: Values, second: Values) -> dict[str, dict[str, Any]]:
    """Nested values of configurations, of which the second win."""
    return {section: {**first.get(section, {}), **second.get(section, {})} for section in {**first, **second}}
