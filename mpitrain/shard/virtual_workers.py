"""Gradients of a step's leaves summed as one binary tree, whatever ranks the leaves are on.

A global batch is cut into W leaves (virtual workers), W a power of two; each of N ranks has W/N neighbouring ones.
A rank sums its own as the subtree over them, the ranks' sums are then reduced in the order of a tree over ranks:
together the tree over W leaves, so that the bits are the same for N = 1, 2, 4, ..., W.

    leaf     0   1   2   3   4   5   6   7         8 leaves on 2 ranks
    rank 0   (0 + 1) + (2 + 3)   |                 within the ranks
    rank 1                       | (4 + 5) + (6 + 7)
             (      rank 0      ) + (    rank 1   )   between them
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from mpitrain.comm import Communicator
from mpitrain.errors import InputError
from mpitrain.layout import split
from mpitrain.shard.protocols import Gradients


@dataclass(frozen=True)
class Cut:
    """How every global batch is cut: into `leaves` nearly equal parts, as many on each of `ranks` ranks."""

    rank: int
    ranks: int
    leaves: int

    @staticmethod
    def of(comm: Communicator, reproducible: bool, workers: int) -> Cut:
        """A leaf per rank, or, to be reproducible, `workers`. Raises InputError where they do not fit the ranks."""
        if not reproducible:
            return Cut(comm.rank, comm.size, comm.size)
        if workers & (workers - 1) or workers % comm.size:
            raise InputError(
                f"run.reproducible needs run.workers to be a power of two and a multiple of the data-parallel ranks, "
                f"but there are {workers} and {comm.size}; change one of them",
                agreed=True,
            )
        return Cut(comm.rank, comm.size, workers)

    @property
    def own(self) -> range:
        """The numbers of this rank's leaves."""
        each = self.leaves // self.ranks
        return range(self.rank * each, (self.rank + 1) * each)

    def share(self, size: int) -> tuple[int, int]:
        """(first, last) of this rank's samples in a global batch of `size`."""
        bounds = split(size, self.leaves)
        return bounds[self.own.start], bounds[self.own.stop]

    def within(self, size: int) -> list[tuple[int, int]]:
        """(first, last) of each of this rank's leaves in its share."""
        bounds = split(size, self.leaves)
        start = bounds[self.own.start]
        return [(bounds[leaf] - start, bounds[leaf + 1] - start) for leaf in self.own]

    def rounds(self, size: int, microbatch: int) -> int:
        """The most microbatches of at most `microbatch` samples (0: a leaf at once) that any rank has."""
        return max(self._microbatches(size, microbatch))

    def even(self, size: int, microbatch: int) -> bool:
        """Whether each rank has as many microbatches as any other."""
        return len(set(self._microbatches(size, microbatch))) == 1

    def _microbatches(self, size: int, microbatch: int) -> list[int]:
        bounds = split(size, self.leaves)
        each = self.leaves // self.ranks
        counts = [-(-(hi - lo) // (microbatch or max(1, hi - lo))) for lo, hi in pairwise(bounds)]
        return [sum(counts[r * each : (r + 1) * each]) for r in range(self.ranks)]

    def total(self, comm: Communicator, values: Sequence[float]) -> float:
        """The sum of a number of each leaf over all of them, rounded once. values: of this rank's. Collective."""
        everyone = torch.zeros(self.leaves, dtype=torch.float64)
        everyone[self.own.start : self.own.stop] = torch.tensor(values, dtype=torch.float64)
        comm.all_reduce(everyone)
        numbers = everyone.tolist()
        return math.fsum(numbers) if all(map(math.isfinite, numbers)) else math.nan


class TreeSum:
    """Adds up what a rank's leaves leave in its gradients; holds log2(leaves) further copies of them at most."""

    def __init__(self, gradients: Gradients) -> None:
        if gradients.reduces_each_pass:
            raise InputError(
                "several virtual workers on a rank need room for all gradients; set run.reproducible, or use "
                "parallel.zero 0 or 1",
                agreed=True,
            )
        self._gradients, self._flat = gradients, gradients.flat
        self._waiting: list[list[torch.Tensor]] = []  # sums of 2^k leaves; the k descend
        self._leaves = 0

    def add(self, *, last: bool) -> None:
        """Take a leaf's gradients over, and clear them for the next; after the last they hold the sum."""
        self._leaves += 1
        self._gradients.settle()
        finished = self._leaves
        while finished % 2 == 0:  # like carrying in a binary counter
            for flat, earlier in zip(self._flat, self._waiting.pop(), strict=True):
                flat.add_(earlier)
            finished //= 2
        if last:
            if self._waiting:
                raise InputError(f"{self._leaves} leaves on this rank are not a power of two", agreed=True)
            return
        self._waiting.append([flat.clone() for flat in self._flat])
        self._gradients.zero()
