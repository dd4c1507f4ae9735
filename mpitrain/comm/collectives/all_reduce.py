"""all_reduce: every rank's vector becomes the reduction of all vectors.

rank 0   a0 b0 c0        a b c
rank 1   a1 b1 c1   ->   a b c      a = a0 + a1 + a2
rank 2   a2 b2 c2        a b c
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from mpi4py import MPI
from torch import Tensor

from mpitrain.comm.algorithms.halving import doubling_all_reduce, halving_all_reduce
from mpitrain.comm.algorithms.pairwise import pairwise_all_reduce
from mpitrain.comm.algorithms.ring import ring_all_reduce
from mpitrain.comm.algorithms.shared import shared_all_reduce, staged_all_reduce
from mpitrain.comm.algorithms.tree import tree_all_reduce
from mpitrain.comm.algorithms.two_level import two_level_all_reduce
from mpitrain.comm.collectives import all_gather, library
from mpitrain.comm.collectives.binding import NOTHING, Binder, scaling
from mpitrain.comm.collectives.dispatch import Dispatcher
from mpitrain.comm.collectives.operation import NOT_READY, CollectiveOperation, Invocation
from mpitrain.comm.compression.base import Bucket, Compression
from mpitrain.comm.compression.channel import Channel
from mpitrain.comm.memory.board import described
from mpitrain.comm.memory.buffers import HALVES, as_tensor
from mpitrain.comm.programs.program import Program
from mpitrain.comm.runtime.executor import Compiled
from mpitrain.comm.runtime.kernels import Reduction
from mpitrain.comm.runtime.ordering import Call
from mpitrain.comm.runtime.work import Work
from mpitrain.comm.selection.registry import LIBRARY, Algorithm, Algorithms, always
from mpitrain.comm.selection.setting import RING_SEGMENT, STAGED_PIECE, Setting, cache_chunks, segments_of
from mpitrain.errors import InputError

_DIRECT_NODES = 8  # up to which every node sends to every other in two_level; more go round a ring, in long messages


def _halving(s: Setting) -> Program:
    if s.numel < s.size:
        return doubling_all_reduce(s.size, s.nodes)
    return halving_all_reduce(s.size, segments_of(s.nbytes // s.size, RING_SEGMENT), s.nodes)


def _shared(s: Setting) -> Program:
    if s.memory != "private":
        return shared_all_reduce(s.size, cache_chunks(s.nbytes // s.size), tree=s.reproducible)
    return staged_all_reduce(s.size, segments_of(s.nbytes, STAGED_PIECE, most=1 << 30), tree=s.reproducible)


def _two_level(s: Setting) -> Program:
    nodes = set(s.nodes)
    share = s.nbytes // max(1, len(nodes) * min(s.nodes.count(n) for n in nodes))
    return two_level_all_reduce(s.nodes, segments_of(share, RING_SEGMENT), direct=len(nodes) <= _DIRECT_NODES)


ALGORITHMS = Algorithms(
    "all_reduce",
    {
        "mpi": LIBRARY,
        "ring": Algorithm(lambda s: ring_all_reduce(s.size, segments_of(s.nbytes // s.size, RING_SEGMENT), s.nodes)),
        "tree": Algorithm(
            lambda s: tree_all_reduce(s.size, segments_of(s.nbytes, RING_SEGMENT), s.nodes), reproduces=always
        ),
        "halving": Algorithm(_halving, reproduces=lambda s: s.power_of_two),
        "shared": Algorithm(
            _shared, one_node=True, reach=True, stages=True, reproduces=always, instead="two_level or auto"
        ),
        "two_level": Algorithm(_two_level, reach=True, stages=True),
    },
)
_PAIRWISE = Algorithm(lambda s: pairwise_all_reduce(s.size, s.nodes), reproduces=always)


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
    """Reduce every rank's x element by element; each gets the result in its x. Collective.

    Args:
        x: A contiguous tensor or array, of one size and type on all ranks.
        op: sum, product, min, max or avg.
        algorithm: auto, mpi, ring, tree, halving, shared or two_level, or one that was registered.
        async_op: Return at once with a `Work`; x must not be touched before that is complete.
        compression: Send fewer bytes for about the sum or avg, see `mpitrain.comm.compression`; alike on all ranks.
        reproducible: Reduce in the order of a fixed binary tree over the ranks, so that the bits depend neither on
            the algorithm nor on where the ranks are.

    Raises:
        InputError: x cannot be communicated, or op or algorithm is not known or not possible for it.
        CommunicationError: MPI fails, or ranks of a node call different operations.
    """
    try:
        ready = comm.ready["all_reduce", x.data_ptr(), x.numel(), x.dtype, op, algorithm, reproducible]
    except NOT_READY:
        pass
    else:
        if not async_op and compression is None and x.is_contiguous():
            ready(x)
            return None
    tensor = as_tensor(x)
    if compression is not None:
        return _compressed(comm, tensor, op, algorithm, async_op, compression, reproducible)
    placed = ALGORITHMS.placed(algorithm, tensor)
    return comm.dispatch(OPERATION.on((tensor,), (True,), op, algorithm, reproducible, placed=placed), async_op)


def _compressed(
    comm: Dispatcher,
    x: Tensor,
    op: str,
    algorithm: str,
    async_op: bool,
    compression: Compression | Bucket,
    reproducible: bool,
) -> Work | None:
    """One operation of several collectives, all in the thread that carries it out."""
    compression.check(x.dtype, op)
    if reproducible:
        raise InputError("a compressed sum depends on the number of ranks; leave out reproducible or compression")

    def bind(binder: Binder, x: Tensor) -> Call:
        perform = partial(comm.perform, binder)
        channel = Channel(comm.size, partial(perform, OPERATION), partial(perform, all_gather.OPERATION))
        return partial(compression.all_reduce, channel, x, op, algorithm)

    alike = op, algorithm, str(compression)
    return comm.dispatch(Invocation("all_reduce", bind, (x,), (True,), alike=alike, on_device=True), async_op)


def program_of(name: str, setting: Setting) -> Program:
    """The program of an algorithm in this setting; where it is to reproduce sums and cannot, that of pairwise exchange.

    Raises InputError where the ranks are at the wrong places.
    """
    program = _serving(name, setting).program
    assert program is not None
    return program(setting)


def _serving(name: str, setting: Setting) -> Algorithm:
    """What serves for the named algorithm."""
    algorithm = ALGORITHMS[name]
    if algorithm.one_node and not setting.one_node:
        raise InputError(f"algorithm {name} needs all ranks on one node; use {algorithm.instead}", agreed=True)
    return _PAIRWISE if setting.reproducible and not algorithm.reproduces(setting) else algorithm


def _bind(binder: Binder, x: Tensor, op: str, algorithm: str, reproducible: bool, said: str | None = None) -> Compiled:
    """said: the caller's arguments, where x is not the caller's."""
    reduction = Reduction.of(op, x.dtype, binder.topology.size)
    if binder.topology.size == 1 or x.numel() == 0:
        return NOTHING
    setting = binder.setting(x, reproducible=reproducible)
    if said is None:
        said = _said(binder, x, op, algorithm, reproducible, binder.place(x))
    name = binder.choose(ALGORITHMS, algorithm, setting)
    chosen, neighbours = _serving(name, setting), None
    if chosen.program is None:
        if x.dtype in HALVES:
            return binder.widened(x, lambda wide: _bind(binder, wide, op, name, False))
        call, pieces = binder.comm.Allreduce, library.typed_pieces(x)
        calls = [partial(call, MPI.IN_PLACE, piece, reduction.mpi_op) for piece in pieces]
        return Compiled([*calls, *scaling(x, reduction)])
    if chosen.reach:
        arena, neighbours = binder.reach(x)
        if neighbours is not None:
            setting = replace(setting, memory="reachable")
        elif arena is None and (not chosen.stages or binder.staging() is None):
            return _bind(binder, x, op, "ring", reproducible)
    program = binder.program(chosen, setting)
    if x.dtype in HALVES and program.sends_partial_sums:
        return binder.widened(x, lambda wide: _bind(binder, wide, op, name, reproducible, said))
    if chosen.reach and setting.memory == "private" and not program.slots:
        return binder.through_staging(x, lambda piece: _bind(binder, piece, op, name, reproducible, said))
    return binder.compile(program, binder.in_place(program, x, neighbours), reduction, binder.arena_of(x), said=said)


def _said(binder: Binder, x: Tensor, op: str, algorithm: str, reproducible: bool, place: str = "") -> str:
    return described("all_reduce", x.numel(), x.dtype, op, "reproducible" * reproducible, place)


OPERATION = CollectiveOperation(
    "all_reduce",
    1,
    _bind,
    _said,
    always,
    parameters=("op", "algorithm", "reproducible"),
    by_rank=(False,),
    in_place=True,
)
