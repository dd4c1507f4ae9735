"""Callbacks that report the beginning, progress and end of a run on the terminal and in RUN/events.jsonl."""

from __future__ import annotations

import math
import os
import platform
import re
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from mpitrain.comm.job.topology import processor_name
from mpitrain.comm.memory.device import is_accelerator
from mpitrain.config.learning_rate import DECAYS
from mpitrain.config.settings import Config
from mpitrain.data.folders import tokenizer_of
from mpitrain.data.mix import data_paths
from mpitrain.early import __version__
from mpitrain.errors import EXIT_REQUEUE, InputError, MpitrainError, echo
from mpitrain.layout.mesh import axes_of, count_readers, shape_of
from mpitrain.models.build import loss_unit
from mpitrain.monitor import EventLog, peak_memory_bytes, read_goodput
from mpitrain.monitor.energy import add_energy, energy_text
from mpitrain.monitor.memory import out_of_memory_kills
from mpitrain.planner.out_of_memory import explain_killed
from mpitrain.storage import proc
from mpitrain.storage.text import align_rows, arithmetic_text, counted, duration, rates_text, short, with_spaces
from mpitrain.trainer.folder import AGAIN
from mpitrain.trainer.held_out.measuring import LOSS
from mpitrain.trainer.recording.records import Records, figure
from mpitrain.trainer.recording.starting import StartTimes, queue_times
from mpitrain.trainer.run import Callback, Run, Step
from mpitrain.trainer.stopping import LearningCheck

# flags in /proc/cpuinfo of instructions that multiply matrices of 16-bit numbers, on x86 and Arm
_FAST_FLAGS = {"bf16": {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}, "fp16": {"avx512_fp16", "amx_fp16", "asimdhp"}}


class Console(Callback):
    """Prints the banner before the first step, and a summary after the last one. Only rank 0 prints."""

    def __init__(self, learning: LearningCheck) -> None:
        """Store the callback that knows since which step nothing was learned."""
        self._learning = learning
        self._loss = math.nan
        self._held_out: dict[str, str] = {}
        self._energy: dict[str, float] = {}  # sum of the records in metrics.jsonl
        self._step_seconds = 0.0  # sum over the steps of this job, as in metrics.jsonl
        self._counted_seconds = self._tflop = self._peaks = 0.0  # the same sum, multiplied with TFLOP/s and with MFU

    def on_fit_start(self, trainer: Run) -> None:
        if trainer.start is not None:  # the job continues after a loss of ranks
            return
        if trainer.world.rank == 0:
            echo(banner(trainer))
            trainer.folder.write_config(trainer.config)
            trainer.folder.keep_tokenizer(tokenizer_of(data_paths(trainer.config)[0]))
        for text in doubtful_settings(
            trainer.config, columns=trainer.mesh.readers.size, on_cpu=not is_accelerator(trainer.device)
        ):
            trainer.say(f"warning: {text}")

    def on_step_end(self, trainer: Run, step: Step) -> None:
        self._loss = step.loss
        self._step_seconds += step.seconds
        self._energy = add_energy(self._energy, step.extras.get("energy", {}))
        if "flops" in step.extras:
            self._counted_seconds += step.seconds
            self._tflop += step.extras["tflops_per_rank"] * step.seconds
            self._peaks += step.extras.get("mfu", 0.0) * step.seconds
        if step.held_out_loss is not None:
            self._held_out = {with_spaces(n): figure(n, value) for n, value in trainer.figures.items()}

    def on_fit_end(self, trainer: Run) -> None:
        peak = peak_of_ranks(trainer)
        trainer.folder.log.info("ended at step %d", trainer.step)
        if trainer.world.rank:
            return
        steps, series, start = trainer.config.train.steps, self._learning.series, trainer.start or 0
        stopped, early = not trainer.done, trainer.done and trainer.step < steps
        resume = trainer.folder.resume_command()
        resume += " --train.patience 0" if early else ""
        taken = counted(trainer.step - start, "step")
        samples = trainer.batch_sizes.before(trainer.step) - trainer.batch_sizes.before(start)
        rate = samples / self._step_seconds if self._step_seconds > 0 else 0.0
        rows = [("loss", "none, because no step was taken" if trainer.step == start else f"{self._loss:.4f}")]
        rows += [(f"held-out {name}", text) for name, text in self._held_out.items()]
        if trainer.skipped:
            rows.append(("skipped", f"{counted(trainer.skipped, 'step')}, because gradients were not finite"))
        rows.append(("throughput", rates_text(rate, rate * trainer.tokens) if rate else "none"))
        if seconds := self._counted_seconds:
            rows.append(("arithmetic", arithmetic_text(self._tflop / seconds, self._peaks / seconds)))
        took = duration(time.monotonic() - trainer.began)
        rows.append(("time", f"{took}, of which {duration(self._step_seconds)} in {taken}"))
        if trainer.goodput is not None:
            rows.append(("goodput", trainer.goodput.describe()))
        rows.append(("peak memory", f"at most {short(peak)}B per rank"))
        if energy := energy_text(self._energy):
            rows.append(("energy", energy))
        rows.append(("run folder", str(trainer.folder.path)))
        if stopped or not series.bad:
            rows.append(("resume" if stopped else "continue", resume))
        # scripts of jobs/ use an environment that is not active in the user's shell
        python = shlex.quote(sys.executable) if AGAIN in os.environ else "python"
        rows.append(("inspect", f"{python} -m mpitrain.report {shlex.quote(str(trainer.folder.path))}"))
        done = "stopped" if stopped else "ended" if series.bad else "done"
        notes = f" ({trainer.step - start:,} since the resume)" if start else ""
        notes += f", nothing learned since step {series.since:,}" if series.bad else ""
        notes += f", {trainer.stop_reason}" if early else ""
        echo(f"{done} at step {trainer.step:,} of {steps:,}{notes}", align_rows(rows))


