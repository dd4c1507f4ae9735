"""The algorithms of the operations that have several, and which of them serves a call.

Each says how it makes its program, and what it needs; the order is that in which messages name them. What serves is the
one that is asked for, or the fastest that is possible, or what stands in for it. Operations ask as they bind a vector
to its memory. Whoever has no ranks, only a setting, asks `serving`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mpitrain.comm.algorithms.halving import (
    doubling_all_gather,
    doubling_all_reduce,
    halving_all_reduce,
    halving_reduce_scatter,
)
from mpitrain.comm.algorithms.pairwise import pairwise_all_reduce, pairwise_reduce_scatter
from mpitrain.comm.algorithms.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from mpitrain.comm.algorithms.shared import (
    shared_all_gather,
    shared_all_reduce,
    shared_broadcast,
    shared_reduce,
    shared_reduce_scatter,
    staged_all_reduce,
)
from mpitrain.comm.algorithms.tree import tree_all_reduce, tree_broadcast, tree_reduce
from mpitrain.comm.algorithms.two_level import two_level_all_reduce
from mpitrain.comm.memory.elements import LARGEST_COUNT
from mpitrain.comm.programs.program import Program
from mpitrain.comm.selection.registry import (
    LIBRARY,
    RING_SEGMENT,
    STAGED_PIECE,
    Algorithm,
    Algorithms,
    Setting,
    always,
    cache_chunks,
    segments_of,
)
from mpitrain.comm.selection.tuning import Tuning
from mpitrain.errors import InputError

_DIRECT_NODES = 8  # up to which every node sends to every other in two_level; more go round a ring, in long messages


def _halving_all_reduce(s: Setting) -> Program:
    if s.numel < s.size:
        return doubling_all_reduce(s.size, s.nodes)
    return halving_all_reduce(s.size, segments_of(s.nbytes // s.size, RING_SEGMENT), s.nodes)


def _shared_all_reduce(s: Setting) -> Program:
    if s.memory != "private":
        return shared_all_reduce(s.size, cache_chunks(s.nbytes // s.size), tree=s.reproducible)
    return staged_all_reduce(s.size, segments_of(s.nbytes, STAGED_PIECE, most=1 << 30), tree=s.reproducible)


def _two_level_all_reduce(s: Setting) -> Program:
    nodes = set(s.nodes)
    share = s.nbytes // max(1, len(nodes) * min(s.nodes.count(n) for n in nodes))
    return two_level_all_reduce(s.nodes, segments_of(share, RING_SEGMENT), direct=len(nodes) <= _DIRECT_NODES)


ALL_REDUCE = Algorithms(
    "all_reduce",
    {
        "mpi": LIBRARY,
        "ring": Algorithm(lambda s: ring_all_reduce(s.size, segments_of(s.nbytes // s.size, RING_SEGMENT), s.nodes)),
        "tree": Algorithm(
            lambda s: tree_all_reduce(s.size, segments_of(s.nbytes, RING_SEGMENT), s.nodes), reproduces=always
        ),
        "halving": Algorithm(_halving_all_reduce, reproduces=lambda s: s.power_of_two),
        "shared": Algorithm(
            _shared_all_reduce, one_node=True, reach=True, stages=True, reproduces=always, instead="two_level or auto"
        ),
        "two_level": Algorithm(_two_level_all_reduce, reach=True, stages=True),
    },
)
# for sums in the order of the tree, where the named algorithm takes another; not among those to be named
PAIRWISE_ALL_REDUCE = Algorithm(lambda s: pairwise_all_reduce(s.size, s.nodes), reproduces=always)


def _shared_reduce_scatter(s: Setting) -> Program:
    return shared_reduce_scatter(s.size, cache_chunks(s.block), tree=s.reproducible)


REDUCE_SCATTER = Algorithms(
    "reduce_scatter",
    {
        "mpi": LIBRARY,
        "ring": Algorithm(lambda s: ring_reduce_scatter(s.size, segments_of(s.block, RING_SEGMENT), s.nodes)),
        "halving": Algorithm(lambda s: halving_reduce_scatter(s.size, s.nodes)),
        "pairwise": Algorithm(lambda s: pairwise_reduce_scatter(s.size, s.nodes), reproduces=always),
        "shared": Algorithm(_shared_reduce_scatter, one_node=True, reach=True, reproduces=always),
    },
)

ALL_GATHER = Algorithms(
    "all_gather",
    {
        "mpi": LIBRARY,
        "ring": Algorithm(lambda s: ring_all_gather(s.size, segments_of(s.block, RING_SEGMENT), s.nodes)),
        "halving": Algorithm(lambda s: doubling_all_gather(s.size, s.nodes)),
        "shared": Algorithm(lambda s: shared_all_gather(s.size), one_node=True, reach=True),
    },
)

BROADCAST = Algorithms(
    "broadcast",
    {
        "mpi": LIBRARY,
        "shared": Algorithm(lambda s: shared_broadcast(s.size, s.root), one_node=True, reach=True),
        "tree": Algorithm(lambda s: tree_broadcast(s.size, s.root, segments_of(s.nbytes, RING_SEGMENT), s.nodes)),
    },
)


def _shared_reduce(s: Setting) -> Program:
    return shared_reduce(s.size, s.root, cache_chunks(s.nbytes // s.size))


REDUCE = Algorithms(
    "reduce",
    {
        "mpi": LIBRARY,
        "shared": Algorithm(_shared_reduce, one_node=True, reach=True),
        "tree": Algorithm(lambda s: tree_reduce(s.size, s.root, segments_of(s.nbytes, RING_SEGMENT), s.nodes)),
    },
)

TABLES = {table.operation: table for table in (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, REDUCE)}


BUILT_IN = Tuning()


def serving(
    operation: str, setting: Setting, tuning: Tuning = BUILT_IN, algorithm: str = "auto", *, halves: bool = False
) -> tuple[str, Program | None]:
    """What serves a call of an operation on host memory, as the operation itself would find.

    A vector in private memory that an algorithm has to reach passes through shared staging memory; two_level, whose
    program has no slots for that, then runs once for each window of it (`binding.WINDOW`) and not once for the vector.

    Args:
        operation: all_reduce, reduce_scatter, all_gather, broadcast or reduce.
        setting: That of the call, with `block` where the vector consists of blocks.
        tuning: By which "auto" chooses.
        algorithm: The algorithm that the call asks for.
        halves: Whether the elements are of 16 bits. Where the program sends partial sums
            (`Program.sends_partial_sums`), and in every reduce whose program does not reach the others' vectors, they
            travel as fp32: the program is the one for twice the bytes.

    Returns:
        The name of the algorithm, and its program; None where the MPI library's own call serves, or where there is
        nothing to do.

    Raises:
        InputError: There is no such operation or algorithm, or it is not possible in the setting.
    """
    algorithms = TABLES.get(operation)
    if algorithms is None:
        raise InputError(f"operation {operation!r} has no table of algorithms; use {', '.join(TABLES)}")
    name = _name(algorithms, setting, tuning, algorithm, halves)
    chosen = all_reduce_algorithm(name, setting) if algorithms is ALL_REDUCE else algorithms[name]
    if chosen.reach and setting.memory == "private" and not chosen.stages:
        if algorithms is not ALL_REDUCE:
            raise InputError(f"algorithm {name} of {operation} cannot reach private memory; use {chosen.instead}")
        name, chosen = "ring", all_reduce_algorithm("ring", setting)
    if chosen.one_node and not setting.one_node:
        raise InputError(f"algorithm {name} of {operation} needs all ranks on one node; use {chosen.instead}")
    if chosen.program is None or setting.size == 1 or setting.numel == 0:
        return name, None
    program = chosen.program(setting)
    if halves and (program.sends_partial_sums or (operation == "reduce" and not chosen.reach)):
        program = chosen.program(replace(setting, nbytes=2 * setting.nbytes, block=2 * setting.block))
    return name, program


def _name(algorithms: Algorithms, setting: Setting, tuning: Tuning, algorithm: str, halves: bool) -> str:
    name, by_itself = algorithm, algorithm == "auto"
    if by_itself and algorithms.operation == "all_gather" and setting.block * setting.size != setting.nbytes:
        name = "mpi"  # of blocks that differ
    elif by_itself:
        name = fastest(algorithms, setting, tuning, lambda: setting.memory == "reachable")
    if algorithms is REDUCE_SCATTER:
        return reduce_scatter_name(name, setting, by_itself=by_itself, halves=halves)
    return all_gather_name(name, setting) if algorithms.operation == "all_gather" else name


def fastest(algorithms: Algorithms, setting: Setting, tuning: Tuning, reachable: Callable[[], bool]) -> str:
    """Return the name of the algorithm that is fastest by the tuning table, if these ranks and data allow it, else mpi.

    Args:
        algorithms: Those of the operation.
        setting: That of the call.
        tuning: The table.
        reachable: Tells whether the system lets neighbours reach vectors outside arenas; asked where it matters.
    """
    name = tuning.algorithm(algorithms, setting)
    needs = algorithms[name]
    if needs.one_node and not setting.one_node:
        return "mpi"
    if needs.reach and not needs.stages and setting.memory != "arena" and not reachable():
        return "mpi"
    return name


def all_reduce_algorithm(name: str, setting: Setting) -> Algorithm:
    """What serves for the named algorithm of all_reduce: where it cannot reproduce sums as asked, pairwise exchange.

    Raises InputError, on all ranks, where the ranks are at the wrong places.
    """
    algorithm = ALL_REDUCE[name]
    if algorithm.one_node and not setting.one_node:
        raise InputError(f"algorithm {name} needs all ranks on one node; use {algorithm.instead}", agreed=True)
    return PAIRWISE_ALL_REDUCE if setting.reproducible and not algorithm.reproduces(setting) else algorithm


def reduce_scatter_name(name: str, setting: Setting, *, by_itself: bool, halves: bool) -> str:
    """What serves for the named algorithm of reduce_scatter.

    Args:
        name: The algorithm.
        setting: That of the call.
        by_itself: Whether "auto" chose it.
        halves: Whether the elements are of 16 bits: pairwise sums them in fp32 where they arrive, from 16-bit messages.
    """
    if name == "mpi" and by_itself and halves:
        name = "pairwise"
    elif name == "mpi" and setting.numel > LARGEST_COUNT:
        name = "ring"
    return "pairwise" if setting.reproducible and not REDUCE_SCATTER[name].reproduces(setting) else name


def all_gather_name(name: str, setting: Setting) -> str:
    """What serves for the named algorithm of all_gather: the library only for what it can count."""
    return "ring" if name == "mpi" and setting.nbytes > LARGEST_COUNT else name
