"""Access to the private memory of the other processes of a node (Linux process_vm_readv(2)).

It serves tensors outside arenas: a rank sums its slice of its neighbours' vectors in place, with one copy into the
cache, and writes the result back into them. Programs treat this memory like mapped memory, except that the neighbours'
addresses are read from the board (`agreement.py`) in each run. The rows on the board are equal on all ranks except for
the address, so a transfer never leaves the tensor that the other rank has passed.

The kernel allows this access between processes of one user, unless a container or ptrace_scope forbids it; `probe`
finds out.
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
from mpitrain.comm.runtime.agreement import Board, Call, make_row, row_addresses
from mpitrain.errors import CommunicationError

_PAIR = 16  # bytes of an address and a length


class Neighbours:
    """Processes of this rank's node whose memory this process can read and write.

    Attributes:
        pids: Process id of each rank of the communicator that is on this node.
        places: Row number on the board of each of these ranks.
        readv, writev: System calls that read from and write to another process.
    """

    def __init__(self, pids: dict[int, int], places: dict[int, int]) -> None:
        """Store the processes and look up the system calls.

        Args:
            pids: Process id of each rank.
            places: Row number on the board of each rank.
        """
        self.pids, self.places = pids, places
        libc = ctypes.CDLL(None, use_errno=True)
        self.readv, self.writev = libc.process_vm_readv, libc.process_vm_writev
        for function in (self.readv, self.writev):
            pointer, count = ctypes.c_void_p, ctypes.c_ulong
            function.argtypes = [ctypes.c_int, pointer, count, pointer, count, count]
            function.restype = ctypes.c_ssize_t


def probe(comm: MPI.Intracomm, node: MPI.Intracomm, neighbours: Sequence[int], board: Board) -> Neighbours | None:
    """Test whether ranks can read and write the memory of the other ranks on their node. Collective over `comm`.

    Args:
        comm: MPI communicator of all ranks; all get the same answer.
        node: MPI communicator of the ranks on this node.
        neighbours: Ranks of this node, in the order of `node`.
        board: Board of these ranks, in shared memory.

    Returns:
        The neighbours, or None if some rank of `comm` cannot access the memory on its node.
    """
    places = {rank: index for index, rank in enumerate(neighbours)}
    pids = np.empty(node.size, dtype=np.int64)
    node.Allgather(np.array([os.getpid()], dtype=np.int64), pids)
    node_neighbours = Neighbours({rank: int(pids[index]) for rank, index in places.items()}, places)
    secret, copies = np.array([node.rank + 1], dtype=np.int64), np.zeros(node.size, dtype=np.int64)
    transfers = Transfers(node_neighbours)
    for rank in places:
        transfers.add(rank, 0, copies.itemsize, write=False)
    table = Table(transfers, [copies[index:].ctypes.data for index in range(node.size)])
    board.make_meeting_call(make_row(secret.ctypes.data, "probe"), [node.Barrier], table.fill)()
    works = np.array([1], dtype=np.int64)
    try:
        for transfer in table.transfers:
            transfer()
        works[0] = np.array_equal(copies, 1 + np.arange(node.size))
    except CommunicationError:
        works[0] = 0
    node.Barrier()
    comm.Allreduce(MPI.IN_PLACE, works, MPI.MIN)
    return node_neighbours if works[0] else None


class Transfers:
    """Copies of a program between processes, without addresses.

    Attributes:
        neighbours: The other processes.
        rows: (rank, offset, nbytes, write) of each copy, see `add`.
    """

    def __init__(self, neighbours: Neighbours) -> None:
        self.neighbours = neighbours
        self.rows: list[tuple[int, int, int, bool]] = []

    def add(self, rank: int, offset: int, nbytes: int, *, write: bool) -> None:
        """Add a copy between memory of this rank, given later, and memory of another rank.

        Args:
            rank: The other rank.
            offset: Bytes after the start of that rank's memory, which is the address in its row on the board.
            nbytes: Number of bytes.
            write: If true, copy to the other rank; otherwise copy from it.
        """
        self.rows.append((rank, offset, nbytes, write))

    @functools.cached_property
    def columns(self) -> np.ndarray:
        """Array of shape (3, number of copies): row number of the rank on the board, offset, and number of bytes."""
        places = self.neighbours.places
        each = [(places[rank], offset, nbytes) for rank, offset, nbytes, _ in self.rows]
        return np.ascontiguousarray(np.array(each, dtype=np.int64).reshape(-1, 3).T)


class Table:
    """Copies of a program between processes, with addresses.

    For each copy there are two (address, length) pairs, as the system calls take them: one for this process and one for
    the other. The addresses in other processes are filled in at each run.

    Attributes:
        transfers: One call per copy.
    """

    def __init__(self, transfers: Transfers, local: Sequence[int]) -> None:
        """Allocate the pairs.

        Args:
            transfers: The copies.
            local: Address in this process for each copy.
        """
        self._places, self._offsets, sizes = transfers.columns
        pairs = np.empty((2, len(local), 2), dtype=np.int64)
        pairs[0, :, 0] = local
        pairs[:, :, 1] = sizes
        self._starts = pairs[1, :, 0]  # a view, which keeps the pairs alive
        here, there = pairs.ctypes.data, pairs.ctypes.data + _PAIR * len(local)
        near, self.transfers = transfers.neighbours, list[Call]()
        for at, (rank, _, nbytes, write) in zip(count(0, _PAIR), transfers.rows, strict=False):
            function = near.writev if write else near.readv
            self.transfers.append(partial(_transfer, function, near.pids[rank], rank, here + at, there + at, nbytes))

    def fill(self, rows: bytes) -> None:
        """Fill in the addresses of the other processes' memory from the rows of the board."""
        np.add(row_addresses(rows)[self._places], self._offsets, out=self._starts)


def _transfer(function: Callable[..., int], process: int, rank: int, local: int, remote: int, nbytes: int) -> None:
    """Copy between the memory of this process and that of another.

    Args:
        function: System call for the direction.
        process: Id of the other process.
        rank: Rank of the other process.
        local, remote: Addresses of the (address, length) pairs for this process and the other.
        nbytes: Number of bytes to copy.

    Raises:
        CommunicationError: The other process has died, or its tensor is smaller.
    """
    done = function(process, local, 1, remote, 1, 0)
    if done != nbytes:
        reason = os.strerror(ctypes.get_errno()) if done < 0 else f"only {done} of {nbytes} bytes were there"
        raise CommunicationError(
            f"the memory of rank {rank} cannot be accessed ({reason}): the rank has died or passed a smaller tensor"
        )
