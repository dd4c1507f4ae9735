"""How an operation of a process group is carried out: now, or in the group's queue; alone, or as one of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from mpitrain.backend import versions
from mpitrain.backend.arguments import Tensors
from mpitrain.backend.debug import Comparison
from mpitrain.backend.dispatching import dispatch, watched
from mpitrain.backend.queues import Queue
from mpitrain.backend.streams import order_of
from mpitrain.backend.work import FinishedWork, Operation, Several


class Issuing(versions.Base):
    """A process group's way of doing things."""

    _queue: Queue
    _comparison: Comparison | None  # in debug mode
    _coalesced: list[dist.Work] | None  # operations that are being issued as one

    def _run(
        self,
        name: str,
        call: Callable[[], None],
        outputs: Tensors,
        options: Any,
        *alike: object,
        shown: tuple[Any, ...],
    ) -> dist.Work:
        """Carry an operation out now, or put it into the queue. alike: what must be the same on all ranks.

        shown: as what torch's dispatcher is to see it: the name, and the arguments.
        """
        return self._seen(shown, outputs, partial(self._issue, name, call, outputs, options, alike, shown))

    def _seen(self, shown: tuple[Any, ...], outputs: Tensors, issue: Callable[[], dist.Work]) -> dist.Work:
        """Issue an operation, by way of torch's dispatcher where somebody looks. shown: as `_run` has it."""
        if watched():
            return dispatch(shown[0], shown[1:], self, issue) or FinishedWork(outputs)
        return issue()

    def _issue(
        self,
        name: str,
        call: Callable[[], None],
        outputs: Tensors,
        options: Any,
        alike: Sequence[object],
        arguments: Sequence[Any],
    ) -> dist.Work:
        self._compare(name, alike)
        at_once = not versions.asynchronous(options) and self._coalesced is None
        if at_once and self._queue.limit is None:
            self._queue.perform(call)
            return FinishedWork(outputs)
        title = f"{name} of {self.comm.label}"
        order = order_of(arguments, self._queue.streams)
        work = self._queue.submit(Operation(title, call, outputs, self._queue, order))
        if at_once:  # by a thread, because nobody can be called back from inside MPI
            work.wait()
        return self._remember(work)

    def _compare(self, name: str, alike: Sequence[object]) -> None:
        comparison = self._comparison
        if comparison is not None:
            self._queue.perform(lambda: comparison.compare(name, alike))

    def _remember(self, work: dist.Work) -> dist.Work:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device | None = None) -> dist.Work:
        works, self._coalesced = self._coalesced or [], None
        return Several(works)
