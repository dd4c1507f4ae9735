"""Mailboxes: a rank that serves takes requests in any order, without knowing who sends the next one, or when.

A letter consists of two messages. The first one contains a few numbers ("words"), the length of the payload and its
tag. The payload follows, and the receiver chooses where to put it, or discards it. Thus a sender can post a letter of
any length although the receiver has not reserved memory for it.

    rank 1                                  rank 0, a thread that serves
    questions.post(0, [PUSH, 3], gradient)  letter = questions.take(1.0)
                                            letter.receive(place).wait()
    letter = answers.wait([0], "push")      answers.post(letter.source, [DONE])

The receiver probes for letters instead of posting receives in advance, so an idle or forgotten mailbox holds no memory
that MPI may write. This costs 1.5 us a letter.
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
from mpitrain.comm.job.traffic import Note, Record, Volume, clock
from mpitrain.comm.memory.buffers import as_tensor, message_buffers
from mpitrain.comm.memory.device import is_accelerator
from mpitrain.comm.runtime.agreement import run_watched
from mpitrain.comm.runtime.work import Messages, MessageWait, Work, poll
from mpitrain.errors import CommunicationError, InputError

WORDS = 15  # numbers in a letter, at most
_LETTERS = 0  # tag of the words; payloads have the others
_TAGS = 1 << 14  # tags of payloads: more than are under way between two ranks; MPI guarantees twice as many
_EAGER_ROUNDS = 20  # checks without a pause
_NAP = 1e-5, 5e-4  # seconds between later checks, at first and at most
_NAP_SENDING = 1e-4  # seconds at most while something is being sent, which progresses only inside MPI calls


class PostWork(Work):
    """Handle of a posted letter: done when the payload's memory may be changed."""

    def __init__(self, box: Mailbox, dest: int, requests: list[MPI.Request], buffers: Sequence[object]) -> None:
        self._box, self._dest, self._requests = box, dest, requests
        self._buffers = buffers  # memory that MPI reads
        self._error: CommunicationError | None = None

    def done(self) -> bool:
        """Return True if the payload may be changed. The call also lets the transfer make progress."""
        self._box._advance_posts()
        if self._error is not None:
            raise self._error
        return not self._requests

    def wait(self, timeout: float | None = None) -> None:
        """Block until the payload may be changed; see `Work.wait`."""
        name = f"post to rank {self._dest}"
        if timeout is not None:
            poll(self, f"{self._box.label}: {name}", timeout)
        elif not self.done():
            record = self._box.process.watchdog.record(
                f"{self._box.label} (posting)"
            )  # one per wait: any thread may wait
            record.awaited = (self._box.world_ranks[self._dest],)
            begin = clock()
            run_watched(record, name, None, partial(self._box._wait_until, self.done))
            if self._box.process.journal.on:
                self._box._note("post").count_wait(begin)

    def _test(self) -> bool:
        """Return True if the whole letter is sent. The caller holds the lock: two threads must not test at once."""
        try:
            if not MPI.Request.Testall(self._requests):
                return False
        except MPI.Exception as error:
            self._error = self._box._mpi_error(f"post to rank {self._dest}", error)
        self._requests, self._buffers = [], ()
        return True


class Letter:
    """A letter as its receiver gets it.

    Attributes:
        words: Numbers that were posted, as float.
        source: Rank that posted it.
        payload_bytes: Length of the payload in bytes; 0 if there is none.
        note: Entry in the traffic counters, completed when somebody waited for the letter; None while they are off.
    """

    __slots__ = ("_box", "_tag", "note", "payload_bytes", "source", "words")

    def __init__(self, box: Mailbox, source: int, content: list[float]) -> None:
        self._box, self.source = box, source
        self.note: Note | None = None
        self.payload_bytes, self._tag, self.words = int(content[0]), int(content[1]), content[2:]

    def receive(self, x: torch.Tensor) -> Messages:
        """Begin to receive the payload into a tensor of exactly its size. May be called once.

        Args:
            x: Contiguous tensor in host memory.

        Returns:
            Handle of the receive. The thread that takes letters from the mailbox must wait for it.

        Raises:
            InputError: x cannot be received into.
            CommunicationError: The payload has another size. It is received and discarded, because its sender may wait
                for that.
        """
        tensor, box = _require_host_tensor(x, written=True), self._box
        name = f"payload of a letter from rank {self.source}"
        if tensor.nbytes != self.payload_bytes:
            self.discard()
            raise CommunicationError(
                f"{box.label}: a letter from rank {self.source} has a payload of {self.payload_bytes} bytes, but rank "
                f"{box.rank} expects {tensor.nbytes}; post and receive tensors of the same size and type"
            )
        requests = box._receive(tensor, self.source, self._tag)
        note = box._note("recv") if box.process.journal.on else None
        if note is not None:
            box.process.journal.count("recv", note.axis, note.volume, clock())
        wait = MessageWait(box._record, (box.world_ranks[self.source],), box.process.progress, note)
        return Messages(name, tensor, requests, wait)

    def discard(self) -> None:
        """Receive the payload and discard it. Call this instead of `receive`."""
        if self.payload_bytes:
            self.receive(torch.empty(self.payload_bytes, dtype=torch.uint8)).wait()


