"""Mailboxes: ranks that serve take what others ask, without knowing who asks next, or when.

A letter goes in two: its words, in one small message that also tells the payload's length and the tag under which the
payload comes, then the payload, which the taker receives where it wants it, or not in order. So a letter of any length
is posted without the taker having lent any memory for it.

    rank 1                                  rank 0, a thread that serves
    questions.post(0, [PUSH, 3], gradient)  letter = questions.take(1.0)
                                            letter.receive(place).wait()
    letter = answers.wait([0], "push")      answers.post(letter.source, [DONE])

Letters are probed for, instead of being received ahead: a box that is idle, or that nobody refers to any more, then
lends MPI no memory. That costs 1.5 us a letter.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count

import numpy as np
import torch

from mpitrain.comm.collectives.dispatch import OwnedCommunicators, ProcessServices, check_rank
from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.job.topology import Member, Topology
from mpitrain.comm.job.traffic import Moved, Note, Record, clock
from mpitrain.comm.memory.buffers import as_tensor, in_messages
from mpitrain.comm.memory.device import is_accelerator
from mpitrain.comm.runtime.agreement import seen
from mpitrain.comm.runtime.work import Messages, MessageWait, Work, poll
from mpitrain.errors import CommunicationError, InputError

WORDS = 15  # numbers in a letter, at most
_LETTERS = 0  # the tag of words; payloads have the others
_TAGS = 1 << 14  # of payloads: more than there are under way between two ranks; MPI promises twice as many
_EAGER_ROUNDS = 20  # of looking without a pause
_NAP = 1e-5, 5e-4  # seconds between looks, at first and at most
_NAP_SENDING = 1e-4  # at most, while MPI has to be called for what was posted to go on


class Posted(Work):
    """A letter that was posted: done when its payload may be written again."""

    def __init__(self, box: Mailbox, dest: int, requests: list[MPI.Request], held: Sequence[object]) -> None:
        self._box, self._dest, self._requests = box, dest, requests
        self._held = held  # which MPI reads
        self._error: CommunicationError | None = None

    def done(self) -> bool:
        """Whether the payload may be written again. Calling this also lets it make progress."""
        self._box._look_at_posted()
        if self._error is not None:
            raise self._error
        return not self._requests

    def wait(self, timeout: float | None = None) -> None:
        """Block until the payload may be written again; see `Work.wait`."""
        name = f"post to rank {self._dest}"
        if timeout is not None:
            poll(self, f"{self._box.label}: {name}", timeout)
        elif not self.done():
            record = self._box.process.watchdog.record(f"{self._box.label} (posting)")  # of this wait: any thread may
            record.awaited = (self._box.world_ranks[self._dest],)
            begin = clock()
            seen(record, name, None, partial(self._box._until, self.done))
            if self._box.process.journal.on:
                self._box._note("post").waited(begin)

    def _look(self) -> bool:
        """Whether nothing of it is under way any more. Only with the box's lock: two threads may not ask at once."""
        try:
            if not MPI.Request.Testall(self._requests):
                return False
        except MPI.Exception as error:
            self._error = self._box._failed(f"post to rank {self._dest}", error)
        self._requests, self._held = [], ()
        return True


class Letter:
    """What a rank has posted.

    Attributes:
        words: The numbers.
        source: The rank that posted it.
        payload_bytes: Length of its payload; 0 where it carries none.
        note: Enters it in the journal where it was waited for; None while that is off.
    """

    __slots__ = ("_box", "_tag", "note", "payload_bytes", "source", "words")

    def __init__(self, box: Mailbox, source: int, content: list[float]) -> None:
        self._box, self.source = box, source
        self.note: Note | None = None
        self.payload_bytes, self._tag, self.words = int(content[0]), int(content[1]), content[2:]

    def receive(self, x: torch.Tensor) -> Messages:
        """Begin to receive the payload, at most once, into a tensor of exactly its size.

        Args:
            x: A contiguous tensor in host memory.

        Returns:
            A handle of it, to be waited for by the thread that takes from the box.

        Raises:
            InputError: x cannot be received into.
            CommunicationError: The payload has another size. It is then received and thrown away: its sender may wait
                for that.
        """
        tensor, box = _in_host_memory(x, written=True), self._box
        name = f"payload of a letter of rank {self.source}"
        if tensor.nbytes != self.payload_bytes:
            self.discard()
            raise CommunicationError(
                f"{box.label}: a letter of rank {self.source} carries {self.payload_bytes} bytes where rank "
                f"{box.rank} expects {tensor.nbytes}; post and receive tensors of one size and type"
            )
        requests = box._receive(tensor, self.source, self._tag)
        note = box._note("recv") if box.process.journal.on else None
        if note is not None:
            box.process.journal.note("recv", note.axis, note.moved, clock())
        wait = MessageWait(box._record, (box.world_ranks[self.source],), box.process.progress, note)
        return Messages(name, tensor, requests, wait)

    def discard(self) -> None:
        """Receive the payload and throw it away, instead of `receive`."""
        if self.payload_bytes:
            self.receive(torch.empty(self.payload_bytes, dtype=torch.uint8)).wait()


