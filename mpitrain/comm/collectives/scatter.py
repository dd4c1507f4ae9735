"""scatter: each rank gets its block of the root's vector.

rank 0   .               a
rank 1   a b c      ->   b         root 1
rank 2   .               c
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from mpitrain.comm.algorithms.direct import direct_scatter
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

_DIRECT = Algorithm(lambda s: direct_scatter(s.size, s.root, s.nodes))


def scatter(comm: Dispatcher, out: Any, x: Any, root: int, async_op: bool = False) -> Work | None:
    """Give every rank its block of the root's x. Collective.

    Args:
        out: Where the block goes: a contiguous tensor or array, of one size and type on all ranks.
        x: On the root a contiguous tensor or array of all blocks in order of rank; None on the other ranks.
        root: The rank that has the blocks.
        async_op: Return at once with a `Work`; neither tensor may be touched before that is complete.

    Raises:
        InputError: The tensors cannot be communicated or do not fit together, or there is no such root.
        CommunicationError: MPI fails, or ranks of a node call different operations.
    """
    try:
        whole = None if x is None else (x.data_ptr(), x.numel(), x.dtype)
        ready = comm.ready["scatter", out.data_ptr(), out.numel(), out.dtype, whole, root]
    except NOT_READY:
        pass
    else:
        if not async_op and out.is_contiguous() and (x is None or x.is_contiguous()):
            ready(out)
            return None
    if wraps(out, x):
        return for_each_inner(lambda out, x: scatter(comm, out, x, root, async_op), out, x)
    into = as_tensor(out)
    check_rank(comm, root)
    of = as_tensor(x, written=False) if comm.rank == root else None
    if of is not None:
        block_sizes(comm, "scatter", into, of, None, "out x")
    return comm.dispatch(OPERATION.on((into, of), (True, False), root, alike=root), async_op)


def _bind(binder: Binder, out: Tensor, x: Tensor | None, root: int) -> Compiled:
    comm, numel, item = binder.comm, out.numel(), out.element_size()
    source = x.data_ptr() if x is not None else 0
    if numel * item * comm.size <= LARGEST_COUNT:
        everything = library.even_blocks(source, numel, comm.size, item) if comm.rank == root else None
        moved = library.moved(binder.topology, "scatter", [numel * item] * comm.size, root)
        call = partial(comm.Scatter, everything, bytes_at(out.data_ptr(), numel * item), root)
        return Compiled([call], moved=moved)
    blocks = [r * numel for r in range(comm.size + 1)]
    layout = Layout(out.dtype, blocks, source, source, inbox=out.data_ptr(), inbox_bounds=[0, numel])
    return binder.compile(binder.program(_DIRECT, binder.setting(out, root=root)), layout)


def _said(binder: Binder, out: Tensor, x: Tensor | None, root: int) -> str:
    return described(f"scatter from rank {root}", out.numel() * binder.topology.size, out.dtype)


OPERATION = CollectiveOperation("scatter", 2, _bind, _said, never, parameters=("root",), by_rank=(False, True))
