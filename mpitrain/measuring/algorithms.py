"""Every algorithm of a collective at one size, to be timed in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from mpitrain.comm import Arena, Communicator
from mpitrain.comm.collectives import all_gather, all_reduce, broadcast, reduce, reduce_scatter
from mpitrain.comm.inspection import reads_neighbours
from mpitrain.comm.selection.registry import Algorithms
from mpitrain.speeds.timing import Contender

TABLES = tuple(module.ALGORITHMS for module in (all_reduce, reduce, reduce_scatter, broadcast, all_gather))
MEMORIES = ("arena", "private")
_SINGLE_FROM = 1 << 20  # bytes from which a measurement is one call: more would stay in the cache


class AlgorithmContenders:
    """The algorithms that these ranks can use, with vectors that live as long as the context they come from."""

    def __init__(self, world: Communicator) -> None:
        """world: the ranks. Collective."""
        self.world = world
        self._reads_neighbours = reads_neighbours(world)

    @contextmanager
    def of(self, table: Algorithms, memory: str, size: int) -> Iterator[dict[str, Contender]]:
        """Contenders by algorithm. Collective.

        Args:
            table: The operation's algorithms.
            memory: Where the vectors lie: arena or private.
            size: Bytes of a rank's whole vector.
        """
        each = max(1, size // 4 // self.world.size)
        numel = size // 4 if table is all_reduce.ALGORITHMS else each * self.world.size
        if memory == "arena":
            with in_arena(self.world, numel) as arena:
                x = arena.tensor
                yield self._all(table, memory, size, x, x[self.world.rank * each : (self.world.rank + 1) * each])
        else:
            yield self._all(table, memory, size, zeros(numel), zeros(each))

    def _all(
        self, table: Algorithms, memory: str, size: int, x: torch.Tensor, block: torch.Tensor
    ) -> dict[str, Contender]:
        world = self.world
        calls: dict[str, Callable[[str], Callable[[], object]]] = {
            "all_reduce": lambda name: partial(world.all_reduce, x, "sum", name),
            "reduce": lambda name: partial(world.reduce, x, 0, "sum", name),
            "broadcast": lambda name: partial(world.broadcast, x, 0, name),
            "reduce_scatter": lambda name: partial(world.reduce_scatter, block, x, "sum", name),
            "all_gather": lambda name: partial(world.all_gather, x, block, name),
        }
        return contenders(size, **{name: calls[table.operation](name) for name in self._usable(table, memory)})

    def _usable(self, table: Algorithms, memory: str) -> list[str]:
        one_node, reached = self.world.num_nodes == 1, memory == "arena" or self._reads_neighbours
        known = {name: table[name] for name in table.names if not (one_node and name == "two_level")}
        return [n for n, a in known.items() if (one_node or not a.one_node) and (reached or a.stages or not a.reach)]


@contextmanager
def in_arena(world: Communicator, numel: int, dtype: torch.dtype = torch.float32) -> Iterator[Arena]:
    """An arena of so many elements, freed afterwards. Collective."""
    arena = world.arena(numel, dtype)
    try:
        yield arena
    finally:
        arena.free()


def contenders(size: int, **calls: Callable[[], object]) -> dict[str, Contender]:
    """What is to be timed, by name. size: bytes of a rank's vector."""
    return {name: Contender(call, single=size >= _SINGLE_FROM) for name, call in calls.items()}


def zeros(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Zeros in memory that has been written to: a page that was only reserved is the system's one page of zeros."""
    return torch.empty(numel, dtype=dtype).zero_()
