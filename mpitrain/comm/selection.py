"""The algorithms of the operations that have several, which is fastest where, and which of them serves a call.

Each says how it makes its program, and what it needs; the order is that in which messages name them. What serves is the
one that is asked for, or the fastest that is possible, or what stands in for it. Operations ask as they bind a vector
to its memory. Whoever has no ranks, only a setting, asks `serving`. Others may add algorithms from outside:

    from mpitrain.comm.selection import ALL_REDUCE, Algorithm

    ALL_REDUCE.register("star", Algorithm(lambda setting: star_all_reduce(setting.size, setting.nodes)))
    world.all_reduce(x, algorithm="star")

Every rank registers the same. An algorithm makes its program of a `Setting`: one call of the operation as far as it
matters to the choice, that is sizes, and where ranks and data are.

Which algorithm is fastest at which size is told by built-in defaults, or a table measured on this machine.
`python -m mpitrain.doctor --tune` measures and writes it, one file per kind of machine and
MPI library, under $XDG_CACHE_HOME/mpitrain (or ~/.cache/mpitrain). Rank 0 reads it; all ranks use the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from mpitrain.comm.algorithms import messages, shared
from mpitrain.comm.memory.elements import LARGEST_COUNT
from mpitrain.comm.programs.program import Program
from mpitrain.errors import InputError
from mpitrain.storage.disk import read_plain, write_whole
from mpitrain.storage.text import bytes_text

RING_SEGMENT = 1 << 20  # bytes of one ring message; smaller ones cost more Python than they overlap
SHARED_CHUNK = 1 << 17  # bytes summed and written while they are in a core's cache
STAGED_PIECE = 1 << 20  # bytes of a vector outside an arena that are in one staging slot


@dataclass(frozen=True)
class Setting:
    """What algorithms make their programs from; the same on all ranks.

    Attributes:
        nbytes: Bytes of the whole vector.
        numel: Elements of the whole vector.
        nodes: The node of each rank.
        memory: Where every rank's vector lies: "arena" (shared by its node), "reachable" (the system lets neighbours
            read and write it), "device" (an arena on devices that the ranks have mapped), or "private".
        oversubscribed: Whether some node has more ranks than cores.
        reproducible: Whether sums are to be taken in the order of the fixed tree over the ranks.
        root: That of an operation that has one.
        block: Bytes of the longest of the blocks, one a rank, where the vector consists of such.
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
        """The number of ranks."""
        return len(self.nodes)

    @property
    def one_node(self) -> bool:
        """Whether all ranks are on one node."""
        return len(set(self.nodes)) == 1

    @property
    def place(self) -> str:
        """The tuning rules that apply (see `Tuning`)."""
        if len(set(self.nodes)) == self.size:
            place = "nodes single"
        else:
            place = ("node" if self.one_node else "nodes") + (" arena" if self.memory == "arena" else "")
        return place + (" oversubscribed" if self.oversubscribed else "")


