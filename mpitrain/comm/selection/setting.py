"""One call of an operation as far as it matters to the choice of its algorithm: sizes, and where ranks and data are."""

from __future__ import annotations

from dataclasses import dataclass

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
