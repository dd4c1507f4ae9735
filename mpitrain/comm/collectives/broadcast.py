"""broadcast: every rank's vector becomes the root's.

rank 0   .  .            a1 b1
rank 1   a1 b1     ->    a1 b1     root 1
rank 2   .  .            a1 b1
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from mpitrain.comm.collectives import arguments
from mpitrain.comm.collectives.binding import NOTHING, Binder, CollectiveOperation
from mpitrain.comm.collectives.dispatch import NOT_READY, Dispatcher
from mpitrain.comm.memory.board import described
from mpitrain.comm.memory.buffers import bytes_at
from mpitrain.comm.programs.rings import even_blocks
from mpitrain.comm.runtime.executor import Compiled
from mpitrain.comm.runtime.work import Work
from mpitrain.comm.selection import BROADCAST, never

ALGORITHMS = BROADCAST  # others may add theirs, see `registry`


def broadcast(comm: Dispatcher, x: Any, root: int, algorithm: str = "auto", async_op: bool = False) -> Work | None:
    """Copy the root's x into every rank's x. Collective.

    Args:
        x: A contiguous tensor or array, of one size and type on all ranks.
        root: The rank whose x all get.
        algorithm: auto, mpi, tree or shared, or one that was registered.
        async_op: Return at once with a `Work`; x must not be touched before that is complete.

    Raises:
        InputError: x cannot be communicated, or root or algorithm is not known or not possible for it.
        CommunicationError: MPI fails, or ranks of a node call different operations.
    """
    try:
        ready = comm.ready["broadcast", x.data_ptr(), x.numel(), x.dtype, root, algorithm]
    except NOT_READY:
        pass
    else:
        if not async_op and x.is_contiguous():
            ready(x)
            return None
    return comm.call(OPERATION, async_op, (x,), (comm.rank != root,), root, algorithm)


def _bind(binder: Binder, x: Tensor, root: int, algorithm: str) -> Compiled:
    if binder.topology.size == 1 or x.numel() == 0:
        return NOTHING
    setting = binder.setting(x, root=root)
    name = binder.choose(ALGORITHMS, algorithm, setting)
    chosen = ALGORITHMS[name]
    if chosen.program is None:
        pieces = arguments.pieces(setting.nbytes)
        calls = [partial(binder.comm.Bcast, bytes_at(x.data_ptr() + lo, n), root) for lo, n in pieces]
        shares = even_blocks(x.nbytes, binder.topology.size)
        return Compiled(calls, moved=arguments.moved_by_library(binder.topology, "broadcast", shares, root))
    program = binder.program(chosen, setting)
    arena, neighbours = binder.require_reach(x, ALGORITHMS, name) if chosen.reach else (None, None)
    said = _said(binder, x, root, name, binder.place(x))
    return binder.compile(program, binder.in_place(program, x, neighbours), None, arena, said=said)


def _said(binder: Binder, x: Tensor, root: int, algorithm: str, place: str = "") -> str:
    return described(f"broadcast from rank {root}", x.numel(), x.dtype, place)


OPERATION = CollectiveOperation(
    "broadcast",
    1,
    _bind,
    _said,
    never,
    parameters=("root", "algorithm"),
    by_rank=(False,),
    placed=lambda rank, x, root, algorithm: ALGORITHMS.placed(algorithm, x),
)
