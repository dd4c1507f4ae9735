"""The algorithms of the operations that have several: how each makes its program, and what it needs.

The order is that in which messages name them.
"""

from __future__ import annotations

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
from mpitrain.comm.programs.program import Program
from mpitrain.comm.selection.registry import LIBRARY, Algorithm, Algorithms, always
from mpitrain.comm.selection.setting import RING_SEGMENT, STAGED_PIECE, Setting, cache_chunks, segments_of

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
