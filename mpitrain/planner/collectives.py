"""Seconds of messages and collectives on a machine, from a simulation of the programs that would run there.

The algorithm is chosen from the operation and its bytes by the rules that the job uses (`comm.selection`). The
program of the algorithm is then simulated with the machine's speeds (`comm.programs.program`). If the rules choose the
MPI library's own collective, its time is that of the fastest textbook program that libraries are known to use (Thakur,
Rabenseifner & Gropp, IJHPCA 19, 2005), without the cost of Python.

Two shortcuts keep this fast for thousands of ranks. First, times are simulated at sizes that are powers of two and
interpolated between them, since every cost is linear in bytes; beyond 32 MiB on one node, they are extrapolated from 16
and 32 MiB. Second, the steps of a ring program are all alike, so two smaller rings with messages of equal length are
simulated, and their difference is added for each further node.

Vectors on devices travel over the links of a node, and over the network between nodes (`DeviceLinks`):

    device -- link -- device            inside a node: link_latency + bytes / link_bandwidth
    device -- host -- device            inside a node without links: through host memory and the bus of each device
    device -- bus -- network -- ...     between nodes: the slower of a rank's bus and its share of the node's network

The time of a device collective is that of the fastest textbook algorithm on two levels, as libraries for devices choose
it. A vector V is sent in pieces, so that the links carry one piece while the network carries another. With L ranks on
each of N nodes, each rank sends in a reduce-scatter or an all-gather

    (L - 1) / L of V over its link             in log2 L rounds
    (N - 1) / N of V / L over the network      in log2 N rounds, while its L - 1 neighbours do the same

An all-reduce is one of each, or, if V is short, log2 L + log2 N rounds with the whole vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from mpitrain.comm.algorithms import messages
from mpitrain.comm.programs.program import Machine, Program, simulate
from mpitrain.comm.selection import Setting, select_program
from mpitrain.parallel.places import Group
from mpitrain.planner.machine import Device, Measured

_LEAST = 1 << 6  # bytes: below this, only latencies count
_LARGE = 1 << 24  # bytes: beyond twice this, time grows linearly as long as the algorithm is the same
_LONG = 16  # nodes of the smaller ring from which the time of a long ring is extrapolated
_Make = Callable[[int, tuple[int, ...]], Program]
_FEW_STEPS: dict[str, tuple[_Make, ...]] = {  # about log2(ranks) steps
    "all_reduce": (messages.doubling_all_reduce, lambda n, nodes: messages.halving_all_reduce(n, 1, nodes)),
    "reduce_scatter": (messages.halving_reduce_scatter,),
    "all_gather": (messages.doubling_all_gather,),
}
_MANY_STEPS: dict[str, tuple[_Make, ...]] = {  # about as many steps as ranks: too many for thousands of ranks
    "all_reduce": (lambda n, nodes: messages.ring_all_reduce(n, 1, nodes),),
    "reduce_scatter": (messages.pairwise_reduce_scatter, lambda n, nodes: messages.ring_reduce_scatter(n, 1, nodes)),
    "all_gather": (lambda n, nodes: messages.ring_all_gather(n, 1, nodes),),
}


class CollectiveTimes:
    """Seconds of messages and collectives on a machine.

    Args:
        links: Speeds of the machine.
        measured: Collectives that were measured on this machine. A simulated time is multiplied by the ratio of
            measured to simulated seconds if the same numbers of ranks and nodes were measured.
        devices: Links of the devices that hold the vectors, for which formulas are used. Default: vectors are in host
            memory.
    """

    def __init__(self, links: Machine, measured: Sequence[Measured] = (), devices: DeviceLinks | None = None) -> None:
        self._links, self._devices = links, devices
        self._rows: dict[tuple[str, str, int, int, str], list[Measured]] = {}
        for row in measured:
            self._rows.setdefault((row.operation, row.algorithm, row.ranks, row.nodes, row.memory), []).append(row)
        self._ratios: dict[Measured, float] = {}
        self._cached_seconds = lru_cache(None)(self._predict)

    def seconds(self, operation: str, nbytes: float, group: Group, memory: str = "arena") -> float:
        """Return the seconds of a collective, from the moment when all ranks have entered it.

        Args:
            operation: all_reduce, reduce_scatter or all_gather.
            nbytes: Bytes of the whole vector: the input of reduce_scatter, the output of all_gather.
            group: Ranks that take part.
            memory: Place of the vectors: "arena" or "private", as in `comm.selection.Setting`.
        """
        if group.size == 1 or nbytes <= 0:
            return 0.0
        if self._devices is not None:
            return self._devices.seconds(operation, nbytes, group)
        exponent = math.log2(max(nbytes, _LEAST))
        low = math.floor(exponent)
        first = self._cached_seconds(operation, 1 << low, group, memory)
        if nbytes <= _LEAST or exponent == low:
            return first
        then = self._cached_seconds(operation, 2 << low, group, memory)
        return first + (then - first) * (nbytes / (1 << low) - 1)

    def barrier(self, group: Group) -> float:
        """Return the seconds of a barrier among the ranks of a group on one node."""
        local = group.local
        turns = max(1.0, local * group.beside / self._links.cores)
        return self._links.fence * math.ceil(math.log2(max(2, local))) * turns if local > 1 else 0.0

    def message(self, nbytes: float, inside: bool, beside: int = 1) -> float:
        """Return the seconds of a message between two ranks.

        Args:
            nbytes: Bytes of the message.
            inside: If true, both ranks are on one node.
            beside: Number of messages that leave a node at the same time.
        """
        if self._devices is not None:
            return self._devices.message(nbytes, inside, beside)
        links = self._links
        if inside:
            return links.local_latency + nbytes / links.local_bandwidth
        return links.latency * float(links.flights(nbytes)) + nbytes * beside / links.bandwidth

    def _predict(self, operation: str, nbytes: int, group: Group, memory: str) -> float:
        name, _ = select_program(operation, self._setting(nbytes, group, memory))
        ratio = self._ratio(operation, name, nbytes, group, memory) if self._rows else 1.0
        return self._simulate(operation, name, nbytes, group, memory) * ratio

    def _ratio(self, operation: str, name: str, nbytes: int, group: Group, memory: str) -> float:
        """Return measured over simulated seconds for these ranks, interpolated between sizes; 1 if never measured.

        Groups beside each other on one node are compared with a measured group of all their ranks.
        """
        nodes = group.spans
        ranks = group.size * (group.beside if nodes == 1 else 1)
        rows = self._rows.get((operation, name, ranks, nodes, memory), ())
        if not rows or (nodes > 1 and group.beside > 1):
            return 1.0
        for row in rows:
            if row not in self._ratios:
                measured_group = Group(
                    tuple(n for n in range(nodes) for _ in range(ranks // nodes)), 1, group.oversubscribed
                )
                self._ratios[row] = row.seconds / self._simulate(operation, name, row.nbytes, measured_group, memory)
        sizes = sorted((math.log2(row.nbytes), self._ratios[row]) for row in rows)
        return float(np.interp(math.log2(nbytes), [size for size, _ in sizes], [ratio for _, ratio in sizes]))

    def _simulate(self, operation: str, name: str, nbytes: int, group: Group, memory: str) -> float:
        links = self._share_of_links(group.beside)
        _, program = select_program(operation, self._setting(nbytes, group, memory), algorithm=name)
        if program is None:
            instant = replace(links, step=0.0)
            halves = operation == "all_reduce" or group.size & (group.size - 1) == 0  # halving needs a power of two
            many = group.size <= 4 * _LONG or not halves
            possible = (_FEW_STEPS[operation] if halves else ()) + (_MANY_STEPS[operation] if many else ())
            return min(_run(make(group.size, group.nodes), nbytes, instant) for make in possible)
        if nbytes > 2 * _LARGE and group.spans == 1:  # the number of steps of such programs grows with bytes
            few, more = (select_program(operation, self._setting(n * _LARGE, group, memory))[0] for n in (1, 2))
            if few == more == name:
                first, then = (self._simulate(operation, name, n * _LARGE, group, memory) for n in (1, 2))
                return first + (then - first) * (nbytes / _LARGE - 1)
        if name in ("ring", "two_level") and group.spans > 2 * _LONG and group.size % group.spans == 0:
            return self._extrapolate(operation, name, nbytes, group, memory)
        return _run(program, nbytes, links)

    def _extrapolate(self, operation: str, name: str, nbytes: int, group: Group, memory: str) -> float:
        """Return the seconds of a ring program over many nodes, from two shorter rings with blocks of equal length."""
        nodes, times = group.spans, []
        for count in (_LONG, 2 * _LONG):
            smaller = replace(group, nodes=tuple(n for n in range(count) for _ in range(group.size // nodes)))
            setting = self._setting(nbytes * count // nodes, smaller, memory)
            _, program = select_program(operation, setting, algorithm=name)
            assert program is not None
            times.append(_run(program, setting.nbytes, self._share_of_links(group.beside)))
        return times[1] + (times[1] - times[0]) * (nodes / _LONG - 2)

    def _setting(self, nbytes: int, group: Group, memory: str) -> Setting:
        block = max(4, nbytes // group.size // 4 * 4)
        nbytes = block * group.size
        return Setting(nbytes, nbytes // 4, group.nodes, memory, group.oversubscribed, block=block)

    def _share_of_links(self, groups: int) -> Machine:
        """Return the share of a node's cores, memory and network that one of several groups gets."""
        shared = {name: getattr(self._links, name) / groups for name in ("bandwidth", "memory_rate", "cores")}
        return replace(self._links, **shared)


