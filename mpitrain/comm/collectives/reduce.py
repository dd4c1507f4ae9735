"""reduce: the root's vector becomes the reduction of all vectors; the others stay as they were.

rank 0   a0 b0           a0 b0
rank 1   a1 b1     ->    a  b      a = a0 + a1 + a2, root 1
rank 2   a2 b2           a2 b2
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpitrain.comm.collectives import arguments
from mpitrain.comm.collectives.binding import NOTHING, Binder, CollectiveOperation, scaling
from mpitrain.comm.collectives.dispatch import NOT_READY, Dispatcher
from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.memory.board import described
from mpitrain.comm.memory.elements import HALVES
from mpitrain.comm.programs.rings import even_blocks
from mpitrain.comm.runtime.executor import Compiled
from mpitrain.comm.runtime.kernels import Call, Reduction
from mpitrain.comm.runtime.work import Work
from mpitrain.comm.selection import REDUCE, never

ALGORITHMS = REDUCE  # others may add theirs, see `registry`


def reduce(
    comm: Dispatcher, x: Any, root: int, op: str = "sum", algorithm: str = "auto", async_op: bool = False
) -> Work | None:
    """Reduce every rank's x element by element; the root gets the result in its x. Collective.

    Args:
        x: A contiguous tensor or array, of one size and type on all ranks; it stays as it is on all but the root.
        root: The rank that gets the result.
        op: sum, product, min, max or avg.
        algorithm: auto, mpi, tree or shared, or one that was registered. Tree stands in for mpi in sums of 8-bit and
            16-bit integers, see `all_reduce`.
        async_op: Return at once with a `Work`; x must not be touched before that is complete.

    Raises:
        InputError: x cannot be communicated, or root, op or algorithm is not known or not possible for it.
        CommunicationError: MPI fails, or ranks of a node call different operations.
    """
    try:
        ready = comm.ready["reduce", x.data_ptr(), x.numel(), x.dtype, op, root, algorithm]
    except NOT_READY:
        pass
    else:
        if not async_op and x.is_contiguous():
            ready(x)
            return None
    return comm.call(OPERATION, async_op, (x,), (comm.rank == root,), op, root, algorithm)


def _bind(binder: Binder, x: Tensor, op: str, root: int, algorithm: str) -> Compiled:
    reduction = Reduction.of(op, x.dtype, binder.topology.size)
    if binder.topology.size == 1 or x.numel() == 0:
        return NOTHING
    setting, at_root = binder.setting(x, root=root), binder.topology.rank == root
    name = binder.choose(ALGORITHMS, algorithm, setting)
    chosen = ALGORITHMS[name]
    if x.dtype in HALVES and not chosen.reach:
        return binder.widened(x, lambda wide: _bind(binder, wide, op, root, name), back=at_root)
    if chosen.program is None and reduction.library_saturates:
        return _bind(binder, x, op, root, "tree")
    if chosen.program is None:
        calls = [*_by_library(binder, x, root, reduction), *(scaling(x, reduction) if at_root else ())]
        shares = even_blocks(x.nbytes, binder.topology.size)
        return Compiled(calls, moved=arguments.moved_by_library(binder.topology, "reduce", shares, root))
    program = binder.program(chosen, setting)
    if chosen.reach:
        arena, neighbours = binder.require_reach(x, ALGORITHMS, name)
        said = _said(binder, x, op, root, name, binder.place(x))
        return binder.compile(program, binder.in_place(program, x, neighbours), reduction, arena, said=said)
    layout = binder.in_place(program, x)
    if at_root:
        return binder.compile(program, layout, reduction)
    sums = torch.empty(x.numel(), dtype=x.dtype)  # partial sums of other ranks than the root: their x stays
    inner = binder.compile(program, replace(layout, target=sums.data_ptr()), reduction)
    return Compiled([inner], [inner, sums])


def _said(binder: Binder, x: Tensor, op: str, root: int, algorithm: str, place: str = "") -> str:
    return described(f"reduce to rank {root}", x.numel(), x.dtype, op, place)


OPERATION = CollectiveOperation(
    "reduce",
    1,
    _bind,
    _said,
    never,
    parameters=("op", "root", "algorithm"),
    by_rank=(False,),
    in_place=True,
    placed=lambda rank, x, op, root, algorithm: ALGORITHMS.placed(algorithm, x),
)


def _by_library(binder: Binder, x: Tensor, root: int, reduction: Reduction) -> list[Call]:
    comm, calls = binder.comm, list[Call]()
    for buffer in arguments.typed_pieces(x):
        send, receive = (MPI.IN_PLACE, buffer) if comm.rank == root else (buffer, None)
        calls.append(partial(comm.Reduce, send, receive, reduction.mpi_op, root))
    return calls
