"""Operations that reduce the vectors of all ranks element by element: a = a0 + a1 + a2.

                      all_reduce       reduce to 1      reduce_scatter
rank 0   a0 b0 c0     a b c            a0 b0 c0         a
rank 1   a1 b1 c1  -> a b c            a  b  c          b
rank 2   a2 b2 c2     a b c            a2 b2 c2         c

In the shared memory of a node, a reduce_scatter can also be started, and waited for later, without a thread
(`DeferredReductions`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpitrain.comm import selection
from mpitrain.comm.algorithms.shared import COMPLETE, READ, deferred_reduce_scatter
from mpitrain.comm.collectives.binding import (
    NOTHING,
    Binder,
    Invocation,
    Levels,
    make_copy,
    make_scaling,
    offsets,
)
from mpitrain.comm.collectives.dispatch import NOT_READY, Dispatcher, block_sizes
from mpitrain.comm.collectives.first_use import TunedOperation
from mpitrain.comm.collectives.moving import ALL_GATHER, ALL_TO_ALL
from mpitrain.comm.compression import Bucket, Collectives, Compression
from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.job.traffic import Note, Volume, library_volume
from mpitrain.comm.memory.buffers import is_negated, shares_memory, typed_buffer, typed_buffers
from mpitrain.comm.memory.elements import HALVES
from mpitrain.comm.programs.program import Program
from mpitrain.comm.runtime.agreement import Call
from mpitrain.comm.runtime.executor import Compiled, Layout, Reduction
from mpitrain.comm.runtime.remote import Neighbours
from mpitrain.comm.runtime.split_phase import Event, SplitPhase
from mpitrain.comm.runtime.work import Work
from mpitrain.comm.selection import Algorithm, all_reduce_algorithm, cache_chunks, reduce_scatter_name
from mpitrain.errors import InputError


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
    """Reduce the x of all ranks element by element; every rank gets the result in its x. Collective.

    Args:
        x: A contiguous tensor or array, with the same size and dtype on all ranks.
        op: sum, product, min, max or avg. Integers wrap on overflow; their average is the sum divided by the number of
            ranks and rounded toward zero.
        algorithm: auto, mpi, ring, tree, halving, shared, staged, two_level, or a registered algorithm. Sums of 8-bit
            and 16-bit integers use halving instead of mpi, because those of Open MPI saturate.
        async_op: If true, return at once with a `Work`; do not touch x before it is complete.
        compression: Sends fewer bytes and gives an approximate sum or avg, see `mpitrain.comm.compression`; the same on
            all ranks.
        reproducible: If true, reduce in the order of a fixed binary tree over the ranks, so that the bits of the result
            depend neither on the algorithm nor on the placement of the ranks.

    Raises:
        InputError: x cannot be communicated, or op or algorithm is unknown or not possible for it.
        CommunicationError: MPI fails, or ranks of a node call different operations.
    """
    try:
        ready = comm.ready["all_reduce", x.data_ptr(), numel := x.numel(), x.dtype, op, algorithm, reproducible]
    except NOT_READY:
        pass
    else:
        simple = not async_op and compression is None
        if simple and (x.is_contiguous() if numel > 1 else not x.is_neg()):
            ready()
            return None
    if compression is not None:
        compressed = partial(_make_compressed_call, comm, compression, op, algorithm, reproducible, async_op)
        return comm.begin(compressed, async_op, (x,), (True,))
    return comm.call(ALL_REDUCE, async_op, (x,), (True,), op, algorithm, reproducible)


class Channel:
    """Communicator that a compressed operation uses inside, so that all of its steps count as one operation.

    Attributes:
        size, rank: Number of ranks, and this rank.
        nodes: Node number of each rank.
        levels: Channels of the ranks of this node, and of the ranks with this local rank on all nodes; None if the
            operation does not distinguish them.
    """

    def __init__(self, comm: Dispatcher, binder: Binder, levels: Levels | None = None) -> None:
        """Wrap a communicator.

        Args:
            comm: The communicator.
            binder: Binder of the thread that performs the operation.
            levels: Binders of the same thread for the two levels.
        """
        self.size, self.rank, self.nodes = binder.topology.size, binder.topology.rank, binder.topology.nodes
        self._perform = partial(comm.perform, binder)
        self.levels: tuple[Collectives, Collectives] | None = None
        if levels is not None:
            for level in levels:
                level.volume = binder.volume  # what they move counts as a part of this operation
            self.levels = Channel(comm, levels.node), Channel(comm, levels.across)

    def all_reduce(self, x: Tensor, op: str = "sum", algorithm: str = "auto", *, reproducible: bool = False) -> None:
        """Reduce x over all ranks, as `all_reduce` does. Collective.

        Args:
            x: A contiguous tensor, with the same size and dtype on all ranks.
            op: sum, product, min, max or avg.
            algorithm: Name of the algorithm.
            reproducible: If true, reduce in the order of a fixed binary tree over the ranks.
        """
        self._perform(ALL_REDUCE, (x,), (True,), op, algorithm, reproducible)

    def reduce_scatter(self, out: Tensor, x: Tensor, op: str, counts: Sequence[int]) -> None:
        """Reduce x over all ranks; out receives this rank's block. Collective.

        Args:
            out: Receives the block; it may be this rank's block of x.
            x: One block per rank.
            op: sum or avg.
            counts: Number of elements of each block.
        """
        self._perform(REDUCE_SCATTER, (x, out), (False, True), op, _uneven(counts), "auto", False)

    def all_gather(self, out: Tensor, x: Tensor, counts: Sequence[int] | None = None) -> None:
        """Gather the x of all ranks into every rank's out. Collective.

        Args:
            out: Receives all blocks, in order of rank.
            x: This rank's block; it may be a part of out.
            counts: Number of elements of each block; by default all blocks have the length of x.
        """
        self._perform(ALL_GATHER, (out, x), (True, False), "auto", _uneven(counts or ()))

    def all_to_all(self, out: Tensor, x: Tensor) -> None:
        """Send block r of x to every rank r, and receive block s of out from every rank s. Collective.

        Args:
            out: Receives the blocks, which have equal lengths.
            x: Blocks to send.
        """
        self._perform(ALL_TO_ALL, (x, out), (False, True))


def _uneven(counts: Sequence[int]) -> tuple[int, ...] | None:
    """Return the lengths of blocks as operations take them: None if all are equal."""
    return tuple(counts) if len(set(counts)) > 1 else None


def _make_compressed_call(
    comm: Dispatcher,
    compression: Compression | Bucket,
    op: str,
    algorithm: str,
    reproducible: bool,
    async_op: bool,
    x: Tensor,
) -> Invocation:
    """Return the call of a compressed all_reduce; its collectives all run in the thread that performs it."""
    bucket = compression if isinstance(compression, Bucket) else Bucket(compression, None, None)
    bucket.compression.check(x.dtype, op)
    if reproducible:
        raise InputError("a compressed sum depends on the number of ranks; leave out reproducible or compression")

    levels = comm.levels(async_op) if bucket.compression.two_level and x.is_cpu else None

    def bind(binder: Binder, x: Tensor) -> Call:
        act, channel = bucket.compression.all_reduce, Channel(comm, binder, levels)
        return partial(act, channel, x, op, algorithm, key=bucket.key, shapes=bucket.shapes, whole=bucket.whole)

    compared, name = (op, algorithm, str(compression)), bucket.compression.name
    return Invocation("all_reduce", bind, (x,), (True,), compared_values=compared, on_device=True, algorithm=name)


def _bind_all_reduce(
    binder: Binder, x: Tensor, op: str, algorithm: str, reproducible: bool, description: str | None = None
) -> Compiled:
    """Bind an all_reduce to x.

    Args:
        binder: Binder of the ranks.
        x: The vector.
        op: Name of the reduction.
        algorithm: Requested algorithm, or "auto".
        reproducible: If true, use the fixed order over ranks.
        description: Description of the caller's arguments, if x is a copy or a piece of the caller's x.
    """
    reduction = Reduction.of(op, x.dtype, binder.topology.size)
    if binder.topology.size == 1 or x.numel() == 0:
        return NOTHING
    setting = binder.setting(x, reproducible=reproducible)
    if description is None:
        description = ALL_REDUCE.describe(binder, x, op, algorithm, reproducible, place=binder.describe_place(x))
    name = binder.choose(selection.ALL_REDUCE, algorithm, setting)
    chosen, neighbours = all_reduce_algorithm(name, setting), None
    if chosen.program is None:
        if x.dtype in HALVES:
            return binder.bind_widened(x, lambda wide: _bind_all_reduce(binder, wide, op, name, False))
        if reduction.library_saturates:
            return _bind_all_reduce(binder, x, op, "halving", False)
        call, pieces = binder.comm.Allreduce, typed_buffers(x)
        calls = [partial(call, MPI.IN_PLACE, piece, reduction.operation.mpi) for piece in pieces]
        volume = library_volume(binder.topology, "all_reduce", x.nbytes)
        return Compiled([*calls, *make_scaling(x, reduction)], volume=volume)
    if chosen.reach:
        neighbours = binder.reach(x)[1]
        setting = setting if neighbours is None else replace(setting, memory="reachable")
    unreached = chosen.reach and setting.memory == "private"
    if (unreached and not chosen.stages) or (
        chosen.stages and (unreached or not chosen.reach) and not binder.staging(description)
    ):
        return _bind_all_reduce(binder, x, op, "ring", reproducible)
    program = binder.program(chosen, setting)
    if x.dtype in HALVES and program.sends_partial_sums:
        return binder.bind_widened(x, lambda wide: _bind_all_reduce(binder, wide, op, name, reproducible, description))
    if chosen.reach and setting.memory == "private" and not program.slots:
        return binder.bind_through_staging(
            x, lambda piece: _bind_all_reduce(binder, piece, op, name, reproducible, description)
        )
    return binder.compile(
        program, binder.layout_in_place(program, x, neighbours), reduction, binder.arena_of(x), description=description
    )


ALL_REDUCE = TunedOperation(
    "all_reduce",
    _bind_all_reduce,
    parameters=("op", "algorithm", "reproducible"),
    by_rank=(False,),
    in_place=True,
    placed=lambda topology, x, op, algorithm, reproducible: selection.ALL_REDUCE.placed(algorithm, x),
)


def reduce(
    comm: Dispatcher, x: Any, root: int, op: str = "sum", algorithm: str = "auto", async_op: bool = False
) -> Work | None:
    """Reduce the x of all ranks element by element; the root gets the result in its x. Collective.

    Args:
        x: A contiguous tensor or array, with the same size and dtype on all ranks. Only the root's x changes.
        root: Rank that receives the result.
        op: sum, product, min, max or avg.
        algorithm: auto, mpi, tree, shared, or a registered algorithm. Sums of 8-bit and 16-bit integers use tree
            instead of mpi, see `all_reduce`.
        async_op: If true, return at once with a `Work`; do not touch x before it is complete.

    Raises:
        InputError: x cannot be communicated, or root, op or algorithm is unknown or not possible for it.
        CommunicationError: MPI fails, or ranks of a node call different operations.
    """
    try:
        ready = comm.ready["reduce", x.data_ptr(), numel := x.numel(), x.dtype, op, root, algorithm]
    except NOT_READY:
        pass
    else:
        if not async_op and (x.is_contiguous() if numel > 1 else not x.is_neg()):
            ready()
            return None
    return comm.call(REDUCE, async_op, (x,), (comm.rank == root,), op, root, algorithm)


def _bind_reduce(binder: Binder, x: Tensor, op: str, root: int, algorithm: str) -> Compiled:
    reduction = Reduction.of(op, x.dtype, binder.topology.size)
    if binder.topology.size == 1 or x.numel() == 0:
        return NOTHING
    setting, at_root = binder.setting(x, root=root), binder.topology.rank == root
    name = binder.choose(selection.REDUCE, algorithm, setting)
    chosen = selection.REDUCE[name]
    if x.dtype in HALVES and not chosen.reach:
        return binder.bind_widened(x, lambda wide: _bind_reduce(binder, wide, op, root, name), back=at_root)
    if chosen.program is None and reduction.library_saturates:
        return _bind_reduce(binder, x, op, root, "tree")
    if chosen.program is None:
        comm, calls = binder.comm, list[Call]()
        for piece in typed_buffers(x):
            send, receive = (MPI.IN_PLACE, piece) if at_root else (piece, None)
            calls.append(partial(comm.Reduce, send, receive, reduction.operation.mpi, root))
        calls += make_scaling(x, reduction) if at_root else []
        return Compiled(calls, volume=library_volume(binder.topology, "reduce", x.nbytes, root))
    program = binder.program(chosen, setting)
    if chosen.reach:
        arena, neighbours = binder.require_reach(x, selection.REDUCE, name)
        description = REDUCE.describe(binder, x, op, root, name, place=binder.describe_place(x))
        return binder.compile(
            program, binder.layout_in_place(program, x, neighbours), reduction, arena, description=description
        )
    layout = binder.layout_in_place(program, x)
    if at_root:
        return binder.compile(program, layout, reduction)
    sums = torch.empty(x.numel(), dtype=x.dtype)  # partial sums on ranks other than the root, whose x must not change
    inner = binder.compile(program, replace(layout, target=sums.data_ptr()), reduction)
    return Compiled([inner], [inner, sums])


REDUCE = TunedOperation(
    "reduce",
    _bind_reduce,
    parameters=("op", "root", "algorithm"),
    by_rank=(False,),
    synchronizes=False,
    in_place=True,
    placed=lambda topology, x, op, root, algorithm: selection.REDUCE.placed(algorithm, x),
)


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
    """Reduce the x of all ranks element by element; out receives this rank's block of the result. Collective.

    Args:
        out: Receives the block: a contiguous tensor or array.
        x: A contiguous tensor or array, with the same size and dtype on all ranks: one block per rank, in order of
            rank.
        op: sum, product, min, max or avg.
        algorithm: auto, mpi, ring, halving, pairwise, shared, two_level, or a registered algorithm. Sums of 8-bit and
            16-bit integers use halving instead of mpi, see `all_reduce`.
        async_op: If true, return at once with a `Work`; do not touch either tensor before it is complete.
        counts: Number of elements of each rank's block; by default all blocks have the length of out.
        reproducible: If true, reduce in the order of a fixed binary tree over the ranks.

    Shape:
        out: counts[rank] elements. x: sum(counts) elements.

    Raises:
        InputError: The tensors cannot be communicated or do not fit together, or op or algorithm is unknown or not
            possible for them.
        CommunicationError: MPI fails, or ranks of a node call different operations.
    """
    try:
        block = out.data_ptr(), out.numel(), out.dtype
        key = "reduce_scatter", x.data_ptr(), x.numel(), x.dtype, block, op, counts, algorithm, reproducible
        ready = comm.ready[key]
    except NOT_READY:
        pass
    else:
        if not async_op and x.is_contiguous() and (out.is_contiguous() if block[1] > 1 else not is_negated(out, x)):
            ready()
            return None
    return comm.call(REDUCE_SCATTER, async_op, (x, out), (False, True), op, counts, algorithm, reproducible)


def _bind_deferred(binder: Binder, x: Tensor, out: Tensor, op: str, events: Mapping[str, Event]) -> Compiled:
    """Bind a deferred reduce_scatter; its phases are the parts of the result.

    All ranks must be able to access each other's x, which has one block of out's length per rank.
    """
    reduction, arena = Reduction.of(op, x.dtype, binder.topology.size), binder.arena_of(x)
    program = binder.program(_DEFERRED, binder.setting(x, block=out.numel() * x.element_size()))
    layout = _layout(binder, program, x, out, [out.numel()] * binder.topology.size, None)
    description = REDUCE_SCATTER.describe(binder, x, out, op, None, "", False, place=binder.describe_place(x))
    layout = replace(layout, events=events, descriptions=(description, ""))
    return Compiled((), binder.plan(program, layout, reduction, arena).bind_phases(layout))


def _layout(
    binder: Binder, program: Program, x: Tensor, out: Tensor, blocks: Sequence[int], neighbours: Neighbours | None
) -> Layout:
    """Return the layout of a reduce_scatter: x is the input, and out receives this rank's block."""
    bounds = offsets(blocks)
    layout = binder.layout_in_place(program, x, neighbours, bounds)
    return replace(layout, target=out.data_ptr() - bounds[binder.topology.rank] * x.element_size())


