"""Run folder of one job, which locks it: settings, logs and checkpoints.

`mpitrain.storage.run_folder` lists the files of the folder.
"""

from __future__ import annotations

import os
import shlex
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from mpitrain.comm import Communicator
from mpitrain.config.settings import Config
from mpitrain.config.toml_file import read_toml
from mpitrain.data.folders import agree_on_errors
from mpitrain.data.format import TOKENIZER
from mpitrain.errors import EXIT_INTERRUPTED, InputError, MpitrainError
from mpitrain.monitor import open_rank_log
from mpitrain.monitor.logs import buffer_rank_log
from mpitrain.storage import locks
from mpitrain.storage.disk import free_name, reporting, write_whole
from mpitrain.storage.run_folder import CHECKPOINTS, CONFIG, EVENTS, LOGS, rank_paths, report_unwritable

RUNS = Path("runs")  # parent of run folders whose name is not given
AGAIN = "MPITRAIN_AGAIN"  # command by which a script of jobs/ was called, if it started this process
_LOCK_TIMEOUT = 5.0  # seconds that the lock of a dead rank may remain


class Interrupted(MpitrainError):
    """Error that ends a run after the user pressed Ctrl-C."""

    exit_code = EXIT_INTERRUPTED


class RunFolder:
    """Run folder in use by this job; a context manager that locks it. Collective over `world`.

    If run.dir is not set, `make` creates the folder when training begins, so that a job that fails earlier leaves none.

    Attributes:
        path: The folder; chosen by `make` if run.dir is not set.
        config: The settings, with this path.
        log: Log of this rank; set in the `with` block.
        is_locked: True if the folder exists and is locked.
        step: Steps done, for messages at the end.
    """

    def __init__(self, config: Config, world: Communicator) -> None:
        self.world = world
        self.config = config
        self.path = Path(config.run.dir)
        self.step = 0
        self.is_locked = False
        self._unnamed = False  # true if this rank chose the folder's name
        self._lock: locks.Lock | None = None

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / CHECKPOINTS

    def __enter__(self) -> RunFolder:
        self.log = buffer_rank_log(self.world.rank)
        self.log.info("started: rank %d of %d, process %d", self.world.rank, self.world.size, os.getpid())
        if self.config.run.dir:
            self.make()
        return self

    def make(self) -> None:
        """Make and lock the folder, choosing its name if none is given, and open the log. Collective."""
        self.path = Path(self.world.on_root(self._begin))
        self.is_locked = True
        section = self.config.run.model_copy(update={"dir": str(self.path)})
        self.config = self.config.model_copy(update={"run": section})
        self.log = agree_on_errors(self.world, lambda: open_rank_log(self.path, self.world.rank))

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.release()
        refused = isinstance(error, (MpitrainError, KeyboardInterrupt))
        if refused and self._unnamed and not (self.path / CONFIG).exists():
            self._remove()
        if isinstance(error, KeyboardInterrupt):
            self.log.info("interrupted at step %d", self.step)
            if not self.is_locked:
                raise Interrupted("interrupted before training began") from None
            raise Interrupted(f"interrupted at step {self.step}; resume with: {self.resume_command()}") from None
        if error is not None:
            self.log.error("%s", "".join(traceback.format_exception(error)).rstrip())
        if isinstance(error, SystemExit):  # a plain exit would deadlock in MPI_Finalize: other ranks wait for this one
            where = f"; see the traceback in {self.path}/logs" if self.is_locked else ""
            raise MpitrainError(f"sys.exit({error.code!r}) was called after step {self.step}{where}") from None

    def move_to(self, world: Communicator) -> None:
        """Continue with the ranks that survived; the first of them takes over the lock. Collective."""
        self.world = world
        if world.rank:
            self.release()
        if self.is_locked:
            world.on_root(self._take_over_lock)

    def release(self) -> None:
        """Release the lock, if this rank has it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _begin(self) -> str:
        """Make and lock the folder, choosing its name if none is given, and return its path."""
        if not self.config.run.dir:
            job = os.environ.get("SLURM_JOB_ID") or os.environ.get("PBS_JOBID")
            self.path = RUNS / (f"job-{job}" if job else datetime.now().strftime("%Y%m%d-%H%M%S"))
            name, number = self.path.name, 1
            with self._convert_errors():
                RUNS.mkdir(exist_ok=True)
                while not _make_folder(self.path) and not job:  # a restarted job reuses its folder
                    number += 1
                    self.path = RUNS / f"{name}-{number}"
            self._unnamed = True
        self._make_and_lock()
        return str(self.path)

    def _remove(self) -> None:
        """Remove the folder of a run that never began, unless it has files that this job did not write."""
        for path in (self.path / locks.LOCK, self.path / EVENTS, *rank_paths(self.path / LOGS, "log")):
            path.unlink(missing_ok=True)
        for folder in (self.path / LOGS, self.checkpoints, self.path):
            with suppress(OSError):
                folder.rmdir()

    def _make_and_lock(self) -> None:
        """Make the folder and lock it."""
        with self._convert_errors():
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = locks.take(self.path / locks.LOCK)

    @contextmanager
    def _convert_errors(self) -> Iterator[None]:
        """Raise InputError if the folder cannot be made, or another job uses it."""
        try:
            with reporting(f"run folder {self.path} cannot be used", "choose another run.dir"):
                yield
        except locks.LockHeld:
            raise InputError(f"run folder {self.path} is in use by another job; choose another run.dir") from None

    def _take_over_lock(self) -> None:
        """Take over the lock of a rank that died; it may take a moment until the lock is free."""
        deadline = time.monotonic() + _LOCK_TIMEOUT
        while self._lock is None:
            try:
                self._make_and_lock()
            except InputError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def write_config(self, config: Config) -> None:
        """Write the resolved settings; an existing file with other contents is renamed to a free name."""
        path, text = self.path / CONFIG, config.to_toml()
        with report_unwritable(str(path)):
            if os.path.lexists(path) and not _is_resolved(path):
                os.rename(path, free_name(path))
            write_whole(path, text)

    def keep_tokenizer(self, source: Path | None) -> None:
        """Copy the data's tokenizer into the folder atomically; a different existing one is renamed to a free name."""
        if source is None:
            return
        path = self.path / TOKENIZER
        with report_unwritable(str(path)):
            text = source.read_bytes()
            if path.is_file() and path.read_bytes() == text:
                return
            if os.path.lexists(path):
                os.rename(path, free_name(path))
            write_whole(path, text)

    def resume_command(self) -> str:
        """Return the command that resumes the run, or extends it if all steps are done."""
        train, more = self.config.train, ""
        if self.step >= train.steps:
            more = f" --train.epochs {2 * train.epochs:g}" if train.epochs else f" --train.steps {2 * train.steps}"
        settings = f"{shlex.quote(str(self.path / CONFIG))}{more}"
        if AGAIN in os.environ:
            return f"{os.environ[AGAIN]} {settings}"
        under_slurm = "SLURM_STEP_ID" in os.environ and "OMPI_COMM_WORLD_SIZE" not in os.environ
        launcher = "srun" if under_slurm else f"mpirun -n {self.world.size}"
        return f"{launcher} python -m mpitrain.train {settings}"


def _make_folder(path: Path) -> bool:
    """Make a folder; return False if the path exists already."""
    try:
        path.mkdir()
    except FileExistsError:
        return False
    return True


def _is_resolved(path: Path) -> bool:
    """Return whether `Config.to_toml` wrote this file of settings and nobody has changed it."""
    try:
        text = path.read_text(encoding="utf-8")
        return not path.is_symlink() and Config.from_dict(read_toml(str(path))).to_toml() == text
    except (OSError, UnicodeDecodeError, InputError):
        return False
