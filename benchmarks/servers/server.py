"""Pushing gradients to a rank that serves and pulling parameters, by each way of carrying them.

Rank 0 serves, the others push and pull, all at once. What is timed, per size (bytes that each of them moves):

    memcpy                      a worker copies as much within its own memory
    shared memory               it copies into, and out of, the server's part of an arena; a letter says when
    letters                     the payload of a letter (`mpitrain.comm.mailbox`)
    one-sided, allocated        MPI_Put, MPI_Get and MPI_Win_flush in memory that MPI allocated
    one-sided, created          likewise, in ordinary memory of the server, which waits inside MPI
    one-sided, server computes  with --computing, which takes long: the server is not in MPI, but for its watchdog
    torch rpc                   torch.distributed.rpc over TensorPipe, as in torch's tutorial of a parameter server
    ..., and SGD                a push updates the parameters, too: torch rpc so, and parallel.mode server as it is

A push lasts from its beginning at a worker until the server knows that it has the gradient, a pull until the worker has
the parameters. Each way has memory of its own and is measured by single shots in turns with all others, so that from
4 MiB on nothing is in the caches. Nothing is computed with what arrives, and it is checked once that it is what was
sent.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.runner.jobs import BenchmarkParser, run, timed
from benchmarks.runner.report import Panel, Report, ReportTable, milliseconds
from benchmarks.servers.carriers import SERVER, carriers
from mpitrain.comm import Communicator
from mpitrain.measuring.self_start import byte_sizes, temporary_folder
from mpitrain.speeds.timing import plain
from mpitrain.storage.text import bytes_text

SIZES = (64 << 10, 1 << 20, 16 << 20)
QUICK_SIZES = (1 << 20,)
_ACTS = ("push", "pull")


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark, and give its exit code."""
    what = "Pushes to and pulls from a rank that serves, by each way of carrying them."
    made = BenchmarkParser(
        "server", what, "2", repeats=31, seconds=60.0, of="one size", quick=(5, 60.0), too_few="a server needs a worker"
    )
    made.add("sizes", type=byte_sizes, metavar="S,S", help="bytes that a worker moves [64Ki,1Mi,16Mi]")
    made.add("dir", type=Path, metavar="DIR", help="where ranks of torch rpc find each other [--out]")
    made.add("computing", action="store_true", help="also one-sided while the server computes: seconds each")
    return run(made, measure, report, arguments)


def measure(world: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """What is measured at this rank count. Collective."""
    result: dict[str, Any] = {}
    for size in options.sizes or (QUICK_SIZES if options.quick else SIZES):
        with (
            temporary_folder(world, options.dir or options.out) as folder,
            carriers(world, size // 4, folder, computing=options.computing) as ways,
        ):
            calls = {f"{act} {name}": getattr(way, act) for name, way in ways.items() for act in _ACTS}
            times = plain(timed(world, bytes_text(size), calls, options, begins=world.rank != SERVER))
            result[str(size)] = {way: {act: times[f"{act} {way}"] for act in _ACTS} for way in ways}
    return result


# -- the report --------------------------------------------------------------------------------------------


def report(results: dict[int, Any], options: argparse.Namespace) -> Report:
    """Tables and the plot of the results by rank count."""
    tables, panels = [], []
    for ranks, result in results.items():
        for size, ways in result.items():
            rows = []
            for way, times in ways.items():
                ms, copies = ([of[act]["median"] * 1e3 for act in _ACTS] for of in (times, ways["memcpy"]))
                best = [times[act]["best"] * 1e3 for act in _ACTS]
                rows.append((way, *(cell for a, b in zip(ms, copies, strict=True) for cell in (a, a / b)), *best))
            columns = ("carried by", "push, ms", "/ memcpy", "pull, ms", "/ memcpy", "best push", "best pull")
            note = "Medians, and the best of all repetitions, which other work on the machine disturbs less."
            tables.append(ReportTable(f"{bytes_text(int(size))}, {ranks} ranks", columns, rows, note))
        largest = {name: milliseconds(times) for name, times in ways.items()}
        bars = {act: [ms[act] for ms in largest.values()] for act in _ACTS}
        title = f"{bytes_text(int(size))}, {ranks} ranks"
        panels.append(Panel(title, "milliseconds", bars, list(largest), log=True))
    return Report("Pushing to and pulling from a rank that serves", tables, panels=[panels])
