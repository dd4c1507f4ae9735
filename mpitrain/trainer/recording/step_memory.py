"""Memory by category within the recorded steps of a timeline, where modules and time categories begin and end.

    parameters    those of the rank, and whole ones while they are gathered (ZeRO-3)
    gradients     flat gradients, or the rank's shares
    states        states of the optimizer, and fp32 copies of 16-bit parameters
    activations   tensors that autograd keeps for backward now, recomputed ones included
    buffers       buffers of communication, without gathered parameters
    shared        resident memory that is shared with the node and is in none of the categories above: message windows,
                  and tensors of other ranks that this rank has read
    other         the rest: of what the allocator of the device has given out, or of the resident memory of the process

On an accelerator, these are the bytes on the device, without what is offloaded to the host; nothing is shared. There,
`other` is mostly gradients of activations and intermediate results; in host memory also the interpreter, libraries,
and what the C library has not returned to the system.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator
from functools import partial

import torch

from mpitrain.comm.memory.device import is_accelerator, memory_bytes
from mpitrain.monitor.memory import open_resident
from mpitrain.parallel.recompute import record_recomputed
from mpitrain.shard.parameters import NodeParameters
from mpitrain.storage import proc
from mpitrain.trainer.memory import KeptTensor, KeptTensors
from mpitrain.trainer.run import Run

_CATEGORIES = ("parameters", "gradients", "states", "activations", "buffers", "shared", "other")
_MOST = 200_000  # largest number of samples
_TRIES = 10


class StepMemory:
    """Recorder of this rank's memory by category. None of its methods is collective.

    Args:
        trainer: Trainer of the run.

    Attributes:
        seconds: Seconds that a sample takes.
    """

    def __init__(self, trainer: Run) -> None:
        self._trainer, self._tensors = trainer, KeptTensors()
        self._close: Callable[[], None] = lambda: None
        self._on_device = is_accelerator(trainer.device)
        self._total: Callable[[], int] = partial(memory_bytes, trainer.device)
        if not self._on_device:
            self._total, self._close = open_resident()
        self._times, self._bytes = array("d"), array("q")
        self._measure()
        begin = time.perf_counter()
        for _ in range(_TRIES):
            self.sample(begin)
        self.seconds = (time.perf_counter() - begin) / _TRIES

    def start(self) -> None:
        """Begin to record the tensors that autograd keeps, and take the first sample."""
        self._times, self._bytes = array("d"), array("q")
        engine = self._trainer.engine
        self._tensors.at_peak = lambda: self.sample(time.perf_counter())
        self._addresses = {p.untyped_storage().data_ptr() for p in engine.module.parameters()}
        engine.meter.record = self._tensors
        record_recomputed(self._keep)
        self.sample(time.perf_counter())

    def stop(self) -> None:
        """Take the last sample, and record no more."""
        self.sample(time.perf_counter())
        self._trainer.engine.meter.record = None
        self._tensors.at_peak = lambda: None
        record_recomputed(None)
        self._close()

    def sample(self, at: float) -> None:
        """Record the memory at this time.

        Args:
            at: Time in seconds of `time.perf_counter()`.
        """
        if len(self._times) == _MOST:
            return
        if self._step != self._trainer.step:
            self._measure()
        gathered, buffers, activations = self._gathered_bytes(), self._buffer_bytes(), self._tensors.nbytes
        other = max(0, self._total() - self._fixed - buffers - activations)
        self._times.append(at)
        self._bytes.extend((
            self._parameters + gathered, self._gradients, self._states, activations,
            self._buffers + buffers - gathered, self._shared, other,
        ))  # fmt: skip

    def rows(self) -> Iterator[tuple[float, dict[str, int]]]:
        """Yield the time and the bytes by category of each sample."""
        width = len(_CATEGORIES)
        for number, at in enumerate(self._times):
            values = self._bytes[number * width : (number + 1) * width]
            yield at, dict(zip(_CATEGORIES, values, strict=True))

    def _measure(self) -> None:
        """Measure the categories that change at most from step to step."""
        trainer, sharding = self._trainer, self._trainer.engine.sharding
        self._step, account = trainer.step, trainer.engine.memory()
        self._parameters, self._gradients, self._states = account.parameters, account.gradients, account.states
        self._buffers, self._shared = account.buffers - sharding.parameters.buffer_bytes(), 0
        if not self._on_device:
            counted = trainer.world.process.arenas.shared_bytes()
            counted += account.parameters if isinstance(sharding.parameters, NodeParameters) else 0
            self._shared = max(0, (proc.nbytes_of("self/status", "RssShmem") or 0) - counted)
        elif sharding.host is not None:  # offloaded
            self._states, self._buffers = 0, self._buffers - sharding.host.nbytes()
            if sharding.parallel.offload_parameters:
                self._parameters = 0
        # a sample takes microseconds, and is taken wherever a module or a category begins or ends
        self._gathered_bytes, self._buffer_bytes = sharding.parameters.gathered_bytes, sharding.parameters.buffer_bytes
        self._fixed = self._parameters + self._gradients + self._states + self._buffers + self._shared

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor | KeptTensor:
        """Return the object to keep in place of a recomputed activation."""
        is_parameter = tensor.untyped_storage().data_ptr() in self._addresses
        if is_parameter or self._trainer.engine.sharding.parameters.holds(tensor):
            return tensor
        return self._tensors.keep(tensor)
