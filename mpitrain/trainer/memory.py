"""The bytes of training by category: counted from the tensors that hold them, beside what the formula says."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from mpitrain.monitor.parts import StepClock
from mpitrain.pipe.executor import Watched
from mpitrain.pipe.schedule import BackwardInput, Forward, Receive, Send, Step
from mpitrain.shard.parameters import Parameters
from mpitrain.shard.placement import formula
from mpitrain.shard.sharding import Sharding


@dataclass(frozen=True)
class MemoryAccount:
    """Bytes on this rank, by category.

    Attributes:
        parameters: In the precision of forward; of a copy that the ranks of a node share, this rank's part.
        gradients: Where they are kept.
        states: The optimizer's, with its fp32 copy of 16-bit parameters.
        activations: What autograd kept in a forward pass; of a pipeline in all of them that were under way at once.
        buffers: What communication passes through.
        padding: Bytes in parameters, gradients and states that hold no element.
        host: Bytes in host memory where the rank computes on a device: of states and buffers, and of parameters that
            are kept there between their uses.
        expected: Parameters, gradients and states by the formula of `mpitrain.shard.placement`, without padding and
            without memory that ranks share.
    """

    parameters: int
    gradients: int
    states: int
    activations: int
    buffers: int
    padding: int
    host: int
    expected: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of all categories."""
        return self.parameters + self.gradients + self.states + self.activations + self.buffers


def measure(sharding: Sharding, activations: int) -> MemoryAccount:
    """Count the bytes of everything that a sharding holds on this rank. activations: as metered, in bytes."""
    counts = [(g, sum(p.numel() for p in g.parameters)) for g in sharding.groups]
    parameters = sharding.parameters.nbytes()
    gradients, buffers = sharding.gradients.nbytes()
    buffers += sharding.parameters.buffer_bytes()
    kept = [t for s in sharding.flat_parameters for t in sharding.optimizer.state.get(s.value, {}).values()]
    moments = sum(t.nbytes for t in kept if torch.is_tensor(t) and t.numel() > 1)
    states = moments + sum(s.value.nbytes for s in sharding.flat_parameters if s.stored is not None)
    host = 0
    if sharding.host is not None:
        buffers += sharding.host.nbytes()
        host = states + sharding.host.nbytes() + (round(parameters) if sharding.parallel.offload_parameters else 0)
    per_element = round(moments / 4 / max(1, sum(s.value.numel() for s in sharding.flat_parameters)))
    copied = sharding.host is not None and any(s.stored is not None for s in sharding.flat_parameters)
    accounts = [
        formula(sharding.stage, sharding.shard.size, n, g.dtype.itemsize, per_element, copied=copied) for g, n in counts
    ]
    kinds = ("parameters", "gradients", "states")
    expected = {kind: round(sum(getattr(account, kind) for account in accounts)) for kind in kinds}
    flat = sum(g.layout.numel * g.dtype.itemsize for g in sharding.groups)
    gaps = [(g.layout.numel - n, g.dtype.itemsize) for g, n in counts]
    narrow = sum(gap * item for gap, item in gaps) / flat  # the part of a flat copy that is padding
    wide = sum(gap * (4 * per_element + (4 if item < 4 or copied else 0)) for gap, item in gaps) / sharding.shard.size
    held = (parameters if sharding.stage.states else 0) + gradients
    padding = held * narrow + (wide if sharding.stage.states else 0)
    return MemoryAccount(round(parameters), gradients, states, activations, buffers, round(padding), host, expected)


class ActivationMeter:
    """Counts the bytes of the tensors that autograd keeps for backward.

    Parameters do not count, and memory that several tensors share counts once.

    Args:
        module: Whose parameters do not count.

    Attributes:
        nbytes: Counted so far.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._begin()

    def _begin(self) -> None:
        self._seen = {p.untyped_storage().data_ptr() for p in self._module.parameters()}
        self.nbytes = 0

    @contextmanager
    def counting(self, parameters: Parameters) -> Iterator[None]:
        """Count what autograd keeps, anew. parameters: the module's, as they are placed."""
        self._begin()
        with parameters.watch_saved(self.add), saved_tensors_hooks(self.add, lambda kept: kept):
            yield

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor that autograd keeps, and return it."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.nbytes += min(storage.nbytes(), tensor.nbytes)
        return tensor


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
        """Count a batch, anew. parameters: the module's, as they are placed."""
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
    """Return what a pipeline calls instead of the calls that carry its steps out, where it trains.

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
