"""Goodput of a run: where its wall clock went, over all its starts, and the share in which it computed steps that last.

The wall clock begins when the first job was submitted (or its command started) and ends with the last sign of the last
job. Every second of it belongs to one part. Rank 0 measures them, and writes them into events.jsonl and metrics.jsonl:

    submitted  allocated    start event             killed         submitted              start event          end event
        |          |             |                    |                |                       |                   |
        |  queue   | start, imp. | first steps, ... X |      down      | queue, start, imports | first step, ... tail

    queue         from a job's submission, or from its requeue, until the batch system started it
    down          between two jobs, while none was in the queue; from the last sign of a killed job
    start         job script, launcher, MPI, data, model, checkpoint; jobs that are killed in it count as down
    imports       imports of torch and the other packages
    first_step    first step of each job
    data          waiting for samples, in later steps
    compute       forward, backward and update, in later steps
    waiting       waiting for other ranks, in later steps; on accelerators this is part of compute
    checkpoint    delay of training by saves
    evaluation    evaluation of held-out samples
    recomputed    steps that were done again, because a job resumed from a checkpoint before them; the lost ones count
    skipped       steps without an update, because gradients were not finite
    other         callbacks and records between steps, recovery after ranks were lost, a step that a kill cut off
    tail          from the last step and its save until the job's end

A step belongs to the first of recomputed, skipped and first_step that applies. `Goodput.ratio` is compute divided by
the wall clock, so every other part is a loss. Steps that are still lost when a run is never resumed are not known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import merge
from operator import itemgetter
from typing import Any

from mpitrain.monitor.json_lines import EventLine, StepTimes
from mpitrain.storage.text import duration, with_spaces

PARTS = (
    "queue", "down", "start", "imports", "first_step", "data", "compute", "waiting", "checkpoint", "evaluation",
    "recomputed", "skipped", "other", "tail",
)  # fmt: skip
_WHOLE = ("first_step", "checkpoint", "evaluation", "recomputed", "skipped")  # parts of training, measured as a whole


class Goodput:
    """Account of a run's wall clock, which is fed with its events and steps in the order of their time.

    Attributes:
        recomputed_steps: Number of steps that were lost and had to be done again, each counted once per loss.
    """

    def __init__(self) -> None:
        self.recomputed_steps = 0
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._steps = 0.0  # seconds of the steps for which data, waiting and computing were measured separately
        self._training = 0.0  # seconds from each start event until the last sign of its job
        self._began: float | None = None  # beginning of the wall clock, in unix seconds
        self._last = 0.0  # last sign of the run, in unix seconds
        self._start: EventLine | None = None  # start event of the job that is training
        self._is_first = False  # true until the first step of the job

    @classmethod
    def of(cls, events: Sequence[Mapping[str, Any]], steps: Iterable[StepTimes]) -> Goodput:
        """Return the account of a run until its last sign.

        Args:
            events: Lines of events.jsonl.
            steps: Lines of metrics.jsonl; those of older versions, which have no time, are left out.
        """
        account = cls()
        signs: list[tuple[float, Any]] = [(event["time"], event) for event in events]
        lost = sorted((event["until"], None) for event in events if event.get("until"))  # last steps of killed jobs
        timed = ((line.time, line) for line in steps if line.time is not None)
        for when, value in merge(signs, lost, timed, key=itemgetter(0)):
            if isinstance(value, StepTimes):
                account.add_step(value)
            elif value is not None:
                account.add_event(value)
            else:
                account.advance(when)
        return account

    def add_event(self, values: Mapping[str, Any]) -> None:
        """Add a line of events.jsonl."""
        event = EventLine.model_construct(**values)  # a reader has checked it, or this job has written it
        if event.event == "start":
            self._add_start(event)
        elif event.event == "end":
            self._add_end(event)
        elif event.event == "discard":
            self._seconds["recomputed"] += event.seconds or 0.0
            self.recomputed_steps += event.steps or 0
        else:
            self.advance(event.time)
            part = {"save": "checkpoint", "evaluate": "evaluation"}.get(event.event)
            if part is not None:
                self._seconds[part] += event.seconds or 0.0

    def add_step(self, line: StepTimes) -> None:
        """Add a line of metrics.jsonl, of a step that no later start has discarded."""
        self.advance(line.time or 0.0)
        seconds, is_first, self._is_first = line.step_s or 0.0, self._is_first, False
        if line.skipped:
            self._seconds["skipped"] += seconds
        elif is_first and self._start is not None and line.step == self._start.step + 1:
            self._seconds["first_step"] += seconds
        else:
            self._steps += seconds
            self._seconds["data"] += line.data_s or 0.0
            self._seconds["waiting"] += line.wait_s or 0.0

    def advance(self, until: float) -> None:
        """Count the time until a sign, in unix seconds, of the job that is training, if there is one."""
        if self._start is not None and until > self._last:
            self._training += until - self._last
            self._last = until

    def parts(self) -> dict[str, float]:
        """Return the seconds of each part; their sum is the wall clock."""
        parts = dict(self._seconds)
        left = self._training - sum(parts[name] for name in _WHOLE)
        # where workers take steps at the same time (parallel.mode server), the sum of their times can be larger
        steps = max(0.0, min(self._steps, left))
        parts["data"] = min(parts["data"], steps)
        parts["waiting"] = min(parts["waiting"], steps - parts["data"])
        parts["compute"] = steps - parts["data"] - parts["waiting"]
        parts["other"] = left - steps
        return parts

    @property
    def wall(self) -> float:
        """Seconds from the beginning of the first job until the last sign of the run."""
        return self._last - self._began if self._began is not None else 0.0

    @property
    def ratio(self) -> float:
        """Share of the wall clock in which steps that last were computed; 0 before the first of them."""
        return self.parts()["compute"] / self.wall if self.wall > 0 else 0.0

    def describe(self) -> str:
        """Return ratio and parts as text, without parts that round to 0; empty if no start was recorded."""
        if self.wall <= 0:
            return ""
        shown = ", ".join(f"{with_spaces(name)} {s:.1f}" for name, s in self.parts().items() if round(s, 1))
        steps = f"; {self.recomputed_steps:,} steps recomputed" if self.recomputed_steps else ""
        return f"{self.ratio:.1%} of {duration(self.wall)} ({shown} s{steps})"

    def _add_start(self, event: EventLine) -> None:
        """Count the time since the last job: down, queue, start and imports."""
        before = {name: max(0.0, seconds) for name, seconds in (event.start_s or {}).items()}
        began = event.time - sum(before.values())
        last = min(began if event.submitted is None else event.submitted, began) if self._began is None else self._last
        self._began = last if self._began is None else self._began
        began = min(max(began, last), max(event.time, last))
        submitted = began if event.submitted is None else min(max(event.submitted, last), began)
        allocated = began if event.allocated is None else min(max(event.allocated, submitted), began)
        imports = min(before.get("packages", 0.0), max(event.time, last) - began)
        self._seconds["down"] += submitted - last
        self._seconds["queue"] += allocated - submitted
        self._seconds["imports"] += imports
        self._last = max(event.time, last)
        self._seconds["start"] += self._last - allocated - imports
        self._start, self._is_first = event, True

    def _add_end(self, event: EventLine) -> None:
        """Count the time since the last sign as tail, or as down if the job of this event never began to train."""
        began = event.time - (event.seconds or 0.0)
        if self._began is None:
            self._began = self._last = began
        its_own = self._start is not None and began <= self._start.time
        self._seconds["tail" if its_own else "down"] += max(0.0, event.time - self._last)
        self._last, self._start = max(event.time, self._last), None