def _bind_reduce_scatter(
    binder: Binder, x: Tensor, out: Tensor, op: str, counts: Sequence[int] | None, algorithm: str, reproducible: bool
) -> Compiled:
    reduction = Reduction.of(op, x.dtype, binder.topology.size)
    if x.numel() == 0:
        return NOTHING
    if binder.topology.size == 1:
        return Compiled([make_copy(out, x)])
    blocks = counts or [out.numel()] * binder.topology.size
    setting = binder.setting(x, reproducible=reproducible, block=max(blocks) * x.element_size())
    name = binder.choose(selection.REDUCE_SCATTER, algorithm, setting)
    name = reduce_scatter_name(name, setting, is_auto=algorithm == "auto", is_half=x.dtype in HALVES)
    chosen = selection.REDUCE_SCATTER[name]
    if chosen.reach and not chosen.one_node and binder.reach(x) == (None, None):
        return _bind_reduce_scatter(binder, x, out, op, counts, "ring", reproducible)
    program = binder.program(chosen, setting) if chosen.program is not None else None
    if x.dtype in HALVES and (program is None or program.sends_partial_sums):
        wide, sums = torch.empty(x.numel(), dtype=torch.float32), torch.empty(out.numel(), dtype=torch.float32)
        inner = _bind_reduce_scatter(binder, wide, sums, op, counts, name, False)
        return Compiled([make_copy(wide, x), inner, make_copy(out, sums)], [inner, wide, sums])
    if program is None and reduction.library_saturates:
        return _bind_reduce_scatter(binder, x, out, op, counts, "halving", False)
    if program is None:
        return _library_reduce_scatter(binder, out, x, blocks, reduction)
    arena, neighbours = binder.require_reach(x, selection.REDUCE_SCATTER, name) if chosen.reach else (None, None)
    layout = _layout(binder, program, x, out, blocks, neighbours)
    description = REDUCE_SCATTER.describe(
        binder, x, out, op, counts, name, reproducible, place=binder.describe_place(x)
    )
    if not program.sends_partial_sums:
        return binder.compile(program, layout, reduction, arena, description=description)
    whole = torch.empty(x.numel(), dtype=x.dtype)
    layout = replace(layout, target=whole.data_ptr())
    inner = binder.compile(program, layout, reduction, arena, description=description)
    first = offsets(blocks)[binder.topology.rank]
    return Compiled([inner, make_copy(out, whole[first : first + out.numel()])], [inner, whole])


