"""Measures what training steps of given layouts take, for the benchmark `plan`: seconds, and bytes of each rank.

Each layout trains by the trainer itself, one after the other in the same processes, several times over in turns; what
is timed is a step with its batch. A first turn is for memory: the most that a rank took above what it had before there
was a model. In training that is the most of its own pages, and its part of the pages that the ranks of its node share
at the end; before, while the model is made, of both together. In that turn the C library is
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
from typing import Any

import torch

from mpitrain.bench.freed_memory import give_back
from mpitrain.comm import Communicator
from mpitrain.data.on_device import on_device
from mpitrain.trainer.data import batches
from mpitrain.trainer.trainer import Trainer

WARM = 2  # steps before those that count
_EVERY = 0.005  # seconds between two looks at memory
_PIECE, _LARGE = 128 << 10, 32 << 20  # bytes from which on glibc takes memory from the system: at first, and at most
_MMAP_THRESHOLD = -3  # the number of that setting


def measured(
    world: Communicator, configs: Sequence[Mapping[str, Any]], rounds: int, steps: int, seconds: float
) -> list[dict[str, Any]]:
    """What each configuration's steps take. Collective.

    Args:
        world: The ranks.
        configs: Nested values of configurations.
        rounds: How often each is measured, in turns.
        steps: Of one measurement.
        seconds: That one measurement may take; fewer steps are taken where they are slow.

    Returns:
        For each configuration {"seconds": of each round, every step's; "memory": bytes of the rank with most;
        "account": by category on rank 0}.
    """
    found: list[dict[str, Any]] = []
    _take_from_system(_PIECE)
    with contextlib.redirect_stdout(io.StringIO()):
        for config in {_libraries(config): config for config in configs}.values():  # which take memory when used first
            _one(world, config, 1, 1.0)
        for config in configs:
            _, nbytes, account = _one(world, config, 1, 1.0, watching=True)
            found.append({"seconds": [], "memory": nbytes, "account": account})
    _take_from_system(_LARGE)
    for turn in range(rounds):
        for number in range(len(configs))[:: -1 if turn % 2 else 1]:
            with contextlib.redirect_stdout(io.StringIO()):
                times, _, _ = _one(world, configs[number], steps, seconds)
            found[number]["seconds"].append(times)
            if world.rank == 0:
                print(f"  {number + 1} of {len(configs)}: {statistics.median(times):.4f} s", flush=True)
    return found


def _libraries(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """What decides which libraries a run uses."""
    parallel, train = config.get("parallel", {}), config.get("train", {})
    return parallel.get("pipeline", 1) > 1, parallel.get("tensor", 1) > 1, train.get("recompute", False)


def _one(
    world: Communicator, config: Mapping[str, Any], steps: int, seconds: float, *, watching: bool = False
) -> tuple[list[float], float, dict[str, float]]:
    """The seconds of steps, the bytes of the rank that has most, and rank 0's account."""
    gc.collect()
    give_back()
    world.barrier()
    before, shared_before = _own_bytes(), _shared_bytes()
    trainer = Trainer(config, world=world)
    with _watched(lambda: _own_bytes() + _shared_bytes(), watching) as first:
        trainer.prepare()
    with _watched(_own_bytes, watching) as most:
        times: list[float] = []
        workers = trainer.places.workers
        with batches(trainer.config, workers.share, trainer.data, 0, trainer.device) as loader:
            coming = on_device(loader, trainer.device)
            count = WARM + steps
            while len(times) < count:
                world.barrier()
                began = time.perf_counter()
                trainer.step = trainer.train_step(next(coming)).number
                times.append(_slowest(world, time.perf_counter() - began))
                if len(times) == WARM:
                    count = WARM + min(steps, max(3, int(seconds / times[-1])))
        shared = _shared_bytes()
    account = trainer.engine.memory()
    kinds = ("parameters", "gradients", "states", "activations", "buffers")
    told = {kind: float(getattr(account, kind)) for kind in kinds}
    both = most[0] + max(shared, shared_before), first[0]
    own = torch.tensor([max(both) - before - shared_before], dtype=torch.float64)
    world.all_reduce(own, "max")
    trainer.engine.close()
    trainer.places.mesh.free()
    trainer.let_go()
    return times[WARM:], float(own), told


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
