"""Memory of training by category, as measured from tensors and as predicted by formula."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from mpitrain.comm.memory import device as devices
from mpitrain.monitor.memory import host_memory_bytes
from mpitrain.monitor.parts import StepClock
from mpitrain.parallel.activations import ActivationOffload, unpack
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
        offloaded: Activations that were moved out (train.offload_activations), which `activations` does not include.
        buffers: Buffers of communication.
        padding: Bytes in parameters, gradients and states that hold no element.
        host: Bytes in host memory if the rank computes on a device: states, buffers, activations, and parameters that
            are offloaded between their uses.
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
    offloaded: int = 0

    @property
    def total(self) -> int:
        """Bytes of all categories."""
        return self.parameters + self.gradients + self.states + self.activations + self.offloaded + self.buffers


def measure(sharding: Sharding, activations: int, offloaded: int = 0, versions: int = 1) -> MemoryAccount:
    """Return the bytes of a sharding's tensors on this rank.

    Args:
        sharding: The module and its optimizer.
        activations: Bytes of activations, as metered.
        offloaded: Bytes of activations that were moved to host memory or files, as metered.
        versions: Number of versions of the weights; 2 with parallel.schedule 2bw.
    """
    counts = [(g, sum(p.numel() for p in g.parameters)) for g in sharding.groups]
    parameters = versions * sharding.parameters.nbytes()
    gradients, buffers = sharding.gradients.nbytes()
    buffers += sharding.parameters.buffer_bytes()
    state_values = [t for s in sharding.flat_parameters for t in sharding.optimizer.state.get(s.value, {}).values()]
    state_values += [s.average for s in sharding.flat_parameters if s.average is not None]
    moments = sum(t.nbytes for t in state_values if torch.is_tensor(t) and t.numel() > 1)
    states = moments + sum(s.value.nbytes for s in sharding.flat_parameters if s.stored is not None)
    host = 0
    if sharding.host is not None:
        buffers += sharding.host.nbytes()
        host = states + sharding.host.nbytes() + (round(parameters) if sharding.parallel.offload_parameters else 0)
    if devices.is_accelerator(sharding.groups[0].device):
        host += offloaded
    per_element = round(moments / 4 / max(1, sum(s.value.numel() for s in sharding.flat_parameters)))
    copied = sharding.host is not None and any(s.stored is not None for s in sharding.flat_parameters)
    accounts = [
        formula(sharding.stage, sharding.shard.size, n, g.dtype.itemsize, per_element, copied=copied) for g, n in counts
    ]
    kinds = ("parameters", "gradients", "states")
    expected = {kind: round(sum(getattr(account, kind) for account in accounts)) for kind in kinds}
    expected["parameters"] *= versions
    flat = sum(g.layout.numel * g.dtype.itemsize for g in sharding.groups)
    gaps = [(g.layout.numel - n, g.dtype.itemsize) for g, n in counts]
    narrow = sum(gap * item for gap, item in gaps) / flat  # share of padding in a flat copy
    wide = sum(gap * (4 * per_element + (4 if item < 4 or copied else 0)) for gap, item in gaps) / sharding.shard.size
    padded_bytes = (parameters if sharding.stage.states else 0) + gradients
    padding = padded_bytes * narrow + (wide if sharding.stage.states else 0)
    return MemoryAccount(
        round(parameters), gradients, states, activations, buffers, round(padding), host, expected, offloaded
    )


def measure_rank(account: MemoryAccount, device: torch.device) -> dict[str, int]:
    """Return the bytes of this rank by category; `other` is the rest of its host memory.

    Args:
        account: Measured bytes of its tensors.
        device: Device on which it computes.
    """
    host, on_device = host_memory_bytes(), devices.is_accelerator(device)
    known = account.host if on_device else account.total
    categories = {
        name: getattr(account, name) for name in ("parameters", "gradients", "states", "activations", "buffers")
    }
    return categories | {
        "other": max(0, host - known),
        "host": host,
        "device": devices.memory_bytes(device) if on_device else 0,
    }


class KeptTensors:
    """Tensors that autograd keeps for backward at this time. Memory that several of them share is counted once.

    Attributes:
        nbytes: Bytes of these tensors.
        at_peak: Function that is called before the first tensor is freed after others were kept.
    """

    def __init__(self) -> None:
        self.nbytes, self._rising = 0, False
        self.at_peak: Callable[[], None] = lambda: None
        # by address of a storage, how many tensors are kept of each of its views (offset and length in bytes)
        self._views: dict[int, dict[tuple[int, int], int]] = {}

    def keep(self, tensor: torch.Tensor) -> KeptTensor:
        """Return an object for autograd to keep in place of a tensor, which counts until autograd frees the object."""
        storage = tensor.untyped_storage()
        view = int(tensor.storage_offset()) * tensor.itemsize, tensor.nbytes
        place = storage.data_ptr(), storage.nbytes(), view
        self.count(*place, 1)
        return KeptTensor(self, tensor, place)

    def count(self, address: int, limit: int, view: tuple[int, int], change: int) -> None:
        """Count more or fewer tensors.

        Args:
            address: Address of their storage.
            limit: Bytes of the storage.
            view: Offset and length in bytes.
            change: 1 if a tensor is kept, -1 if it is freed.
        """
        if change < 0 and self._rising:
            self.at_peak()
        self._rising = change > 0
        views = self._views.get(address)
        if views is None:
            self._views[address] = {view: change}
            self.nbytes += min(limit, view[1])
            return
        if view in views and (views[view] > 1 or change > 0):  # the usual case: the bytes stay the same
            views[view] += change
            return
        if change < 0 and len(views) == 1:  # nothing else of this storage is kept
            del self._views[address]
            self.nbytes -= min(limit, view[1])
            return
        before = min(limit, sum(nbytes for _, nbytes in views))
        if change > 0:
            views[view] = change
        else:
            del views[view]
        self.nbytes += min(limit, sum(nbytes for _, nbytes in views)) - before


class KeptTensor:
    """Object that autograd keeps in place of a tensor; calling it returns the tensor. See `KeptTensors`."""

    __slots__ = ("_place", "_tensor", "_tensors")

    def __init__(self, tensors: KeptTensors, tensor: torch.Tensor, place: tuple[int, int, tuple[int, int]]) -> None:
        self._tensors, self._tensor, self._place = tensors, tensor, place

    def __call__(self) -> torch.Tensor:
        return self._tensor

    def __del__(self) -> None:
        self._tensors.count(*self._place, -1)


class ActivationMeter:
    """Counter of the bytes of tensors that autograd keeps for backward.

    Parameters are not counted, and memory that several tensors share is counted once.

    Args:
        module: Module whose parameters are not counted.
        offload: Object that moves the tensors out; None to keep them.
        record: Record of the tensors that are still kept; None if only the sum is needed.

    Attributes:
        nbytes: Bytes counted so far, without those that were moved out.
        offloaded: Bytes that were moved out.
        tensors: Number of tensors so far, each time that autograd kept one.
    """

    def __init__(
        self, module: nn.Module, offload: ActivationOffload | None = None, record: KeptTensors | None = None
    ) -> None:
        self._module, self._offload, self.record = module, offload, record
        self._begin()

    def _begin(self) -> None:
        tensors = (*self._module.parameters(), *self._module.buffers()) if self._offload else self._module.parameters()
        self._model_storages = {t.untyped_storage().data_ptr() for t in tensors}
        self._counted_storages: set[int] = set()
        self.nbytes = self.tensors = 0
        if self._offload is not None:
            self._offload.begin_pass()

    @property
    def offloaded(self) -> int:
        return self._offload.nbytes if self._offload is not None else 0

    @contextmanager
    def counting(self, parameters: Parameters, recorder: AbstractContextManager[Any] | None = None) -> Iterator[None]:
        """Reset the count, and count the tensors that autograd keeps in the block, which is a forward pass.

        Args:
            parameters: Parameters of the module, as placed.
            recorder: Context manager that records the pass, if any.
        """
        self._begin()

        def add(tensor: torch.Tensor) -> Any:
            return tensor if parameters.holds(tensor) else self.add(tensor)

        with parameters.watch_saved(self.add), saved_tensors_hooks(add, unpack), recorder or nullcontext():
            yield

    def add(self, tensor: torch.Tensor) -> Any:
        """Count a tensor that autograd keeps; return the object to keep: the tensor, or one that returns it."""
        self.tensors += 1
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address in self._model_storages:
            return tensor
        if self._offload is not None and (packed := self._offload.pack(tensor)) is not tensor:
            return packed
        if address not in self._counted_storages:
            self._counted_storages.add(address)
            self.nbytes += min(storage.nbytes(), tensor.nbytes)
        return tensor if self.record is None else self.record.keep(tensor)


class PipelineMeter:
    """Counter of the bytes that autograd keeps for backward, over all microbatches under way on this rank.

    With a zero-bubble schedule, tensors freed in the input half of a backward pass are counted until the weight half.

    Args:
        module: Module whose parameters are not counted.
        offload: Object that moves the tensors out; None to keep them.

    Attributes:
        nbytes: Largest number of bytes at any time in the last counted batch, without those that were moved out.
        offloaded: Largest number of bytes that were out at any time.
        tensors: Number of tensors in that batch, each time that autograd kept one.
        record: Record of the tensors that are still kept, if one is needed.
    """

    def __init__(self, module: nn.Module, offload: ActivationOffload | None = None) -> None:
        self._module, self._offload = module, offload
        self.record: KeptTensors | None = None
        self._parameters: Parameters | None = None  # set while counting
        self._recorder: AbstractContextManager[Any] | None = None
        # bytes that stay, and bytes that are moved out, by stage and microbatch
        self._saved_bytes: dict[tuple[int, int], tuple[int, int]] = {}
        self.nbytes = self.offloaded = self.tensors = 0

    @contextmanager
    def counting(self, parameters: Parameters, recorder: AbstractContextManager[Any] | None = None) -> Iterator[None]:
        """Reset the count, and count the batch in the block.

        Args:
            parameters: Parameters of the module, as placed.
            recorder: Context manager that records each of its forward passes, if any.
        """
        self._parameters, self._recorder = parameters, recorder
        self.nbytes = self.offloaded = self.tensors = 0
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
            meter = ActivationMeter(self._module, self._offload, self.record)
            with meter.counting(self._parameters, self._recorder):
                call()
            self._saved_bytes[key] = meter.nbytes, meter.offloaded
            self.tensors += meter.tensors
            stay, out = map(sum, zip(*self._saved_bytes.values(), strict=True))
            self.nbytes, self.offloaded = max(self.nbytes, stay), max(self.offloaded, out)
        else:
            call()
            if not isinstance(step, BackwardInput):
                self._saved_bytes.pop(key, None)  # absent if forward was in a batch that is not counted


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
