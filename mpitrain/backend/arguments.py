"""The many forms in which torch hands arguments to a process group, as one; and their checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpitrain.backend.failures import ArgumentError
from mpitrain.comm import Communicator

Tensors = Sequence[torch.Tensor]


def listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def flat_list(lists: Any) -> list[torch.Tensor]:
    """A list of tensors, given as such or inside another list, which may be empty."""
    if lists and not isinstance(lists[0], torch.Tensor):
        lists = lists[0]
    return list(lists or [])


def joined(lists: Sequence[Tensors]) -> list[torch.Tensor]:
    return [tensor for tensors in lists for tensor in tensors]


def options(options: Any, kind: Callable[[], Any]) -> Any:
    """The options, which may be given as a reduction operation alone, or not at all."""
    if options is None:
        return kind()
    if hasattr(options, "timeout"):
        return options
    made = kind()
    made.reduceOp = options
    return made


def rooted(options: Any, kind: Callable[[], Any], op: Any = None, *_: Any) -> Any:
    """The options, in whose place the root may be given, and then the reduction operation."""
    if not isinstance(options, int):
        return options
    made = kind()
    made.rootRank = options
    if op is not None:
        made.reduceOp = op
    return made


def check_length(comm: Communicator, name: str, which: str, lists: Sequence[Tensors]) -> None:
    """Raise ArgumentError unless each list has a tensor for each rank, all of one type."""
    for tensors in lists:
        if len(tensors) != comm.size:
            raise ArgumentError(f"{name}: {len(tensors)} {which} tensors for {comm.size} ranks; give one for each")
        if len({t.dtype for t in tensors}) > 1:
            raise ArgumentError(f"{name}: the {which} tensors are of several types; make them the same")


def check_splits(comm: Communicator, which: str, tensor: torch.Tensor, rows: Sequence[int]) -> None:
    """Raise ArgumentError unless the rows for each rank, none: equal numbers, sum to the tensor's."""
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
