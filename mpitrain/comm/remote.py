"""Reading and writing the private memory of the other processes of a node (Linux process_vm_readv(2)).

For tensors that lie in no arena: a rank sums its slice of its neighbours' vectors where they are, with one copy
into the cache, and writes the result back into them. Programs see no difference to memory that is mapped; only
the neighbours' addresses are looked up at each run, in a board in shared memory on which every rank writes its
own before the first fence:

    board   | rank 0's address | rank 1's address | ...

The kernel allows it between processes of one user, unless a container or ptrace_scope forbids it; `probe` asks.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

import numpy as np
import torch
from mpi4py import MPI

from mpitrain.comm.arena import Arena
from mpitrain.comm.buffers import LARGEST_COUNT, tensor_at
from mpitrain.comm.schedule import Call
from mpitrain.errors import CommunicationError

_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)


class Neighbours:
    """The processes of this rank's node whose memory it may touch. pids: by rank of the communicator."""

    def __init__(self, pids: dict[int, int], board: np.ndarray, places: dict[int, int]) -> None:
        self.pids, self.board, self.places = pids, board, places
        libc = ctypes.CDLL(None, use_errno=True)
        self.readv, self.writev = libc.process_vm_readv, libc.process_vm_writev
        for function in (self.readv, self.writev):
            pointer, count = ctypes.c_void_p, ctypes.c_ulong
            function.argtypes = [ctypes.c_int, pointer, count, pointer, count, count]
            function.restype = ctypes.c_ssize_t


def probe(comm: MPI.Intracomm, node: MPI.Intracomm, neighbours: Sequence[int], board: Arena) -> Neighbours | None:
    """Neighbours, if every rank of `comm` can read and write those of its node; else None. Collective.

    neighbours: the ranks of this node. board: a shared arena of at least as many int64 elements.
    """
    address = next(iter(board.segments.values()))  # everybody's entries lie in the first one's segment
    first = tensor_at(address, node.size, torch.int64).numpy()
    places = {rank: index for index, rank in enumerate(neighbours)}
    pids = np.empty(node.size, dtype=np.int64)
    node.Allgather(np.array([os.getpid()], dtype=np.int64), pids)
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)  # where ptrace_scope asks for it
    made = Neighbours({rank: int(pids[index]) for rank, index in places.items()}, first, places)
    secret = np.array([node.rank + 1, 0], dtype=np.int64)
    first[node.rank] = secret.ctypes.data
    node.Barrier()
    works = np.array([1], dtype=np.int64)
    for rank, place in places.items():
        into = np.zeros(1, dtype=np.int64)
        table = Table(made)
        [read] = table.transfers(into.ctypes.data, 8, rank, 0, write=False)
        table.load()
        try:
            read()
            works[0] &= int(into[0] == place + 1)
        except CommunicationError:
            works[0] = 0
    node.Barrier()
    comm.Allreduce(MPI.IN_PLACE, works, MPI.MIN)
    return made if works[0] else None


class Table:
    """The transfers of one compiled program: local and remote (address, length) pairs, filled in at each run."""

    def __init__(self, neighbours: Neighbours) -> None:
        self.neighbours = neighbours
        self._transfers: list[Transfer] = []
        self._offsets: list[int] = []
        self._owners: list[int] = []
        self._bound = False
        self._seen = b""

    def transfers(self, local: int, nbytes: int, rank: int, offset: int, *, write: bool) -> list[Transfer]:
        """Copies between `local` (an address here) and offset bytes after the rank's address on the board."""
        made = []
        for lo in range(0, nbytes, LARGEST_COUNT):
            piece = np.array([local + lo, min(LARGEST_COUNT, nbytes - lo)], dtype=np.uint64)
            made.append(Transfer(self.neighbours, rank, piece, write))
            self._offsets.append(offset + lo)
            self._owners.append(self.neighbours.places[rank])
        self._transfers += made
        return made

    def publish(self, own: int, address: int) -> Call:
        """A call that puts this rank's address on the board."""
        board, place = self.neighbours.board, self.neighbours.places[own]

        def put() -> None:
            board[place] = address

        return put

    def load(self) -> None:
        """Look the neighbours' addresses up; after a fence that followed their publishing."""
        board = self.neighbours.board
        seen = board.tobytes()
        if seen != self._seen:  # in a training loop the addresses stay
            if not self._bound:
                self._bind()
            np.add(board[self._places], self._shifts, out=self._starts)
            self._seen = seen

    def _bind(self) -> None:
        self._bound = True
        count = len(self._transfers)
        self._remote = np.zeros((count, 2), dtype=np.uint64)
        self._starts = self._remote[:, 0].view(np.int64)
        self._places = np.array(self._owners, dtype=np.intp)
        self._shifts = np.array(self._offsets, dtype=np.int64)
        for number, transfer in enumerate(self._transfers):
            self._remote[number, 1] = transfer.nbytes
            transfer.bind(self._remote[number].ctypes.data)


class Transfer:
    """One copy between this process and another; call it to do it."""

    __slots__ = ("_function", "_local", "_pid", "_pointers", "_rank", "nbytes")

    def __init__(self, neighbours: Neighbours, rank: int, local: np.ndarray, write: bool) -> None:
        """local: address and length here, uint64 [2]."""
        self._function = neighbours.writev if write else neighbours.readv
        self._pid, self._rank, self._local = neighbours.pids[rank], rank, local
        self.nbytes = int(local[1])
        self._pointers = (0, 0)

    def bind(self, remote: int) -> None:
        self._pointers = (self._local.ctypes.data, remote)

    def __call__(self) -> None:
        local, remote = self._pointers
        done = self._function(self._pid, local, 1, remote, 1, 0)
        if done != self.nbytes:
            reason = os.strerror(ctypes.get_errno()) if done < 0 else f"only {done} of {self.nbytes} bytes were there"
            raise CommunicationError(
                f"the memory of rank {self._rank} cannot be reached ({reason}): it has died, or passed a smaller tensor"
            )
