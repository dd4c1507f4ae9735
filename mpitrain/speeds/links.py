"""Speeds of messages between the ranks of a job."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch

from mpitrain.comm import Arena, Communicator
from mpitrain.comm.inspection import PlainMPI
from mpitrain.comm.programs.program import Machine
from mpitrain.comm.selection import RING_SEGMENT
from mpitrain.speeds.timing import Contender, measure_in_turns

# -- Values of `comm.programs.program.Machine` inside a node, from small operations that all ranks run at once
# All ranks run the probes at once, with a block of the size that the algorithms use (vector / ranks, at most a ring
# segment). If there are more ranks than cores, ranks take turns, which the simulator models itself:
#
#     exchange of 8 bytes       = local_latency + step
#     exchange of a block       = exchange of 8 bytes + block / local_bandwidth
#     adding two numbers        = step, the cost of starting an operation in Python
#     adding or copying a neighbour's block: reduce_rate, copy_rate
#     barrier of a node         = fence for each doubling of its ranks


_FASTEST = 1e11  # bytes per second, used if a difference is too small to be measured
_LEAST = 1e-8  # seconds


class Probes:
    """Measurements that determine a `Machine`.

    Attributes:
        contenders: Operations to time, by the names that `machine` uses.
    """

    def __init__(self, world: Communicator, plain: PlainMPI, arena: Arena) -> None:
        """Set up this rank's operations.

        Args:
            world: All ranks.
            plain: MPI's own calls.
            arena: Memory of the vector's size, of which each rank uses its block.
        """
        self.world = world
        numel = arena.tensor.numel() // world.size
        mine = slice(world.rank * numel, (world.rank + 1) * numel)
        near = [r for r in range(world.size) if world.nodes[r] == world.node]
        place = near.index(world.rank)
        ring = near[(place + 1) % len(near)], near[place - 1]  # inside the node
        other = world.world_ranks[ring[0]]
        block = arena.tensor[mine]
        neighbour = (arena.peer(other) if arena.kind == "shared" else arena.tensor)[mine]
        message = block[: RING_SEGMENT // 4]
        own_block, peer_block, few = block.numpy(), neighbour.numpy(), np.zeros(2, dtype=np.float32)
        calls: dict[str, Callable[[], object]] = {
            "tiny": plain.exchange(torch.zeros(2), torch.zeros(2), *ring),
            "exchange": plain.exchange(torch.empty_like(message).zero_(), message, *ring),
            "step": partial(np.add, few, few, out=few),
            "add": partial(np.add, own_block, peer_block, out=own_block),
            "copy": partial(np.copyto, peer_block, own_block),
            "barrier": plain.node_barrier,
        }
        self.contenders = {name: Contender(call) for name, call in calls.items()}
        self.block_bytes, self.message_bytes = block.nbytes, message.nbytes

    def machine(self, t: Mapping[str, float]) -> Machine:
        """Return the speeds inside a node of one rank that has a core to itself. t: seconds of each contender."""
        nodes, cores = self.world.nodes, os.cpu_count() or 1
        local = max(nodes.count(node) for node in set(nodes))
        turns = max(1.0, local / cores)
        block, message = self.block_bytes, self.message_bytes
        step = t["step"] / turns

        def rate(nbytes: int, seconds: float) -> float:
            return min(_FASTEST, nbytes / max(seconds, _LEAST))

        return Machine(
            local_latency=max(_LEAST, t["tiny"] - t["step"]),
            local_bandwidth=turns * rate(message, t["exchange"] - t["tiny"]),
            copy_rate=turns * rate(block, t["copy"] - t["step"]),
            reduce_rate=turns * rate(block, t["add"] - t["step"]),
            memory_rate=1e15,  # the rates above were measured with all ranks at once
            step=step,
            fence=t["barrier"] / turns / max(1, math.ceil(math.log2(max(2, local)))),
            cores=cores,
        )


MIB = 1 << 20
_QUIET = 0.25  # quantile of the message times, low to exclude delays by other work of the machine
_PROBED, _MOST = 16 * MIB, 64 * MIB  # least and largest size in bytes of the vector for the probes


def measure(world: Communicator, quick: bool) -> dict[str, Any]:
    """Return the speeds of messages, by attributes of `comm.programs.program.Machine`. Collective.

    Args:
        world: All ranks.
        quick: If true, measure only a little.
    """
    size = 1 * MIB if quick else min(_MOST, max(_PROBED, world.size * RING_SEGMENT))
    repeats, seconds = (5, 0.3) if quick else (21, 3.0)
    plain, arena = PlainMPI(world), world.arena(max(world.size, size // 4))
    try:
        probes = Probes(world, plain, arena)
        times = measure_in_turns(world, probes.contenders, repeats, seconds)
        speeds = asdict(probes.machine({name: float(np.quantile(of.all, _QUIET)) for name, of in times.items()}))
        del speeds["eager"]  # a property of the MPI library, which is not measured
    finally:
        arena.free()
    if world.num_nodes > 1:
        tiny, segment = (_between_nodes(world, plain, nbytes, quick) for nbytes in (8, RING_SEGMENT))
        speeds["latency"] = max(_LEAST, tiny - speeds["step"])
        waits = 3 if Machine().eager < RING_SEGMENT else 1  # number of latencies in a long message
        speeds["bandwidth"] = RING_SEGMENT / max(segment / 10, segment - waits * tiny)
    plain.free()
    return speeds


def _between_nodes(world: Communicator, plain: PlainMPI, nbytes: int, quick: bool) -> float:
    """Return the seconds in which rank 0 and the first rank of another node exchange `nbytes`. Collective.

    Many exchanges are timed together: if a message takes milliseconds, ranks do not begin at the same time.
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
        peer_count = torch.zeros(1)
        plain.exchange(peer_count, count, peer, peer)()
        calls = range(int(count if world.rank == 0 else peer_count))
        taken = []
        for _ in range(repeats):
            began = time.perf_counter()
            for _ in calls:
                call()
            taken.append((time.perf_counter() - began) / len(calls))
    seconds = torch.tensor([statistics.median(taken)], dtype=torch.float64)
    world.broadcast(seconds, 0)
    return float(seconds)
