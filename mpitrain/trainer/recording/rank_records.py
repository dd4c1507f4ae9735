"""The callback that writes RUN/ranks/rank-00003.jsonl on every rank: time by part, bytes sent, memory by category."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Any

from mpitrain.comm.job.traffic import bytes_sent
from mpitrain.comm.memory.device import is_accelerator, memory_bytes
from mpitrain.monitor.memory import host_memory_bytes
from mpitrain.monitor.run_files import RankWriter
from mpitrain.planner.counted import Observed, observe
from mpitrain.planner.subject import AxisExchange, Divided, Subject
from mpitrain.shard.traffic import data_bytes
from mpitrain.trainer.callback import Callback, Step
from mpitrain.trainer.data import microbatch_size
from mpitrain.trainer.run import Run

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

    def on_fit_start(self, trainer: Run) -> None:
        self._close()
        trainer.world.journal.start()
        trainer.engine.clock.begin_anew()
        self._started, self._from = time.time(), trainer.step
        self._steps, self._sent, self._remember, self._metered = 0, {}, 0.0, time.monotonic()

    def on_step_done(self, trainer: Run, step: Step) -> None:
        self._steps += 1
        if not step.together:
            return
        if self._writer is None:  # the formula knows the optimizer's states after the first step
            self._writer = RankWriter(trainer.folder.path, trainer.world.rank, self._started, self._header(trainer))
        if trainer.last_step or self._writer.due():
            self._write(trainer, self._writer)

    def _header(self, trainer: Run) -> dict[str, Any]:
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

    def _write(self, trainer: Run, writer: RankWriter) -> None:
        now = time.monotonic()
        told: dict[str, Any] = {"seconds": {k: round(v, 7) for k, v in trainer.engine.clock.read().items()}}
        told["sent"] = self._sent_since(trainer)
        if now >= self._remember or trainer.last_step:
            told["memory"] = memory(trainer)
            took = time.monotonic() - now
            self._remember = now + max(_MEMORY_EVERY, _MEMORY_COST * took)
        if now - self._metered >= _METER_EVERY:
            trainer.engine.metering = True
            self._metered = now
        writer.write(trainer.step, self._steps, **told)
        self._steps = 0

    def _sent_since(self, trainer: Run) -> list[list[Any]]:
        """Return rows of what was sent since the line before."""
        rows = []
        for operation, axis, algorithm, *figures in trainer.world.journal.account():
            before = self._sent.get((operation, axis, algorithm), [0, 0, 0, 0.0])
            if figures[0] != before[0]:
                rows.append([operation, axis, algorithm, *(a - b for a, b in zip(figures, before, strict=True))])
                self._sent[operation, axis, algorithm] = figures
        return rows

    def on_exception(self, trainer: Run, error: BaseException) -> None:
        self._close()

    def teardown(self, trainer: Run) -> None:
        if self._started:
            trainer.world.journal.stop()
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def memory(trainer: Run) -> dict[str, int]:
    """Bytes of this rank by category, `other` being what is in the host's memory besides."""
    account, device = trainer.engine.memory(), trainer.device
    host, on_device = host_memory_bytes(), is_accelerator(device)
    known = account.host if on_device else account.total
    categories = ("parameters", "gradients", "states", "activations", "buffers")
    told = {category: getattr(account, category) for category in categories}
    return told | {"other": max(0, host - known), "host": host, "device": memory_bytes(device) if on_device else 0}


def expected_bytes(trainer: Run, samples: int) -> dict[str, float]:
    """Bytes that this rank sends in a step along each axis that has several ranks.

    data        gradients and parameters, as `mpitrain.shard.traffic` says
    pipeline    the output of each block behind which the model is cut, and back its gradient, once for each microbatch,
                in messages; parameters that several stages share are summed
    tensor      what divided layers exchange, forward and backward: of two in each half of a block an all-reduce of its
                output in forward, and one of the gradient of its input in backward; 2 (T-1)/T of their bytes each

    How large outputs are, and what layers exchange, is found as the planner finds it: by a pass without values through
    the blocks (`mpitrain.planner.counted`). Where more than two ranks, T, of a tensor axis share memory,
    little is summed by each from all: T/2 times what the formula says.

    Not told is what depends on how ranks run beside each other: parallel.mode server, the meetings of groups in
    parallel.mode local; and what is sent along the pipeline and tensor axes by a model of a subclass of `Trainer`, or
    one that looks at values in its forward pass.

    Args:
        trainer: One that was prepared.
        samples: Of the step's batch that this rank's group trains on.
    """
    found: dict[str, float] = {}
    engine, mesh, workers = trainer.engine, trainer.mesh, trainer.places.workers
    microbatch = microbatch_size(trainer.config, mesh, samples)
    staged = mesh.pipeline.size > 1
    if mesh.data.size > 1:
        rounds = workers.rounds(samples, microbatch)
        found["data"] = data_bytes(engine.sharding, rounds, staged=staged)
    if mesh.tensor.size == mesh.pipeline.size == 1 or trainer.own_model:
        return found
    share = sum(hi - lo for lo, hi in workers.within(samples))
    size = min(microbatch or share, share)
    try:
        names, blocks = _observed(trainer, size)
    except Exception:  # what a model of somebody else's does with tensors that have no values is nowhere written
        return found
    times = share / max(1, size)
    pipeline = engine.pipeline
    if pipeline is not None:
        tied = sum(bytes_sent("all_reduce", nbytes, ranks) for nbytes, ranks in pipeline.tied_bytes)
        found["pipeline"] = times * sum(blocks[number].given for number in pipeline.crossings) + tied
    if mesh.tensor.size > 1:
        own = pipeline.blocks if pipeline is not None else range(len(blocks))
        passes: list[Sequence[AxisExchange]] = [(*blocks[n].forwards, *blocks[n].backwards) for n in own]
        if trainer.config.train.recompute:
            passes += [_again(names[number], blocks[number], staged) for number in own]
        found["tensor"] = times * sum(exchanged(each, mesh.tensor.size) for each in passes)
    return found


def exchanged(exchanges: Sequence[AxisExchange], ranks: int) -> float:
    """Bytes that a rank of a tensor axis sends in a block's pass.

    Args:
        exchanges: What the block exchanges.
        ranks: Of the axis.
    """
    return sum(bytes_sent(each.operation, each.nbytes, ranks) for each in exchanges if each.axis == "tensor")


def _again(name: str, block: Observed, staged: bool) -> Sequence[AxisExchange]:
    """Return what a block exchanges when it is recomputed for backward.

    A stage of a pipeline is computed again as a whole; else each block of a list is, up to the last tensor that
    backward needs, and what it exchanges last comes after that.
    """
    if staged:
        return block.forwards
    return block.forwards[:-1] if name.rpartition(".")[2].isdigit() else ()


def _observed(trainer: Run, samples: int) -> tuple[list[str], list[Observed]]:
    """The names of all blocks of the model, as the tensor axis divides it, and what each does with a microbatch."""
    config, mesh = trainer.config, trainer.mesh
    parallel, subject = config.parallel, Subject(config, trainer.data.description, real=False)
    several = subject.synchronous and mesh.data.size > 1
    divided = Divided(mesh.tensor.size, parallel.sequence, tuple(parallel.whole), synchronized=several)
    cut = subject.cut(divided, fake=True)
    return [name for name, _ in cut.blocks], observe(cut, samples)
