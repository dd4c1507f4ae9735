"""A worker: it asks for samples, pulls parameters while it computes forward, and pushes gradients from backward."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

import torch

from mpitrain.comm.mailbox import Letter, Mailbox
from mpitrain.comm.runtime.work import Messages
from mpitrain.errors import CommunicationError
from mpitrain.loose.clock import Commit, LetterKind, Portion, StepRecord
from mpitrain.loose.sharding import Roles, SharedFlats

_NAP = 1e-4  # seconds between looks at parameters on their way: others need the core meanwhile
_SOON = 1.0  # seconds after which they are late


class ServedWorker:
    """What a rank asks of the servers. One thread uses it, but for `push`.

    Args:
        roles: Who works and who serves.
        flats: This rank's parameters and gradients.
        boxes: What servers are asked in, and what this rank is answered in.
        bulk: Whether each bucket is added up when it is pushed (parallel.staleness 0).
        failed: Raises what the server of this rank failed with.

    Attributes:
        records: Of steps that have become complete, not yet taken.
        portion: The part under way.
        came: Called with a bucket when its parameters are in this rank's memory.
    """

    def __init__(
        self,
        roles: Roles,
        flats: SharedFlats,
        boxes: tuple[Mailbox, Mailbox],
        bulk: bool,
        failed: Callable[[], None],
    ) -> None:
        self._roles, self._flats, self._bulk, self._failed = roles, flats, bulk, failed
        self._questions, self._answers = boxes
        self.records: deque[StepRecord] = deque()
        self.portion = Portion(0, 0)
        self.came: Callable[[int], object] = lambda bucket: None
        self._sees = {server: flats.sees(server) for server in roles.servers}
        self._answer: Letter | None = None  # to a claim
        self._together = False  # whether all workers are ready to meet
        self._receiving: list[tuple[Messages, int]] = []  # parameters on their way, and their bucket
        self._missing: list[int] = [0] * len(flats.buckets)  # shares of each bucket that have not come
        self._progress = [0.0] * len(roles.servers)  # what each server had applied when it sent the parameters
        self._completed = [0] * len(roles.servers)  # steps of which it had applied all

    def claim(self, limit: int, *, stop: bool = False) -> Portion | None:
        """The next part to work on; None when all parts of the steps before the ranks meet are given out.

        Args:
            limit: The step after which all ranks meet.
            stop: Whether they are to meet as soon as may be.
        """
        coordinator = self._roles.servers[0]
        self._questions.post(coordinator, [LetterKind.CLAIM, limit, stop])
        while (letter := self._answer) is None:
            self._take([coordinator], "samples")
        self._answer = None
        if int(letter.words[0]) == LetterKind.MEET:
            self.portion = Portion(int(letter.words[1]), 0)
            return None
        self.portion = Portion(int(letter.words[1]), int(letter.words[2]))
        return self.portion

    def pull(self, least: int, *, final: bool = False) -> None:
        """Begin to get the parameters, with all updates of the steps up to `least` at least; then `need` them.

        final: nothing more will be asked for before the ranks meet.
        """
        self._missing = [len(self._roles.servers)] * len(self._flats.buckets)
        for server in self._roles.servers:
            self._questions.post(server, [LetterKind.PULL, least, final])

    def need(self, buckets: Iterable[int]) -> None:
        """Return when the parameters of these buckets have come."""
        for bucket in buckets:
            while self._missing[bucket]:
                self._take(self._roles.servers, "parameters")

    def push(self, bucket: int) -> None:
        """Let the servers have a bucket's gradients, which lie in this rank's memory."""
        words = [LetterKind.PUSHED, self.portion.step, self.portion.part, bucket]
        for share, server in enumerate(self._roles.servers):
            if not self._sees[server]:
                self._questions.post(server, words, self._flats.gradient_share(self._questions.rank, bucket, share))
            elif self._bulk:  # else it finds them there when they are committed
                self._questions.post(server, words)

    def commit(self, commit: Commit, unused: torch.Tensor | None = None) -> None:
        """Have the servers apply what was pushed.

        Args:
            commit: Without what this worker knows of each server.
            unused: Which parameters the part left alone: uint8, in the order of the layout; None for no parameter.
        """
        ahead = self.portion.step - 1 - min(self._completed)
        for share, server in enumerate(self._roles.servers):
            if unused is not None and unused.any():
                self._questions.post(server, [LetterKind.UNUSED, self.portion.step, self.portion.part], unused)
            words = commit._replace(progress=self._progress[share], ahead=ahead)
            self._questions.post(server, [LetterKind.COMMIT, *words])

    def meet(self, *, works: bool) -> None:
        """Return when all workers are ready to meet. works: whether this rank is one of them."""
        coordinator = self._roles.servers[0]
        if works:
            self._questions.post(coordinator, [LetterKind.HERE])
        while not self._together:
            self._take([coordinator], "the others")
        self._together = False

    def next_record(self) -> StepRecord:
        """What became known of the next complete step; waits for it."""
        while not self.records:
            self._take([self._roles.servers[0]], "the end of a step")
        return self.records.popleft()

    def look(self) -> None:
        """Take what has come, and wait for nothing."""
        while (letter := self._answers.take(0)) is not None:
            self._read(letter)

    def _take(self, awaited: Iterable[int], name: str) -> None:
        """Wait for what comes next: a letter, or parameters that are on their way."""
        if not self._receiving:
            self._read(self._answers.wait(list(awaited), name))
            return
        deadline = time.monotonic() + _SOON
        while not self._received():
            if (letter := self._answers.take(_NAP)) is not None:
                self._read(letter)
                return
            if time.monotonic() > deadline:
                self._receiving[0][0].wait()  # where the watchdog sees it

    def _received(self) -> bool:
        """Whether some parameters have come, which are then noted."""
        found = [each for each in self._receiving if each[0].done()]
        self._receiving = [each for each in self._receiving if each not in found]
        for _, bucket in found:
            self._has_come(bucket)
        return bool(found)

    def _read(self, letter: Letter) -> None:
        kind = LetterKind(int(letter.words[0]))
        if kind == LetterKind.BUCKET:
            self._receive(letter)
        elif kind == LetterKind.RECORD:
            self.records.append(StepRecord(*letter.words[1:]))
        elif kind == LetterKind.TOGETHER:
            self._together = True
        elif kind == LetterKind.FAILED:
            self._failed()
            raise CommunicationError("the server of this rank failed")
        else:
            self._answer = letter

    def _receive(self, letter: Letter) -> None:
        bucket, share, completed = map(int, letter.words[1:4])
        self._completed[share], self._progress[share] = completed, letter.words[4]
        if letter.payload_bytes:
            place = self._flats.parameter_share(self._questions.rank, bucket, share)
            self._receiving.append((letter.receive(place), bucket))
        else:
            self._has_come(bucket)

    def _has_come(self, bucket: int) -> None:
        self._missing[bucket] -= 1
        if not self._missing[bucket]:
            self.came(bucket)
