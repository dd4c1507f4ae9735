"""Parameter server and its workers, which exchange the messages listed in `mpitrain.loose.clock`.

A worker asks for samples, pulls parameters during forward, and pushes gradients during backward. A server keeps shares
of all parameters, applies the gradients that workers push, and sends the parameters that they pull.

The terms are those of Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014.
A server is one thread that handles one message after the other, so that no memory is read while it is written:

    staleness 0       a step's gradients are added in the order of their parts, bucket by bucket as they arrive; once
                      all are added and the servers know the norm, each bucket is updated and sent to the workers that
                      wait for it
    above 0, or None  committed gradients are applied before the next pull is answered; gradients that several workers
                      committed meanwhile are applied as one update

A worker's messages arrive in order, so a worker always sees its own updates.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from mpitrain.comm import Work
from mpitrain.comm.mailbox import Letter, Mailbox
from mpitrain.comm.runtime.work import Messages
from mpitrain.config.settings import Config
from mpitrain.errors import CommunicationError
from mpitrain.loose.clock import AppliedPart, Clock, Commit, History, LetterKind, Portion, Pull, StepRecord, StepSum
from mpitrain.loose.sharding import Roles, ServerShares, SharedFlats, ShareUpdate, squares

_IDLE = 0.5  # seconds to wait for a message before checking whether to continue
_RECEIVING = 1e-4  # seconds to wait for a message while payloads arrive


class Server:
    """One server's shares, and its record of the workers' requests.

    Args:
        share: Number of this server's shares.
        roles: Ranks of the workers and of the servers.
        flats: Memory of the workers, where it is shared.
        update: Optimizer of the shares.
        boxes: Mailbox of the messages to servers, and mailbox of the answers to all ranks.
        history: Record of parts applied before.
        clock: Assignment of parts to workers; None on all servers but the first.
        config: Settings of staleness and clipping.
        known: Last step that all ranks know to be complete.
        remote_bytes: Bytes sent between nodes for a part, by the worker's rank.
        inbox: Buffers in which gradients arrive, for each worker whose memory this rank does not share.

    Attributes:
        limit: Step after which all ranks meet.
        finals: Number of workers that have got the parameters after that step.
        applied: Record of the applied parts.
        progress: Steps applied, with fractions for the parts of incomplete steps.
        inbox: Buffers in which gradients arrive, as in `Args`.
    """

    def __init__(
        self,
        share: int,
        roles: Roles,
        flats: SharedFlats,
        update: ShareUpdate,
        boxes: tuple[Mailbox, Mailbox],
        history: History,
        clock: Clock | None,
        config: Config,
        known: int,
        remote_bytes: dict[int, int],
        inbox: dict[int, ServerShares],
    ) -> None:
        self._share, self._roles, self._flats, self._update = share, roles, flats, update
        self._questions, self._answers = boxes
        self._clock, self._remote_bytes, self.inbox = clock, remote_bytes, inbox
        self._bulk, self._corrected = config.parallel.staleness == 0, config.parallel.staleness_lr
        self._clip = config.train.clip
        self.applied = history.applied() if clock is None else clock.applied
        self._known = known
        self.limit = self.finals = self._workers_ready = 0
        # only one server sends records, so that workers get each step once
        self._records = list(history.records) if clock is not None else []
        self._buckets = len(flats.buckets)
        self.progress = self.applied.completed + len(self.applied.beyond) / self.applied.parts  # steps applied
        self._ready: list[tuple[int, Commit]] = []  # (worker, its commit), to be applied
        self._receiving: list[tuple[Work, Callable[[], None]]] = []  # with the function to call after each
        self._arriving: dict[int, int] = {}  # number of each worker's payloads that have not arrived
        self._incomplete: list[tuple[int, Commit]] = []  # commits whose payloads have not arrived
        self._pulls: list[Pull] = []
        self._claims: list[int] = []  # workers that wait for a part
        self._applied_parts = {
            step: list(parts) for step, parts in history.applied_parts.items()
        }  # parts of incomplete steps
        self._squares: dict[int, list[float]] = {}  # sums of squares from the servers, by step
        self._unused: dict[Portion, set[nn.Parameter]] = {}  # only for parts that did not use all
        self._sum = self._new_sum()
        self._since = time.perf_counter()  # time when the last step was complete, or a new limit was opened
        self._end = False
        self._handlers: dict[LetterKind, Callable[[Letter], None]] = {
            LetterKind.CLAIM: self._handle_claim,
            LetterKind.PULL: self._handle_pull,
            LetterKind.PUSHED: self._handle_pushed,
            LetterKind.UNUSED: self._handle_unused,
            LetterKind.COMMIT: self._handle_commit,
            LetterKind.SQUARES: lambda letter: self._add_squares(int(letter.words[1]), letter.words[2]),
            LetterKind.READY: self._handle_ready,
            LetterKind.END: self._handle_end,
        }

    # -- the loop

    def serve(self, limit: int | None = None) -> None:
        """Serve requests until all workers have the parameters of step `limit`, or until an END message.

        Args:
            limit: Step after which all ranks meet; None to serve until END.
        """
        self.finals, self._workers_ready, self.limit = 0, 0, limit or 0
        for record in self._records:  # from before ranks died; not all ranks have them
            if record.step > self._known:
                self._post_to_all([LetterKind.RECORD, *record])
        workers = len(self._roles.workers)
        with self._questions.listening(self._roles.workers, "messages of workers"):
            while not self._end:
                if limit and self.finals == workers and (self._clock is None or self._workers_ready == workers):
                    break
                self.process_messages()
        self._records.clear()

    def process_messages(self) -> None:
        """Wait briefly for messages, and handle those that have arrived."""
        letter = self._questions.take(_RECEIVING if self._receiving else _IDLE)
        while letter is not None:
            self._handlers[LetterKind(int(letter.words[0]))](letter)
            letter = self._questions.take(0)
        for work, then in [each for each in self._receiving if each[0].done()]:
            self._receiving = [each for each in self._receiving if each[0] is not work]
            then()
        self._apply_commits()
        self._answer()

    @property
    def history(self) -> History:
        """Record of the applied parts, from which servers can continue."""
        applied = self.applied
        return History(applied.parts, applied.completed, applied.beyond, dict(self._applied_parts), list(self._records))

    def _answer(self) -> None:
        """Grant parts and send parameters to the workers whose requests can be served now."""
        completed = self.applied.completed
        for pull in [p for p in self._pulls if p.least <= completed and not self._arriving.get(p.worker)]:
            if any(worker == pull.worker for worker, _ in self._incomplete):
                continue
            self._pulls.remove(pull)
            for bucket in range(self._buckets - 1, -1, -1):  # as forward needs them
                self._send_bucket(pull.worker, bucket)
            self.finals += pull.final
        if self._clock is not None:
            self._grant_parts(self._clock)

    def _grant_parts(self, clock: Clock) -> None:
        """Grant parts to the workers that wait for one, or send MEET if there are no more."""
        for worker in list(self._claims):
            portion = clock.claim(worker)
            if portion is not None:
                self._answers.post(worker, [LetterKind.GRANT, portion.step, portion.part])
            elif clock.exhausted:
                self._answers.post(worker, [LetterKind.MEET, clock.limit])
            else:
                continue
            self._claims.remove(worker)

    def _send_bucket(self, worker: int, bucket: int) -> None:
        """Give a worker the parameters of a bucket."""
        values = self._update.published.bucket(bucket)
        words = [LetterKind.BUCKET, bucket, self._share, self.applied.completed, self.progress]
        if self._flats.can_access(worker):
            self._flats.parameter_share(worker, bucket, self._share).copy_(values)
            self._answers.post(worker, words)
        else:
            self._answers.post(worker, words, values.clone())  # the next update must not change it on its way

    # -- requests

    def _handle_end(self, letter: Letter) -> None:
        """Handle END: stop serving."""
        self._end = True

    def _handle_ready(self, letter: Letter) -> None:
        """Handle READY: send ALL_READY to all ranks once all workers are ready to meet.

        Until then no worker should wait in MPI, where it would take the core from ranks that compute.
        """
        self._workers_ready += 1
        if self._workers_ready % len(self._roles.workers) == 0:
            self._post_to_all([LetterKind.ALL_READY])

    def _handle_claim(self, letter: Letter) -> None:
        """Handle CLAIM: open steps up to the worker's limit, and queue its request for a part."""
        assert self._clock is not None
        if self._clock.open(int(letter.words[1])):
            self._since = time.perf_counter()
        if letter.words[2]:
            self._clock.stop()
        self._claims.append(letter.source)

    def _handle_pull(self, letter: Letter) -> None:
        """Handle PULL: queue the worker's request for parameters."""
        self._pulls.append(Pull(letter.source, int(letter.words[1]), bool(letter.words[2])))
        if not self._bulk:
            return
        # copy gradients that this worker pushed and that wait for others: it is about to compute the next ones
        mine = {part for part in self._sum.commits if self._worker_of.get(part) == letter.source}
        for waiting in self._sum.waiting:
            for part in mine & waiting.keys():
                waiting[part] = waiting[part].clone()

    def _handle_pushed(self, letter: Letter) -> None:
        """Handle PUSHED: add the gradients, or start receiving them if the worker's memory is not shared."""
        _, _, part, bucket = map(int, letter.words[:4])
        worker = letter.source
        if not letter.payload_bytes:
            if self._bulk:
                self._add_in_order(part, bucket, self._flats.gradient_share(worker, bucket, self._share))
            return
        place = self.inbox[worker].bucket(bucket)
        self._arriving[worker] = self._arriving.get(worker, 0) + 1

        def arrived() -> None:
            self._arriving[worker] -= 1
            if self._bulk:
                self._add_in_order(part, bucket, place)
            elif not self._arriving[worker]:
                self._ready += [each for each in self._incomplete if each[0] == worker]
                self._incomplete = [each for each in self._incomplete if each[0] != worker]

        self._receiving.append((letter.receive(place), arrived))

    def _handle_unused(self, letter: Letter) -> None:
        """Handle UNUSED: remember the parameters that the part did not use."""
        every = self._update.parameters
        flags = torch.empty(len(every), dtype=torch.uint8)
        letter.receive(flags).wait()
        unused = {p for p, flag in zip(every, flags.tolist(), strict=True) if flag}
        self._unused[Portion(int(letter.words[1]), int(letter.words[2]))] = unused

    def _unused_by(self, portions: Iterable[Portion]) -> set[nn.Parameter]:
        """Return the parameters that were unused in all of these parts."""
        sets = [self._unused.pop(portion, set()) for portion in portions]
        return set.intersection(*sets) if sets else set()

    def _handle_commit(self, letter: Letter) -> None:
        """Handle COMMIT: queue the part, which is applied when all of its gradients have arrived."""
        worker, commit = letter.source, Commit(*letter.words[1:])
        if self._bulk:
            self._sum.commits[int(commit.part)] = commit
            self._worker_of[int(commit.part)] = worker
            self._finish_sum()
        elif self._arriving.get(worker):
            self._incomplete.append((worker, commit))
        else:
            self._ready.append((worker, commit))

    # -- updates as they come

    def _apply_commits(self) -> None:
        """Apply all committed gradients as one update.

        The gradient is the mean over all of their samples. The learning rate is scaled by their fraction of a step's
        batch: an update from half of a batch goes half as far.
        """
        commits, self._ready = self._ready, []
        if not commits:
            return
        good, rate, first = 0.0, 0.0, True
        unused = self._unused_by(Portion(int(c.step), int(c.part)) for _, c in commits if c.factor != 0.0)
        for worker, commit in commits:
            missed = max(0.0, self.progress - commit.progress)
            self._applied_parts.setdefault(int(commit.step), []).append(AppliedPart(worker, commit, missed))
            if commit.factor == 0.0:  # gradients are not finite
                continue
            correction = 1.0 / max(1.0, missed) if self._corrected else 1.0
            for bucket in range(self._buckets):
                self._update.add(bucket, self._gradients(worker, bucket), commit.factor * correction, first=first)
            first = False
            good += commit.weight * correction
            rate += commit.lr * commit.weight * correction
        if good:
            self._update.apply(range(self._buckets), rate, 1.0 / good, unused)
        complete = []
        for _, commit in commits:
            self.progress += commit.weight
            complete += self.applied.add(Portion(int(commit.step), int(commit.part)))
        seconds = self._lap(len(complete))
        for step in complete:
            applied_parts = self._applied_parts.pop(step)
            norm = math.sqrt(sum(t.commit.norm**2 for t in applied_parts) / len(applied_parts))
            self._send_record(
                step, applied_parts, norm, seconds, skipped=any(t.commit.factor == 0.0 for t in applied_parts)
            )

    def _gradients(self, worker: int, bucket: int) -> torch.Tensor:
        if self._flats.can_access(worker):
            return self._flats.gradient_share(worker, bucket, self._share)
        return self.inbox[worker].bucket(bucket)

    def _lap(self, steps: int) -> float:
        """Return the seconds since the last complete step, divided by the number of steps completed now."""
        now = time.perf_counter()
        seconds = (now - self._since) / max(1, steps)
        self._since = now if steps else self._since
        return seconds

    def _send_record(
        self, step: int, parts: Sequence[AppliedPart], norm: float, seconds: float, *, skipped: bool
    ) -> None:
        """Send the statistics of a complete step to all ranks, on the first server only."""
        if self._clock is None:
            return
        losses = [t.commit.loss for t in parts]
        record = StepRecord(
            step,
            math.fsum(losses) if all(map(math.isfinite, losses)) else math.nan,
            norm,
            skipped,
            sum(t.staleness for t in parts) / len(parts),
            max(t.staleness for t in parts),
            max(t.commit.ahead for t in parts),
            sum(self._remote_bytes.get(t.worker, 0) for t in parts),
            seconds,
        )
        if self.limit:
            self._records.append(record)
        self._post_to_all([LetterKind.RECORD, *record])

    def _post_to_all(self, words: Sequence[float]) -> None:
        for rank in range(self._answers.size):
            self._answers.post(rank, words)

    # -- bulk-synchronous steps

    def _new_sum(self) -> StepSum:
        """Return an empty sum for the next bulk-synchronous step."""
        self._worker_of: dict[int, int] = {}  # worker of each part of the step in progress
        return StepSum([0] * self._buckets, [{} for _ in range(self._buckets)])

    def _add_in_order(self, part: int, bucket: int, gradients: torch.Tensor) -> None:
        """Add the gradients of a part to the sum of a bucket, after the gradients of all earlier parts."""
        waiting, added = self._sum.waiting[bucket], self._sum.added
        waiting[part] = gradients
        while (next_gradients := waiting.pop(added[bucket], None)) is not None:
            self._update.add(bucket, next_gradients, first=added[bucket] == 0)
            added[bucket] += 1
        self._finish_sum()

    def _finish_sum(self) -> None:
        """Send the sum of squares of this server's gradients to the other servers, once all gradients are added."""
        parts, step = self.applied.parts, self.applied.completed + 1
        if self._sum.squares_sent or len(self._sum.commits) < parts or min(self._sum.added, default=parts) < parts:
            return
        self._sum.squares_sent = True
        own_squares = squares(self._update.sums)
        for server in self._roles.servers:
            if server != self._questions.rank:
                self._questions.post(server, [LetterKind.SQUARES, step, own_squares])
        self._add_squares(step, own_squares)

    def _add_squares(self, step: int, squares: float) -> None:
        """Record a server's sum of squares for a step; update when the sums of all servers are known."""
        known = self._squares.setdefault(step, [])
        known.append(squares)
        if len(known) < len(self._roles.servers):
            return
        del self._squares[step]
        self._update_in_step(step, math.sqrt(total) if math.isfinite(total := math.fsum(sorted(known))) else math.nan)

    def _update_in_step(self, step: int, norm: float) -> None:
        """Update with the gradients of a whole step, and give each bucket to the workers that wait for it."""
        commits = self._sum.commits
        finite = math.isfinite(norm)
        factor = self._clip / (norm + 1e-6) if self._clip and norm > self._clip else 1.0
        applied_parts = [AppliedPart(self._worker_of[part], commit, 0.0) for part, commit in sorted(commits.items())]
        waiting = [pull for pull in self._pulls if pull.least <= step]
        self._pulls = [pull for pull in self._pulls if pull.least > step]
        for part in commits:
            self.applied.add(Portion(step, part))
        unused = self._unused_by(Portion(step, part) for part in commits)
        self.progress, failed = float(step), None
        for bucket in range(self._buckets - 1, -1, -1):
            if finite:
                self._update.apply([bucket], applied_parts[0].commit.lr, factor, unused)
            try:
                for pull in waiting:
                    self._send_bucket(pull.worker, bucket)
            except CommunicationError as error:  # a rank may have died; complete the update first
                failed = error
        if failed is not None:
            raise failed
        self.finals += sum(pull.final for pull in waiting)
        self._sum = self._new_sum()
        self._send_record(step, applied_parts, norm, self._lap(1), skipped=not finite)


