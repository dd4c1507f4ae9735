"""reduce_scatter: each rank gets its block of the reduction of all vectors.

rank 0   a0 b0 c0        a
rank 1   a1 b1 c1   ->   b      a = a0 + a1 + a2
rank 2   a2 b2 c2        c

In the shared memory of a node it can also be begun, and waited for later, without a thread (`Deferred`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpitrain.comm.algorithms.shared import COMPLETE, READ, deferred_reduce_scatter
from mpitrain.comm.collectives import arguments
from mpitrain.comm.collectives.arguments import block_sizes, overlap, unequal
from mpitrain.comm.collectives.binding import NOTHING, Binder, CollectiveOperation, copying, offsets, scaling
from mpitrain.comm.collectives.dispatch import NOT_READY, Dispatcher
from mpitrain.comm.job.traffic import Moved, Note
from mpitrain.comm.memory.board import described
from mpitrain.comm.memory.elements import HALVES
from mpitrain.comm.memory.remote import Neighbours
from mpitrain.comm.programs.program import Program
from mpitrain.comm.runtime.executor import Compiled, Layout
from mpitrain.comm.runtime.kernels import Reduction
from mpitrain.comm.runtime.split_phase import Event, SplitPhase
from mpitrain.comm.runtime.work import Work
from mpitrain.comm.selection import REDUCE_SCATTER, Algorithm, cache_chunks, reduce_scatter_name

ALGORITHMS = REDUCE_SCATTER  # others may add theirs, see `registry`
_DEFERRED = Algorithm(lambda s: deferred_reduce_scatter(s.size, cache_chunks(s.block)), one_node=True, reach=True)


def reduce_scatter(
    comm: Dispatcher,
    out: Any,
    x: Any,
    op: str = "sum",
    algorithm: str = "auto",
    async_op: bool = False,
    *,
    counts: Sequence[int] | None = None,
    reproducible: bool = False,
) -> Work | None:
    """Reduce every rank's x element by element; out becomes this rank's block of the result. Collective.

    Args:
        out: Where the block goes: a contiguous tensor or array.
        x: A contiguous tensor or array, of one size and type on all ranks: one block a rank, in order of rank.
        op: sum, product, min, max or avg.
        algorithm: auto, mpi, ring, halving, pairwise or shared, or one that was registered. Halving stands in for mpi
            in sums of 8-bit and 16-bit integers, see `all_reduce`.
        async_op: Return at once with a `Work`; neither tensor may be touched before that is complete.
        counts: Elements of each rank's block; without it all are of out's length.
        reproducible: Reduce in the order of a fixed binary tree over the ranks.

    Shape:
        out: counts[rank] elements. x: sum(counts) elements.

    Raises:
        InputError: The tensors cannot be communicated or do not fit together, or op or algorithm is not known or not
            possible for them.
        CommunicationError: MPI fails, or ranks of a node call different operations.
    """
    try:
        own = out.data_ptr(), out.numel(), out.dtype
        key = "reduce_scatter", x.data_ptr(), x.numel(), x.dtype, own, op, counts, algorithm, reproducible
        ready = comm.ready[key]
    except NOT_READY:
        pass
    else:
        if not async_op and x.is_contiguous() and out.is_contiguous():
            ready(x)
            return None
    return comm.call(OPERATION, async_op, (x, out), (False, True), op, counts, algorithm, reproducible)


def _can_defer(binder: Binder, x: Tensor) -> bool:
    """Whether all ranks share x's memory, the same on all of them."""
    topology = binder.topology
    arena = binder.arena_of(x)
    in_host_memory = arena is not None and arena.mapped is None
    return topology.size > 1 and topology.num_nodes == 1 and x.numel() > 0 and in_host_memory


def _bind_deferred(binder: Binder, x: Tensor, out: Tensor, op: str, events: Mapping[str, Event]) -> Compiled:
    """Return the operation in phases, which are its parts, on an x that all ranks share, in blocks of out's length."""
    reduction, arena = Reduction.of(op, x.dtype, binder.topology.size), binder.arena_of(x)
    program = binder.program(_DEFERRED, binder.setting(x, block=out.numel() * x.element_size()))
    layout = _layout(binder, program, x, out, [out.numel()] * binder.topology.size, None)
    layout = replace(layout, events=events, said=(_in_words(binder, x, None, op), ""))
    return Compiled((), binder.compile_phases(program, layout, reduction, arena))


def _in_words(binder: Binder, x: Tensor, counts: Sequence[int] | None, op: str) -> str:
    """The arguments that must be the same on the ranks that touch each other's memory."""
    return described("reduce_scatter", x.numel(), x.dtype, op, binder.place(x), unequal(counts))


def _layout(
    binder: Binder, program: Program, x: Tensor, out: Tensor, blocks: Sequence[int], neighbours: Neighbours | None
) -> Layout:
    """x as the input, and out as where the own block is the only one written."""
    bounds = offsets(blocks)
    layout = binder.in_place(program, x, neighbours, bounds)
    return replace(layout, target=out.data_ptr() - bounds[binder.topology.rank] * x.element_size())


