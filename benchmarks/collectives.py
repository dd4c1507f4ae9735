"""all_reduce, reduce_scatter and all_gather against the MPI library, gloo and one memcpy.

These contenders are timed for each operation and vector size (bytes of a rank's whole vector):

    arena       mpitrain, algorithm auto, on memory of an arena
    tensor      mpitrain, algorithm auto, on ordinary memory
    persistent  the same, by a persistent call of mpitrain (all_reduce only)
    library     the MPI library's own call through mpi4py, on ordinary memory; in place where MPI supports it
    gloo        torch.distributed over gloo, in the same processes
    tcp         plain TCP sockets that move the fewest bytes with which the operation is possible between hosts, and do
                nothing else, among the hosts of tests/cluster/namespace_hosts.py
    memcpy      every rank copies the same number of bytes between two ordinary buffers, all ranks at once
    fp16, bf16  mpitrain on memory of an arena, compared with the MPI library's own sum of fp16

Every contender has its own buffers. From 1 MiB on, each measurement is a single call. Otherwise ranks that share a
core would copy the same memory several times per time slice, out of the cache, which a collective cannot do because its
ranks wait for each other. Between two calls of one contender all others run. At 2 ranks and 4 MiB they move more than
64 MiB through the caches, so memcpy and collectives start from main memory, as in a training step. Smaller vectors are
measured in series of calls and stay in the cache for all contenders.

fp32 data is zero, so that repeated sums in place neither overflow nor become denormal. 16-bit data is set to 0.5 before
each measurement, because the MPI library sums fp16 in software, and its time may depend on the values.

With --device, the vectors are in device memory, and these contenders are timed, as far as possible on this machine:

    staged, mpi, peer, nccl   mpitrain with this way of moving device memory, until the device has the result
    copies                    copies of the rank's vector to pinned host memory and back, nothing else
    host                      the same operation on an arena in host memory, algorithm auto

No algorithm that goes through the host can be faster than the slower of the last two; `staged` overlaps them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import geometric_mean
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.runner.jobs import BenchmarkParser, asked_for_device, run, say, summaries, timed
from benchmarks.runner.peers import PlainCollectives, gloo, plain_sockets
from benchmarks.runner.report import Report, ReportTable, ReportTarget, ratio, target_of
from mpitrain.comm import Communicator
from mpitrain.comm.memory import device as hardware
from mpitrain.errors import InputError
from mpitrain.measuring.self_start import byte_sizes
from mpitrain.measuring.tune import in_arena, make_contenders, zeros
from mpitrain.speeds.timing import Contender
from mpitrain.storage.text import bytes_text

KIB, MIB = 1 << 10, 1 << 20
SIZES = [16 << 2 * i for i in range(12)]  # 16 B to 64 MiB
QUICK_SIZES = [64, 64 * KIB, 1 * MIB, 4 * MIB]
_SINGLE_FROM = 1 << 20  # bytes
_LARGE = 256 * KIB  # bytes; geometric means are over sizes from here on
WAYS = ("staged", "mpi", "peer", "nccl")  # ways of moving device memory
_LIBRARY_FP16, _LIMIT = "library fp16", "max(copies, host)"
_ON_HOST = ("arena", "tensor", "persistent", "library", "gloo", "memcpy", "tcp", "fp16", "bf16", _LIBRARY_FP16)
_CONTENDERS = (*_ON_HOST, *WAYS, "copies", "host")  # in the order of the columns of a table
# pairs of contenders whose ratio a table has
_PAIRS = [("library", "arena"), ("gloo", "arena"), ("arena", "memcpy"), ("library", "tensor"), ("arena", "tcp")]
_PAIRS += [("tensor", "tcp"), (_LIBRARY_FP16, "fp16"), (_LIBRARY_FP16, "bf16"), ("staged", _LIMIT)]
_OTHERS = ("reduce_scatter", "all_gather")
_OPERATIONS = ("all_reduce", *_OTHERS)
_MORE, _TIMES = 1e-6, 1.05  # target for ordinary tensors: most seconds, and times, more than the library's own call
_BOUND = f"(1 µs + {_TIMES} x library)"
_MOST_OF_TCP = 1.2  # target between hosts: our time / that of plain sockets
_ARENA, _TENSOR = "all_reduce in an arena", "all_reduce of ordinary tensors"
# targets by name: (operation, slower contender, faster one, least bytes), and the least mean of slower / faster
_MEANS: dict[str, tuple[tuple[str, str, str, int], float]] = {
    f"{_ARENA}, library / ours": (("all_reduce", "library", "arena", _LARGE), 3),
    f"{_ARENA}, gloo / ours": (("all_reduce", "gloo", "arena", _LARGE), 15),
    f"{_TENSOR}, library / ours": (("all_reduce", "library", "tensor", MIB), 1.5),
    "fp16 in an arena, library's fp16 / ours": (("halves", _LIBRARY_FP16, "fp16", _LARGE), 10),
    "bf16 in an arena, library's fp16 / ours": (("halves", _LIBRARY_FP16, "bf16", _LARGE), 10),
    **{f"{name} in an arena, library / ours": ((name, "library", "arena", _LARGE), 2) for name in _OTHERS},
    "reduce_scatter of ordinary tensors, library / ours": (("reduce_scatter", "library", "tensor", MIB), 1.5),
}
_STAGED = 1.25  # target: staged / the slower of copies and host, from 1 MiB on, where pieces can overlap

Result = dict[str, Any]  # result of `measure` at one rank count


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and return its exit code."""
    what, of = "Compare collectives with those of the MPI library, gloo and memcpy.", "one operation at one size"
    few = "collectives need several ranks"
    parser = BenchmarkParser("collectives", what, repeats=21, seconds=8.0, of=of, quick=(5, 0.3), too_few=few)
    parser.add("sizes", type=byte_sizes, metavar="S,S", help="bytes of a vector, for example 16,64Ki,4Mi [16 to 64Mi]")
    parser.device("device that holds the vectors")
    ways = "transports of device memory: staged, mpi, peer, nccl [all available ones]"
    parser.names("way", WAYS, ways, noun="way")
    return run(parser, measure, report, arguments)


