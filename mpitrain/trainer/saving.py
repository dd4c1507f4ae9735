"""The steps after which a run is saved, and the checkpoint it goes on from: the newest whole one of these data.

It is saved after every so many steps, or when that costs least time (`checkpoint.every = "auto"`).

With "auto" the first checkpoint comes after a few steps, and tells what a save costs here. From then on the interval is
that of Daly (`steps_between`), reckoned anew after each save by rank 0, which all ranks take over:

    a save     what it holds training up, as measured; the mean of the last ones, without the first
    a step     the time between the last two saves, evaluation included, over the steps in it
    failures   checkpoint.node_mtbf over the nodes of those ranks that train

It is the interval that costs least, of the time that saves take and that failures undo:

    work     save work     save work   X restart work     save ...
    |--------|##|--------|##|-----xxxxx|~~~~~~~|--------|##|
    interval           interval  lost            again

Failures come at random, as often at any time as at any other (a Poisson process): of n nodes that fail independently,
each once in `node_mtbf` seconds on average, one fails once in node_mtbf / n seconds. In what follows

    tau      seconds of training between the end of a save and the beginning of the next: the interval
    delta    seconds that a save holds training up
    R        seconds from a failure until training goes on from the last checkpoint
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
from mpitrain.storage.text import counted, lasting
from mpitrain.trainer.run import Callback, Restored, Run, Step

_FIRST = 20  # steps until the first save, as long as nothing is known: few to lose, and many beside a save
_SAVES = 4  # whose mean is taken
_NEWS = 1.5  # the factor by which an interval must change to be told again


class SaveSchedule(Callback):
    """Says after which steps to save. With "auto" collective where a run begins and where it is saved.

    Args:
        config: The settings.
    """

    def __init__(self, config: Config) -> None:
        section = config.checkpoint
        self._auto, self._every = section.every == "auto", 0 if section.every == "auto" else section.every
        self._next = 0  # with auto: the step after which to save
        self._held: deque[float] = deque(maxlen=section.flush_every if section.local else _SAVES)
        self._saves = 0  # that were measured
        self._marked = 0.0  # time.perf_counter() when the last step had ended at which all ranks met
        self._since: tuple[float, int] | None = None  # such a time and its step, from which on steps are timed
        self._told = 0  # steps

    def due(self, since: int, step: int) -> bool:
        """Return whether a save became due between step `since`, where ranks met last, and this step."""
        return step >= self._next if self._auto else is_due(since, step, self._every)

    def next_after(self, step: int) -> int | None:
        """The first step after this one after which a save is due; None where none is."""
        if self._auto:
            return max(step + 1, self._next)
        return self._every * (step // self._every + 1) if self._every else None

    def on_fit_start(self, trainer: Run) -> None:
        if self._auto:  # ranks that were lost may have left the others with different intervals
            self._every = trainer.world.on_root(lambda: self._every)
            self._next, self._since = trainer.step + (self._every or _FIRST), None

    def on_step_end(self, trainer: Run, step: Step) -> None:
        if self._auto and step.together:
            self._marked = time.perf_counter()
            self._since = self._since or (self._marked, step.number)  # not from the first step, which takes longer

    def on_save(self, trainer: Run, folder: Path) -> None:
        if not self._auto or trainer.last_step or self._since is None:
            return
        now = time.perf_counter()
        if self._saves == 1:  # the first has also paid for what is made once
            self._held.clear()
        self._saves += 1
        self._held.append(max(0.0, now - self._marked - trainer.store.waited_seconds))
        began, first = self._since
        if trainer.step > first:
            step_seconds = (self._marked - began) / (trainer.step - first)
            self._every, text = trainer.world.on_root(lambda: self._choose(trainer, step_seconds))
            if text:
                trainer.say(text)
        self._since = now, trainer.step
        self._next = trainer.step + (self._every or _FIRST)

    def _choose(self, trainer: Run, step_seconds: float) -> tuple[int, str]:
        """Steps between saves, and a line that says why, if there is news."""
        section, nodes = trainer.config.checkpoint, trainer.world.num_nodes
        held, mtbf = sum(self._held) / len(self._held), section.node_mtbf * 3600.0 / nodes
        least = trainer.store.write_seconds if section.background else 0.0
        every = steps_between(held, step_seconds, mtbf, least)
        if self._told / _NEWS < every < self._told * _NEWS:
            return every, ""
        self._told = every
        cost = f"a save {'holds training up for' if section.background else 'takes'} {lasting(held)}"
        if every > steps_between(held, step_seconds, mtbf):
            cost += f" and is written in {lasting(least)}"
        who = "this node" if nodes == 1 else f"of {nodes} nodes one"
        why = f"{cost}, and {who} fails every {lasting(mtbf)} (Daly 2006)"
        return every, f"checkpoints every {counted(every, 'step')}: {why}"


def young(save_seconds: float, mtbf_seconds: float) -> float:
    """The best interval to first order: tau = sqrt(2 delta M) (Young 1974).

    A save costs delta / tau of the time, and a failure half an interval, tau / 2 in every M; the sum is least there.
    Good for delta far below M.

    Args:
        save_seconds: delta.
        mtbf_seconds: M.

    Returns:
        tau, in seconds.
    """
    return math.sqrt(2.0 * save_seconds * mtbf_seconds)


def daly(save_seconds: float, mtbf_seconds: float) -> float:
    """The best interval to higher order (Daly 2006).

        tau = sqrt(2 delta M) (1 + 1/3 sqrt(delta / (2 M)) + 1/9 delta / (2 M)) - delta    where delta < 2 M
        tau = M                                                                           otherwise

    The training takes M exp(R / M) (exp((tau + delta) / M) - 1) T / tau on average, as an interval and its save have to
    come to their end without a failure, or else are begun anew after a restart. This is a perturbation solution for the
    least of that; the exact one is, with Lambert's W, tau = M (1 + W(-exp(-1 - delta / M))). R and T do not matter.

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
    """The best interval in whole steps of training (`daly`).

    Args:
        save_seconds: delta: that a save holds training up; not those that it goes on being written beside training.
        step_seconds: Of a step, without saves; more than 0.
        mtbf_seconds: M.
        least_seconds: The interval is at least so long: writing a checkpoint in the background takes that.

    Returns:
        Steps from one save to the next; at least 1.
    """
    return max(1, round(daly(save_seconds, mtbf_seconds) / step_seconds), math.ceil(least_seconds / step_seconds))


