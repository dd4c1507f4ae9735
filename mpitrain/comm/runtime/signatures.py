"""Which operation each rank of a node is in: signed before it begins, in memory the node shares, waiting for nobody.

    word of each rank   | number of the operation | digest of its arguments |

A rank writes its own word and then looks at the others'. Where one of them has signed the same number for something
else, the ranks have diverged, and this rank, which came later, raises instead of going on. So two ranks never exchange
data for different arguments: some MPI libraries would write a message that is too long behind the memory it is for,
and all of them take one type for another.

Ranks that meet at a fence anyway leave it to the `board`, where all of them find out together.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch

from mpitrain.comm.memory.buffers import tensor_at
from mpitrain.comm.runtime.ordering import Call
from mpitrain.errors import CommunicationError

_STEP = 1 << 28  # a word is number * _STEP + digest
_MEETS = 1  # the bit of a digest that says that the ranks meet at a fence
_TEXT = 128  # bytes of an entry of the directory: a digest and what it stands for
_ENTRIES = 31
NBYTES = (1 + _ENTRIES) * _TEXT  # of a rank's memory: the word, and the directory of what it has signed lately


class Register:
    """Where the ranks of a node sign, for the operations of one communicator."""

    def __init__(
        self, ranks: Sequence[int], own: int, memory: Callable[[int], int], synchronize: Sequence[Call]
    ) -> None:
        """ranks: of the node; own: this one. memory(rank): the address of NBYTES zeros, one's own to write.

        synchronize: what makes writes seen before later reads, where the machine does not see to that by itself.
        """
        self._ranks, self._rank, self._synchronize = ranks, own, synchronize
        areas = {rank: tensor_at(memory(rank), NBYTES, torch.uint8).numpy() for rank in ranks}
        self._words = {rank: (ctypes.c_uint64 * 1).from_address(area.ctypes.data) for rank, area in areas.items()}
        self._others = [word for rank, word in self._words.items() if rank != own]
        self._directories = {rank: area[_TEXT:].reshape(_ENTRIES, _TEXT) for rank, area in areas.items()}
        self._signed = 0  # texts in the directory so far
        self._last = 0  # number of this rank's last operation, times _STEP
        lock = threading.Lock()
        self._acquire, self._release = lock.acquire, lock.release

    def signing(self, said: str, *, meets: bool, together: bool) -> Call:
        """A call that signs for an operation. Raises CommunicationError where another rank has signed for another.

        said: its arguments. meets: whether its ranks meet at a fence. together: whether no rank can complete it before
        all have begun it.
        """
        digest = int.from_bytes(hashlib.blake2b(said.encode(), digest_size=4).digest(), "little") % _STEP
        digest = digest | _MEETS if meets else digest & ~_MEETS
        self._note(digest, said)
        own, others, fence = self._words[self._rank], self._others, self._fence

        def sign() -> None:
            self._last = number = self._last + _STEP
            own[0] = word = number + digest
            for other in others:
                if other[0] != word:  # not here yet, or elsewhere
                    break
            else:
                return
            fence()
            for other in others:
                theirs = other[0]
                if theirs != word and theirs >= number:
                    self._look(number, digest, together)
                    return

        return sign

    def _fence(self) -> None:
        """Let this rank's word be seen before it reads the others': of two that come at once, one must see the other.

        Taking a lock keeps the processor from reading before its own word is seen.
        """
        self._acquire()
        self._release()
        for call in self._synchronize:
            call()

    def _note(self, digest: int, said: str) -> None:
        text = digest.to_bytes(8, "little") + said.encode()[: _TEXT - 8].ljust(_TEXT - 8, b"\0")
        self._directories[self._rank][self._signed % _ENTRIES] = np.frombuffer(text, dtype=np.uint8)
        self._signed += 1

    def _look(self, number: int, digest: int, together: bool) -> None:
        """Raise CommunicationError if another rank is in another operation of this number, or has left this one."""
        wrong: list[str] = []
        for rank in self._ranks:
            word = self._words[rank][0]
            if word >= number + _STEP and together:
                wrong.append(f"rank {rank} has gone on to {self._text(rank, word % _STEP)}")
            elif number <= word < number + _STEP and word % _STEP != digest and not word & digest & _MEETS:
                wrong.append(f"rank {rank}: {self._text(rank, word % _STEP)}")
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
