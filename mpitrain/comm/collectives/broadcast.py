"""broadcast: every rank's vector becomes the root's.

rank 0   .  .            a1 b1
rank 1   a1 b1     ->    a1 b1     root 1
rank 2   .  .            a1 b1
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from mpitrain.comm.algorithms.shared import shared_broadcast
from mpitrain.comm.algorithms.tree import tree_broadcast
from mpitrain.comm.collectives import library
from mpitrain.comm.collectives.arguments import check_rank
from mpitrain.comm.collectives.binding import NOTHING, Binder
from mpitrain.comm.collectives.dispatch import NOT_READY, Dispatcher, Invocation
from mpitrain.comm.collectives.registry import LIBRARY, Algorithm, Algorithms
from mpitrain.comm.collectives.setting import RING_SEGMENT, Setting, segments_of
from mpitrain.comm.memory.board import described
from mpitrain.comm.memory.buffers import as_tensor, bytes_at
from mpitrain.comm.programs.program import Program
from mpitrain.comm.runtime.executor import Compiled
from mpitrain.comm.runtime.work import Work


def _tree(s: Setting) -> Program:
    return tree_broadcast(s.size, s.root, segments_of(s.nbytes, RING_SEGMENT), s.nodes)


def _shared(s: Setting) -> Program:
    return shared_broadcast(s.size, s.root)


ALGORITHMS = Algorithms(
    "broadcast",
    {"mpi": LIBRARY, "shared": Algorithm(_shared, one_node=True, reach=True), "tree": Algorithm(_tree)},
)


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
    tensor = as_tensor(x, written=comm.rank != root)
    check_rank(comm, root)
    call = Invocation(
        "broadcast",
        lambda binder, x: bound(binder, x, root, algorithm),
        (tensor,),
        (comm.rank != root,),
        key=_key(tensor, root, algorithm),
        alike=(root, algorithm),
        placed=tensor if ALGORITHMS.touch(algorithm) else None,
    )
    return comm.dispatch(call, async_op)


def _key(x: Tensor, root: int, algorithm: str) -> tuple[object, ...]:
    return "broadcast", x.data_ptr(), x.numel(), x.dtype, root, algorithm


def bound(binder: Binder, x: Tensor, root: int, algorithm: str) -> Compiled:
    """The operation on a rank's memory."""
    said = partial(described, f"broadcast from rank {root}", x.numel(), x.dtype)
    key = _key(x, root, algorithm)
    return binder.bound(key, lambda: _bind(binder, x, root, algorithm), x, said=said, together=False)


def _bind(binder: Binder, x: Tensor, root: int, algorithm: str) -> Compiled:
    if binder.topology.size == 1 or x.numel() == 0:
        return NOTHING
    setting = binder.setting(x, root=root)
    name = binder.choose(ALGORITHMS, algorithm, setting)
    chosen = ALGORITHMS[name]
    if chosen.program is None:
        pieces = library.pieces(setting.nbytes)
        return Compiled([partial(binder.comm.Bcast, bytes_at(x.data_ptr() + lo, n), root) for lo, n in pieces])
    program = binder.program(chosen, setting)
    arena, neighbours = binder.require_reach(x, ALGORITHMS, name) if chosen.reach else (None, None)
    said = described(f"broadcast from rank {root}", x.numel(), x.dtype, binder.place(x))
    return binder.compile(program, binder.in_place(program, x, neighbours), None, arena, said=said)
