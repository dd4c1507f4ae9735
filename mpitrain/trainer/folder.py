"""The folder of a run: held by one job at a time, with its settings, its logs and its checkpoints.

What is in it says mpitrain.storage.run_folder.
"""

from __future__ import annotations

import os
import shlex
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from mpitrain.comm import Communicator
from mpitrain.config.settings import Config
from mpitrain.config.toml_file import read_toml
from mpitrain.data.format import TOKENIZER
from mpitrain.errors import EXIT_INTERRUPTED, InputError, MpitrainError
from mpitrain.monitor import open_rank_log
from mpitrain.monitor.logs import keep_rank_log
from mpitrain.storage import locks
from mpitrain.storage.disk import free_name, reporting, write_whole
from mpitrain.storage.run_folder import CHECKPOINTS, CONFIG, EVENTS, LOGS, rank_paths, writing

RUNS = Path("runs")  # where folders without a name of their own are made
AGAIN = "MPITRAIN_AGAIN"  # what a script of jobs/ was called by, if it started this
_DYING = 5.0  # seconds
T = TypeVar("T")


class Interrupted(MpitrainError):
    """Somebody pressed Ctrl-C."""

    exit_code = EXIT_INTERRUPTED


def together(world: Communicator, act: Callable[[], T]) -> T:
    """Return what `act` returns on this rank; raise on all a deliberate error that it raises on any. Collective."""
    try:
        value = act()
    except MpitrainError as error:
        world.agree(error)
        raise
    world.agree(None)
    return value


class RunFolder:
    """One job's work in its run folder. Collective over `world`; use it in `with`.

    Without run.dir the folder is made when training begins, by `make`: a job that is refused before leaves none.

    path: of the folder; without run.dir it is chosen by `make`. config: the settings, with that path. log: this rank's,
    inside of the `with`. made: whether the folder is there. step: steps done, which its last words name.
    """

    def __init__(self, config: Config, world: Communicator) -> None:
        self.world = world
        self.config = config
        self.path = Path(config.run.dir)
        self.step = 0
        self.made = False
        self._unnamed = False  # whether this rank chose the folder's name
        self._lock: locks.Lock | None = None

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / CHECKPOINTS

    def __enter__(self) -> RunFolder:
        self.log = keep_rank_log(self.world.rank)
        self.log.info("started: rank %d of %d, process %d", self.world.rank, self.world.size, os.getpid())
        if self.config.run.dir:
            self.make()
        return self

    def make(self) -> None:
        """Choose a name where none is given, make the folder, take its lock, and open the log. Collective."""
        self.path = Path(self.world.on_root(self._begin))
        self.made = True
        section = self.config.run.model_copy(update={"dir": str(self.path)})
        self.config = self.config.model_copy(update={"run": section})
        self.log = together(self.world, lambda: open_rank_log(self.path, self.world.rank))

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.release()
        refused = isinstance(error, (MpitrainError, KeyboardInterrupt))
        if refused and self._unnamed and not (self.path / CONFIG).exists():
            self._remove()
        if isinstance(error, KeyboardInterrupt):
            self.log.info("interrupted at step %d", self.step)
            if not self.made:
                raise Interrupted("interrupted before training began") from None
            raise Interrupted(f"interrupted at step {self.step}; go on with: {self.resume_command()}") from None
        if error is not None:
            self.log.error("%s", "".join(traceback.format_exception(error)).rstrip())
        if isinstance(error, SystemExit):  # Python would wait in MPI_Finalize for ranks that wait for this one
            where = f"; {self.path}/logs says where" if self.made else ""
            raise MpitrainError(f"left by sys.exit({error.code!r}) after step {self.step}{where}") from None

    def move_to(self, world: Communicator) -> None:
        """Go on with the ranks of a world that lost some, the first of which takes the lock over. Collective."""
        self.world = world
        if world.rank:
            self.release()
        if self.made:
            world.on_root(self._inherit)

    def release(self) -> None:
        """Give the lock back, where this rank has it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _begin(self) -> str:
        """Choose a name where none is given, make the folder and take its lock."""
        if not self.config.run.dir:
            job = os.environ.get("SLURM_JOB_ID") or os.environ.get("PBS_JOBID")
            self.path = RUNS / (f"job-{job}" if job else datetime.now().strftime("%Y%m%d-%H%M%S"))
            name, number = self.path.name, 1
            with self._usable():
                RUNS.mkdir(exist_ok=True)
                while not _made(self.path) and not job:  # a job comes back to its folder
                    number += 1
                    self.path = RUNS / f"{name}-{number}"
            self._unnamed = True
        self._occupy()
        return str(self.path)

    def _remove(self) -> None:
        """Remove the folder of a run that never began; it stays where anything is in it that did not come from here."""
        for path in (self.path / locks.LOCK, self.path / EVENTS, *rank_paths(self.path / LOGS, "log")):
            path.unlink(missing_ok=True)
        for folder in (self.path / LOGS, self.checkpoints, self.path):
            with suppress(OSError):
                folder.rmdir()

    def _occupy(self) -> None:
        """Make the folder and take its lock."""
        with self._usable():
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = locks.take(self.path / locks.LOCK)

    @contextmanager
    def _usable(self) -> Iterator[None]:
        """Raise InputError where the folder cannot be made, or has another job in it."""
        try:
            with reporting(f"run folder {self.path} cannot be used", "choose another run.dir"):
                yield
        except locks.LockHeld:
            raise InputError(f"run folder {self.path} is in use by another job; choose another run.dir") from None

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

    def write_config(self, config: Config) -> None:
        """Write the resolved settings; a file with anything else in it than such settings is kept under a free name."""
        path, text = self.path / CONFIG, config.to_toml()
        with writing(str(path)):
            if os.path.lexists(path) and not _is_resolved(path):
                os.rename(path, free_name(path))
            write_whole(path, text)

    def keep_tokenizer(self, source: Path | None) -> None:
        """Copy the data's tokenizer, whole or not at all; another one that is there is kept under a free name."""
        if source is None:
            return
        path = self.path / TOKENIZER
        with writing(str(path)):
            text = source.read_bytes()
            if path.is_file() and path.read_bytes() == text:
                return
            if os.path.lexists(path):
                os.rename(path, free_name(path))
            write_whole(path, text)

    def resume_command(self) -> str:
        """Return the command with which the run goes on, or goes on for longer."""
        train, more = self.config.train, ""
        if self.step >= train.steps:
            more = f" --train.epochs {2 * train.epochs:g}" if train.epochs else f" --train.steps {2 * train.steps}"
        settings = f"{shlex.quote(str(self.path / CONFIG))}{more}"
        if AGAIN in os.environ:
            return f"{os.environ[AGAIN]} {settings}"
        under_slurm = "SLURM_STEP_ID" in os.environ and "OMPI_COMM_WORLD_SIZE" not in os.environ
        launcher = "srun" if under_slurm else f"mpirun -n {self.world.size}"
        return f"{launcher} python -m mpitrain.train {settings}"


def _made(path: Path) -> bool:
    """Make a folder; return False where something has its name already."""
    try:
        path.mkdir()
    except FileExistsError:
        return False
    return True


def _is_resolved(path: Path) -> bool:
    """Return whether a file of settings is one that `Config.to_toml` wrote, and nobody has changed."""
    try:
        text = path.read_text(encoding="utf-8")
        return not path.is_symlink() and Config.from_dict(read_toml(str(path))).to_toml() == text
    except (OSError, UnicodeDecodeError, InputError):
        return False
