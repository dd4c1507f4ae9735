"""The algorithms of an operation by name: a table (`tables`), to which others may add from outside.

The operation's file has the table of the operation as ALGORITHMS.

    from mpitrain.comm.collectives import all_reduce
    from mpitrain.comm.selection.registry import Algorithm

    all_reduce.ALGORITHMS.register("star", Algorithm(lambda setting: star_all_reduce(setting.size, setting.nodes)))
    world.all_reduce(x, algorithm="star")

Every rank registers the same. An algorithm makes its program of a `Setting`: one call of the operation as far as it
matters to the choice, that is sizes, and where ranks and data are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from mpitrain.comm.programs.program import Program
from mpitrain.errors import InputError

RING_SEGMENT = 1 << 20  # bytes of one ring message; smaller ones cost more Python than they overlap
SHARED_CHUNK = 1 << 17  # bytes summed and written while they are in a core's cache
STAGED_PIECE = 1 << 20  # bytes of a vector outside an arena that are in one staging slot
MOST_SEGMENTS = 16


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
    def power_of_two(self) -> bool:
        """Whether the number of ranks is one."""
        return self.size & (self.size - 1) == 0

    @property
    def place(self) -> str:
        """The tuning rules that apply (see `tuning`)."""
        if len(set(self.nodes)) == self.size:
            place = "nodes single"
        else:
            place = ("node" if self.one_node else "nodes") + (" arena" if self.memory == "arena" else "")
        return place + (" oversubscribed" if self.oversubscribed else "")


def segments_of(nbytes: int, piece: int, most: int = MOST_SEGMENTS) -> int:
    """How many segments of about `piece` bytes a block of nbytes is cut into."""
    return max(1, min(most, -(-nbytes // piece)))


def cache_chunks(nbytes: int) -> int:
    """How many chunks a block is cut into that is summed chunk by chunk in a core's cache."""
    return segments_of(nbytes, SHARED_CHUNK, most=1 << 20)


def never(*_: object) -> bool:
    """False, whatever it is asked of."""
    return False


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
    reproduces: Callable[[Setting], bool] = never
    instead: str = "auto"


LIBRARY = Algorithm(program=None)


class Algorithms:
    """The algorithms of one operation."""

    def __init__(self, operation: str, algorithms: Mapping[str, Algorithm]) -> None:
        self.operation = operation
        self._by_name = dict(algorithms)

    def register(self, name: str, algorithm: Algorithm) -> None:
        """Add an algorithm, which `algorithm=name` chooses from then on.

        Raises:
            InputError: The operation has an algorithm of that name.
        """
        if name == "auto" or name in self._by_name:
            raise InputError(f"{self.operation} has an algorithm {name!r} already; register yours under another name")
        self._by_name[name] = algorithm

    def unregister(self, name: str) -> None:
        """Take back what was registered; tensors it was used on may stay bound to it."""
        del self._by_name[name]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all of them."""
        return tuple(self._by_name)

    def placed(self, name: str, x: Tensor) -> Tensor | None:
        """x, where ranks may touch each other's vectors, so that it matters where these lie in an arena; else None."""
        return x if name == "auto" or (name in self._by_name and self._by_name[name].reach) else None

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> Algorithm:
        """The algorithm of that name. Raises InputError, on all ranks, where there is none."""
        found = self._by_name.get(name)
        if found is None:
            *most, last = ("auto", *self._by_name)
            known = f"{', '.join(most)} or {last}"
            raise InputError(f"{self.operation} has no algorithm {name!r}; use {known}", agreed=True)
        return found
