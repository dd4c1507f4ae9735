"""Run folder of a script: its options, a line for each training step, and events, for `python -m mpitrain.report`."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_flatten
from torch.utils.data import dataloader

from mpitrain import __version__
from mpitrain.errors import printable
from mpitrain.monitor.run_files import EventLog, MetricsWriter, read_events
from mpitrain.run.session import ScriptRun
from mpitrain.storage.disk import reporting, write_whole
from mpitrain.storage.run_folder import CONFIG


class ScriptRecord:
    """Writer of the files of a run folder, which rank 0 writes. `install` notes losses and batches from then on.

    Attributes:
        optimizer: Optimizer that took the last step.

    Args:
        session: Run of the script.
        folder: Run folder.
    """

    def __init__(self, session: ScriptRun, folder: Path) -> None:
        self.optimizer: torch.optim.Optimizer | None = None
        self.folder = folder
        self._session = session
        self._metrics: MetricsWriter | None = None
        self._events: EventLog | None = None
        self._loss: torch.Tensor | None = None
        self._samples = 0
        self._began = 0.0

    def has_ended(self) -> bool:
        """Return whether the script has come to its end in this run folder. Collective."""

        def look() -> bool:
            events = read_events(self.folder)
            return bool(events) and events[-1]["event"] == "end" and events[-1].get("outcome") == "done"

        return bool(self._session.world.on_root(look))

    def begin(self, step: int, words: list[str], options: dict[str, dict[str, Any]]) -> None:
        """Write the start of a job. Collective.

        Args:
            step: Training steps that were done before.
            words: Path of the script, and its arguments.
            options: Options of this command, by section.
        """

        def make() -> None:
            with reporting(f"run folder {self.folder} cannot be used", "choose another --run.dir"):
                self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / CONFIG, _toml(options))
            self._metrics, self._events = MetricsWriter(self.folder, step), EventLog(self.folder)
            self._events.write(
                "start", step, version=__version__, ranks=self._session.size, script=words[0], arguments=words[1:],
                threads=torch.get_num_threads(), torch=torch.__version__, python=sys.version.split()[0], config=options,
            )  # fmt: skip

        self._session.world.on_root(make)

    def install(self) -> None:
        """Note the losses whose backward is called, and the batches of DataLoaders."""
        backward = torch.Tensor.backward
        base: Any = dataloader._BaseDataLoaderIter
        following, record = base.__next__, self

        def note_loss(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            if self.numel() == 1:
                record._loss = self.detach()
            backward(self, *args, **kwargs)

        def note_batch(self: Any) -> Any:
            content = following(self)
            first = next((x for x in tree_flatten(content)[0] if isinstance(x, torch.Tensor) and x.dim()), None)
            record._samples = 0 if first is None else first.shape[0]
            return content

        torch.Tensor.backward = note_loss  # type: ignore[method-assign]
        base.__next__ = note_batch
        self._began = time.perf_counter()

    def write(self, step: int) -> None:
        """Write the line of a training step. Collective.

        Args:
            step: Number of the step, from 1.
        """
        loss = None if self._loss is None else self._loss.item()
        now, self._loss = time.perf_counter(), None
        if self._metrics is None:
            return
        seconds, self._began = max(now - self._began, 1e-9), now
        lr = None if self.optimizer is None else float(self.optimizer.param_groups[0]["lr"])
        self._metrics.write(
            step=step, time=time.time(), loss=loss, lr=lr, grad_norm=None, samples=self._samples, tokens=0,
            step_s=seconds, memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            world_size=self._session.size,
        )  # fmt: skip

    def event(self, event: str, step: int, **fields: Any) -> None:
        """Write an event.

        Args:
            event: Kind of event, one word.
            step: Training steps done so far.
            fields: Further values of the line.
        """
        if self._events is not None:
            self._events.write(event, step, **fields)

    def end(self, step: int, code: int, error: BaseException | None) -> None:
        """Write how the script ended.

        Args:
            step: Training steps done.
            code: Exit code of the script.
            error: Exception that ended it, or None.
        """
        message = "" if error is None else f"{type(error).__name__}: {printable(error)}"
        self.event("end", step, outcome="failed" if code else "done", message=message)


def _toml(options: dict[str, dict[str, Any]]) -> str:
    lines = []
    for section, values in options.items():
        lines.append(f"[{section}]")
        lines += [f"{name} = {json.dumps(value)}" for name, value in values.items()]
    return "\n".join(lines) + "\n"
