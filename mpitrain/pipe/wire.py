"""Tensors that stages exchange: one tensor or a tuple of them, with shapes that both ranks know.

A header carries the shapes the first time. Both ranks remember them for microbatches of the same shapes, and later
messages contain only the tensors' bytes. All messages therefore have lengths that the receiver knows, and need no
header of the communicator's own (`header=False`).

    header   [length] then int64: single, number, then for each tensor: dtype, needs gradient, dimensions, sizes
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

_DTYPES = tuple(sorted(DTYPES, key=str))  # a header has the index of the dtype


@dataclass(frozen=True)
class TensorMeta:
    """Shape and dtype of one tensor that stages exchange.

    Attributes:
        shape: Shape of the tensor.
        dtype: Data type of the elements.
        gradient: True if its gradient is sent back.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool


@dataclass(frozen=True)
class OutputSpec:
    """Shapes and dtypes of a stage's output.

    Attributes:
        tensors: Shape and dtype of each tensor.
        single: True for a bare tensor, False for a tuple.
    """

    tensors: tuple[TensorMeta, ...]
    single: bool

    @property
    def gradients(self) -> tuple[TensorMeta, ...]:
        """Tensors whose gradients are sent back."""
        return tuple(t for t in self.tensors if t.gradient)

    @staticmethod
    def of(output: Any) -> OutputSpec:
        """Return the spec of a stage's output.

        Raises:
            InputError: The output is neither a tensor nor a tuple of tensors, or has a dtype that cannot be sent.
        """
        tensors = as_tuple(output)
        if not all(isinstance(t, torch.Tensor) for t in tensors):
            kinds = ", ".join(sorted({type(t).__name__ for t in tensors}))
            raise InputError(f"a stage returned {kinds}; blocks must return a tensor or a tuple of tensors")
        for t in tensors:
            if t.dtype not in _DTYPES:
                raise InputError(
                    f"a stage returned a tensor of {t.dtype}, which cannot be sent; convert it to another dtype"
                )
        specs = tuple(TensorMeta(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)
        return OutputSpec(specs, isinstance(output, torch.Tensor))

    def header(self) -> torch.Tensor:
        """Return the spec as a flat int64 tensor, ready to be sent."""
        numbers = [int(self.single), len(self.tensors)]
        for t in self.tensors:
            numbers += [_DTYPES.index(t.dtype), int(t.gradient), len(t.shape), *t.shape]
        return torch.tensor(numbers, dtype=torch.int64)

    @staticmethod
    def from_header(header: torch.Tensor) -> OutputSpec:
        """Return the spec that `header` encoded."""
        numbers = iter(header.tolist())
        single, count = next(numbers), next(numbers)
        specs = []
        for _ in range(count):
            dtype, gradient, dimensions = next(numbers), next(numbers), next(numbers)
            specs.append(TensorMeta(tuple(next(numbers) for _ in range(dimensions)), _DTYPES[dtype], bool(gradient)))
        return OutputSpec(tuple(specs), bool(single))


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return the tensors of a stage's input or output as a tuple."""
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Apply a function to a tensor, or to each tensor of a tuple.

    Args:
        change: Function of one tensor.
        value: Tensor, or tuple of tensors.

    Returns:
        The result in the same form: a tensor or a tuple.
    """
    return change(value) if isinstance(value, torch.Tensor) else tuple(change(t) for t in value)


def signature_of(value: Any) -> Any:
    """Return the shapes and dtypes of an input, which determine all shapes inside the model.

    Anything that is neither a tensor nor a tuple or list is represented by its type.
    """
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, tuple | list):
        return tuple(signature_of(v) for v in value)
    return type(value)


_HEADER, _OUTPUT, _GRADIENT, _LOSS = range(4)  # message tags


class StageMessages:
    """Messages between the ranks of one pipeline.

    Args:
        comm: Communicator of the pipeline's ranks.

    Attributes:
        device: Device of received tensors.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.device = comm, torch.device("cpu")
        self._sending: list[Work] = []

    def send_header(self, spec: OutputSpec, to: int) -> None:
        """Start sending another rank the shapes of the next output.

        Args:
            spec: Shapes and dtypes of the output.
            to: Rank that receives the header.
        """
        header = spec.header()
        self._sending.append(self.comm.isend(torch.tensor([len(header)]), to, _HEADER, header=False))
        self._sending.append(self.comm.isend(header, to, _HEADER, header=False))

    def receive_header(self, source: int) -> OutputSpec:
        """Receive the shapes of the next output from another rank. Waits for them."""
        length = torch.empty(1, dtype=torch.int64)
        self.comm.irecv(length, source, _HEADER, header=False).wait()
        header = torch.empty(int(length), dtype=torch.int64)
        self.comm.irecv(header, source, _HEADER, header=False).wait()
        return OutputSpec.from_header(header)

    def send(self, tensors: Sequence[torch.Tensor], to: int, gradient: bool) -> None:
        """Start sending tensors, which must not change afterwards.

        Args:
            tensors: Tensors to send.
            to: Rank that receives them.
            gradient: True for gradients, False for outputs.
        """
        self._sending = [work for work in self._sending if not work.done()]
        for t in tensors:
            t = t.detach().to(self.device).contiguous()
            self._sending.append(self.comm.isend(t, to, _GRADIENT if gradient else _OUTPUT, header=False))

    def receive(
        self, specs: Sequence[TensorMeta], source: int, gradient: bool
    ) -> tuple[list[torch.Tensor], list[Work]]:
        """Start receiving tensors.

        Args:
            specs: Shapes and dtypes of the tensors.
            source: Rank that sends them.
            gradient: True for gradients, False for outputs.

        Returns:
            New tensors on the device, and the works to wait for before they are used.
        """
        tensors = [torch.empty(t.shape, dtype=t.dtype, device=self.device) for t in specs]
        tag = _GRADIENT if gradient else _OUTPUT
        return tensors, [self.comm.irecv(t, source, tag, header=False) for t in tensors]

    def finish(self) -> None:
        """Wait until all sends have completed."""
        for work in self._sending:
            work.wait()
        self._sending.clear()

    def share_loss(self, loss: float, root: int) -> float:
        """Return the root's number on all ranks. Collective, but the root only starts the sends.

        Args:
            loss: Number, used on the root alone.
            root: Rank that has the number.
        """
        number = torch.tensor([loss], dtype=torch.float64)
        if self.comm.rank == root:
            others = (rank for rank in range(self.comm.size) if rank != root)
            self._sending += [self.comm.isend(number, rank, _LOSS, header=False) for rank in others]
        else:
            self.comm.irecv(number, root, _LOSS, header=False).wait()
        return float(number)
