"""What the arguments of collectives must be: checked before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpitrain.comm.job.topology import Member
from mpitrain.errors import InputError


def check_rank(comm: Member, rank: int) -> None:
    """Raise InputError unless the communicator has the rank."""
    if not 0 <= rank < comm.size:
        raise InputError(f"there is no rank {rank} in {comm.label}; ranks are 0 to {comm.size - 1}")


def block_sizes(
    comm: Member,
    name: str,
    part: torch.Tensor | None,
    whole: torch.Tensor,
    counts: Sequence[int] | None,
    part_name: str,
    whole_name: str,
) -> list[int]:
    """Return the elements of each rank's block of `whole`, checked against this rank's part."""
    if part is not None and part.dtype != whole.dtype:
        raise InputError(f"{name}: {part_name} is {part.dtype}, {whole_name} is {whole.dtype}; make them the same")
    if counts is None:
        each, rest = divmod(whole.numel(), comm.size)
        if rest:
            raise InputError(
                f"{name}: {whole_name} has {whole.numel()} elements, not a multiple of {comm.size} ranks; pad it "
                "or give counts"
            )
        blocks = [each] * comm.size
    else:
        blocks = [int(n) for n in counts]
        if len(blocks) != comm.size or min(blocks) < 0 or sum(blocks) != whole.numel():
            raise InputError(
                f"{name}: counts {blocks} must be {comm.size} numbers that sum to {whole_name}'s {whole.numel()}"
            )
    if part is not None and part.numel() != blocks[comm.rank]:
        raise InputError(
            f"{name}: {part_name} has {part.numel()} elements, rank {comm.rank}'s block has {blocks[comm.rank]}; "
            f"{whole_name} is one block per rank"
        )
    return blocks


def unequal(counts: Sequence[int] | None) -> str:
    """Block sizes in words, where the number of all elements does not tell them."""
    return f"in blocks of {list(counts)}" if counts and min(counts) != max(counts) else ""


def if_unequal(counts: Sequence[int]) -> tuple[int, ...] | None:
    """Block sizes; None where all are equal, whose size the tensors tell."""
    return tuple(counts) if min(counts) != max(counts) else None


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the memories of two contiguous tensors have bytes in common."""
    a_end, b_end = a.data_ptr() + a.numel() * a.element_size(), b.data_ptr() + b.numel() * b.element_size()
    return a.data_ptr() < b_end and b.data_ptr() < a_end
