"""The speeds of messages between these ranks."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from mpitrain.comm import Communicator
from mpitrain.comm.plain_mpi import PlainMPI
from mpitrain.comm.programs.simulate import Machine
from mpitrain.comm.selection.setting import RING_SEGMENT
from mpitrain.speeds.probes import Probes
from mpitrain.speeds.timing import Times, interleaved

MIB = 1 << 20
_QUIET = 0.25  # quantile of the times of messages: what other work of the machine delays is not theirs
_PROBED, _MOST = 16 * MIB, 64 * MIB  # bytes of the vector that probes take blocks of


def measure(world: Communicator, plain: PlainMPI, quick: bool) -> dict[str, Any]:
    """The speeds of `comm.programs.simulate.Machine` that messages give. Collective."""
    size = 1 * MIB if quick else min(_MOST, max(_PROBED, world.size * RING_SEGMENT))
    repeats, seconds = (5, 0.3) if quick else (21, 3.0)
    arena = world.arena(max(world.size, size // 4))
    try:
        probes = Probes(world, plain, arena)
        times = interleaved(world, probes.contenders(), repeats, seconds)
        quiet = {name: Times([float(np.quantile(of.all, _QUIET))]) for name, of in times.items()}
        found = asdict(probes.machine(quiet))
        del found["eager"]  # the library's own, which is not measured
    finally:
        arena.free()
    if world.num_nodes > 1:
        tiny, segment = (_between_nodes(world, plain, nbytes, quick) for nbytes in (8, RING_SEGMENT))
        found["latency"] = max(1e-8, tiny - found["step"])
        waits = 3 if Machine().eager < RING_SEGMENT else 1  # the latencies of a long message
        found["bandwidth"] = RING_SEGMENT / max(segment / 10, segment - waits * tiny)
    return found


def _between_nodes(world: Communicator, plain: PlainMPI, nbytes: int, quick: bool) -> float:
    """Seconds in which rank 0 and the first rank of another node send each other so many bytes at once. Collective.

    By many exchanges one after the other: where a message takes milliseconds, ranks do not begin at the same time.
    """
    other = next(rank for rank in range(world.size) if world.nodes[rank] != world.nodes[0])
    taken, repeats, enough = [0.0], (3 if quick else 9), (0.02 if quick else 0.1)
    if world.rank in (0, other):
        peer = other if world.rank == 0 else 0
        call = plain.exchange(torch.zeros(nbytes // 4), torch.zeros(nbytes // 4), peer, peer)
        call()
        began = time.perf_counter()
        call()
        count = torch.tensor([max(4.0, min(1000.0, enough / (time.perf_counter() - began)))])
        told = torch.zeros(1)
        plain.exchange(told, count, peer, peer)()
        calls = range(int(count if world.rank == 0 else told))
        taken = []
        for _ in range(repeats):
            began = time.perf_counter()
            for _ in calls:
                call()
            taken.append((time.perf_counter() - began) / len(calls))
    seconds = torch.tensor([statistics.median(taken)], dtype=torch.float64)
    world.broadcast(seconds, 0)
    return float(seconds)
