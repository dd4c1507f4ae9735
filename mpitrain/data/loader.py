"""From a data set and an order to the batches of one rank, read ahead by threads.

    running position   p          p+B          p+2B                B: the global batch
    this rank's share  [start, stop) of each, decided by `share`
    reader threads     batch 1    batch 2  ... at most max(prefetch, workers) ahead, given out in order

Threads, never processes: a fork after MPI has started corrupts it. The state of the stream is the position of
the next batch; nothing else needs to be saved to go on, on any number of ranks.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mpitrain.data.dataset import Dataset, Ids
from mpitrain.data.order import Ordering

if TYPE_CHECKING:
    import torch

Share = Callable[[int], tuple[int, int]]

_AHEAD = 2048  # ids that are looked up in the order at once


@dataclass(frozen=True)
class Batch:
    """One rank's share of a global batch, in host memory.

    Attributes:
        ids: The numbers of the samples, int64 [n].
        x: Their inputs, `[n, *x_shape]`.
        y: Their targets, `[n, *y_shape]`.
        position: The running position of the global batch's first sample. The next batch begins at this position plus
            the size of the global batch.
        first: Where in the global batch this share begins.
    """

    ids: Ids
    x: torch.Tensor
    y: torch.Tensor
    position: int
    first: int = 0


class Loader:
    """An endless iterator over consecutive global batches, which gives this rank's share of each.

    An error in a reader thread is raised by the `next` that asks for its batch. Close it, or use it in `with`.

    Args:
        dataset: What is read.
        order: The order of its samples.
        batch: How many samples a global batch has.
        share: Gives (start, stop) of this rank's samples within a global batch of the given size. Where both are the
            same, the tensors are empty.
        position: The running position of the first sample.
        warmup: (batches, samples of each) that come before those of `batch` samples.
        workers: How many threads read; with 0 the caller does.
        prefetch: How many batches are kept ready ahead of the caller.
        finish: What a reader makes of each batch: for `on_device`, one in pinned memory.
    """

    def __init__(
        self,
        dataset: Dataset,
        order: Ordering,
        *,
        batch: int,
        share: Share,
        position: int = 0,
        warmup: Sequence[tuple[int, int]] = (),
        workers: int = 1,
        prefetch: int = 2,
        finish: Callable[[Batch], Batch] = lambda batch: batch,
    ) -> None:
        self._dataset, self._order, self._share, self._finish = dataset, order, share, finish
        self._sizes = deque([*warmup, (sys.maxsize, batch)])  # (batches, samples of each) to come
        self._position = position
        self._ahead: deque[tuple[int, int, Ids]] = deque()
        self._depth = max(prefetch, workers)
        self._pending: deque[Future[Batch]] = deque()
        self._threads = ThreadPoolExecutor(workers, "data-reader") if workers else None

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        if self._threads is None:
            return self._read(*self._advance())
        while len(self._pending) <= self._depth:
            self._pending.append(self._threads.submit(self._read, *self._advance()))
        return self._pending.popleft().result()

    def close(self) -> None:
        """Stop the threads. Waits for the reads that they are in, not for those that have not begun."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
        self._pending.clear()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, position: int, first: int, ids: Ids) -> Batch:
        return self._finish(_batch(self._dataset, position, first, ids))

    def _advance(self) -> tuple[int, int, Ids]:
        """The position of the next batch, where this rank's share of it begins, and the sample ids of the share."""
        if not self._ahead:
            left, size = self._sizes.popleft()
            start, stop = self._share(size)
            share = stop - start
            count = min(left, max(1, _AHEAD // max(1, share)))
            if left > count:
                self._sizes.appendleft((left - count, size))
            firsts = self._position + size * np.arange(count, dtype=np.int64)
            places = firsts[:, None] + np.arange(start, stop, dtype=np.int64)
            ids = self._order.at(places.reshape(-1)).reshape(-1, share) if share else places
            self._ahead.extend((first, start, own) for first, own in zip(firsts.tolist(), ids, strict=True))
            self._position += size * count
        return self._ahead.popleft()


def evaluation_batches(dataset: Dataset, *, samples: int, batch: int, share: Share) -> Iterator[Batch]:
    """Choose samples that are spread evenly over a split, or all of them where there are no more.

    Args:
        dataset: The split.
        samples: How many samples are chosen, at most.
        batch: How many samples a global batch has; the last one may have fewer.
        share: As of `Loader`.

    Yields:
        This rank's share of each batch, in order, with positions that count the chosen samples from 0. Every rank gets
        the same number of batches, and a share may be empty.
    """
    chosen = min(samples, len(dataset))
    for position in range(0, chosen, batch):
        start, stop = share(min(batch, chosen - position))
        places = np.arange(position + start, position + stop, dtype=np.int64)
        yield _batch(dataset, position, start, dataset.spread(places, chosen))


def _batch(dataset: Dataset, position: int, first: int, ids: Ids) -> Batch:
    import torch

    x, y = dataset.read(ids)
    return Batch(ids, torch.from_numpy(x), torch.from_numpy(y), position, first)
