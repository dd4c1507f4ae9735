"""What goes between stages: one tensor or a tuple of them, with shapes both sides know.

Shapes are told in a header the first time, and remembered for microbatches that look the same; from then on a
message is the tensors' bytes and nothing else.

    header   [length] then int64: single, number, then per tensor: dtype, wants gradient, dimensions, sizes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mpitrain.comm.memory.elements import DTYPES
from mpitrain.errors import InputError

if TYPE_CHECKING:
    from mpitrain.comm import Communicator, Work

_DTYPES = tuple(sorted(DTYPES, key=str))  # a header says which by its number


@dataclass(frozen=True)
class TensorMeta:
    """Of one tensor that goes between stages, whether a gradient comes back for it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool


@dataclass(frozen=True)
class OutputSpec:
    """The shapes and dtypes of a stage's output. single: a tensor by itself, not a tuple of one."""

    tensors: tuple[TensorMeta, ...]
    single: bool

    @property
    def gradients(self) -> tuple[TensorMeta, ...]:
        """Of the tensors that a gradient comes back for."""
        return tuple(t for t in self.tensors if t.gradient)

    @staticmethod
    def of(output: Any) -> OutputSpec:
        """Of an output. Raises InputError when it is neither a tensor nor a tuple of tensors that can be sent."""
        tensors = as_tuple(output)
        if not all(isinstance(t, torch.Tensor) for t in tensors):
            kinds = ", ".join(sorted({type(t).__name__ for t in tensors}))
            raise InputError(f"a stage gave {kinds}; blocks must give a tensor or a tuple of tensors to the next one")
        for t in tensors:
            if t.dtype not in _DTYPES:
                raise InputError(f"a stage gave a tensor of {t.dtype}, which cannot be sent; convert it")
        specs = tuple(TensorMeta(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)
        return OutputSpec(specs, isinstance(output, torch.Tensor))

    def header(self) -> torch.Tensor:
        """As a flat int64 tensor, to be sent."""
        numbers = [int(self.single), len(self.tensors)]
        for t in self.tensors:
            numbers += [_DTYPES.index(t.dtype), int(t.gradient), len(t.shape), *t.shape]
        return torch.tensor(numbers, dtype=torch.int64)

    @staticmethod
    def from_header(header: torch.Tensor) -> OutputSpec:
        """As `header` has made it."""
        numbers = iter(header.tolist())
        single, count = next(numbers), next(numbers)
        specs = []
        for _ in range(count):
            dtype, gradient, dimensions = next(numbers), next(numbers), next(numbers)
            specs.append(TensorMeta(tuple(next(numbers) for _ in range(dimensions)), _DTYPES[dtype], bool(gradient)))
        return OutputSpec(tuple(specs), bool(single))


def as_tuple(value: Any) -> tuple[Any, ...]:
    """The tensors of a stage's input or output."""
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def mapped(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """A tensor, or each of a tuple, changed."""
    return change(value) if isinstance(value, torch.Tensor) else tuple(change(t) for t in value)


def look(value: Any) -> Any:
    """What decides the shapes inside a model: the shapes and dtypes of what goes in."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, tuple | list):
        return tuple(look(v) for v in value)
    return type(value)


_HEADER, _OUTPUT, _GRADIENT, _LOSS = range(4)  # message tags


class Wire:
    """The messages of one pipeline.

    MPI waits by polling, which is the fastest where every rank has a core. Where there are more ranks than cores
    (oversubscribed) that would take cores from the ranks that compute, so waits sleep between polls there.

    Args:
        comm: The ranks of the pipeline.

    Attributes:
        device: Where tensors are received.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.device = comm, torch.device("cpu")
        self._sleeps = comm.process.spare_cores < 0
        self._sending: list[Work] = []

    def wait(self, work: Work) -> None:
        """Wait for a message to be sent or received."""
        work.wait(self.comm.process.watchdog.timeout if self._sleeps else None)

    def send_header(self, spec: OutputSpec, to: int) -> None:
        """Begin to tell another rank the shapes of what comes next."""
        header = spec.header()
        self._sending.append(self.comm.isend(torch.tensor([len(header)]), to, _HEADER))
        self._sending.append(self.comm.isend(header, to, _HEADER))

    def receive_header(self, source: int) -> OutputSpec:
        """Wait for the shapes of what comes next from another rank."""
        length = torch.empty(1, dtype=torch.int64)
        self.wait(self.comm.irecv(length, source, _HEADER))
        header = torch.empty(int(length), dtype=torch.int64)
        self.wait(self.comm.irecv(header, source, _HEADER))
        return OutputSpec.from_header(header)

    def send(self, tensors: Sequence[torch.Tensor], to: int, gradient: bool) -> None:
        """Begin to send; the tensors must not change afterwards."""
        self._sending = [work for work in self._sending if not work.done()]
        for t in tensors:
            self._sending.append(self.comm.isend(t.detach().contiguous(), to, _GRADIENT if gradient else _OUTPUT))

    def receive(
        self, specs: Sequence[TensorMeta], source: int, gradient: bool
    ) -> tuple[list[torch.Tensor], list[Work]]:
        """Begin to receive: new tensors on the device, and what to wait for before they are used."""
        tensors = [torch.empty(t.shape, dtype=t.dtype, device=self.device) for t in specs]
        return tensors, [self.comm.irecv(t, source, _GRADIENT if gradient else _OUTPUT) for t in tensors]

    def finish(self) -> None:
        """Wait until everything sent has left."""
        for work in self._sending:
            self.wait(work)
        self._sending.clear()

    def share_loss(self, loss: float, root: int) -> float:
        """Give all ranks the root's number; the root only begins to send it."""
        number = torch.tensor([loss], dtype=torch.float64)
        if self.comm.rank == root:
            others = (rank for rank in range(self.comm.size) if rank != root)
            self._sending += [self.comm.isend(number, rank, _LOSS) for rank in others]
        else:
            self.wait(self.comm.irecv(number, root, _LOSS))
        return float(number)
