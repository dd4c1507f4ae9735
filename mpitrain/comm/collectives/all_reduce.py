"""all_reduce: every rank's vector becomes the reduction of all vectors.

rank 0   a0 b0 c0        a b c
rank 1   a1 b1 c1   ->   a b c      a = a0 + a1 + a2
rank 2   a2 b2 c2        a b c
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpitrain.comm.collectives import all_gather, arguments
from mpitrain.comm.collectives.binding import NOTHING, Binder, CollectiveOperation, Invocation, scaling
from mpitrain.comm.collectives.dispatch import NOT_READY, Dispatcher
from mpitrain.comm.compression import Bucket, Compression
from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.memory.board import described
from mpitrain.comm.memory.elements import HALVES
from mpitrain.comm.programs.rings import even_blocks
from mpitrain.comm.runtime.executor import Compiled
from mpitrain.comm.runtime.kernels import Call, Reduction
from mpitrain.comm.runtime.work import Work
from mpitrain.comm.selection import ALL_REDUCE, all_reduce_algorithm, always
from mpitrain.errors import InputError

ALGORITHMS = ALL_REDUCE  # others may add theirs, see `registry`


def all_reduce(
    comm: Dispatcher,
    x: Any,
    op: str = "sum",
    algorithm: str = "auto",
    async_op: bool = False,
    *,
    compression: Compression | Bucket | None = None,
    reproducible: bool = False,
) -> Work | None:
    """Reduce every rank's x element by element; each gets the result in its x. Collective.

    Args:
        x: A contiguous tensor or array, of one size and type on all ranks.
        op: sum, product, min, max or avg. Integers wrap where they overflow; their average is the sum divided toward
            zero.
        algorithm: auto, mpi, ring, tree, halving, shared or two_level, or one that was registered. Halving stands in
            for mpi in sums of 8-bit and 16-bit integers: those of Open MPI saturate.
        async_op: Return at once with a `Work`; x must not be touched before that is complete.
        compression: Send fewer bytes for about the sum or avg, see `mpitrain.comm.compression`; alike on all ranks.
        reproducible: Reduce in the order of a fixed binary tree over the ranks, so that the bits depend neither on
            the algorithm nor on where the ranks are.

    Raises:
        InputError: x cannot be communicated, or op or algorithm is not known or not possible for it.
        CommunicationError: MPI fails, or ranks of a node call different operations.
    """
    try:
        ready = comm.ready["all_reduce", x.data_ptr(), x.numel(), x.dtype, op, algorithm, reproducible]
    except NOT_READY:
        pass
    else:
        if not async_op and compression is None and x.is_contiguous():
            ready(x)
            return None
    if compression is not None:
        compressed = partial(_compressed, comm, compression, op, algorithm, reproducible)
        return comm.begin(compressed, async_op, (x,), (True,))
    return comm.call(OPERATION, async_op, (x,), (True,), op, algorithm, reproducible)


Perform = Callable[..., None]  # of the tensors, which of them it writes, and what else the operation is given


class Channel:
    """Stands for a `Communicator` inside one of its operations, so that all of that stays one operation."""

    def __init__(self, size: int, all_reduce: Perform, all_gather: Perform) -> None:
        """size: number of ranks. all_reduce, all_gather: perform these operations."""
        self.size = size
        self._all_reduce, self._all_gather = all_reduce, all_gather

    def all_reduce(
        self, x: torch.Tensor, op: str = "sum", algorithm: str = "auto", *, reproducible: bool = False
    ) -> None:
        self._all_reduce((x,), (True,), op, algorithm, reproducible)

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        self._all_gather((out, x), (True, False), "auto", None)


def _compressed(
    comm: Dispatcher, compression: Compression | Bucket, op: str, algorithm: str, reproducible: bool, x: Tensor
) -> Invocation:
    """One operation of several collectives, all in the thread that carries it out."""
    compression.check(x.dtype, op)
    if reproducible:
        raise InputError("a compressed sum depends on the number of ranks; leave out reproducible or compression")

    def bind(binder: Binder, x: Tensor) -> Call:
        perform = partial(comm.perform, binder)
        channel = Channel(comm.size, partial(perform, OPERATION), partial(perform, all_gather.OPERATION))
        return partial(compression.all_reduce, channel, x, op, algorithm)

    alike = op, algorithm, str(compression)
    by = (compression.compression if isinstance(compression, Bucket) else compression).name
    return Invocation("all_reduce", bind, (x,), (True,), alike=alike, on_device=True, algorithm=by)


def _bind(binder: Binder, x: Tensor, op: str, algorithm: str, reproducible: bool, said: str | None = None) -> Compiled:
    """said: the caller's arguments, where x is not the caller's."""
    reduction = Reduction.of(op, x.dtype, binder.topology.size)
    if binder.topology.size == 1 or x.numel() == 0:
        return NOTHING
    setting = binder.setting(x, reproducible=reproducible)
    if said is None:
        said = _said(binder, x, op, algorithm, reproducible, binder.place(x))
    name = binder.choose(ALGORITHMS, algorithm, setting)
    chosen, neighbours = all_reduce_algorithm(name, setting), None
    if chosen.program is None:
        if x.dtype in HALVES:
            return binder.widened(x, lambda wide: _bind(binder, wide, op, name, False))
        if reduction.library_saturates:
            return _bind(binder, x, op, "halving", False)
        call, pieces = binder.comm.Allreduce, arguments.typed_pieces(x)
        calls = [partial(call, MPI.IN_PLACE, piece, reduction.mpi_op) for piece in pieces]
        shares = even_blocks(x.nbytes, binder.topology.size)
        return Compiled(
            [*calls, *scaling(x, reduction)], moved=arguments.moved_by_library(binder.topology, "all_reduce", shares)
        )
    if chosen.reach:
        arena, neighbours = binder.reach(x)
        if neighbours is not None:
            setting = replace(setting, memory="reachable")
        elif arena is None and (not chosen.stages or binder.staging() is None):
            return _bind(binder, x, op, "ring", reproducible)
    program = binder.program(chosen, setting)
    if x.dtype in HALVES and program.sends_partial_sums:
        return binder.widened(x, lambda wide: _bind(binder, wide, op, name, reproducible, said))
    if chosen.reach and setting.memory == "private" and not program.slots:
        return binder.through_staging(x, lambda piece: _bind(binder, piece, op, name, reproducible, said))
    return binder.compile(program, binder.in_place(program, x, neighbours), reduction, binder.arena_of(x), said=said)


def _said(binder: Binder, x: Tensor, op: str, algorithm: str, reproducible: bool, place: str = "") -> str:
    return described("all_reduce", x.numel(), x.dtype, op, "reproducible" * reproducible, place)


OPERATION = CollectiveOperation(
    "all_reduce",
    1,
    _bind,
    _said,
    always,
    parameters=("op", "algorithm", "reproducible"),
    by_rank=(False,),
    in_place=True,
    placed=lambda rank, x, op, algorithm, reproducible: ALGORITHMS.placed(algorithm, x),
)
