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
import functools
import os
from collections.abc import Sequence

import numpy as np
import torch
from mpi4py import MPI

from mpitrain.comm.arena import Arena
from mpitrain.comm.buffers import tensor_at
from mpitrain.comm.schedule import Call
from mpitrain.errors import CommunicationError

_PAIR = 16  # bytes of an address and a length
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
        transfers = Transfers(made)
        transfers.add(rank, 0, into.nbytes, write=False)
        table = Table(transfers, [into.ctypes.data])
        table.load()
        try:
            table.transfers[0]()
            works[0] &= int(into[0] == place + 1)
        except CommunicationError:
            works[0] = 0
    node.Barrier()
    comm.Allreduce(MPI.IN_PLACE, works, MPI.MIN)
    return made if works[0] else None


class Transfers:
    """The transfers of a program, without addresses."""

    def __init__(self, neighbours: Neighbours) -> None:
        self.neighbours = neighbours
        self.rows: list[tuple[int, int, int, bool]] = []

    def add(self, rank: int, offset: int, nbytes: int, *, write: bool) -> None:
        """A copy between a place here and `offset` bytes after the rank's address on the board."""
        self.rows.append((rank, offset, nbytes, write))

    @functools.cached_property
    def places(self) -> np.ndarray:
        """The place on the board of each one's rank."""
        return np.array([self.neighbours.places[rank] for rank, *_ in self.rows], dtype=np.intp)

    @functools.cached_property
    def offsets(self) -> np.ndarray:
        return np.array([offset for _, offset, _, _ in self.rows], dtype=np.int64)

    @functools.cached_property
    def sizes(self) -> np.ndarray:
        return np.array([nbytes for _, _, nbytes, _ in self.rows], dtype=np.int64)


class Table:
    """The transfers of a program with addresses: local and remote (address, length) pairs, as the system takes them.

    The remote ones are filled in at each run.
    """

    def __init__(self, transfers: Transfers, local: Sequence[int]) -> None:
        """local: the address here of each transfer."""
        self._transfers, self._board = transfers, transfers.neighbours.board
        count = len(local)
        pairs = np.empty((2, count, 2), dtype=np.int64)
        pairs[0, :, 0] = local
        pairs[:, :, 1] = transfers.sizes if count else 0
        self._pairs, self._starts = pairs, pairs[1, :, 0]
        self._seen = b""
        here, there = pairs.ctypes.data, pairs.ctypes.data + _PAIR * count
        self.transfers = [
            Transfer(transfers.neighbours, rank, (here + _PAIR * i, there + _PAIR * i), nbytes, write)
            for i, (rank, _, nbytes, write) in enumerate(transfers.rows)
        ]

    def publish(self, own: int, address: int) -> Call:
        """A call that puts this rank's address on the board."""
        board, place = self._board, self._transfers.neighbours.places[own]

        def put() -> None:
            board[place] = address

        return put

    def load(self) -> None:
        """Look the neighbours' addresses up; after a fence that followed their publishing."""
        seen = self._board.tobytes()
        if seen != self._seen:  # in a training loop the addresses stay
            np.add(self._board[self._transfers.places], self._transfers.offsets, out=self._starts)
            self._seen = seen


class Transfer:
    """One copy between this process and another; call it to do it."""

    __slots__ = ("_function", "_nbytes", "_pid", "_pointers", "_rank")

    def __init__(self, neighbours: Neighbours, rank: int, pointers: tuple[int, int], nbytes: int, write: bool) -> None:
        """pointers: to the (address, length) pairs here and there."""
        self._function = neighbours.writev if write else neighbours.readv
        self._pid, self._rank, self._pointers, self._nbytes = neighbours.pids[rank], rank, pointers, nbytes

    def __call__(self) -> None:
        local, remote = self._pointers
        done = self._function(self._pid, local, 1, remote, 1, 0)
        if done != self._nbytes:
            reason = os.strerror(ctypes.get_errno()) if done < 0 else f"only {done} of {self._nbytes} bytes were there"
            raise CommunicationError(
                f"the memory of rank {self._rank} cannot be reached ({reason}): it has died, or passed a smaller tensor"
            )
