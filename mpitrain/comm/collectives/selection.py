"""Which program an operation uses: a pure function of the operation, its size and where the ranks and data are.

`tuning.py` says which algorithm is fastest; here an algorithm's name becomes a program that is right for the
call, or a reason why it cannot be.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpitrain.comm.algorithms.halving import doubling_all_reduce, halving_all_reduce
from mpitrain.comm.algorithms.pairwise import pairwise_all_reduce
from mpitrain.comm.algorithms.ring import ring_all_reduce
from mpitrain.comm.algorithms.shared import shared_all_reduce, staged_all_reduce
from mpitrain.comm.algorithms.tree import tree_all_reduce
from mpitrain.comm.algorithms.two_level import two_level_all_reduce
from mpitrain.comm.programs.program import Program
from mpitrain.errors import InputError

ALGORITHMS = ("mpi", "ring", "tree", "halving", "shared", "two_level")

RING_SEGMENT = 1 << 20  # bytes of one ring message; smaller ones cost more Python than they overlap
SHARED_CHUNK = 1 << 17  # bytes summed and written while they are in a core's cache
STAGED_PIECE = 1 << 20  # bytes of a vector outside an arena that are in one staging slot
MOST_SEGMENTS = 16
DIRECT_NODES = 8  # up to which every node sends to every other in two_level; more go round a ring, in long messages


@dataclass(frozen=True)
class Setting:
    """One operation as far as it matters to the choice. nbytes: of a rank's whole vector.

    memory: where every rank's vector lies: "arena" (shared by its node), "reachable" (the system lets neighbours
    read and write it), or "private".
    """

    nbytes: int
    numel: int
    nodes: tuple[int, ...]
    memory: str
    crowded: bool = False  # more ranks than cores
    reproducible: bool = False

    @property
    def size(self) -> int:
        return len(self.nodes)

    @property
    def one_node(self) -> bool:
        return len(set(self.nodes)) == 1

    @property
    def place(self) -> str:
        """The tuning rules that apply (see `tuning.PLACES`)."""
        if len(set(self.nodes)) == self.size:
            place = "nodes single"
        else:
            place = ("node" if self.one_node else "nodes") + (" arena" if self.memory == "arena" else "")
        return place + (" crowded" if self.crowded else "")


def segments_of(nbytes: int, piece: int, most: int = MOST_SEGMENTS) -> int:
    return max(1, min(most, -(-nbytes // piece)))


def all_reduce_program(algorithm: str, setting: Setting) -> Program:
    """The program of `algorithm`; with setting.reproducible the fixed tree over ranks, whatever moves the data.

    Raises InputError where the algorithm cannot serve the ranks' places.
    """
    size, nodes, nbytes = setting.size, setting.nodes, setting.nbytes
    if algorithm == "shared":
        if not setting.one_node:
            raise InputError("algorithm shared needs all ranks on one node; use two_level or auto", agreed=True)
        if setting.memory != "private":
            chunks = segments_of(nbytes // size, SHARED_CHUNK, most=1 << 20)
            return shared_all_reduce(size, chunks, tree=setting.reproducible)
        return staged_all_reduce(size, segments_of(nbytes, STAGED_PIECE, most=1 << 30), tree=setting.reproducible)
    if algorithm == "tree":
        return tree_all_reduce(size, segments_of(nbytes, RING_SEGMENT), nodes)
    if algorithm == "halving" and (not setting.reproducible or size & (size - 1) == 0):
        if setting.numel < size:
            return doubling_all_reduce(size, nodes)
        return halving_all_reduce(size, segments_of(nbytes // size, RING_SEGMENT), nodes)
    if setting.reproducible:  # the other algorithms sum in an order of their own
        return pairwise_all_reduce(size, nodes)
    if algorithm == "ring":
        return ring_all_reduce(size, segments_of(nbytes // size, RING_SEGMENT), nodes)
    if algorithm == "two_level":
        share = nbytes // max(1, len(set(nodes)) * min(nodes.count(n) for n in set(nodes)))
        direct = len(set(nodes)) <= DIRECT_NODES
        return two_level_all_reduce(nodes, segments_of(share, RING_SEGMENT), direct=direct)
    raise InputError(f"there is no algorithm {algorithm!r}; use auto, {', '.join(ALGORITHMS)}", agreed=True)