def measure(world: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """Time all collectives at all sizes, on host or device memory. Collective.

    Args:
        world: Communicator of all ranks.
        options: Options of the command.

    Returns:
        Median and best seconds, by operation, size and contender.
    """
    sizes = options.sizes or (QUICK_SIZES if options.quick else SIZES)
    if asked_for_device(options):
        return measure_on_device(world, options, sizes)
    mpi = PlainCollectives(world)
    passes: dict[str, Callable[[int], Any]] = {
        "all_reduce": partial(all_reduces, world, mpi),
        "halves": partial(_halfall_reduces, world, mpi),
        **{name: partial(of_blocks, world, mpi, name) for name in _OTHERS},
    }
    result: dict[str, Any] = {"nodes": world.num_nodes, "sizes": sizes, **{name: {} for name in passes}}
    with gloo(world):
        for size in sizes:
            for name, make in passes.items():
                with make(size) as calls:
                    result[name][str(size)] = summaries(timed(world, "", calls, options))
            say(world, f"{size:>10,} bytes")
    mpi.free()
    return result


# -- contenders; their memory is freed at the end of the context -----------------------------------------------


@contextmanager
def all_reduces(world: Communicator, mpi: PlainCollectives, size: int) -> Iterator[dict[str, Contender]]:
    """Yield the contenders of all_reduce on vectors of `size` bytes. Collective.

    Args:
        world: Communicator of all ranks, and of the default group of torch.distributed.
        mpi: The MPI library's own operations.
        size: Bytes of a rank's vector.
    """
    numel = size // 4
    mine, theirs, gloos, source, dest = (zeros(numel) for _ in range(5))
    with in_arena(world, numel) as arena, plain_sockets(world, 2 * size) as tcp:
        yield make_contenders(
            size,
            arena=partial(world.all_reduce, arena.tensor),
            tensor=partial(world.all_reduce, mine),
            persistent=world.all_reduce_init(zeros(numel)),
            library=mpi.all_reduce(theirs),
            gloo=partial(dist.all_reduce, gloos),
            memcpy=partial(np.copyto, dest.numpy(), source.numpy()),
            **tcp,
        )


@contextmanager
def _halfall_reduces(world: Communicator, mpi: PlainCollectives, size: int) -> Iterator[dict[str, Contender]]:
    """Yield contenders that sum 16-bit vectors: fp16 and bf16 in an arena, and the MPI library's fp16 if it has one."""
    numel = size // 2
    with in_arena(world, numel, torch.float16) as fp16, in_arena(world, numel, torch.bfloat16) as bf16:
        vectors = {"fp16": fp16.tensor, "bf16": bf16.tensor}
        calls: dict[str, Callable[[], object]] = {n: partial(world.all_reduce, x) for n, x in vectors.items()}
        if mpi.adds_fp16:
            vectors[_LIBRARY_FP16] = zeros(numel, torch.float16)
            calls[_LIBRARY_FP16] = mpi.all_reduce(vectors[_LIBRARY_FP16])
        single = size >= _SINGLE_FROM
        yield {n: Contender(call, partial(vectors[n].fill_, 0.5), single) for n, call in calls.items()}


@contextmanager
def of_blocks(world: Communicator, mpi: PlainCollectives, operation: str, size: int) -> Iterator[dict[str, Contender]]:
    """Yield the contenders of `operation`, reduce_scatter or all_gather, on vectors of `size` bytes. Collective.

    Args:
        world: Communicator of all ranks.
        mpi: The MPI library's own operations.
        operation: Name of the operation.
        size: Bytes of a rank's whole vector.
    """
    each = max(1, size // 4 // world.size)
    mine, theirs = zeros(each * world.size), zeros(each * world.size)
    with in_arena(world, each * world.size) as arena, plain_sockets(world, size) as tcp:
        in_place, block = operation == "all_gather", slice(world.rank * each, (world.rank + 1) * each)
        ours = [_call(world, operation, x, x[block] if in_place else zeros(each)) for x in (arena.tensor, mine)]
        library = mpi.all_gather(theirs) if in_place else mpi.reduce_scatter(zeros(each), theirs)
        yield make_contenders(size, arena=ours[0], tensor=ours[1], library=library, **tcp)


# -- the report ----------------------------------------------------------------------------------------------


def report(results: dict[int, Result], options: argparse.Namespace) -> Report:
    """Return the report with tables and targets.

    Args:
        results: Results of `measure`, by number of ranks.
        options: Options of the command.
    """
    if asked_for_device(options):
        return report_on_device(results)
    titles = {name: f"{name}, fp32" for name in _OPERATIONS} | {"halves": "all_reduce in an arena, 16-bit"}
    tables, targets = [], []
    for ranks, result in results.items():
        tables += [_table(f"{title}, {ranks} ranks", result[name]) for name, title in titles.items()]
        targets += _targets(ranks, result)
    return Report("Collectives", tables, targets)


def ratios(result: Result, operation: str, slower: str, faster: str, least: int = 0) -> dict[int, float]:
    """Return the ratio of two contenders' median times by vector size, for sizes at which both were measured.

    Args:
        result: Result of `measure` at one rank count.
        operation: Name of the operation.
        slower: Contender in the numerator.
        faster: Contender in the denominator.
        least: Smallest size in bytes.
    """
    return {
        int(size): ratio(times, slower, faster)
        for size, times in result[operation].items()
        if least <= int(size) and slower in times and faster in times
    }


def _targets(ranks: int, result: Result) -> list[ReportTarget]:
    def of_worst(what: str, values: Mapping[int, float], **bounds: Any) -> ReportTarget:
        """Return a target for a ratio that must lie within bounds at every size.

        Args:
            what: Name of the ratio.
            values: Ratio by vector size.
            **bounds: `least` or `most`, see `target_of`.
        """
        what, where = f"{ranks} ranks: {what}", " at each size"
        if not values:
            return target_of(what, None, where=where, **bounds)
        worst = (max if "most" in bounds else min)(values, key=values.__getitem__)
        text = f"{values[worst]:.2f} at {bytes_text(worst)} (mean {geometric_mean(values.values()):.2f})"
        return target_of(what, values[worst], text=text, where=where, **bounds)

    def excess(operation: str) -> dict[int, float]:
        """Return the time of ordinary tensors by size, relative to the most that is allowed, `_BOUND`."""
        medians = (
            (int(size), of["tensor"]["median"], of["library"]["median"]) for size, of in result[operation].items()
        )
        return {size: ours / (_MORE + _TIMES * library) for size, ours, library in medians}

    over = partial(ratios, result)
    if result["nodes"] > 1:
        return [
            of_worst(f"{name}, {ours} / tcp, from 1 MiB", over(name, ours, "tcp", MIB), most=_MOST_OF_TCP)
            for name in _OPERATIONS
            for ours in ("arena", "tensor")
        ]
    targets = []
    for what, (compared, least) in _MEANS.items():
        values = over(*compared)
        mean = geometric_mean(values.values()) if values else None
        worst = min(values, key=values.__getitem__, default=0)
        text = f"{mean:.2f} (least {values[worst]:.2f} at {bytes_text(worst)})" if values else None
        title = f"{ranks} ranks: {what}, from {bytes_text(compared[-1])}"
        targets.append(target_of(title, mean, least=least, text=text))
    copied = over("all_reduce", "arena", "memcpy", 4 * MIB)
    return [
        *targets,
        of_worst(f"{_ARENA}, ours / memcpy, from 4 MiB", copied, most=1.15 if ranks <= 2 else 1.4),
        *(of_worst(f"{name} of ordinary tensors, ours / {_BOUND}", excess(name), most=1) for name in _OPERATIONS),
    ]


def _table(title: str, measured: Result, note: str = "") -> ReportTable:
    """Return a table with one row per size: median microseconds of contenders, and the ratios in `_PAIRS`.

    Args:
        title: Title of the table.
        measured: Times by size and contender; what was not measured has no column.
        note: Paragraph under the title, after the first sentence.
    """
    present = set().union(*measured.values())
    shown = [name for name in _CONTENDERS if name in present]
    pairs = [pair for pair in _PAIRS if present.issuperset(pair)]
    rows = []
    for size, times in measured.items():
        us = {name: of["median"] * 1e6 for name, of in times.items()}
        rows.append([bytes_text(int(size)), *map(us.get, shown), *(us[a] / us[b] for a, b in pairs)])
    columns = ("size", *(f"{name} µs" for name in shown), *map(" / ".join, pairs))
    return ReportTable(title, columns, rows, f"Medians over the repetitions. {note}".rstrip())


# -- memory of a device --------------------------------------------------------------------------------------


def measure_on_device(world: Communicator, options: argparse.Namespace, sizes: Sequence[int]) -> dict[str, Any]:
    """Time each collective at each size on device memory. Collective.

    Args:
        world: Communicator of all ranks.
        options: Options of the command.
        sizes: Sizes of a rank's whole vector, in bytes.

    Returns:
        Median and best seconds, by operation, size and contender; name of the device; obstacles by way.

    Raises:
        InputError: The device does not exist, or none of the ways is possible.
    """
    device = hardware.of_rank(options.device, world.local_rank)
    hardware.use(device)
    obstacles = {way.name: way.obstacle for way in world.device_ways(device)}
    ways = [way for way in WAYS if way in (options.way or WAYS) and not obstacles.get(way, "it was not checked")]
    if not ways:
        reasons = "; ".join(f"{name}: {why}" for name, why in obstacles.items() if why)
        raise InputError(f"none of the requested transports is available here ({reasons}); omit --way", agreed=True)
    result: dict[str, Any] = {"device": hardware.name(device), "obstacles": obstacles, "sizes": list(sizes)}
    with _communicators(world, device, ways) as carried:
        for operation in _OPERATIONS:
            result[operation] = {}
            for size in sizes:
                with _device_contenders(world, device, operation, size, carried) as contenders:
                    times = timed(world, f"{operation} on {device.type}, {size} bytes", contenders, options)
                    result[operation][str(size)] = summaries(times)
    return result


@contextmanager
def _communicators(world: Communicator, device: torch.device, ways: Sequence[str]) -> Iterator[dict[str, Communicator]]:
    """Yield one communicator of all ranks for each way, which moves device memory in this way only. Collective."""
    memory = world.process.device_memory
    before, communicators = memory.way, {}
    for way in ways:
        memory.way = way
        comm = world.subgroup(range(world.size), label=f"bench {way}")
        assert comm is not None
        comm.device_ways(device)  # fixes the way of this communicator
        communicators[way] = comm
    memory.way = before
    yield communicators
    for comm in communicators.values():
        comm.free()


@contextmanager
def _device_contenders(
    world: Communicator, device: torch.device, operation: str, size: int, carried: dict[str, Communicator]
) -> Iterator[dict[str, Contender]]:
    each = max(1, size // 4 // world.size)
    numel = each * world.size
    calls: dict[str, Callable[[], object]] = {}
    for way, comm in carried.items():
        x, block = torch.zeros(numel, device=device), torch.zeros(each, device=device)
        calls[way] = partial(_until_done, device, _call(comm, operation, x, block))
    host = hardware.empty_pinned((numel,), torch.float32, device).zero_()
    calls["copies"] = partial(_to_host_and_back, torch.zeros(numel, device=device), host)
    with in_arena(world, numel) as arena:
        arena.tensor.zero_()
        calls["host"] = _call(world, operation, arena.tensor, torch.zeros(each))
        hardware.synchronize(device)
        yield {name: Contender(call, single=size >= MIB) for name, call in calls.items()}


def _call(comm: Communicator, operation: str, x: torch.Tensor, block: torch.Tensor) -> Callable[[], object]:
    """Return a call of `operation` on a rank's whole vector `x` and its `block`."""
    arguments = {"all_reduce": (x,), "reduce_scatter": (block, x), "all_gather": (x, block)}
    return partial(getattr(comm, operation), *arguments[operation])


def _until_done(device: torch.device, call: Callable[[], object]) -> None:
    call()
    hardware.synchronize(device)


def _to_host_and_back(x: torch.Tensor, host: torch.Tensor) -> None:
    host.copy_(x, non_blocking=True)
    x.copy_(host, non_blocking=True)
    hardware.synchronize(x.device)


def report_on_device(results: dict[int, Result]) -> Report:
    """Return the report on device memory, with tables and targets; `results` are by number of ranks."""
    tables, targets = [], []
    for ranks, result in results.items():
        absent = "; ".join(f"{name}: {why}" for name, why in result["obstacles"].items() if why)
        note = f"On {result['device']}." + (f" Not available here: {absent}." if absent else "")
        measured = {name: {size: _with_limit(of) for size, of in result[name].items()} for name in _OPERATIONS}
        tables += [_table(f"{name}, {ranks} ranks", of, note) for name, of in measured.items()]
        over = ratios(measured, "all_reduce", "staged", _LIMIT, MIB).values()
        what = f"{ranks} ranks: staged all_reduce / the slower of copies and host, from 1 MiB"
        targets.append(target_of(what, geometric_mean(over) if over else None, most=_STAGED))
    return Report("Collectives on device memory", tables, targets)


def _with_limit(times: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return the times by contender with an entry `_LIMIT`, the slower of `copies` and `host`."""
    return times | {_LIMIT: max(times["copies"], times["host"], key=lambda of: of["median"])}
