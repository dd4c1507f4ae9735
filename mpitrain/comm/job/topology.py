"""Who is where: the ranks of a communicator, their nodes, and the MPI communicators that connect them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Hashable, Iterable, Sequence
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
