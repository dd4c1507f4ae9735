"""The callback that says how a run begins and how it ended."""

from __future__ import annotations

import math
import os
import shlex
import sys
import time
from typing import TYPE_CHECKING

import torch

from mpitrain.comm.memory.device import is_accelerator
from mpitrain.config.settings import Config
from mpitrain.data.folders import tokenizer_of
from mpitrain.data.mix import data_paths
from mpitrain.early import __version__
from mpitrain.errors import tell
from mpitrain.monitor import Outcome, RunFacts, banner, closing, peak_memory_bytes
from mpitrain.storage.text import spoken
from mpitrain.trainer.callback import Callback, Step
from mpitrain.trainer.doubts import doubts
from mpitrain.trainer.folder import AGAIN
from mpitrain.trainer.fruitless import LearningCheck
from mpitrain.trainer.recording.records import figure

if TYPE_CHECKING:
    from mpitrain.trainer.trainer import Trainer


class Console(Callback):
    """Prints the banner when the first step is about to begin, and the closing lines after the last. Rank 0 alone."""

    def __init__(self, learning: LearningCheck) -> None:
        """learning: knows since when nothing was learned."""
        self._learning = learning
        self._began = time.monotonic()
        self._start: int | None = None  # steps done when this job began
        self._loss = math.nan
        self._held_out: dict[str, str] = {}
        self._skipped = 0  # steps
        self._step_seconds = 0.0  # of the steps of this job, as in metrics.jsonl

    def setup(self, trainer: Trainer) -> None:
        self._began = time.monotonic()

    def on_fit_start(self, trainer: Trainer) -> None:
        if self._start is not None:  # ranks were lost, and the job goes on
            return
        self._start = trainer.step
        if trainer.world.rank == 0:
            tell(banner(facts(trainer)))
            trainer.folder.write_config(trainer.config)
            trainer.folder.keep_tokenizer(tokenizer_of(data_paths(trainer.config)[0]))
        for text in doubts(trainer.config, columns=trainer.mesh.data.size, on_cpu=not is_accelerator(trainer.device)):
            trainer.say(f"warning: {text}")

    def on_step_end(self, trainer: Trainer, step: Step) -> None:
        self._loss = step.loss
        self._skipped += step.skipped
        self._step_seconds += step.seconds
        if step.held_out_loss is not None:
            self._held_out = {spoken(n): figure(n, value) for n, value in trainer.figures.items()}

    def on_fit_end(self, trainer: Trainer) -> None:
        peak = peak_of_ranks(trainer)
        trainer.folder.log.info("ended at step %d", trainer.step)
        if trainer.world.rank:
            return
        steps, row, start = trainer.config.train.steps, self._learning.row, self._start or 0
        stopped, early = not trainer.done, trainer.done and trainer.step < steps
        resume = trainer.folder.resume_command(trainer.config, trainer.world.size)
        resume += " --train.patience 0" if early else ""
        commands = [("resume" if stopped else "go on", resume)] if stopped or not row.bad else []
        # a script of jobs/ has an environment of its own, which is not active in the shell
        python = shlex.quote(sys.executable) if AGAIN in os.environ else "python"
        commands.append(("inspect", f"{python} -m mpitrain.report {shlex.quote(str(trainer.folder.path))}"))
        outcome = Outcome(
            step=trainer.step,
            steps=steps,
            start_step=start,
            loss=self._loss,
            held_out=self._held_out,
            skipped=self._skipped,
            fruitless_since=row.since if row.bad else 0,
            seconds=time.monotonic() - self._began,
            step_seconds=self._step_seconds,
            samples_done=trainer.batch_sizes.before(trainer.step) - trainer.batch_sizes.before(start),
            tokens=trainer.tokens,
            peak_memory_bytes=peak,
            run_dir=str(trainer.folder.path),
            commands=tuple(commands),
            early=trainer.stop_reason if early else "",
        )
        tell(closing(outcome))


def peak_of_ranks(trainer: Trainer) -> int:
    """Return the bytes of the rank that held most. Collective."""
    memory = torch.tensor([peak_memory_bytes(trainer.device)])
    trainer.world.all_reduce(memory, "max")
    return int(memory)


def facts(trainer: Trainer) -> RunFacts:
    """What the banner tells."""
    config, world = trainer.config, trainer.world
    columns = world.size // (config.parallel.pipeline * config.parallel.tensor)  # data-parallel ranks
    share = -(-config.train.batch // columns)
    return RunFacts(
        version=__version__,
        ranks=world.size,
        nodes=world.num_nodes,
        threads=torch.get_num_threads(),
        device=trainer.devices,
        mpi=world.library,
        model=config.model.factory or config.model.name,
        parameters=trainer.parameters,
        data=" + ".join(filter(None, data_paths(config))) or "Python's own source as bytes (data.path is not set)",
        samples=len(trainer.data),
        held_out_samples=len(trainer.held_out) if trainer.held_out is not None else 0,
        tokens=trainer.tokens,
        batch=config.train.batch,
        microbatch=min(config.train.microbatch or share, share),
        steps=config.train.steps,
        samples_taken=trainer.batch_sizes.before(config.train.steps),
        start_step=trainer.step,
        precision=config.train.precision,
        run_dir=str(trainer.folder.path),
        notes=notes(trainer),
    )


def notes(trainer: Trainer) -> tuple[tuple[str, str], ...]:
    """Further labels and texts of the banner."""
    told = {"warm-up": trainer.batch_sizes.describe()}
    told |= {"parallel": parallel_text(trainer.config, trainer.world.size), "mode": trainer.strategy.describe()}
    return tuple((label, text) for label, text in told.items() if text)


def parallel_text(config: Config, ranks: int) -> str:
    """How the ranks share the work, in a few words; empty for plain data parallel."""
    parallel, words = config.parallel, []
    if parallel.pipeline > 1 or parallel.tensor > 1:
        data = ranks // (parallel.pipeline * parallel.tensor)
        words.append(f"data {data} x pipeline {parallel.pipeline} x tensor {parallel.tensor}")
    if parallel.pipeline > 1:
        words.append(f"schedule {parallel.schedule}")
    if parallel.zero:
        words.append(f"zero {parallel.zero}")
    if config.comm.compression != "none":
        words.append(f"gradients by {config.comm.compression}")
    if config.train.recompute:
        words.append("activations recomputed")
    if config.run.reproducible:
        words.append(f"sums over {config.run.workers} virtual workers")
    return ", ".join(words)
