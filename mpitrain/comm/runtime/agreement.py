"""Checks that all ranks make the same call, with the same sizes and types.

There are three checks:

`Register`, for operations whose ranks do not meet at a fence. Before an operation, each rank of a node writes a word
into shared memory, without waiting for anybody:

    word of each rank   | number of the operation | digest of its arguments |

The rank then looks at the words of the others. If another rank has signed the same number with a different digest, the
ranks have diverged, and the rank that came later raises instead of going on. So two ranks never exchange data for
different arguments. (Some MPI libraries would write a message that is too long past the end of its buffer, and all of
them interpret data of one type as another.) `make_repeated_call` contains the same check for a repeated operation.

`compare`, for any ranks, also on different nodes. The ranks exchange what they are about to do, and all of them
detect a mismatch. It costs an all-gather of 16 bytes. It is used before arenas and node copies are made, and, in debug
mode, before every operation. Debug mode is on by default in tests; otherwise set MPITRAIN_DEBUG=1 or call
`mpitrain.init(debug=True)`. MPI itself would hang or return wrong data; this check raises an error that shows each
rank's operation and source line. A torch.distributed process group also uses it, under
TORCH_DISTRIBUTED_DEBUG=DETAIL, for lists of tensors, which the communicator never sees as lists.

`Board`, for operations whose ranks meet at a fence anyway.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable, Sequence, Sized

import numpy as np
import torch

from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.job.traffic import Record, RecordedOperation
from mpitrain.comm.memory.arena import Arena
from mpitrain.comm.memory.buffers import tensor_at
from mpitrain.comm.runtime.watchdog import line_of
from mpitrain.errors import CommunicationError

Call = Callable[[], object]

STEP = 1 << 28  # a word is number * STEP + digest
SIGNED_CALLS = 16  # persistent calls that the MPI library performs sign one in 16 operations; a power of two
_MEETS = 1  # bit of a digest that is set if the ranks meet at a fence
_TEXT = 128  # bytes of a directory entry: a digest and its text
_ENTRIES = 31
NBYTES = (1 + _ENTRIES) * _TEXT  # bytes per rank: its word, and the directory of its latest texts


class Register:
    """Shared memory in which the ranks of a node sign for the operations of one communicator.

    Attributes:
        own_word, other_words: Word of this rank and words of the other ranks; each is a memory view of one element.
        last: One-element list with the number of this rank's last operation, times STEP.
    """

    def __init__(self, ranks: Sequence[int], rank: int, memory: Callable[[int], int], syncs: Sequence[Call]) -> None:
        """Map the words and directories of all ranks of the node.

        Args:
            ranks: Ranks of the node.
            rank: This rank.
            memory: For a rank, the address of NBYTES bytes, initially zero, that only that rank writes.
            syncs: Calls that make writes visible to later reads, on machines that need them.
        """
        self._ranks, self._rank, self._syncs = ranks, rank, syncs
        areas = {other: tensor_at(memory(other), NBYTES, torch.uint8).numpy() for other in ranks}
        self._words = {other: area.data[:8].cast("Q") for other, area in areas.items()}
        self.own_word = self._words[rank]
        self.other_words = [word for other, word in self._words.items() if other != rank]
        self.last = [0]
        self._directories = {other: area[_TEXT:].reshape(_ENTRIES, _TEXT) for other, area in areas.items()}
        self._signed = 0  # number of texts written to the directory
        self._lock = threading.Lock()

    def signature(self, description: str, *, meets: bool, synchronizing: bool) -> Signature:
        """Return the signature of an operation, to be called each time before the operation.

        Args:
            description: The operation and its arguments, in words.
            meets: True if its ranks meet at a fence.
            synchronizing: True if no rank can complete it before all have begun it.
        """
        digest = int.from_bytes(hashlib.blake2b(description.encode(), digest_size=4).digest(), "little") % STEP
        digest = digest | _MEETS if meets else digest & ~_MEETS
        text = digest.to_bytes(8, "little") + description.encode()[: _TEXT - 8].ljust(_TEXT - 8, b"\0")
        self._directories[self._rank][self._signed % _ENTRIES] = np.frombuffer(text, dtype=np.uint8)
        self._signed += 1
        return Signature(self, digest, synchronizing)

    def check_words(self, number: int, digest: int, synchronizing: bool) -> None:
        """Compare this rank's operation with the words of the other ranks.

        If two ranks arrive at the same time, at least one of them must see the word of the other. Taking a lock ensures
        this: the processor writes this rank's word before it reads the others'.

        Args:
            number: Number of this rank's operation, times STEP.
            digest: Digest of its arguments.
            synchronizing: True if no rank can complete it before all have begun it.

        Raises:
            CommunicationError: Another rank has signed a different operation with the same number; or, if
                `synchronizing`, a later operation, although it cannot have completed this one.
        """
        with self._lock:
            pass
        for call in self._syncs:
            call()
        word = number + digest
        for other in self.other_words:
            theirs = other[0]
            if theirs != word and theirs >= number and (synchronizing or theirs < number + STEP):
                self._raise_mismatch(number, digest, synchronizing)
                return

    def _raise_mismatch(self, number: int, digest: int, synchronizing: bool) -> None:
        wrong: list[str] = []
        for rank in self._ranks:
            word = self._words[rank][0]
            if word >= number + STEP and synchronizing:
                wrong.append(f"rank {rank} has already begun {self._text(rank, word % STEP)}")
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
    """Signature of an operation: calling it writes this rank's word and checks the words of the others.

    Raises:
        CommunicationError: When called, if another rank has signed for something else.
    """

    __slots__ = ("digest", "register", "synchronizing")

    def __init__(self, register: Register, digest: int, synchronizing: bool) -> None:
        self.register, self.digest, self.synchronizing = register, digest, synchronizing

    def __call__(self) -> None:  # `make_repeated_call` has a copy of this code
        register = self.register
        register.last[0] = number = register.last[0] + STEP
        register.own_word[0] = word = number + self.digest
        for other in register.other_words:
            if other[0] != word:  # that rank has not arrived yet, or is in another operation
                register.check_words(number, self.digest, self.synchronizing)
                return


def run_watched(record: Record, name: str, tensor: torch.Tensor | None, act: Callable[[], object]) -> None:
    """Perform an action that may wait, visible to the watchdog.

    Args:
        record: Record in which the watchdog sees the operation.
        name: Name of the operation.
        tensor: Tensor of the operation; None if it has no data.
        act: The action.

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


