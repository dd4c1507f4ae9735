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
from mpitrain.comm.memory.board import is_whole_job
from mpitrain.comm.memory.buffers import tensor_at
from mpitrain.comm.runtime.executor import Call
from mpitrain.comm.runtime.watchdog import line_of
from mpitrain.errors import CommunicationError

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

    def __init__(
        self, ranks: Sequence[int], own: int, memory: Callable[[int], int], synchronize: Sequence[Call]
    ) -> None:
        """Map the words and directories of all ranks of the node.

        Args:
            ranks: Those of the node.
            own: This one.
            memory: For a rank, the address of NBYTES bytes, zeros at first, which only that rank writes.
            synchronize: What makes writes visible to later reads, where the machine does not see to that by itself.
        """
        self._ranks, self._rank, self._synchronize = ranks, own, synchronize
        areas = {rank: tensor_at(memory(rank), NBYTES, torch.uint8).numpy() for rank in ranks}
        self._words = {rank: area.data[:8].cast("Q") for rank, area in areas.items()}
        self.own, self.others = self._words[own], [word for rank, word in self._words.items() if rank != own]
        self.last = [0]
        self._directories = {rank: area[_TEXT:].reshape(_ENTRIES, _TEXT) for rank, area in areas.items()}
        self._signed = 0  # texts in the directory so far
        lock = threading.Lock()
        self._acquire, self._release = lock.acquire, lock.release

    def signature(self, said: str, *, meets: bool, together: bool) -> Signature:
        """Make what signs for an operation each time it is called.

        Args:
            said: Its arguments, in words.
            meets: Whether its ranks meet at a fence.
            together: Whether no rank can complete it before all have begun it.
        """
        digest = int.from_bytes(hashlib.blake2b(said.encode(), digest_size=4).digest(), "little") % STEP
        digest = digest | _MEETS if meets else digest & ~_MEETS
        self._note(digest, said)
        return Signature(self, digest, together)

    def _note(self, digest: int, said: str) -> None:
        text = digest.to_bytes(8, "little") + said.encode()[: _TEXT - 8].ljust(_TEXT - 8, b"\0")
        self._directories[self._rank][self._signed % _ENTRIES] = np.frombuffer(text, dtype=np.uint8)
        self._signed += 1

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
        self._acquire()
        self._release()
        for call in self._synchronize:
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


Repeated = Callable[["torch.Tensor | None"], object]
Timed = Callable[["torch.Tensor | None"], float]


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
    raise CommunicationError(f"{wrong}:{table}", agreed=is_whole_job(comm.size))


def _exchanged(comm: MPI.Intracomm, mine: bytes, nbytes: int) -> list[bytes]:
    """Return the first `nbytes` bytes of every rank's, filled up with zeros. Collective."""
    everyone = np.empty((comm.size, nbytes), dtype=np.uint8)
    comm.Allgather(np.frombuffer(mine[:nbytes].ljust(nbytes, b"\0"), dtype=np.uint8), everyone)
    return [theirs.tobytes() for theirs in everyone]


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST).digest()
