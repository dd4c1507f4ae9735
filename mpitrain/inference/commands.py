"""What the commands on trained models have in common: one process without MPI, or all ranks of a job; and files that a
command writes: whole, under a name of their own until then, and never in the place of another."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from mpitrain.comm.job.arrival import is_due, launched_rank
from mpitrain.early import VERSION
from mpitrain.errors import InputError, exit_code_of, printable
from mpitrain.storage.disk import replacing, reporting

if TYPE_CHECKING:
    import torch

    from mpitrain.layout.mesh import Mesh

T = TypeVar("T")
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Job:
    """The ranks that a command runs on. mesh: theirs; None for one process, which starts no MPI."""

    mesh: Mesh | None = None

    @property
    def first(self) -> bool:
        """Whether this rank speaks and writes."""
        return self.mesh is None or self.mesh.world.rank == 0

    @property
    def columns(self) -> int:
        """How often the job has the model: ranks along the data axis."""
        return 1 if self.mesh is None else self.mesh.readers.size

    @property
    def column(self) -> int:
        """This rank's number along the data axis."""
        return 0 if self.mesh is None else self.mesh.readers.rank

    def decided(self, make: Callable[[], Any]) -> Any:
        """What the first rank makes, a value that JSON can hold, on all ranks. Collective."""
        return make() if self.mesh is None else self.mesh.world.on_root(make)

    def agreed(self, make: Callable[[], T]) -> T:
        """What each rank makes; an error of one of them is raised on all. Collective."""
        if self.mesh is None:
            return make()
        from mpitrain.trainer.folder import together

        return together(self.mesh.world, make)

    def first_whole(self, path: Path, load: Callable[[Path], T], *, best: bool) -> T:
        """Return what `load` makes of the newest whole checkpoint that a path means. Collective.

        Args:
            path: A run's folder, or a checkpoint's.
            load: Loads a checkpoint; collective.
            best: Take the checkpoint that checkpoint.best keeps.
        """
        from mpitrain.loading import candidates, first_whole

        folders = self.decided(lambda: [str(folder) for folder in candidates(path, best=best)])
        return first_whole([Path(folder) for folder in folders], load, self.say)

    def gathered(self, items: list[Any]) -> list[Any]:
        """The items of all ranks that differ along the data axis, on the first of them. Collective."""
        if self.mesh is None:
            return items
        return [item for of_rank in self.mesh.readers.gather_objects(items) for item in of_rank]

    def rows(self, own: Array) -> Array:
        """The rows of all ranks along the data axis, one rank's after the other's; whole on the first. Collective."""
        if self.mesh is None:
            return own
        counts = self.mesh.readers.all_gather_object(len(own))
        everything = np.empty((sum(counts), own.shape[1]), own.dtype)
        sizes = [count * own.shape[1] for count in counts]
        self.mesh.readers.all_gather(everything.reshape(-1), np.ascontiguousarray(own).reshape(-1), counts=sizes)
        return everything

    def device(self, kind: str) -> torch.device:
        """What this rank computes on. kind: as `run.device` says it. Collective."""
        if self.mesh is None:
            from mpitrain.comm.memory import device

            return device.of_rank(kind, 0)
        from mpitrain.trainer.device import choose

        return choose(kind, self.mesh.world)[0]

    def say(self, text: str) -> None:
        """Tell the person something on standard error, once."""
        if self.first:
            print(f"mpitrain: {printable(text, None)}", file=sys.stderr, flush=True)


def add_run(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that every command on a trained model takes."""
    add = parser.add_argument
    add("--version", action="version", version=VERSION)
    add("run", type=Path, metavar="RUN", help="a run folder (its newest whole checkpoint), or a checkpoint")
    add("--best", action="store_true", help="the checkpoint that checkpoint.best keeps [the newest]")
    add_trust(parser)
    add("--run.device", dest="device", default="auto", metavar="KIND", help="what to compute on [auto]")


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Declare --trust, which every command takes that builds the model of a run."""
    parser.add_argument("--trust", action="store_true", help="run code that lies in the run's folder, as the run asks")


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; of several ranks the first one alone says what is wrong with it."""
    with ExitStack() as stack:
        if launched_rank() > 0:
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        return parser.parse_args(argv)


def run_as_job(act: Callable[[Job], int], *, pipeline: int = 1, tensor: int = 1) -> int:
    """Do what a command does, on all ranks that were started; returns its exit code.

    Args:
        act: Does it.
        pipeline: Ranks that share a model as stages.
        tensor: Ranks that share its layers.
    """
    if not is_due() and pipeline == tensor == 1:
        return exit_code_of(lambda: act(Job()))
    from mpitrain.comm import init
    from mpitrain.layout.mesh import Mesh

    return act(Job(Mesh.make(init(), pipeline=pipeline, tensor=tensor)))


def require_new(path: Path) -> None:
    """Raise InputError where a file cannot be made under this name."""
    if os.path.lexists(path):
        raise InputError(f"--out {path} exists already; give another name, or remove it")
    if not path.parent.is_dir():
        raise InputError(f"--out {path}: there is no folder {path.parent}; make it, or give another name")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name to write a file under, which gets its own when all went well inside, and is removed otherwise."""
    require_new(path)
    with reporting(f"--out {path} cannot be written", "make room, or give another name"), replacing(path) as aside:
        yield aside
        require_new(path)


def json_lines(path: Path | None, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object a line into a new file, or else to standard output."""
    if path is None:
        for line in lines:
            print(json.dumps(line), file=sys.stdout, flush=True)
        return
    with whole_file(path) as aside, open(aside, "x", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
