"""A run as a person meets it: its folder, its logs, what is printed, how it is asked to stop.

RUN/config.toml            resolved configuration
RUN/metrics.jsonl          one line a step, from rank 0
RUN/checkpoints/           see mpitrain.checkpoint
RUN/logs/rank-00003.log    what each rank has to say
RUN/lock                   held while a job works in the folder
"""

from __future__ import annotations

import os
import time
import traceback
from dataclasses import asdict
from datetime import datetime
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from mpitrain.comm import Communicator
from mpitrain.config.settings import Config, read_toml
from mpitrain.data import Dataset, open_dataset, read_manifest, resolve, stage_on_nodes, staged_folder
from mpitrain.errors import EXIT_INTERRUPTED, InputError, MpitrainError
from mpitrain.monitor import (
    MetricsWriter,
    Outcome,
    Progress,
    RunFacts,
    banner,
    closing,
    open_rank_log,
    peak_memory_bytes,
)
from mpitrain.storage import locks
from mpitrain.storage.disk import free_name, reason
from mpitrain.trainer.engine import StepResult
from mpitrain.trainer.fruitless import Fruitless
from mpitrain.trainer.memory import MemoryAccount
from mpitrain.trainer.stopping import Stopping

CONFIG, CHECKPOINTS = "config.toml", "checkpoints"
_DYING = 5.0  # seconds


class Interrupted(MpitrainError):
    """Somebody pressed Ctrl-C."""

    exit_code = EXIT_INTERRUPTED


def settled(config: Config) -> Config:
    """The configuration with its run folder decided."""
    if config.run.dir:
        return config
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("PBS_JOBID")
    name = f"job-{job}" if job else datetime.now().strftime("%Y%m%d-%H%M%S")
    section = config.run.model_copy(update={"dir": str(Path("runs") / name)})
    return config.model_copy(update={"run": section})


