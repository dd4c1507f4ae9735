"""Do all ranks make the same call? Here are the answers for operations whose ranks do not meet at a fence.

`Register`: which operation each rank of a node is in, written into shared memory before it begins, without waiting for
anybody.

    word of each rank   | number of the operation | digest of its arguments |

A rank writes its own word and then looks at the others'. Where one of them has signed the same number for something
else, the ranks have diverged, and this rank, which came later, raises instead of going on. So two ranks never exchange
data for different arguments: some MPI libraries would write a message that is too long behind the memory it is for, and
all of them take one type for another. `repeated` does the same for an operation that is repeated, in one function.

`compare`: the ranks exchange what they are about to do, between nodes too, and all of them find out together. It costs
an all-gather of 16 bytes: before arenas and node copies are made, and before every operation in the debug mode, which
is on by default in tests; MPITRAIN_DEBUG=1 or `mpitrain.init(debug=True)` elsewhere. A mismatch, which MPI answers
with a hang or wrong data, is an error that shows every rank's operation and line. A process group of torch.distributed
uses it under TORCH_DISTRIBUTED_DEBUG=DETAIL, for lists of tensors, which the communicator never sees as such.

Ranks that meet at a fence anyway leave this to the `board`.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from collections.abc import Callable, Sequence, Sized

import numpy as np
import torch

from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.job.traffic import Record
from mpitrain.comm.memory.arena import Arena
from mpitrain.comm.memory.buffers import tensor_at
from mpitrain.comm.runtime.watchdog import line_of
from mpitrain.errors import CommunicationError

Call = Callable[[], object]

STEP = 1 << 28  # a word is number * STEP + digest
_MEETS = 1  # the bit of a digest that says that the ranks meet at a fence
_TEXT = 128  # bytes of an entry of the directory: a digest and what it stands for
_ENTRIES = 31
NBYTES = (1 + _ENTRIES) * _TEXT  # of a rank's memory: the word, and the directory of what it has signed lately


class Register:
    """Where the ranks of a node sign, for the operations of one communicator.

    Attributes:
        own, others: This rank's word and those of the others, each as a memory view of one element.
        last: Number of this rank's last operation, times STEP, as the one element of a list.
    """

    def __init__(self, ranks: Sequence[int], own: int, memory: Callable[[int], int], syncs: Sequence[Call]) -> None:
        """Map the words and directories of all ranks of the node.

        Args:
            ranks: Those of the node.
            own: This one.
            memory: For a rank, the address of NBYTES bytes, zeros at first, which only that rank writes.
            syncs: What makes writes visible to later reads, where the machine does not see to that by itself.
        """
        self._ranks, self._rank, self._syncs = ranks, own, syncs
        areas = {rank: tensor_at(memory(rank), NBYTES, torch.uint8).numpy() for rank in ranks}
        self._words = {rank: area.data[:8].cast("Q") for rank, area in areas.items()}
        self.own, self.others = self._words[own], [word for rank, word in self._words.items() if rank != own]
        self.last = [0]
        self._directories = {rank: area[_TEXT:].reshape(_ENTRIES, _TEXT) for rank, area in areas.items()}
        self._signed = 0  # texts in the directory so far
        self._lock = threading.Lock()

    def signature(self, said: str, *, meets: bool, together: bool) -> Signature:
        """Make what signs for an operation each time it is called.

        Args:
            said: Its arguments, in words.
            meets: Whether its ranks meet at a fence.
            together: Whether no rank can complete it before all have begun it.
        """
        digest = int.from_bytes(hashlib.blake2b(said.encode(), digest_size=4).digest(), "little") % STEP
        digest = digest | _MEETS if meets else digest & ~_MEETS
        text = digest.to_bytes(8, "little") + said.encode()[: _TEXT - 8].ljust(_TEXT - 8, b"\0")
        self._directories[self._rank][self._signed % _ENTRIES] = np.frombuffer(text, dtype=np.uint8)
        self._signed += 1
        return Signature(self, digest, together)

    def look(self, number: int, digest: int, together: bool) -> None:
        """Look whether another rank is in another operation of this number, or has left this one.

        Of two ranks that come at once, one at least must see what the other has written: taking a lock keeps the
        processor from reading before its own word is seen.

        Args:
            number: Number of this rank's operation, times STEP.
            digest: Of its arguments.
            together: Whether no rank can complete it before all have begun it.

        Raises:
            CommunicationError: Another rank has signed for something else.
        """
        with self._lock:
            pass
        for call in self._syncs:
            call()
        word = number + digest
        for other in self.others:
            theirs = other[0]
            if theirs != word and theirs >= number:
                self._raise(number, digest, together)
                return

    def _raise(self, number: int, digest: int, together: bool) -> None:
        wrong: list[str] = []
        for rank in self._ranks:
            word = self._words[rank][0]
            if word >= number + STEP and together:
                wrong.append(f"rank {rank} has gone on to {self._text(rank, word % STEP)}")
            elif number <= word < number + STEP and word % STEP != digest and not word & digest & _MEETS:
                wrong.append(f"rank {rank}: {self._text(rank, word % STEP)}")
        if wrong:
            mine = f"rank {self._rank}: {self._text(self._rank, digest)}"
            raise CommunicationError(
                f"ranks call different operations: {'; '.join([*wrong, mine])}. Every rank must make the same call, "
                "with the same sizes and types"
            )

    def _text(self, rank: int, digest: int) -> str:
        for entry in self._directories[rank]:
            if int.from_bytes(entry[:8].tobytes(), "little") == digest:
                return entry[8:].tobytes().rstrip(b"\0").decode(errors="replace")
        return "another operation"


class Signature:
    """Signs for an operation whenever it is called.

    Raises:
        CommunicationError: In the call: another rank has signed for something else.
    """

    __slots__ = ("digest", "register", "together")

    def __init__(self, register: Register, digest: int, together: bool) -> None:
        self.register, self.digest, self.together = register, digest, together

    def __call__(self) -> None:  # `repeated` does the same
        register = self.register
        register.last[0] = number = register.last[0] + STEP
        register.own[0] = word = number + self.digest
        for other in register.others:
            if other[0] != word:  # not here yet, or elsewhere
                register.look(number, self.digest, self.together)
                return


Timed = Callable[["torch.Tensor | None"], float]


def seen(record: Record, name: str, tensor: torch.Tensor | None, act: Callable[[], object]) -> None:
    """Do something that may wait, so that the watchdog sees it.

    Args:
        record: Where the operation is to be seen.
        name: Of the operation.
        tensor: What it is on; None for no data.
        act: What to do.

    Raises:
        CommunicationError: MPI fails.
    """
    record.begin(name, tensor)
    try:
        act()
    except MPI.Exception as error:
        raise CommunicationError(f"{record.text()} failed in MPI: {error}") from error
    finally:
        record.end()


def repeated(record: Record, name: str, calls: Sequence[Call], waiting: Sized, drain: Call) -> Timed:
    """Make one function that performs a repeated operation; it takes the operation's tensor, for the watchdog.

    It returns the time.monotonic() at which the operation began, for the journal.

    Args:
        record: Where the operation is to be seen.
        name: Of the operation.
        calls: What it calls; the first is its `Signature` if the ranks sign for it.
        waiting: Operations that come first, if there are any.
        drain: Performs those.

    Raises:
        CommunicationError: In the function that is returned: MPI fails, or another rank of the node is in another
            operation.
    """
    signature, performed = calls[0] if calls else None, tuple(calls)
    words: Sequence[memoryview] = ()
    signs = isinstance(signature, Signature)  # not for no data, or where a rank is alone on its node
    if isinstance(signature, Signature):
        performed, digest, together, register = performed[1:], signature.digest, signature.together, signature.register
        last, own, words, look = register.last, register.own, register.others, register.look
    thread, now = threading.get_ident, time.monotonic

    def perform(tensor: torch.Tensor | None) -> float:
        if waiting:
            drain()
        if signs:
            last[0] = number = last[0] + STEP
            own[0] = word = number + digest  # long before the others' words are read, which then may be there
        record.sequence += 1
        record.name = name
        record.tensor = tensor
        record.thread = thread()
        record.since = began = now()
        try:
            for theirs in words:
                if theirs[0] != word:
                    look(number, digest, together)
                    break
            for call in performed:
                call()
        except MPI.Exception as error:
            raise CommunicationError(f"{record.text()} failed in MPI: {error}") from error
        finally:
            record.since = 0.0
            record.tensor = None
        return began

    return perform


_BYTES = 400  # of a text on the wire
_DIGEST = 8  # bytes: long texts, such as the block sizes of many ranks, may differ where they were cut off


def compare(comm: MPI.Intracomm, said: str, shown: str = "", place: str = "", nodes: Sequence[int] = ()) -> None:
    """Compare by messages what all ranks are about to do. Collective.

    Args:
        comm: The ranks.
        said: What must be the same on all of them, in words.
        shown: The words for the message, where these are others.
        place: What must be the same on the ranks of a node.
        nodes: The node of each rank, where there may be a place.

    Raises:
        CommunicationError: They are not about to do the same; raised on every rank, with what each does at which line.
    """
    digests = _exchanged(comm, _digest(said) + _digest(place), 2 * _DIGEST)
    calls = {digest[:_DIGEST] for digest in digests}
    places = {(node, digest[_DIGEST:]) for node, digest in zip(nodes, digests, strict=False)}
    if len(calls) == 1 and len(places) == len(set(nodes)):
        return
    own = (shown or said).encode(), line_of(sys._getframe(1)).encode()
    texts, lines = ([row.rstrip(b"\0").decode(errors="replace") for row in _exchanged(comm, o, _BYTES)] for o in own)
    table = "".join(f"\n  rank {r}  {texts[r]}  at {lines[r]}" for r in range(comm.size))
    wrong = (
        "ranks call different operations; every rank must make the same call with the same sizes"
        if len(calls) > 1
        else "ranks pass different parts of an arena; on a node they must lie at the same offset"
    )
    raise CommunicationError(f"{wrong}:{table}", agreed=comm.size == MPI.COMM_WORLD.size)


def _exchanged(comm: MPI.Intracomm, mine: bytes, nbytes: int) -> list[bytes]:
    """Return the first `nbytes` bytes of every rank's, filled up with zeros. Collective."""
    everyone = np.empty((comm.size, nbytes), dtype=np.uint8)
    comm.Allgather(np.frombuffer(mine[:nbytes].ljust(nbytes, b"\0"), dtype=np.uint8), everyone)
    return [theirs.tobytes() for theirs in everyone]


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST).digest()


