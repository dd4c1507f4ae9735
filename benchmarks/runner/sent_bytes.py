"""What ranks send while they train: as the journal of communication counts it, and as the loopback interface does.

The journal knows what goes through mpitrain, by operation, axis and tier. What peers send over gloo goes through
sockets: on one node that is the loopback interface, on which nothing else of such a job goes; its count is divided by
the ranks, and has the headers of TCP in it, some percent. On several nodes peers' bytes are not measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mpitrain.comm import Communicator

_LOOPBACK = "/sys/class/net/lo/statistics/tx_bytes"  # of this network namespace


class SentBytes:
    """Counts what is sent from `start` to `told`. Both are collective over `world`."""

    def __init__(self, world: Communicator) -> None:
        self._world = world
        self._loopback = 0

    def start(self) -> None:
        """Count from here."""
        self._world.barrier()
        self._loopback = _loopback_bytes()
        self._world.barrier()
        self._world.journal.start()

    def told(self, steps: int) -> Mapping[str, Any]:
        """What was sent in so many steps, and stop counting.

        Returns:
            inside, between: bytes a step, to ranks of the same node and of others, of the rank that sends most. rows:
            of rank 0 [operation, axis, algorithm, calls, bytes inside, bytes between] a step. loopback: bytes a step
            and rank that went through sockets on this node; None on several nodes.
        """
        world = self._world
        rows = world.journal.account()
        world.journal.stop()
        world.barrier()
        loopback = _loopback_bytes() - self._loopback
        inside, between = (sum(getattr(row, tier) for row in rows) / steps for tier in ("inside", "between"))
        most = torch.tensor([inside, between], dtype=torch.float64)
        world.all_reduce(most, "max")
        own = [
            [row.operation, row.axis, row.algorithm, row.calls / steps, row.inside / steps, row.between / steps]
            for row in rows
        ]
        return {
            "inside": float(most[0]),
            "between": float(most[1]),
            "rows": own,
            "loopback": loopback / steps / world.size if world.num_nodes == 1 else None,
        }


def _loopback_bytes() -> int:
    """Bytes sent through the loopback interface so far; 0 where the system does not tell."""
    try:
        with open(_LOOPBACK, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0
