"""Parts shared by the commands on trained models: the job (one process without MPI, or all ranks), and output files.

An output file gets its name only when it is complete, and never replaces an existing file.
"""

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
    """Ranks that a command runs on.

    Attributes:
        mesh: Mesh of the ranks; None for a single process, which does not start MPI.
    """

    mesh: Mesh | None = None

    @property
    def first(self) -> bool:
        """True on the rank that prints and writes files."""
        return self.mesh is None or self.mesh.world.rank == 0

    @property
    def columns(self) -> int:
        """Number of ranks along the data axis, each of which has a copy of the model."""
        return 1 if self.mesh is None else self.mesh.readers.size

    @property
    def column(self) -> int:
        """This rank's number along the data axis."""
        return 0 if self.mesh is None else self.mesh.readers.rank

    def on_root(self, make: Callable[[], Any]) -> Any:
        """Call a function on the first rank, and return its result, a JSON value, on all ranks. Collective."""
        return make() if self.mesh is None else self.mesh.world.on_root(make)

    def run_agreed(self, make: Callable[[], T]) -> T:
        """Call a function on each rank, and return this rank's result. Collective.

        An error on one rank is raised on all ranks.
        """
        if self.mesh is None:
            return make()
        from mpitrain.data.folders import agree_on_errors

        return agree_on_errors(self.mesh.world, make)

    def first_complete(self, path: Path, load: Callable[[Path], T], *, best: bool) -> T:
        """Load the newest whole checkpoint of a run. Collective.

        Args:
            path: Folder of a run or of a checkpoint.
            load: Function that loads a checkpoint folder; collective.
            best: If true, take the checkpoint kept by checkpoint.best instead of the newest.

        Returns:
            The result of `load`.
        """
        from mpitrain.loading import candidates, first_complete

        folders = self.on_root(lambda: [str(folder) for folder in candidates(path, best=best)])
        return first_complete([Path(folder) for folder in folders], load, self.print_message)

    def gather(self, items: list[Any]) -> list[Any]:
        """Return the items of all ranks along the data axis, on the first of them. Collective."""
        if self.mesh is None:
            return items
        return [item for of_rank in self.mesh.readers.gather_objects(items) for item in of_rank]

    def gather_rows(self, local_rows: Array) -> Array:
        """Concatenate the rows of all ranks along the data axis, in rank order. Collective."""
        if self.mesh is None:
            return local_rows
        counts = self.mesh.readers.all_gather_object(len(local_rows))
        everything = np.empty((sum(counts), local_rows.shape[1]), local_rows.dtype)
        sizes = [count * local_rows.shape[1] for count in counts]
        self.mesh.readers.all_gather(everything.reshape(-1), np.ascontiguousarray(local_rows).reshape(-1), counts=sizes)
        return everything

    def device(self, kind: str) -> torch.device:
        """Return the device that this rank computes on. Collective.

        Args:
            kind: Kind of device, as in `run.device`.
        """
        if self.mesh is None:
            from mpitrain.comm.memory import device

            return device.of_rank(kind, 0)
        from mpitrain.trainer.device import choose_device

        return choose_device(kind, self.mesh.world)[0]

    def print_message(self, text: str) -> None:
        """Print a message to standard error, on the first rank only."""
        if self.first:
            print(f"mpitrain: {printable(text, None)}", file=sys.stderr, flush=True)


def add_run(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of every command on a trained model."""
    add = parser.add_argument
    add("--version", action="version", version=VERSION)
    add("run", type=Path, metavar="RUN", help="run folder (its newest complete checkpoint), or a checkpoint")
    add("--best", action="store_true", help="use the checkpoint kept by checkpoint.best [the newest]")
    add_trust(parser)
    add("--run.device", dest="device", default="auto", metavar="KIND", help="device to compute on [auto]")


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Declare --trust, for every command that builds the model of a run."""
    parser.add_argument("--trust", action="store_true", help="allow the run to execute code from its own folder")


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. With several ranks, only the first one prints errors and help.

    Args:
        parser: Parser of the command.
        argv: Arguments; None to use `sys.argv`.
    """
    with ExitStack() as stack:
        if launched_rank() > 0:
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        return parser.parse_args(argv)


def run_as_job(act: Callable[[Job], int], *, pipeline: int = 1, tensor: int = 1) -> int:
    """Run a command on all ranks that were started, and return its exit code.

    Args:
        act: Function that runs the command on a job and returns the exit code.
        pipeline: Number of ranks that share a model as stages; default 1.
        tensor: Number of ranks that share each layer; default 1.
    """
    if not is_due() and pipeline == tensor == 1:
        return exit_code_of(lambda: act(Job()))
    from mpitrain.comm import init
    from mpitrain.layout.mesh import Mesh

    return act(Job(Mesh.make(init(), pipeline=pipeline, tensor=tensor)))


def require_new(path: Path) -> None:
    """Raise InputError if a new file cannot be created at this path."""
    if os.path.lexists(path):
        raise InputError(f"--out {path} exists already; use another name, or remove it")
    if not path.parent.is_dir():
        raise InputError(f"--out {path}: there is no folder {path.parent}; make it, or use another name")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, and rename it to `path` if no error occurs; otherwise remove it.

    Raises:
        InputError: The file exists already, its folder does not exist, or it cannot be written.
    """
    require_new(path)
    with reporting(f"--out {path} cannot be written", "free some space, or use another name"), replacing(path) as aside:
        yield aside
        require_new(path)


def json_lines(path: Path | None, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object a line to a new file or to standard output.

    Args:
        path: File to create; None for standard output.
        lines: Objects to write.
    """
    if path is None:
        for line in lines:
            print(json.dumps(line), file=sys.stdout, flush=True)
        return
    with whole_file(path) as aside, open(aside, "x", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
