"""Placement of ranks: the ranks of a communicator, their nodes, and the number of cores of each.

The operating system restricts each rank to a set of cores: all cores of the machine, those of the job, or those that
the rank is bound to. Ranks whose sets overlap share the union of their sets; a rank whose set overlaps with no other
has its cores for itself. Examples for ranks of one machine, separated by |:

    0 1 2 3 | 0 1 2 3 | 0 1 2 3 | 0 1 2 3      not bound, or bound to the job's cores: one core each
    0 1     | 0 1     | 2 3     | 2 3          bound to sockets: two ranks share two cores, one each
    0 1     | 2 3                              bound to separate cores: two cores each

The operating system counts hardware threads, of which a core may have several. Computing threads are counted in cores;
ranks take turns only if they have less than one hardware thread each.
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
from mpitrain.storage import proc


@dataclass(frozen=True)
class Topology:
    """Nodes and world ranks of the ranks of one communicator.

    Attributes:
        rank: This rank.
        nodes: Node number of each rank; nodes are numbered in order of first appearance.
        world_ranks: World rank of each rank.
    """

    rank: int
    nodes: tuple[int, ...]
    world_ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.nodes)

    @property
    def neighbours(self) -> tuple[int, ...]:
        """Ranks on this rank's node, itself included, in ascending order."""
        return tuple(r for r in range(self.size) if self.nodes[r] == self.nodes[self.rank])

    @property
    def counterparts(self) -> tuple[int, ...]:
        """Ranks that are on their node what this rank is on its node: the first, the second and so on."""
        place = self.neighbours.index(self.rank)
        return tuple(r for r in range(self.size) if self.nodes[:r].count(self.nodes[r]) == place)

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(set(self.nodes))

    def subgroup(self, ranks: Sequence[int], rank: int) -> Topology:
        """Return the topology of a subgroup of the ranks.

        Args:
            ranks: Members of the subgroup, as ranks of this topology.
            rank: This process's rank in the subgroup.
        """
        return Topology(rank, _renumber(self.nodes[r] for r in ranks), tuple(self.world_ranks[r] for r in ranks))


def discover(comm: MPI.Comm) -> Topology:
    """Return the topology of the world. Ranks that can share memory are on one node. Collective."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    first = np.array([comm.rank], dtype=np.int64)
    node.Bcast(first)
    node.Free()
    firsts = np.empty(comm.size, dtype=np.int64)
    comm.Allgather(first, firsts)
    return Topology(comm.rank, _renumber(firsts.tolist()), tuple(range(comm.size)))


def _renumber(values: Iterable[Hashable]) -> tuple[int, ...]:
    """Return a number for each value: equal values get equal numbers, in order of first appearance."""
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(value, len(numbers)) for value in values)


def ranks_in(comm: MPI.Comm, parent: MPI.Comm) -> list[int]:
    """Return the rank in `parent` of each rank of `comm`.

    Args:
        comm: Communicator whose ranks are looked up.
        parent: Communicator that contains all ranks of `comm`.
    """
    group, parent_group = comm.Get_group(), parent.Get_group()
    ranks = [int(rank) for rank in group.Translate_ranks(None, parent_group)]
    for mpi_group in (group, parent_group):
        mpi_group.Free()  # mpi4py does not
    return ranks


def all_gather_bytes(comm: MPI.Intracomm, data: bytes) -> list[bytes]:
    """Return the bytes of every rank, in order of rank. Collective.

    Args:
        comm: Communicator to gather over.
        data: Bytes of this rank; lengths may differ between ranks.
    """
    lengths = np.empty(comm.size, dtype=np.int64)
    comm.Allgather(np.array([len(data)], dtype=np.int64), lengths)
    everything = np.empty(int(lengths.sum()), dtype=np.uint8)
    comm.Allgatherv(np.frombuffer(data, dtype=np.uint8), [everything, lengths.tolist(), MPI.BYTE])
    ends = np.cumsum(lengths)
    return [everything[end - n : end].tobytes() for n, end in zip(lengths, ends, strict=True)]


def library_name() -> str:
    """Return the name and version of the MPI library."""
    line = MPI.Get_library_version().splitlines()[0].replace("\0", "").replace("\t", " ")
    return " ".join(line.split(", package")[0].replace("Version:", "").split())


def processor_name(root: Path = Path("/")) -> str:
    """Return the model of the processor; empty if the system does not report it.

    On x86, /proc/cpuinfo contains a model name; on POWER "cpu" and "machine"; on ARM only numbers of implementer, part
    and variant.

    Args:
        root: Folder that contains proc/.
    """
    fields: dict[str, str] = {}
    with suppress(OSError):
        for line in (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    if fields.get("model name"):
        return fields["model name"]
    if "CPU part" in fields:
        keys = ("CPU implementer", "CPU part", "CPU variant", "CPU revision")
        return " ".join(f"{key.removeprefix('CPU ')} {fields[key]}" for key in keys if fields.get(key))
    names = (fields.get(key, "") for key in ("cpu", "uarch", "cpu model", "machine", "isa"))
    return " ".join(dict.fromkeys(filter(None, names)))


def this_machine() -> str:
    """Return a short hash of processor, number of CPUs and MPI library, the key of a tuning table in a shared home."""
    library = MPI.Get_library_version()
    text = f"{processor_name()}|{os.cpu_count()}|{library.splitlines()[0]}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Member:
    """This process as a rank of a communicator.

    Attributes:
        label: Name of the communicator in messages.
        rank: This rank.
        size: Number of ranks.
        nodes: Node number of each rank.
        node: Node number of this rank.
        num_nodes: Number of nodes.
        local_rank: Index of this rank among the communicator's ranks on its node.
        local_size: Number of the communicator's ranks on this node.
        world_ranks: World rank of each rank.
    """

    def __init__(self, topology: Topology, label: str) -> None:
        self._topology, self.label = topology, label
        self.rank, self.size, self.world_ranks = topology.rank, topology.size, topology.world_ranks
        self.nodes, self.node, self.num_nodes = topology.nodes, topology.nodes[topology.rank], topology.num_nodes
        neighbours = topology.neighbours
        self.local_rank, self.local_size = neighbours.index(topology.rank), len(neighbours)

    @property
    def neighbours(self) -> tuple[int, ...]:
        """Ranks on this rank's node, itself included."""
        return self._topology.neighbours

    @property
    def counterparts(self) -> tuple[int, ...]:
        """Ranks that have this rank's `local_rank` on their nodes."""
        return self._topology.counterparts

    @property
    def library(self) -> str:
        """Name and version of the MPI library."""
        return library_name()

    def __repr__(self) -> str:
        return f"Communicator({self.label!r}, rank {self.rank} of {self.size}, node {self.node} of {self.num_nodes})"


