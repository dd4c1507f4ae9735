"""gather: the root gets the blocks of all ranks.

rank 0   a               .
rank 1      b       ->   a b c     root 1
rank 2         c         .
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from mpitrain.comm.algorithms.direct import direct_gather
from mpitrain.comm.collectives import library
from mpitrain.comm.collectives.arguments import block_sizes, check_rank
from mpitrain.comm.collectives.binding import Binder
from mpitrain.comm.collectives.dispatch import Dispatcher
from mpitrain.comm.collectives.operation import NOT_READY, CollectiveOperation
from mpitrain.comm.collectives.wrapped import for_each_inner, wraps
from mpitrain.comm.memory.board import described
from mpitrain.comm.memory.buffers import as_tensor, bytes_at
from mpitrain.comm.memory.elements import LARGEST_COUNT
from mpitrain.comm.runtime.executor import Compiled, Layout
from mpitrain.comm.runtime.work import Work
from mpitrain.comm.selection.registry import Algorithm, never

_DIRECT = Algorithm(lambda s: direct_gather(s.size, s.root, s.nodes))


def gather(comm: Dispatcher, out: Any, x: Any, root: int, async_op: bool = False) -> Work | None:
    """Gather every rank's x into the root's out, one after the other in order of rank. Collective.

    Args:
        out: On the root a contiguous tensor or array of all blocks; None on the other ranks.
        x: This rank's block: a contiguous tensor or array, of one size and type on all ranks.
        root: The rank that gets the blocks.
        async_op: Return at once with a `Work`; neither tensor may be touched before that is complete.

    Raises:
        InputError: The tensors cannot be communicated or do not fit together, or there is no such root.
        CommunicationError: MPI fails, or ranks of a node call different operations.
    """
    try:
        whole = None if out is None else (out.data_ptr(), out.numel(), out.dtype)
        ready = comm.ready["gather", x.data_ptr(), x.numel(), x.dtype, whole, root]
    except NOT_READY:
        pass
    else:
        if not async_op and x.is_contiguous() and (out is None or out.is_contiguous()):
            ready(x)
            return None
    if wraps(out, x):
        return for_each_inner(lambda out, x: gather(comm, out, x, root, async_op), out, x)
    of = as_tensor(x, written=False)
    check_rank(comm, root)
    into = as_tensor(out) if comm.rank == root else None
    if into is not None:
        block_sizes(comm, "gather", of, into, None, "x out")
    return comm.dispatch(OPERATION.on((of, into), (False, True), root, alike=root), async_op)


def _bind(binder: Binder, x: Tensor, out: Tensor | None, root: int) -> Compiled:
    comm, numel, item = binder.comm, x.numel(), x.element_size()
    into = out.data_ptr() if out is not None else 0
    if numel * item * comm.size <= LARGEST_COUNT:
        everything = library.even_blocks(into, numel, comm.size, item) if comm.rank == root else None
        moved = library.moved(binder.topology, "gather", [numel * item] * comm.size, root)
        call = partial(comm.Gather, bytes_at(x.data_ptr(), numel * item), everything, root)
        return Compiled([call], moved=moved)
    cells = [r * numel if out is not None else 0 for r in range(comm.size + 1)]
    layout = Layout(x.dtype, [0, numel], x.data_ptr(), x.data_ptr(), inbox=into, inbox_bounds=cells)
    return binder.compile(binder.program(_DIRECT, binder.setting(x, root=root)), layout)


def _said(binder: Binder, x: Tensor, out: Tensor | None, root: int) -> str:
    return described(f"gather to rank {root}", x.numel() * binder.topology.size, x.dtype)


OPERATION = CollectiveOperation("gather", 2, _bind, _said, never, parameters=("root",), by_rank=(False, True))
