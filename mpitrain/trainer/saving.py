"""Schedule of checkpoints, and loading of the newest complete checkpoint of the same data.

A run is saved after a fixed number of steps, or at an interval that minimizes lost time (`checkpoint.every = "auto"`).

With "auto", the first checkpoint comes after a few steps, and shows how long a save takes. After each save, rank 0
computes the interval by Daly's formula (`steps_between`) for all ranks, from

    a save     time by which it delays training, as measured; the mean of the last ones, without the first
    a step     time between the last two saves, evaluation included, divided by the steps in it
    failures   checkpoint.node_mtbf divided by the number of nodes that train

This interval minimizes the sum of the time spent saving and the time lost to failures:

    work     save work     save work   X restart work     save ...
    |--------|##|--------|##|-----xxxxx|~~~~~~~|--------|##|
    interval           interval  lost            again

Failures are a Poisson process: at any time they are equally likely. If each of n nodes fails independently, once in
`node_mtbf` seconds on average, then some node fails once in node_mtbf / n seconds. The formulas use

    tau      seconds of training between the end of a save and the beginning of the next: the interval
    delta    seconds by which a save delays training
    R        seconds from a failure until training continues from the last checkpoint
    M        mean seconds between failures of the job
    T        seconds that the training takes without saves and failures

J. W. Young: A first order approximation to the optimum checkpoint interval. Communications of the ACM 17 (9), 1974,
pages 530-531.
J. T. Daly: A higher order estimate of the optimum checkpoint interval for restart dumps. Future Generation Computer
Systems 22 (3), 2006, pages 303-312.
"""

from __future__ import annotations

import math
import time
from collections import deque
from functools import partial
from pathlib import Path

from mpitrain.checkpoint import Manifest, Part, folders
from mpitrain.config.settings import Config
from mpitrain.errors import CheckpointError, refusal
from mpitrain.loading import require_same_model
from mpitrain.storage.text import counted, duration_text
from mpitrain.trainer.run import Callback, Restored, Run, Step

_FIRST = 20  # steps before the first save: few enough to lose, many enough that the save costs little in comparison
_SAVES = 4  # last saves whose mean duration is used
_NOTABLE_CHANGE = 1.5  # factor by which an interval must change to be shown again


