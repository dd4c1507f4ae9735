"""What all ways of carrying device memory have in common: the call, and how it is cut into pieces.

A large operation becomes smaller ones of the same kind, which pass through memory of a given size. A tensor of one
block is cut anywhere; of a tensor that has a block for each rank, a piece takes as much of every block:

    one block              one block a rank, two ranks
    | 0 | 1 | 2 |          | 0 | 1 | 2 | 0 | 1 | 2 |

Piece i of the operation on pieces i of its tensors is piece i of the result, because elements are worked on alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from mpitrain.comm.collectives.binding import CollectiveOperation
from mpitrain.comm.runtime.executor import Reduction


class DeviceCall(NamedTuple):
    """One call of an operation on device memory.

    Attributes:
        operation: The operation.
        tensors: Tensors that it is given: contiguous, on the rank's device; None where this rank has none.
        written: For each of them, whether the operation changes it.
        given: Arguments besides the tensors.
    """

    operation: CollectiveOperation
    tensors: Sequence[Tensor | None]
    written: Sequence[bool]
    given: Sequence[Any]

    @property
    def present(self) -> list[Tensor]:
        """The tensors that this rank has."""
        return [tensor for tensor in self.tensors if tensor is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of the largest tensor."""
        return max(tensor.nbytes for tensor in self.present)

    def value(self, name: str, otherwise: Any = None) -> Any:
        """Return the argument of a name; `otherwise` if the operation has no such parameter."""
        return self.operation.value(self.given, name, otherwise)

    def reduction(self, size: int) -> Reduction | None:
        """Return the reduction over `size` ranks; None for an operation that only moves."""
        op = self.value("op")
        return None if op is None else Reduction.of(op, self.present[0].dtype, size)


class Transport(Protocol):
    """One way of carrying device memory, for one thread of one communicator."""

    @property
    def name(self) -> str:
        """As `comm.device` names it."""
        ...

    def carries(self, call: DeviceCall) -> bool:
        """Whether it can perform the operation; the answer is the same on all ranks."""
        ...

    def perform(self, call: DeviceCall) -> None:
        """Perform the operation, between what was asked of the current stream before and what is asked of it later."""
        ...

    def free(self) -> None:
        """Release its memory. Collective."""
        ...


def flat(tensor: Tensor) -> Tensor:
    """A contiguous tensor's elements in one row, without its history."""
    return tensor.detach().view(-1)


_ALIGNMENT = 64  # bytes: where each tensor begins in the memory of a piece, and what pieces are multiples of
_USUAL = 4  # pieces that a large operation has at least, so that several can be under way at once
_SMALLEST = 1 << 19  # bytes of a piece below which an operation costs more in pieces than it gains


@dataclass(frozen=True)
class TensorPart:
    """What a piece takes of one tensor.

    Attributes:
        spans: Offset and length of what it takes of each block, in elements of the tensor.
        numel: The sum of the lengths.
        start: Where it lies in the memory of the piece, in bytes; the same on all ranks.
    """

    spans: tuple[tuple[int, int], ...]
    numel: int
    start: int


@dataclass(frozen=True)
class OperationPiece:
    """A part of each tensor, None where there is no tensor, and what else the operation is given for these."""

    parts: tuple[TensorPart | None, ...]
    given: tuple[Any, ...]


def cut(call: DeviceCall, size: int, room: int) -> list[OperationPiece]:
    """Cut an operation into pieces, as many on all ranks.

    Args:
        call: A call of one that may be cut (`CollectiveOperation.by_rank`).
        size: Number of ranks.
        room: Bytes for a piece.
    """
    operation, item, counts = call.operation, call.present[0].element_size(), call.value("counts")
    lengths = [
        _lengths(tensor, by_rank, size, counts) for tensor, by_rank in zip(call.tensors, operation.by_rank, strict=True)
    ]
    longest = max(counts) if counts else max(length for blocks in lengths for length in blocks or [0])
    blocks = sum(size if by_rank else 1 for by_rank in operation.by_rank)
    width = _width(longest, item, blocks, room)
    pieces = []
    for lo in range(0, max(longest, 1), width):
        hi = lo + width
        start, parts = 0, list[TensorPart | None]()
        for own in lengths:
            part = None if own is None else _part(own, lo, hi, start)
            start += 0 if part is None else -(-part.numel * item // _ALIGNMENT) * _ALIGNMENT
            parts.append(part)
        clipped = tuple(_clipped(n, lo, hi) for n in counts) if counts else None
        pieces.append(OperationPiece(tuple(parts), operation.replaced(call.given, counts=clipped)))
    return pieces


def _lengths(tensor: Tensor | None, by_rank: bool, size: int, counts: Sequence[int] | None) -> list[int] | None:
    """Elements of each block of a tensor."""
    if tensor is None:
        return None
    if not by_rank:
        return [tensor.numel()]
    return list(counts) if counts else [tensor.numel() // size] * size


def _width(longest: int, item: int, blocks: int, room: int) -> int:
    """Elements that a piece takes of the longest block."""
    each = max(_ALIGNMENT, (room - blocks * _ALIGNMENT) // blocks)
    wanted = max(_SMALLEST // blocks, longest * item // _USUAL)
    return max(1, min(each, wanted) // _ALIGNMENT * _ALIGNMENT // item)


def _clipped(length: int, lo: int, hi: int) -> int:
    return max(0, min(hi, length) - lo)


def _part(lengths: Sequence[int], lo: int, hi: int, start: int) -> TensorPart:
    spans, offset = list[tuple[int, int]](), 0
    for length in lengths:
        spans.append((offset + lo, _clipped(length, lo, hi)))
        offset += length
    return TensorPart(tuple(spans), sum(n for _, n in spans), start)