class Mailbox(Member):
    """One rank's end of a mailbox between all ranks of a communicator. Made by `Communicator.mailbox`.

    One thread takes letters from it. Any thread of the process may post, at any time. Letters of one thread to one rank
    arrive in order.

    Attributes:
        process: Services shared by all communicators of the process.
    """

    def __init__(self, comm: MPI.Comm, topology: Topology, process: ProcessServices, label: str, axis: str) -> None:
        """Make a mailbox over `comm`. `axis` is the label of the communicator in the traffic counters."""
        super().__init__(topology, label)
        self.process, self._axis = process, axis
        self._owned = OwnedCommunicators(process)
        self._comm = self._owned.keep(comm)
        self._record = process.watchdog.record(label)  # shows the waits of the thread that takes letters
        self._listening: Record | None = None  # set during `listening`
        self._numbers = count()  # number payloads
        self._posts: list[PostWork] = []  # letters not completely sent
        self._lock = threading.Lock()  # of `_posts`
        self._freed = False

    def post(self, dest: int, words: Sequence[float], payload: torch.Tensor | None = None) -> PostWork:
        """Send a letter. Never waits for the receiver.

        Between ranks that cannot read each other's memory, a payload makes progress only while this rank calls MPI.

        Args:
            dest: Rank that receives the letter; may be this rank.
            words: Numbers to send, at most `WORDS`; they travel as float64.
            payload: Contiguous tensor in host memory. It is kept alive until it is sent, and must not be changed before
                the handle is done.

        Returns:
            Handle of the letter. The caller may drop it.

        Raises:
            InputError: There is no such rank, there are too many words, or the payload cannot be sent.
            CommunicationError: MPI fails.
        """
        check_rank(self, dest)
        if len(words) > WORDS:
            raise InputError(
                f"{self.label}: a letter of {len(words)} words is too long; send at most {WORDS}, the rest as payload"
            )
        self._require_open()
        tensor = None if payload is None else _require_host_tensor(payload, written=False)
        nbytes = 0 if tensor is None else tensor.nbytes
        begin = clock() if self.process.journal.on else 0.0
        tag = 1 + next(self._numbers) % _TAGS if nbytes else 0
        content = np.array([nbytes, tag, *words], dtype=np.float64)
        try:
            requests = [self._comm.Isend(content, dest, _LETTERS)]
            if tensor is not None:
                requests += [self._comm.Isend(spec, dest, tag) for spec in message_buffers(tensor)]
        except MPI.Exception as error:
            raise self._mpi_error(f"post to rank {dest}", error) from error
        posted = PostWork(self, dest, requests, (content, tensor))
        with self._lock:
            self._posts.append(posted)
        self._advance_posts()
        if begin:
            here, whole = self.nodes[dest] == self.node, (nbytes + content.nbytes) * (dest != self.rank)
            volume = Volume("letter", whole * here, whole * (not here))
            self._note_letter("post", volume, self.rank, dest).count_operation(begin)
        return posted

    def _note(self, operation: str) -> Note:
        """Return an entry of the traffic counters for a part of an operation that is counted elsewhere."""
        return Note(self.process.journal, operation, self._axis, Volume("letter"))

    def _note_letter(self, operation: str, volume: Volume, source: int, dest: int) -> Note:
        """Return an entry of the traffic counters for the next letter from rank `source` to rank `dest`."""
        key = f"{self.label}: letter from {self.world_ranks[source]} to {self.world_ranks[dest]}"
        return Note(self.process.journal, operation, self._axis, volume, key, self.process.journal.next_number(key))

    def take(self, seconds: float) -> Letter | None:
        """Return the next letter of any rank; None if none arrives in time.

        Only inside `listening` does the watchdog see this wait.

        Args:
            seconds: Time to wait; 0 checks without waiting.

        Raises:
            CommunicationError: MPI fails.
        """
        self._require_open()
        letters: list[Letter] = []
        begin = clock() if self.process.journal.on else 0.0
        self._wait_until(partial(self._take_into, letters), time.monotonic() + seconds)
        if begin:
            self.process.journal.add_wait(begin)
        return letters[0] if letters else None

    @contextmanager
    def listening(self, awaited: Sequence[int], name: str) -> Iterator[None]:
        """Take letters whenever they come while the `with` block runs; there may be any time between two letters.

        If no letter has come for comm.timeout, the watchdog asks all ranks for their state. If all answer, nothing
        happens. Otherwise the job ends, or continues without the ranks that do not answer, as after an operation that
        does not complete.

        Args:
            awaited: Ranks that post letters. The job ends if all of them have left.
            name: Description of the letters, for messages.
        """
        record = self.process.watchdog.record(f"{self.label} (taking)")
        record.awaited, record.without_deadline = [self.world_ranks[rank] for rank in awaited], True
        self._listening = record
        record.begin(name, None)
        try:
            yield
        finally:
            record.end()
            self._listening = None
            self.process.watchdog.forget(record)

    def wait(self, awaited: Sequence[int], name: str) -> Letter:
        """Return the next letter of any rank, and wait for it as long as the watchdog permits.

        Args:
            awaited: Ranks, one of which is expected to post. The job ends if all of them have left, and after
                comm.timeout.
            name: Description of the letter, for messages.

        Raises:
            CommunicationError: MPI fails.
        """
        self._require_open()
        letters: list[Letter] = []
        begin = clock() if self.process.journal.on else 0.0
        if not self._take_into(letters):
            self._record.awaited = [self.world_ranks[rank] for rank in awaited]
            run_watched(self._record, name, None, partial(self._wait_until, partial(self._take_into, letters)))
        if begin and letters[0].note is not None:
            letters[0].note.count_operation(begin)
        return letters[0]

    def free(self) -> None:
        """Free the mailbox. May be called twice. Collective.

        Letters that nobody took are discarded. The payloads of letters that were taken must have been received.
        """
        if self._freed:
            return
        self._freed = True
        if self.process.may_release(self._comm):
            self._record.awaited = ()
            try:
                run_watched(self._record, "free", None, self._drain)
                self._owned.free()
            except CommunicationError:
                if self.process.failures is None:
                    raise  # else a rank has died, and collective calls are impossible
        self.process.watchdog.forget(self._record)

    def _drain(self) -> None:
        """Wait until no letter is under way between any ranks; arriving letters are discarded. Collective."""
        everybody: MPI.Request | None = None
        letters: list[Letter] = []

        def is_empty() -> bool:
            nonlocal everybody
            while self._take_into(letters):
                letter = letters.pop()
                place = torch.empty(letter.payload_bytes, dtype=torch.uint8)
                self._wait_until(partial(MPI.Request.Testall, self._receive(place, letter.source, letter._tag)))
            if everybody is None and not self._posts:
                everybody = self._comm.Ibarrier()
            return everybody is not None and everybody.Test()

        self._wait_until(is_empty)

    def _take_into(self, letters: list[Letter]) -> bool:
        """Append the next letter to `letters` if one has arrived; return True if one had."""
        status = MPI.Status()
        try:
            message = self._comm.Improbe(MPI.ANY_SOURCE, _LETTERS, status)
            if message is None:  # Open MPI checks first and only then processes incoming messages, so ask again
                message = self._comm.Improbe(MPI.ANY_SOURCE, _LETTERS, status)
            if message is None:
                self._advance_posts()
                return False
            content = np.empty(status.Get_count(MPI.DOUBLE))
            message.Recv(content)
        except MPI.Exception as error:
            raise self._mpi_error("take", error) from error
        if self._listening is not None:
            self._listening.restart()
        letter = Letter(self, status.source, content.tolist())
        if self.process.journal.on:
            letter.note = self._note_letter("letter", Volume("letter"), status.source, self.rank)
        letters.append(letter)
        return True

    def _receive(self, tensor: torch.Tensor, source: int, tag: int) -> list[MPI.Request]:
        try:
            return [self._comm.Irecv(spec, source, tag) for spec in message_buffers(tensor)]
        except MPI.Exception as error:
            raise self._mpi_error(f"receive from rank {source}", error) from error

    def _advance_posts(self) -> None:
        """Let outgoing letters make progress, and release those that are sent."""
        if self._posts and self._lock.acquire(blocking=False):  # else another thread is doing this
            try:
                self._posts = [posted for posted in self._posts if not posted._test()]
            finally:
                self._lock.release()

    def _wait_until(self, condition: Callable[[], bool], deadline: float | None = None) -> None:
        """Wait until `happened()` is true or the deadline has passed, and let other threads and processes run."""
        rounds, nap = 0, _NAP[0]
        while not condition() and (deadline is None or time.monotonic() < deadline):
            rounds += 1
            if rounds <= _EAGER_ROUNDS:
                os.sched_yield()
                continue
            time.sleep(nap if deadline is None else min(nap, max(0.0, deadline - time.monotonic())))
            nap = min(2 * nap, _NAP_SENDING if self._posts else _NAP[1])

    def _require_open(self) -> None:
        if self._freed:
            raise InputError(f"{self.label} was freed; make another one")

    def _mpi_error(self, name: str, error: MPI.Exception) -> CommunicationError:
        return CommunicationError(f"{self.label}: {name} failed in MPI: {error}")


def _require_host_tensor(x: torch.Tensor, *, written: bool) -> torch.Tensor:
    """Return the array as a contiguous tensor. Raises InputError if it is not in host memory."""
    tensor = as_tensor(x, written=written)
    if is_accelerator(tensor.device):
        raise InputError(f"a payload must be in host memory, but this tensor is on {tensor.device}; pass x.cpu()")
    return tensor
