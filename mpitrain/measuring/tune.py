"""The fastest algorithm of each collective at each size, kept for later jobs on this kind of machine."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from itertools import product
from typing import Any

from mpitrain.comm import Communicator, init
from mpitrain.comm.job.topology import this_machine
from mpitrain.comm.selection import tuning
from mpitrain.comm.selection.registry import Setting
from mpitrain.errors import EXIT_DONE, InputError
from mpitrain.measuring.algorithms import MEMORIES, TABLES, AlgorithmContenders
from mpitrain.measuring.self_start import at_each, byte_sizes, launched, leave, parsed, parser, started_here
from mpitrain.speeds.timing import interleaved

SIZES = [16 << 2 * i for i in range(12)]  # bytes: 16 B to 64 MiB
_QUICK_SIZES = [64, 64 << 10, 1 << 20, 4 << 20]


def main(arguments: Sequence[str]) -> int:
    """`mpitrain.doctor --tune`: the arguments after it; returns the exit code."""
    made = parser("mpitrain.doctor --tune", __doc__ or "", "2,4,8", 1800)
    made.add_argument(
        "--sizes", type=byte_sizes, metavar="S,S", help="bytes of a vector, such as 16,64Ki,4Mi [16 to 64Mi]"
    )
    options = parsed(made, arguments)
    if launched():
        _tune(init(), options)
        return EXIT_DONE
    found, code = at_each(["-m", "mpitrain.doctor", "--tune", *arguments], options, "algorithms")
    if found:
        _tell(next(iter(found.values())))
    return code


def _tune(world: Communicator, options: argparse.Namespace) -> None:
    """Measure at this number of ranks, and write the machine's table. Collective."""
    if world.size == 1:
        raise InputError("collectives of one rank do nothing; start 2 ranks or more", agreed=True)
    repeats, seconds = (5, 0.3) if options.quick else (21, 8.0)
    bench, origin, rules = AlgorithmContenders(world), f"measured {time.strftime('%Y-%m-%d')}", {}
    for table, memory in product(TABLES, MEMORIES):
        medians = {}
        for size in options.sizes or (_QUICK_SIZES if options.quick else SIZES):
            with bench.of(table, memory, size) as contenders:
                times = interleaved(world, contenders, repeats, seconds)
            medians[size] = {name: took.median for name, took in times.items()}
        place = Setting(0, 0, world.nodes, memory, world.process.spare_cores < 0).place
        key = tuning.key(table.operation, place, world.size)
        rules[key] = tuning.rules_from(medians)
        if world.rank == 0:
            print(f"  {key.rpartition('/')[0]}: {tuning.describe(rules[key])}", flush=True)
    path = world.on_root(lambda: str(tuning.keep(this_machine(), rules, origin)))
    if world.rank == 0 and started_here():
        leave(path)
    elif world.rank == 0:
        _tell(path)


def _tell(path: Any) -> None:
    print(
        f"The rules are in {path}; jobs on this machine with this MPI use them from now on (python -m mpitrain.doctor "
        "shows them; delete the file to go back to the built-in ones)."
    )