@dataclass(frozen=True)
class Share:
    """Cores of a machine that a rank shares with other ranks, or has for itself.

    Attributes:
        cores: Number of cores that the rank may run on.
        ranks: Number of ranks that share these cores, this one included.
        threads: Number of hardware threads of these cores; 0 means one per core.
    """

    cores: int
    ranks: int
    threads: int = 0

    @property
    def per_rank(self) -> int:
        """Cores per rank; at least 1, even if ranks take turns."""
        return max(1, self.cores // self.ranks)

    @property
    def spare(self) -> int:
        """Cores left for communication threads after one per rank; negative if ranks outnumber hardware threads."""
        beyond = self.cores - self.ranks
        return beyond if beyond >= 0 else min(0, max(self.threads, self.cores) - self.ranks)


def siblings(root: Path = Path("/")) -> dict[int, int]:
    """Return a map from each hardware thread to the first hardware thread of its core, by the system's numbers.

    Args:
        root: Folder that contains sys/.

    Returns:
        Map of thread numbers; empty if the system does not report its topology.
    """
    first_threads: dict[int, int] = {}
    for path in root.glob("sys/devices/system/cpu/cpu[0-9]*/topology/thread_siblings_list"):
        with suppress(OSError, ValueError):
            first = re.split("[-,]", path.read_text().strip())[0]
            first_threads[int(path.parts[-3].removeprefix("cpu"))] = int(first)
    return first_threads


def cores_of(threads: Collection[int], core_of: Mapping[int, int]) -> set[int]:
    """Return the cores of some hardware threads; a core is named by its first hardware thread.

    Args:
        threads: Numbers of hardware threads.
        core_of: Core of each hardware thread, as returned by `siblings`.
    """
    return {core_of.get(thread, thread) for thread in threads}


def groups_sharing_cores(allowed: Sequence[Collection[int]]) -> Iterator[tuple[list[int], set[int]]]:
    """Yield each group of ranks of a node whose sets of cores overlap, with the union of these sets.

    Args:
        allowed: Cores that each rank of the node may run on.
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
    """Return the share of one rank of a node.

    Args:
        rank: Index of the rank among the ranks of its node.
        allowed: Hardware threads that each rank of the node may run on.
        core_of: Core of each hardware thread, as returned by `siblings`.
    """
    groups = groups_sharing_cores([cores_of(threads, core_of) for threads in allowed])
    ranks, cores = next((ranks, cores) for ranks, cores in groups if rank in ranks)
    return Share(len(cores), len(ranks), len(set().union(*(allowed[rank] for rank in ranks))))


def machine_id(node: int) -> str:
    """Return a text that is the same on all ranks of this machine, and different on other machines.

    Containers and namespaces of one machine are nodes of their own.

    Args:
        node: Number of this rank's node, which counts as a machine if the system does not identify it.
    """
    return proc.read("sys/kernel/random/boot_id").strip() or f"node {node}"


def find_share(comm: MPI.Intracomm, topology: Topology) -> Share:
    """Return this rank's share of its machine's cores. Collective over the world.

    Containers and namespaces of one machine are nodes of their own, but their ranks may run on the same cores.

    Args:
        comm: Communicator of the world.
        topology: Topology of the world.
    """
    threads = os.sched_getaffinity(0)
    row = np.zeros(max(threads) + 1, dtype=np.uint8)
    row[list(threads)] = 1
    name = machine_id(topology.nodes[topology.rank]).encode() + b"\0"
    rows = all_gather_bytes(comm, name + np.packbits(row).tobytes())
    near = [rank for rank in range(topology.size) if rows[rank].startswith(name)]
    bits = [np.frombuffer(rows[rank], dtype=np.uint8, offset=len(name)) for rank in near]
    allowed = [np.flatnonzero(np.unpackbits(each)).tolist() for each in bits]
    return share_of(near.index(topology.rank), allowed, siblings())


def spare_cores(comm: MPI.Intracomm, share: Share) -> int:
    """Return the smallest `Share.spare` of all ranks. Collective.

    On ranks that set MPITRAIN_SPARE_CORES, this variable overrides the value. If MPI allows only one thread to call it,
    the result is at most 0.

    Args:
        comm: Communicator of the world.
        share: This rank's share.
    """
    spare = np.array([int(os.environ.get("MPITRAIN_SPARE_CORES") or share.spare)])
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        spare[0] = min(spare[0], 0)
    comm.Allreduce(MPI.IN_PLACE, spare, MPI.MIN)
    return int(spare[0])
