"""Callbacks that record the steps: metrics.jsonl and trackers, the progress bar, the samples' numbers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from mpitrain.monitor import MetricsWriter, Progress, peak_memory_bytes
from mpitrain.monitor.run_files import HELD_OUT
from mpitrain.monitor.trackers import Tracking, asked_for
from mpitrain.storage.text import spoken
from mpitrain.trainer.callback import Callback, Step
from mpitrain.trainer.data import gather_ids
from mpitrain.trainer.held_out.measuring import LOSS
from mpitrain.trainer.run import Run


class SampleIds(Callback):
    """Puts the numbers of all samples of a step into its line of metrics.jsonl, in order (`data.record_ids`)."""

    def on_step_end(self, trainer: Run, step: Step) -> None:
        if trainer.config.data.record_ids and "ids" not in step.extras:
            step.extras["ids"] = gather_ids(trainer.places.everyone, step.batch)


class Records(Callback):
    """Rank 0's line in metrics.jsonl, figures for trackers and progress on the terminal, for each step.

    After ranks were lost another rank may be the first one, and goes on with the same files.
    """

    def __init__(self) -> None:
        self._metrics: MetricsWriter | None = None
        self._tracking: Tracking | None = None
        self._progress: Progress | None = None
        self._start: int | None = None  # steps done when this job began
        self._skipped = 0  # steps

    def on_fit_start(self, trainer: Run) -> None:
        again, config = self._start is not None, trainer.config
        if self._start is None:
            self._start = trainer.step
        if trainer.world.rank:
            return
        self._close(trainer)
        resumed = trainer.step if again else trainer.resumed_step
        tracking = Tracking(asked_for(config.monitor), partial(_warn, trainer))  # before files are touched
        self._metrics = MetricsWriter(trainer.folder.path, resumed)
        tracking.start(trainer.folder.path, config.model_dump(mode="json"), resumed)
        self._tracking = tracking
        unit = "tokens" if trainer.tokens else "samples"
        self._progress = Progress(config.train.steps, trainer.step, config.monitor.every, unit=unit)
        trainer.print = self._progress.say

    def on_step_end(self, trainer: Run, step: Step) -> None:
        self._skipped += step.skipped
        if step.number - 1 == self._start:
            step.extras["memory"] = asdict(trainer.engine.memory())
        if self._metrics is None or self._progress is None or self._tracking is None:
            return
        if step.skipped:
            step.extras["skipped"] = True
        if step.held_out_loss is not None:
            step.extras |= {HELD_OUT + name: value for name, value in trainer.figures.items()}
        samples = trainer.batch_sizes.size(step.number - 1)
        tokens = samples * trainer.tokens
        figures: dict[str, Any] = {
            "time": time.time() - (time.monotonic() - step.met),  # of its end; evaluation comes after it
            "loss": step.loss,
            "lr": step.lr,
            "grad_norm": step.norm,
            "samples": samples,
            "tokens": tokens,
            "step_s": step.seconds,
            "tokens_per_s": tokens / step.seconds,
            "memory_bytes": peak_memory_bytes(trainer.device),
            "world_size": trainer.world.size,
        }
        figures |= step.extras
        self._metrics.write(step=step.number, **figures)
        self._tracking.log(step.number, figures)
        self._progress.update(step.number, step.loss, step.lr, (tokens or samples) / step.seconds, self._skipped)
        if step.held_out_loss is not None:
            trainer.say(f"step {step.number}: held-out {figures_text(trainer.figures)}")

    def on_fit_end(self, trainer: Run) -> None:
        if self._progress is not None:
            self._progress.close()

    def on_exception(self, trainer: Run, error: BaseException) -> None:
        self._close(trainer)

    def teardown(self, trainer: Run) -> None:
        self._close(trainer)

    def _close(self, trainer: Run) -> None:
        """Close both files. Lines for people go to standard output again."""
        for kept in (self._progress, self._metrics, self._tracking):
            if kept is not None:
                kept.close()
        self._progress = self._metrics = self._tracking = None
        trainer.print = partial(print, flush=True)


def figures_text(figures: Mapping[str, float]) -> str:
    """Return measured figures for people: loss 1.2345, token accuracy 0.5."""
    return ", ".join(f"{spoken(name)} {figure(name, value)}" for name, value in figures.items())


def figure(name: str, value: float) -> str:
    """One of these numbers."""
    return f"{value:.4f}" if name.partition(" of ")[0] == LOSS else f"{value:.4g}"


def _warn(trainer: Run, text: str) -> None:
    trainer.folder.log.warning("%s", text)
    trainer.print(f"mpitrain: {text}")
