"""Profile of a machine for the planner: speeds of cores, memory, messages, collectives, devices and run folder.

The measurements are written to machine.toml, from which `python -m mpitrain.plan --machine` predicts. They are the
speeds of one rank that has a core to itself while all other cores of its node are equally busy, as in training.

    cores        matrix products by size and precision, copies, AdamW, on all cores at once; see `speeds.cores`
    messages     latency and bandwidth inside a node and between nodes; see `speeds.links`
    collectives  every algorithm of all_reduce, reduce_scatter, all_gather and broadcast at some sizes
    folder       rate at which ranks write to a folder, until data is on disk; --folder selects the file system
    a rank       its memory without a model, and the time of a step without that of the model; see `overhead`
    devices      see `speeds.cores`

Started under mpirun or srun, it measures the nodes of that job. Started without a launcher, it measures this node:
cores, folder, rank and devices at the first number of ranks, messages and collectives at each number. Runs with more
ranks than cores show how long collectives take when ranks take turns. The network cannot be measured on one node, so it
is left out of the file and the planner uses its default; `--machine machine.toml,network.toml` adds it from another
measurement or a file written by hand.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpitrain.comm import Communicator
from mpitrain.comm.selection import TABLES
from mpitrain.inference.commands import parse
from mpitrain.measuring.self_start import is_self_started, make_parser, run_measurement, temporary_folder
from mpitrain.measuring.tune import MEMORIES, AlgorithmContenders
from mpitrain.models.gpt import GPT
from mpitrain.monitor import memory_bytes, peak_memory_bytes
from mpitrain.planner.machine import lines_of, write_values
from mpitrain.speeds import kept, links
from mpitrain.speeds.kept import values_from
from mpitrain.speeds.timing import measure_in_turns
from mpitrain.storage.text import counted
from mpitrain.trainer.run import Callback, Step
from mpitrain.trainer.trainer import Trainer

KIB, MIB = 1 << 10, 1 << 20
SIZES, QUICK_SIZES = (4 * KIB, 64 * KIB, 1 * MIB, 16 * MIB), (64 * KIB,)
_TABLES = [table for table in TABLES.values() if table.operation != "reduce"]  # training does not use reduce


def main(arguments: Sequence[str]) -> int:
    """Run `mpitrain.plan --measure` with the arguments after it, and return the exit code."""
    options_parser = make_parser(
        "mpitrain.plan --measure", "The profile of this machine for the planner.", "2,4,8", 1800
    )
    options_parser.add_argument(
        "--out", type=Path, default=Path("machine.toml"), metavar="FILE", help="profile [machine.toml]"
    )
    options_parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="folder in which to measure writing [that of --out]"
    )
    options_parser.add_argument(
        "--device",
        default="auto",
        metavar="KIND",
        help="accelerators to measure: auto (all that exist), cpu (none), cuda, xpu and so on [auto]",
    )
    options = parse(options_parser, arguments)
    command = ["-m", "mpitrain.plan", "--measure", *arguments]
    return run_measurement(
        command,
        options,
        "machine",
        lambda world: measure(world, options),
        lambda results: write_profile(results, options),
    )


def measure(world: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """Return all measurements at this number of ranks. Collective.

    Args:
        world: All ranks.
        options: Options of the command line.
    """
    result: dict[str, Any] = {"nodes": list(world.nodes), "process": peak_memory_bytes()}
    whole = not is_self_started() or world.size == options.ranks[0]
    if whole:
        with _report_time(world, "cores and devices"):
            result |= kept.measure_nodes(world, "quick" if options.quick else "full", options.device)
        with _report_time(world, "folder"), temporary_folder(world, options.folder or options.out.parent) as folder:
            result["folder"] = folder_speeds(world, folder, options.quick)
    if world.size > 1:
        with _report_time(world, "messages"):
            result["links"] = links.measure(world, options.quick)
        with _report_time(world, "collectives"):
            result["collectives"] = _collectives(world, options.quick)
    if whole:
        # measured last, because a trainer sets the number of threads of this process
        with _report_time(world, "a step"):
            before = memory_bytes()
            result["overhead"] = overhead(world, options.quick)
            result["process"] += max(0, memory_bytes() - before)  # memory that libraries allocate at first use
    return result


def write_profile(results: dict[int, Any], options: argparse.Namespace) -> None:
    """Print the profile and write it to `options.out`; unless the run was quick, also store it for `parallel.auto`.

    Args:
        results: Results by number of ranks.
        options: Options of the command line.
    """
    values = values_from(results, options.quick)
    print("\n".join(lines_of({name: value for name, value in values.items() if name != "collectives"})))
    write_values(values, options.out)
    print(f"written: {options.out}")
    if not options.quick and (at := kept.store_profile(values)):
        print(f"written: {at}, for parallel.auto")


@contextmanager
def _report_time(world: Communicator, what: str) -> Iterator[None]:
    """Print how long the work inside the context took."""
    began = time.perf_counter()
    yield
    if world.rank == 0:
        print(f"  {counted(world.size, 'rank')}, {what}: {time.perf_counter() - began:.1f} s", flush=True)


def _collectives(world: Communicator, quick: bool) -> list[list[Any]]:
    """Return rows of operation, algorithm, ranks, nodes, memory, bytes, seconds. Collective."""
    repeats, seconds = (3, 0.1) if quick else (15, 0.4)
    rows, bench = [], AlgorithmContenders(world)
    for table, memory, size in product(_TABLES, MEMORIES, QUICK_SIZES if quick else SIZES):
        with bench.of(table, memory, size) as contenders:
            times = measure_in_turns(world, contenders, repeats, seconds)
        place = [world.size, world.num_nodes, memory, size]
        rows += [[table.operation, name, *place, took.median] for name, took in times.items()]
    return rows


# -- overhead of the trainer in a step, and speed of the run folder

_WIDTH, _TOKENS, _VOCABULARY = 8, 8, 256
_WARM = 10  # steps that are not measured
_PIECE = 8 << 20  # bytes of one write, as checkpoints do
_ROOM = 4  # the folder must have this multiple of the written bytes free


def overhead(world: Communicator, quick: bool) -> float:
    """Return the processor seconds that a step of the trainer takes beyond the work of a tiny model. Collective.

    Each rank trains by itself, and the result is the median over the ranks. The time of the model, its gradients and
    its update is measured in plain torch and subtracted.

    Args:
        world: All ranks.
        quick: If true, measure only a few steps.
    """
    alone = world.split(world.rank)
    steps, stamps = _WARM + (20 if quick else 100), Stamps()
    with tempfile.TemporaryDirectory(prefix="mpitrain-machine-") as folder:
        settings: dict[str, Any] = {
            "run": {"dir": f"{folder}/run", "device": "cpu"},
            "model": {"name": "gpt", "layers": 1, "width": _WIDTH, "heads": 1, "sequence": _TOKENS},
            "train": {"batch": 1, "microbatch": 1, "steps": steps, "evaluate_samples": 1},
            "checkpoint": {"every": 0},
        }
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            trainer = Trainer(settings, [stamps], world=alone)
            trainer.print = lambda text: None
            trainer.fit()
    taken = float(np.median(np.diff(stamps.timestamps)[_WARM:])) - _plain_step(steps)
    return float(np.median(world.all_gather_object(max(taken, 1e-6))))


class Stamps(Callback):
    """Callback that records the time after each step.

    Args:
        clock: Function that returns the time in seconds. Default: the processor seconds of this process.
    """

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        self._clock = clock
        self.timestamps: list[float] = []

    def on_step_end(self, trainer: Trainer, step: Step) -> None:
        self.timestamps.append(self._clock())


def _plain_step(steps: int) -> float:
    """Return the processor seconds of a step of the same model in plain torch."""
    model = GPT(_VOCABULARY, 1, _WIDTH, 1, 0.0)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x, y = torch.zeros(2, 1, _TOKENS, dtype=torch.long)
    taken = []
    for _ in range(steps):
        began = time.process_time()
        optimizer.zero_grad()
        model.loss(model(x), y).backward()
        optimizer.step()
        taken.append(time.process_time() - began)
    return float(np.median(taken[_WARM:]))


# -- the run folder


def folder_speeds(world: Communicator, folder: Path, quick: bool) -> dict[str, float]:
    """Return the bytes per second written to a folder until they are on disk (fsync). Collective.

    Args:
        world: All ranks.
        folder: Folder to write to; it exists on all nodes.
        quick: If true, write only a little.

    Returns:
        Rates "rank_write_rate" of rank 0 alone, "write_rate" of all ranks of its node at once, and "write_limit" of
        all ranks at once if there are several nodes. Empty if the disk has not enough room.
    """
    nbytes, repeats = (4 << 20, 1) if quick else (128 << 20, 3)
    if world.on_root(lambda: shutil.disk_usage(folder).free) < _ROOM * nbytes * world.size:
        return {}
    writers = {
        "rank_write_rate": [0],
        "write_rate": [r for r, node in enumerate(world.nodes) if node == world.nodes[0]],
    }
    if world.num_nodes > 1:
        writers["write_limit"] = list(range(world.size))
    data = np.random.default_rng(world.rank).bytes(min(_PIECE, nbytes))
    return {
        name: float(np.median([_write_rate(world, folder, data, nbytes, ranks) for _ in range(repeats)]))
        for name, ranks in writers.items()
    }


def _write_rate(world: Communicator, folder: Path, data: bytes, nbytes: int, ranks: list[int]) -> float:
    """Return the bytes per second of these ranks, each writing its own file. Collective."""
    world.barrier()
    began = time.perf_counter()
    if world.rank in ranks:
        with (folder / f"{world.rank}").open("wb", buffering=0) as file:
            for _ in range(nbytes // len(data)):
                file.write(data)
            os.fsync(file.fileno())
        (folder / f"{world.rank}").unlink()
    lasted = np.array([time.perf_counter() - began if world.rank in ranks else 0.0])
    world.all_reduce(lasted, "max")
    return nbytes * len(ranks) / float(lasted[0])