def _run(program: Program, nbytes: float, links: Machine) -> float:
    return simulate(program, [nbytes / program.chunks] * program.chunks, links)


@dataclass(frozen=True)
class DeviceLinks:
    """Speeds between the devices of a machine.

    Attributes:
        links: Speeds of the node's memory and of the network.
        device: The node's devices, all alike.
        sharing: Number of ranks that share a device, its link and its bus.
    """

    links: Machine
    device: Device
    sharing: int = 1

    def message(self, nbytes: float, inside: bool, beside: int = 1) -> float:
        """Return the seconds of a message between two ranks.

        Args:
            nbytes: Bytes of the message.
            inside: If true, both ranks are on one node.
            beside: Number of messages that leave a node at the same time.
        """
        if inside:
            return self._hop() + nbytes / self._inside(self.sharing * self.device.count)
        return self._flight(nbytes) + nbytes / self._network(beside)

    def seconds(self, operation: str, nbytes: float, group: Group) -> float:
        """Return the seconds of a collective, from the moment when all ranks have entered it.

        Args:
            operation: all_reduce, reduce_scatter or all_gather.
            nbytes: Bytes of the whole vector on one rank.
            group: Ranks that take part.
        """
        nodes, local = group.spans, group.local
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
        """Return the bytes per second between two devices of a node while `ranks` of its ranks send."""
        if self.device.link_rate:
            return self.device.link_rate / self.sharing
        return min(self.device.host_rate / self.sharing, self.links.memory_rate / max(1, ranks))

    def _network(self, ranks: int) -> float:
        """Return the bytes per second of a rank between nodes while `ranks` ranks of its node send."""
        return min(self.device.host_rate / self.sharing, self.links.bandwidth / max(1, ranks))

    def _hop(self) -> float:
        """Return the seconds until the first byte reaches another device of the node."""
        latency = self.device.link_latency
        return latency if self.device.link_rate else 2.0 * latency + self.links.local_latency

    def _flight(self, nbytes: float) -> float:
        """Return the seconds until the first byte reaches a device of another node."""
        return 2.0 * self.device.link_latency + self.links.latency * float(self.links.flights(nbytes))


def _rounds(ranks: int) -> int:
    """Return the number of rounds that reach all ranks if each round doubles the ranks reached."""
    return (ranks - 1).bit_length()