class Run:
    """One job's work in its run folder. Collective; use it in `with`."""

    def __init__(self, config: Config, world: Communicator) -> None:
        self.config, self.world = config, world
        self.folder = Path(config.run.dir)
        self.checkpoints = self.folder / CHECKPOINTS
        self.resumed_step: int | None = None
        self._lock: locks.Lock | None = None
        self._progress: Progress | None = None
        self._metrics: MetricsWriter | None = None
        self._began = time.monotonic()
        self.start_step = 0
        self._begun = False
        self._step = 0
        self._tokens = 0
        self._skipped = 0  # steps

    def __enter__(self) -> Run:
        self.world.on_root(self._occupy)
        error: BaseException | None = None
        try:
            self.log = open_rank_log(self.folder, self.world.rank)
        except InputError as caught:
            error = caught
        self.world.agree(error)
        self.log.info("started: rank %d of %d, process %d", self.world.rank, self.world.size, os.getpid())
        watches = self.world.rank == 0
        self.stopping = Stopping(self.folder, watches=watches, margin=self.config.run.stop_before)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_records()
        self.stopping.close()
        self._release()
        if isinstance(error, KeyboardInterrupt):
            self.log.info("interrupted at step %d", self._step)
            raise Interrupted(f"interrupted at step {self._step}; go on with: {self._resume_command()}") from None
        if error is not None:
            self.log.error("%s", "".join(traceback.format_exception(error)).rstrip())
        if isinstance(error, SystemExit):  # Python would wait in MPI_Finalize for ranks that wait for this one
            raise MpitrainError(
                f"left by sys.exit({error.code!r}) after step {self._step}; {self.folder}/logs says where"
            ) from None

    def _occupy(self) -> None:
        """Make the folder and take its lock."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = locks.take(self.folder / locks.LOCK)
        except locks.Held:
            raise InputError(f"run folder {self.folder} is in use by another job; choose another run.dir") from None
        except OSError as error:
            raise InputError(
                f"run folder {self.folder} cannot be used: {reason(error)}; choose another run.dir"
            ) from None

    def _inherit(self) -> None:
        """Take the lock over from a rank that died, which may take a moment to be gone."""
        deadline = time.monotonic() + _DYING
        while self._lock is None:
            try:
                self._occupy()
            except InputError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def open_data(self) -> tuple[Dataset, Dataset | None]:
        """The training and the held-out samples; what is not there yet is made once per node."""
        path, sequence = self.config.data.path, self.config.model.sequence
        error: BaseException | None = None
        try:
            if self.world.local_rank == 0:
                resolve(path)
        except InputError as caught:
            error = caught
        self.world.agree(error)
        stage = self.config.data.stage
        if stage:
            stage_on_nodes(self.world, path, Path(stage))
        data, held_out = None, None
        try:
            folder = staged_folder(resolve(path), Path(stage)) if stage else resolve(path)
            data = open_dataset(folder, sequence=sequence)
            if "held_out" in read_manifest(folder).splits:
                held_out = open_dataset(folder, "held_out", sequence=sequence)
            if len(data) < self.config.train.batch:
                raise InputError(
                    f"data set {folder} has {len(data)} samples, fewer than train.batch {self.config.train.batch}; "
                    "give more data or a smaller train.batch"
                )
        except InputError as caught:
            error = caught
        self.world.agree(error)
        assert data is not None
        self._tokens = data.description.x_shape[0] if data.description.kind == "tokens" else 0
        return data, held_out

    def say(self, text: str) -> None:
        """A line for people, from rank 0."""
        self.log.info("%s", text)
        if self.world.rank == 0:
            if self._progress is not None:
                self._progress.say(text)
            else:
                print(text, flush=True)

    def begin(self, parameters: int, data: Dataset, held_out: Dataset | None, step: int) -> None:
        """Print the banner and open what is written during training; that alone after `move_to`."""
        if self._begun:
            self._step = self.resumed_step = step
            if self.world.rank == 0:
                self._open_records(step)
            return
        self.start_step = self._step = step
        self._begun = True
        if self.world.rank:
            return
        config = self.config
        columns = self.world.size // (config.parallel.pipeline * config.parallel.tensor)  # data-parallel ranks
        share = -(-config.train.batch // columns)
        facts = RunFacts(
            version=_version(),
            ranks=self.world.size,
            nodes=self.world.num_nodes,
            threads=torch.get_num_threads(),
            device="CPU",
            mpi=self.world.library,
            model=config.model.factory or config.model.name,
            parameters=parameters,
            data=config.data.path or "Python's own source as bytes (data.path is not set)",
            samples=len(data),
            held_out_samples=len(held_out) if held_out is not None else 0,
            tokens=self._tokens,
            batch=config.train.batch,
            microbatch=min(config.train.microbatch or share, share),
            steps=config.train.steps,
            start_step=step,
            precision=config.train.precision,
            run_dir=str(self.folder),
            notes=tuple((("parallel", text),) if (text := parallel_text(config, self.world.size)) else ()),
        )
        print(banner(facts), flush=True)
        self._write_config()
        self._open_records(step)

    def _write_config(self) -> None:
        """Write the resolved settings; a file with anything else in it than such settings is kept under a free name."""
        path, text = self.folder / CONFIG, self.config.to_toml()
        try:
            if os.path.lexists(path) and not _is_resolved(path):
                os.rename(path, free_name(path))
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"{path} cannot be written: {reason(error)}; make room, or choose another run.dir"
            ) from None

    def _open_records(self, step: int) -> None:
        """Open what is written during training, from `step` on."""
        self._close_records()
        self._metrics = MetricsWriter(self.folder, self.resumed_step, self.config.monitor.tensorboard)
        unit = "tokens" if self._tokens else "samples"
        self._progress = Progress(self.config.train.steps, step, self.config.monitor.every, unit=unit)

    def _close_records(self) -> None:
        if self._progress is not None:
            self._progress.close()
        if self._metrics is not None:
            self._metrics.close()
        self._progress = self._metrics = None

    def move_to(self, world: Communicator) -> None:
        """Go on with the ranks of a world that lost some. Collective over it."""
        self.world = world
        self._close_records()
        if world.rank == 0:
            self.stopping.watch()
        else:
            self._release()
        world.on_root(self._inherit)

    def stand_by(self) -> None:
        """Leave the folder to the ranks that go on without this one."""
        self._close_records()
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def report(
        self,
        step: int,
        loss: float,
        held_out_loss: float | None,
        lr: float,
        result: StepResult,
        seconds: float,
        ids: list[int] | None,
        memory: MemoryAccount | None,
        recovered: float | None = None,
    ) -> None:
        """Record a finished step. ids: of all samples in it, in order, or None. memory: by category, once.

        recovered: seconds since ranks failed, in the first step without them.
        """
        self._step = step
        self._skipped += result.skipped
        if self._metrics is None or self._progress is None:
            return
        batch = self.config.train.batch
        rate = batch * (self._tokens or 1) / seconds
        extras: dict[str, Any] = {} if held_out_loss is None else {"held_out_loss": held_out_loss}
        if ids is not None:
            extras["ids"] = ids
        if result.skipped:
            extras["skipped"] = True
        if memory is not None:
            extras["memory"] = asdict(memory)
        if recovered is not None:
            extras["recovered_s"] = recovered
        self._metrics.write(
            step=step,
            loss=loss,
            lr=lr,
            grad_norm=result.norm,
            samples=batch,
            tokens=batch * self._tokens,
            step_s=seconds,
            tokens_per_s=batch * self._tokens / seconds,
            memory_bytes=peak_memory_bytes(),
            world_size=self.world.size,
            **extras,
        )
        self._progress.update(step, loss, lr, rate, self._skipped)
        if held_out_loss is not None:
            self.say(f"step {step}: held-out loss {held_out_loss:.4f}")

    def end(self, step: int, loss: float, held_out_loss: float | None, fruitless: Fruitless) -> None:
        """Print how it ended. Collective."""
        memory = torch.tensor([peak_memory_bytes()])
        self.world.all_reduce(memory, "max")
        self.log.info("ended at step %d", step)
        if self.world.rank:
            return
        if self._progress is not None:
            self._progress.close()
        stopped = step < self.config.train.steps
        commands = [("resume" if stopped else "go on", self._resume_command())] if stopped or not fruitless.bad else []
        commands.append(("inspect", f"python -m mpitrain.report {self.folder}"))
        outcome = Outcome(
            step=step,
            steps=self.config.train.steps,
            start_step=self.start_step,
            loss=loss,
            held_out_loss=held_out_loss,
            skipped=self._skipped,
            fruitless_since=fruitless.since if fruitless.bad else 0,
            seconds=time.monotonic() - self._began,
            samples_done=(step - self.start_step) * self.config.train.batch,
            tokens=self._tokens,
            peak_memory_bytes=int(memory),
            run_dir=str(self.folder),
            commands=tuple(commands),
        )
        print(closing(outcome), flush=True)

    def _resume_command(self) -> str:
        under_slurm = "SLURM_STEP_ID" in os.environ and "OMPI_COMM_WORLD_SIZE" not in os.environ
        launcher = "srun" if under_slurm else f"mpirun -n {self.world.size}"
        more = "" if self._step < self.config.train.steps else f" --train.steps {2 * self.config.train.steps}"
        return f"{launcher} python -m mpitrain.train {self.folder / CONFIG}{more}"


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


def set_threads(world: Communicator, reproducible: bool) -> None:
    """A thread for each core that this rank has for itself, unless OMP_NUM_THREADS says otherwise."""
    if "OMP_NUM_THREADS" in os.environ:
        return
    torch.set_num_threads(1 if reproducible else world.process.cores.each)


def refuse_what_is_not_there_yet(config: Config) -> None:
    """Raise InputError for keys whose rooms are still being built."""
    wanted = {
        "monitor.timeline": config.monitor.timeline,
    }
    asked = [key for key, value in wanted.items() if value]
    if asked:
        raise InputError(f"{', '.join(asked)}: not available in this version; leave it at its default", agreed=True)


def _is_resolved(path: Path) -> bool:
    """Whether a file of settings is one that `Config.to_toml` wrote, and nobody has changed."""
    try:
        text = path.read_text(encoding="utf-8")
        return not path.is_symlink() and Config.from_dict(read_toml(str(path))).to_toml() == text
    except (OSError, UnicodeDecodeError, InputError):
        return False


def _version() -> str:
    try:
        return metadata.version("mpitrain")
    except metadata.PackageNotFoundError:
        return "(not installed)"