_NAP = 1e-4  # seconds between checks for arriving parameters; other ranks may need the core meanwhile
_SOON = 1.0  # seconds after which arriving parameters are late


class ServedWorker:
    """A rank's requests to the servers. Only one thread may use it, except for `push`.

    Args:
        roles: Ranks of the workers and of the servers.
        flats: Parameters and gradients of this rank.
        boxes: Mailbox of the messages to servers, and mailbox of the answers to this rank.
        bulk: If true, servers add each bucket when it is pushed (parallel.staleness 0).
        failed: Function that raises the exception of this rank's server, if it has failed.

    Attributes:
        records: Statistics of complete steps that have not been taken yet.
        portion: Part in progress.
        on_arrival: Function called with the number of a bucket when its parameters are in this rank's memory.
    """

    def __init__(
        self, roles: Roles, flats: SharedFlats, boxes: tuple[Mailbox, Mailbox], bulk: bool, failed: Callable[[], None]
    ) -> None:
        self._roles, self._flats, self._bulk, self._failed = roles, flats, bulk, failed
        self._questions, self._answers = boxes
        self.records: deque[StepRecord] = deque()
        self.portion = Portion(0, 0)
        self.on_arrival: Callable[[int], object] = lambda bucket: None
        self._can_access = {server: flats.can_access(server) for server in roles.servers}
        self._answer: Letter | None = None  # answer to a claim
        self._all_ready = False  # whether all workers are ready to meet
        self._receiving: list[tuple[Messages, int]] = []  # arriving parameters, and their bucket
        self._missing: list[int] = [0] * len(flats.buckets)  # number of each bucket's shares that have not arrived
        self._progress = [0.0] * len(roles.servers)  # progress of each server when it sent the parameters
        self._completed = [0] * len(roles.servers)  # last complete step of each server at that time

    def claim(self, limit: int, *, stop: bool = False) -> Portion | None:
        """Return the next part to work on; None if all parts up to the ranks' next meeting have been granted.

        Args:
            limit: Step after which all ranks meet.
            stop: If true, the ranks meet as soon as possible.
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
        """Start getting the parameters; call `wait_for` before using them.

        Args:
            least: Step up to which the parameters must include all updates.
            final: True if this is the last request before the ranks meet.
        """
        self._missing = [len(self._roles.servers)] * len(self._flats.buckets)
        for server in self._roles.servers:
            self._questions.post(server, [LetterKind.PULL, least, final])

    def wait_for(self, buckets: Iterable[int]) -> None:
        """Wait until the parameters of these buckets have arrived."""
        for bucket in buckets:
            while self._missing[bucket]:
                self._take(self._roles.servers, "parameters")

    def push(self, bucket: int) -> None:
        """Make a bucket's gradients, which are in this rank's memory, available to the servers."""
        words = [LetterKind.PUSHED, self.portion.step, self.portion.part, bucket]
        for share, server in enumerate(self._roles.servers):
            if not self._can_access[server]:
                self._questions.post(server, words, self._flats.gradient_share(self._questions.rank, bucket, share))
            elif self._bulk:  # otherwise the server reads them there after the commit
                self._questions.post(server, words)

    def commit(self, commit: Commit, unused: torch.Tensor | None = None) -> None:
        """Make the servers apply the pushed gradients.

        Args:
            commit: Message without `progress` and `ahead`, which are filled in here for each server.
            unused: Flag for each parameter that the part did not use: uint8, in the order of the layout; None for none.
        """
        ahead = self.portion.step - 1 - min(self._completed)
        for share, server in enumerate(self._roles.servers):
            if unused is not None and unused.any():
                self._questions.post(server, [LetterKind.UNUSED, self.portion.step, self.portion.part], unused)
            words = commit._replace(progress=self._progress[share], ahead=ahead)
            self._questions.post(server, [LetterKind.COMMIT, *words])

    def meet(self, *, works: bool) -> None:
        """Wait until all workers are ready to meet.

        Args:
            works: True if this rank is a worker.
        """
        coordinator = self._roles.servers[0]
        if works:
            self._questions.post(coordinator, [LetterKind.READY])
        while not self._all_ready:
            self._take([coordinator], "the other workers")
        self._all_ready = False

    def next_record(self) -> StepRecord:
        """Return the statistics of the next complete step. Waits for it."""
        while not self.records:
            self._take([self._roles.servers[0]], "the end of a step")
        return self.records.popleft()

    def handle_messages(self) -> None:
        """Handle the messages that have arrived, without waiting."""
        while (letter := self._answers.take(0)) is not None:
            self._read(letter)

    def _take(self, awaited: Iterable[int], name: str) -> None:
        """Wait for the next message, or for parameters that are arriving."""
        if not self._receiving:
            self._read(self._answers.wait(list(awaited), name))
            return
        deadline = time.monotonic() + _SOON
        while not self._finish_receiving():
            if (letter := self._answers.take(_NAP)) is not None:
                self._read(letter)
                return
            if time.monotonic() > deadline:
                self._receiving[0][0].wait()  # a blocking wait, which the watchdog supervises

    def _finish_receiving(self) -> bool:
        """Record the parameters that have arrived. Return True if there were any."""
        arrivals = [each for each in self._receiving if each[0].done()]
        self._receiving = [each for each in self._receiving if each not in arrivals]
        for _, bucket in arrivals:
            self._count_share(bucket)
        return bool(arrivals)

    def _read(self, letter: Letter) -> None:
        """Handle a message."""
        kind = LetterKind(int(letter.words[0]))
        if kind == LetterKind.BUCKET:
            self._receive(letter)
        elif kind == LetterKind.RECORD:
            self.records.append(StepRecord(*letter.words[1:]))
        elif kind == LetterKind.ALL_READY:
            self._all_ready = True
        elif kind == LetterKind.FAILED:
            self._failed()
            raise CommunicationError("the server of this rank failed")
        else:
            self._answer = letter

    def _receive(self, letter: Letter) -> None:
        """Handle BUCKET: start receiving the parameters, unless the server has written them into shared memory."""
        bucket, share, completed = map(int, letter.words[1:4])
        self._completed[share], self._progress[share] = completed, letter.words[4]
        if letter.payload_bytes:
            place = self._flats.parameter_share(self._questions.rank, bucket, share)
            self._receiving.append((letter.receive(place), bucket))
        else:
            self._count_share(bucket)

    def _count_share(self, bucket: int) -> None:
        """Record that a share of a bucket has arrived, and call `on_arrival` once all have."""
        self._missing[bucket] -= 1
        if not self._missing[bucket]:
            self.on_arrival(bucket)
