"""The callback that writes RUN/events.jsonl: how a run began, what it saved, evaluated and lost, and how it ended."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mpitrain.comm.job.topology import processor_name
from mpitrain.errors import EXIT_REQUEUE, InputError, MpitrainError
from mpitrain.models.build import loss_unit
from mpitrain.monitor import EventLog, peak_memory_bytes
from mpitrain.trainer.callback import Callback, Step
from mpitrain.trainer.held_out.measuring import LOSS
from mpitrain.trainer.recording.console import facts, parallel_text, peak_of_ranks

if TYPE_CHECKING:
    from mpitrain.trainer.trainer import Trainer


class EventRecords(Callback):
    """Writes rank 0's events. After ranks were lost another rank may be the first one, and goes on with the file.

    A line that cannot be written is left out and training goes on: that it is missing is said once, in the rank's log.
    To be the last callback, so that the time between the end of a step and its save is that of the save.
    """

    def __init__(self) -> None:
        self._log: EventLog | None = None
        self._began = time.monotonic()
        self._marked = 0.0  # time.perf_counter() when all of the last step was done but saving
        self._first_start = True  # of this job
        self._outcome = ""  # with which training came to its end; empty as long as it did not
        self._peak = 0  # bytes of the rank that held most
        self._error: BaseException | None = None
        self._told = False  # that a line is missing

    def setup(self, trainer: Trainer) -> None:
        self._began = time.monotonic()

    def on_fit_start(self, trainer: Trainer) -> None:
        self._outcome, self._error = "", None
        if trainer.world.rank:
            self._close()
        elif self._log is None:
            self._log = EventLog(trainer.folder.path)
        if self._first_start:
            self._first_start = False
            self._write(trainer, "start", **start_fields(trainer))

    def on_evaluate(self, trainer: Trainer, loss: float) -> None:
        metrics = {name: value for name, value in trainer.figures.items() if name != LOSS}
        self._write(trainer, "evaluate", loss=loss, metrics=metrics)

    def on_step_end(self, trainer: Trainer, step: Step) -> None:
        if step.lost:
            self._write(trainer, "lost", ranks=list(step.lost), recovered_s=step.extras.get("recovered_s"))
        if step.together and trainer.last_step and trainer.step < trainer.config.train.steps:
            self._write(trainer, "stop", reason=trainer.stop_reason)
        self._marked = time.perf_counter()

    def on_save(self, trainer: Trainer, folder: Path) -> None:
        self._write(trainer, "save", folder=folder.name, seconds=time.perf_counter() - self._marked)

    def on_fit_end(self, trainer: Trainer) -> None:
        self._peak = peak_of_ranks(trainer)
        self._outcome = "done" if trainer.done else "stopped"

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        self._outcome, self._error = "", error  # known to be the end in `teardown`: training may go on with fewer ranks

    def teardown(self, trainer: Trainer) -> None:
        if trainer.world.rank == 0:
            outcome, message = self._outcome, trainer.stop_reason if self._outcome == "stopped" else ""
            if not outcome:
                outcome, message = _of_error(sys.exc_info()[1] or self._error)
            if self._log is None and trainer.folder.made:  # the first step was never reached
                with suppress(InputError):  # what is to be told is how the run failed, and not this
                    self._log = EventLog(trainer.folder.path)
            peak = self._peak or _own_peak(trainer)
            seconds = time.monotonic() - self._began
            self._write(trainer, "end", outcome=outcome, message=message, seconds=seconds, peak_memory_bytes=peak)
        self._close()

    def _write(self, trainer: Trainer, event: str, **fields: Any) -> None:
        if self._log is None:
            return
        try:
            self._log.write(event, trainer.step, **fields)
        except InputError as error:
            if not self._told:
                self._told = True
                trainer.folder.log.warning("%s; training goes on without what is missing there", error)

    def _close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None


def start_fields(trainer: Trainer) -> dict[str, Any]:
    """What the event `start` tells of the run and the machine. Collective."""
    config, told = trainer.config, facts(trainer)
    hosts = trainer.world.all_gather_object(socket.gethostname())
    return {
        "version": told.version,
        "ranks": told.ranks,
        "nodes": told.nodes,
        "hosts": list(dict.fromkeys(hosts)),
        "threads": told.threads,
        "device": told.device,
        "mpi": told.mpi,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "cpu": processor_name() or platform.machine(),
        "cores": os.cpu_count() or 0,
        "model": told.model,
        "parameters": told.parameters,
        "loss_unit": loss_unit(config.model, trainer.data.description),
        "precision": told.precision,
        "parallel": parallel_text(config, trainer.world.size),
        "steps": told.steps,
        "resumed_step": trainer.resumed_step,
        "config": config.model_dump(mode="json"),
    }


def _of_error(error: BaseException | None) -> tuple[str, str]:
    """How a run ended that did not come to its end, and the first line of why."""
    if error is None:
        return "failed", ""
    if isinstance(error, KeyboardInterrupt):
        return "failed", "interrupted"
    text = next(iter(str(error).splitlines()), "")
    if isinstance(error, MpitrainError):
        return "stopped" if error.exit_code == EXIT_REQUEUE else "failed", text
    return "failed", f"{type(error).__name__}: {text}".removesuffix(": ")


def _own_peak(trainer: Trainer) -> int | None:
    """What this rank held at most; None where its device has failed and does not say."""
    try:
        return peak_memory_bytes(trainer.device)
    except RuntimeError:
        return None