class SaveSchedule(Callback):
    """Schedule of the saves. With "auto" it is collective at the beginning of a run and at each save.

    Args:
        config: The settings.
    """

    def __init__(self, config: Config) -> None:
        section = config.checkpoint
        self._auto, self._every = section.every == "auto", 0 if section.every == "auto" else section.every
        self._next = 0  # with auto: step after which to save
        self._save_seconds: deque[float] = deque(maxlen=section.flush_every if section.local else _SAVES)
        self._saves = 0  # saves measured so far
        self._synchronized_at = 0.0  # time.perf_counter() at the end of the last step at which all ranks synchronized
        self._since: tuple[float, int] | None = None  # time and step from which on steps are timed
        self._shown_every = 0  # steps of the interval shown last

    def due(self, since: int, step: int) -> bool:
        """Return whether a save became due after step `since`, up to and including `step`.

        Args:
            since: Last step after which all ranks synchronized.
            step: Current step.
        """
        return step >= self._next if self._auto else is_due(since, step, self._every)

    def next_after(self, step: int) -> int | None:
        """Return the first step after `step` at which a save is due; None if there is none."""
        if self._auto:
            return max(step + 1, self._next)
        return self._every * (step // self._every + 1) if self._every else None

    def on_fit_start(self, trainer: Run) -> None:
        if self._auto:  # after a loss of ranks, the others may have different intervals
            self._every = trainer.world.on_root(lambda: self._every)
            self._next, self._since = trainer.step + (self._every or _FIRST), None

    def on_step_end(self, trainer: Run, step: Step) -> None:
        if self._auto and step.together:
            self._synchronized_at = time.perf_counter()
            if self._since is None:  # excludes the first step, which takes longer
                self._since = self._synchronized_at, step.number

    def on_save(self, trainer: Run, folder: Path) -> None:
        if not self._auto or trainer.last_step or self._since is None:
            return
        now = time.perf_counter()
        if self._saves == 1:  # drop the first save, which included one-time work
            self._save_seconds.clear()
        self._saves += 1
        self._save_seconds.append(max(0.0, now - self._synchronized_at - trainer.store.waited_seconds))
        began, first = self._since
        if trainer.step > first:
            step_seconds = (self._synchronized_at - began) / (trainer.step - first)
            self._every, text = trainer.world.on_root(lambda: self._choose(trainer, step_seconds))
            if text:
                trainer.say(text)
        self._since = now, trainer.step
        self._next = trainer.step + (self._every or _FIRST)

    def _choose(self, trainer: Run, step_seconds: float) -> tuple[int, str]:
        """Return the steps between saves, and a line that explains them, empty if they hardly changed."""
        section, nodes = trainer.config.checkpoint, trainer.world.num_nodes
        save_seconds, mtbf = sum(self._save_seconds) / len(self._save_seconds), section.node_mtbf * 3600.0 / nodes
        least = trainer.store.write_seconds if section.background else 0.0
        every = steps_between(save_seconds, step_seconds, mtbf, least)
        if self._shown_every / _NOTABLE_CHANGE < every < self._shown_every * _NOTABLE_CHANGE:
            return every, ""
        self._shown_every = every
        cost = f"a save {'delays training by' if section.background else 'takes'} {duration_text(save_seconds)}"
        if every > steps_between(save_seconds, step_seconds, mtbf):
            cost += f" and is written in {duration_text(least)}"
        who = "this node" if nodes == 1 else f"one of {nodes} nodes"
        why = f"{cost}, and {who} fails every {duration_text(mtbf)} (Daly 2006)"
        return every, f"checkpoints every {counted(every, 'step')}: {why}"


def young(save_seconds: float, mtbf_seconds: float) -> float:
    """Return the optimal interval to first order: tau = sqrt(2 delta M) (Young 1974).

    A save costs a share delta / tau of the time. A failure, once every M seconds, loses half an interval, tau / 2. The
    sum of both is smallest at this tau. The approximation is good for delta much smaller than M.

    Args:
        save_seconds: delta.
        mtbf_seconds: M.

    Returns:
        tau, in seconds.
    """
    return math.sqrt(2.0 * save_seconds * mtbf_seconds)


def daly(save_seconds: float, mtbf_seconds: float) -> float:
    """Return the optimal interval to higher order (Daly 2006).

        tau = sqrt(2 delta M) (1 + 1/3 sqrt(delta / (2 M)) + 1/9 delta / (2 M)) - delta    where delta < 2 M
        tau = M                                                                           otherwise

    An interval and its save must finish without a failure, or be repeated after a restart. The training therefore takes
    M exp(R / M) (exp((tau + delta) / M) - 1) T / tau seconds on average. The formula is a perturbation solution for the
    minimum. The exact solution, with Lambert's W, is tau = M (1 + W(-exp(-1 - delta / M))); it does not depend on R and
    T.

    Args:
        save_seconds: delta.
        mtbf_seconds: M.

    Returns:
        tau, in seconds.
    """
    if save_seconds >= 2.0 * mtbf_seconds:
        return mtbf_seconds
    share = save_seconds / (2.0 * mtbf_seconds)
    return young(save_seconds, mtbf_seconds) * (1.0 + math.sqrt(share) / 3.0 + share / 9.0) - save_seconds


def steps_between(save_seconds: float, step_seconds: float, mtbf_seconds: float, least_seconds: float = 0.0) -> int:
    """Return the optimal interval in whole training steps (see `daly`).

    Args:
        save_seconds: delta: seconds by which a save delays training, without background writing.
        step_seconds: Seconds of a step without saves; more than 0.
        mtbf_seconds: M.
        least_seconds: Lower bound of the interval: seconds that writing a checkpoint in the background takes.

    Returns:
        Steps from one save to the next; at least 1.
    """
    return max(1, round(daly(save_seconds, mtbf_seconds) / step_seconds), math.ceil(least_seconds / step_seconds))


def is_due(since: int, step: int, every: int) -> bool:
    """Return whether there is a multiple of `every` after step `since`, up to and including `step`.

    Args:
        since: Last step that was considered before.
        step: Current step.
        every: Interval in steps; 0 for never.
    """
    return every > 0 and step // every > since // every


def saves_after(step: int, config: Config) -> int:
    """Return the number of checkpoints still to be written after `step` if the run is not stopped.

    With "auto", this is an upper bound.

    Args:
        step: Steps done.
        config: The settings.
    """
    steps, every = config.train.steps, config.checkpoint.every
    if step >= steps:
        return 0
    if every == "auto":
        return steps - step
    evaluated = config.train.evaluate_every if config.checkpoint.best else 0
    best = steps // evaluated - step // evaluated if evaluated else 0
    return best + (steps // every - step // every + (steps % every > 0) if every else 1)


def require_resume_checkpoint(trainer: Run) -> None:
    """Raise InputError if checkpoint.resume names a checkpoint that does not exist. Collective."""
    resume = trainer.config.checkpoint.resume
    if resume not in ("auto", "never"):
        trainer.world.on_root(lambda: len(folders.require(Path(resume), "checkpoint.resume")))


def load_newest(trainer: Run) -> Restored:
    """Load the newest complete checkpoint, and return its state; step 0 if there is no checkpoint. Collective.

    Raises:
        InputError: If the checkpoint's run used other data or another model.
        CheckpointError: If there are checkpoints, but none can be used.
    """
    resume, reasons = trainer.config.checkpoint.resume, []
    for folder in trainer.store.newest_first() if resume == "auto" else trainer.store.at(Path(resume)):
        try:
            manifest = trainer.store.load(folder, partial(_parts_to_load, trainer, folder))
            of, _ = manifest.value("data"), manifest.value("position")
        except CheckpointError as error:
            reasons.append(str(error))
            trainer.say(f"skipped {folder}: {error}")
            continue
        if of not in (None, trainer.data.description.identity):  # None: imported weights
            data = trainer.config.data
            named = f"data.mix {data.mix}" if data.mix else f"data.path {data.path!r}"
            raise refusal(f"{folder} was trained on another data set than {named}; use that one, or another run.dir")
        trainer.engine.finish_load(manifest)
        for repaired in trainer.store.repairs:
            trainer.say(repaired)
        trainer.say(f"resumed from {folder}")
        return Restored(manifest.step, manifest.values, own=trainer.store.owns(folder))
    if reasons:
        raise CheckpointError(f"none of {len(reasons)} checkpoints can be used: {reasons[0]}", agreed=True)
    return Restored(0, {}, own=False)


def _parts_to_load(trainer: Run, folder: Path, manifest: Manifest) -> list[Part]:
    """Return the parts that this rank reads from a checkpoint, after checking that its model is the run's."""
    task = manifest.values.get("task") or {}
    require_same_model(trainer.config.model.model_dump(), task.get("model") or {}, folder)
    return trainer.engine.parts_to_load(manifest)
