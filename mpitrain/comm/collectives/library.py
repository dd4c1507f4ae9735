"""The caller's memory as mpi4py takes it, for the MPI library's own collectives.

Data that only move are bytes. Reductions name the MPI type of the table in `buffers`. Counts stay below what
every library can take: long vectors are cut into several calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.job.topology import Topology
from mpitrain.comm.job.traffic import Moved
from mpitrain.comm.memory.buffers import MPI_TYPES, memory_at
from mpitrain.comm.memory.elements import LARGEST_COUNT
from mpitrain.comm.programs.rings import blocks_sent


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


def moved(topology: Topology, operation: str, blocks: Sequence[int], root: int = 0) -> Moved:
    """What the library moves on this rank, as far as that can be told; see `mpitrain.comm.programs.rings`.

    Args:
        topology: The ranks.
        operation: Name of the operation.
        blocks: Bytes of each rank's block.
        root: Of an operation that has one.
    """
    inside = between = 0
    for other, nbytes in blocks_sent(operation, topology.rank, blocks, root):
        here = topology.nodes[other] == topology.nodes[topology.rank]
        inside, between = inside + nbytes * here, between + nbytes * (not here)
    return Moved("mpi", inside, between)
