"""torch's tensors as the communicator takes them: detached, contiguous, of a type it knows.

Types that it does not reduce (fp8, unsigned 16 to 64 bits) travel as bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from mpitrain.comm.memory.elements import DTYPES


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values without its history, none of them lazily conjugated or negated."""
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    return plain


def known(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as one of a type the communicator moves, over the same memory."""
    return tensor if tensor.dtype in DTYPES else tensor.reshape(-1).view(torch.uint8)


def to_read(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements in order, to be moved: itself, or a copy if it is not contiguous."""
    return known(detached(tensor).contiguous())


class Written:
    """A tensor to write into: `buffer` takes the elements in order, `land()` brings them home if it is a copy."""

    __slots__ = ("_home", "buffer", "whole")

    def __init__(self, tensor: torch.Tensor, *, keep: bool = False) -> None:
        """Take the tensor's memory, or other memory in its place.

        Args:
            tensor: Where the values are to go.
            keep: Whether what it holds now is read, too.
        """
        home = tensor.detach()
        if home.is_contiguous() and not home.is_conj() and not home.is_neg():
            self._home, self.whole = None, home
        else:
            self._home = home
            self.whole = (
                detached(tensor).contiguous() if keep else torch.empty(home.shape, dtype=home.dtype, device=home.device)
            )
        self.buffer = known(self.whole)

    def land(self) -> None:
        """Copy the values into the tensor, where other memory took its place."""
        if self._home is not None:
            self._home.copy_(self.whole)


class Blocks:
    """Tensors one after the other in one buffer: themselves where they lie so already, else copies."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [t.detach() for t in tensors]
        first = self._tensors[0]
        total = sum(t.numel() for t in self._tensors)
        self.sizes = [t.numel() * _width(first) for t in self._tensors]  # elements of `buffer`
        self._together = _adjacent(self._tensors)
        if self._together:
            self.whole = torch.as_strided(first, (total,), (1,), first.storage_offset())
        else:
            self.whole = torch.empty(total, dtype=first.dtype, device=first.device)
        self.buffer = known(self.whole)

    @property
    def even(self) -> bool:
        """Whether all tensors have equally many elements."""
        return len(set(self.sizes)) == 1

    def _parts(self) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        """The tensors and their places in the buffer; none where they lie in it themselves."""
        if self._together:
            return []
        pieces = torch.split(self.whole, [t.numel() for t in self._tensors])
        return [(tensor, piece.view(tensor.shape)) for tensor, piece in zip(self._tensors, pieces, strict=True)]

    def collect(self) -> None:
        """Copy the tensors into the buffer."""
        for tensor, piece in self._parts():
            piece.copy_(tensor)

    def spread(self) -> None:
        """Copy the buffer into the tensors."""
        for tensor, piece in self._parts():
            tensor.copy_(piece)


def row_counts(tensor: torch.Tensor, rows: Sequence[int]) -> list[int] | None:
    """Elements of each rank's block; None where all are equal.

    Args:
        tensor: What is divided along dimension 0.
        rows: The rows of each rank; empty where all get equally many.
    """
    if not rows:
        return None
    each = prod(tensor.shape[1:]) * _width(tensor)
    return [int(n) * each for n in rows]


def _width(tensor: torch.Tensor) -> int:
    """Elements that `known` makes of one."""
    return 1 if tensor.dtype in DTYPES else tensor.element_size()


def _adjacent(tensors: Sequence[torch.Tensor]) -> bool:
    address = tensors[0].data_ptr()
    storage = tensors[0].untyped_storage().data_ptr()
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.dtype != tensors[0].dtype or tensor.is_conj() or tensor.is_neg():
            return False
        if tensor.untyped_storage().data_ptr() != storage or (tensor.numel() and tensor.data_ptr() != address):
            return False
        address += tensor.numel() * tensor.element_size()
    return True
