"""What the benchmark of collectives measures against each other, by operation and size; see there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mpitrain.comm import Arena, Communicator
from mpitrain.comm.collectives import all_reduce
from mpitrain.comm.inspection import reads_neighbours
from mpitrain.comm.plain_mpi import PlainMPI
from mpitrain.comm.selection.registry import Algorithms
from mpitrain.speeds.probes import Probes
from mpitrain.speeds.timing import Contender

_SINGLE_FROM = 1 << 20  # bytes


class CollectiveContenders:
    """The contenders of each operation, with memory that lives as long as the context they come from."""

    def __init__(self, world: Communicator) -> None:
        """world: the ranks. Collective."""
        self.world, self.plain = world, PlainMPI(world)
        self.reads_neighbours = reads_neighbours(world)

    @contextmanager
    def _arena(self, numel: int, dtype: torch.dtype = torch.float32) -> Iterator[Arena]:
        arena = self.world.arena(numel, dtype)
        try:
            yield arena
        finally:
            arena.free()

    @contextmanager
    def all_reduce(self, size: int) -> Iterator[dict[str, Contender]]:
        world, numel = self.world, size // 4
        mine, theirs, gloos, source, dest = (_zeros(numel) for _ in range(5))
        with self._arena(numel) as arena:
            yield _contenders(
                size,
                arena=partial(world.all_reduce, arena.tensor),
                tensor=partial(world.all_reduce, mine),
                library=self.plain.all_reduce(theirs),
                gloo=partial(dist.all_reduce, gloos),
                memcpy=partial(np.copyto, dest.numpy(), source.numpy()),
            )

    @contextmanager
    def halves(self, size: int) -> Iterator[dict[str, Contender]]:
        """fp16 and bf16 in an arena; the library's fp16 where it has it."""
        world, numel = self.world, size // 2
        with self._arena(numel, torch.float16) as fp16, self._arena(numel, torch.bfloat16) as bf16:
            vectors = {"fp16": fp16.tensor, "bf16": bf16.tensor}
            calls: dict[str, Callable[[], object]] = {n: partial(world.all_reduce, x) for n, x in vectors.items()}
            if self.plain.adds_fp16:
                vectors["library"] = _zeros(numel, torch.float16)
                calls["library"] = self.plain.all_reduce(vectors["library"])
            single = size >= _SINGLE_FROM
            yield {n: Contender(call, partial(vectors[n].fill_, 0.5), single) for n, call in calls.items()}

    @contextmanager
    def reduce_scatter(self, size: int) -> Iterator[dict[str, Contender]]:
        world, each = self.world, max(1, size // 4 // self.world.size)
        numel = each * world.size
        theirs, out, their_out = _zeros(numel), _zeros(each), _zeros(each)
        library = self.plain.reduce_scatter(their_out, theirs)
        with self._arena(numel) as arena:
            yield _contenders(size, arena=partial(world.reduce_scatter, out, arena.tensor), library=library)

    @contextmanager
    def all_gather(self, size: int) -> Iterator[dict[str, Contender]]:
        world, each = self.world, max(1, size // 4 // self.world.size)
        numel = each * world.size
        theirs = _zeros(numel)
        with self._arena(numel) as arena:
            out, block = arena.tensor, arena.tensor[world.rank * each : (world.rank + 1) * each]
            yield _contenders(size, arena=partial(world.all_gather, out, block), library=self.plain.all_gather(theirs))

    def algorithms(self, memory: str, algorithms: Algorithms) -> Callable[[int], Any]:
        """Every algorithm of an operation that these ranks can use, on vectors in an arena or in private memory."""
        names = self._usable(memory, algorithms)

        @contextmanager
        def make(size: int) -> Iterator[dict[str, Contender]]:
            each = max(1, size // 4 // self.world.size)
            numel = size // 4 if algorithms is all_reduce.ALGORITHMS else each * self.world.size
            if memory == "arena":
                with self._arena(numel) as arena:
                    x = arena.tensor
                    yield all_of(size, x, x[self.world.rank * each : (self.world.rank + 1) * each])
            else:
                yield all_of(size, _zeros(numel), _zeros(each))

        def all_of(size: int, x: torch.Tensor, block: torch.Tensor) -> dict[str, Contender]:
            calls: dict[str, Callable[[str], Callable[[], object]]] = {
                "all_reduce": lambda name: partial(self.world.all_reduce, x, "sum", name),
                "reduce": lambda name: partial(self.world.reduce, x, 0, "sum", name),
                "broadcast": lambda name: partial(self.world.broadcast, x, 0, name),
                "reduce_scatter": lambda name: partial(self.world.reduce_scatter, block, x, "sum", name),
                "all_gather": lambda name: partial(self.world.all_gather, x, block, name),
            }
            return _contenders(size, **{name: calls[algorithms.operation](name) for name in names})

        return make

    def _usable(self, memory: str, algorithms: Algorithms) -> list[str]:
        """The names of the algorithms that serve on these ranks in this memory."""
        one_node, reached = self.world.num_nodes == 1, memory == "arena" or self.reads_neighbours
        known = {name: algorithms[name] for name in algorithms.names if not (one_node and name == "two_level")}
        return [n for n, a in known.items() if (one_node or not a.one_node) and (reached or a.stages or not a.reach)]

    @contextmanager
    def probes(self, size: int) -> Iterator[Probes]:
        with self._arena(max(self.world.size, size // 4)) as arena:
            yield Probes(self.world, self.plain, arena)


def _contenders(size: int, **calls: Callable[[], object]) -> dict[str, Contender]:
    return {name: Contender(call, single=size >= _SINGLE_FROM) for name, call in calls.items()}


def _zeros(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Zeros in memory that has been written to: a page that was only reserved is the system's one page of zeros."""
    return torch.empty(numel, dtype=dtype).zero_()
