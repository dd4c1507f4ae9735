"""The contenders of `python -m benchmarks collectives`, by operation and size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.runner.plain_mpi import PlainCollectives
from mpitrain.comm import Communicator
from mpitrain.comm.collectives import all_reduce
from mpitrain.measuring.tune import AlgorithmContenders, contenders, in_arena, zeros
from mpitrain.speeds.links import Probes
from mpitrain.speeds.timing import Contender

_SINGLE_FROM = 1 << 20  # bytes


class CollectiveContenders:
    """The contenders of each operation, with memory that lives as long as the context they come from."""

    def __init__(self, world: Communicator) -> None:
        """world: the ranks. Collective."""
        self.world, self.plain = world, PlainCollectives(world)
        self._algorithms = AlgorithmContenders(world)

    @contextmanager
    def all_reduce(self, size: int) -> Iterator[dict[str, Contender]]:
        world, numel = self.world, size // 4
        mine, theirs, gloos, source, dest = (zeros(numel) for _ in range(5))
        with in_arena(self.world, numel) as arena:
            yield contenders(
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
        with in_arena(self.world, numel, torch.float16) as fp16, in_arena(self.world, numel, torch.bfloat16) as bf16:
            vectors = {"fp16": fp16.tensor, "bf16": bf16.tensor}
            calls: dict[str, Callable[[], object]] = {n: partial(world.all_reduce, x) for n, x in vectors.items()}
            if self.plain.adds_fp16:
                vectors["library"] = zeros(numel, torch.float16)
                calls["library"] = self.plain.all_reduce(vectors["library"])
            single = size >= _SINGLE_FROM
            yield {n: Contender(call, partial(vectors[n].fill_, 0.5), single) for n, call in calls.items()}

    @contextmanager
    def reduce_scatter(self, size: int) -> Iterator[dict[str, Contender]]:
        world, each = self.world, max(1, size // 4 // self.world.size)
        numel = each * world.size
        theirs, out, their_out = zeros(numel), zeros(each), zeros(each)
        library = self.plain.reduce_scatter(their_out, theirs)
        with in_arena(self.world, numel) as arena:
            yield contenders(size, arena=partial(world.reduce_scatter, out, arena.tensor), library=library)

    @contextmanager
    def all_gather(self, size: int) -> Iterator[dict[str, Contender]]:
        world, each = self.world, max(1, size // 4 // self.world.size)
        numel = each * world.size
        theirs = zeros(numel)
        with in_arena(self.world, numel) as arena:
            out, block = arena.tensor, arena.tensor[world.rank * each : (world.rank + 1) * each]
            yield contenders(size, arena=partial(world.all_gather, out, block), library=self.plain.all_gather(theirs))

    def algorithms(self, size: int) -> AbstractContextManager[dict[str, Contender]]:
        """Every algorithm of all_reduce, in an arena."""
        return self._algorithms.of(all_reduce.ALGORITHMS, "arena", size)

    @contextmanager
    def probes(self, size: int) -> Iterator[Probes]:
        with in_arena(self.world, max(self.world.size, size // 4)) as arena:
            yield Probes(self.world, self.plain, arena)
