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
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.collectives.report import size_text
from benchmarks.runner.jobs import Benchmark, parser, repeated, run
from benchmarks.runner.report import Report, ReportTable
from benchmarks.runner.statistics import plain
from benchmarks.servers.carriers import SERVER
from benchmarks.servers.contenders import carriers, contenders
from mpitrain.comm import Communicator
from mpitrain.errors import InputError
from mpitrain.measuring.self_start import byte_sizes, temporary_folder
from mpitrain.speeds.timing import interleaved

SIZES = (64 << 10, 1 << 20, 16 << 20)
QUICK_SIZES = (1 << 20,)
_ACTS = ("push", "pull")


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark, and give its exit code."""
    made = parser("server", "Pushes to and pulls from a rank that serves, by each way of carrying them.", ranks="2")
    made.add_argument("--sizes", type=byte_sizes, metavar="S,S", help="bytes that a worker moves [64Ki,1Mi,16Mi]")
    made.add_argument("--dir", type=Path, metavar="DIR", help="where ranks of torch rpc find each other [--out]")
    made.add_argument("--computing", action="store_true", help="also one-sided while the server computes: seconds each")
    repeated(made, 31, 60, "one size")
    return run(Benchmark("server", made, measure, report), arguments)


def measure(world: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """What is measured at this rank count. Collective."""
    if world.size < 2:
        raise InputError("a server needs a worker; use 2 ranks or more", agreed=True)
    repeats, sizes = (5, QUICK_SIZES) if options.quick else (options.repeats, SIZES)
    result: dict[str, Any] = {}
    for size in options.sizes or sizes:
        with temporary_folder(world, options.dir or options.out) as folder:
            result[str(size)] = _measure(world, size, folder, repeats, options)
        if world.rank == 0:
            print(f"  {world.size} ranks, {size_text(size)}", flush=True)
    return result


def _measure(
    world: Communicator, size: int, folder: Path, repeats: int, options: argparse.Namespace
) -> dict[str, dict[str, dict[str, float]]]:
    begins = world.rank != SERVER
    with carriers(world, size // 4, folder, computing=options.computing) as ways:
        times = plain(interleaved(world, contenders(ways), repeats, options.seconds, begins=begins))
    return {way: {act: times[f"{act} {way}"] for act in _ACTS} for way in ways}


# -- the report --------------------------------------------------------------------------------------------


def report(results: dict[int, Any], options: argparse.Namespace) -> Report:
    """Tables and the plot of the results by rank count."""
    tables = []
    for ranks, result in results.items():
        for size, ways in result.items():
            rows = []
            for way, times in ways.items():
                ms, copies = ([of[act]["median"] * 1e3 for act in _ACTS] for of in (times, ways["memcpy"]))
                best = [times[act]["best"] * 1e3 for act in _ACTS]
                rows.append((way, *(cell for a, b in zip(ms, copies, strict=True) for cell in (a, a / b)), *best))
            columns = ("carried by", "push, ms", "/ memcpy", "pull, ms", "/ memcpy", "best push", "best pull")
            note = "Medians, and the best of all repetitions, which other work on the machine disturbs less."
            tables.append(ReportTable(f"{size_text(int(size))}, {ranks} ranks", columns, rows, note))
    return Report("Pushing to and pulling from a rank that serves", tables, (), partial(_draw, results=results))


def _draw(figure: Any, results: dict[int, Any]) -> None:
    """Both times of each way at the largest size."""
    figure.set_size_inches(6 * len(results), 4)
    axes = figure.subplots(1, len(results), squeeze=False)[0]
    for ax, (ranks, result) in zip(axes, results.items(), strict=True):
        size, ways = list(result.items())[-1]
        for number, act in enumerate(_ACTS):
            places = [i + (number - 0.5) * 0.4 for i in range(len(ways))]
            ax.barh(places, [times[act]["median"] * 1e3 for times in ways.values()], 0.4, label=act)
        ax.set_yticks(range(len(ways)), ways)
        ax.invert_yaxis()
        ax.set(xscale="log", xlabel="milliseconds", title=f"{size_text(int(size))}, {ranks} ranks")
        ax.legend()
