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
    """The arguments of an operation in words."""
    return ", ".join([f"{operation} of {numel} {str(dtype).removeprefix('torch.')}", *filter(None, details)])


def row_of(address: int, said: str, more: str = "") -> bytes:
    """What a rank tells the others: where its memory lies, and what must be the same on all of them.

    more: what must be the same as well, but would tell people nothing.
    """
    text = said.encode()
    digest = hashlib.blake2b(text + more.encode(), digest_size=_DIGEST).digest()
    return address.to_bytes(_ADDRESS, "little", signed=True) + digest + text[: ROW - _BEGIN].ljust(ROW - _BEGIN, b"\0")


def addresses(rows: bytes) -> np.ndarray:
    """The address in each of several rows."""
    return np.frombuffer(rows, dtype=np.int64).reshape(-1, ROW // _ADDRESS)[:, 0]


def difference(rows: Sequence[bytes], ranks: Sequence[int]) -> str:
    """What is wrong with the rows of these ranks, in one line; empty where they say the same."""
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
    """Raise CommunicationError, on all ranks, unless all say the same, by messages. Collective."""
    rows = np.empty((comm.size, ROW), dtype=np.uint8)
    comm.Allgather(np.frombuffer(row_of(0, said), dtype=np.uint8), rows)
    if wrong := difference([row.tobytes() for row in rows], range(comm.size)):
        raise CommunicationError(wrong, agreed=is_whole_job(comm.size))


def is_whole_job(size: int) -> bool:
    """Whether so many ranks are all there are, so that what all of them raise, all ranks of the job raise."""
    return size == MPI.COMM_WORLD.size


class Board:
    """The rows of the ranks of a node, for the programs of one communicator, one at a time."""

    def __init__(self, node: MPI.Intracomm, ranks: Sequence[int], arena: Arena, agreed: bool) -> None:
        """node: the communicator of the ranks of this node; ranks: their numbers in the one the programs are of.

        arena: a shared one of ROW bytes for each of these ranks; if it is private, the rows become messages.
        agreed: whether these are all ranks of the job, which then all raise what one raises.
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
        """Raise CommunicationError, on all ranks whose rows these are, unless they say the same."""
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
    """A program's row on the board: its calls around the first fence, and after the last."""

    __slots__ = ("_board", "_digest", "_learn", "_own", "_read", "_row", "_seen")

    def __init__(self, board: Board, row: bytes, learn: Callable[[bytes], None] | None = None) -> None:
        """learn: given the rows of all ranks when they have changed."""
        self._board, self._row, self._learn = board, row, learn
        self._own, self._digest, self._read = board.own, board.own[_ADDRESS:_BEGIN], board.read
        self._seen = b""  # rows that were right

    def publish(self) -> None:
        self._own[:] = self._row

    def compare(self) -> None:
        """Raises CommunicationError, on all ranks, where they are not about to do the same."""
        rows = self._read()
        if rows != self._seen:  # in a training loop they stay as they are
            self._board.check(rows)
            if self._learn is not None:
                self._learn(rows)
            self._seen = rows

    def withdraw(self) -> None:
        self._digest[:] = _ABSENT
