"""What the ranks of a node tell each other before they touch each other's memory.

Before the first fence of a program each rank writes a row on the board, memory that the node shares, and after that
fence compares the others' rows with its own:

    rank 0   | address | digest | all_reduce of 300000 float32, sum, shared      | number, digest
    rank 1   | address | digest | all_reduce of 600000 float32, sum, shared      | number, digest

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

from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.memory.arena import Arena
from mpitrain.comm.memory.buffers import tensor_at
from mpitrain.errors import CommunicationError

_ADDRESS, _DIGEST = 8, 8  # bytes
ROW = 128  # bytes: an address, a digest, and the rest text
LINE = 64  # bytes of a rank's word, which shares its cache line with nobody
STEP = 1 << 40  # a word is number * STEP + digest; the number begins again when that is full
_LARGEST = (1 << 64) - 1
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


def is_whole_job(size: int) -> bool:
    """Whether `size` ranks are all of the job, so that an error they all raise is raised by all ranks there are."""
    return size == MPI.COMM_WORLD.size


class Board:
    """The rows of the ranks of a node, for the programs of one communicator, one at a time.

    Beside the rows each rank has a word, the number of the program it is in and a digest of its row: while all words
    are the same, nobody has to read the rows, and a rank that is elsewhere has another number.

    Attributes:
        shared: Whether the rows are in shared memory; else they are exchanged as messages.
        own, word: This rank's row and word.
        others: The other ranks' words.
        last: The number of this rank's last program, times `STEP`; the one element of a list.
        shown: Whose row this rank's is.
    """

    def __init__(self, node: MPI.Intracomm, ranks: Sequence[int], arena: Arena, agreed: bool) -> None:
        """Divide the arena's memory.

        Args:
            node: The communicator of the ranks of this node.
            ranks: Their numbers in the communicator the programs are of.
            arena: A shared one of at least ROW + LINE bytes for each of these ranks; if it is private, the rows become
                messages.
            agreed: Whether these are all ranks of the job, which then all raise what one raises.
        """
        self._node, self._ranks, self._agreed = node, ranks, agreed
        self.shared = arena.kind == "shared"
        first = next(iter(arena.segments.values())) if self.shared else arena.start  # all rows are in that of one
        memory = tensor_at(first, node.size * (ROW + LINE), torch.uint8).numpy().data
        self._rows, lines = memory[: node.size * ROW], memory[node.size * ROW :]
        self.own = self._rows[node.rank * ROW : (node.rank + 1) * ROW]
        self._words = [lines[rank * LINE : rank * LINE + 8].cast("Q") for rank in range(node.size)]
        self.word = self._words[node.rank]
        self.others = [word for rank, word in enumerate(self._words) if rank != node.rank] if self.shared else []
        self.last, self.shown = [0], b""

    def rows(self) -> bytes:
        """The rows of all ranks. Collective where they are messages."""
        if not self.shared:
            self._node.Allgather(MPI.IN_PLACE, [self._rows, ROW, MPI.BYTE])
        return self._rows.tobytes()

    def check(self) -> None:
        """Raise CommunicationError, on all ranks that are here, unless all are, and say the same."""
        rows = self.rows()
        each = [rows[lo : lo + ROW] for lo in range(0, len(rows), ROW)]
        if self.shared:
            here = [word[0] // STEP == self.last[0] // STEP for word in self._words]
            each = [row if is_here else bytes(ROW) for row, is_here in zip(each, here, strict=True)]
        wrong = difference(each, self._ranks)
        if not wrong:
            return
        everybody = not any(map(_absent, each))
        if everybody:
            self._node.Barrier()  # before a rank that has read them all writes its next one
        else:  # the others have not counted it
            self.last[0] = self.word[0] = (self.last[0] - STEP) & _LARGEST
        raise CommunicationError(wrong, agreed=self._agreed and everybody)


class Notice:
    """A program's row on the board, which its ranks compare at its first fence."""

    def __init__(self, board: Board, row: bytes, learn: Callable[[bytes], None] | None = None) -> None:
        """learn: given the rows of all ranks when they have changed."""
        self._board, self._row, self._learn = board, row, learn
        self._digest = int.from_bytes(row[_ADDRESS:_BEGIN], "little") % STEP
        self._seen = b""

    def meeting(self, fence: Sequence[Callable[[], object]]) -> Callable[[], None]:
        """A call that says what this rank is about to do, passes the fence and compares that with the others.

        It raises CommunicationError, on all ranks, where they are not about to do the same. It is one function, because
        of a small operation calls between Python functions would be most of what comparing costs.
        """
        board, row, digest, learn = self._board, self._row, self._digest, self._learn
        last, word, others, shared = board.last, board.word, board.others, board.shared

        def meet() -> None:
            if board.shown is not row:  # in a training loop it often is
                board.own[:] = board.shown = row
            last[0] = number = (last[0] + STEP) & _LARGEST
            word[0] = mine = number + digest
            for call in fence:
                call()
            for other in others:
                if other[0] != mine:
                    board.check()
            if not shared:
                board.check()
            if learn is not None:
                self._read(learn)

        return meet

    def _read(self, learn: Callable[[bytes], None]) -> None:
        rows = self._board.rows()
        if rows != self._seen:  # in a training loop they stay as they are
            learn(rows)
            self._seen = rows
