"""Callbacks that record the steps: metrics.jsonl, trackers, progress, sample ids, and a file of each rank.

RUN/ranks/rank-00003.jsonl has a rank's seconds by part, bytes sent and memory by category. Its first line has the bytes
that the rank is expected to send in a step. Along the data axis, for N ranks, X bytes of gradients and X bytes of
parameters, these are

    data parallel              2 (N-1)/N X    gradients are all-reduced
    ZeRO-1                     2 (N-1)/N X    gradients are reduce-scattered, updated parameters all-gathered
    ZeRO-2                       (N-1)/N X    for each microbatch, and once more for the parameters
    ZeRO-3                     3 (N-1)/N X    for each microbatch: parameters are gathered for forward and for backward

If the ranks of a node share one copy of the parameters (parallel.share_node), the update is made in this copy, and
nothing is gathered within the node: ZeRO-1 to 3 then send (N-1)/N X for the gradients, and between M nodes (M-1)/N X
for the parameters. X includes the padding that aligns parameters in flat memory.

A rank that reads its neighbours' vectors in shared memory moves the same bytes as in a ring: it reads (N-1)/N X, and
for an all-reduce also writes (N-1)/N X. Other algorithms move other amounts: `doubling`, and direct messages between
all pairs of ranks, which are used for small vectors, for which the steps of a ring would take longer.

The formulas do not include a few bytes of each step: norm, loss and which parameters were used.

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

from mpitrain.comm.compression import Compression
from mpitrain.comm.job.traffic import bytes_sent
from mpitrain.config.training import TrainSection, recomputes_stages
from mpitrain.layout.mesh import LAYERS, PARTS
from mpitrain.monitor import MetricsWriter, Progress, peak_memory_bytes
from mpitrain.monitor.json_lines import StepTimes
from mpitrain.monitor.run_files import HELD_OUT, SERVER, RankWriter
from mpitrain.monitor.trackers import Tracking, requested_trackers
from mpitrain.parallel.costs import AxisExchange, Divided
from mpitrain.parallel.layouts import in_layers
from mpitrain.parallel.recompute import segments
from mpitrain.planner.counted import BlockObservation, observe
from mpitrain.planner.subject import Subject
from mpitrain.shard.flat import bucket_indices
from mpitrain.shard.parameters import ParameterGather
from mpitrain.shard.sharding import Sharding
from mpitrain.storage.text import with_spaces
from mpitrain.trainer.data import gather_ids, microbatch_size
from mpitrain.trainer.held_out.measuring import LOSS
from mpitrain.trainer.memory import measure_rank
from mpitrain.trainer.run import Callback, Run, Step


class SampleIds(Callback):
    """Adds the ids of all samples of a step, in order, to its line in metrics.jsonl (`data.record_ids`)."""

    def on_step_end(self, trainer: Run, step: Step) -> None:
        if trainer.config.data.record_ids and "ids" not in step.extras:
            step.extras["ids"] = gather_ids(trainer.places, step.batch)


class Records(Callback):
    """Writes rank 0's line in metrics.jsonl, figures for trackers, and progress on the terminal for each step.

    After ranks were lost, the new rank 0 continues the same files.

    Attributes:
        discarded: Steps that are done again from here on; see `MetricsWriter`.
    """

    def __init__(self) -> None:
        self.discarded: dict[str, Any] = {}
        self._clock: dict[str, float] = {}  # seconds by time category before the step
        self._spent: dict[str, float] = {}  # seconds of waiting for data and for other ranks during the step
        self._metrics: MetricsWriter | None = None
        self._tracking: Tracking | None = None
        self._progress: Progress | None = None

    def on_fit_start(self, trainer: Run) -> None:
        if trainer.world.rank:
            return
        self._close(trainer)
        config, resumed = trainer.config, trainer.resumed_step if trainer.start is None else trainer.step
        tracking = Tracking(
            requested_trackers(config.monitor), partial(_warn, trainer)
        )  # may fail, so before files change
        self._metrics = MetricsWriter(trainer.folder.path, resumed)
        self.discarded, self._clock = self._metrics.discarded, trainer.engine.clock.totals()
        tracking.start(trainer.folder.path, config.model_dump(mode="json"), resumed)
        self._tracking = tracking
        unit = "tokens" if trainer.tokens else "samples"
        self._progress = Progress(config.train.steps, trainer.step, config.monitor.every, unit=unit)
        trainer.print = self._progress.print_line

    def on_update(self, trainer: Run, step: Step) -> None:
        if self._metrics is None or trainer.strategy.role(trainer.world.rank) == SERVER:
            return
        now = trainer.engine.clock.totals()
        self._spent = {
            name: round(now[category] - self._clock[category], 6)
            for name, category in (("data_s", "data"), ("wait_s", "communication"))
        }

    def on_step_done(self, trainer: Run, step: Step) -> None:
        if self._metrics is not None:
            self._clock = trainer.engine.clock.totals()

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
            "time": time.time() - (time.monotonic() - step.met),  # end of the step, before its evaluation
            "loss": step.loss,
            "lr": step.lr,
            "grad_norm": step.norm,
            "samples": samples,
            "tokens": tokens,
            "step_s": step.seconds,
            "tokens_per_s": tokens / step.seconds,
            "memory_bytes": peak_memory_bytes(trainer.device),
            "world_size": trainer.world.size,
        } | self._spent
        if trainer.goodput is not None:
            trainer.goodput.add_step(StepTimes.model_construct(step=step.number, skipped=step.skipped, **figures))
            figures["goodput"] = round(trainer.goodput.ratio, 4)
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
        """Close the files and the progress display, and print to standard output again."""
        for output in (self._progress, self._metrics, self._tracking):
            if output is not None:
                output.close()
        self._progress = self._metrics = self._tracking = None
        trainer.print = partial(print, flush=True)


def figures_text(figures: Mapping[str, float]) -> str:
    """Return figures as text, for example: loss 1.2345, token accuracy 0.5."""
    return ", ".join(f"{with_spaces(name)} {figure(name, value)}" for name, value in figures.items())


def figure(name: str, value: float) -> str:
    """Return one figure as text, with 4 decimals for a loss and 4 significant digits for a metric.

    Args:
        name: Name of the figure.
        value: Its value.
    """
    return f"{value:.4f}" if name.partition(" of ")[0] == LOSS else f"{value:.4g}"


def _warn(trainer: Run, text: str) -> None:
    trainer.folder.log.warning("%s", text)
    trainer.print(f"mpitrain: {text}")


_MEMORY_EVERY = 1.0  # least seconds between two measurements of memory, and ...
_MEMORY_COST = 500  # ... the same in multiples of a measurement's duration
_METER_EVERY = 60.0  # seconds between two forward passes whose activations are counted


class RankRecords(Callback):
    """Writes this rank's file. None of its methods is collective."""

    def __init__(self) -> None:
        self._writer: RankWriter | None = None
        self._started, self._from = 0.0, 0  # time and step at which this start of training began
        self._steps = 0  # steps since the last line
        self._sent: dict[tuple[str, str, str], list[float]] = {}
        self._next_memory = 0.0  # time.monotonic() of the next measurement of memory
        self._metered_at = 0.0  # time.monotonic() of the last count of activations

    def on_fit_start(self, trainer: Run) -> None:
        self._close()
        trainer.world.journal.start()
        trainer.engine.clock.reset()
        self._started, self._from = time.time(), trainer.step
        self._steps, self._sent, self._next_memory, self._metered_at = 0, {}, 0.0, time.monotonic()

    def on_step_done(self, trainer: Run, step: Step) -> None:
        self._steps += 1
        if not step.together:
            return
        if self._writer is None:  # the memory formula needs the optimizer's states, which the first step creates
            self._writer = RankWriter(trainer.folder.path, trainer.world.rank, self._started, self._header(trainer))
        if trainer.last_step or self._writer.due():
            self._write(trainer, self._writer)

    def _header(self, trainer: Run) -> dict[str, Any]:
        world, sizes = trainer.world, trainer.batch_sizes
        samples = trainer.samples * sizes.batch // sizes.size(trainer.step - 1)  # after the warm-up of the batch size
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
        record: dict[str, Any] = {"seconds": {k: round(v, 7) for k, v in trainer.engine.clock.read().items()}}
        record["sent"] = self._sent_since(trainer)
        if now >= self._next_memory or trainer.last_step:
            record["memory"] = measure_rank(trainer.engine.memory(), trainer.device)
            self._next_memory = now + max(_MEMORY_EVERY, _MEMORY_COST * (time.monotonic() - now))
        if now - self._metered_at >= _METER_EVERY:
            trainer.engine.metering = True
            self._metered_at = now
        writer.write(trainer.step, self._steps, **record)
        self._steps = 0

    def _sent_since(self, trainer: Run) -> list[list[Any]]:
        """Return rows with the bytes sent since the line before."""
        rows = []
        for operation, axis, algorithm, *figures in trainer.world.journal.account():
            before = self._sent.get((operation, axis, algorithm), [0, 0, 0, 0.0])
            if figures[0] != before[0]:
                rows.append([operation, axis, algorithm, *(a - b for a, b in zip(figures, before, strict=True))])
                self._sent[operation, axis, algorithm] = figures
        return rows

    def on_exception(self, trainer: Run, error: BaseException) -> None:
        self._close()  # after a loss of ranks, another rank may get this number and continue the file

    def teardown(self, trainer: Run) -> None:
        if self._started:
            trainer.world.journal.stop()
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def expected_bytes(trainer: Run, samples: int) -> dict[str, float]:
    """Return the bytes that this rank sends in a step along each axis with several ranks.

    data        gradients and parameters, by the formulas of this module
    pipeline    for each microbatch, the output of each block after which the model is cut, and the gradient of that
    output
                in the other direction; sums of parameters that several stages share
    tensor      exchanges of divided layers: for each half of a block, an all-reduce of its output in forward, and of
    the
                gradient of its input in backward; 2 (T-1)/T of their bytes each

    Exchanges along further axes that divide layers or samples are counted in the same way. The sizes of outputs and
    exchanges are found as by the planner, in a pass through the blocks with tensors that have no values
    (`mpitrain.planner.counted`). If more than two ranks, T, of a tensor axis share memory, each of them sums small
    vectors itself, and sends T/2 times the formula.

    Some bytes are not included because they depend on the timing of ranks: those of parallel.mode server, and those
    when groups synchronize in parallel.mode local. Except along the data axis, bytes are also missing if a subclass of
    `Trainer` makes the model, or if its forward pass depends on values.

    Args:
        trainer: A trainer that is prepared.
        samples: Samples of the step's batch that this rank's group trains on.
    """
    expected: dict[str, float] = {}
    engine, mesh, workers = trainer.engine, trainer.mesh, trainer.places.workers
    microbatch = microbatch_size(trainer.config, mesh, samples)
    staged = mesh.stages.size > 1
    if mesh.replicas.size > 1:
        expected[mesh.replicas.label] = data_bytes(engine.sharding, workers.rounds(samples, microbatch), staged=staged)
    if mesh.readers.size == mesh.world.size or trainer.own_model:
        return expected
    first, last = workers.share(samples)
    share = last - first
    size = min(microbatch or share, share)
    try:
        names, blocks = _observe_blocks(trainer, size)
    except Exception:  # a user's model may fail in any way on tensors without values
        return expected
    times = share / max(1, size)
    pipeline = engine.pipeline
    if pipeline is not None:
        tied = sum(bytes_sent("all_reduce", nbytes, ranks) for nbytes, ranks in pipeline.tied_bytes)
        expected[mesh.stages.label] = times * sum(blocks[number].output_bytes for number in pipeline.crossings) + tied
    if inside := [name for name in mesh.dividing(LAYERS, PARTS) if mesh.shape[name] > 1]:
        own_blocks = pipeline.blocks if pipeline is not None else range(len(blocks))
        passes: list[Sequence[AxisExchange]] = [(*blocks[n].forwards, *blocks[n].backwards) for n in own_blocks]
        if trainer.config.train.recompute:
            passes += _recompute_exchanges(trainer.config.train, names, blocks, own_blocks, staged=staged)
        exchanges = [each for some in passes for each in some]
        for axis in inside:
            sent = (bytes_sent(e.operation, e.nbytes, mesh.shape[axis]) for e in exchanges if e.axis == axis)
            expected[axis] = expected.get(axis, 0.0) + times * sum(sent)
    return expected