def make_repeated_call(
    record: Record, operation: RecordedOperation, calls: Sequence[Call], waiting: Sized, drain: Call, signed: int = 1
) -> Call:
    """Return one function that performs a repeated operation.

    The function raises CommunicationError if MPI fails, or if another rank of the node is in another operation. It is
    written for speed: in an operation on few bytes it is the part of the time that is not MPI's.

    Args:
        record: Record in which the watchdog sees the operation.
        operation: Description of the operation.
        calls: Calls of the operation; the first is its `Signature` if the ranks sign for it.
        waiting: Operations that must be performed first.
        drain: Performs those.
        signed: The rank signs one operation in this number of operations; a power of two.
    """
    signature, performed = calls[0] if calls else None, tuple(calls)
    last, unsigned = [0], -1  # unsigned: bits of the sequence number of an operation that is not signed
    if isinstance(signature, Signature):
        unsigned = signed - 1
        performed, digest, register = performed[1:], signature.digest, signature.register
        last, own_word, other_words = register.last, register.own_word, register.other_words
        check_words, synchronizing = register.check_words, signature.synchronizing

    def perform_all() -> None:
        for call in performed:
            call()

    act = performed[0] if len(performed) == 1 else perform_all

    def perform() -> None:
        if waiting:
            drain()
        last[0] = number = last[0] + STEP
        record.sequence = sequence = record.sequence + 1
        if signs := not sequence & unsigned:  # early, so that the ranks' words are likely there when they are read
            own_word[0] = word = number + digest
        record.operation = operation
        try:
            if signs:
                for other in other_words:
                    theirs = other[0]
                    if theirs != word and (synchronizing or theirs < number + STEP):  # else that rank is ahead
                        check_words(number, digest, synchronizing)
                        break
            act()
        except MPI.Exception as error:
            raise CommunicationError(f"{record.text()} failed in MPI: {error}") from error
        finally:
            record.operation = None

    return perform


_BYTES = 400  # of a text in a message
_DIGEST = 8  # bytes of a digest of the whole text; long texts may differ only after the first _BYTES


