"""Seconds of messages and collectives between devices: over the links of a node, and over the network between nodes.

    device -- link -- device            inside a node: link_latency + bytes / link_bandwidth
    device -- host -- device            inside a node without such links: through host memory, and over each one's bus
    device -- bus -- network -- ...     between nodes: what is slower of a rank's bus and its part of the node's network

A collective is the fastest of the textbook algorithms (Thakur, Rabenseifner & Gropp 2005) on two levels, as libraries
for devices choose: a vector V goes in pieces, so that a node's links carry one while the network carries another. Of L
ranks on each of N nodes, in a reduce-scatter or an all-gather, a rank sends

    (L - 1) / L of V over its link             in log2 L rounds
    (N - 1) / N of V / L over the network      in log2 N rounds, while its L - 1 neighbours do the same

and an all-reduce is both, or, where V is short, log2 L + log2 N rounds of the whole vector.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from mpitrain.comm.programs.simulate import Machine
from mpitrain.planner.collectives import Group
from mpitrain.planner.machine import Device


@dataclass(frozen=True)
class DeviceLinks:
    """Speeds between the devices of a machine.

    Attributes:
        links: Of the node's memory and its network.
        device: One of its devices.
        sharing: Ranks that share a device, its link and its bus.
    """

    links: Machine
    device: Device
    sharing: int = 1

    def message(self, nbytes: float, inside: bool, beside: int = 1) -> float:
        """Seconds of a message between two ranks.

        Args:
            nbytes: Of the message.
            inside: Whether both are on one node.
            beside: Messages that leave a node at the same time.
        """
        if inside:
            return self._hop() + nbytes / self._inside(self.sharing * self.device.count)
        return self._flight(nbytes) + nbytes / self._network(beside)

    def seconds(self, operation: str, nbytes: float, group: Group) -> float:
        """Seconds of a collective, from when all ranks have come to it.

        Args:
            operation: all_reduce, reduce_scatter or all_gather.
            nbytes: Of the whole vector on one rank.
            group: The ranks.
        """
        if group.size == 1 or nbytes <= 0:
            return 0.0
        nodes, local = _counts(group)
        inside, across = self._inside(local * group.beside), self._network(local * group.beside)
        hops = _rounds(local) * self._hop()
        if nodes == 1:
            halves = hops + nbytes * (local - 1) / local / inside
            whole = hops + _rounds(local) * nbytes / inside
        else:
            far = nbytes * (nodes - 1) / nodes / local
            pieces = max(nbytes * (local - 1) / local / inside, far / across)
            halves = hops + _rounds(nodes) * self._flight(far / _rounds(nodes)) + pieces
            whole = hops + _rounds(nodes) * (self._flight(nbytes) + nbytes / across)
            whole += _rounds(local) * nbytes / inside
        return min(2.0 * halves, whole) if operation == "all_reduce" else halves

    def _inside(self, ranks: int) -> float:
        """Bytes per second between two devices of a node, while so many of its ranks send."""
        if self.device.link_rate:
            return self.device.link_rate / self.sharing
        return min(self.device.host_rate / self.sharing, self.links.memory_rate / max(1, ranks))

    def _network(self, ranks: int) -> float:
        """Bytes per second of a rank between nodes, while so many ranks of its node send."""
        return min(self.device.host_rate / self.sharing, self.links.bandwidth / max(1, ranks))

    def _hop(self) -> float:
        """Seconds until the first byte is in another device of the node."""
        latency = self.device.link_latency
        return latency if self.device.link_rate else 2.0 * latency + self.links.local_latency

    def _flight(self, nbytes: float) -> float:
        """Seconds until the first byte is in a device of another node."""
        return 2.0 * self.device.link_latency + self.links.latency * float(self.links.flights(nbytes))


@lru_cache(maxsize=1024)
def _counts(group: Group) -> tuple[int, int]:
    """Nodes of a group, and its ranks on the node that has most."""
    counts = Counter(group.nodes)
    return len(counts), max(counts.values())


def _rounds(ranks: int) -> int:
    """Rounds in which the number of ranks that have something doubles."""
    return (ranks - 1).bit_length()
