"""Selection of algorithms: the algorithms of each operation, the fastest one for a call, and the fallbacks.

Each `Algorithm` makes its program and states its requirements. The tables list them in the order in which messages name
them. A call uses the requested algorithm, or with "auto" the fastest possible one, or a fallback if the algorithm
cannot serve the call. Operations select when they bind a vector to memory; `select_program` selects for a setting
alone, without any ranks. Users can add algorithms:

    from mpitrain.comm.selection import ALL_REDUCE, Algorithm

    ALL_REDUCE.register("star", Algorithm(lambda setting: star_all_reduce(setting.size, setting.nodes)))
    world.all_reduce(x, algorithm="star")

Every rank must register the same algorithms. An algorithm makes its program from a `Setting`, which describes one call:
sizes, and the placement of ranks and data.

The fastest algorithm for each size comes from the rules of `tuning`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from mpitrain.comm.algorithms import messages, shared
from mpitrain.comm.memory.elements import LARGEST_COUNT
from mpitrain.comm.programs.program import Program
from mpitrain.comm.tuning import Tuning
from mpitrain.errors import InputError

RING_SEGMENT = 1 << 20  # bytes of one ring message; with smaller ones, Python costs more time than overlap saves
SHARED_CHUNK = 1 << 17  # bytes of a chunk that is summed and written while it is in a core's cache
READ_CHUNK = 1 << 19  # the same where a system call reads the chunk from another process: each call costs microseconds
STAGED_PIECE = 2 << 20  # largest number of bytes of the chunks of all ranks in one staging slot
STAGED_CHUNK = 1 << 19  # bytes of a chunk of a whole vector of at most STAGED_PIECE bytes: fewer fences gain more here


@dataclass(frozen=True)
class Setting:
    """Properties of a call from which algorithms make their programs; equal on all ranks.

    Attributes:
        nbytes: Bytes of the whole vector.
        numel: Number of elements of the whole vector.
        nodes: Node number of each rank.
        memory: Location of the ranks' vectors: "arena" (shared by the node), "reachable" (private, but accessible to
            other ranks by system calls), "device" (a device arena that the ranks have mapped), or "private".
        oversubscribed: True if some machine has more ranks than cores.
        reproducible: True if sums must follow the fixed tree over the ranks.
        root: Root rank, for an operation that has one.
        block: Bytes of the longest block, if the vector has one block per rank.
    """

    nbytes: int
    numel: int
    nodes: tuple[int, ...]
    memory: str
    oversubscribed: bool = False
    reproducible: bool = False
    root: int = 0
    block: int = 0

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.nodes)

    @property
    def one_node(self) -> bool:
        """True if all ranks are on one node."""
        return len(set(self.nodes)) == 1

    @property
    def place(self) -> str:
        """Placement of ranks and data, a part of the key of the tuning rules (see `Tuning`)."""
        if len(set(self.nodes)) == self.size:
            place = "nodes single"
        else:
            place = ("node" if self.one_node else "nodes") + (" arena" if self.memory == "arena" else "")
        return place + (" oversubscribed" if self.oversubscribed else "")


def segments_of(nbytes: int, piece: int, most: int = 16) -> int:
    """Return the number of segments into which a block is cut.

    Args:
        nbytes: Bytes of the block.
        piece: Approximate bytes of a segment.
        most: Largest number of segments.
    """
    return max(1, min(most, -(-nbytes // piece)))


def _message_count(nbytes: int) -> int:
    """Return the number of consecutive messages in which a block is sent."""
    return segments_of(nbytes, RING_SEGMENT)


def cache_chunks(nbytes: int, memory: str = "arena") -> int:
    """Return the number of chunks into which a block is cut, so that each chunk is summed in a core's cache.

    Args:
        nbytes: Bytes of the block.
        memory: Location of the vectors, see `Setting.memory`.
    """
    mapped = memory in ("arena", "device")
    return segments_of(nbytes, SHARED_CHUNK if mapped else READ_CHUNK, most=1 << 20)


def always(*_: object) -> bool:
    """Return True for any arguments."""
    return True


@dataclass(frozen=True)
class Algorithm:
    """One algorithm: its program and its requirements.

    Attributes:
        program: Makes the program for a setting; None stands for the call of the MPI library.
        one_node: True if all ranks must be on one node.
        reach: True if ranks access each other's vectors, which must then be in an arena or accessible by system calls.
        stages: True if vectors pass through shared staging memory; with `reach`, only those that cannot be accessed.
        reproduces: For a setting, returns True if the algorithm reduces in the order of the fixed tree over the ranks
            (`tree_order`).
        order: Name of the order in which it reduces; algorithms with the same order give the same bits. "" if no other
            algorithm has this order.
        instead: Algorithms to recommend in messages if this one cannot be used.
    """

    program: Callable[[Setting], Program] | None
    one_node: bool = False
    reach: bool = False
    stages: bool = False
    reproduces: Callable[[Setting], bool] = lambda setting: False
    order: str = ""
    instead: str = "auto"


LIBRARY = Algorithm(program=None)


class Algorithms(dict[str, Algorithm]):
    """Algorithms of one operation, by name."""

    def __init__(self, operation: str, algorithms: Mapping[str, Algorithm]) -> None:
        super().__init__(algorithms)
        self.operation = operation

    def register(self, name: str, algorithm: Algorithm) -> None:
        """Add an algorithm; calls select it with `algorithm=name`. Every rank must do the same.

        Args:
            name: Name of the algorithm.
            algorithm: The algorithm.

        Raises:
            InputError: The operation already has an algorithm of that name.
        """
        if name == "auto" or name in self:
            raise InputError(f"{self.operation} already has an algorithm {name!r}; register yours under another name")
        self[name] = algorithm

    def unregister(self, name: str) -> None:
        """Remove a registered algorithm; operations that are already bound may continue to use it."""
        del self[name]

    def placed(self, name: str, x: Tensor) -> Tensor | None:
        """Return x if its place in an arena matters, because ranks may access each other's vectors; otherwise None.

        Args:
            name: Name of the algorithm, or "auto".
            x: The vector.
        """
        return x if name == "auto" or (name in self and self[name].reach) else None

    def __missing__(self, name: str) -> Algorithm:
        """Raise InputError, on all ranks, because there is no algorithm of that name."""
        *most, last = ("auto", *self)
        known = f"{', '.join(most)} or {last}"
        raise InputError(f"{self.operation} has no algorithm {name!r}; use {known}", agreed=True)


_DIRECT_NODES = 8  # up to this number, two_level sends directly between all nodes; more use a ring with long messages


def _halving_all_reduce(s: Setting) -> Program:
    if s.numel < s.size:
        return messages.doubling_all_reduce(s.size, s.nodes)
    return messages.halving_all_reduce(s.size, _message_count(s.nbytes // s.size), s.nodes)


def _shared_all_reduce(s: Setting) -> Program:
    if s.memory == "private":
        return _staged_all_reduce(s)
    return shared.shared_all_reduce(s.size, cache_chunks(s.nbytes // s.size, s.memory), tree=s.reproducible)


def _staged_all_reduce(s: Setting) -> Program:
    chunk = STAGED_CHUNK if s.nbytes <= STAGED_PIECE else min(SHARED_CHUNK, STAGED_PIECE // s.size)
    return shared.staged_all_reduce(s.size, segments_of(s.nbytes // s.size, chunk, most=1 << 30), tree=s.reproducible)


def _two_level_all_reduce(s: Setting) -> Program:
    nodes = set(s.nodes)
    share = s.nbytes // max(1, len(nodes) * min(s.nodes.count(n) for n in nodes))
    return shared.two_level_all_reduce(s.nodes, _message_count(share), direct=len(nodes) <= _DIRECT_NODES)


ALL_REDUCE = Algorithms(
    "all_reduce",
    {
        "mpi": LIBRARY,
        "ring": Algorithm(lambda s: messages.ring_all_reduce(s.size, _message_count(s.nbytes // s.size), s.nodes)),
        "tree": Algorithm(
            lambda s: messages.tree_all_reduce(s.size, _message_count(s.nbytes), s.nodes), reproduces=always
        ),
        "halving": Algorithm(_halving_all_reduce, reproduces=lambda s: s.size & (s.size - 1) == 0),
        "shared": Algorithm(
            _shared_all_reduce,
            one_node=True,
            reach=True,
            stages=True,
            reproduces=always,
            order="slices",
            instead="two_level or auto",
        ),
        "staged": Algorithm(
            _staged_all_reduce,
            one_node=True,
            stages=True,
            reproduces=always,
            order="slices",
            instead="two_level or auto",
        ),
        "two_level": Algorithm(_two_level_all_reduce, reach=True, stages=True),
    },
)
# fallback for reproducible sums if the requested algorithm has another order; it cannot be requested by name
PAIRWISE_ALL_REDUCE = Algorithm(lambda s: messages.pairwise_all_reduce(s.size, s.nodes), reproduces=always)


def _shared_reduce_scatter(s: Setting) -> Program:
    return shared.shared_reduce_scatter(s.size, cache_chunks(s.block, s.memory), tree=s.reproducible)


def _has_even_nodes(s: Setting) -> bool:
    """Return True if all nodes have the same number of ranks; else a rank has no partner on the emptiest node."""
    return len({s.nodes.count(node) for node in s.nodes}) == 1


def _two_level_reduce_scatter(s: Setting) -> Program:
    if not _has_even_nodes(s):
        return messages.ring_reduce_scatter(s.size, _message_count(s.block), s.nodes)
    return shared.two_level_reduce_scatter(s.nodes, _message_count(s.block))


REDUCE_SCATTER = Algorithms(
    "reduce_scatter",
    {
        "mpi": LIBRARY,
        "ring": Algorithm(lambda s: messages.ring_reduce_scatter(s.size, _message_count(s.block), s.nodes)),
        "halving": Algorithm(lambda s: messages.halving_reduce_scatter(s.size, s.nodes)),
        "pairwise": Algorithm(lambda s: messages.pairwise_reduce_scatter(s.size, s.nodes), reproduces=always),
        "shared": Algorithm(_shared_reduce_scatter, one_node=True, reach=True, reproduces=always, instead="two_level"),
        "two_level": Algorithm(_two_level_reduce_scatter, reach=True),
    },
)


def _two_level_all_gather(s: Setting) -> Program:
    if not _has_even_nodes(s):
        return messages.ring_all_gather(s.size, _message_count(s.block), s.nodes)
    return shared.two_level_all_gather(s.nodes)


ALL_GATHER = Algorithms(
    "all_gather",
    {
        "mpi": LIBRARY,
        "ring": Algorithm(lambda s: messages.ring_all_gather(s.size, _message_count(s.block), s.nodes)),
        "halving": Algorithm(lambda s: messages.doubling_all_gather(s.size, s.nodes)),
        "shared": Algorithm(lambda s: shared.shared_all_gather(s.size), one_node=True, reach=True, instead="two_level"),
        "two_level": Algorithm(_two_level_all_gather, reach=True),
    },
)

BROADCAST = Algorithms(
    "broadcast",
    {
        "mpi": LIBRARY,
        "shared": Algorithm(lambda s: shared.shared_broadcast(s.size, s.root), one_node=True, reach=True),
        "tree": Algorithm(lambda s: messages.tree_broadcast(s.size, s.root, _message_count(s.nbytes), s.nodes)),
    },
)


def _shared_reduce(s: Setting) -> Program:
    return shared.shared_reduce(s.size, s.root, cache_chunks(s.nbytes // s.size, s.memory))


REDUCE = Algorithms(
    "reduce",
    {
        "mpi": LIBRARY,
        "shared": Algorithm(_shared_reduce, one_node=True, reach=True),
        "tree": Algorithm(lambda s: messages.tree_reduce(s.size, s.root, _message_count(s.nbytes), s.nodes)),
    },
)

TABLES = {table.operation: table for table in (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, REDUCE)}


def select_program(operation: str, setting: Setting, algorithm: str = "auto") -> tuple[str, Program | None]:
    """Return the algorithm that a call uses for fp32 in host memory, by the same choice as the operation itself.

    If an algorithm has to access a vector in private memory, the vector passes through shared staging memory. The
    program of two_level has no staging slots: it then runs once for each window of the vector (`binding.WINDOW`), not
    once.

    Args:
        operation: all_reduce, reduce_scatter, all_gather, broadcast or reduce.
        setting: Setting of the call, with `block` if the vector has blocks.
        algorithm: Requested algorithm; "auto" chooses by the built-in rules.

    Returns:
        Name of the algorithm, and its program; the program is None if the call of the MPI library is used or there is
        nothing to do.

    Raises:
        InputError: There is no such operation or algorithm, or the algorithm is not possible in the setting.
    """
    algorithms = TABLES.get(operation)
    if algorithms is None:
        raise InputError(f"operation {operation!r} has no table of algorithms; use {', '.join(TABLES)}")
    name = _algorithm_name(algorithms, setting, algorithm)
    chosen = all_reduce_algorithm(name, setting) if algorithms is ALL_REDUCE else algorithms[name]
    if chosen.reach and setting.memory == "private" and not chosen.stages:
        if algorithms is not ALL_REDUCE:
            raise InputError(f"algorithm {name} of {operation} cannot access private memory; use {chosen.instead}")
        name, chosen = "ring", all_reduce_algorithm("ring", setting)
    if chosen.one_node and not setting.one_node:
        raise InputError(f"algorithm {name} of {operation} needs all ranks on one node; use {chosen.instead}")
    if chosen.program is None or setting.size == 1 or setting.numel == 0:
        return name, None
    return name, chosen.program(setting)


def _algorithm_name(algorithms: Algorithms, setting: Setting, algorithm: str) -> str:
    name, is_auto = algorithm, algorithm == "auto"
    if is_auto and algorithms.operation == "all_gather" and setting.block * setting.size != setting.nbytes:
        name = "mpi"  # blocks have different lengths
    elif is_auto:
        name = fastest(algorithms, setting, Tuning(), lambda: setting.memory == "reachable")
    if algorithms is REDUCE_SCATTER:
        return reduce_scatter_name(name, setting, is_auto=is_auto, is_half=False)
    return all_gather_name(name, setting) if algorithms.operation == "all_gather" else name


def algorithm_by_rules(algorithms: Algorithms, setting: Setting, tuning: Tuning) -> str:
    """Return the name of the algorithm that the rules of a tuning table give for a call.

    Args:
        algorithms: Algorithms of the operation.
        setting: Size, number of ranks and place of the call.
        tuning: The table.
    """
    rules = tuning.rules(algorithms.operation, setting.place, setting.size)
    if any(name not in algorithms for _, name in rules):  # the table has an algorithm that this job lacks
        rules = Tuning().rules(algorithms.operation, setting.place, setting.size)
    if not rules:  # the operation is not in the table
        return "mpi" if "mpi" in algorithms else next(iter(algorithms))
    return next(name for limit, name in rules if setting.nbytes < limit)


def fastest(algorithms: Algorithms, setting: Setting, tuning: Tuning, reachable: Callable[[], bool]) -> str:
    """Return the name of the fastest algorithm by the tuning table, or if it is not possible, "mpi" or "ring".

    Args:
        algorithms: Algorithms of the operation.
        setting: Setting of the call.
        tuning: The table.
        reachable: Returns True if ranks can access vectors outside arenas by system calls; called only if needed.
    """
    name = algorithm_by_rules(algorithms, setting, tuning)
    needs = algorithms[name]
    if needs.one_node and not setting.one_node:
        return "mpi"
    if needs.reach and not needs.stages and setting.memory != "arena" and not reachable():
        return "mpi" if setting.one_node else "ring"
    return name


def all_reduce_algorithm(name: str, setting: Setting) -> Algorithm:
    """Return the algorithm to use for a requested all_reduce algorithm.

    This is pairwise exchange if the call must be reproducible and the requested algorithm is not.

    Args:
        name: Requested algorithm.
        setting: Setting of the call.

    Raises:
        InputError: The algorithm needs all ranks on one node; raised on all ranks.
    """
    algorithm = ALL_REDUCE[name]
    if algorithm.one_node and not setting.one_node:
        raise InputError(f"algorithm {name} needs all ranks on one node; use {algorithm.instead}", agreed=True)
    return PAIRWISE_ALL_REDUCE if setting.reproducible and not algorithm.reproduces(setting) else algorithm


def reduce_scatter_name(name: str, setting: Setting, *, is_auto: bool, is_half: bool) -> str:
    """Return the name of the algorithm to use for a requested reduce_scatter algorithm.

    Args:
        name: Requested algorithm, or the choice of "auto".
        setting: Setting of the call.
        is_auto: True if "auto" chose the algorithm.
        is_half: True if elements have 16 bits. "auto" then uses pairwise instead of mpi, which sums 16-bit messages in
            fp32 where they arrive.
    """
    if name == "mpi" and is_auto and is_half:
        name = "pairwise"
    elif name == "mpi" and setting.numel > LARGEST_COUNT:
        name = "ring"
    return "pairwise" if setting.reproducible and not REDUCE_SCATTER[name].reproduces(setting) else name


def all_gather_name(name: str, setting: Setting) -> str:
    """Return the all_gather algorithm to use: the requested one, but ring if the vector is too long for mpi.

    Args:
        name: Requested algorithm.
        setting: Setting of the call.
    """
    return "ring" if name == "mpi" and setting.nbytes > LARGEST_COUNT else name
