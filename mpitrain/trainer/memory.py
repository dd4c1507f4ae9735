"""Memory of training by category, as measured from tensors and as predicted by formula."""

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
        parameters: Parameters in the precision of forward; of a copy that the ranks of a node share, this rank's part.
        gradients: Gradients, wherever they are stored.
        states: States of the optimizer, and its fp32 copy of 16-bit parameters.
        activations: Tensors that autograd kept in a forward pass; in a pipeline, those of all microbatches under way.
        buffers: Buffers of communication.
        padding: Bytes in parameters, gradients and states that hold no element.
        host: Bytes in host memory if the rank computes on a device: states, buffers, and parameters that are offloaded
            between their uses.
        expected: Bytes of parameters, gradients and states by the formula of `mpitrain.shard.placement`, without
            padding and without memory that ranks share.
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
    """Return the bytes of a sharding's tensors on this rank.

    Args:
        sharding: The module and its optimizer.
        activations: Bytes of activations, as metered.
    """
    counts = [(g, sum(p.numel() for p in g.parameters)) for g in sharding.groups]
    parameters = sharding.parameters.nbytes()
    gradients, buffers = sharding.gradients.nbytes()
    buffers += sharding.parameters.buffer_bytes()
    state_values = [t for s in sharding.flat_parameters for t in sharding.optimizer.state.get(s.value, {}).values()]
    moments = sum(t.nbytes for t in state_values if torch.is_tensor(t) and t.numel() > 1)
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
    narrow = sum(gap * item for gap, item in gaps) / flat  # share of padding in a flat copy
    wide = sum(gap * (4 * per_element + (4 if item < 4 or copied else 0)) for gap, item in gaps) / sharding.shard.size
    padded_bytes = (parameters if sharding.stage.states else 0) + gradients
    padding = padded_bytes * narrow + (wide if sharding.stage.states else 0)
    return MemoryAccount(round(parameters), gradients, states, activations, buffers, round(padding), host, expected)


class ActivationMeter:
    """Counter of the bytes of tensors that autograd keeps for backward.

    Parameters are not counted, and memory that several tensors share is counted once.

    Args:
        module: Module whose parameters are not counted.

    Attributes:
        nbytes: Bytes counted so far.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._begin()

    def _begin(self) -> None:
        self._counted_storages = {p.untyped_storage().data_ptr() for p in self._module.parameters()}
        self.nbytes = 0

    @contextmanager
    def counting(self, parameters: Parameters) -> Iterator[None]:
        """Reset the count, and count the tensors that autograd keeps in the block.

        parameters: the module's, as placed.
        """
        self._begin()

        def add(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if parameters.holds(tensor) else self.add(tensor)

        with parameters.watch_saved(self.add), saved_tensors_hooks(add, lambda saved: saved):
            yield

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor that autograd keeps, and return it."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._counted_storages:
            self._counted_storages.add(storage.data_ptr())
            self.nbytes += min(storage.nbytes(), tensor.nbytes)
        return tensor


class PipelineMeter:
    """Counter of the bytes that autograd keeps for backward, over all microbatches under way on this rank.

    With a zero-bubble schedule, tensors freed in the input half of a backward pass are counted until the weight half.

    Args:
        module: Module whose parameters are not counted.

    Attributes:
        nbytes: Largest number of bytes at any time in the last counted batch.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parameters: Parameters | None = None  # set while counting
        self._saved_bytes: dict[tuple[int, int], int] = {}  # bytes by stage and microbatch
        self.nbytes = 0

    @contextmanager
    def counting(self, parameters: Parameters) -> Iterator[None]:
        """Reset the count, and count the batch in the block. parameters: the module's, as placed."""
        self._parameters, self.nbytes = parameters, 0
        try:
            yield
        finally:
            self._parameters = None
            self._saved_bytes.clear()

    def perform(self, step: Step, call: Callable[[], None]) -> None:
        """Execute a pipeline step, and count the bytes that it keeps or frees.

        Args:
            step: The step.
            call: Function that executes it.
        """
        if self._parameters is None:
            call()
            return
        key = step.stage, step.microbatch
        if isinstance(step, Forward):
            meter = ActivationMeter(self._module)
            with meter.counting(self._parameters):
                call()
            self._saved_bytes[key] = meter.nbytes
            self.nbytes = max(self.nbytes, sum(self._saved_bytes.values()))
        else:
            call()
            if not isinstance(step, BackwardInput):
                del self._saved_bytes[key]


def make_step_wrapper(clock: StepClock, meter: PipelineMeter) -> Watched:
    """Return a wrapper of a pipeline's steps that measures time and memory when gradients are computed.

    Args:
        clock: Timer of forward and backward steps; its listener is called after each of them.
        meter: Counter of the bytes that are kept between them.
    """

    def watched(step: Step, call: Callable[[], None]) -> Callable[[], None]:
        if isinstance(step, Send | Receive):
            return call
        part = clock.forward if isinstance(step, Forward) else clock.backward
        kind = type(step).__name__

        def run() -> None:
            if not torch.is_grad_enabled():  # evaluation is not measured
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