REDUCE_SCATTER = TunedOperation(
    "reduce_scatter",
    _bind_reduce_scatter,
    parameters=("op", "counts", "algorithm", "reproducible"),
    by_rank=(True, False),
    placed=lambda topology, x, out, op, counts, algorithm, reproducible: selection.REDUCE_SCATTER.placed(algorithm, x),
)


def _library_reduce_scatter(
    binder: Binder, out: Tensor, x: Tensor, blocks: Sequence[int], reduction: Reduction
) -> Compiled:
    result = torch.empty_like(out) if shares_memory(out, x) else out
    send = typed_buffer(x.data_ptr(), x.numel(), x.dtype)
    receive = typed_buffer(result.data_ptr(), result.numel(), x.dtype)
    if min(blocks) == max(blocks):
        del send[1]  # the count, which would be that of a single block
        call = partial(binder.comm.Reduce_scatter_block, send, receive, reduction.operation.mpi)
    else:
        call = partial(binder.comm.Reduce_scatter, send, receive, list(blocks), reduction.operation.mpi)
    back, keeps = ([], []) if result is out else ([make_copy(out, result)], [result])
    volume = library_volume(binder.topology, "reduce_scatter", [n * x.element_size() for n in blocks])
    return Compiled([call, *make_scaling(result, reduction), *back], keeps, volume=volume)