def _recompute_exchanges(
    train: TrainSection,
    names: Sequence[str],
    blocks: Sequence[BlockObservation],
    own_blocks: Sequence[int],
    *,
    staged: bool,
) -> list[Sequence[AxisExchange]]:
    """Return the exchanges of this rank's blocks when they are recomputed for backward.

    If train.recompute is true, a pipeline stage is recomputed as a whole, unless its activations are partitioned or
    offloaded. Otherwise each segment of a list's blocks is recomputed up to the last tensor that backward needs, which
    excludes the last exchange of the segment. Partitioned inputs of segments are gathered first.

    Args:
        train: The settings [train].
        names: Name of each block of the model.
        blocks: Exchanges of each block.
        own_blocks: Numbers of this rank's blocks.
        staged: If true, the model is divided into the stages of a pipeline.
    """
    if staged and recomputes_stages(train):
        return [blocks[number].forwards for number in own_blocks]
    listed = [number for number, name in enumerate(names) if name.rpartition(".")[2].isdigit()]
    exchanges: list[Sequence[AxisExchange]] = []
    for segment in segments(train.recompute, len(listed)):
        mine = [listed[n] for n in segment if listed[n] in own_blocks]
        # other stages may be between two blocks
        ends = [n for n in mine if n + 1 not in mine]
        if train.partition_activations:
            begins = [blocks[n] for n in mine if n - 1 not in mine]
            exchanges.append([AxisExchange("all_gather", round(block.input_bytes)) for block in begins])
        exchanges += [blocks[n].forwards[:-1] if n in ends else blocks[n].forwards for n in mine]
    return exchanges


