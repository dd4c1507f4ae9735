"""The many forms in which torch hands arguments to a process group, as one; and their checks.

Tensors become what the communicator takes: detached, contiguous, of a type it knows. Types that it does not reduce
(fp8, unsigned 16 to 64 bits) travel as bytes. An operation on tensors that wrap others becomes one for each inner
tensor, issued as one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from mpitrain.backend.base import ArgumentError, translation
from mpitrain.backend.work import Several, tensors_in
from mpitrain.comm import Communicator
from mpitrain.comm.memory.buffers import inner_tensors
from mpitrain.comm.memory.elements import DTYPES
from mpitrain.errors import InputError

Tensors = Sequence[torch.Tensor]


def listed(tensors: Any) -> list[torch.Tensor]:
    """The tensors as a list, also where one alone was given."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def flat_list(lists: Any) -> list[torch.Tensor]:
    """A list of tensors, given as such or inside another list, which may be empty."""
    if lists and not isinstance(lists[0], torch.Tensor):
        lists = lists[0]
    return list(lists or [])


def options(given: Any, kind: Callable[[], Any], op: Any = None, *_: Any) -> Any:
    """Return the options of an operation.

    Args:
        given: The options; in their place may stand the root, the reduction operation, or None.
        kind: Makes options.
        op: The reduction operation, where the root was given.
    """
    if hasattr(given, "timeout"):
        return given
    made = kind()
    if isinstance(given, int):
        made.rootRank, given = given, op
    if given is not None:
        made.reduceOp = given
    return made


def check_length(comm: Communicator, name: str, which: str, lists: Sequence[Tensors]) -> None:
    """Make sure that each list has a tensor for each rank, all of one type.

    Args:
        comm: The group's communicator.
        name: The operation's name in messages.
        which: What the lists are called there.
        lists: The lists.

    Raises:
        ArgumentError: One has not.
    """
    for tensors in lists:
        if len(tensors) != comm.size:
            raise ArgumentError(f"{name}: {len(tensors)} {which} tensors for {comm.size} ranks; give one for each")
        if len({t.dtype for t in tensors}) > 1:
            raise ArgumentError(f"{name}: the {which} tensors are of several types; make them the same")


def check_splits(comm: Communicator, which: str, tensor: torch.Tensor, rows: Sequence[int]) -> None:
    """Make sure that the rows for each rank sum to the tensor's.

    Args:
        comm: The group's communicator.
        which: What the tensor is called in messages.
        tensor: The tensor whose dimension 0 is divided.
        rows: How many rows go to each rank; empty where all get equally many.

    Raises:
        ArgumentError: They do not.
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
            "pad it or give split sizes"
        )


def by_inner_tensors(method: Callable[..., dist.Work]) -> Callable[..., Any]:
    """Have a method of a process group called once for each inner tensor of the tensors that it is given.

    Args:
        method: Takes tensors, and lists of them of any depth.
    """

    @functools.wraps(method)
    def call(group: Any, *arguments: Any, **options: Any) -> dist.Work:
        tensors = list(tensors_in(arguments))
        if all(type(tensor) is torch.Tensor for tensor in tensors):
            return method(group, *arguments, **options)
        try:
            numbers = {len(inner_tensors(tensor)) for tensor in tensors}
        except InputError as error:
            raise translation(error) from None
        if len(numbers) != 1:
            made = ", ".join(sorted({f"{type(x).__name__} ({len(inner_tensors(x))})" for x in tensors}))
            raise ArgumentError(f"{method.__name__}: the tensors must be made of equally many tensors, not {made}")
        works = [method(group, *(_part(value, i) for value in arguments), **options) for i in range(numbers.pop())]
        return works[0] if len(works) == 1 else Several(works)

    return call


def _part(value: Any, number: int) -> Any:
    """Return a value with inner tensor `number` in place of each tensor."""
    if isinstance(value, torch.Tensor):
        return inner_tensors(value)[number]
    return [_part(one, number) for one in value] if isinstance(value, list | tuple) else value


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
