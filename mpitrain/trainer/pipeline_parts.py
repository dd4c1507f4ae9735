"""What counts the actions of a pipeline as parts of the step, and what autograd keeps between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from mpitrain.monitor.parts import StepClock
from mpitrain.pipe.executor import Watched
from mpitrain.pipe.schedule import BackwardInput, Forward, Receive, Send, Step
from mpitrain.shard.parameters import Parameters
from mpitrain.trainer.memory import ActivationMeter


class PipelineMeter:
    """Counts the bytes that autograd keeps for backward of all microbatches that are under way on this rank.

    What a zero-bubble schedule lets go of in the input half of a backward pass counts until the weight half.

    Args:
        module: Whose parameters do not count.

    Attributes:
        nbytes: The most at one time, in the batch that was counted last.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parameters: Parameters | None = None  # while it counts
        self._kept: dict[tuple[int, int], int] = {}  # bytes by stage and microbatch
        self.nbytes = 0

    @contextmanager
    def counting(self, parameters: Parameters) -> Iterator[None]:
        """Inside, count a batch: anew. parameters: the module's, as they are placed."""
        self._parameters, self.nbytes = parameters, 0
        try:
            yield
        finally:
            self._parameters = None
            self._kept.clear()

    def perform(self, step: Step, call: Callable[[], None]) -> None:
        """Carry a step out, and count what it keeps or lets go of."""
        if self._parameters is None:
            call()
            return
        key = step.stage, step.microbatch
        if isinstance(step, Forward):
            meter = ActivationMeter(self._module)
            with meter.counting(self._parameters):
                call()
            self._kept[key] = meter.nbytes
            self.nbytes = max(self.nbytes, sum(self._kept.values()))
        else:
            call()
            if not isinstance(step, BackwardInput):
                del self._kept[key]


def counting(clock: StepClock, meter: PipelineMeter) -> Watched:
    """What a pipeline is to call instead of the calls that carry its steps out, where it trains.

    Args:
        clock: Counts forward and backward steps, and has a listener told of each of them.
        meter: Counts the bytes that stay between them, when it is asked to.
    """

    def watched(step: Step, call: Callable[[], None]) -> Callable[[], None]:
        if isinstance(step, Send | Receive):
            return call
        part = clock.forward if isinstance(step, Forward) else clock.backward
        kind = type(step).__name__

        def run() -> None:
            if not torch.is_grad_enabled():  # it evaluates
                call()
                return
            listener = clock.listener
            begin = time.perf_counter() if listener is not None else 0.0
            with part:
                meter.perform(step, call)
            if listener is not None:
                listener.action(kind, step.stage, step.microbatch, begin, time.perf_counter())

        return run

    return watched
