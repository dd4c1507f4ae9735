"""Callbacks that record the steps: metrics.jsonl, trackers, progress, the samples' numbers, and each rank's file.

RUN/ranks/rank-00003.jsonl has a rank's seconds by part, bytes sent and memory by category. Its first line has the bytes
that the rank is expected to send in a step. Those along the data axis are, of N ranks, X bytes of gradients and as many
of parameters:

    data parallel              2 (N-1)/N X    gradients are all-reduced
    ZeRO-1                     2 (N-1)/N X    gradients are reduce-scattered, updated parameters all-gathered
    ZeRO-2                       (N-1)/N X    for each microbatch, and once more for the parameters
    ZeRO-3                     3 (N-1)/N X    for each microbatch: parameters are gathered for forward and for backward

Where the ranks of a node share one copy of the parameters (parallel.share_node), an update is made in it, and nothing
is gathered inside the node: ZeRO-1 to 3 then send (N-1)/N X for the gradients, and between M nodes (M-1)/N X for the
parameters. X counts the gaps by which parameters are aligned in flat memory.

A rank that reads its neighbours' vectors where they lie moves as much as a ring sends: it takes (N-1)/N X out of them,
and for an all-reduce writes as much into them. Less common algorithms move other amounts: `doubling` and what passes
through one message for each pair of ranks, which are taken for a few bytes, where a ring's steps would cost more.

Not in the formulas are the few bytes that go with each step: of the norm, the loss and which parameters were used.

Reference:
    Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC20, section 7.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from mpitrain.comm.compression import TopK
from mpitrain.comm.job.traffic import bytes_sent
from mpitrain.comm.memory.device import is_accelerator, memory_bytes
from mpitrain.layout.mesh import LAYERS, PARTS
from mpitrain.monitor import MetricsWriter, Progress, peak_memory_bytes
from mpitrain.monitor.memory import host_memory_bytes
from mpitrain.monitor.run_files import HELD_OUT, RankWriter
from mpitrain.monitor.trackers import Tracking, asked_for
from mpitrain.parallel.costs import AxisExchange, Divided
from mpitrain.parallel.layouts import in_layers
from mpitrain.planner.counted import Observed, observe
from mpitrain.planner.subject import Subject
from mpitrain.shard.flat import numbered
from mpitrain.shard.parameters import Gathered
from mpitrain.shard.sharding import Sharding
from mpitrain.storage.text import spoken
from mpitrain.trainer.data import gather_ids, microbatch_size
from mpitrain.trainer.held_out.measuring import LOSS
from mpitrain.trainer.run import Callback, Run, Step


class SampleIds(Callback):
    """Puts the numbers of all samples of a step into its line of metrics.jsonl, in order (`data.record_ids`)."""

    def on_step_end(self, trainer: Run, step: Step) -> None:
        if trainer.config.data.record_ids and "ids" not in step.extras:
            step.extras["ids"] = gather_ids(trainer.places, step.batch)


class Records(Callback):
    """Rank 0's line in metrics.jsonl, figures for trackers and progress on the terminal, for each step.

    After ranks were lost another rank may be the first one, and goes on with the same files.
    """

    def __init__(self) -> None:
        self._metrics: MetricsWriter | None = None
        self._tracking: Tracking | None = None
        self._progress: Progress | None = None

    def on_fit_start(self, trainer: Run) -> None:
        if trainer.world.rank:
            return
        self._close(trainer)
        config, resumed = trainer.config, trainer.resumed_step if trainer.start is None else trainer.step
        tracking = Tracking(asked_for(config.monitor), partial(_warn, trainer))  # before files are touched
        self._metrics = MetricsWriter(trainer.folder.path, resumed)
        tracking.start(trainer.folder.path, config.model_dump(mode="json"), resumed)
        self._tracking = tracking
        unit = "tokens" if trainer.tokens else "samples"
        self._progress = Progress(config.train.steps, trainer.step, config.monitor.every, unit=unit)
        trainer.print = self._progress.say

    def on_step_end(self, trainer: Run, step: Step) -> None:
        if step.number - 1 == trainer.start:
            step.extras["memory"] = asdict(trainer.engine.memory())
        if self._metrics is None or self._progress is None or self._tracking is None:
            return
        if step.skipped:
            step.extras["skipped"] = True
        if step.held_out_loss is not None:
            step.extras |= {HELD_OUT + name: value for name, value in trainer.figures.items()}
        samples = trainer.batch_sizes.size(step.number - 1)
        tokens = samples * trainer.tokens
        figures: dict[str, Any] = {
            "time": time.time() - (time.monotonic() - step.met),  # of its end; evaluation comes after it
            "loss": step.loss,
            "lr": step.lr,
            "grad_norm": step.norm,
            "samples": samples,
            "tokens": tokens,
            "step_s": step.seconds,
            "tokens_per_s": tokens / step.seconds,
            "memory_bytes": peak_memory_bytes(trainer.device),
            "world_size": trainer.world.size,
        }
        figures |= step.extras
        self._metrics.write(step=step.number, **figures)
        self._tracking.log(step.number, figures)
        self._progress.update(step.number, step.loss, step.lr, (tokens or samples) / step.seconds, trainer.skipped)
        if step.held_out_loss is not None:
            trainer.say(f"step {step.number}: held-out {figures_text(trainer.figures)}")

    def on_fit_end(self, trainer: Run) -> None:
        if self._progress is not None:
            self._progress.close()

    def on_exception(self, trainer: Run, error: BaseException) -> None:
        self._close(trainer)

    def teardown(self, trainer: Run) -> None:
        self._close(trainer)

    def _close(self, trainer: Run) -> None:
        """Close both files. Lines for people go to standard output again."""
        for kept in (self._progress, self._metrics, self._tracking):
            if kept is not None:
                kept.close()
        self._progress = self._metrics = self._tracking = None
        trainer.print = partial(print, flush=True)


def figures_text(figures: Mapping[str, float]) -> str:
    """Return measured figures for people: loss 1.2345, token accuracy 0.5."""
    return ", ".join(f"{spoken(name)} {figure(name, value)}" for name, value in figures.items())


def figure(name: str, value: float) -> str:
    """One of these numbers."""
    return f"{value:.4f}" if name.partition(" of ")[0] == LOSS else f"{value:.4g}"


def _warn(trainer: Run, text: str) -> None:
    trainer.folder.log.warning("%s", text)
    trainer.print(f"mpitrain: {text}")


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
            "stage": trainer.mesh.stages.rank,
            "coordinates": list(trainer.mesh.coordinates.values()),
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
            self._remember = now + max(_MEMORY_EVERY, _MEMORY_COST * (time.monotonic() - now))
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
        self._close()  # where ranks died, another may get this one's number and go on with its file

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
    told = {name: getattr(account, name) for name in ("parameters", "gradients", "states", "activations", "buffers")}
    return told | {"other": max(0, host - known), "host": host, "device": memory_bytes(device) if on_device else 0}


def expected_bytes(trainer: Run, samples: int) -> dict[str, float]:
    """Bytes that this rank sends in a step along each axis that has several ranks.

    data        gradients and parameters, as the formulas of this file say
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
    staged = mesh.stages.size > 1
    if mesh.replicas.size > 1:
        found[mesh.replicas.label] = data_bytes(engine.sharding, workers.rounds(samples, microbatch), staged=staged)
    if mesh.readers.size == mesh.world.size or trainer.own_model:
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
        found[mesh.stages.label] = times * sum(blocks[number].given for number in pipeline.crossings) + tied
    if inside := [name for name in mesh.dividing(LAYERS, PARTS) if mesh.shape[name] > 1]:
        own = pipeline.blocks if pipeline is not None else range(len(blocks))
        passes: list[Sequence[AxisExchange]] = [(*blocks[n].forwards, *blocks[n].backwards) for n in own]
        if trainer.config.train.recompute:
            passes += [_again(names[number], blocks[number], staged) for number in own]
        exchanges = [each for some in passes for each in some]
        for axis in inside:
            sent = (bytes_sent(e.operation, e.nbytes, mesh.shape[axis]) for e in exchanges if e.axis == axis)
            found[axis] = found.get(axis, 0.0) + times * sum(sent)
    return found


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
    several = subject.synchronous and mesh.replicas.size > 1
    further = in_layers(tuple(parallel.axes.items()))
    divided = Divided(parallel.tensor, parallel.sequence, tuple(parallel.whole), synchronized=several, axes=further)
    cut = subject.cut(divided, fake=True)
    return [name for name, _ in cut.blocks], observe(cut, samples)


