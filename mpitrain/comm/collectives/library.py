"""The MPI library's own collectives as calls on addresses.

Data that only move are bytes. Reductions name the MPI type of the table in `buffers`. Counts stay below what
every library can take: long vectors are cut into several calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from mpi4py import MPI

from mpitrain.comm.memory.buffers import LARGEST_COUNT, MPI_TYPES, bytes_at, memory_at
from mpitrain.comm.runtime.kernels import Reduction
from mpitrain.comm.runtime.ordering import Call


def _typed(address: int, numel: int, dtype: torch.dtype) -> list[Any]:
    return [memory_at(address, numel * dtype.itemsize), numel, MPI_TYPES[dtype]]


def _raw(address: int, counts: Sequence[int], item: int) -> list[Any]:
    """A buffer of bytes in consecutive blocks of `counts` elements."""
    sizes = [count * item for count in counts]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [memory_at(address, sum(sizes)), sizes, starts, MPI.BYTE]


def _pieces(numel: int) -> list[tuple[int, int]]:
    return [(lo, min(LARGEST_COUNT, numel - lo)) for lo in range(0, numel, LARGEST_COUNT)]


def all_reduce(comm: MPI.Comm, address: int, numel: int, reduction: Reduction) -> list[Call]:
    item, dtype = reduction.dtype.itemsize, reduction.dtype
    return [
        partial(comm.Allreduce, MPI.IN_PLACE, _typed(address + lo * item, n, dtype), reduction.mpi_op)
        for lo, n in _pieces(numel)
    ]


def reduce(comm: MPI.Comm, address: int, numel: int, root: int, reduction: Reduction) -> list[Call]:
    calls: list[Call] = []
    for lo, n in _pieces(numel):
        buffer = _typed(address + lo * reduction.dtype.itemsize, n, reduction.dtype)
        send, receive = (MPI.IN_PLACE, buffer) if comm.rank == root else (buffer, None)
        calls.append(partial(comm.Reduce, send, receive, reduction.mpi_op, root))
    return calls


def broadcast(comm: MPI.Comm, address: int, nbytes: int, root: int) -> list[Call]:
    return [partial(comm.Bcast, bytes_at(address + lo, n), root) for lo, n in _pieces(nbytes)]


def reduce_scatter(comm: MPI.Comm, out: int, x: int, counts: Sequence[int], reduction: Reduction) -> list[Call]:
    send = _typed(x, sum(counts), reduction.dtype)
    receive = _typed(out, counts[comm.rank], reduction.dtype)
    return [partial(comm.Reduce_scatter, send, receive, list(counts), reduction.mpi_op)]


def all_gather(comm: MPI.Comm, out: int, counts: Sequence[int], item: int) -> list[Call]:
    """In place: the rank's own block already lies in out."""
    return [partial(comm.Allgatherv, MPI.IN_PLACE, _raw(out, counts, item))]


def gather(comm: MPI.Comm, out: int, x: int, count: int, item: int, root: int) -> list[Call]:
    everything = [memory_at(out, count * item * comm.size), count * item, MPI.BYTE] if comm.rank == root else None
    return [partial(comm.Gather, bytes_at(x, count * item), everything, root)]


def scatter(comm: MPI.Comm, out: int, x: int, count: int, item: int, root: int) -> list[Call]:
    everything = [memory_at(x, count * item * comm.size), count * item, MPI.BYTE] if comm.rank == root else None
    return [partial(comm.Scatter, everything, bytes_at(out, count * item), root)]


def all_to_all(comm: MPI.Comm, out: int, x: int, received: Sequence[int], sent: Sequence[int], item: int) -> list[Call]:
    return [partial(comm.Alltoallv, _raw(x, sent, item), _raw(out, received, item))]
