"""Collectives on device memory, by each way of carrying it, beside what the host and the copies take alone.

    staged, mpi, peer, nccl   this library by that way, where it is possible; until the device has the result
    copies                    the rank's vector to pinned host memory and back, nothing else
    host                      the same operation on an arena in host memory, algorithm auto

Nothing can be faster by way of the host than the slower of the last two; `staged` overlaps them. Every contender has
buffers of its own, and data are zeros, as in the benchmark of host memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from benchmarks.runner.jobs import timed
from benchmarks.runner.report import Report, ReportTable, judged, milliseconds
from benchmarks.runner.statistics import geometric_mean, summaries
from mpitrain.comm import Communicator
from mpitrain.comm.memory import device as hardware
from mpitrain.errors import InputError
from mpitrain.measuring.tune import in_arena
from mpitrain.speeds.timing import Contender

WAYS = ("staged", "mpi", "peer", "nccl")
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")
KIB = 1 << 10
_LARGE = 1024 * KIB  # from which the pieces of a vector can overlap
_WANTED = 1.25  # staged, over the slower of copies and host


def asked_for(options: argparse.Namespace) -> bool:
    """Whether device memory is to be measured: a kind was named, or "auto" and there is an accelerator."""
    kind: str = options.device
    return kind != "cpu" and (kind != "auto" or bool(hardware.accelerator()))


def measure(world: Communicator, options: argparse.Namespace, sizes: Sequence[int]) -> dict[str, Any]:
    """Times of each operation at each size. Collective.

    Args:
        world: The ranks.
        options: Of the command.
        sizes: Bytes of a rank's whole vector.

    Raises:
        InputError: There is no such device, or none of the ways is possible.
    """
    device = hardware.of_rank(options.device, world.local_rank)
    hardware.use(device)
    obstacles = {way.name: way.obstacle for way in world.device_ways(device)}
    ways = [way for way in WAYS if way in (options.way or WAYS) and not obstacles.get(way, "it was not looked at")]
    if not ways:
        told = "; ".join(f"{name}: {why}" for name, why in obstacles.items() if why)
        raise InputError(f"none of the ways asked for is possible here ({told}); leave --way out", agreed=True)
    result: dict[str, Any] = {"device": hardware.name(device), "obstacles": obstacles, "sizes": list(sizes)}
    with _communicators(world, device, ways) as carried:
        for operation in OPERATIONS:
            result[operation] = {}
            for size in sizes:
                with _contenders(world, device, operation, size, carried) as contenders:
                    times = timed(world, f"{operation} on {device.type}, {size} bytes", contenders, options)
                    result[operation][str(size)] = summaries(times)
    return result


@contextmanager
def _communicators(world: Communicator, device: torch.device, ways: Sequence[str]) -> Iterator[dict[str, Communicator]]:
    """A communicator over all ranks for each way, which carries device memory by no other. Collective."""
    memory = world.process.device_memory
    before, made = memory.way, {}
    for way in ways:
        memory.way = way
        comm = world.subgroup(range(world.size), label=f"bench {way}")
        assert comm is not None
        comm.device_ways(device)  # which settles it
        made[way] = comm
    memory.way = before
    yield made
    for comm in made.values():
        comm.free()


@contextmanager
def _contenders(
    world: Communicator, device: torch.device, operation: str, size: int, carried: dict[str, Communicator]
) -> Iterator[dict[str, Contender]]:
    each = max(1, size // 4 // world.size)
    numel = each * world.size
    calls: dict[str, Callable[[], object]] = {}
    for way, comm in carried.items():
        x, block = torch.zeros(numel, device=device), torch.zeros(each, device=device)
        calls[way] = partial(_until_done, device, _call(comm, operation, x, block))
    host = hardware.pinned((numel,), torch.float32, device).zero_()
    calls["copies"] = partial(_to_host_and_back, torch.zeros(numel, device=device), host)
    with in_arena(world, numel) as arena:
        arena.tensor.zero_()
        calls["host"] = _call(world, operation, arena.tensor, torch.zeros(each))
        hardware.synchronize(device)
        yield {name: Contender(call, single=size >= _LARGE) for name, call in calls.items()}


def _call(comm: Communicator, operation: str, x: torch.Tensor, block: torch.Tensor) -> Callable[[], object]:
    """The operation on a rank's whole vector x and its block."""
    if operation == "all_reduce":
        return partial(comm.all_reduce, x)
    return (
        partial(comm.reduce_scatter, block, x) if operation == "reduce_scatter" else partial(comm.all_gather, x, block)
    )


def _until_done(device: torch.device, call: Callable[[], object]) -> None:
    call()
    hardware.synchronize(device)


def _to_host_and_back(x: torch.Tensor, host: torch.Tensor) -> None:
    host.copy_(x, non_blocking=True)
    x.copy_(host, non_blocking=True)
    hardware.synchronize(x.device)


# -- the report


def report(results: dict[int, dict[str, Any]], options: argparse.Namespace) -> Report:
    """Tables and targets of the results by rank count."""
    tables = [_table(ranks, operation, result) for ranks, result in results.items() for operation in OPERATIONS]
    targets = [
        judged(
            f"{ranks} ranks: staged all_reduce / the slower of copies and host, from 1 MiB",
            geometric_mean(overheads(result, "all_reduce", _LARGE)),
            most=_WANTED,
        )
        for ranks, result in results.items()
    ]
    return Report("Collectives on device memory", tables, targets)


def overheads(result: dict[str, Any], operation: str, least: int = 0) -> list[float]:
    """staged over the slower of copies and host, for each size from `least` on."""
    return [
        times["staged"]["median"] / max(times["copies"]["median"], times["host"]["median"])
        for size, times in result[operation].items()
        if "staged" in times and int(size) >= least
    ]


def _table(ranks: int, operation: str, result: dict[str, Any]) -> ReportTable:
    names = list(next(iter(result[operation].values())))
    rows: list[list[str | float | None]] = []
    ratios: list[float | None] = [*overheads(result, operation)] or [None] * len(result["sizes"])
    for (size, times), ratio in zip(result[operation].items(), ratios, strict=True):
        rows.append([f"{int(size) // KIB:,}", *milliseconds(times).values(), ratio])
    columns = ("KiB", *(f"{name} ms" for name in names), "staged / max(copies, host)")
    absent = "; ".join(f"{name}: {why}" for name, why in result["obstacles"].items() if why)
    note = f"On {result['device']}." + (f" Not possible here: {absent}." if absent else "")
    return ReportTable(f"{operation}, {ranks} ranks", columns, rows, note)
