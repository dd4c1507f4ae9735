"""all_reduce, reduce_scatter and all_gather against the MPI library, gloo and one memcpy.

What is timed, per operation and vector size (bytes of a rank's whole vector):

    arena     this library, algorithm auto, on memory of an arena
    tensor    this library, algorithm auto, on ordinary memory
    library   the MPI library's own call (in place where MPI has that), by mpi4py, on ordinary memory
    gloo      torch.distributed over gloo, in the same processes
    memcpy    every rank copies as many bytes between two ordinary buffers, all at once
    fp16, bf16 in an arena, against the library's own sum of fp16
    each algorithm by name, in an arena

Every contender has buffers of its own. From 1 MiB on each measurement is a single shot: ranks that take turns on
a core would else copy the same memory several times within one turn, out of the cache, which no collective can do
because its ranks wait for each other. Between two shots of one contender all the others run, which at 2 ranks and
4 MiB move more than 64 MiB through the caches: memcpy and collectives alike start from main memory there, as they
would in a training step. Smaller vectors are measured in runs of calls and stay in the cache for all.

fp32 data are zeros, so that sums repeated in place neither overflow nor become denormal. 16-bit data are set to
0.5 before each measurement: the library's fp16 is software, whose time may depend on the numbers.

With --device, vectors of a device's memory instead: see `collectives_device`.

The predicted order of the algorithms comes from `comm.simulate` with the speeds of `prediction.py`, measured in the
same run. Spearman's rank correlation says how well it agrees with the measured order.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from benchmarks.collectives import device as collectives_device
from benchmarks.collectives.contenders import CollectiveContenders
from benchmarks.collectives.prediction import predicted
from benchmarks.collectives.report import report
from benchmarks.runner.jobs import Benchmark, parser, repeated, run
from benchmarks.runner.peers import gloo
from benchmarks.runner.report import Report
from benchmarks.runner.statistics import plain
from mpitrain.comm import Communicator
from mpitrain.errors import InputError
from mpitrain.measuring.self_start import byte_sizes
from mpitrain.speeds.timing import interleaved

KIB, MIB = 1 << 10, 1 << 20
SIZES = [16 << 2 * i for i in range(12)]  # 16 B to 64 MiB
QUICK_SIZES = [64, 64 * KIB, 1 * MIB, 4 * MIB]

_PASSES = ("algorithms", "all_reduce", "halves", "reduce_scatter", "all_gather")


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark, and give its exit code."""
    made = parser("collectives", "Collectives against the MPI library's own, gloo and memcpy; tuning of their choice.")
    made.add_argument(
        "--sizes", type=byte_sizes, metavar="S,S", help="bytes of a vector, such as 16,64Ki,4Mi [16 to 64Mi]"
    )
    repeated(made, 21, 8, "one operation at one size")
    made.add_argument(
        "--device",
        default="cpu",
        metavar="KIND",
        help="where the vectors lie: auto (an accelerator, where there is one), cpu, cuda, xpu and so on [cpu]",
    )
    made.add_argument(
        "--way", type=_ways, metavar="W,W", help="of device memory: staged, mpi, peer, nccl [all possible]"
    )
    return run(Benchmark("collectives", made, measure, shown), arguments)


def shown(results: dict[int, Any], options: argparse.Namespace) -> Report:
    """The report of the results by rank count, of host memory or of a device's."""
    return (collectives_device.report if collectives_device.asked_for(options) else report)(results, options)


def measure(world: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """Everything at this rank count. Collective."""
    if world.size == 1:
        raise InputError("collectives of one rank do nothing; start 2 ranks or more", agreed=True)
    sizes = options.sizes or (QUICK_SIZES if options.quick else SIZES)
    repeats, seconds = (5, 0.3) if options.quick else (options.repeats, options.seconds)
    if collectives_device.asked_for(options):
        return collectives_device.measure(world, options, sizes, repeats, seconds)
    time_all = partial(interleaved, world, repeats=repeats, budget=seconds)
    bench = CollectiveContenders(world)
    passes = {name: getattr(bench, name) for name in _PASSES}
    result: dict[str, Any] = {"nodes": world.num_nodes, "sizes": sizes, **{name: {} for name in passes}}
    result |= {"speeds": {}, "predicted": {}}
    with gloo(world):
        for size in sizes:
            begin = time.perf_counter()
            for name, contenders in passes.items():
                with contenders(size) as found:
                    result[name][str(size)] = plain(time_all(found))
            with bench.probes(size) as probes:
                machine = probes.machine(time_all(probes.contenders()))
            result["speeds"][str(size)] = asdict(machine)
            result["predicted"][str(size)] = predicted(world, size, machine)
            if world.rank == 0:
                print(f"  {world.size} ranks, {size:>10,} bytes: {time.perf_counter() - begin:5.1f} s", flush=True)
    bench.plain.free()
    return result


def _ways(text: str) -> list[str]:
    ways = text.split(",")
    for way in ways:
        if way not in collectives_device.WAYS:
            raise argparse.ArgumentTypeError(f"{way!r} is not a way; there are {', '.join(collectives_device.WAYS)}")
    return ways
