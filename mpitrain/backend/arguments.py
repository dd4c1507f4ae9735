"""Normalization and checks of the arguments that torch passes to a process group, which have many forms.

Tensors are converted to a form that the communicator accepts: detached, contiguous, of a known type. Types that it
cannot reduce (fp8, unsigned 16 to 64 bits) are moved as bytes. An operation on tensors that wrap other tensors becomes
one operation for each inner tensor, issued as one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from mpitrain.backend.base import ArgumentError, translate_error
from mpitrain.backend.work import CoalescedWork, tensors_in
from mpitrain.comm import Communicator
from mpitrain.comm.memory.buffers import inner_tensors
from mpitrain.comm.memory.elements import DTYPES
from mpitrain.errors import InputError

Tensors = Sequence[torch.Tensor]


def as_list(tensors: Any) -> list[torch.Tensor]:
    """Return the tensors as a list; a single tensor becomes a list of one."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def flat_list(lists: Any) -> list[torch.Tensor]:
    """Return a list of tensors that was passed as such or inside another list; the outer list may be empty."""
    if lists and not isinstance(lists[0], torch.Tensor):
        lists = lists[0]
    return list(lists or [])


def as_options(argument: Any, kind: Callable[[], Any], op: Any = None, *_: Any) -> Any:
    """Return the options object of an operation, from any of the forms in which torch passes it.

    Args:
        argument: Options, or instead of them the root, the reduction operation or None.
        kind: Class of the options.
        op: Reduction operation, if `argument` is the root.
    """
    if hasattr(argument, "timeout"):
        return argument
    result = kind()
    if isinstance(argument, int):
        result.rootRank, argument = argument, op
    if argument is not None:
        result.reduceOp = argument
    return result


def check_length(comm: Communicator, name: str, which: str, lists: Sequence[Tensors]) -> None:
    """Check that each list has one tensor per rank, all of one dtype.

    Args:
        comm: Communicator of the group.
        name: Name of the operation in messages.
        which: Name of the lists in messages, "input" or "output".
        lists: Lists of tensors.

    Raises:
        ArgumentError: A list has another length or several dtypes.
    """
    for tensors in lists:
        if len(tensors) != comm.size:
            raise ArgumentError(f"{name}: {len(tensors)} {which} tensors for {comm.size} ranks; give one for each")
        if len({t.dtype for t in tensors}) > 1:
            raise ArgumentError(f"{name}: the {which} tensors have different dtypes; convert them to one")


def check_splits(comm: Communicator, which: str, tensor: torch.Tensor, rows: Sequence[int]) -> None:
    """Check that the rows for all ranks sum to the rows of the tensor.

    Args:
        comm: Communicator of the group.
        which: Name of the tensor in messages, "input" or "output".
        tensor: Tensor that is divided along dimension 0.
        rows: Number of rows for each rank; empty if all get the same number.

    Raises:
        ArgumentError: They do not, or the tensor cannot be divided evenly.
    """
    length = tensor.shape[0] if tensor.dim() else 1
    if rows and (len(rows) != comm.size or sum(rows) != length):
        raise ArgumentError(
            f"all_to_all_single: {which} splits {list(rows)} must be {comm.size} numbers that sum to the "
            f"{length} rows of the {which} tensor"
        )
    if not rows and length % comm.size:
        raise ArgumentError(
            f"all_to_all_single: the {which} tensor has {length} rows, not a multiple of {comm.size} ranks; "
            "pad it or pass split sizes"
        )


def by_inner_tensors(method: Callable[..., dist.Work]) -> Callable[..., Any]:
    """Wrap a method of a process group, so that tensors made of others become one call per inner tensor.

    Args:
        method: Method whose arguments are tensors, or nested lists of tensors.
    """

    @functools.wraps(method)
    def call(group: Any, *arguments: Any, **options: Any) -> dist.Work:
        tensors = list(tensors_in(arguments))
        if all(type(tensor) is torch.Tensor for tensor in tensors):
            return method(group, *arguments, **options)
        try:
            numbers = {len(inner_tensors(tensor)) for tensor in tensors}
        except InputError as error:
            raise translate_error(error) from None
        if len(numbers) != 1:
            kinds = ", ".join(sorted({f"{type(x).__name__} ({len(inner_tensors(x))})" for x in tensors}))
            raise ArgumentError(f"{method.__name__}: all tensors must wrap the same number of tensors, not {kinds}")
        works = [method(group, *(_part(value, i) for value in arguments), **options) for i in range(numbers.pop())]
        return works[0] if len(works) == 1 else CoalescedWork(works)

    return call