# -- What the ranks of a node tell each other before they touch each other's memory.
#
# Before the first fence of a program each rank writes a row on the board, memory that the node shares, and after that
# fence compares the others' rows with its own:
#
#     rank 0   | address | digest | all_reduce of 300000 float32, sum, shared      | number, digest
#     rank 1   | address | digest | all_reduce of 600000 float32, sum, shared      | number, digest
#
# Rows that differ in more than the address, or are not there, are an error on all ranks before any of them has touched
# what is another's. The digest is that of the whole text, of which the row holds the beginning. Since a rank writes its
# row again only after the fence that ends the program, nobody still reads it then. Where the node has no room for a
# board the rows are exchanged as messages.

_ADDRESS, _ROW_DIGEST = 8, 8  # bytes
ROW = 128  # bytes: an address, a digest, and the rest text
LINE = 64  # bytes of a rank's word, which shares its cache line with nobody
_PROGRAM = 1 << 40  # a word is number * _PROGRAM + digest; the number begins again when that is full
_LARGEST = (1 << 64) - 1
_BEGIN = _ADDRESS + _ROW_DIGEST
_ABSENT = bytes(_ROW_DIGEST)


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
    digest = hashlib.blake2b(text + more.encode(), digest_size=_ROW_DIGEST).digest()
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
    texts = [f"rank{'s' * (len(who) > 1)} {', '.join(map(str, who))}: {_text(row)}" for row, who in told.items()]
    return (
        f"ranks call different operations: {'; '.join(texts)}. Every rank must make the same call, with the same sizes "
        "and types, on tensors at the same place of an arena or in none"
    )


