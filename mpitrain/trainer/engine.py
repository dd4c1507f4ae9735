"""Training steps of a data-parallel rank: forward, backward, reduction of gradients, clipping, update.

The loss of a step is the mean over its global batch, however the batch is divided: each microbatch is weighted by its
share of the samples, or of the targets that are not masked (`layers.loss_terms`), and gradients are summed over ranks.
The same batch therefore gives the same step on any number of ranks, also when their shares differ in size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from mpitrain.checkpoint import Manifest, Part
from mpitrain.choices import Precision
from mpitrain.comm import Communicator
from mpitrain.comm.memory import device
from mpitrain.config.settings import Config
from mpitrain.errors import refusal
from mpitrain.layers.loss_terms import Count, Counts, LossTerms, samples_in, to_floats, zero_loss
from mpitrain.layers.precision import DTYPES, cast_input, convert
from mpitrain.layers.sync_batchnorm import SyncBatchNorm
from mpitrain.layout.ownership import Division
from mpitrain.monitor.parts import StepClock
from mpitrain.parallel.activations import ActivationOffload
from mpitrain.parallel.layer_drop import LayerDrop
from mpitrain.pipe.executor import Upcoming
from mpitrain.shard.averages import WeightAverage
from mpitrain.shard.ddp import broadcast_tensors
from mpitrain.shard.flat_parameters import check_elementwise
from mpitrain.shard.sharding import Sharding
from mpitrain.shard.update import Updater, set_rate
from mpitrain.shard.virtual_workers import TreeSum
from mpitrain.trainer.memory import ActivationMeter, MemoryAccount, PipelineMeter, make_step_wrapper, measure
from mpitrain.trainer.optimizing import state_bytes
from mpitrain.trainer.state import EngineState, merge_states

Loss = Callable[[Any, Any], torch.Tensor]
Microbatch = tuple[Any, Any]
AVERAGED = "averaged"  # key of a checkpoint's value: number of times that weights were added to the average
OnOutput = Callable[[Any, Any], None]  # called with an output and its targets


@dataclass
class LossScale:
    """Factor of the loss that keeps small gradients from becoming zero in fp16.

    It is halved when gradients overflow, and doubled after `patience` good steps in a row.

    Reference: Micikevicius et al. 2018, Mixed Precision Training.

    Attributes:
        value: Current factor.
        dynamic: If false, the factor never changes.
        patience: Good steps in a row after which the factor is doubled.
        good: Good steps since the last change or overflow.
        least: Lower bound of the factor.
        spare: Overflows that are tolerated before the factor is halved; counted anew each time it is doubled.
        refill: If true, overflows are also counted anew after each good step.
        passed: Overflows tolerated so far.
    """

    value: float = 1.0
    dynamic: bool = False
    patience: int = 2000
    good: int = 0
    least: float = 1.0
    spare: int = 0
    refill: bool = False
    passed: int = 0

    @staticmethod
    def of(precision: Precision) -> LossScale:
        return LossScale(2.0**16, dynamic=True) if precision == "fp16" else LossScale()

    def update(self, overflowed: bool) -> None:
        if not self.dynamic:
            return
        self.good = 0 if overflowed else self.good + 1
        if overflowed and self.passed < self.spare:
            self.passed += 1
        elif overflowed:
            self.value = max(self.least, self.value / 2)
        elif self.good == self.patience:
            self.value, self.good, self.passed = self.value * 2, 0, 0
        elif self.refill:
            self.passed = 0

    def state(self) -> dict[str, float]:
        return {"scale": self.value, "good": self.good, "passed": self.passed}

    def load(self, state: dict[str, float]) -> None:
        self.value, self.good, self.passed = float(state["scale"]), int(state["good"]), int(state.get("passed", 0))


@dataclass(frozen=True)
class StepResult:
    """Outcome of `Engine.step`.

    Attributes:
        norm: 2-norm of all gradients, before clipping.
        skipped: True if nothing was updated, because the norm is not finite.
    """

    norm: float
    skipped: bool


def broadcast_copies(module: nn.Module, comm: Communicator, division: Division) -> None:
    """Broadcast each parameter and buffer from its source replica to all its copies. Collective over `comm`.

    Args:
        module: This rank's part of the model.
        comm: Replicas of the model.
        division: Division of the model over ranks, which says which replicas have copies.
    """
    copied: dict[tuple[tuple[Communicator, ...], int], list[torch.Tensor]] = {}
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        owner = division.owner(name, tensor)
        copied.setdefault((tuple(division.copies(owner, comm)), owner.source), []).append(tensor)
    for (groups, source), tensors in copied.items():
        for group in groups:
            broadcast_tensors(tensors, group, source)


class Engine:
    """A module, its loss and its optimizer on the data-parallel ranks. Its construction is collective.

    Args:
        module: The model, or this rank's part of it; every rank gets the values of rank 0.
        loss: Function that returns the mean loss of some samples, called as loss(module(x), y).
        optimizer: Optimizer of the module's parameters, without a state yet.
        comm: Data-parallel ranks.
        config: The settings. The engine uses run.reproducible, train.clip, train.precision, [parallel] and [comm].
            The optimizer's states and its copy of the parameters are fp32 in any precision.
        division: Division of the model over the axes of a mesh; None if the model is whole.
        scale: Scale of the loss; None for the one that the precision needs.
        reduce_dtype: Dtype in which gradients are accumulated and reduced; None for that of the parameters.

    Attributes:
        device: Device of the module's parameters.
        settled: False while an update is under way, when parameters and states may be partly updated.
        synchronous: True if layers communicate, so that every rank needs the same number of microbatches.
        average: Average of the weights over steps; None without train.average.
        note: Remark about the state that was loaded, for the user; may be empty.
        clock: Timer of forward, backward and update.
        meter: Counter of the bytes that autograd keeps for backward.
        metering: If true, the next forward pass for which autograd keeps tensors counts their bytes.
        recorder: Context manager for the next forward pass that is metered, or for all of a step through a pipeline.
        recorded_samples: Samples in the forward passes in which `recorder` was entered.
        pipeline: Pipeline that moves microbatches through the stages of the model; None if the model has no stages.
        counted: Function from a microbatch's targets to the count that its mean loss is over; None if that is the
            number of samples.
        layer_drop: Blocks that steps leave out at random; None without model.layer_drop.
        terms: Loss terms that the model adds.
        term_sums: Each virtual worker's contribution to the mean of each term in the last step, float64 [workers,
            terms].
    """

    note: str = ""
    counted: Counts | None = None
    layer_drop: LayerDrop | None = None

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        comm: Communicator,
        config: Config,
        *,
        division: Division | None = None,
        scale: LossScale | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.module, self.loss, self.optimizer, self.comm = module, loss, optimizer, comm
        self.config, self.clip, self.precision = config, config.train.clip, config.train.precision
        self._reduce_dtype, division = reduce_dtype, division or Division()
        others = [other for other in division.model_axes.values() if other.size > 1]
        dividing = division.dividing()
        if dividing:  # each rank has parts of matrices
            check_elementwise(optimizer, gathered=True, otherwise=f"parallel.{next(iter(dividing))} 1")
        self.pipeline = division.pipeline
        broadcast_copies(module, comm, division)
        convert(module, self.precision)
        self.sharding = self._place(division)
        self.device = self.sharding.groups[0].device
        self.scale = scale if scale is not None else LossScale.of(self.precision)
        self.settled = True
        self._updater = Updater(self.sharding, others, list(dividing.values()))
        decay = config.train.average_decay if config.train.average == "ema" else None
        self.average = WeightAverage(self.sharding, decay) if config.train.average != "none" else None
        self._axes = [self.sharding.shard, *others]
        self._updating = comm.size  # ranks over which the optimizer's states are divided, or could be
        self._state = EngineState(self.sharding, division)
        self.synchronous = any(isinstance(m, SyncBatchNorm) for m in module.modules())
        stages = self.pipeline.comm if self.pipeline is not None else None
        if stages is not None:
            self.synchronous = any(stages.all_gather_object(self.synchronous))
        self.terms = LossTerms(module, stages)
        self.term_sums = torch.zeros(0, len(self.terms.names), dtype=torch.float64)
        if self.terms.names and config.parallel.sequence:
            raise refusal(
                f"parallel.sequence gives each rank only a part of the activations, but the model adds the loss term "
                f"{self.terms.names[0]!r}, which needs all of them; set parallel.sequence to false"
            )
        target = config.train.offload_activations
        self._offload = ActivationOffload(target, module, self.device) if target else None
        self.meter: ActivationMeter | PipelineMeter = ActivationMeter(module, self._offload)
        self.metering = True
        self.recorder: AbstractContextManager[Any] | None = None
        self.recorded_samples = 0
        journal = comm.journal
        self.clock = StepClock(lambda: journal.waited, self.device)
        if self.pipeline is not None:
            self.meter = PipelineMeter(module, self._offload)
            self.pipeline.watched = make_step_wrapper(self.clock, self.meter)
            if self.pipeline.versions is not None:  # gradients of the newest weights are for the next step
                self.sharding.reducer.paused = True
                self.pipeline.versions.on_select = partial(setattr, self.sharding.reducer, "paused")
        self._example: Any = None  # a microbatch for passes in which only other ranks have samples

    def _place(self, division: Division) -> Sharding:
        """Distribute the module's parameters and the optimizer over the ranks. Collective."""
        return Sharding(self.module, self.optimizer, self.comm, self.config, division, self._reduce_dtype)

    # -- the pieces of a step

    def forward(self, x: Any, y: Any, *, empty: bool = False) -> torch.Tensor:
        """Return the mean loss of a microbatch.

        Args:
            x: Inputs.
            y: Targets.
            empty: If true, all targets are masked, and the loss is 0.
        """
        with self.clock.forward:
            return self._loss_of(x, y, empty=empty)

    def _loss_of(self, x: Any, y: Any, on_output: OnOutput | None = None, *, empty: bool = False) -> torch.Tensor:
        if self.sharding.parameters.gathers:
            self._example = (x, y)

        def loss(x: Any) -> torch.Tensor:
            output = self.module(x)
            if on_output is not None:
                on_output(output, y)
            return zero_loss(output) if empty else self.loss(output, y)

        return self.compute(loss, x)

    def compute(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return function(*args, **kwargs), computed in the engine's precision, with its arguments cast to it."""
        args = tuple(cast_input(a, self.precision) for a in args)
        kwargs = {name: cast_input(a, self.precision) for name, a in kwargs.items()}
        cast = torch.autocast(self.device.type, DTYPES[self.precision]) if self.precision != "fp32" else nullcontext()
        with cast, self._metered():
            return function(*args, **kwargs)

    @contextmanager
    def _metered(self) -> Iterator[None]:
        """Count the bytes that autograd keeps, if anyone asks, and move them out if they are offloaded."""
        if not (self.metering or self.meter.record or self._offload) or not torch.is_grad_enabled():
            yield
            return
        with self.meter.counting(self.sharding.parameters, self.recorder):
            yield
        self.metering, self.recorder = False, None

    def backward(self, loss: torch.Tensor, *, reduce: bool) -> None:
        """Add the gradients of a loss to those of the step.

        Args:
            loss: A scalar.
            reduce: If true, this is the last backward pass of the step, and gradients are reduced over ranks. ZeRO
                stages 2 and 3 reduce them in every pass.
        """
        self.sharding.reducer.enabled = reduce or self.sharding.gradients.reduces_each_pass
        self.sharding.reducer.last = reduce
        self.sharding.reducer.announce(loss)
        with self.clock.backward:
            (loss * self.scale.value if self.scale.value != 1.0 else loss).backward()
            self.sharding.parameters.finish_backward()

    # -- a step

    def forward_backward(
        self,
        workers: Sequence[Sequence[Microbatch]],
        samples: int,
        *,
        rounds: int = 1,
        before: Callable[[int], None] = lambda worker: None,
        upcoming: tuple[Sequence[Microbatch], Callable[[], None]] | None = None,
    ) -> torch.Tensor:
        """Compute the gradients of one step, and this rank's part of the loss. Collective.

        Gradients are summed in order within a virtual worker, and as a binary tree over virtual workers.

        Args:
            workers: Microbatches (x, y) of each virtual worker of this rank; may be empty.
            samples: Samples of the global batch.
            rounds: Largest number of microbatches that any rank has.
            before: Called before each virtual worker's passes with its index on this rank, to seed random generators.
            upcoming: Microbatches of the next step, with as many samples, and the function that seeds for it, or None.

        Returns:
            Part of the loss from each virtual worker, float64 [workers], on the device, which may still compute it.
        """
        self.sharding.gradients.zero()
        microbatches = [m for worker in workers for m in worker]
        if self.recorder is not None:
            recorded = microbatches[:1] if self.pipeline is None else microbatches
            self.recorded_samples = sum(len(x) for x, _ in recorded)
        shares = [len(x) / samples for x, _ in microbatches]
        weights = self.weigh([y for _, y in microbatches], shares)
        if self.pipeline is not None:
            before(0)
            step_loss = self.through_pipeline(microbatches, weights, shares, self._upcoming(upcoming, samples))
            return torch.tensor([step_loss], dtype=torch.float64)
        losses, done = torch.zeros(len(workers), dtype=torch.float64, device=self.device), 0
        self.term_sums = losses.new_zeros(len(workers), len(self.terms.names))
        tree = TreeSum(self.sharding.gradients) if len(workers) > 1 else None
        for number, worker in enumerate(workers):
            before(number)
            for m, (x, y) in enumerate(worker):
                self.terms.weigh(shares[done], self.scale.value)
                loss = self.forward(x, y, empty=not weights[done]) * weights[done]
                self.backward(loss, reduce=tree is None and m == len(worker) - 1)
                losses[number] += loss.detach()
                done += 1
            if self.terms.names:
                added, *each = self.terms.take(self.device)
                losses[number] += added
                self.term_sums[number] = torch.stack(each)
            if tree is not None:
                tree.add(last=number == len(workers) - 1)
        self.terms.weigh(0.0, 0.0)
        for _ in range(done, rounds):  # take part in the collective passes of ranks with more microbatches
            if self.sharding.parameters.gathers:
                self.backward(self.forward(*self._example) * 0.0, reduce=False)
            elif self.sharding.gradients.reduces_each_pass:
                self.sharding.reducer.finish()
        if tree is not None or (done == 0 and not self.sharding.gradients.reduces_each_pass):
            self.sharding.reducer.finish()
        return losses

    def _upcoming(self, batch: tuple[Sequence[Microbatch], Callable[[], None]] | None, samples: int) -> Upcoming | None:
        """Return the batch of the next step as the pipeline takes it. Collective if targets may be masked."""
        if batch is None:
            return None
        microbatches, seed = batch
        weights = self.weigh([y for _, y in microbatches], [len(x) / samples for x, _ in microbatches])
        return Upcoming([(cast_input(x, self.precision), y) for x, y in microbatches], weights, seed)

    def weigh(self, targets: Sequence[Any], shares: Sequence[float]) -> list[float]:
        """Return the weight of each microbatch in the mean loss of a step. Collective if targets may be masked.

        Args:
            targets: Targets of each microbatch of this rank.
            shares: Samples of each microbatch, divided by those of the global batch.
        """
        if self.counted is None:
            return list(shares)
        counts = to_floats(self.counted(y) for y in targets)
        sums = torch.tensor([sum(counts), sum(shares)], dtype=torch.float64)
        self.comm.all_reduce(sums, reproducible=True)
        total, here = sums.tolist()
        part = 1.0 if math.isclose(here, 1.0) else here  # share of the global batch that these ranks have
        return [count / total * part if total else 0.0 for count in counts]

    def through_pipeline(
        self,
        microbatches: Sequence[Microbatch],
        weights: Sequence[float],
        shares: Sequence[float],
        upcoming: Upcoming | None = None,
    ) -> float:
        """Compute and reduce the gradients of one step through the stages of the model. Collective.

        Args:
            microbatches: Microbatches (x, y) of this rank.
            weights: Weight of each microbatch's loss.
            shares: Weight of the model's loss terms in each microbatch.
            upcoming: Batch of the next step, which the pipeline may begin.

        Returns:
            Sum of weights[i] * loss_i over this rank's microbatches plus the model's loss terms; the same on every rank
            of the pipeline.
        """
        pipeline = self.pipeline
        assert pipeline is not None
        self.sharding.reducer.enabled = False
        scaled = [weight * self.scale.value for weight in weights]
        cast = [(cast_input(x, self.precision), y) for x, y in microbatches]
        pipeline.counted = self.counted
        self.terms.weigh(0.0, self.scale.value)
        loss = self.compute(lambda: pipeline.forward_backward(cast, scaled, shares, upcoming))
        with self.clock.backward:
            used = self.sharding.reducer.touched()
            self.sharding.gradients.copy_in()  # copies of tied parameters need the same placement on all ranks
            pipeline.synchronize_tied(used)
            self.sharding.reducer.finish()
        sums = self.terms.take(self.device).cpu()
        self.term_sums = sums[None, 1:]
        return loss / self.scale.value + float(sums[0])

    def step(self, lr: float | None = None) -> StepResult:
        """Clip the gradients and update the parameters, unless a gradient is not finite on some rank. Collective.

        Args:
            lr: Learning rate; None keeps the optimizer's own.
        """
        with self.clock.optimizer:
            if lr is not None:
                set_rate(self.optimizer, lr)
            if self.pipeline is not None and self.pipeline.versions is not None:
                self.pipeline.versions.begin_update()
            squares = self._updater.squares()
            fetched = device.start_copy_to_host(squares)
            if on_device := self._updater.can_skip:
                self._update_on_device(squares)
            squared_norm = float(fetched())
            norm = math.sqrt(squared_norm) / self.scale.value if math.isfinite(squared_norm) else math.nan
            finite = math.isfinite(norm)
            if finite and not on_device:
                self._update(norm)
            self.scale.update(overflowed=not finite)
        self.clock.settle()
        return StepResult(norm, not finite)

    def _update(self, norm: float) -> None:
        """Clip gradients whose norm is `norm`, and update the parameters."""
        factor = 1.0 / self.scale.value
        if self.clip and norm > self.clip:
            factor *= self.clip / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_ does
        self.settled = False
        self._updater.apply(factor)
        self.settled = True

    def _update_on_device(self, squares: torch.Tensor) -> None:
        """Clip and update on the device, before the host knows the norm.

        The device skips the update if the norm is not finite.
        """
        norm = squares[0].sqrt() / self.scale.value
        divisor = torch.full_like(norm, self.scale.value)
        if self.clip:
            divisor *= torch.where(norm > self.clip, (norm + 1e-6) / self.clip, 1.0)
        self.settled = False
        self._updater.apply_unless((~norm.isfinite()).float(), divisor.float())
        self.settled = True

    @torch.no_grad()
    def evaluate(self, x: Any = None, y: Any = None, on_output: OnOutput | None = None) -> torch.Tensor:
        """Return the loss of this rank's samples without training on them.

        Args:
            x: Inputs; None to take part in the forward passes of other ranks without samples.
            y: Targets.
            on_output: Called with each output and its targets on the rank that has the model's last block. The scores
                in the output may be one tensor rank's part of them.

        Returns:
            A scalar on the device; meaningless if `x` is None.
        """
        if x is None:
            if not self.sharding.parameters.gathers:
                return torch.zeros(())
            x, y = self._example
        if self.pipeline is not None:
            self.pipeline.counted = self.counted
            return torch.tensor(self.compute(self.pipeline.evaluate, x, y, on_output), dtype=torch.float64)
        was_training = self.module.training
        self.module.eval()
        try:
            loss = self._loss_of(x, y, on_output)
        finally:
            self.module.train(was_training)
        if self.counted is None:
            return loss
        some = torch.as_tensor(self.counted(y), device=loss.device) > 0
        return torch.where(some, loss, 0.0)  # instead of NaN: see `zero_loss`

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Use the averaged weights in the block, if there are any. Collective.

        After an error in the block, the weights remain exchanged and the engine is not `settled`.
        """
        if self.average is None or not self.average.count:
            yield
            return
        self.settled = False
        self.average.swap()
        yield
        self.average.swap()
        self.settled = True

    def count(self, x: Any, y: Any) -> Count:
        """Return the count that a microbatch's mean loss is over: targets that are not masked, or samples.

        Args:
            x: Inputs.
            y: Targets.
        """
        return samples_in(x) if self.counted is None else self.counted(y)

    # -- checkpoints

    def parts(self, *, alone: bool = False) -> tuple[list[Part], dict[str, Any]]:
        """Return this rank's tensors of a checkpoint, and the values stored with them. Collective, unless `alone`.

        Args:
            alone: If true, return the parts of all data-parallel ranks. This needs ZeRO stage 0, where each has
                everything.
        """
        parts, values = self._state.parts(alone=alone)
        for axis in () if alone else self._axes:
            values["optimizer"] = merge_states(axis.all_gather_object(values["optimizer"]))
        if self.average is not None:
            values[AVERAGED] = self.average.count
        return parts, values | {"loss_scale": self.scale.state(), "precision": self.precision}

    def checkpoint_bytes(self) -> int:
        """Return the bytes that this rank writes into a checkpoint, including optimizer states.

        If there are no states yet, the bytes of those that the first step creates are estimated.
        """
        parts, _ = self._state.parts()
        nbytes = sum(part.data.nbytes for part in parts)
        if any(self.optimizer.state.values()) or self.sharding.share is None:
            return nbytes
        per_element = state_bytes(self.optimizer) + (4 if self.average is not None else 0)
        return nbytes + self._state.trained_elements() * per_element // self._updating

    def parts_to_load(self, manifest: Manifest) -> list[Part]:
        """Return the parts that this rank reads from a checkpoint; `finish_load` then puts them in place."""
        if self.average is not None:
            self.average.begin_load(manifest.values.get(AVERAGED, 0))
        return self._state.parts_to_load(manifest)

    def finish_load(self, manifest: Manifest) -> None:
        """Put the parts of `parts_to_load` in place, after all of them have been read. Collective."""
        self._state.finish_load()
        if "loss_scale" in manifest.values:
            self.scale.load(manifest.values["loss_scale"])
        if groups := manifest.values.get("local"):
            self.note = f"{groups['groups']} groups saved this checkpoint; the optimizer's state is that of the first"

    # -- for people

    def memory(self) -> MemoryAccount:
        """Return the bytes of each category on this rank, as measured and by formula."""
        versions = 2 if self.pipeline is not None and self.pipeline.versions is not None else 1
        return measure(self.sharding, self.meter.nbytes, self.meter.offloaded, versions)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return a copy of the whole module's state on every rank, for torch's load_state_dict. Collective."""
        with self.sharding.parameters.unshard_all():
            return {name: value.detach().clone() for name, value in self.module.state_dict().items()}

    def close(self) -> None:
        """Copy the parameters back into memory that the module owns.

        Collective; the engine cannot be used afterwards.
        """
        self.sharding.close()