def is_due(since: int, step: int, every: int) -> bool:
    """Return whether a multiple of `every` lies after step `since` and not after this step; never for 0."""
    return every > 0 and step // every > since // every


def saves_after(step: int, config: Config) -> int:
    """Checkpoints still to be written after this step, if the run is not stopped; with "auto" the most there may be."""
    steps, every = config.train.steps, config.checkpoint.every
    if step >= steps:
        return 0
    if every == "auto":
        return steps - step
    evaluated = config.train.evaluate_every if config.checkpoint.best else 0
    best = steps // evaluated - step // evaluated if evaluated else 0
    return best + (steps // every - step // every + (steps % every > 0) if every else 1)


def require_given(trainer: Run) -> None:
    """Raise InputError where checkpoint.resume names a checkpoint and there is none. Collective."""
    resume = trainer.config.checkpoint.resume
    if resume not in ("auto", "never"):
        trainer.world.on_root(lambda: len(folders.require(Path(resume), "checkpoint.resume")))


def load_newest(trainer: Run) -> Restored:
    """The state of the newest checkpoint that is whole, loaded; of the start, where there is none. Collective."""
    resume, reasons = trainer.config.checkpoint.resume, []
    for folder in trainer.store.newest_first() if resume == "auto" else trainer.store.at(Path(resume)):
        try:
            manifest = trainer.store.load(folder, partial(_wanted, trainer, folder))
            of, _ = manifest.value("data"), manifest.value("position")
        except CheckpointError as error:
            reasons.append(str(error))
            trainer.say(f"passed over {folder}: {error}")
            continue
        if of not in (None, trainer.data.description.identity):  # None: imported weights
            data = trainer.config.data
            named = f"data.mix {data.mix}" if data.mix else f"data.path {data.path!r}"
            raise refusal(f"{folder} was trained on another data set than {named}; give that one, or another run.dir")
        trainer.engine.finish_load(manifest)
        for repaired in trainer.store.repairs:
            trainer.say(repaired)
        trainer.say(f"resumed from {folder}")
        return Restored(manifest.step, manifest.values, own=trainer.store.owns(folder))
    if reasons:
        raise CheckpointError(f"none of {len(reasons)} checkpoints can be used: {reasons[0]}", agreed=True)
    return Restored(0, {}, own=False)


def _wanted(trainer: Run, folder: Path, manifest: Manifest) -> list[Part]:
    """Return the parts that this rank fills from a checkpoint, once that is known to be of the run's model."""
    told = manifest.values.get("task") or {}
    require_same_model(trainer.config.model.model_dump(), told.get("model") or {}, folder)
    return trainer.engine.parts_to_load(manifest)
