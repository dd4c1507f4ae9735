"""Virtual workers: the fixed parts of every global batch, independent of the number of ranks.

A global batch is divided over W virtual workers, W a power of two. Each of N ranks does the work of W/N neighbouring
workers. A rank sums the gradients of its own workers as the subtree over them, and the sums of the ranks are then
reduced in the order of a tree over ranks. Together this is one binary tree over W workers, so the sum has the same bits
for N = 1, 2, 4, ..., W.

    worker   0   1   2   3   4   5   6   7         8 virtual workers on 2 ranks
    rank 0   (0 + 1) + (2 + 3)   |                 within the ranks
    rank 1                       | (4 + 5) + (6 + 7)
             (      rank 0      ) + (    rank 1   )   between them
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch

from mpitrain.comm.memory import device
from mpitrain.errors import refusal
from mpitrain.layout.boxes import split

if TYPE_CHECKING:
    from mpitrain.comm import Communicator
    from mpitrain.shard.gradients import Gradients


@dataclass(frozen=True)
class VirtualWorkers:
    """Division of every global batch into parts, one for each virtual worker.

    The parts are nearly equal, or in proportion to the speeds of the ranks.

    Attributes:
        rank: This rank, among the ranks that share the batch.
        ranks: Number of these ranks; each has the same number of virtual workers.
        count: Number of virtual workers of all ranks together.
        idle: If true, this rank is an additional one without virtual workers.
        speeds: Relative speed of each rank, which is one worker then; empty: equal parts.
    """

    rank: int
    ranks: int
    count: int
    idle: bool = False
    speeds: tuple[float, ...] = ()

    @staticmethod
    def of(ranks: int, reproducible: bool, workers: int, rank: int = 0) -> VirtualWorkers:
        """Return the virtual workers of a run on this number of data-parallel ranks.

        Args:
            ranks: Number of ranks that share every batch.
            reproducible: If true, results must not depend on the number of ranks; if false, each rank is one worker.
            workers: Number of virtual workers; only used if `reproducible`.
            rank: This rank, from 0.

        Raises:
            InputError: `workers` is not a power of two or not a multiple of the ranks.
        """
        if not reproducible:
            return VirtualWorkers(rank, ranks, ranks)
        if workers & (workers - 1) or workers % ranks:
            raise refusal(
                "run.reproducible needs run.workers to be a power of two and a multiple of the data-parallel ranks, "
                f"but there are {workers} workers and {ranks} ranks; change one of them"
            )
        return VirtualWorkers(rank, ranks, workers)

    @property
    def local_workers(self) -> range:
        """Numbers of this rank's virtual workers."""
        if self.idle:
            return range(0)
        each = self.count // self.ranks
        return range(self.rank * each, (self.rank + 1) * each)

    def share(self, size: int) -> tuple[int, int]:
        """Return this rank's samples [first, last) of a global batch of `size` samples."""
        bounds = self.bounds(size)
        return bounds[self.local_workers.start], bounds[self.local_workers.stop]

    def bounds(self, size: int) -> Sequence[int]:
        """Return the bounds of the workers' parts of a global batch: worker w has [bounds[w], bounds[w + 1])."""
        return proportional(size, self.speeds) if self.speeds else split(size, self.count)

    def microbatches(self, size: int, microbatch: int) -> list[list[tuple[int, int]]]:
        """Return the samples [first, last) of each microbatch of each of this rank's workers.

        They are counted from the rank's first sample. If ranks have speeds, slower ranks have smaller microbatches
        instead of fewer, so that in ZeRO stages 2 and 3, which communicate in every pass, no rank waits for another.

        Args:
            size: Number of samples in the global batch.
            microbatch: Largest number of samples in a microbatch; 0 for all samples of a worker at once.
        """
        bounds, counts = self.bounds(size), self._counts(size, microbatch)
        start = bounds[self.local_workers.start]

        def cut(lo: int, hi: int, count: int) -> list[tuple[int, int]]:
            if self.speeds and count:
                return [(lo + first, lo + last) for first, last in pairwise(split(hi - lo, count))]
            each = microbatch or max(1, hi - lo)
            return [(first, min(first + each, hi)) for first in range(lo, hi, each)]

        return [cut(bounds[w] - start, bounds[w + 1] - start, counts[w]) for w in self.local_workers]

    def rounds(self, size: int, microbatch: int) -> int:
        """Return the largest number of microbatches of any rank.

        Args:
            size: Number of samples in the global batch.
            microbatch: Largest number of samples in a microbatch; 0 for all samples of a worker at once.
        """
        return max(self._microbatches(size, microbatch))

    def is_even(self, size: int, microbatch: int) -> bool:
        """Return whether all ranks have the same number of microbatches.

        Args:
            size: Number of samples in the global batch.
            microbatch: Largest number of samples in a microbatch; 0 for all samples of a worker at once.
        """
        return len(set(self._microbatches(size, microbatch))) == 1

    def conflict(self, size: int, microbatch: int, *, synchronous: bool, gathers: bool) -> str:
        """Return why ranks that communicate in their layers cannot share a batch, with a fix; empty if they can.

        Args:
            size: Number of samples in the global batch.
            microbatch: Largest number of samples in a microbatch; 0 for all samples of a worker at once.
            synchronous: If true, ranks compute batch norms together.
            gathers: If true, ranks gather parameters when they need them.
        """
        if synchronous and not self.is_even(size, microbatch):
            return (
                f"BatchNorm needs the same number of microbatches on each rank, but {size} samples on {self.ranks} "
                "ranks give different numbers; make train.batch, and each batch of train.batch_warmup, a multiple of "
                "the ranks, and the part of each rank a multiple of train.microbatch"
                + (", or set parallel.shares to equal" if self.speeds else "")
            )
        if gathers and size < self.ranks:
            return (
                f"a batch of {size} samples leaves some of {self.ranks} ranks without one, but sharded parameters "
                "need all ranks to compute; increase train.batch, and each batch of train.batch_warmup"
            )
        return ""

    def _microbatches(self, size: int, microbatch: int) -> list[int]:
        """Return the number of microbatches of each rank."""
        counts, each = self._counts(size, microbatch), self.count // self.ranks
        return [sum(counts[r * each : (r + 1) * each]) for r in range(self.ranks)]

    def _counts(self, size: int, microbatch: int) -> list[int]:
        """Return the number of microbatches of each worker."""
        samples = [hi - lo for lo, hi in pairwise(self.bounds(size))]
        counts = [-(-n // (microbatch or max(1, n))) for n in samples]
        return [min(n, max(counts)) for n in samples] if self.speeds and microbatch else counts

    def begin_totals(self, comm: Communicator, values: torch.Tensor) -> Callable[[], list[float]]:
        """Start to sum numbers over all virtual workers; each sum is rounded once. Collective.

        Args:
            comm: Ranks that share the batch.
            values: Numbers of this rank's workers, float64 [workers, numbers].

        Returns:
            Function that waits for the device of `values` and returns the sums; NaN where a number is not finite.
        """
        everyone = values.new_zeros((self.count, *values.shape[1:]))
        everyone[self.local_workers.start : self.local_workers.stop] = values
        comm.all_reduce(everyone)
        fetched = device.start_copy_to_host(everyone)
        return lambda: [_sum(numbers) for numbers in fetched().T.tolist()]


@lru_cache(maxsize=256)
def proportional(size: int, speeds: tuple[float, ...]) -> Sequence[int]:
    """Divide a range in proportion to speeds, so that the part that takes longest takes the least time.

    Each part has at least one element, if there are enough. With equal speeds, the result is that of `split`.

    Args:
        size: Length of the range.
        speeds: Speed of each part.

    Returns:
        The bounds of the parts, one more than there are parts.
    """
    counts = [int(size >= len(speeds))] * len(speeds)
    ends = [((counts[part] + 1) / speed, part) for part, speed in enumerate(speeds)]  # times with one element more
    heapify(ends)
    for _ in range(size - sum(counts)):
        part = ends[0][1]
        counts[part] += 1
        heapreplace(ends, ((counts[part] + 1) / speeds[part], part))
    return tuple(accumulate(counts, initial=0))


def _sum(numbers: list[float]) -> float:
    return math.fsum(numbers) if all(map(math.isfinite, numbers)) else math.nan


class TreeSum:
    """Sums the gradients of a rank's virtual workers, one worker after the other, as a binary tree.

    It keeps at most log2(workers of the rank) additional copies of the gradients.

    Args:
        gradients: Gradients that backward passes add to; every rank must keep all of them.
    """

    def __init__(self, gradients: Gradients) -> None:
        self._gradients, self._flat = gradients, gradients.flat
        self._waiting: list[list[torch.Tensor]] = []  # sums of 2^k workers each, in descending order of k
        self._workers = 0

    def add(self, *, last: bool) -> None:
        """Take over the gradients of one worker, and clear them for the next worker.

        After the last worker they are not cleared: they then contain the sum over the rank's workers.

        Args:
            last: If true, this is the rank's last worker.
        """
        self._workers += 1
        self._gradients.copy_in()
        finished = self._workers
        while finished % 2 == 0:  # like carrying in a binary counter
            for flat, earlier in zip(self._flat, self._waiting.pop(), strict=True):
                flat.add_(earlier)
            finished //= 2
        if not last:
            self._waiting.append([flat.clone() for flat in self._flat])
            self._gradients.zero()
