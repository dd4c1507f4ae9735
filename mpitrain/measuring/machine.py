"""The profile of a machine for the planner: speeds of its cores, memory, messages, collectives, devices and folder.

What is measured goes into machine.toml, from which `python -m mpitrain.plan --machine` predicts. The figures
are those of one rank that has a core for itself while all other cores of its node are as busy, as in training.

    cores        matrix products by size and precision, copies, AdamW, on all cores at once; see `speeds.cores`
    messages     latency and bandwidth inside a node and between nodes; see `speeds.links`
    collectives  every algorithm of all_reduce, reduce_scatter, all_gather and broadcast at some sizes
    folder       what ranks write into a folder, until it is on the disk; --folder names the run folder's file system
    a rank       its memory before it has a model, and what a step takes beside its model; see `rank`
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
from itertools import product
from pathlib import Path
from typing import Any

from mpitrain.comm import Communicator, init
from mpitrain.comm.job.topology import processor_name
from mpitrain.comm.plain_mpi import PlainMPI
from mpitrain.errors import EXIT_DONE
from mpitrain.measuring.algorithms import MEMORIES, TABLES, AlgorithmContenders
from mpitrain.measuring.rank import folder_speeds, overhead
from mpitrain.measuring.self_start import at_each, launched, leave, parsed, parser, started_here, temporary_folder
from mpitrain.monitor import memory_bytes, peak_memory_bytes
from mpitrain.monitor.memory import node_memory_bytes
from mpitrain.monitor.text import aligned, counted
from mpitrain.planner.machine_file import Values, write_values
from mpitrain.planner.machine_keys import SECTIONS
from mpitrain.speeds import cores, device, kept, links
from mpitrain.speeds.timing import interleaved
from mpitrain.speeds.values import values_from

KIB, MIB = 1 << 10, 1 << 20
SIZES, QUICK_SIZES = (4 * KIB, 64 * KIB, 1 * MIB, 16 * MIB), (64 * KIB,)
_TABLES = [table for table in TABLES if table.operation != "reduce"]  # which training does not use


def main(arguments: Sequence[str]) -> int:
    """`mpitrain.plan --measure`: the arguments after it; returns the exit code."""
    made = parser("mpitrain.plan --measure", "The profile of this machine for the planner.", "2,4,8", 1800)
    made.add_argument("--out", type=Path, default=Path("machine.toml"), metavar="FILE", help="profile [machine.toml]")
    made.add_argument("--folder", type=Path, metavar="DIR", help="measure writing into this folder [that of --out]")
    made.add_argument(
        "--device",
        default="auto",
        metavar="KIND",
        help="accelerators to measure: auto (those there are), cpu (none), cuda, xpu and so on [auto]",
    )
    options = parsed(made, arguments)
    if launched():
        world = init()
        result = measure(world, options)
        if world.rank == 0 and started_here():
            leave(result)
        elif world.rank == 0:
            keep({world.size: result}, options)
        return EXIT_DONE
    results, code = at_each(["-m", "mpitrain.plan", "--measure", *arguments], options, "machine")
    if results:  # also where a later rank count has failed
        keep(results, options)
    return code


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
        with _told(world, "folder"), temporary_folder(world, options.folder or options.out.parent) as folder:
            result["folder"] = folder_speeds(world, folder, options.quick)
    if world.size > 1:
        plain = PlainMPI(world)
        with _told(world, "messages"):
            result["links"] = links.measure(world, plain, options.quick)
        plain.free()
        with _told(world, "collectives"):
            result["collectives"] = _collectives(world, options.quick)
    if whole:
        with _told(world, "a step"):  # last: a trainer settles how many threads this process has
            before = memory_bytes()
            result["overhead"] = overhead(world, options.quick)
            result["process"] += max(0, memory_bytes() - before)  # what libraries take when they are used first
    return result


def keep(results: dict[int, Any], options: argparse.Namespace) -> None:
    """Print what was found at each rank count, and write it; where all was measured, also for `parallel.auto`."""
    values = values_from(results, options.quick)
    print(shown_values(values))
    write_values(values, options.out)
    print(f"written: {options.out}")
    if not options.quick and (at := kept.keep(values)):
        print(f"written: {at}, for parallel.auto")


def shown_values(values: Values) -> str:
    """The figures, a line each, but for those of collectives."""
    lines = [values["name"]]
    for section, keys in SECTIONS.items():
        rows = []
        for key, of in keys.items():
            value = values.get(section, {}).get(key)
            if value is None or of.unit is None:
                continue
            if of.table:
                for precision, table in value.items():
                    told = ", ".join(f"{of.unit.text(rate)} ({n})" for n, rate in sorted(table.items()))
                    rows.append((f"{section} matrix {precision}", told))
            else:
                rows.append((f"{section} {key.replace('_', ' ')}", f"{of.unit.text(value):20} {of.meaning}"))
        lines += [aligned(rows)] if rows else []
    return "\n".join(lines)


@contextmanager
def _told(world: Communicator, what: str) -> Iterator[None]:
    """Say how long what is done inside has taken."""
    began = time.perf_counter()
    yield
    if world.rank == 0:
        print(f"  {counted(world.size, 'rank')}, {what}: {time.perf_counter() - began:.1f} s", flush=True)


def _collectives(world: Communicator, quick: bool) -> list[list[Any]]:
    """Rows of operation, algorithm, ranks, nodes, memory, bytes, seconds. Collective."""
    repeats, seconds = (3, 0.1) if quick else (15, 0.4)
    rows, bench = [], AlgorithmContenders(world)
    for table, memory, size in product(_TABLES, MEMORIES, QUICK_SIZES if quick else SIZES):
        with bench.of(table, memory, size) as contenders:
            times = interleaved(world, contenders, repeats, seconds)
        place = [world.size, world.num_nodes, memory, size]
        rows += [[table.operation, name, *place, took.median] for name, took in times.items()]
    return rows
