"""Moments at which a training job can be made to die, and the job that dies there.

    python kill_points.py '{"kill": {...}, "folder": F}' TRAIN-ARGUMENTS...     trains, and dies at one moment
    python kill_points.py '{"folder": F}' TRAIN-ARGUMENTS...                    trains, and records its moments

The product knows nothing of this: its functions, and those of the system that it calls, are wrapped from outside, by
name, before the job begins. A name that is gone ends the job with a traceback instead of a kill.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SAVE = "mpitrain.checkpoint.store:write_checkpoint"
STEP = "mpitrain.data.dataset:Loader.__next__"
SIGNALS = ("SIGKILL", "SIGSEGV")
HOWS = (*SIGNALS, "exit", "_exit", "exception")
SAID = "as the kill campaign wants it"


def _path(args: Sequence[Any]) -> str:
    return str(args[0])


def _descriptor(args: Sequence[Any]) -> str:
    return os.readlink(f"/proc/self/fd/{args[0]}")


def _target(args: Sequence[Any]) -> str:
    return str(args[1])


@dataclass(frozen=True)
class Moment:
    """A moment of a job: calls of one function.

    Attributes:
        target: Function, as module:name.
        begins: Function whose calls begin a round, in which this moment's calls are counted; empty: one round only.
        of: Function that returns a path from the arguments.
        like: Pattern that the path must match for a call to count.
        who: Ranks that reach the moment: "every" rank, the "first" of the job, or the "owner" of a file.
    """

    name: str
    target: str
    begins: str = ""
    of: Callable[[Sequence[Any]], str] | None = None
    like: str = ""
    who: str = "every"
    ranks: int = 1  # fewest

    def counts(self, args: Sequence[Any]) -> bool:
        return self.of is None or re.search(self.like, self.of(args)) is not None


_PERFORMED = "mpitrain.comm.runtime.executor:Compiled.__call__"
_TEMPORARY = r"/step-\d+\.tmp-\w+"
_OWN = r"/(rank|node)-\d+\.h5$"

# in the order in which they come
COMMIT = (
    Moment("snapshot", "mpitrain.checkpoint.store:Snapshot.copy", "mpitrain.checkpoint.store:Snapshot.copy"),
    Moment("save", SAVE, SAVE),
    Moment("folder marked", "mpitrain.checkpoint.commit:begin_folder", SAVE, who="first"),
    Moment("temporary folder", "pathlib:Path.mkdir", SAVE, _path, _TEMPORARY + "$", "first"),
    Moment("own file begun", "mpitrain.checkpoint.commit:begin_file", SAVE, who="owner"),
    Moment("own file written", "mpitrain.checkpoint.commit:write_parts", SAVE),
    Moment("a piece written", "mpitrain.checkpoint.files:write_at", SAVE, _descriptor, _OWN),
    Moment("own file fsynced", "os:fsync", SAVE, _descriptor, _TEMPORARY + _OWN),
    Moment("ranks agree", "mpitrain.checkpoint.commit:quiet_min", SAVE),
    Moment("model.h5 written", "mpitrain.checkpoint.commit:write_durably", SAVE, _path, r"/model\.h5$", "first"),
    Moment("model.h5 fsynced", "os:fsync", SAVE, _descriptor, _TEMPORARY + r"/model\.h5$", "first"),
    Moment("manifest written", "mpitrain.checkpoint.commit:write_manifest", SAVE, who="first"),
    Moment("manifest fsynced", "os:fsync", SAVE, _descriptor, _TEMPORARY + r"/manifest\.json$", "first"),
    Moment("mark removed", "mpitrain.storage.disk:end_folder", SAVE, who="first"),
    Moment("folder fsynced", "os:fsync", SAVE, _descriptor, _TEMPORARY + "$", "first"),
    Moment("folder renamed", "os:rename", SAVE, _path, _TEMPORARY + "$", "first"),
    Moment("parent fsynced", "os:fsync", SAVE, _descriptor, "/checkpoints$", "first"),
    Moment("pointer written", "pathlib:Path.write_text", SAVE, _path, r"/latest\.tmp-\w+$", "first"),
    Moment("pointer moved", "os:replace", SAVE, _target, "/latest$", "first"),
)
# once there are more than are kept; the removal is a thread's
PRUNING = (
    Moment("old one hidden", "os:rename", SAVE, _path, r"/step-\d+$", "first"),
    Moment("old one removed", "mpitrain.checkpoint.folders:remove", SAVE, who="first"),
    Moment("a file removed", "os:unlink", SAVE, _path, r"\.(h5|json)$", "first"),
)
# once there is a damaged one of the same step
REPLACING = (Moment("damaged one replaced", "mpitrain.checkpoint.folders:discard", SAVE, who="first"),)
TRAINING = (
    Moment("batch", STEP, STEP),
    Moment("forward", "mpitrain.trainer.engine:Engine.forward", STEP),
    Moment("backward", "torch:Tensor.backward", STEP),
    Moment("all-reduce", _PERFORMED, STEP, ranks=2),
    Moment("optimizer step", "mpitrain.shard.update:optimizer_step", STEP),
    Moment("update", "mpitrain.shard.update:Updater.apply", STEP),
    Moment("agreement to stop", "mpitrain.trainer.trainer:Trainer._agree_to_stop", STEP),
    Moment("sample ids", "mpitrain.trainer.recording.records:gather_ids", STEP),
    Moment("metrics", "mpitrain.monitor.run_files:MetricsWriter.write", STEP, who="first"),
)
RESTORING = (
    Moment("lock", "mpitrain.trainer.folder:RunFolder._make_and_lock", who="first"),
    Moment("data opened", "mpitrain.trainer.trainer:open_data"),
    Moment("folders ready", "mpitrain.checkpoint.store:Store.prepare"),
    Moment("leftovers", "mpitrain.checkpoint.folders:remove_leftovers", who="first"),
    Moment("scan", "mpitrain.checkpoint.folders:finished_steps", who="first"),
    Moment("manifest read", "mpitrain.checkpoint.store:read_manifest"),
    Moment("reading planned", "mpitrain.checkpoint.store:plan"),
    Moment("checkpoint loaded", "mpitrain.checkpoint.store:Store.load"),
    Moment("a block read", "os:preadv", of=_descriptor, like=_OWN, who="first"),
    Moment("state taken over", "mpitrain.trainer.engine:Engine.finish_load"),
    Moment("restored", "mpitrain.trainer.trainer:Trainer.resume"),
    Moment("room asked for", "mpitrain.checkpoint.folders:require_room", who="first"),
    Moment("begun", "mpitrain.trainer.recording.console:Console.on_fit_start"),
    Moment("metrics cut", "mpitrain.monitor.run_files:_cut_after", who="first"),
)
ENDING = (
    Moment("evaluation", "mpitrain.trainer.trainer:Trainer.evaluate"),
    Moment("end", "mpitrain.trainer.recording.console:Console.on_fit_end"),
)
MOMENTS = {m.name: m for m in (*COMMIT, *PRUNING, *REPLACING, *TRAINING, *RESTORING, *ENDING)}


@dataclass(frozen=True)
class Kill:
    """Place and manner of a job's death: before, after or inside the count-th call in a round.

    Attributes:
        rank: Rank that must reach the call.
        victim: Rank that dies, which for a signal may be another one.
    """

    moment: str
    side: str
    round: int
    count: int
    rank: int
    victim: int
    how: str

    def __str__(self) -> str:
        where = f"{self.side} {self.moment}, round {self.round}, call {self.count} of rank {self.rank}"
        return f"{where}: rank {self.victim} by {self.how}"


def job_arguments(folder: Path, kill: Kill | None) -> list[str]:
    """Return the command of a job whose ranks write their notes into `folder`."""
    settings = {"folder": str(folder)} | ({"kill": asdict(kill)} if kill is not None else {})
    return [sys.executable, str(Path(__file__).resolve()), json.dumps(settings)]


def reached(folder: Path) -> Path:
    """Return the file in which a rank lists its mapped shared-memory files just before the kill."""
    return folder / "reached"


def notes(folder: Path, rank: int) -> Path:
    return folder / f"notes-{rank}"


def _find(target: str) -> tuple[Any, str]:
    """Return the module or class that contains a function, and the function's name in it."""
    module, _, path = target.partition(":")
    holder: Any = importlib.import_module(module)
    *inner, name = path.split(".")
    for part in inner:
        holder = getattr(holder, part)
    if not callable(getattr(holder, name)):
        raise TypeError(f"{target} is no function")
    return holder, name


