"""gather and scatter: the root's vector has a block of every rank, and gets or gives them.

              gather to rank 1                    scatter from rank 1
rank 0   a               .              rank 0   .               a
rank 1      b       ->   a b c          rank 1   a b c      ->   b
rank 2         c         .              rank 2   .               c
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from mpitrain.comm.algorithms.pairwise import direct_gather, direct_scatter
from mpitrain.comm.collectives import arguments
from mpitrain.comm.collectives.binding import Binder, CollectiveOperation
from mpitrain.comm.collectives.dispatch import NOT_READY, Dispatcher
from mpitrain.comm.memory.board import described
from mpitrain.comm.memory.buffers import bytes_at
from mpitrain.comm.memory.elements import LARGEST_COUNT
from mpitrain.comm.runtime.executor import Compiled, Layout
from mpitrain.comm.runtime.work import Work
from mpitrain.comm.selection import Algorithm, never

_GATHER = Algorithm(lambda s: direct_gather(s.size, s.root, s.nodes))
_SCATTER = Algorithm(lambda s: direct_scatter(s.size, s.root, s.nodes))


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
    return comm.call(GATHER, async_op, (x, out) if comm.rank == root else (x,), (False, True), root)


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
    return comm.call(SCATTER, async_op, (out, x) if comm.rank == root else (out,), (True, False), root)


def _bind(gathers: bool, binder: Binder, block: Tensor, whole: Tensor | None, root: int) -> Compiled:
    comm, numel, item = binder.comm, block.numel(), block.element_size()
    own, all_blocks = block.data_ptr(), whole.data_ptr() if whole is not None else 0
    if numel * item * comm.size <= LARGEST_COUNT:
        everything = arguments.even_blocks(all_blocks, numel, comm.size, item) if comm.rank == root else None
        mine = bytes_at(own, numel * item)
        call = partial(comm.Gather, mine, everything) if gathers else partial(comm.Scatter, everything, mine)
        name = "gather" if gathers else "scatter"
        moved = arguments.moved_by_library(binder.topology, name, [numel * item] * comm.size, root)
        return Compiled([partial(call, root)], moved=moved)
    length = 0 if gathers and whole is None else numel
    here, there = (own, [0, numel]), (all_blocks, [r * length for r in range(comm.size + 1)])
    (source, bounds), (inbox, cells) = (here, there) if gathers else (there, here)
    layout = Layout(block.dtype, bounds, source, source, inbox=inbox, inbox_bounds=cells)
    return binder.compile(binder.program(_GATHER if gathers else _SCATTER, binder.setting(block, root=root)), layout)


def _said(way: str, binder: Binder, block: Tensor, whole: Tensor | None, root: int) -> str:
    return described(f"{way} rank {root}", block.numel() * binder.topology.size, block.dtype)


GATHER, SCATTER = (
    CollectiveOperation(
        name,
        2,
        partial(_bind, name == "gather"),
        partial(_said, f"{name} {way}"),
        never,
        parameters=("root",),
        by_rank=(False, True),
    )
    for name, way in (("gather", "to"), ("scatter", "from"))
)
