"""Seconds of collective operations on a machine: the programs that would run there, simulated.

Of an operation and its bytes the same rules choose the algorithm that choose it in the job (`comm.selection`), and its
program is simulated with the machine's speeds (`comm.programs.simulate`). Where the rules choose the MPI library's own
call, it is the fastest of the textbook programs that libraries are known to choose from (Thakur, Rabenseifner & Gropp,
IJHPCA 19, 2005), without the cost of Python.

Two things keep this fast for thousands of ranks. Times between two sizes a power of two apart are interpolated, since
every cost is linear in bytes, and those beyond 32 MiB on one node follow from 16 and 32 MiB. And of programs that go
round a ring, whose steps are all alike, two smaller rings with messages of the same length are simulated, and the
difference is added for each further node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from mpitrain.comm.algorithms import halving, pairwise, ring
from mpitrain.comm.programs.program import Program
from mpitrain.comm.programs.simulate import Machine, simulate
from mpitrain.comm.selection.registry import Setting
from mpitrain.comm.selection.tables import serving
from mpitrain.planner.machine import Measured

if TYPE_CHECKING:
    from mpitrain.planner.device_links import DeviceLinks

_LEAST = 1 << 6  # bytes: below, only latencies count
_LARGE = 1 << 24  # bytes: beyond twice as many, time goes on in a straight line, as long as the algorithm is the same
_LONG = 16  # nodes (or ranks alone on theirs) of a ring from which on its time is extrapolated
_RINGS = ("ring", "two_level")
_Make = Callable[[int, tuple[int, ...]], Program]
_FEW_STEPS: dict[str, tuple[_Make, ...]] = {  # about log2 of the ranks
    "all_reduce": (halving.doubling_all_reduce, lambda n, nodes: halving.halving_all_reduce(n, 1, nodes)),
    "reduce_scatter": (halving.halving_reduce_scatter,),
    "all_gather": (halving.doubling_all_gather,),
}
_MANY_STEPS: dict[str, tuple[_Make, ...]] = {  # about as many as ranks: not worth it for short messages to thousands
    "all_reduce": (lambda n, nodes: ring.ring_all_reduce(n, 1, nodes),),
    "reduce_scatter": (pairwise.pairwise_reduce_scatter, lambda n, nodes: ring.ring_reduce_scatter(n, 1, nodes)),
    "all_gather": (lambda n, nodes: ring.ring_all_gather(n, 1, nodes),),
}


@dataclass(frozen=True)
class Group:
    """Ranks that communicate with each other, while groups like it do the same.

    Attributes:
        nodes: The node of each rank; equal numbers are neighbours in the list.
        beside: Groups that have ranks on one node and are active at the same time, this one included.
        oversubscribed: Whether nodes have more ranks than cores.
    """

    nodes: tuple[int, ...]
    beside: int = 1
    oversubscribed: bool = False

    @property
    def size(self) -> int:
        """Ranks."""
        return len(self.nodes)

    @property
    def spans(self) -> int:
        """Nodes that it lies on."""
        return len(set(self.nodes))


class CollectiveTimes:
    """Seconds of operations.

    Args:
        links: The speeds.
        measured: Operations that were measured on this machine. Where as many ranks on as many nodes were, what is
            simulated is multiplied by what was measured over what is simulated of that.
        devices: The links of the devices that hold the vectors, whose formulas then serve; None: vectors are in host
            memory.
    """

    def __init__(self, links: Machine, measured: Sequence[Measured] = (), devices: DeviceLinks | None = None) -> None:
        self._links, self._devices = links, devices
        self._rows: dict[tuple[str, str, int, int, str], list[Measured]] = {}
        for row in measured:
            self._rows.setdefault((row.operation, row.algorithm, row.ranks, row.nodes, row.memory), []).append(row)
        self._ratios: dict[Measured, float] = {}
        self._known: dict[tuple[str, Group, str, int], float] = {}

    def seconds(self, operation: str, nbytes: float, group: Group, memory: str = "arena") -> float:
        """How long an operation of nbytes takes, from when all ranks have come to it.

        Args:
            operation: all_reduce, reduce_scatter or all_gather.
            nbytes: Of the whole vector, which reduce_scatter takes and all_gather gives.
            group: The ranks.
            memory: Where the vectors lie: "arena" or "private", as in `comm.selection.registry.Setting`.
        """
        if group.size == 1 or nbytes <= 0:
            return 0.0
        if self._devices is not None:
            return self._devices.seconds(operation, nbytes, group)
        exponent = math.log2(max(nbytes, _LEAST))
        low = math.floor(exponent)
        first = self._at(operation, 1 << low, group, memory)
        if nbytes <= _LEAST or exponent == low:
            return first
        then = self._at(operation, 2 << low, group, memory)
        return first + (then - first) * (nbytes / (1 << low) - 1)

    def barrier(self, group: Group) -> float:
        """How long the node's ranks of a group take to wait for each other."""
        local = max(group.nodes.count(node) for node in set(group.nodes[:1]))
        turns = max(1.0, local * group.beside / self._links.cores)
        return self._links.fence * math.ceil(math.log2(max(2, local))) * turns if local > 1 else 0.0

    def message(self, nbytes: float, inside: bool, beside: int = 1) -> float:
        """How long a message between two ranks takes.

        Args:
            nbytes: Of the message.
            inside: Whether both are on one node.
            beside: Messages that leave a node at the same time.
        """
        if self._devices is not None:
            return self._devices.message(nbytes, inside, beside)
        links = self._links
        if inside:
            return links.local_latency + nbytes / links.local_bandwidth
        return links.latency * float(links.flights(nbytes)) + nbytes * beside / links.bandwidth

    def _at(self, operation: str, nbytes: int, group: Group, memory: str) -> float:
        key = operation, group, memory, nbytes
        if key not in self._known:
            name, _ = serving(operation, self._setting(nbytes, group, memory))
            ratio = self._ratio(operation, name, nbytes, group, memory) if self._rows else 1.0
            self._known[key] = self._simulated(operation, name, nbytes, group, memory) * ratio
        return self._known[key]

    def _ratio(self, operation: str, name: str, nbytes: int, group: Group, memory: str) -> float:
        """What was measured over what is simulated, of as many ranks, at the sizes nearest to nbytes; 1 for no others.

        Groups beside each other on one node take turns as one group of all their ranks does.
        """
        nodes = len(set(group.nodes))
        ranks = group.size * (group.beside if nodes == 1 else 1)
        rows = self._rows.get((operation, name, ranks, nodes, memory), ())
        if not rows or (nodes > 1 and group.beside > 1):
            return 1.0
        for row in rows:
            if row not in self._ratios:
                alike = Group(tuple(n for n in range(nodes) for _ in range(ranks // nodes)), 1, group.oversubscribed)
                self._ratios[row] = row.seconds / self._simulated(operation, name, row.nbytes, alike, memory)
        sizes = sorted((math.log2(row.nbytes), self._ratios[row]) for row in rows)
        return float(np.interp(math.log2(nbytes), [size for size, _ in sizes], [ratio for _, ratio in sizes]))

    def _simulated(self, operation: str, name: str, nbytes: int, group: Group, memory: str) -> float:
        links = self._shared_with(group.beside)
        _, program = serving(operation, self._setting(nbytes, group, memory), algorithm=name)
        if program is None:
            instant = replace(links, step=0.0)
            halves = operation == "all_reduce" or group.size & (group.size - 1) == 0  # else there are no halves
            many = group.size <= 4 * _LONG or not halves
            possible = (_FEW_STEPS[operation] if halves else ()) + (_MANY_STEPS[operation] if many else ())
            return min(_run(make(group.size, group.nodes), nbytes, instant) for make in possible)
        if nbytes > 2 * _LARGE and len(set(group.nodes)) == 1:  # steps of such programs grow in number with bytes
            few, more = (serving(operation, self._setting(n * _LARGE, group, memory))[0] for n in (1, 2))
            if few == more == name:
                first, then = (self._simulated(operation, name, n * _LARGE, group, memory) for n in (1, 2))
                return first + (then - first) * (nbytes / _LARGE - 1)
        nodes = len(set(group.nodes))
        if name in _RINGS and nodes > 2 * _LONG and group.size % nodes == 0:
            return self._extrapolated(operation, name, nbytes, group, memory)
        return _run(program, nbytes, links)

    def _extrapolated(self, operation: str, name: str, nbytes: int, group: Group, memory: str) -> float:
        """The time of a program round a ring of nodes, by two shorter rings with blocks as long."""
        nodes = len(set(group.nodes))
        each, times = group.size // nodes, []
        for count in (_LONG, 2 * _LONG):
            smaller = replace(group, nodes=tuple(n for n in range(count) for _ in range(each)))
            setting = self._setting(nbytes * count // nodes, smaller, memory)
            _, program = serving(operation, setting, algorithm=name)
            assert program is not None
            times.append(_run(program, setting.nbytes, self._shared_with(group.beside)))
        return times[1] + (times[1] - times[0]) * (nodes / _LONG - 2)

    def _setting(self, nbytes: int, group: Group, memory: str) -> Setting:
        block = max(4, nbytes // group.size // 4 * 4)
        nbytes = block * group.size
        return Setting(nbytes, nbytes // 4, group.nodes, memory, group.oversubscribed, block=block)

    def _shared_with(self, groups: int) -> Machine:
        """What one of several groups has of a node's cores, memory and link."""
        if groups == 1:
            return self._links
        links = self._links
        return replace(
            links,
            bandwidth=links.bandwidth / groups,
            memory_rate=links.memory_rate / groups,
            cores=links.cores / groups,
        )


def _run(program: Program, nbytes: float, links: Machine) -> float:
    return simulate(program, [nbytes / program.chunks] * program.chunks, links)
