"""The arguments of collectives: checked before anything is sent, and as mpi4py takes them for the library's own calls.

Data that only move are bytes. Reductions name the MPI type of the table in `buffers`. Counts stay below what every
library can take: long vectors are cut into several calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.job.topology import Member, Topology
from mpitrain.comm.job.traffic import Moved
from mpitrain.comm.memory.buffers import MPI_TYPES, memory_at
from mpitrain.comm.memory.elements import LARGEST_COUNT
from mpitrain.comm.programs.rings import blocks_sent, even_shares
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


def typed(address: int, numel: int, dtype: torch.dtype) -> list[Any]:
    """Elements that the library is to compute with."""
    return [memory_at(address, numel * dtype.itemsize), numel, MPI_TYPES[dtype]]


def typed_pieces(x: torch.Tensor) -> list[list[Any]]:
    """x for the library to compute with, in as many calls as it takes."""
    return [typed(x.data_ptr() + lo * x.element_size(), n, x.dtype) for lo, n in pieces(x.numel())]


def even_blocks(address: int, count: int, blocks: int, item: int) -> list[Any]:
    """Bytes in consecutive blocks of `count` elements each."""
    return [memory_at(address, count * item * blocks), count * item, MPI.BYTE]


def uneven_blocks(address: int, counts: Sequence[int], item: int) -> list[Any]:
    """Bytes in consecutive blocks of `counts` elements."""
    sizes = [count * item for count in counts]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [memory_at(address, sum(sizes)), sizes, starts, MPI.BYTE]


def pieces(numel: int) -> list[tuple[int, int]]:
    """Offset and length of what is passed in one call."""
    return [(lo, min(LARGEST_COUNT, numel - lo)) for lo in range(0, numel, LARGEST_COUNT)]


def moved_by_library(topology: Topology, operation: str, blocks: Sequence[int] | int, root: int = 0) -> Moved:
    """What the library moves on this rank, as far as that can be told; see `mpitrain.comm.programs.rings`.

    Args:
        topology: The ranks.
        operation: Name of the operation.
        blocks: Bytes of each rank's block, or of a whole vector that has no blocks.
        root: Of an operation that has one.
    """
    inside = between = 0
    shares = even_shares(blocks, topology.size) if isinstance(blocks, int) else blocks
    for other, nbytes in blocks_sent(operation, topology.rank, shares, root):
        here = topology.nodes[other] == topology.nodes[topology.rank]
        inside, between = inside + nbytes * here, between + nbytes * (not here)
    return Moved("mpi", inside, between)