def segments_of(nbytes: int, piece: int, most: int = 16) -> int:
    """How many segments of about `piece` bytes a block of nbytes is cut into."""
    return max(1, min(most, -(-nbytes // piece)))


def _messages(nbytes: int) -> int:
    """In how many messages, which follow each other, a block is sent."""
    return segments_of(nbytes, RING_SEGMENT)


def cache_chunks(nbytes: int) -> int:
    """How many chunks a block is cut into that is summed chunk by chunk in a core's cache."""
    return segments_of(nbytes, SHARED_CHUNK, most=1 << 20)


def always(*_: object) -> bool:
    """True, whatever it is asked of."""
    return True


@dataclass(frozen=True)
class Algorithm:
    """How one algorithm makes its program, and what it needs.

    Attributes:
        program: Makes the program for a setting; None stands for the MPI library's own call.
        one_node: Whether it needs all ranks on one node.
        reach: Whether ranks touch each other's vectors, which must then lie in an arena or where the system lets
            neighbours reach them.
        stages: Whether, where they cannot, shared staging memory stands in for the vectors; only `reach` asks for it.
        reproduces: For which settings it reduces in the order of the fixed tree over the ranks (`tree_order`).
        instead: The algorithms to name where it cannot be used.
    """

    program: Callable[[Setting], Program] | None
    one_node: bool = False
    reach: bool = False
    stages: bool = False
    reproduces: Callable[[Setting], bool] = lambda setting: False
    instead: str = "auto"


LIBRARY = Algorithm(program=None)


class Algorithms(dict[str, Algorithm]):
    """The algorithms of one operation, by name."""

    def __init__(self, operation: str, algorithms: Mapping[str, Algorithm]) -> None:
        super().__init__(algorithms)
        self.operation = operation

    def register(self, name: str, algorithm: Algorithm) -> None:
        """Add an algorithm, which `algorithm=name` chooses from then on.

        Raises:
            InputError: The operation has an algorithm of that name.
        """
        if name == "auto" or name in self:
            raise InputError(f"{self.operation} has an algorithm {name!r} already; register yours under another name")
        self[name] = algorithm

    def unregister(self, name: str) -> None:
        """Take back what was registered; tensors it was used on may stay bound to it."""
        del self[name]

    def placed(self, name: str, x: Tensor) -> Tensor | None:
        """x, where ranks may touch each other's vectors, so that it matters where these lie in an arena; else None."""
        return x if name == "auto" or (name in self and self[name].reach) else None

    def __missing__(self, name: str) -> Algorithm:
        """Raise InputError, on all ranks: there is no algorithm of that name."""
        *most, last = ("auto", *self)
        known = f"{', '.join(most)} or {last}"
        raise InputError(f"{self.operation} has no algorithm {name!r}; use {known}", agreed=True)


KIB, MIB = 1 << 10, 1 << 20
Rule = tuple[int, str]  # up to this many bytes (exclusive), this algorithm
_NO_LIMIT = 1 << 62
_CLEARLY = 0.95  # of the time of the algorithm used for smaller vectors


def _shared_from(*limits: int) -> dict[str, tuple[Rule, ...]]:
    """Rules of an operation that goes through the memory of one node from so many bytes on, and by MPI otherwise.

    The limits are those from which it was at least as fast at 2 ranks on 2 cores, and at 4 ranks where oversubscribed:
    in an arena, there where oversubscribed, elsewhere, and elsewhere where oversubscribed.
    """
    places = "node arena", "node arena oversubscribed", "node", "node oversubscribed"
    return {place: ((limit, "mpi"), (_NO_LIMIT, "shared")) for place, limit in zip(places, limits, strict=True)}


# operation -> where the ranks and the data are -> rules in order of size; elsewhere: MPI
_DEFAULTS: dict[str, dict[str, tuple[Rule, ...]]] = {
    "all_reduce": {
        **_shared_from(12 * KIB, 32 * KIB, 96 * KIB, 512 * KIB),
        **dict.fromkeys(
            ["nodes", "nodes arena", "nodes oversubscribed", "nodes arena oversubscribed"],
            ((64 * KIB, "mpi"), (_NO_LIMIT, "two_level")),
        ),
        **dict.fromkeys(["nodes single", "nodes single oversubscribed"], ((16 * MIB, "mpi"), (_NO_LIMIT, "ring"))),
    },
    "reduce": _shared_from(96 * KIB, 192 * KIB, MIB, MIB),
    "reduce_scatter": _shared_from(32 * KIB, 96 * KIB, 128 * KIB, MIB),
    "broadcast": _shared_from(96 * KIB, 192 * KIB, 2 * MIB, 2 * MIB),
    "all_gather": _shared_from(16 * KIB, 64 * KIB, 4 * MIB, 8 * MIB),
}


@dataclass(frozen=True)
class Tuning:
    """Rules by operation and place.

    Attributes:
        measured: Rules that override the defaults, by "operation place/ranks".
        origin: Where these come from.
    """

    measured: Mapping[str, Sequence[Rule]] = field(default_factory=dict)
    origin: str = "built-in"

    def algorithm(self, algorithms: Algorithms, setting: Setting) -> str:
        """The operation's fastest algorithm for a vector of the setting's size, ranks and place."""
        rules = self.rules(algorithms.operation, setting.place, setting.size)
        if any(name not in algorithms for _, name in rules):  # one that this job has not registered
            rules = Tuning().rules(algorithms.operation, setting.place, setting.size)
        if not rules:  # of an operation that is not in the table
            return "mpi" if "mpi" in algorithms else next(iter(algorithms))
        return next(name for limit, name in rules if setting.nbytes < limit)

    def rules(self, operation: str, place: str, ranks: int) -> Sequence[Rule]:
        """In order of size; none for an operation that is not in the table."""
        by_place = _DEFAULTS.get(operation)
        otherwise = () if by_place is None else by_place.get(place, ((_NO_LIMIT, "mpi"),))
        return self.measured.get(rules_key(operation, place, ranks)) or otherwise

    def is_measured(self, operation: str, place: str, ranks: int) -> bool:
        """Whether there are rules of this machine's own."""
        return rules_key(operation, place, ranks) in self.measured

    def to_json(self) -> str:
        """The table as text, from which `from_json` makes it again."""
        return json.dumps({"origin": self.origin, "measured": {k: list(v) for k, v in self.measured.items()}})

    @staticmethod
    def from_json(text: str) -> Tuning:
        """Raises ValueError for a text that is not a table."""
        try:
            values = json.loads(text)
            measured = {
                _present(key): tuple((int(limit), str(name)) for limit, name in rules)
                for key, rules in values["measured"].items()
            }
            if any(not rules or rules[-1][0] < _NO_LIMIT for rules in measured.values()):
                raise ValueError("rules without an end")
            return Tuning(measured, str(values["origin"]))
        except (LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"not a tuning table: {error}") from None


def rules_key(operation: str, place: str, ranks: int) -> str:
    """Under which the table keeps what was measured."""
    return f"{operation} {place}/{ranks}"


def _present(key: str) -> str:
    """A key as it is now written: the first tables knew all_reduce alone, and said crowded."""
    key = key.replace(" crowded", " oversubscribed")
    return f"all_reduce {key}" if key.startswith("node") else key


def rules_from(times: Mapping[int, Mapping[str, float]]) -> tuple[Rule, ...]:
    """Rules by measured seconds of each algorithm at each size in bytes.

    A change of algorithm lies half-way (geometrically) between two sizes, and is made only for a clear gain, so
    that noise does not make rules.
    """
    rules: list[Rule] = []
    chosen, last = "", 0
    for size in sorted(times):
        fastest = min(times[size], key=times[size].__getitem__)
        if not chosen:
            chosen = fastest
        elif times[size][fastest] < times[size].get(chosen, float("inf")) * _CLEARLY:
            rules.append((round((last * size) ** 0.5), chosen))
            chosen = fastest
        last = size
    return (*rules, (_NO_LIMIT, chosen))


def describe_rules(rules: Sequence[Rule]) -> str:
    """mpi below 12 KiB, then shared."""
    *changes, (_, last) = rules
    parts = [f"{name} below {bytes_text(limit)}" for limit, name in changes]
    return ", then ".join([*parts, last])


def table_path(machine: str) -> Path:
    """Where the table of a machine (see `topology.this_machine`) is kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "mpitrain" / f"tuning-{machine}.json"


def load_tuning(machine: str) -> Tuning:
    """The measured table of the machine, or the built-in defaults where there is none that can be read."""
    try:
        return Tuning.from_json(read_plain(table_path(machine)).decode())
    except (OSError, ValueError):
        return Tuning()


def keep_tuning(machine: str, measured: Mapping[str, Sequence[Rule]], origin: str) -> Path:
    """Write the machine's table, with the rules for other places and rank counts that it had; its path."""
    path = table_path(machine)
    table = Tuning({**load_tuning(machine).measured, **measured}, origin)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, table.to_json())
    return path


_DIRECT_NODES = 8  # up to which every node sends to every other in two_level; more go round a ring, in long messages


def _halving_all_reduce(s: Setting) -> Program:
    if s.numel < s.size:
        return messages.doubling_all_reduce(s.size, s.nodes)
    return messages.halving_all_reduce(s.size, _messages(s.nbytes // s.size), s.nodes)


def _shared_all_reduce(s: Setting) -> Program:
    if s.memory != "private":
        return shared.shared_all_reduce(s.size, cache_chunks(s.nbytes // s.size), tree=s.reproducible)
    return shared.staged_all_reduce(s.size, segments_of(s.nbytes, STAGED_PIECE, most=1 << 30), tree=s.reproducible)


def _two_level_all_reduce(s: Setting) -> Program:
    nodes = set(s.nodes)
    share = s.nbytes // max(1, len(nodes) * min(s.nodes.count(n) for n in nodes))
    return shared.two_level_all_reduce(s.nodes, _messages(share), direct=len(nodes) <= _DIRECT_NODES)


ALL_REDUCE = Algorithms(
    "all_reduce",
    {
        "mpi": LIBRARY,
        "ring": Algorithm(lambda s: messages.ring_all_reduce(s.size, _messages(s.nbytes // s.size), s.nodes)),
        "tree": Algorithm(lambda s: messages.tree_all_reduce(s.size, _messages(s.nbytes), s.nodes), reproduces=always),
        "halving": Algorithm(_halving_all_reduce, reproduces=lambda s: s.size & (s.size - 1) == 0),
        "shared": Algorithm(
            _shared_all_reduce, one_node=True, reach=True, stages=True, reproduces=always, instead="two_level or auto"
        ),
        "two_level": Algorithm(_two_level_all_reduce, reach=True, stages=True),
    },
)
# for sums in the order of the tree, where the named algorithm takes another; not among those to be named
PAIRWISE_ALL_REDUCE = Algorithm(lambda s: messages.pairwise_all_reduce(s.size, s.nodes), reproduces=always)


def _shared_reduce_scatter(s: Setting) -> Program:
    return shared.shared_reduce_scatter(s.size, cache_chunks(s.block), tree=s.reproducible)


REDUCE_SCATTER = Algorithms(
    "reduce_scatter",
    {
        "mpi": LIBRARY,
        "ring": Algorithm(lambda s: messages.ring_reduce_scatter(s.size, _messages(s.block), s.nodes)),
        "halving": Algorithm(lambda s: messages.halving_reduce_scatter(s.size, s.nodes)),
        "pairwise": Algorithm(lambda s: messages.pairwise_reduce_scatter(s.size, s.nodes), reproduces=always),
        "shared": Algorithm(_shared_reduce_scatter, one_node=True, reach=True, reproduces=always),
    },
)

ALL_GATHER = Algorithms(
    "all_gather",
    {
        "mpi": LIBRARY,
        "ring": Algorithm(lambda s: messages.ring_all_gather(s.size, _messages(s.block), s.nodes)),
        "halving": Algorithm(lambda s: messages.doubling_all_gather(s.size, s.nodes)),
        "shared": Algorithm(lambda s: shared.shared_all_gather(s.size), one_node=True, reach=True),
    },
)

BROADCAST = Algorithms(
    "broadcast",
    {
        "mpi": LIBRARY,
        "shared": Algorithm(lambda s: shared.shared_broadcast(s.size, s.root), one_node=True, reach=True),
        "tree": Algorithm(lambda s: messages.tree_broadcast(s.size, s.root, _messages(s.nbytes), s.nodes)),
    },
)


def _shared_reduce(s: Setting) -> Program:
    return shared.shared_reduce(s.size, s.root, cache_chunks(s.nbytes // s.size))


REDUCE = Algorithms(
    "reduce",
    {
        "mpi": LIBRARY,
        "shared": Algorithm(_shared_reduce, one_node=True, reach=True),
        "tree": Algorithm(lambda s: messages.tree_reduce(s.size, s.root, _messages(s.nbytes), s.nodes)),
    },
)

TABLES = {table.operation: table for table in (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, REDUCE)}


def serving(operation: str, setting: Setting, algorithm: str = "auto") -> tuple[str, Program | None]:
    """Return what serves a call of an operation on fp32 in host memory, as the operation itself would find.

    A vector in private memory that an algorithm has to reach passes through shared staging memory; two_level, whose
    program has no slots for that, then runs once for each window of it (`binding.WINDOW`) and not once for the vector.

    Args:
        operation: all_reduce, reduce_scatter, all_gather, broadcast or reduce.
        setting: That of the call, with `block` where the vector consists of blocks.
        algorithm: The algorithm that the call asks for; "auto" chooses by the built-in rules.

    Returns:
        The name of the algorithm, and its program; None where the MPI library's own call serves, or where there is
        nothing to do.

    Raises:
        InputError: There is no such operation or algorithm, or it is not possible in the setting.
    """
    algorithms = TABLES.get(operation)
    if algorithms is None:
        raise InputError(f"operation {operation!r} has no table of algorithms; use {', '.join(TABLES)}")
    name = _name(algorithms, setting, algorithm)
    chosen = all_reduce_algorithm(name, setting) if algorithms is ALL_REDUCE else algorithms[name]
    if chosen.reach and setting.memory == "private" and not chosen.stages:
        if algorithms is not ALL_REDUCE:
            raise InputError(f"algorithm {name} of {operation} cannot reach private memory; use {chosen.instead}")
        name, chosen = "ring", all_reduce_algorithm("ring", setting)
    if chosen.one_node and not setting.one_node:
        raise InputError(f"algorithm {name} of {operation} needs all ranks on one node; use {chosen.instead}")
    if chosen.program is None or setting.size == 1 or setting.numel == 0:
        return name, None
    return name, chosen.program(setting)


def _name(algorithms: Algorithms, setting: Setting, algorithm: str) -> str:
    name, by_itself = algorithm, algorithm == "auto"
    if by_itself and algorithms.operation == "all_gather" and setting.block * setting.size != setting.nbytes:
        name = "mpi"  # of blocks that differ
    elif by_itself:
        name = fastest(algorithms, setting, Tuning(), lambda: setting.memory == "reachable")
    if algorithms is REDUCE_SCATTER:
        return reduce_scatter_name(name, setting, by_itself=by_itself, halves=False)
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