def compare(comm: MPI.Intracomm, description: str, shown: str = "", place: str = "", nodes: Sequence[int] = ()) -> None:
    """Compare by messages what all ranks are about to do. Collective.

    Args:
        comm: The ranks.
        description: Description that must be equal on all ranks.
        shown: Description for the error message; by default `description`.
        place: Description that must be equal on the ranks of each node.
        nodes: Node number of each rank, if there is a `place`.

    Raises:
        CommunicationError: The descriptions differ; raised on every rank, with each rank's description and source line.
    """
    digests = _all_gather_rows(comm, _digest(description) + _digest(place), 2 * _DIGEST)
    calls = {digest[:_DIGEST] for digest in digests}
    places = {(node, digest[_DIGEST:]) for node, digest in zip(nodes, digests, strict=False)}
    if len(calls) == 1 and len(places) == len(set(nodes)):
        return
    parts = (shown or description).encode(), line_of(sys._getframe(1)).encode()
    texts, lines = (
        [row.rstrip(b"\0").decode(errors="replace") for row in _all_gather_rows(comm, text, _BYTES)] for text in parts
    )
    table = "".join(f"\n  rank {r}  {texts[r]}  at {lines[r]}" for r in range(comm.size))
    wrong = (
        "ranks call different operations; every rank must make the same call with the same sizes"
        if len(calls) > 1
        else "ranks pass different parts of an arena; pass the same offset on all ranks of a node"
    )
    raise CommunicationError(f"{wrong}:{table}", agreed=comm.size == MPI.COMM_WORLD.size)


def _all_gather_rows(comm: MPI.Intracomm, mine: bytes, nbytes: int) -> list[bytes]:
    """Return the bytes of every rank, cut or padded with zeros to `nbytes` bytes. Collective."""
    everyone = np.empty((comm.size, nbytes), dtype=np.uint8)
    comm.Allgather(np.frombuffer(mine[:nbytes].ljust(nbytes, b"\0"), dtype=np.uint8), everyone)
    return [theirs.tobytes() for theirs in everyone]


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST).digest()


# -- Check of the ranks of a node before they access each other's memory.
#
# Before the first fence of a program, each rank writes a row on the board, which is memory that the node shares. After
# that fence, it compares the rows of the others with its own:
#
#     rank 0   | address | digest | all_reduce of 300000 float32, sum, shared      | number, digest
#     rank 1   | address | digest | all_reduce of 600000 float32, sum, shared      | number, digest
#
# Rows that are missing, or differ in more than the address, are an error on all ranks before any of them has accessed
# another's memory. The digest is that of the whole text; the row has only the beginning of the text. A rank writes its
# row again only after the fence that ends the program, when nobody reads it any more. If the node has no shared memory
# for a board, the rows are exchanged as messages.

_ADDRESS, _ROW_DIGEST = 8, 8  # bytes
ROW = 128  # bytes: an address, a digest, and text
LINE = 64  # bytes reserved for a rank's word, so that no two words share a cache line
_PROGRAM = 1 << 40  # a word is number * _PROGRAM + digest; the number wraps around
_LARGEST = (1 << 64) - 1
_BEGIN = _ADDRESS + _ROW_DIGEST
_ABSENT = bytes(_ROW_DIGEST)


def describe_call(operation: str, numel: int, dtype: torch.dtype, *details: str) -> str:
    """Return a description of an operation and its arguments, for messages.

    Args:
        operation: Name of the operation.
        numel: Number of elements of the tensor.
        dtype: Type of the elements.
        details: Further arguments; empty ones are left out.
    """
    return ", ".join([f"{operation} of {numel} {str(dtype).removeprefix('torch.')}", *filter(None, details)])


def make_row(address: int, description: str, more: str = "") -> bytes:
    """Return the row with which a rank announces its operation and the address of its memory.

    Args:
        address: Address of the memory that other ranks access.
        description: Description that must be equal on all ranks.
        more: Further text that must be equal, but is not shown in messages.
    """
    text = description.encode()
    digest = hashlib.blake2b(text + more.encode(), digest_size=_ROW_DIGEST).digest()
    return address.to_bytes(_ADDRESS, "little", signed=True) + digest + text[: ROW - _BEGIN].ljust(ROW - _BEGIN, b"\0")