def bytes_along_data(
    gradients: float,
    ranks: int,
    gathered: Iterable[Gathered] = (),
    *,
    sharded: bool = False,
    passes: int = 1,
    replicas: int = 1,
) -> float:
    """Bytes that a rank sends along the data axis in a step, by the formulas of this file.

    Args:
        gradients: Bytes of all gradients.
        ranks: Over which they are reduced.
        gathered: The parameters that are gathered.
        sharded: Whether a rank gets its share of the reduced gradients alone (ZeRO-1 to 3).
        passes: How often they are reduced in a step: once, or once for each microbatch (ZeRO-2 and 3).
        replicas: Ranks that keep the same share, over which it is reduced once more (parallel.shard_within node).
    """
    sent = bytes_sent("reduce_scatter" if sharded else "all_reduce", gradients, ranks)
    sent += bytes_sent("all_reduce", gradients / ranks if sharded else gradients, replicas)
    return passes * sent + sum(each.times * bytes_sent("all_gather", each.nbytes, each.ranks) for each in gathered)


def data_bytes(sharding: Sharding, microbatches: int, *, staged: bool = False) -> float:
    """`bytes_along_data` of what a sharding does.

    Args:
        sharding: The parameters and gradients of an engine.
        microbatches: Of a step: the most that any rank has.
        staged: Whether these pass through a pipeline, after which gradients are reduced once.
    """
    gradients, reduction = sharding.gradients, sharding.gradients.reduction
    passes = microbatches if gradients.reduces_each_pass and not staged else 1
    gathered = sharding.parameters.gathered(1 if staged else microbatches)
    replicas = 1 if reduction.replicas is None else reduction.replicas.size
    if reduction.compression is None:
        nbytes = sum(g.layout.numel * (sharding.reduce_dtype or g.dtype).itemsize for g in sharding.groups)
        return bytes_along_data(
            nbytes, reduction.comm.size, gathered, sharded=sharding.stage.states, passes=passes, replicas=replicas
        )
    return passes * _compressed(sharding) + bytes_along_data(0, 1, gathered)


def _compressed(sharding: Sharding) -> float:
    """What a rank sends of all gradients once, compressed."""
    reduction, sent = sharding.gradients.reduction, 0.0
    assert reduction.compression is not None
    ranks = reduction.comm.size
    for number, (g, b) in enumerate(numbered(sharding.groups)):
        group = sharding.groups[g]
        lo, hi = group.layout.bounds[b : b + 2]
        dtype, bucket = sharding.reduce_dtype or group.dtype, reduction.compressed(group, b, (number,))
        wire = reduction.compression.bytes_on_wire(hi - lo, dtype, bucket.shapes if bucket is not None else None)
        gathers = isinstance(reduction.compression, TopK)
        sent += (ranks - 1) * wire if gathers else bytes_sent("all_reduce", wire, ranks)
    return sent
