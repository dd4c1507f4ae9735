"""What a training step takes of a node's memory: each contender, at each batch, in a job of its own.

Measured is the proportional set size of each rank (smaps_rollup, proc(5)): a page that k processes have mapped
counts 1/k in each, so that shared memory is counted once per node and a sum over ranks is what the node gives.
While a contender trains, the first rank of each node reads it again and again for all ranks of its node. What counts
is the largest value, less the one before the model was made: libraries, and what MPI and gloo need to start, are in
that. A peak shorter than one reading (a few milliseconds) can escape; several steps are watched.

Beside it stands the whole process, libraries included.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import product
from pathlib import Path

import numpy as np

from benchmarks.runner.peers import gloo
from benchmarks.step.contenders import Shape, contender
from mpitrain.comm import Communicator
from mpitrain.errors import EXIT_DONE
from mpitrain.measuring.self_start import start

STEPS = 4  # watched; the first makes the optimizer's states
_FOLDER = "MPITRAIN_BENCH_STEP_MEMORY"  # where the jobs leave what they found
_PAUSE = 1e-3  # seconds between two readings


def measured_apart(
    shape: Shape, batches: Mapping[str, int], names: Sequence[str], ranks: Sequence[int], limit: float, folder: Path
) -> int:
    """A job for each contender, batch and rank count; the exit code. `remembered` then has what they found."""
    os.environ[_FOLDER] = str(folder)
    for size, name, batch in product(ranks, names, batches):
        print(f"memory of {name} on {size} ranks, {batch} …", flush=True)
        order = json.dumps({"shape": asdict(shape), "samples": batches[batch], "name": name})
        code = start(["-m", "benchmarks.step.memory", order, str(_file(folder, size, name, batch))], size, limit)
        if code != EXIT_DONE:
            print(f"mpitrain: the memory of {name} could not be measured (exit code {code})", file=sys.stderr)
            return code
    return EXIT_DONE


def remembered(ranks: int, name: str, batch: str) -> dict[str, int] | None:
    """The peaks of a contender, if they were measured."""
    folder = os.environ.get(_FOLDER)
    if folder is None or not (file := _file(Path(folder), ranks, name, batch)).exists():
        return None
    peaks: dict[str, int] = json.loads(file.read_text("utf-8"))
    return peaks


def _file(folder: Path, ranks: int, name: str, batch: str) -> Path:
    return folder / f"{ranks} {name} {batch}.json"


def peaks(world: Communicator, name: str, shape: Shape, samples: int) -> dict[str, int]:
    """Of a contender in this process, in which nothing else has run. Collective; the same on every rank.

    Returns:
        rank, node: bytes more than before the model was made, of the rank that takes most, and of a node. process: of
        the whole process of the rank that takes most.
    """
    with gloo(world):
        small = Shape(vocabulary=16, layers=1, width=64, tokens=8)
        first = contender(name, world, small, 1)  # loads the libraries that a step uses
        first.step()
        first.close()
        with _watching(world) as readings:
            trainee = contender(name, world, shape, samples)
            for _ in range(STEPS):
                trainee.prepare()
                trainee.step()
            world.barrier()
        trainee.close()
    by_node = world.all_gather_object(readings)
    nodes = [np.array(found, dtype=np.int64) for found in by_node if found]  # each [readings, ranks of the node]
    growth = [found - found[0] for found in nodes]
    of_ranks, of_nodes = (max(int(g.max()) for g in growth), max(int(g.sum(1).max()) for g in growth))
    return {"rank": of_ranks, "node": of_nodes, "process": max(int(found.max()) for found in nodes)}


@contextmanager
def _watching(world: Communicator) -> Iterator[list[list[int]]]:
    """Readings made meanwhile, by the first rank of each node, of all ranks of its node; the first before all else."""
    places = world.all_gather_object((world.node, os.getpid()))
    processes = [process for node, process in places if node == world.node]
    readings: list[list[int]] = []
    if world.local_rank != 0:
        world.barrier()
        yield readings
        return
    readings.append([_proportional(process) for process in processes])
    world.barrier()
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_PAUSE):
            readings.append([_proportional(process) for process in processes])

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    yield readings
    done.set()
    watcher.join()


def _proportional(process: int) -> int:
    """Bytes of memory that a process answers for; see smaps_rollup in proc(5)."""
    with open(f"/proc/{process}/smaps_rollup", encoding="ascii") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def _job(order: str, file: str) -> None:
    """What `measured_apart` starts."""
    from mpitrain.comm import init

    world, wanted = init(), json.loads(order)
    found = peaks(world, wanted["name"], Shape(**wanted["shape"]), wanted["samples"])
    if world.rank == 0:
        Path(file).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    _job(*sys.argv[1:])