def _observe_blocks(trainer: Run, samples: int) -> tuple[list[str], list[BlockObservation]]:
    """Return the names of all blocks of the divided model, and what each computes and exchanges for a microbatch."""
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
    gathered: Iterable[ParameterGather] = (),
    *,
    sharded: bool = False,
    passes: int = 1,
    replicas: int = 1,
) -> float:
    """Return the bytes that a rank sends along the data axis in a step, by the formulas of this module.

    Args:
        gradients: Bytes of all gradients.
        ranks: Ranks over which gradients are reduced.
        gathered: Parameters that are gathered.
        sharded: If true, a rank gets only its share of the reduced gradients (ZeRO-1 to 3).
        passes: Reductions in a step: one, or one for each microbatch (ZeRO-2 and 3).
        replicas: Ranks with the same share, over which it is reduced again (parallel.shard_within node).
    """
    sent = bytes_sent("reduce_scatter" if sharded else "all_reduce", gradients, ranks)
    sent += bytes_sent("all_reduce", gradients / ranks if sharded else gradients, replicas)
    return passes * sent + sum(each.times * bytes_sent("all_gather", each.nbytes, each.ranks) for each in gathered)


def data_bytes(sharding: Sharding, microbatches: int, *, staged: bool = False) -> float:
    """Return `bytes_along_data` for a sharding.

    Args:
        sharding: Parameters and gradients of an engine.
        microbatches: Microbatches of a step on the rank that has most.
        staged: If true, the microbatches pass through a pipeline, after which gradients are reduced once.
    """
    gradients, reduction = sharding.gradients, sharding.gradients.reduction
    passes = microbatches if gradients.reduces_each_pass and not staged else 1
    gathered = sharding.parameters.list_gathers(1 if staged else microbatches)
    replicas = 1 if reduction.replicas is None else reduction.replicas.size
    compression = reduction.compression
    if compression is None:
        nbytes = sum(g.layout.numel * (sharding.reduce_dtype or g.dtype).itemsize for g in sharding.groups)
        return bytes_along_data(
            nbytes, reduction.comm.size, gathered, sharded=sharding.stage.states, passes=passes, replicas=replicas
        )
    return passes * _compressed_bytes(sharding, compression) + bytes_along_data(0, 1, gathered)


def _compressed_bytes(sharding: Sharding, compression: Compression) -> float:
    """Return the bytes that a rank sends for one reduction of all gradients with compression."""
    reduction, sent = sharding.gradients.reduction, 0.0
    ranks, replicas = reduction.comm.size, reduction.replicas
    for number, (g, b) in enumerate(bucket_indices(sharding.groups)):
        group = sharding.groups[g]
        lo, hi = group.layout.bounds[b : b + 2]
        dtype, bucket = sharding.reduce_dtype or group.dtype, reduction.compression_of(group, b, (number,))
        if bucket is not None:
            whole = not sharding.stage.states
            sent += compression.bytes_sent(reduction.comm.nodes, hi - lo, dtype, bucket.shapes, whole=whole)
        else:
            sent += bytes_sent("reduce_scatter", (hi - lo) * dtype.itemsize, ranks)
        if replicas is not None and bucket is None:
            sent += compression.bytes_sent(replicas.nodes, (hi - lo) // ranks, dtype)
        elif replicas is not None:
            sent += bytes_sent("all_reduce", (hi - lo) * dtype.itemsize / ranks, replicas.size)
    return sent
