"""all_reduce across nodes: two_level against MPI_Allreduce and torch.distributed's gloo on the same hosts.

    python tests/cluster/namespace_hosts.py python tests/cluster/two_level.py [MIB]

Prints one JSON object: the milliseconds of each on the slowest rank, the best of several rounds; how many times
faster two_level is; and "sent": the vectors that leave the host that sends most. "arena": the vector lies in an
arena; "plain": it does not.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import mpitrain as mt

ROUNDS, REPEATS = 7, 1
PORT, INTERFACE = 29517, "e0"


def seconds(world: mt.Communicator, call: Callable[[], object]) -> float:
    """Return the seconds of one call: the mean of several on the slowest rank. Collective."""
    world.barrier()
    began = time.perf_counter()
    for _ in range(REPEATS):
        call()
    taken = np.array([(time.perf_counter() - began) / REPEATS])
    world.all_reduce(taken, "max")
    return float(taken[0])


def sent_by_this_host() -> int:
    """Return the bytes that this host has sent so far."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith(f"{INTERFACE}:"))


def sent(world: mt.Communicator, call: Callable[[], object]) -> int:
    """Return the bytes that one call sends from the host that sends most. Collective."""
    world.barrier()
    began = sent_by_this_host()
    world.barrier()
    call()
    world.barrier()
    return max(world.all_gather_object(sent_by_this_host() - began))


def main(mib: float) -> None:
    world = mt.init(timeout=120)
    first = f"tcp://{os.environ['MPITRAIN_FIRST_HOST']}:{PORT}"  # namespace_hosts.py sets it
    dist.init_process_group("gloo", init_method=first, rank=world.rank, world_size=world.size)
    numel = int(mib * (1 << 18))
    arena, plain = world.arena(numel), torch.zeros(numel)
    calls: dict[str, Callable[[], object]] = {
        "mpi": lambda: world.all_reduce(plain, algorithm="mpi"),
        "gloo": lambda: dist.all_reduce(plain),
        "two_level arena": lambda: world.all_reduce(arena.tensor, algorithm="two_level"),
        "two_level plain": lambda: world.all_reduce(plain, algorithm="two_level"),
        "ring": lambda: world.all_reduce(plain, algorithm="ring"),
    }
    for call in calls.values():
        call()
    vectors = {name: round(sent(world, call) / plain.nbytes, 3) for name, call in calls.items()}
    rounds = [{name: seconds(world, call) for name, call in calls.items()} for _ in range(ROUNDS)]
    best = {name: min(taken[name] for taken in rounds) for name in calls}
    if world.rank == 0:
        times = {f"{name} ms": round(1e3 * taken, 1) for name, taken in best.items()}
        faster = {
            f"{peer} / two_level arena": round(best[peer] / best["two_level arena"], 2) for peer in ("mpi", "gloo")
        }
        measured = {"nodes": world.num_nodes, "ranks": world.size, "MiB": mib, **times, **faster, "sent": vectors}
        print(json.dumps(measured), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 16)
