"""What the ranks of a node tell each other before they touch each other's memory.

Before the first fence of a program each rank writes a row on the board, memory that the node shares, and after that
fence compares the others' rows with its own; after the last fence it takes its row back:

    rank 0   | address | digest | all_reduce of 300000 float32, sum, shared
    rank 1   | address | digest | all_reduce of 600000 float32, sum, shared

Rows that differ in more than the address, or are not there, are an error on all ranks before any of them has touched
what is another's. The digest is that of the whole text, of which the row holds the beginning. Since a rank writes its
row again only after the fence that ends the program, nobody still reads it then. Where the node has no room for a
board the rows are exchanged as messages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
from mpi4py import MPI

from mpitrain.comm.memory.arena import Arena
from mpitrain.comm.memory.buffers import tensor_at
from mpitrain.errors import CommunicationError

_ADDRESS, _DIGEST = 8, 8  # bytes
ROW = 128  # bytes: an address, a digest, and the rest text
_BEGIN = _ADDRESS + _DIGEST
_ABSENT = bytes(_DIGEST)


def described(operation: str, numel: int, dtype: torch.dtype, *details: str) -> str:
    """The arguments of an operation in words, for messages.

    Args:
        operation: Its name.
        numel: Elements of the tensor.
        dtype: Of the tensor.
        details: Further arguments; empty ones are left out.
    """
    return ", ".join([f"{operation} of {numel} {str(dtype).removeprefix('torch.')}", *filter(None, details)])


def row_of(address: int, said: str, more: str = "") -> bytes:
    """The row by which a rank tells the others where its memory lies, and what must be the same on all of them.

    Args:
        address: Where its memory lies.
        said: What must be the same on all ranks, in words.
        more: What must be the same as well, but would tell people nothing.
    """
    text = said.encode()
    digest = hashlib.blake2b(text + more.encode(), digest_size=_DIGEST).digest()
    return address.to_bytes(_ADDRESS, "little", signed=True) + digest + text[: ROW - _BEGIN].ljust(ROW - _BEGIN, b"\0")


def addresses(rows: bytes) -> np.ndarray:
    """The address in each of several rows that lie one after the other."""
    return np.frombuffer(rows, dtype=np.int64).reshape(-1, ROW // _ADDRESS)[:, 0]


def difference(rows: Sequence[bytes], ranks: Sequence[int]) -> str:
    """What is wrong with the rows of some ranks, in one line; empty if they all say the same.

    Args:
        rows: One row for each of the ranks.
        ranks: Their numbers, for the message.
    """
    told: dict[bytes, list[int]] = {}
    for rank, row in zip(ranks, rows, strict=True):
        told.setdefault(row[_ADDRESS:], []).append(rank)
    if len(told) == 1 and not _absent(rows[0]):
        return ""
    texts = [
        f"{'rank' if len(who) == 1 else 'ranks'} {', '.join(map(str, who))}: {_text(row)}" for row, who in told.items()
    ]
    return (
        f"ranks call different operations: {'; '.join(texts)}. Every rank must make the same call, with the same sizes "
        "and types, on tensors at the same place of an arena or in none"
    )


def _absent(row: bytes) -> bool:
    return row[_ADDRESS:_BEGIN] == _ABSENT


def _text(told: bytes) -> str:
    return "is elsewhere" if told[:_DIGEST] == _ABSENT else told[_DIGEST:].rstrip(b"\0").decode(errors="replace")


def compare(comm: MPI.Intracomm, said: str) -> None:
    """Compare by messages what all ranks are about to do. Collective.

    Args:
        comm: The ranks.
        said: What this rank is about to do, in words.

    Raises:
        CommunicationError: Ranks do different things; raised on all of them.
    """
    rows = np.empty((comm.size, ROW), dtype=np.uint8)
    comm.Allgather(np.frombuffer(row_of(0, said), dtype=np.uint8), rows)
    if wrong := difference([row.tobytes() for row in rows], range(comm.size)):
        raise CommunicationError(wrong, agreed=is_whole_job(comm.size))


def is_whole_job(size: int) -> bool:
    """Whether `size` ranks are all of the job, so that an error they all raise is raised by all ranks there are."""
    return size == MPI.COMM_WORLD.size


class Board:
    """The rows of the ranks of a node, for the programs of one communicator. One program uses it at a time.

    Attributes:
        shared: Whether the rows are in shared memory; else they are exchanged as messages.
        own: This rank's row, to be written.
        read: Returns the rows of all ranks of the node, one after the other.
    """

    def __init__(self, node: MPI.Intracomm, ranks: Sequence[int], arena: Arena, agreed: bool) -> None:
        """Use an arena as a board.

        Args:
            node: The communicator of the ranks of this node.
            ranks: Their ranks in the communicator that the programs are of, for messages.
            arena: A shared arena of ROW bytes for each rank of the node; if it is private, rows become messages.
            agreed: Whether these are all ranks of the job, so that an error that they all raise is agreed.
        """
        self._node, self._ranks, self._agreed = node, ranks, agreed
        self.shared = arena.kind == "shared"
        nbytes = node.size * ROW
        first = next(iter(arena.segments.values())) if self.shared else arena.start  # all rows are in that of one
        self._memory = tensor_at(first, nbytes, torch.uint8).numpy().data
        self.own = self._memory[node.rank * ROW : (node.rank + 1) * ROW]
        self.read: Callable[[], bytes] = self._memory.tobytes if self.shared else self._exchanged

    def _exchanged(self) -> bytes:
        self._node.Allgather(MPI.IN_PLACE, [self._memory, ROW, MPI.BYTE])
        return self._memory.tobytes()

    def check(self, rows: bytes) -> None:
        """Compare the rows of all ranks of the node.

        Args:
            rows: All rows, one after the other.

        Raises:
            CommunicationError: They do not say the same; raised on all ranks whose rows these are.
        """
        each = [rows[lo : lo + ROW] for lo in range(0, len(rows), ROW)]
        wrong = difference(each, self._ranks)
        if not wrong:
            return
        everybody = not any(map(_absent, each))
        if everybody:
            self._node.Barrier()  # before a rank that has read them all writes its next one
        self.own[_ADDRESS:_BEGIN] = _ABSENT
        raise CommunicationError(wrong, agreed=self._agreed and everybody)


class Notice:
    """The row of one program on the board, and what it does there: around its first fence and after the last one."""

    __slots__ = ("_board", "_digest", "_learn", "_own", "_read", "_row", "_seen")

    def __init__(self, board: Board, row: bytes, learn: Callable[[bytes], None] | None = None) -> None:
        """Prepare a row, which is not on the board before `publish`.

        Args:
            board: Where it goes.
            row: See `row_of`.
            learn: Called with the rows of all ranks whenever these have changed.
        """
        self._board, self._row, self._learn = board, row, learn
        self._own, self._digest, self._read = board.own, board.own[_ADDRESS:_BEGIN], board.read
        self._seen = b""  # rows that were right

    def publish(self) -> None:
        """Write the row onto the board."""
        self._own[:] = self._row

    def compare(self) -> None:
        """Compare the rows that the ranks of the node have published.

        Raises:
            CommunicationError: They are not about to do the same; raised on all ranks.
        """
        rows = self._read()
        if rows != self._seen:  # in a training loop they stay as they are
            self._board.check(rows)
            if self._learn is not None:
                self._learn(rows)
            self._seen = rows

    def withdraw(self) -> None:
        """Take the row off the board."""
        self._digest[:] = _ABSENT
