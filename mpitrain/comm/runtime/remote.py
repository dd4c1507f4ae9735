"""Reading and writing the private memory of the other processes of a node (Linux process_vm_readv(2)).

For tensors that lie in no arena: a rank sums its slice of its neighbours' vectors where they are, with one copy
into the cache, and writes the result back into them. Programs see no difference to memory that is mapped; only
the neighbours' addresses are looked up at each run, on the board (`agreement.py`). What is written there is the same on
all ranks but for the address, so a transfer never leaves the tensor that its rank has passed.

The kernel allows it between processes of one user, unless a container or ptrace_scope forbids it; `probe` asks.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

import numpy as np

from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.runtime.agreement import Board, Call, addresses, row_of
from mpitrain.errors import CommunicationError

_PAIR = 16  # bytes of an address and a length


class Neighbours:
    """The processes of this rank's node whose memory this process may read and write.

    Attributes:
        pids: Process ids, by rank of the communicator.
        places: Numbers of the ranks' rows on the board.
        readv, writev: The system calls that read from and write to another process.
    """

    def __init__(self, pids: dict[int, int], places: dict[int, int]) -> None:
        """Note the processes, and look up the system calls.

        Args:
            pids: Process ids by rank.
            places: Numbers of the ranks' rows on the board.
        """
        self.pids, self.places = pids, places
        libc = ctypes.CDLL(None, use_errno=True)
        self.readv, self.writev = libc.process_vm_readv, libc.process_vm_writev
        for function in (self.readv, self.writev):
            pointer, count = ctypes.c_void_p, ctypes.c_ulong
            function.argtypes = [ctypes.c_int, pointer, count, pointer, count, count]
            function.restype = ctypes.c_ssize_t


def probe(comm: MPI.Intracomm, node: MPI.Intracomm, neighbours: Sequence[int], board: Board) -> Neighbours | None:
    """Find out whether ranks can read and write the memory of the others on their node. Collective over `comm`.

    Args:
        comm: All ranks, which come to one answer.
        node: The communicator of those on this node.
        neighbours: The ranks of this node, in the order of `node`.
        board: Their board, in shared memory.

    Returns:
        The neighbours, or None if some rank of `comm` cannot reach those of its node.
    """
    places = {rank: index for index, rank in enumerate(neighbours)}
    pids = np.empty(node.size, dtype=np.int64)
    node.Allgather(np.array([os.getpid()], dtype=np.int64), pids)
    made = Neighbours({rank: int(pids[index]) for rank, index in places.items()}, places)
    secret, found = np.array([node.rank + 1], dtype=np.int64), np.zeros(node.size, dtype=np.int64)
    transfers = Transfers(made)
    for rank in places:
        transfers.add(rank, 0, found.itemsize, write=False)
    table = Table(transfers, [found[index:].ctypes.data for index in range(node.size)])
    board.meeting(row_of(secret.ctypes.data, "probe"), [node.Barrier], table.fill)()
    works = np.array([1], dtype=np.int64)
    try:
        for transfer in table.transfers:
            transfer()
        works[0] = np.array_equal(found, 1 + np.arange(node.size))
    except CommunicationError:
        works[0] = 0
    node.Barrier()
    comm.Allreduce(MPI.IN_PLACE, works, MPI.MIN)
    return made if works[0] else None


class Transfers:
    """The transfers of a program, without addresses.

    Attributes:
        neighbours: The processes they are with.
        rows: (rank, offset, nbytes, whether it writes) of each, see `add`.
    """

    def __init__(self, neighbours: Neighbours) -> None:
        self.neighbours = neighbours
        self.rows: list[tuple[int, int, int, bool]] = []

    def add(self, rank: int, offset: int, nbytes: int, *, write: bool) -> None:
        """Add a copy between memory of this rank, which is known later, and memory of another.

        Args:
            rank: The other rank.
            offset: Bytes after the address in that rank's row on the board, where its memory begins.
            nbytes: How much is copied.
            write: Whether it is copied there, else from there.
        """
        self.rows.append((rank, offset, nbytes, write))

    @functools.cached_property
    def columns(self) -> np.ndarray:
        """Return three rows of numbers: for each transfer the board's row of its rank, its offset, and its length."""
        places = self.neighbours.places
        each = [(places[rank], offset, nbytes) for rank, offset, nbytes, _ in self.rows]
        return np.ascontiguousarray(np.array(each, dtype=np.int64).reshape(-1, 3).T)


class Table:
    """The transfers of a program with addresses: for each, an (address, length) pair here and one in the other process.

    The pairs are as the system calls take them. Addresses in other processes are filled in at each run.

    Attributes:
        transfers: The transfers, each to be called.
    """

    def __init__(self, transfers: Transfers, local: Sequence[int]) -> None:
        """Lay the pairs out.

        Args:
            transfers: What is to be transferred.
            local: For each, the address in this process.
        """
        self._places, self._offsets, sizes = transfers.columns
        pairs = np.empty((2, len(local), 2), dtype=np.int64)
        pairs[0, :, 0] = local
        pairs[:, :, 1] = sizes
        self._starts = pairs[1, :, 0]  # a view, which keeps the pairs
        here, there = pairs.ctypes.data, pairs.ctypes.data + _PAIR * len(local)
        near, self.transfers = transfers.neighbours, list[Call]()
        for at, (rank, _, nbytes, write) in zip(count(0, _PAIR), transfers.rows, strict=False):
            function = near.writev if write else near.readv
            self.transfers.append(partial(_transfer, function, near.pids[rank], rank, here + at, there + at, nbytes))

    def fill(self, rows: bytes) -> None:
        """Take the addresses of the other processes' memory out of the board's rows."""
        np.add(addresses(rows)[self._places], self._offsets, out=self._starts)


def _transfer(function: Callable[..., int], process: int, rank: int, local: int, remote: int, nbytes: int) -> None:
    """Copy between memory of this process and another's.

    Args:
        function: The system call for the direction.
        process: Id of the other process.
        rank: Rank of the other process.
        local, remote: Addresses of the (address, length) pairs for here and for there.
        nbytes: Length of what is copied.

    Raises:
        CommunicationError: The other process is gone, or its tensor is smaller.
    """
    done = function(process, local, 1, remote, 1, 0)
    if done != nbytes:
        reason = os.strerror(ctypes.get_errno()) if done < 0 else f"only {done} of {nbytes} bytes were there"
        raise CommunicationError(
            f"the memory of rank {rank} cannot be reached ({reason}): it has died, or passed a smaller tensor"
        )