def _absent(row: bytes) -> bool:
    return row[_ADDRESS:_BEGIN] == _ABSENT


def _text(row: bytes) -> str:
    return "is elsewhere" if row[:_ROW_DIGEST] == _ABSENT else row[_ROW_DIGEST:].rstrip(b"\0").decode(errors="replace")


class Board:
    """The rows of the ranks of a node, for the programs of one communicator, one at a time.

    Beside the rows each rank has a word, the number of the program it is in and a digest of its row: while all words
    are the same, nobody has to read the rows, and a rank that is elsewhere has another number.

    Attributes:
        shared: Whether the rows are in shared memory; else they are exchanged as messages.
        own, word: This rank's row and word.
        others: The other ranks' words.
        last: The number of this rank's last program, times `_PROGRAM`; the one element of a list.
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
            here = [word[0] // _PROGRAM == self.last[0] // _PROGRAM for word in self._words]
            each = [row if is_here else bytes(ROW) for row, is_here in zip(each, here, strict=True)]
        wrong = difference(each, self._ranks)
        if not wrong:
            return
        everybody = not any(map(_absent, each))
        if everybody:
            self._node.Barrier()  # before a rank that has read them all writes its next one
        else:  # the others have not counted it
            self.last[0] = self.word[0] = (self.last[0] - _PROGRAM) & _LARGEST
        raise CommunicationError(wrong, agreed=self._agreed and everybody)

    def meeting(self, row: bytes, fence: Sequence[Call], learn: Callable[[bytes], None] | None = None) -> Call:
        """Return a call that says what this rank is about to do, passes the fence and compares that with the others.

        It raises CommunicationError, on all ranks, where they are not about to do the same. It is one function, because
        of a small operation calls between Python functions would be most of what comparing costs.

        Args:
            row: What it is about to do, see `row_of`.
            fence: At which the ranks of the node meet.
            learn: Given the rows of all ranks when they have changed.
        """
        digest, seen = int.from_bytes(row[_ADDRESS:_BEGIN], "little") % _PROGRAM, b""
        last, word, others, shared = self.last, self.word, self.others, self.shared

        def meet() -> None:
            nonlocal seen
            if self.shown is not row:  # in a training loop it often is
                self.own[:] = self.shown = row
            last[0] = number = (last[0] + _PROGRAM) & _LARGEST
            word[0] = mine = number + digest
            for call in fence:
                call()
            for other in others:
                if other[0] != mine:
                    self.check()
            if not shared:
                self.check()
            if learn is not None:
                rows = self.rows()
                if rows != seen:  # in a training loop they stay as they are
                    learn(rows)
                    seen = rows

        return meet