def _bind(
    binder: Binder, x: Tensor, out: Tensor, op: str, counts: Sequence[int] | None, algorithm: str, reproducible: bool
) -> Compiled:
    reduction = Reduction.of(op, x.dtype, binder.topology.size)
    if x.numel() == 0:
        return NOTHING
    if binder.topology.size == 1:
        return Compiled([copying(out, x)])
    blocks = counts or [out.numel()] * binder.topology.size
    setting = binder.setting(x, reproducible=reproducible, block=max(blocks) * x.element_size())
    name = binder.choose(ALGORITHMS, algorithm, setting)
    name = reduce_scatter_name(name, setting, by_itself=algorithm == "auto", halves=x.dtype in HALVES)
    chosen = ALGORITHMS[name]
    program = binder.program(chosen, setting) if chosen.program is not None else None
    if x.dtype in HALVES and (program is None or program.sends_partial_sums):
        wide, sums = torch.empty(x.numel(), dtype=torch.float32), torch.empty(out.numel(), dtype=torch.float32)
        inner = _bind(binder, wide, sums, op, counts, name, False)
        return Compiled([copying(wide, x), inner, copying(out, sums)], [inner, wide, sums])
    if program is None and reduction.library_saturates:
        return _bind(binder, x, out, op, counts, "halving", False)
    if program is None:
        return _by_library(binder, out, x, blocks, reduction)
    arena, neighbours = binder.require_reach(x, ALGORITHMS, name) if chosen.reach else (None, None)
    layout = _layout(binder, program, x, out, blocks, neighbours)
    if not program.sends_partial_sums:
        return binder.compile(program, layout, reduction, arena, said=_in_words(binder, x, counts, op))
    whole = torch.empty(x.numel(), dtype=x.dtype)
    inner = binder.compile(program, replace(layout, target=whole.data_ptr()), reduction)
    first = offsets(blocks)[binder.topology.rank]
    return Compiled([inner, copying(out, whole[first : first + out.numel()])], [inner, whole])


OPERATION = CollectiveOperation(
    "reduce_scatter",
    2,
    _bind,
    lambda binder, x, out, op, counts, *_: described("reduce_scatter", x.numel(), x.dtype, op, unequal(counts)),
    lambda x, out, op, counts, *_: not counts or min(counts) > 0,
    parameters=("op", "counts", "algorithm", "reproducible"),
    by_rank=(True, False),
    placed=lambda rank, x, out, op, counts, algorithm, reproducible: ALGORITHMS.placed(algorithm, x),
)


def _by_library(binder: Binder, out: Tensor, x: Tensor, blocks: Sequence[int], reduction: Reduction) -> Compiled:
    result = torch.empty_like(out) if overlap(out, x) else out
    send = arguments.typed(x.data_ptr(), x.numel(), x.dtype)
    receive = arguments.typed(result.data_ptr(), result.numel(), x.dtype)
    if min(blocks) == max(blocks):
        del send[1]  # which would count the elements of one block
        call = partial(binder.comm.Reduce_scatter_block, send, receive, reduction.mpi_op)
    else:
        call = partial(binder.comm.Reduce_scatter, send, receive, list(blocks), reduction.mpi_op)
    back = [] if result is out else [copying(out, result)]
    moved = arguments.moved_by_library(binder.topology, "reduce_scatter", [n * x.element_size() for n in blocks])
    keeps = [] if result is out else [result]
    return Compiled([call, *scaling(result, reduction), *back], keeps, moved=moved)


class Deferred:
    """The deferred operations of one communicator, and what carries their signals."""

    def __init__(self, comm: Dispatcher) -> None:
        self._watchdog = comm.process.watchdog
        self._record = self._watchdog.record(f"{comm.label} (deferred)", comm.world_ranks)
        self._events: dict[str, Event] = {}
        self._begun = 0  # operations, for the journal

    def reduce_scatter(self, comm: Dispatcher, out: Tensor, x: Tensor, op: str) -> SplitPhase | None:
        """Begin one; None, on all ranks, where they do not share x's memory. comm: the communicator."""
        blocks = block_sizes(comm, "reduce_scatter", out, x, None, "out", "x")
        if not _can_defer(comm.binder, x):
            return None
        comm.compare("reduce_scatter", (x, out), (op, blocks, "deferred", False), placed=x)
        if not self._events:
            label = self._record.label
            self._events = {event: Event(comm.duplicate_of_node(), label) for event in (COMPLETE, READ)}
        binder, key = comm.binder, ("deferred reduce_scatter", out.data_ptr(), x.data_ptr(), x.dtype, x.numel(), op)
        phases = binder.bound(key, lambda: _bind_deferred(binder, x, out, op, self._events), out, x).parts
        note = None
        if comm.journal.on:
            self._begun += 1
            moved = Moved.sum(phase.moved for phase in phases)
            note = Note(comm.journal, "reduce_scatter", comm.label, moved, self._record.key, self._begun)
        return SplitPhase("deferred reduce_scatter", phases, (x, out), self._record, note)

    def free(self, *, together: bool) -> None:
        """Release what they use. together: whether the ranks can still act together; then collective."""
        for event in self._events.values() if together else ():
            event.free()
        self._watchdog.forget(self._record)