def peak_of_ranks(trainer: Run) -> int:
    """Return the largest peak memory of any rank, in bytes. Collective."""
    memory = torch.tensor([peak_memory_bytes(trainer.device)])
    trainer.world.all_reduce(memory, "max")
    return int(memory)


def properties_of(trainer: Run) -> dict[str, Any]:
    """Return the properties of a run that both the banner and the event `start` show."""
    config, world = trainer.config, trainer.world
    return {
        "version": __version__,
        "ranks": world.size,
        "nodes": world.num_nodes,
        "threads": torch.get_num_threads(),
        "device": trainer.devices,
        "mpi": world.library,
        "model": config.model.factory or config.model.name,
        "parameters": trainer.parameters,
        "precision": config.train.precision,
        "steps": config.train.steps,
    }


def banner(trainer: Run) -> str:
    """Return the lines that a run prints first."""
    config, properties = trainer.config, properties_of(trainer)
    columns = count_readers(axes_of(config.parallel), properties["ranks"])
    share = max(uneven_shares(trainer), default=-(-config.train.batch // columns))
    data = " + ".join(filter(None, data_paths(config)))
    nodes, threads = counted(properties["nodes"], "node"), counted(properties["threads"], "thread")
    samples = f"{len(trainer.data):,} for training"
    samples += f", {len(trainer.held_out):,} held out" if trainer.held_out is not None else ""
    samples += f", {trainer.tokens:,} tokens each" if trainer.tokens else ""
    microbatch = min(config.train.microbatch or share, share)
    steps = f"{properties['steps']:,}" + (f", resumed after step {trainer.step:,}" if trainer.step else "")
    epochs = trainer.batch_sizes.before(properties["steps"]) / len(trainer.data)
    rows = [
        ("ranks", f"{properties['ranks']:,} on {nodes}, {threads} each, {properties['device']}"),
        ("MPI", properties["mpi"]),
        ("model", f"{properties['model']}, {counted(properties['parameters'], 'parameter')}"),
        ("data", data or "Python's source code as bytes (data.path is not set)"),
        ("samples", samples),
        ("batch", f"{counted(config.train.batch, 'sample')}, at most {microbatch:,} per rank and forward pass"),
        ("steps", f"{steps} ({epochs:.3g} epochs)"),
        ("precision", properties["precision"]),
        ("run folder", str(trainer.folder.path)),
        ("warm-up", trainer.batch_sizes.describe()),
        ("parallel", parallel_text(trainer)),
        ("mode", trainer.strategy.describe()),
    ]
    return f"mpitrain {properties['version']}\n{align_rows([row for row in rows if row[1]])}"


def uneven_shares(trainer: Run) -> list[int]:
    """Return the samples of a batch on each rank that reads different ones, if they depend on speeds; else nothing."""
    workers = trainer.places.workers
    bounds = workers.bounds(trainer.config.train.batch) if workers.speeds else ()
    return [hi - lo for lo, hi in pairwise(bounds)]


def parallel_text(trainer: Run) -> str:
    """Return a few words about how the ranks divide the work; empty on one rank."""
    config, ranks, words = trainer.config, trainer.world.size, []
    parallel = config.parallel
    if parallel.ranks_per_data > 1:
        shape = shape_of(axes_of(parallel), ranks)
        words.append(" x ".join(f"{name} {size}" for name, size in shape.items()))
    if parallel.pipeline > 1:
        words.append(f"schedule {parallel.schedule}")
    if parallel.zero == "auto" and parallel.mode == "sync" and ranks > 1:
        words.append(f"zero {trainer.engine.sharding.zero} (auto)")
    elif parallel.zero not in ("auto", 0):
        words.append(f"zero {parallel.zero}")
    if shares := uneven_shares(trainer):
        words.append(f"shares of {min(shares):,} to {max(shares):,} samples")
    if config.comm.compression != "none":
        words.append(f"compression {config.comm.compression}")
    if config.comm.parameter_compression != "none":
        words.append(f"parameters gathered as {config.comm.parameter_compression}")
    if config.train.recompute:
        words.append("recompute" if config.train.recompute is True else f"recompute {config.train.recompute}")
    if config.run.reproducible:
        words.append(f"{config.run.workers} virtual workers")
    return ", ".join(words)


class EventRecords(Callback):
    """Writes rank 0's events. After ranks were lost, the new rank 0 continues the file.

    If a line cannot be written, training continues without it, and the rank's log has one warning. This must be the
    last callback, so that the time between the end of a step and its save is that of the save.
    """

    def __init__(self, start: StartTimes, records: Records) -> None:
        """Store the callbacks that know how long the start took, and which steps are done again."""
        self._start, self._records = start, records
        self._updated: Step  # the step that is evaluated, since `on_update`
        self._log: EventLog | None = None
        self._step_ended = 0.0  # time.perf_counter() at the end of the last step, before it was saved
        self._outcome = ""  # outcome of the training; empty while it is not finished
        self._peak = 0  # largest peak memory of any rank, in bytes
        self._error: BaseException | None = None
        self._kills: dict[str, dict[str, int]] = {}  # see `gather_kills`; as training began, with the ranks it has
        self._has_warned = False  # true after the warning about a missing line

    def on_fit_start(self, trainer: Run) -> None:
        self._outcome, self._error = "", None
        if trainer.world.rank:
            self._close()
        elif self._log is None:
            self._log = EventLog(trainer.folder.path)
        trainer.goodput = None
        if self._log is not None:
            if self._records.discarded:
                self._write(trainer, "discard", **self._records.discarded)
            with suppress(InputError):  # a damaged file costs the account, not the training
                trainer.goodput = read_goodput(trainer.folder.path)
        # here, because all ranks meet here, after a loss too; at a step, servers and other groups are elsewhere
        self._kills = gather_kills(trainer)
        if trainer.start is None:
            fields = start_fields(trainer) | {"hosts": list(self._kills), "oom_kills": self._kills}
            fields |= self._explain_kill(trainer)
            start_s = {name: round(seconds, 3) for name, seconds in self._start.parts.items()}
            self._write(trainer, "start", **fields, start_s=start_s, **queue_times())

    def on_update(self, trainer: Run, step: Step) -> None:
        self._updated = step

    def on_evaluate(self, trainer: Run, loss: float) -> None:
        metrics = {name: value for name, value in trainer.figures.items() if name != LOSS}
        seconds = time.monotonic() - self._updated.met
        self._write(trainer, "evaluate", loss=loss, metrics=metrics, seconds=seconds)

    def on_step_end(self, trainer: Run, step: Step) -> None:
        if step.lost:
            reason = self._explain_kill(trainer, step.lost) | {"oom_kills": self._kills}
            self._write(trainer, "lost", ranks=list(step.lost), recovered_s=step.extras.get("recovered_s"), **reason)
        if step.together and trainer.last_step and trainer.step < trainer.config.train.steps:
            self._write(trainer, "stop", reason=trainer.stop_reason)
        self._step_ended = time.perf_counter()

    def on_save(self, trainer: Run, folder: Path) -> None:
        self._write(trainer, "save", folder=folder.name, seconds=time.perf_counter() - self._step_ended)

    def on_fit_end(self, trainer: Run) -> None:
        self._peak = peak_of_ranks(trainer)
        self._outcome = "done" if trainer.done else "stopped"

    def on_exception(self, trainer: Run, error: BaseException) -> None:
        self._outcome, self._error = "", error  # not yet the end: training may continue with fewer ranks

    def teardown(self, trainer: Run) -> None:
        if trainer.world.rank == 0:
            outcome, message = self._outcome, trainer.stop_reason if self._outcome == "stopped" else ""
            if not outcome:
                outcome, message = _outcome_of(sys.exc_info()[1] or self._error)
            if self._log is None and trainer.folder.is_locked:  # the first step was never reached
                with suppress(InputError):  # the run's own error is more important
                    self._log = EventLog(trainer.folder.path)
            peak = self._peak or _local_peak(trainer)
            seconds = time.monotonic() - trainer.began
            self._write(trainer, "end", outcome=outcome, message=message, seconds=seconds, peak_memory_bytes=peak)
        self._close()

    def _explain_kill(self, trainer: Run, lost: Sequence[int] = ()) -> dict[str, str]:
        """Say on rank 0 that the kernel killed ranks because memory was full, and return this as an event's message.

        Args:
            trainer: The trainer.
            lost: Ranks that died, if training continues without them.
        """
        with suppress(InputError):  # a damaged file costs the explanation, not the training
            if self._log is not None and (message := explain_killed(trainer.folder.path, self._kills, lost)):
                trainer.say(f"mpitrain: {message}")
                return {"message": message}
        return {}

    def _write(self, trainer: Run, event: str, **fields: Any) -> None:
        if self._log is None:
            return
        try:
            line = self._log.write(event, trainer.step, **fields)
        except InputError as error:
            if not self._has_warned:
                self._has_warned = True
                trainer.folder.log.warning("%s; training continues, but events are missing in that file", error)
        else:
            if trainer.goodput is not None:
                trainer.goodput.add_event(line)

    def _close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None


def gather_kills(trainer: Run) -> dict[str, dict[str, int]]:
    """Return the kernel's counters of processes killed for want of memory, by host (`out_of_memory_kills`).

    Collective.
    """
    kills: dict[str, dict[str, int]] = {}
    for host, counts in trainer.world.all_gather_object((socket.gethostname(), out_of_memory_kills())):
        kills.setdefault(host, {}).update(counts)
    return kills


def start_fields(trainer: Run) -> dict[str, Any]:
    """Return the fields of the event `start`, which describe run and machine. Collective."""
    config = trainer.config
    return properties_of(trainer) | {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "cpu": processor_name() or platform.machine(),
        "cores": os.cpu_count() or 0,
        "loss_unit": loss_unit(config.model, trainer.data.description),
        "parallel": parallel_text(trainer),
        "shares": uneven_shares(trainer),
        "resumed_step": trainer.resumed_step,
        "config": config.model_dump(mode="json"),
    }


def _outcome_of(error: BaseException | None) -> tuple[str, str]:
    """Return the outcome of an interrupted run, and the first line of its error."""
    if error is None:
        return "failed", ""
    if isinstance(error, KeyboardInterrupt):
        return "failed", "interrupted"
    text = next(iter(str(error).splitlines()), "")
    if isinstance(error, MpitrainError):
        return "stopped" if error.exit_code == EXIT_REQUEUE else "failed", text
    return "failed", f"{type(error).__name__}: {text}".removesuffix(": ")


def _local_peak(trainer: Run) -> int | None:
    """Return the peak memory of this rank in bytes; None if its device has failed."""
    try:
        return peak_memory_bytes(trainer.device)
    except RuntimeError:
        return None


def doubtful_settings(config: Config, *, columns: int, on_cpu: bool, flags: frozenset[str] | None = None) -> list[str]:
    """Return warnings about settings that are valid but probably unintended, one line each.

    Args:
        config: The settings.
        columns: Data-parallel ranks of a group.
        on_cpu: If true, ranks compute on the CPU.
        flags: Features of the CPU; None to read them from the system.
    """
    train, optim, warnings = config.train, config.optim, []
    flags = cpu_flags() if flags is None else flags
    if on_cpu and train.precision in _FAST_FLAGS and flags and not flags & _FAST_FLAGS[train.precision]:
        warnings.append(
            f"train.precision {train.precision} is slower than fp32 on this CPU, which has no instructions for it; "
            "it only saves memory"
        )
    warmup = optim.warmup if optim.schedule in DECAYS else 0
    if warmup >= train.steps > 0:
        warnings.append(
            f"optim.warmup {warmup} lasts for all of train.steps {train.steps}, so optim.lr is hardly reached; lower "
            "optim.warmup"
        )
    elif optim.schedule == "wsd":
        decay = optim.decay_steps if optim.decay_steps >= 1 else math.ceil(optim.decay_steps * train.steps)
        if warmup + decay > train.steps:
            warnings.append(
                f"optim.warmup {warmup} plus optim.decay_steps {decay:g} is above train.steps {train.steps}; lower one"
            )
    if optim.lr_end > optim.lr:
        warnings.append(
            f"optim.lr_end {optim.lr_end:g} is above optim.lr {optim.lr:g}, so the rate rises; lower optim.lr_end"
        )
    if train.average != "none" and train.average_start >= train.steps > 0:
        warnings.append(
            f"train.average_start {train.average_start} leaves out all of train.steps {train.steps}, so nothing is "
            "averaged; lower it"
        )
    sizes = train.batch_sizes
    least = min(sizes.after(0))
    if least < columns:
        warnings.append(
            f"{sizes.key(least)} {least} leaves {columns - least} of {columns} ranks without a sample; raise it"
        )
    if sum(steps for steps, _ in sizes.warmup) >= train.steps > 0:
        warnings.append(
            f"train.batch_warmup lasts for all of train.steps {train.steps}, so train.batch is never used; shorten it"
        )
    return warnings


def cpu_flags() -> frozenset[str]:
    """Return the features of the CPU by Linux' names; empty if unknown."""
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", proc.read("cpuinfo"), re.MULTILINE)
    return frozenset(line[1].split()) if line else frozenset()
