"""Who is where: the ranks of a communicator, their nodes, and how many cores each has for itself.

The system lets a rank run on a set of cores: all of the node, those of the job, those it is bound to. Where the sets of
two ranks have cores in common the ranks share both sets; a set that no other rank's meets is its rank's own:

    0 1 2 3 | 0 1 2 3 | 0 1 2 3 | 0 1 2 3      not bound, or bound to what the job has: one core each
    0 1     | 0 1     | 2 3     | 2 3          bound to sockets: two ranks share two cores, one each
    0 1     | 2 3                              bound to their own: two cores each

What the system counts are hardware threads, of which a core may have several. Threads that compute are counted in
cores; ranks take turns only where they have less than a hardware thread each.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpitrain.comm.job.mpi import MPI


@dataclass(frozen=True)
class Topology:
    """Places of the ranks of one communicator.

    Attributes:
        rank: This rank's number.
        nodes: The node number of each rank, in order of first appearance.
        world_ranks: Each rank's number in the world.
    """

    rank: int
    nodes: tuple[int, ...]
    world_ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.nodes)

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The ranks of this rank's node, itself included, in order."""
        return tuple(r for r in range(self.size) if self.nodes[r] == self.nodes[self.rank])

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return len(set(self.nodes))

    def of(self, ranks: Sequence[int], rank: int) -> Topology:
        """The topology of a group of this communicator's ranks.

        Args:
            ranks: Their numbers here.
            rank: This rank's number in the group.
        """
        return Topology(rank, _numbered(self.nodes[r] for r in ranks), tuple(self.world_ranks[r] for r in ranks))


def discover(comm: MPI.Comm) -> Topology:
    """The topology of the world; collective. Ranks are on one node if they can share memory."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    first = np.array([comm.rank], dtype=np.int64)
    node.Bcast(first)
    node.Free()
    firsts = np.empty(comm.size, dtype=np.int64)
    comm.Allgather(first, firsts)
    return Topology(comm.rank, _numbered(firsts.tolist()), tuple(range(comm.size)))


def _numbered(values: Iterable[Hashable]) -> tuple[int, ...]:
    """Each value's number, in order of first appearance."""
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(value, len(numbers)) for value in values)


def ranks_in(comm: MPI.Comm, of: MPI.Comm) -> list[int]:
    """The number in `of` of each rank of `comm`, which are some of its ranks."""
    mine, whole = comm.Get_group(), of.Get_group()
    ranks = [int(rank) for rank in mine.Translate_ranks(None, whole)]
    for group in (mine, whole):
        group.Free()  # mpi4py does not
    return ranks


def all_gather_bytes(comm: MPI.Intracomm, mine: bytes) -> list[bytes]:
    """Return what each rank gives, of any length. Collective."""
    lengths = np.empty(comm.size, dtype=np.int64)
    comm.Allgather(np.array([len(mine)], dtype=np.int64), lengths)
    everything = np.empty(int(lengths.sum()), dtype=np.uint8)
    comm.Allgatherv(np.frombuffer(mine, dtype=np.uint8), [everything, lengths.tolist(), MPI.BYTE])
    ends = np.cumsum(lengths)
    return [everything[end - n : end].tobytes() for n, end in zip(lengths, ends, strict=True)]


def library_name() -> str:
    """The MPI library and its version, in a few words."""
    line = MPI.Get_library_version().splitlines()[0].replace("\0", "").replace("\t", " ")
    return " ".join(line.split(", package")[0].replace("Version:", "").split())


