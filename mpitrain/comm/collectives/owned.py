"""The MPI communicators that a `Communicator` is made of: noted as they are made, freed together.

MPI_Comm_free is collective, and so `free` is. A communicator that is dropped instead keeps what it has of MPI until
the job ends: Python collects garbage on each rank at a time of its own, and what is collective may not be called then.
What only this process has, the watchdog's records and the communication thread, goes with it all the same.
"""

from __future__ import annotations

from mpitrain.comm.collectives.services import ProcessServices
from mpitrain.comm.job.mpi import MPI


class OwnedCommunicators:
    """Those of one `Communicator`. Made and freed by all of its ranks in the same order."""

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
