"""The many forms in which torch hands arguments to a process group, as one; and their checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpitrain.backend.failures import ArgumentError
from mpitrain.comm import Communicator

Tensors = Sequence[torch.Tensor]


def listed(tensors: Any) -> list[torch.Tensor]:
    """The tensors as a list, also where one alone was given."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def flat_list(lists: Any) -> list[torch.Tensor]:
    """A list of tensors, given as such or inside another list, which may be empty."""
    if lists and not isinstance(lists[0], torch.Tensor):
        lists = lists[0]
    return list(lists or [])


def joined(lists: Sequence[Tensors]) -> list[torch.Tensor]:
    """The tensors of all lists in one."""
    return [tensor for tensors in lists for tensor in tensors]


def options(options: Any, kind: Callable[[], Any]) -> Any:
    """The options of a reduction.

    Args:
        options: The options; in their place the reduction operation alone may be given, or None.
        kind: Makes options.
    """
    if options is None:
        return kind()
    if hasattr(options, "timeout"):
        return options
    made = kind()
    made.reduceOp = options
    return made


def rooted(options: Any, kind: Callable[[], Any], op: Any = None, *_: Any) -> Any:
    """The options of an operation that has a root.

    Args:
        options: The options; in their place the root may be given.
        kind: Makes options.
        op: The reduction operation, where the root was given.
    """
    if not isinstance(options, int):
        return options
    made = kind()
    made.rootRank = options
    if op is not None:
        made.reduceOp = op
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
