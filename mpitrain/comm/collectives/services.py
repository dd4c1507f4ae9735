"""Services that all communicators of a process share, and the MPI communicators that each of them uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from mpitrain.comm.job.abort import Faults
from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.job.topology import Member, Share
from mpitrain.comm.job.traffic import Journal
from mpitrain.comm.memory.arena import ArenaIndex
from mpitrain.comm.programs.verify import Proofs
from mpitrain.comm.runtime.progress import ProgressEngine
from mpitrain.comm.runtime.watchdog import FailureHandler, Watchdog
from mpitrain.comm.selection import Tuning
from mpitrain.errors import InputError


@dataclass
class DeviceMemory:
    """What is to be done with device memory in this process.

    Attributes:
        way: How it is carried: "auto", "mpi", "staged", "peer" or "nccl".
        device: The device of this rank, once anything on one was communicated.
        mpi_reads: Whether MPI takes addresses of the device's memory, once that was asked.
    """

    way: str = "auto"
    device: torch.device | None = None
    mpi_reads: bool | None = None


@dataclass(frozen=True)
class ProcessServices:
    """What all communicators of a process share; but for `cores` and the watchdog's work, the same on every rank.

    Attributes:
        arenas: Where this process has arenas.
        tuning: Which algorithms are fastest on this machine.
        watchdog: What ends operations that do not complete.
        progress: What makes progress on receives and on operations that were put off.
        faults: What ends the job where this rank fails.
        cores: What this rank has of its node's.
        spare_cores: Of the ranks that have fewest, cores that no rank computes on; negative for ranks that have none.
        device_memory: Which device this rank has, and how its memory is carried.
        debug: Whether the ranks compare what they are about to do.
        proofs: Of the programs used so far, in the debug mode.
        failures: Where the job is to go on without ranks that die (see `faults.ulfm`).
        journal: Counts what is sent.
    """

    arenas: ArenaIndex
    tuning: Tuning
    watchdog: Watchdog
    progress: ProgressEngine
    faults: Faults
    cores: Share
    spare_cores: int
    device_memory: DeviceMemory
    debug: bool
    proofs: Proofs | None = None
    failures: FailureHandler | None = None
    journal: Journal = field(default_factory=Journal)

    def track(self, comm: MPI.Intracomm) -> MPI.Intracomm:
        """The communicator, which is new; noted where it may have to be given up."""
        return comm if self.failures is None else self.failures.track(comm)

    def may_release(self, comm: MPI.Intracomm) -> bool:
        """Whether the ranks of a tracked communicator can still act together."""
        return self.failures is None or self.failures.tracks(comm)

    def release(self, comm: MPI.Intracomm) -> None:
        """Free a tracked communicator, unless it was given up with dead ranks. Collective."""
        if self.failures is None or self.failures.forget(comm):
            comm.Free()


class OwnedCommunicators:
    """The MPI communicators that a `Communicator` is made of. Made and freed by all of its ranks in the same order.

    MPI_Comm_free is collective, and so `free` is. A communicator that is dropped instead keeps what it has of MPI until
    the job ends: Python collects garbage on each rank at a time of its own, and what is collective may not be called
    then. What only this process has, the watchdog's records and the communication thread, goes with it all the same.
    """

    def __init__(self, process: ProcessServices) -> None:
        self._process = process
        self._comms: list[MPI.Intracomm] = []

    def keep(self, made: MPI.Comm) -> MPI.Intracomm:
        """Note a new communicator, and give it back."""
        comm = MPI.Intracomm(made)  # what Split gives is one, but mpi4py types it as any communicator
        self._comms.append(self._process.track(comm))
        return comm

    def duplicate(self, comm: MPI.Intracomm) -> MPI.Intracomm:
        """Make a duplicate of a communicator, and note that. Collective."""
        return self.keep(comm.Dup())

    def free(self) -> None:
        """Release them. Collective."""
        while self._comms:
            self._process.release(self._comms.pop())


def check_rank(comm: Member, rank: int) -> None:
    """Raise InputError unless the communicator has the rank."""
    if not 0 <= rank < comm.size:
        raise InputError(f"there is no rank {rank} in {comm.label}; ranks are 0 to {comm.size - 1}")


def block_sizes(
    comm: Member,
    name: str,
    part: torch.Tensor | None,
    whole: torch.Tensor,
    counts: Sequence[int] | None,
    part_name: str,
    whole_name: str,
) -> list[int]:
    """Return the elements of each rank's block of `whole`, checked against this rank's part."""
    if part is not None and part.dtype != whole.dtype:
        raise InputError(f"{name}: {part_name} is {part.dtype}, {whole_name} is {whole.dtype}; make them the same")
    if counts is None:
        each, rest = divmod(whole.numel(), comm.size)
        if rest:
            raise InputError(
                f"{name}: {whole_name} has {whole.numel()} elements, not a multiple of {comm.size} ranks; pad it "
                "or give counts"
            )
        blocks = [each] * comm.size
    else:
        blocks = [int(n) for n in counts]
        if len(blocks) != comm.size or min(blocks) < 0 or sum(blocks) != whole.numel():
            raise InputError(
                f"{name}: counts {blocks} must be {comm.size} numbers that sum to {whole_name}'s {whole.numel()}"
            )
    if part is not None and part.numel() != blocks[comm.rank]:
        raise InputError(
            f"{name}: {part_name} has {part.numel()} elements, rank {comm.rank}'s block has {blocks[comm.rank]}; "
            f"{whole_name} is one block per rank"
        )
    return blocks


def unequal(counts: Sequence[int] | None) -> str:
    """Block sizes in words, where the number of all elements does not tell them."""
    return f"in blocks of {list(counts)}" if counts and min(counts) != max(counts) else ""