Around = Callable[[Sequence[Any]], AbstractContextManager[None]]


def _wrap(target: str, around: Around) -> None:
    holder, name = _find(target)
    original = getattr(holder, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with around(args):
            return original(*args, **kwargs)

    setattr(holder, name, wrapped)
    if target == _PERFORMED:
        holder.calls = property(lambda self: (self,))  # so that what is repeated comes by as well


def _halve_programs(inside: Callable[[], None]) -> None:
    """Insert a call of `inside` into the middle of every collective's program."""
    holder, _ = _find(_PERFORMED)
    original = holder.__init__

    def init(self: Any, calls: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        calls = list(calls)
        if len(calls) > 1:
            calls.insert(len(calls) // 2, inside)
        original(self, calls, *args, **kwargs)

    holder.__init__ = init


class Killer:
    """Watcher that waits for the moment in this process, and kills there."""

    def __init__(self, kill: Kill, folder: Path, rank: int) -> None:
        self._kill, self._folder, self._rank = kill, folder, rank
        self._moment = MOMENTS[kill.moment]
        self._lock = threading.Lock()
        self._round = self._count = 0

    def install(self) -> None:
        moment = self._moment
        if self._rank != self._kill.rank:
            return
        if self._kill.side == "inside":
            _halve_programs(self._inside)
        else:
            _wrap(moment.target, self._around)
        if moment.begins:  # outside of the moment's own wrapper
            _wrap(moment.begins, self._begin)
        else:
            self._round = 1

    @contextmanager
    def _begin(self, args: Sequence[Any]) -> Iterator[None]:
        with self._lock:
            self._round, self._count = self._round + 1, 0
        yield

    def _is_it(self) -> bool:
        with self._lock:
            self._count += 1
            return (self._round, self._count) == (self._kill.round, self._kill.count)

    def _inside(self) -> None:
        if self._is_it():
            self._act()

    @contextmanager
    def _around(self, args: Sequence[Any]) -> Iterator[None]:
        now = self._moment.counts(args) and self._is_it()
        if now and self._kill.side == "before":
            self._act()
        yield
        if now and self._kill.side == "after":
            self._act()

    def _act(self) -> None:
        note = reached(self._folder)
        note.with_suffix(".tmp").write_text(json.dumps(_shared_files()))
        os.replace(note.with_suffix(".tmp"), note)
        how, victim = self._kill.how, self._kill.victim
        if how in SIGNALS:
            os.kill(int((self._folder / f"process-{victim}").read_text()), signal.Signals[how])
            if victim == self._rank:
                time.sleep(3600)
            return
        assert victim == self._rank
        if how == "_exit":
            os._exit(4)
        if how == "exit":
            sys.exit(3)
        raise RuntimeError(SAID)


def _shared_files() -> list[str]:
    """Return the named shared-memory files that this process has mapped."""
    paths = re.findall(r"/dev/shm/.*", Path("/proc/self/maps").read_text())
    return sorted({path for path in paths if not path.endswith("(deleted)")})


class Notes:
    """Record of the moments that a job passes, and of its file operations in the run folder."""

    def __init__(self, path: Path) -> None:
        self._notes = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._here = threading.local()

    def install(self) -> None:
        _wrap("os:fsync", self._fsync)
        for moment in MOMENTS.values():
            _wrap(moment.target, functools.partial(self._around, moment))
        sys.addaudithook(self._audit)

    @property
    def _stack(self) -> list[str]:
        if not hasattr(self._here, "stack"):
            self._here.stack = []
        return self._here.stack

    @contextmanager
    def _around(self, moment: Moment, args: Sequence[Any]) -> Iterator[None]:
        if not moment.counts(args):
            yield
            return
        self._write(moment=moment.name)
        self._stack.append(moment.name)
        try:
            yield
        finally:
            self._stack.pop()

    @contextmanager
    def _fsync(self, args: Sequence[Any]) -> Iterator[None]:
        self._act("fsync", _descriptor(args))
        yield

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            if isinstance(args[0], str) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                self._act("open", args[0])
        elif event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"):
            self._act(event, str(args[0]))

    def _act(self, act: str, path: str) -> None:
        self._write(act=act, path=path, inside=self._stack)

    def _write(self, **what: Any) -> None:
        if getattr(self._here, "writing", False):
            return
        self._here.writing = True
        os.write(self._notes, (json.dumps(what) + "\n").encode())
        self._here.writing = False


def main() -> int:
    settings = json.loads(sys.argv[1])
    sys.argv[1:2] = []
    folder = Path(settings["folder"])
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or 0)
    (folder / f"process-{rank}").write_text(str(os.getpid()))
    from mpitrain import train

    if "kill" in settings:
        Killer(Kill(**settings["kill"]), folder, rank).install()
    else:
        Notes(notes(folder, rank)).install()
    return train.main()


if __name__ == "__main__":
    sys.exit(main())