def _part(value: Any, number: int) -> Any:
    """Return a copy of the value in which each tensor is replaced by its inner tensor `number`."""
    if isinstance(value, torch.Tensor):
        return inner_tensors(value)[number]
    return [_part(one, number) for one in value] if isinstance(value, list | tuple) else value


def detach_resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without autograd history, and not lazily conjugated or negated."""
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    return plain


def as_movable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a contiguous tensor in an element type that the communicator can move: its own, or bytes."""
    return tensor if tensor.dtype in DTYPES else tensor.reshape(-1).view(torch.uint8)


def as_source(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements in order, in a form that can be moved: its own memory, or a copy."""
    return as_movable(detach_resolved(tensor).contiguous())


class Destination:
    """Destination of an operation, which writes to `buffer`; `copy_back()` then copies to the tensor if needed."""

    __slots__ = ("_original", "buffer", "whole")

    def __init__(self, tensor: torch.Tensor, *, keep: bool = False) -> None:
        """Use the tensor's memory if it is contiguous, else new memory.

        Args:
            tensor: Destination.
            keep: If true, the new memory starts with the tensor's values, for operations that also read them.
        """
        original = tensor.detach()
        if original.is_contiguous() and not original.is_conj() and not original.is_neg():
            self._original, self.whole = None, original
        else:
            self._original = original
            self.whole = (
                detach_resolved(tensor).contiguous()
                if keep
                else torch.empty(original.shape, dtype=original.dtype, device=original.device)
            )
        self.buffer = as_movable(self.whole)

    def copy_back(self) -> None:
        """Copy the values to the tensor, unless they are already in its memory."""
        if self._original is not None:
            self._original.copy_(self.whole)


class Blocks:
    """Tensors one after the other in one buffer: their own memory if they are adjacent there, else copies."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [t.detach() for t in tensors]
        first = self._tensors[0]
        total = sum(t.numel() for t in self._tensors)
        self.sizes = [t.numel() * _width(first) for t in self._tensors]  # elements of `buffer`
        self._is_adjacent = _are_adjacent(self._tensors)
        if self._is_adjacent:
            self.whole = torch.as_strided(first, (total,), (1,), first.storage_offset())
        else:
            self.whole = torch.empty(total, dtype=first.dtype, device=first.device)
        self.buffer = as_movable(self.whole)

    @property
    def is_even(self) -> bool:
        """True if all tensors have the same number of elements."""
        return len(set(self.sizes)) == 1

    def _parts(self) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        """Return pairs of each tensor and its copy in the buffer; empty if the buffer is the tensors' own memory."""
        if self._is_adjacent:
            return []
        pieces = torch.split(self.whole, [t.numel() for t in self._tensors])
        return [(tensor, piece.view(tensor.shape)) for tensor, piece in zip(self._tensors, pieces, strict=True)]

    def copy_in(self) -> None:
        """Copy the tensors to the buffer."""
        for tensor, piece in self._parts():
            piece.copy_(tensor)

    def copy_out(self) -> None:
        """Copy the buffer to the tensors."""
        for tensor, piece in self._parts():
            tensor.copy_(piece)


def row_counts(tensor: torch.Tensor, rows: Sequence[int]) -> list[int] | None:
    """Return the number of elements of each rank's block; None if all blocks are equal.

    Args:
        tensor: Tensor that is divided along dimension 0.
        rows: Number of rows for each rank; empty if all get the same number.
    """
    if not rows:
        return None
    each = prod(tensor.shape[1:]) * _width(tensor)
    return [int(n) * each for n in rows]


def _width(tensor: torch.Tensor) -> int:
    """Return how many elements `as_movable` makes of one element."""
    return 1 if tensor.dtype in DTYPES else tensor.element_size()


def _are_adjacent(tensors: Sequence[torch.Tensor]) -> bool:
    address = tensors[0].data_ptr()
    storage = tensors[0].untyped_storage().data_ptr()
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.dtype != tensors[0].dtype or tensor.is_conj() or tensor.is_neg():
            return False
        if tensor.untyped_storage().data_ptr() != storage or (tensor.numel() and tensor.data_ptr() != address):
            return False
        address += tensor.numel() * tensor.element_size()
    return True
