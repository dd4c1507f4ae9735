"""all_gather: every rank gets the blocks of all ranks.

rank 0   a               a b c
rank 1      b       ->   a b c
rank 2         c         a b c
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from mpitrain.comm.collectives import arguments
from mpitrain.comm.collectives.arguments import overlap, unequal
from mpitrain.comm.collectives.binding import NOTHING, Binder, CollectiveOperation, copying, offsets
from mpitrain.comm.collectives.dispatch import NOT_READY, Dispatcher
from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.memory.board import described
from mpitrain.comm.memory.buffers import bytes_at, tensor_at
from mpitrain.comm.programs.program import chunk_bounds
from mpitrain.comm.runtime.executor import Compiled, Layout
from mpitrain.comm.runtime.kernels import Call
from mpitrain.comm.runtime.work import Work
from mpitrain.comm.selection import ALL_GATHER, all_gather_name

ALGORITHMS = ALL_GATHER  # others may add theirs, see `registry`


def all_gather(
    comm: Dispatcher,
    out: Any,
    x: Any,
    algorithm: str = "auto",
    async_op: bool = False,
    *,
    counts: Sequence[int] | None = None,
) -> Work | None:
    """Gather every rank's x into every rank's out, one after the other in order of rank. Collective.

    Args:
        out: A contiguous tensor or array. x may be this rank's block of it.
        x: This rank's block: a contiguous tensor or array.
        algorithm: auto, mpi, ring, halving or shared, or one that was registered.
        async_op: Return at once with a `Work`; neither tensor may be touched before that is complete.
        counts: Elements of each rank's block; without it all are of x's length.

    Shape:
        out: sum(counts) elements. x: counts[rank] elements.

    Raises:
        InputError: The tensors cannot be communicated or do not fit together, or algorithm is not known or not
            possible for them.
        CommunicationError: MPI fails, or ranks of a node call different operations.
    """
    try:
        own = x.data_ptr(), x.numel(), x.dtype
        ready = comm.ready["all_gather", out.data_ptr(), out.numel(), out.dtype, own, algorithm, counts]
    except NOT_READY:
        pass
    else:
        if not async_op and x.is_contiguous() and out.is_contiguous():
            ready(out)
            return None
    return comm.call(OPERATION, async_op, (out, x), (True, False), algorithm, counts)


def _placed(rank: int, out: Tensor, x: Tensor, algorithm: str, counts: Sequence[int] | None) -> Tensor | None:
    before = sum(counts[:rank]) if counts else rank * x.numel()
    in_place = x.data_ptr() == out.data_ptr() + before * x.element_size()
    by_name = "mpi" if algorithm == "auto" and counts else algorithm  # as `_bind` has it: nobody reaches anybody
    return ALGORITHMS.placed(by_name, out if in_place else x)


def _bind(binder: Binder, out: Tensor, x: Tensor, algorithm: str, counts: Sequence[int] | None) -> Compiled:
    blocks = counts or [x.numel()] * binder.topology.size
    rank, item, bounds = binder.topology.rank, x.element_size(), offsets(blocks)
    if bounds[-1] == 0:
        return NOTHING
    own = tensor_at(out.data_ptr() + bounds[rank] * item, blocks[rank], x.dtype)
    place = [] if own.data_ptr() == x.data_ptr() or not blocks[rank] else [copying(own, x)]
    if binder.topology.size == 1:
        return Compiled(place)
    read = x if place else out  # what neighbours would read
    setting = replace(binder.setting(read, block=max(blocks) * item), nbytes=bounds[-1] * item, numel=bounds[-1])
    if algorithm == "auto" and min(blocks) != max(blocks):
        algorithm = "mpi"  # a rank with nothing would not find its x in the arena
    name = all_gather_name(binder.choose(ALGORITHMS, algorithm, setting), setting)
    chosen = ALGORITHMS[name]
    if chosen.program is None:
        moved = arguments.moved_by_library(binder.topology, "all_gather", [n * item for n in blocks])
        if place and not overlap(out, x):  # the library's own way, with less copying than in place
            call = _by_library(binder, out, blocks, bytes_at(x.data_ptr(), blocks[rank] * item))
            return Compiled([call], moved=moved)
        return Compiled([*place, _by_library(binder, out, blocks, MPI.IN_PLACE)], moved=moved)
    program = binder.program(chosen, setting)
    layout = Layout(x.dtype, chunk_bounds(bounds, program.segments), out.data_ptr(), out.data_ptr())
    if not chosen.reach:
        inner = binder.compile(program, layout)
        return Compiled([*place, inner], [inner])
    arena, neighbours = binder.require_reach(read, ALGORITHMS, name)
    # a neighbour's x is its block alone: its WORK begins as far before it as the block lies in out
    before = (lambda r: bounds[r] * item) if place else (lambda r: 0)
    layout = replace(layout, neighbours=neighbours, seen=read.data_ptr() - before(rank))
    if arena is not None:
        find = binder.peers(read, arena)
        layout = replace(layout, peers=lambda r: find(r) - before(r))
    where = binder.place(read) + " in place" * (read is out and arena is not None)
    inner = binder.compile(program, layout, None, arena, said=_said(binder, out, x, name, counts, where))
    return Compiled([*place, inner], [inner])


def _said(binder: Binder, out: Tensor, x: Tensor, algorithm: str, counts: Sequence[int] | None, where: str = "") -> str:
    return described("all_gather", out.numel(), x.dtype, where, unequal(counts))


OPERATION = CollectiveOperation(
    "all_gather",
    2,
    _bind,
    _said,
    lambda out, x, algorithm, counts: not counts or min(counts) > 0,
    parameters=("algorithm", "counts"),
    by_rank=(True, False),
    placed=_placed,
)


def _by_library(binder: Binder, out: Tensor, blocks: Sequence[int], own: Any) -> Call:
    """own: this rank's block, or MPI.IN_PLACE where it lies in out already.

    MPI wants the latter of all ranks or of none; it is only a copy that a rank need not make, and libraries take both.
    """
    comm, item = binder.comm, out.element_size()
    if min(blocks) == max(blocks):
        return partial(comm.Allgather, own, arguments.even_blocks(out.data_ptr(), blocks[0], comm.size, item))
    return partial(comm.Allgatherv, own, arguments.uneven_blocks(out.data_ptr(), blocks, item))