class Mailbox(Member):
    """One rank's place in a mailbox of all ranks of a communicator. Made by `Communicator.mailbox`.

    One thread takes from it; any thread of the process may post, also while that one takes. Letters of one thread to
    one rank arrive in order.

    Attributes:
        process: What all communicators of the process share.
    """

    def __init__(self, comm: MPI.Comm, topology: Topology, process: ProcessServices, label: str, axis: str) -> None:
        """axis: label of the communicator, for the journal."""
        super().__init__(topology, label)
        self.process, self._axis = process, axis
        self._owned = OwnedCommunicators(process)
        self._comm = self._owned.keep(comm)
        self._record = process.watchdog.record(label)  # of the thread that takes
        self._listening: Record | None = None  # of the thread that serves
        self._numbers = count()  # of payloads
        self._posted: list[Posted] = []  # of which something is under way
        self._lock = threading.Lock()  # of these
        self._freed = False

    def post(self, dest: int, words: Sequence[float], payload: torch.Tensor | None = None) -> Posted:
        """Send a letter; never waits for who takes it.

        A payload between ranks that cannot read each other's memory moves while this rank is in any call of MPI.

        Args:
            dest: The rank whose box it goes to; its own will do.
            words: At most `WORDS` numbers; they travel as float64.
            payload: A contiguous tensor in host memory. It is kept alive until it is sent, and must not change before
                the handle is done.

        Returns:
            A handle of what is under way, which need not be kept.

        Raises:
            InputError: There is no such rank, there are too many words, or the payload cannot be sent.
            CommunicationError: MPI fails.
        """
        check_rank(self, dest)
        if len(words) > WORDS:
            raise InputError(f"{self.label}: {len(words)} words; a letter has {WORDS} at most, send more as payload")
        self._require()
        tensor = None if payload is None else _in_host_memory(payload, written=False)
        nbytes = 0 if tensor is None else tensor.nbytes
        begin = clock() if self.process.journal.on else 0.0
        tag = 1 + next(self._numbers) % _TAGS if nbytes else 0
        content = np.array([nbytes, tag, *words], dtype=np.float64)
        try:
            requests = [self._comm.Isend(content, dest, _LETTERS)]
            if tensor is not None:
                requests += [self._comm.Isend(spec, dest, tag) for spec in in_messages(tensor)]
        except MPI.Exception as error:
            raise self._failed(f"post to rank {dest}", error) from error
        posted = Posted(self, dest, requests, (content, tensor))
        with self._lock:
            self._posted.append(posted)
        self._look_at_posted()
        if begin:
            here, whole = self.nodes[dest] == self.node, (nbytes + content.nbytes) * (dest != self.rank)
            moved = Moved("letter", whole * here, whole * (not here))
            self._numbered("post", moved, self.rank, dest).performed(begin)
        return posted

    def _note(self, operation: str) -> Note:
        """For a part of what is entered already."""
        return Note(self.process.journal, operation, self._axis, Moved("letter"))

    def _numbered(self, operation: str, moved: Moved, source: int, dest: int) -> Note:
        """For the letter that a rank has posted, or taken, just now."""
        key = f"{self.label}: letter from {self.world_ranks[source]} to {self.world_ranks[dest]}"
        return Note(self.process.journal, operation, self._axis, moved, key, self.process.journal.number(key))

    def take(self, seconds: float) -> Letter | None:
        """The next letter of any rank; None where none comes in time. The watchdog sees that wait only in `listening`.

        Args:
            seconds: How long to wait; 0: only look.

        Raises:
            CommunicationError: MPI fails.
        """
        self._require()
        found: list[Letter] = []
        begin = clock() if self.process.journal.on else 0.0
        self._until(partial(self._take_into, found), time.monotonic() + seconds)
        if begin:
            self.process.journal.wait(begin)
        return found[0] if found else None

    @contextmanager
    def listening(self, awaited: Sequence[int], name: str) -> Iterator[None]:
        """Inside, letters are taken whenever they come, and their senders may compute for any time between them.

        Where none has come for comm.timeout the watchdog asks all ranks where they are. If all answer nothing is done;
        else the job ends, or goes on without those that do not, as where an operation does not complete.

        Args:
            awaited: The ranks that post letters; the job ends where all of them have left.
            name: Of what is listened for, in messages.
        """
        record = self.process.watchdog.record(f"{self.label} (taking)")
        record.awaited, record.patient = [self.world_ranks[rank] for rank in awaited], True
        self._listening = record
        record.begin(name, None)
        try:
            yield
        finally:
            record.end()
            self._listening = None
            self.process.watchdog.forget(record)

    def wait(self, awaited: Sequence[int], name: str) -> Letter:
        """The next letter of any rank, however long it takes to come, for as long as the watchdog lets it.

        Args:
            awaited: The ranks that are to post it, any of them; the job ends where all of them have left, and after
                comm.timeout in any case.
            name: Of what is waited for, in messages.

        Raises:
            CommunicationError: MPI fails.
        """
        self._require()
        found: list[Letter] = []
        begin = clock() if self.process.journal.on else 0.0
        if not self._take_into(found):
            self._record.awaited = [self.world_ranks[rank] for rank in awaited]
            seen(self._record, name, None, partial(self._until, partial(self._take_into, found)))
        if begin and found[0].note is not None:
            found[0].note.performed(begin)
        return found[0]

    def free(self) -> None:
        """Release the box; collective. Twice is fine.

        Letters that nobody took are thrown away; of those that were taken the payloads have been received.
        """
        if self._freed:
            return
        self._freed = True
        if self.process.may_release(self._comm):
            self._record.awaited = ()
            try:
                seen(self._record, "free", None, self._empty)
                self._owned.free()
            except CommunicationError:
                if self.process.failures is None:
                    raise  # else a rank has died: nothing can be done together
        self.process.watchdog.forget(self._record)

    def _empty(self) -> None:
        """Return when nothing is under way between any ranks."""
        everybody: MPI.Request | None = None
        found: list[Letter] = []

        def empty() -> bool:
            nonlocal everybody
            while self._take_into(found):
                letter = found.pop()
                place = torch.empty(letter.payload_bytes, dtype=torch.uint8)
                self._until(partial(MPI.Request.Testall, self._receive(place, letter.source, letter._tag)))
            if everybody is None and not self._posted:
                everybody = self._comm.Ibarrier()
            return everybody is not None and everybody.Test()

        self._until(empty)

    def _take_into(self, found: list[Letter]) -> bool:
        """Append the letter that has come, if one has; whether one had."""
        status = MPI.Status()
        try:
            message = self._comm.Improbe(MPI.ANY_SOURCE, _LETTERS, status)
            if message is None:  # Open MPI looks first and takes in what has come then
                message = self._comm.Improbe(MPI.ANY_SOURCE, _LETTERS, status)
            if message is None:
                self._look_at_posted()
                return False
            content = np.empty(status.Get_count(MPI.DOUBLE))
            message.Recv(content)
        except MPI.Exception as error:
            raise self._failed("take", error) from error
        if self._listening is not None:
            self._listening.since = time.monotonic()
        letter = Letter(self, status.source, content.tolist())
        if self.process.journal.on:
            letter.note = self._numbered("letter", Moved("letter"), status.source, self.rank)
        found.append(letter)
        return True

    def _receive(self, tensor: torch.Tensor, source: int, tag: int) -> list[MPI.Request]:
        try:
            return [self._comm.Irecv(spec, source, tag) for spec in in_messages(tensor)]
        except MPI.Exception as error:
            raise self._failed(f"receive from rank {source}", error) from error

    def _look_at_posted(self) -> None:
        """Let what is under way make progress, and give up the memory of what has been sent."""
        if self._posted and self._lock.acquire(blocking=False):  # else another thread is at it
            try:
                self._posted = [posted for posted in self._posted if not posted._look()]
            finally:
                self._lock.release()

    def _until(self, happened: Callable[[], bool], deadline: float | None = None) -> None:
        """Return when something has happened, or it is too late; other threads and processes run meanwhile."""
        rounds, nap = 0, _NAP[0]
        while not happened() and (deadline is None or time.monotonic() < deadline):
            rounds += 1
            if rounds <= _EAGER_ROUNDS:
                os.sched_yield()
                continue
            time.sleep(nap if deadline is None else min(nap, max(0.0, deadline - time.monotonic())))
            nap = min(2 * nap, _NAP_SENDING if self._posted else _NAP[1])

    def _require(self) -> None:
        if self._freed:
            raise InputError(f"{self.label} was freed; make another one")

    def _failed(self, name: str, error: MPI.Exception) -> CommunicationError:
        return CommunicationError(f"{self.label}: {name} failed in MPI: {error}")


def _in_host_memory(x: torch.Tensor, *, written: bool) -> torch.Tensor:
    """The tensor, contiguous. Raises InputError where MPI cannot reach it."""
    tensor = as_tensor(x, written=written)
    if is_accelerator(tensor.device):
        raise InputError(f"a payload is in host memory; this tensor is on {tensor.device}: pass x.cpu()")
    return tensor