def processor_name(root: Path = Path("/")) -> str:
    """Return the processor's model; empty where the system does not tell.

    x86 names a model, POWER a "cpu" and a machine, ARM only numbers of its implementer, part and variant.

    Args:
        root: Folder above proc/.
    """
    found: dict[str, str] = {}
    with suppress(OSError):
        for line in (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            found.setdefault(key.strip(), value.strip())
    if found.get("model name"):
        return found["model name"]
    if "CPU part" in found:
        keys = ("CPU implementer", "CPU part", "CPU variant", "CPU revision")
        return " ".join(f"{key.removeprefix('CPU ')} {found[key]}" for key in keys if found.get(key))
    names = (found.get(key, "") for key in ("cpu", "uarch", "cpu model", "machine", "isa"))
    return " ".join(dict.fromkeys(filter(None, names)))


def this_machine() -> str:
    """A short name of this kind of machine and MPI, for tuning tables kept in a shared home."""
    library = MPI.Get_library_version()
    text = f"{processor_name()}|{os.cpu_count()}|{library.splitlines()[0]}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Member:
    """A rank of a communicator.

    Attributes:
        label: The communicator's name in messages.
        rank: This rank's number.
        size: The number of ranks.
        nodes: The node number of each rank.
        node: This rank's.
        num_nodes: The number of nodes.
        local_rank: This rank's number among the communicator's ranks on its node.
        local_size: The number of these.
        world_ranks: The number in the world of each rank.
    """

    def __init__(self, topology: Topology, label: str) -> None:
        self._topology, self.label = topology, label
        self.rank, self.size, self.world_ranks = topology.rank, topology.size, topology.world_ranks
        self.nodes, self.node, self.num_nodes = topology.nodes, topology.nodes[topology.rank], topology.num_nodes
        neighbours = topology.neighbours
        self.local_rank, self.local_size = neighbours.index(topology.rank), len(neighbours)

    @property
    def library(self) -> str:
        """The MPI library and its version."""
        return library_name()

    def __repr__(self) -> str:
        return f"Communicator({self.label!r}, rank {self.rank} of {self.size}, node {self.node} of {self.num_nodes})"


@dataclass(frozen=True)
class Share:
    """What a rank has of its node's cores.

    Attributes:
        cores: How many it may run on.
        ranks: How many ranks have those between them, this one included.
        threads: Hardware threads of these cores; 0: as many as cores.
    """

    cores: int
    ranks: int
    threads: int = 0

    @property
    def each(self) -> int:
        """Cores of one rank; at least 1, also where ranks take turns."""
        return max(1, self.cores // self.ranks)

    @property
    def spare(self) -> int:
        """Cores beyond one a rank, for communication threads. It is negative where ranks have no hardware thread."""
        beyond = self.cores - self.ranks
        return beyond if beyond >= 0 else min(0, max(self.threads, self.cores) - self.ranks)


def siblings(root: Path = Path("/")) -> dict[int, int]:
    """Return for each hardware thread the first one of its core, by the numbers that the system gives them.

    Args:
        root: Folder above sys/.

    Returns:
        An empty dict where the system does not tell.
    """
    found: dict[int, int] = {}
    for path in root.glob("sys/devices/system/cpu/cpu[0-9]*/topology/thread_siblings_list"):
        with suppress(OSError, ValueError):
            first = re.split("[-,]", path.read_text().strip())[0]
            found[int(path.parts[-3].removeprefix("cpu"))] = int(first)
    return found


def cores_of(threads: Collection[int], core_of: Mapping[int, int]) -> set[int]:
    """Return the cores of some hardware threads, each by its first one. core_of: as `siblings` returns it."""
    return {core_of.get(thread, thread) for thread in threads}


def sharing(allowed: Sequence[Collection[int]]) -> Iterator[tuple[list[int], set[int]]]:
    """Ranks of a node that have cores between them, and these.

    Args:
        allowed: The cores that each of the node's ranks may run on.
    """
    left = list(range(len(allowed)))
    while left:
        ranks, cores = [left.pop(0)], set[int]()
        for rank in ranks:  # grows meanwhile
            cores |= set(allowed[rank])
            met = [other for other in left if not cores.isdisjoint(allowed[other])]
            left = [other for other in left if other not in met]
            ranks += met
        yield ranks, cores


def share_of(rank: int, allowed: Sequence[Collection[int]], core_of: Mapping[int, int]) -> Share:
    """What one of the ranks of a node has.

    Args:
        rank: Its number among them.
        allowed: The hardware threads that each of them may run on.
        core_of: Cores of these, as `siblings` returns them.
    """
    groups = sharing([cores_of(threads, core_of) for threads in allowed])
    ranks, cores = next((ranks, cores) for ranks, cores in groups if rank in ranks)
    return Share(len(cores), len(ranks), len(set().union(*(allowed[rank] for rank in ranks))))


def find_share(comm: MPI.Intracomm, topology: Topology) -> Share:
    """What this rank has. Collective over the world."""
    mine = os.sched_getaffinity(0)
    row = np.zeros(max(mine) + 1, dtype=np.uint8)
    row[list(mine)] = 1
    rows = all_gather_bytes(comm, np.packbits(row).tobytes())
    near = [np.frombuffer(rows[rank], dtype=np.uint8) for rank in topology.neighbours]
    allowed = [np.flatnonzero(np.unpackbits(bits)).tolist() for bits in near]
    return share_of(topology.neighbours.index(topology.rank), allowed, siblings())


def spare_cores(comm: MPI.Intracomm, share: Share) -> int:
    """`Share.spare` of the rank that has least. Collective.

    MPITRAIN_SPARE_CORES overrides it on ranks that have that. It is never more than 0 where MPI lets one thread alone
    call it.
    """
    spare = np.array([int(os.environ.get("MPITRAIN_SPARE_CORES") or share.spare)])
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        spare[0] = min(spare[0], 0)
    comm.Allreduce(MPI.IN_PLACE, spare, MPI.MIN)
    return int(spare[0])
