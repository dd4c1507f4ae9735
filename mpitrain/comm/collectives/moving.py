"""Operations that move blocks between ranks without changing them.

           broadcast from 1      all_gather            gather to 1           scatter from 1        all_to_all
rank 0     .  .       a1 b1      a         a b c       a         .           .           a         a0 b0 c0    a0 a1 a2
rank 1     a1 b1  ->  a1 b1         b   -> a b c          b   -> a b c       a b c  ->   b         a1 b1 c1 -> b0 b1 b2
rank 2     .  .       a1 b1           c    a b c             c   .           .           c         a2 b2 c2    c0 c1 c2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpitrain.comm import selection
from mpitrain.comm.algorithms.messages import direct_all_to_all, direct_gather, direct_scatter
from mpitrain.comm.collectives.binding import (
    NOTHING,
    Binder,
    CollectiveOperation,
    Invocation,
    make_copy,
    offsets,
)
from mpitrain.comm.collectives.dispatch import NOT_READY, Dispatcher, block_sizes
from mpitrain.comm.collectives.first_use import TunedOperation
from mpitrain.comm.compression import Compression
from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.job.topology import Topology
from mpitrain.comm.job.traffic import library_volume
from mpitrain.comm.memory.buffers import (
    bytes_at,
    even_blocks,
    is_negated,
    pieces,
    shares_memory,
    tensor_at,
    uneven_blocks,
)
from mpitrain.comm.memory.elements import LARGEST_COUNT
from mpitrain.comm.programs.program import chunk_bounds
from mpitrain.comm.runtime.agreement import Call
from mpitrain.comm.runtime.executor import Compiled, Layout
from mpitrain.comm.runtime.work import Work
from mpitrain.comm.selection import Algorithm, all_gather_name
from mpitrain.errors import InputError


def broadcast(comm: Dispatcher, x: Any, root: int, algorithm: str = "auto", async_op: bool = False) -> Work | None:
    """Copy the root's x into every rank's x. Collective.

    Args:
        x: A contiguous tensor or array, with the same size and dtype on all ranks.
        root: Rank that has the data.
        algorithm: auto, mpi, tree, shared, or a registered algorithm.
        async_op: If true, return at once with a `Work`; do not touch x before it is complete.

    Raises:
        InputError: x cannot be communicated, or root or algorithm is unknown or not possible for it.
        CommunicationError: MPI fails, or ranks of a node call different operations.
    """
    try:
        ready = comm.ready["broadcast", x.data_ptr(), numel := x.numel(), x.dtype, root, algorithm]
    except NOT_READY:
        pass
    else:
        if not async_op and (x.is_contiguous() if numel > 1 else not x.is_neg()):
            ready()
            return None
    return comm.call(BROADCAST, async_op, (x,), (comm.rank != root,), root, algorithm)


def _bind_broadcast(binder: Binder, x: Tensor, root: int, algorithm: str) -> Compiled:
    if binder.topology.size == 1 or x.numel() == 0:
        return NOTHING
    setting = binder.setting(x, root=root)
    name = binder.choose(selection.BROADCAST, algorithm, setting)
    chosen = selection.BROADCAST[name]
    if chosen.program is None:
        parts = pieces(setting.nbytes)
        calls = [partial(binder.comm.Bcast, bytes_at(x.data_ptr() + lo, n), root) for lo, n in parts]
        return Compiled(calls, volume=library_volume(binder.topology, "broadcast", x.nbytes, root))
    program = binder.program(chosen, setting)
    arena, neighbours = binder.require_reach(x, selection.BROADCAST, name) if chosen.reach else (None, None)
    description = BROADCAST.describe(binder, x, root, name, place=binder.describe_place(x))
    return binder.compile(program, binder.layout_in_place(program, x, neighbours), None, arena, description=description)


BROADCAST = TunedOperation(
    "broadcast",
    _bind_broadcast,
    parameters=("root", "algorithm"),
    by_rank=(False,),
    synchronizes=False,
    placed=lambda topology, x, root, algorithm: selection.BROADCAST.placed(algorithm, x),
)


def all_gather(
    comm: Dispatcher,
    out: Any,
    x: Any,
    algorithm: str = "auto",
    async_op: bool = False,
    *,
    counts: Sequence[int] | None = None,
    compression: Compression | None = None,
) -> Work | None:
    """Gather the x of all ranks into every rank's out, in order of rank. Collective.

    Args:
        out: A contiguous tensor or array. x may be this rank's block of it.
        x: This rank's block: a contiguous tensor or array.
        algorithm: auto, mpi, ring, halving, shared, two_level, or a registered algorithm.
        async_op: If true, return at once with a `Work`; do not touch either tensor before it is complete.
        counts: Number of elements of each rank's block; by default all blocks have the length of x.
        compression: Sends fewer bytes (`mpitrain.comm.compression.Int8`): out gets rounded blocks, this rank's own too.

    Shape:
        out: sum(counts) elements. x: counts[rank] elements.

    Raises:
        InputError: The tensors cannot be communicated or do not fit together, or algorithm is unknown or not possible
            for them.
        CommunicationError: MPI fails, or ranks of a node call different operations.
    """
    try:
        block = x.data_ptr(), x.numel(), x.dtype
        ready = comm.ready["all_gather", out.data_ptr(), out.numel(), out.dtype, block, algorithm, counts]
    except NOT_READY:
        pass
    else:
        simple = not async_op and compression is None
        if simple and out.is_contiguous() and (x.is_contiguous() if block[1] > 1 else not is_negated(x, out)):
            ready()
            return None
    if compression is not None:
        make_call = partial(_make_compressed_gather, comm, compression, counts)
        return comm.begin(make_call, async_op, (out, x), (True, False))
    return comm.call(ALL_GATHER, async_op, (out, x), (True, False), algorithm, counts)


def _make_compressed_gather(
    comm: Dispatcher, compression: Compression, counts: Sequence[int] | None, out: Tensor, x: Tensor
) -> Invocation:
    """Return the call of a compressed all_gather; its collectives all run in the thread that performs it."""
    blocks = block_sizes(comm, "all_gather", x, out, counts, "x", "out")
    if min(blocks) != max(blocks):
        raise InputError("a compressed all_gather needs blocks of equal length; leave out counts or compression")
    compression.check(x.dtype, "sum")

    def bind(binder: Binder, out: Tensor, x: Tensor) -> Call:
        return partial(compression.all_gather, comm.channel(comm, binder), out, x)

    written, name = (True, False), compression.name
    return Invocation(
        "all_gather", bind, (out, x), written, compared_values=str(compression), on_device=True, algorithm=name
    )


def _placed_all_gather(
    topology: Topology, out: Tensor, x: Tensor, name: str, counts: Sequence[int] | None
) -> Tensor | None:
    before = sum(counts[: topology.rank]) if counts else topology.rank * x.numel()
    in_place = x.data_ptr() == out.data_ptr() + before * x.element_size() or topology.num_nodes > 1
    serving = "mpi" if name == "auto" and counts else name  # as in `_bind_all_gather`: no rank reads another's memory
    return selection.ALL_GATHER.placed(serving, out if in_place else x)


def _bind_all_gather(binder: Binder, out: Tensor, x: Tensor, algorithm: str, counts: Sequence[int] | None) -> Compiled:
    blocks = counts or [x.numel()] * binder.topology.size
    rank, item, bounds = binder.topology.rank, x.element_size(), offsets(blocks)
    if bounds[-1] == 0:
        return NOTHING
    own_block = tensor_at(out.data_ptr() + bounds[rank] * item, blocks[rank], x.dtype)
    place = [] if own_block.data_ptr() == x.data_ptr() or not blocks[rank] else [make_copy(own_block, x)]
    if binder.topology.size == 1:
        return Compiled(place)
    # the memory that other ranks of the node would read; across nodes also blocks that have come from another node
    read = x if place and binder.topology.num_nodes == 1 else out
    setting = replace(binder.setting(read, block=max(blocks) * item), nbytes=bounds[-1] * item, numel=bounds[-1])
    if algorithm == "auto" and min(blocks) != max(blocks):
        algorithm = "mpi"  # an empty x is in no arena, so ranks could choose different algorithms
    name = all_gather_name(binder.choose(selection.ALL_GATHER, algorithm, setting), setting)
    chosen = selection.ALL_GATHER[name]
    if chosen.reach and not chosen.one_node and binder.reach(read) == (None, None):
        return _bind_all_gather(binder, out, x, "ring", counts)
    if chosen.program is None:
        volume = library_volume(binder.topology, "all_gather", [n * item for n in blocks])
        if place and not shares_memory(out, x):  # the library copies less this way than in place
            call = _library_all_gather(binder, out, blocks, bytes_at(x.data_ptr(), blocks[rank] * item))
            return Compiled([call], volume=volume)
        return Compiled([*place, _library_all_gather(binder, out, blocks, MPI.IN_PLACE)], volume=volume)
    program = binder.program(chosen, setting)
    layout = Layout(x.dtype, chunk_bounds(bounds, program.segments), out.data_ptr(), out.data_ptr())
    if not chosen.reach:
        inner = binder.compile(program, layout)
        return Compiled([*place, inner], [inner])
    arena, neighbours = binder.require_reach(read, selection.ALL_GATHER, name)
    # another rank's x has only its own block, so its WORK starts before x by the offset of that block in out
    before = (lambda r: bounds[r] * item) if read is x else (lambda r: 0)
    layout = replace(layout, neighbours=neighbours, exposed_address=read.data_ptr() - before(rank))
    if arena is not None:
        find = binder.peers(read, arena)
        layout = replace(layout, peers=lambda r: find(r) - before(r))
    where = binder.describe_place(read) + " in place" * (read is out and arena is not None)
    description = ALL_GATHER.describe(binder, out, x, name, counts, place=where)
    inner = binder.compile(program, layout, None, arena, description=description)
    return Compiled([*place, inner], [inner])


ALL_GATHER = TunedOperation(
    "all_gather",
    _bind_all_gather,
    parameters=("algorithm", "counts"),
    by_rank=(True, False),
    placed=_placed_all_gather,
)


def _library_all_gather(binder: Binder, out: Tensor, blocks: Sequence[int], send: Any) -> Call:
    """Return the call of MPI's all-gather.

    Args:
        binder: Binder of the ranks.
        out: All blocks.
        blocks: Number of elements of each rank's block.
        send: This rank's block, or MPI.IN_PLACE if it is already in `out`. The MPI standard requires IN_PLACE on all
            ranks or on none. Here it only saves a copy on one rank, and libraries accept a mixture.
    """
    comm, item = binder.comm, out.element_size()
    if min(blocks) == max(blocks):
        return partial(comm.Allgather, send, even_blocks(out.data_ptr(), blocks[0], comm.size, item))
    return partial(comm.Allgatherv, send, uneven_blocks(out.data_ptr(), blocks, item))


_GATHER = Algorithm(lambda s: direct_gather(s.size, s.root, s.nodes))
_SCATTER = Algorithm(lambda s: direct_scatter(s.size, s.root, s.nodes))


def gather(comm: Dispatcher, out: Any, x: Any, root: int, async_op: bool = False) -> Work | None:
    """Gather the x of all ranks into the root's out, in order of rank. Collective.

    Args:
        out: On the root, a contiguous tensor or array for all blocks; None on the other ranks.
        x: This rank's block: a contiguous tensor or array, with the same size and dtype on all ranks.
        root: Rank that receives the blocks.
        async_op: If true, return at once with a `Work`; do not touch either tensor before it is complete.

    Raises:
        InputError: The tensors cannot be communicated or do not fit together, or there is no such root.
        CommunicationError: MPI fails, or ranks of a node call different operations.
    """
    try:
        whole = None if out is None else (out.data_ptr(), out.numel(), out.dtype)
        ready = comm.ready["gather", x.data_ptr(), numel := x.numel(), x.dtype, whole, root]
    except NOT_READY:
        pass
    else:
        plain = x.is_contiguous() if numel > 1 else not is_negated(x, out)
        if plain and not async_op and (out is None or out.is_contiguous()):
            ready()
            return None
    return comm.call(GATHER, async_op, (x, out) if comm.rank == root else (x,), (False, True), root)


def scatter(comm: Dispatcher, out: Any, x: Any, root: int, async_op: bool = False) -> Work | None:
    """Send every rank its block of the root's x. Collective.

    Args:
        out: Receives this rank's block: a contiguous tensor or array, with the same size and dtype on all ranks.
        x: On the root, a contiguous tensor or array with all blocks in order of rank; None on the other ranks.
        root: Rank that has the blocks.
        async_op: If true, return at once with a `Work`; do not touch either tensor before it is complete.

    Raises:
        InputError: The tensors cannot be communicated or do not fit together, or there is no such root.
        CommunicationError: MPI fails, or ranks of a node call different operations.
    """
    try:
        whole = None if x is None else (x.data_ptr(), x.numel(), x.dtype)
        ready = comm.ready["scatter", out.data_ptr(), numel := out.numel(), out.dtype, whole, root]
    except NOT_READY:
        pass
    else:
        plain = out.is_contiguous() if numel > 1 else not is_negated(out, x)
        if plain and not async_op and (x is None or x.is_contiguous()):
            ready()
            return None
    return comm.call(SCATTER, async_op, (out, x) if comm.rank == root else (out,), (True, False), root)


def _bind_rooted(gathers: bool, binder: Binder, block: Tensor, whole: Tensor | None, root: int) -> Compiled:
    """Bind a gather or a scatter to memory.

    Args:
        gathers: True for a gather, False for a scatter.
        binder: Binder of the ranks.
        block: This rank's block.
        whole: All blocks, on the root; None on the other ranks.
        root: Rank that has all blocks.
    """
    comm, numel, item = binder.comm, block.numel(), block.element_size()
    block_address, whole_address = block.data_ptr(), whole.data_ptr() if whole is not None else 0
    if numel * item * comm.size <= LARGEST_COUNT:
        all_bytes = even_blocks(whole_address, numel, comm.size, item) if comm.rank == root else None
        block_bytes = bytes_at(block_address, numel * item)
        call = (
            partial(comm.Gather, block_bytes, all_bytes) if gathers else partial(comm.Scatter, all_bytes, block_bytes)
        )
        name = "gather" if gathers else "scatter"
        volume = library_volume(binder.topology, name, [numel * item] * comm.size, root)
        return Compiled([partial(call, root)], volume=volume)
    length = 0 if gathers and whole is None else numel
    here, there = (block_address, [0, numel]), (whole_address, [r * length for r in range(comm.size + 1)])
    (source, bounds), (inbox, cells) = (here, there) if gathers else (there, here)
    layout = Layout(block.dtype, bounds, source, source, inbox=inbox, inbox_bounds=cells)
    return binder.compile(binder.program(_GATHER if gathers else _SCATTER, binder.setting(block, root=root)), layout)


GATHER, SCATTER = (
    CollectiveOperation(
        name,
        partial(_bind_rooted, name == "gather"),
        parameters=("root",),
        by_rank=(False, True),
        synchronizes=False,
    )
    for name in ("gather", "scatter")
)


_ALL_TO_ALL = Algorithm(lambda s: direct_all_to_all(s.size, s.nodes))


def all_to_all(
    comm: Dispatcher,
    out: Any,
    x: Any,
    async_op: bool = False,
    *,
    out_counts: Sequence[int] | None = None,
    in_counts: Sequence[int] | None = None,
) -> Work | None:
    """Send block r of x to every rank r, and receive block s of out from every rank s. Collective.

    Args:
        out: Receives the blocks: a contiguous tensor or array.
        x: Blocks to send: a contiguous tensor or array with the dtype of out.
        async_op: If true, return at once with a `Work`; do not touch either tensor before it is complete.
        out_counts: Number of elements of each block of out; by default all are equal.
        in_counts: Number of elements of each block of x; by default all are equal.

    Raises:
        InputError: The tensors cannot be communicated or do not fit together.
        CommunicationError: MPI fails, or ranks of a node call different operations.
    """
    try:
        whole = out.data_ptr(), out.numel(), out.dtype
        ready = comm.ready["all_to_all", x.data_ptr(), numel := x.numel(), x.dtype, whole]
    except NOT_READY:
        pass
    else:
        simple = not async_op and in_counts is None and out_counts is None
        if simple and out.is_contiguous() and (x.is_contiguous() if numel > 1 else not is_negated(x, out)):
            ready()
            return None
    return comm.begin(partial(_check_all_to_all, comm, in_counts, out_counts), async_op, (x, out), (False, True))


def _check_all_to_all(
    comm: Dispatcher, in_counts: Sequence[int] | None, out_counts: Sequence[int] | None, x: Tensor, out: Tensor
) -> Invocation:
    received = block_sizes(comm, "all_to_all", None, out, out_counts, "x", "out")
    sent = block_sizes(comm, "all_to_all", None, x, in_counts, "out", "x")
    if out.dtype != x.dtype:
        raise InputError(f"all_to_all: x is {x.dtype}, out is {out.dtype}; make them the same")
    if in_counts is None and out_counts is None:
        if out.numel() != x.numel():
            problem = f"x has {x.numel()} elements, out {out.numel()}; make them equal or give counts"
            raise InputError(f"all_to_all: {problem}")
        return ALL_TO_ALL.invocation((x, out), (False, True), compared_values=True)
    bind = partial(_bind_uneven_all_to_all, comm.probe, received=received, sent=sent)
    return Invocation("all_to_all", bind, (x, out), (False, True), compared_values=False, uneven=True)


def _bind_all_to_all(binder: Binder, x: Tensor, out: Tensor) -> Compiled:
    comm, item, size = binder.comm, x.element_size(), binder.topology.size
    count = x.numel() // size
    if x.numel() * item > LARGEST_COUNT:
        return _bind_direct_all_to_all(binder, x, out, [count] * size, [count] * size)
    send, receive = (even_blocks(y.data_ptr(), count, size, item) for y in (x, out))
    volume = library_volume(binder.topology, "all_to_all", [count * item] * size)
    return Compiled([partial(comm.Alltoall, send, receive)], volume=volume)


ALL_TO_ALL = CollectiveOperation("all_to_all", _bind_all_to_all, by_rank=(True, True))


def _bind_uneven_all_to_all(
    probe: CollectiveOperation, binder: Binder, x: Tensor, out: Tensor, received: Sequence[int], sent: Sequence[int]
) -> Call:
    """Bind an all_to_all with uneven blocks, for one call.

    The ranks agree on the largest size by an all_reduce in each call, because sizes differ between ranks but all must
    choose the same algorithm.
    """
    item, largest = x.element_size(), torch.tensor([max(out.numel(), x.numel())])
    binder.run(probe.bind_cached(binder, largest, "max", "mpi", False))
    if int(largest) * item > LARGEST_COUNT:
        compiled = _bind_direct_all_to_all(binder, x, out, received, sent)
    else:
        send = uneven_blocks(x.data_ptr(), sent, item)
        receive = uneven_blocks(out.data_ptr(), received, item)
        volume = library_volume(binder.topology, "all_to_all", [count * item for count in sent])
        compiled = Compiled([partial(binder.comm.Alltoallv, send, receive)], volume=volume)
    return binder.with_signature(f"uneven all_to_all of {x.dtype}", compiled, synchronizes=False)


def _bind_direct_all_to_all(
    binder: Binder, x: Tensor, out: Tensor, received: Sequence[int], sent: Sequence[int]
) -> Compiled:
    """Bind an all_to_all by one message between every two ranks, for blocks too large for the library's call."""
    source, into = x.data_ptr(), out.data_ptr()
    layout = Layout(x.dtype, offsets(sent), source, source, inbox=into, inbox_bounds=offsets(received))
    return binder.compile(binder.program(_ALL_TO_ALL, binder.setting(x)), layout)
