"""monitor.timeline = "A:B": what every rank computes and communicates in steps A to B, recorded.

    begin   where all ranks meet last before A: clocks are compared, hooks put in
    end     where they meet first after B: clocks are compared again, hooks taken out, every rank writes what it has
            recorded, and rank 0 makes one timeline of it

Where groups or workers take steps by themselves (parallel.mode local and server), the steps around A and B between two
meetings are recorded as well.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

from mpitrain.comm.memory.device import is_accelerator
from mpitrain.config.run import timeline_steps
from mpitrain.config.settings import Config
from mpitrain.errors import InputError
from mpitrain.monitor.timeline.merging import merge, told
from mpitrain.monitor.timeline.spans import Spans, recording_folder, write_rank
from mpitrain.trainer.callback import Callback, Step
from mpitrain.trainer.folder import together
from mpitrain.trainer.recording.clock_offsets import Offset, measure
from mpitrain.trainer.recording.module_hooks import ModuleHooks, affordable, levels_of
from mpitrain.trainer.recording.rank_records import memory
from mpitrain.trainer.run import Run

_HOOKS_MAY_COST = 0.01  # of what forward and backward take
_UNKNOWN = 0.05  # seconds of forward and backward, where no step was taken yet


class Recording:
    """One rank's recording while it goes on. Collective to make, and to end.

    Args:
        trainer: What is recorded.
        clock: Turns `time.perf_counter()` into this rank's time.
        step_seconds: Of forward and backward in the step before.
    """

    def __init__(self, trainer: Run, clock: Callable[[float], float], step_seconds: float) -> None:
        self._trainer, self._clock = trainer, clock
        world, engine = trainer.world, trainer.engine
        self.token = world.broadcast_object(f"{time.time_ns()}")
        self.spans = Spans()
        levels = levels_of(engine.module)
        calls = max(
            1, -(-trainer.samples // (trainer.mesh.data.size * (trainer.config.train.microbatch or trainer.samples)))
        )
        depth = affordable(levels, calls, _HOOKS_MAY_COST * step_seconds)
        self.depth = min(world.all_gather_object(depth))
        self._offsets = [self._measured()]
        modules = [named for level in levels[: self.depth] for named in level]
        self._hooks = ModuleHooks(modules, self.spans.module)
        self.spans.after_backward = self._hooks.end_of_backward
        self._unix, self._memory = time.time(), [self._held()]
        engine.clock.leave_out()  # the above is no part of any step
        engine.clock.steps, engine.clock.listener = [], self.spans
        world.journal.record(True)

    def _measured(self) -> Offset:
        return measure(self._trainer.world, lambda: self._clock(time.perf_counter()))

    def _held(self) -> tuple[float, dict[str, int]]:
        return time.perf_counter(), memory(self._trainer)

    def stop(self) -> dict[str, Any]:
        """Record no longer; returns what was recorded. Not collective."""
        trainer, clock = self._trainer, self._trainer.engine.clock
        end, totals = time.perf_counter(), clock.totals()
        clock.settle(wait=True)
        steps, clock.steps, clock.listener = clock.steps or [], None, None
        self._hooks.remove()
        journal = trainer.world.journal
        operations = journal.take()
        journal.record(False)
        self._memory.append(self._held())
        at = self._clock
        rows = []
        ends = [*steps[1:], (0, end, totals)] if steps else []  # a rank that only serves takes no steps
        for (number, begin, before), (_, until, after) in zip(steps, ends, strict=True):
            rows.append([number, at(begin), at(until), {part: after[part] - before[part] for part in before}])
        return {
            "token": self.token,
            "rank": trainer.world.rank,
            "world_size": trainer.world.size,
            "role": trainer.strategy.role(trainer.world.rank),
            "host": socket.gethostname(),
            "node": trainer.world.node,
            "device": str(trainer.device) if is_accelerator(trainer.device) else "cpu",
            "unix": self._unix,
            "depth": self.depth,
            "left_out": self.spans.left_out,
            "steps": rows,
            "spans": [[kind, name, at(b), at(e), more] for kind, name, b, e, more in self.spans.all()],
            "communication": [[*one[:5], at(one.begin), at(one.end), *one[7:]] for one in operations],
            "waited": self.spans.waited,
            "memory": [[at(when), figures] for when, figures in self._memory],
            "offsets": self._told_offsets(),
        }

    def compare_clocks(self) -> list[list[float]]:
        """Compare clocks for the second time; returns all offsets. Collective."""
        self._offsets.append(self._measured())
        return self._told_offsets()

    def _told_offsets(self) -> list[list[float]]:
        return [[offset.at, offset.seconds, offset.within] for offset in self._offsets]


class TimelineRecorder(Callback):
    """Records the steps that monitor.timeline names, once.

    Args:
        config: The settings.
        clock: Turns `time.perf_counter()` into this rank's time: for tests of ranks whose clocks differ.
    """

    def __init__(self, config: Config, clock: Callable[[float], float] = lambda at: at) -> None:
        self._wanted = timeline_steps(config.monitor.timeline)
        self._clock = clock
        self._recording: Recording | None = None
        self._done = not config.monitor.timeline
        self._before = 0.0  # seconds of forward and backward until the last meeting
        self._step_seconds = _UNKNOWN

    def on_fit_start(self, trainer: Run) -> None:
        self._recording = None
        if not self._done:
            self._consider(trainer)

    def on_step_done(self, trainer: Run, step: Step) -> None:
        if self._done or not step.together:
            return
        if self._recording is None:
            self._consider(trainer)
        elif trainer.step >= self._wanted[1] or trainer.last_step:
            self._end(trainer, self._recording)

    def on_exception(self, trainer: Run, error: BaseException) -> None:
        """Write what was recorded so far, which may explain the error."""
        recording, self._recording = self._recording, None
        if recording is not None:
            try:
                write_rank(recording_folder(trainer.folder.path, self._wanted), recording.stop())
            except InputError as second:
                trainer.folder.log.info("%s", second)

    def _consider(self, trainer: Run) -> None:
        """Begin to record, if a step that is wanted comes before all ranks meet again."""
        first, last = self._wanted
        if trainer.step >= last or trainer.last_step:
            self._done = True
        elif trainer.strategy.next_meeting(trainer) >= first:
            self._recording = Recording(trainer, self._clock, self._step_seconds)
        else:
            self._note_seconds(trainer)

    def _note_seconds(self, trainer: Run) -> None:
        """Note the seconds of forward and backward in the last step, right before the first that is recorded."""
        if trainer.step < self._wanted[0] - 2:
            return
        totals = trainer.engine.clock.totals()
        now = totals["forward"] + totals["backward"]
        if self._before:
            self._step_seconds = now - self._before
        self._before = now

    def _end(self, trainer: Run, recording: Recording) -> None:
        """Write what was recorded, and have rank 0 make one timeline of it. Collective."""
        self._recording, self._done = None, True
        recorded = recording.stop()
        recorded["offsets"] = recording.compare_clocks()
        folder = recording_folder(trainer.folder.path, self._wanted)
        together(trainer.world, lambda: write_rank(folder, recorded))
        if trainer.world.rank == 0:
            try:
                lines = told(merge(folder))
            except InputError as error:
                lines = [f"timeline: {error}"]
            for line in lines:
                trainer.say(line)
        trainer.world.barrier()  # here, and not in the next step, which would count what rank 0 has drawn as a wait
        trainer.engine.clock.leave_out()
