"""The profile of a machine for the planner: speeds of its cores, memory, messages, collectives, devices and folder.

What is measured goes into machine.toml in --out, from which `python -m mpitrain.plan --machine` predicts. The figures
are those of one rank that has a core for itself while all other cores of its node are as busy, as in training.

    cores        matrix products by size and precision, copies, AdamW, on all cores at once; see `speeds.cores`
    messages     latency and bandwidth inside a node and between nodes; see `speeds.links`
    collectives  every algorithm of all_reduce, reduce_scatter, all_gather and broadcast at some sizes
    folder       what ranks write into a folder, until it is on the disk; --folder names the run folder's file system
    a rank       its memory before it has a model, and what a step takes beside its model; see `machine_rank`
    devices      see `speeds.device`

Started under mpirun or srun it measures the nodes of that job. Started plainly it measures this node: cores, folder,
rank and devices at the first rank count, messages and collectives at each; those with more ranks than cores tell what
collectives take where ranks take turns. What one node cannot tell, the network, is left out of the file and reckoned
with as usual; `--machine machine.toml,network.toml` adds it from another measurement or written by hand.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.collectives.contenders import CollectiveContenders
from benchmarks.machine.rank import folder_speeds, overhead
from benchmarks.machine.report import report, shown_values
from benchmarks.runner.jobs import Benchmark, parser, run, started_here, temporary_folder
from mpitrain.comm import Communicator
from mpitrain.comm.collectives import all_gather, all_reduce, broadcast, reduce_scatter
from mpitrain.comm.process.topology import processor_name
from mpitrain.monitor import memory_bytes, peak_memory_bytes
from mpitrain.monitor.memory import node_memory_bytes
from mpitrain.monitor.text import counted
from mpitrain.planner.machine_file import write_values
from mpitrain.speeds import cores, device, kept, links
from mpitrain.speeds.timing import interleaved
from mpitrain.speeds.values import values_from

KIB, MIB = 1 << 10, 1 << 20
SIZES, QUICK_SIZES = (4 * KIB, 64 * KIB, 1 * MIB, 16 * MIB), (64 * KIB,)
_TABLES = [module.ALGORITHMS for module in (all_reduce, reduce_scatter, all_gather, broadcast)]


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark, and give its exit code."""
    made = parser("machine", "The profile of this machine for the planner: machine.toml.")
    made.add_argument(
        "--folder", dest="dir", type=Path, metavar="DIR", help="measure writing into this folder [that of --out]"
    )
    made.add_argument(
        "--device",
        default="auto",
        metavar="KIND",
        help="accelerators to measure: auto (those there are), cpu (none), cuda, xpu and so on [auto]",
    )
    return run(Benchmark("machine", made, measure, report, keep), arguments)


def measure(world: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """Everything at this rank count. Collective."""
    result: dict[str, Any] = {"nodes": list(world.nodes), "process": peak_memory_bytes()}
    whole = not started_here() or world.size == options.ranks[0]
    if whole:
        with _told(world, "cores"):
            result["cores"] = cores.measure(world, "quick" if options.quick else "full")
        result["machine"] = processor_name()
        result["memory"] = node_memory_bytes()
        with _told(world, "devices"):
            result["device"] = device.measure(world, options.device, options.quick)
        with _told(world, "folder"), temporary_folder(world, options, "machine") as folder:
            result["folder"] = folder_speeds(world, folder, options.quick)
    if world.size > 1:
        bench = CollectiveContenders(world)
        with _told(world, "messages"):
            result["links"] = links.measure(world, bench.plain, options.quick)
        with _told(world, "collectives"):
            result["collectives"] = _collectives(world, bench, options.quick)
        bench.plain.free()
    if whole:
        with _told(world, "a step"):  # last: a trainer settles how many threads this process has
            before = memory_bytes()
            result["overhead"] = overhead(world, options.quick)
            result["process"] += max(0, memory_bytes() - before)  # what libraries take when they are used first
    return result


def keep(results: dict[int, Any], options: argparse.Namespace) -> list[Path]:
    """Print what was found, and write machine.toml; a whole measurement also where `parallel.auto` looks for it."""
    values, path = values_from(results, options.quick), options.out / "machine.toml"
    print(shown_values(values))
    write_values(values, path)
    at = None if options.quick else kept.keep(values)
    return [path, at] if at else [path]


@contextmanager
def _told(world: Communicator, what: str) -> Iterator[None]:
    """Say how long what is done inside has taken."""
    began = time.perf_counter()
    yield
    if world.rank == 0:
        print(f"  {counted(world.size, 'rank')}, {what}: {time.perf_counter() - began:.1f} s", flush=True)


def _collectives(world: Communicator, bench: CollectiveContenders, quick: bool) -> list[list[Any]]:
    """Rows of operation, algorithm, ranks, nodes, memory, bytes, seconds. Collective."""
    repeats, seconds = (3, 0.1) if quick else (15, 0.4)
    rows = []
    for table in _TABLES:
        for memory in ("arena", "private"):
            for size in QUICK_SIZES if quick else SIZES:
                with bench.algorithms(memory, table)(size) as contenders:
                    times = interleaved(world, contenders, repeats, seconds)
                place = [world.size, world.num_nodes, memory, size]
                rows += [[table.operation, name, *place, took.median] for name, took in times.items()]
    return rows
