"""The callback that writes RUN/ranks/rank-00003.jsonl on every rank: time by part, bytes sent, memory by category."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING, Any

from mpitrain.comm.memory.device import is_accelerator, memory_bytes
from mpitrain.monitor.memory import host_memory_bytes
from mpitrain.monitor.rank_file import RankWriter
from mpitrain.trainer.callback import Callback, Step
from mpitrain.trainer.recording.traffic import expected_bytes

if TYPE_CHECKING:
    from mpitrain.trainer.trainer import Trainer

_MEMORY_EVERY = 1.0  # seconds between two lines that tell of memory, and ...
_MEMORY_COST = 500  # ... times as long as it takes to find out
_METER_EVERY = 60.0  # seconds between two forward passes whose activations are counted


class RankRecords(Callback):
    """Writes this rank's file. Nothing in it is collective."""

    def __init__(self) -> None:
        self._writer: RankWriter | None = None
        self._started, self._from = 0.0, 0  # when this start began, and after how many steps
        self._steps = 0  # since the last line
        self._sent: dict[tuple[str, str, str], list[float]] = {}
        self._remember = 0.0  # time.monotonic() of the next account of memory
        self._metered = 0.0  # and of the last one of activations

    def on_fit_start(self, trainer: Trainer) -> None:
        self._close()
        trainer.world.journal.start()
        trainer.engine.clock.begin_anew()
        self._started, self._from = time.time(), trainer.step
        self._steps, self._sent, self._remember, self._metered = 0, {}, 0.0, time.monotonic()

    def on_step_done(self, trainer: Trainer, step: Step) -> None:
        self._steps += 1
        if not step.together:
            return
        if self._writer is None:  # the formula knows the optimizer's states after the first step
            self._writer = RankWriter(trainer.folder.path, trainer.world.rank, self._started, self._header(trainer))
        if trainer.last_step or self._writer.due():
            self._write(trainer, self._writer)

    def _header(self, trainer: Trainer) -> dict[str, Any]:
        world, sizes = trainer.world, trainer.batch_sizes
        samples = trainer.samples * sizes.batch // sizes.size(trainer.step - 1)  # once all batches are that large
        return {
            "world_size": world.size,
            "role": trainer.strategy.role(world.rank),
            "host": socket.gethostname(),
            "node": world.node,
            "device": str(trainer.device),
            "coordinates": list(trainer.mesh.coordinates),
            "expected_memory": trainer.engine.memory().expected,
            "expected_bytes": expected_bytes(trainer, samples),
            "step": self._from,
        }

    def _write(self, trainer: Trainer, writer: RankWriter) -> None:
        now = time.monotonic()
        told: dict[str, Any] = {"seconds": {k: round(v, 7) for k, v in trainer.engine.clock.read().items()}}
        told["sent"] = self._sent_since(trainer)
        if now >= self._remember or trainer.last_step:
            told["memory"] = memory(trainer)
            took = time.monotonic() - now
            self._remember = now + max(_MEMORY_EVERY, _MEMORY_COST * took)
        if now - self._metered >= _METER_EVERY:
            trainer.engine.meter_activations()
            self._metered = now
        writer.write(trainer.step, self._steps, **told)
        self._steps = 0

    def _sent_since(self, trainer: Trainer) -> list[list[Any]]:
        """What was sent since the line before."""
        rows = []
        for operation, axis, algorithm, *figures in trainer.world.journal.account():
            before = self._sent.get((operation, axis, algorithm), [0, 0, 0, 0.0])
            if figures[0] != before[0]:
                rows.append([operation, axis, algorithm, *(a - b for a, b in zip(figures, before, strict=True))])
                self._sent[operation, axis, algorithm] = figures
        return rows

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        self._close()

    def teardown(self, trainer: Trainer) -> None:
        if self._started:
            trainer.world.journal.stop()
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def memory(trainer: Trainer) -> dict[str, int]:
    """Bytes of this rank by category, `other` being what is in the host's memory besides."""
    account, device = trainer.engine.memory(), trainer.device
    host, on_device = host_memory_bytes(), is_accelerator(device)
    known = account.host if on_device else account.total
    return {
        "parameters": account.parameters,
        "gradients": account.gradients,
        "states": account.states,
        "activations": account.activations,
        "buffers": account.buffers,
        "other": max(0, host - known),
        "host": host,
        "device": memory_bytes(device) if on_device else 0,
    }
