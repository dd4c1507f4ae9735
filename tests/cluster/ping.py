"""Measurement of a link from rank 0 to rank 1: the round trip of one byte, and the bandwidth of large messages.

    python tests/cluster/namespace_hosts.py --link 1e9,0.01 --ranks 1,1 python tests/cluster/ping.py [MIB]

Prints one JSON object: the shortest round trip in seconds, because a busy machine adds time that is not the link's,
and the bytes per second of each of several messages of MIB. TCP finds its speed during the first one.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
from mpi4py import MPI

ROUND_TRIPS, MESSAGES = 20, 4


def round_trip(world: MPI.Comm, buffer: np.ndarray) -> float:
    """Return the seconds until rank 1 has `buffer` and rank 0 has one byte in return."""
    answer = np.zeros(1, np.uint8)
    began = time.perf_counter()
    if world.rank == 0:
        world.Send(buffer, 1)
        world.Recv(answer, 1)
    elif world.rank == 1:
        world.Recv(buffer, 0)
        world.Send(answer, 0)
    return time.perf_counter() - began


def main(mib: int) -> None:
    world = MPI.COMM_WORLD
    byte, message = np.zeros(1, np.uint8), np.ones(mib << 20, np.uint8)
    round_trip(world, byte)
    trips = [round_trip(world, byte) for _ in range(ROUND_TRIPS)]
    trip = min(trips)
    # a round trip of this time is the way of the last byte and that of the answer
    speeds = [message.nbytes / (round_trip(world, message) - trip) for _ in range(MESSAGES)]
    if world.rank == 0:
        print(json.dumps({"round_trip": trip, "longest": max(trips), "bytes_per_second": speeds}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 64)