class DeferredReductions:
    """Deferred reduce_scatters of one communicator, and the events that carry their signals."""

    def __init__(self, comm: Dispatcher) -> None:
        self._watchdog = comm.process.watchdog
        self._record = self._watchdog.record(f"{comm.label} (deferred)", comm.world_ranks)
        self._events: dict[str, Event] = {}
        self._num_started = 0  # operations, for the traffic counters

    def reduce_scatter(self, comm: Dispatcher, out: Tensor, x: Tensor, op: str) -> SplitPhase | None:
        """Start a reduce_scatter that the caller waits for, and then releases, later (see `SplitPhase`). Collective.

        Args:
            comm: The communicator.
            out: Receives this rank's block.
            x: Vector in shared memory, with one block of out's length per rank.
            op: sum, product, min, max or avg.

        Returns:
            The handle; None, on all ranks, if they do not share the memory of x.
        """
        blocks = block_sizes(comm, "reduce_scatter", out, x, None, "out", "x")
        arena = comm.binder.arena_of(x)
        if comm.size == 1 or comm.num_nodes > 1 or x.numel() == 0 or arena is None or arena.mapped is not None:
            return None
        comm.compare("reduce_scatter", (x, out), (op, blocks, "deferred", False), placed=x)
        if not self._events:
            label, naps = self._record.label, comm.binder.oversubscribed
            self._events = {event: Event(comm.duplicate_of_node(), label, naps) for event in (COMPLETE, READ)}
        binder, key = comm.binder, ("deferred reduce_scatter", out.data_ptr(), x.data_ptr(), x.dtype, x.numel(), op)
        phases = binder.bind_cached(key, lambda: _bind_deferred(binder, x, out, op, self._events), out, x).parts
        note = None
        if comm.journal.on:
            self._num_started += 1
            volume = Volume.sum(phase.volume for phase in phases)
            note = Note(comm.journal, "reduce_scatter", comm.label, volume, self._record.key, self._num_started)
        return SplitPhase("deferred reduce_scatter", phases, (x, out), self._record, note)

    def free(self, *, collective: bool) -> None:
        """Release the resources of the operations.

        Args:
            collective: True if all ranks can still act together; the call is then collective.
        """
        for event in self._events.values() if collective else ():
            event.free()
        self._watchdog.forget(self._record)
