"""Workers of a DataLoader inside this process, because a process that runs MPI must not be forked.

Each worker has the seeds, the generators, the copy of the data set and the samples that a process of torch would have,
so the batches are those of one process. Its work is done when the batch is needed.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import dataloader
from torch.utils.data._utils import worker as torch_worker


class _Worker:
    """One worker: its data set, the state of its generators, and what it reads with."""

    def __init__(self, iterator: WorkersInProcess, loader: Any, number: int) -> None:
        seed = int(iterator._base_seed) + number
        dataset = _forked(iterator._dataset)
        self._info = torch_worker.WorkerInfo(id=number, num_workers=iterator._num_workers, seed=seed, dataset=dataset)
        self._iterator = iterator
        self._states: tuple[Any, ...] | None = None
        with self._active():
            random.seed(seed)
            torch.manual_seed(seed)
            np.random.seed(torch_worker._generate_state(iterator._base_seed, number))
            if loader.worker_init_fn is not None:
                loader.worker_init_fn(number)
            self.start_epoch()

    def start_epoch(self) -> None:
        """Read from the beginning again."""
        iterator = self._iterator
        with self._active():
            self._fetcher = dataloader._DatasetKind.create_fetcher(
                iterator._dataset_kind, self._info.dataset, iterator._auto_collation, iterator._collate_fn,
                iterator._drop_last,
            )  # fmt: skip

    def fetch(self, index: Any) -> Any:
        """Return a batch of the samples with these indices."""
        with self._active():
            return self._fetcher.fetch(index)

    @contextmanager
    def _active(self) -> Iterator[None]:
        """Exchange the generators of the process for those of this worker."""
        if torch_worker._worker_info is self._info:
            yield
            return
        outer = torch.get_rng_state(), random.getstate(), np.random.get_state(), torch_worker._worker_info
        if self._states is not None:
            torch.set_rng_state(self._states[0])
            random.setstate(self._states[1])
            np.random.set_state(self._states[2])
        torch_worker._worker_info = self._info
        try:
            yield
        finally:
            self._states = torch.get_rng_state(), random.getstate(), np.random.get_state()
            torch.set_rng_state(outer[0])
            random.setstate(outer[1])
            np.random.set_state(outer[2])
            torch_worker._worker_info = outer[3]


class WorkersInProcess(dataloader._BaseDataLoaderIter):
    """Iterator over a DataLoader with workers, in the order of torch's iterator over processes.

    Args:
        loader: DataLoader whose `num_workers` is above 0.
    """

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._most_tasks = (loader.prefetch_factor or 2) * loader.num_workers
        self._workers = [_Worker(self, loader, number) for number in range(loader.num_workers)]
        self._start()

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        for each in self._workers:
            each.start_epoch()
        self._start()

    def _start(self) -> None:
        self._is_active = [True] * self._num_workers
        self._turns = itertools.cycle(range(self._num_workers))
        self._tasks: deque[tuple[int, Any]] = deque()
        for _ in range(self._most_tasks):
            self._add_task()

    def _add_task(self) -> None:
        """Draw the next indices, as early as torch does, and give them to the next worker that has samples."""
        try:
            index = self._next_index()
        except StopIteration:
            return
        for number in itertools.islice(self._turns, self._num_workers):
            if self._is_active[number]:
                self._tasks.append((number, index))
                return

    def _next_data(self) -> Any:
        while self._tasks:
            number, index = self._tasks.popleft()
            if not self._is_active[number]:
                continue
            try:
                data = self._workers[number].fetch(index)
            except StopIteration:
                if self._dataset_kind != dataloader._DatasetKind.Iterable:
                    raise
                self._is_active[number] = False
                self._add_task()
                continue
            self._add_task()
            return data
        raise StopIteration


def use_in_every_loader() -> None:
    """Let every DataLoader with workers run them inside this process."""
    iterator = dataloader.DataLoader._get_iterator

    def get_iterator(self: Any) -> Any:
        return iterator(self) if self.num_workers == 0 else WorkersInProcess(self)

    dataloader.DataLoader._get_iterator = get_iterator  # type: ignore[method-assign]


def _forked(dataset: Any) -> Any:
    """Return the data set as a forked process has it: with attributes and generators of its own, and the same data."""
    try:
        other = copy.copy(dataset)
        attributes = vars(other)
    except Exception:  # a data set that cannot be copied is shared
        return dataset
    for name, value in list(attributes.items()):
        if isinstance(value, torch.Generator):
            attributes[name] = torch.Generator(value.device)
            attributes[name].set_state(value.get_state())
        elif isinstance(value, (np.random.Generator, np.random.RandomState, random.Random)):
            attributes[name] = copy.deepcopy(value)
    return other