def row_addresses(rows: bytes) -> np.ndarray:
    """Return the addresses in several consecutive rows, as an int64 array."""
    return np.frombuffer(rows, dtype=np.int64).reshape(-1, ROW // _ADDRESS)[:, 0]


def describe_difference(rows: Sequence[bytes], ranks: Sequence[int]) -> str:
    """Describe how the rows of some ranks differ, in one line; return "" if they are equal.

    Args:
        rows: One row for each of the ranks.
        ranks: Numbers of the ranks, for the message.
    """
    ranks_by_row: dict[bytes, list[int]] = {}
    for rank, row in zip(ranks, rows, strict=True):
        ranks_by_row.setdefault(row[_ADDRESS:], []).append(rank)
    if len(ranks_by_row) == 1 and not _is_absent(rows[0]):
        return ""
    texts = [
        f"rank{'s' * (len(group) > 1)} {', '.join(map(str, group))}: {_text(row)}"
        for row, group in ranks_by_row.items()
    ]
    return (
        f"ranks call different operations: {'; '.join(texts)}. Every rank must make the same call, with the same sizes "
        "and types, on tensors at the same offset of an arena, or outside of arenas"
    )


def _is_absent(row: bytes) -> bool:
    return row[_ADDRESS:_BEGIN] == _ABSENT


def _text(row: bytes) -> str:
    return (
        "in another operation"
        if row[:_ROW_DIGEST] == _ABSENT
        else row[_ROW_DIGEST:].rstrip(b"\0").decode(errors="replace")
    )


class Board:
    """Rows of the ranks of a node, for the programs of one communicator, one program at a time.

    Each rank also has a word: the number of its current program and a digest of its row. If all words are equal, nobody
    has to read the rows. A rank that is in another program has another number.

    Attributes:
        shared: True if the rows are in shared memory; otherwise they are exchanged as messages.
        own_row, word: Row and word of this rank.
        other_words: Words of the other ranks.
        last: One-element list with the number of this rank's last program, times `_PROGRAM`.
        last_row: The bytes object last copied into this rank's row.
    """

    def __init__(self, node: MPI.Intracomm, ranks: Sequence[int], arena: Arena, agreed: bool) -> None:
        """Divide the arena's memory among the ranks.

        Args:
            node: MPI communicator of the ranks of this node.
            ranks: Their ranks in the communicator of the programs.
            arena: Arena with at least ROW + LINE bytes for each of these ranks. If it is private, the rows are
                exchanged as messages.
            agreed: True if these are all ranks of the job, so that an error on one is raised on all.
        """
        self._node, self._ranks, self._agreed = node, ranks, agreed
        self.shared = arena.kind == "shared"
        first = next(iter(arena.segments.values())) if self.shared else arena.start  # one segment has all rows
        memory = tensor_at(first, node.size * (ROW + LINE), torch.uint8).numpy().data
        self._rows, lines = memory[: node.size * ROW], memory[node.size * ROW :]
        self.own_row = self._rows[node.rank * ROW : (node.rank + 1) * ROW]
        self._words = [lines[rank * LINE : rank * LINE + 8].cast("Q") for rank in range(node.size)]
        self.word = self._words[node.rank]
        self.other_words = [word for rank, word in enumerate(self._words) if rank != node.rank] if self.shared else []
        self.last, self.last_row = [0], b""

    def rows(self) -> bytes:
        """Return the rows of all ranks. Collective if they are exchanged as messages."""
        if not self.shared:
            self._node.Allgather(MPI.IN_PLACE, [self._rows, ROW, MPI.BYTE])
        return self._rows.tobytes()

    def check(self) -> None:
        """Raise CommunicationError unless all ranks are in the same program and their rows are equal.

        Every rank that is in this program raises the error.
        """
        rows = self.rows()
        each = [rows[lo : lo + ROW] for lo in range(0, len(rows), ROW)]
        if self.shared:
            here = [word[0] // _PROGRAM == self.last[0] // _PROGRAM for word in self._words]
            each = [row if is_here else bytes(ROW) for row, is_here in zip(each, here, strict=True)]
        wrong = describe_difference(each, self._ranks)
        if not wrong:
            return
        everybody = not any(map(_is_absent, each))
        if everybody:
            self._node.Barrier()  # no rank writes its next row before all have read the rows
        else:  # ranks that are elsewhere have not counted this program
            self.last[0] = self.word[0] = (self.last[0] - _PROGRAM) & _LARGEST
        raise CommunicationError(wrong, agreed=self._agreed and everybody)

    def make_meeting_call(
        self, row: bytes, fence: Sequence[Call], on_change: Callable[[bytes], None] | None = None
    ) -> Call:
        """Return a call that announces an operation, passes the fence, and compares the rows of all ranks.

        The call raises CommunicationError, on all ranks, if the rows differ. It is a single function because in a small
        operation, calls between Python functions would be most of the cost of the comparison.

        Args:
            row: Row of the operation, see `make_row`.
            fence: Calls at which the ranks of the node meet.
            on_change: Called with the rows of all ranks when they have changed.
        """
        digest, last_rows = int.from_bytes(row[_ADDRESS:_BEGIN], "little") % _PROGRAM, b""
        last, word, others, shared = self.last, self.word, self.other_words, self.shared

        def meet() -> None:
            nonlocal last_rows
            if self.last_row is not row:  # in a training loop it is often the same row
                self.own_row[:] = self.last_row = row
            last[0] = number = (last[0] + _PROGRAM) & _LARGEST
            word[0] = mine = number + digest
            for call in fence:
                call()
            for other in others:
                if other[0] != mine:
                    self.check()
            if not shared:
                self.check()
            if on_change is not None:
                rows = self.rows()
                if rows != last_rows:  # in a training loop they rarely change
                    on_change(rows)
                    last_rows = rows

        return meet
