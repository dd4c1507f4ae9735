"""The training step of a data-parallel rank: forward, backward, reduction, clipping, update.

The loss of a step is the mean over its global batch, however it is cut: each microbatch counts with its share
of the samples, or of the targets that are not masked (`layers.loss_terms`), and the ranks' gradients are summed. So the
same batch gives the same step on any number of ranks, also when they get unequal parts of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
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
from mpitrain.layers.loss_terms import Count, Counts, LossTerms, nothing, numbers, samples_in
from mpitrain.layers.precision import DTYPES, convert, narrowed
from mpitrain.layers.sync_batchnorm import SyncBatchNorm
from mpitrain.layout.ownership import Division
from mpitrain.monitor.parts import StepClock
from mpitrain.shard.ddp import broadcast_tensors
from mpitrain.shard.flat_parameters import refuse_unless_elementwise
from mpitrain.shard.sharding import Sharding
from mpitrain.shard.update import Updater, set_rate
from mpitrain.shard.virtual_workers import TreeSum
from mpitrain.trainer.memory import ActivationMeter, MemoryAccount, PipelineMeter, counting, measure
from mpitrain.trainer.optimizing import state_bytes
from mpitrain.trainer.state import EngineState, merged

Loss = Callable[[Any, Any], torch.Tensor]
Microbatch = tuple[Any, Any]
Seen = Callable[[Any, Any], None]  # of an output and its targets


@dataclass
class LossScale:
    """The number losses are multiplied by: halved when gradients overflow, doubled after `patience` good steps.

    With it small gradients do not become zero in fp16 (Micikevicius et al. 2018, Mixed Precision Training).

    spare: overflows that are let pass before it is halved, counted anew once it is doubled; refill: at each good step.
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
    """The outcome of `Engine.step`.

    Attributes:
        norm: The 2-norm of all gradients, before clipping.
        skipped: Nothing was updated, because the norm is not finite.
    """

    norm: float
    skipped: bool


def broadcast_copies(module: nn.Module, comm: Communicator, division: Division) -> None:
    """Give every copy of a parameter or buffer the value of the replica that is its source. Collective over `comm`.

    Args:
        module: This rank's part of the model.
        comm: The replicas.
        division: How the model is divided, and so which replicas have copies.
    """
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        owner = division.owner(name, tensor)
        for group in division.copies(owner, comm):
            broadcast_tensors([tensor], group, owner.source)


class Engine:
    """A module, its loss and its optimizer on the data-parallel ranks. Collective to make.

    Args:
        module: The model, or this rank's part of it; every rank gets rank 0's values.
        loss: loss(module(x), y): the mean over the samples given.
        optimizer: Of the module's parameters, without a state yet.
        comm: The data-parallel ranks.
        config: The settings, of which run.reproducible, train.clip, train.precision, [parallel] and [comm] count.
            The optimizer's states and copy are fp32 in any precision.
        division: How the model is divided over the axes of a mesh.
        scale: Of the loss; None: as the precision needs it.
        reduce_dtype: In which gradients are added up and reduced; None: the parameters' own.

    Attributes:
        device: Where the module's parameters are.
        settled: Whether parameters and states are those between two updates, not half-way through one.
        synchronous: Whether layers communicate, so that every rank needs as many microbatches as any other.
        note: What is to be said about the state that was loaded; empty for nothing.
        clock: Counts the time of forward, backward and update.
        metering: Whether to count what autograd keeps, in the next forward pass that it keeps anything of.
        pipeline: What takes microbatches through the stages of the model; None where it is whole.
        counted: What the mean loss of the targets of a microbatch is over, where that differs from its samples; None:
            it does not.
        terms: What the model adds to the loss.
        term_sums: The part of the mean of each term that each virtual worker of this rank had in the last step,
            float64 [workers, terms].
    """

    note: str = ""
    counted: Counts | None = None

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
        others = [other for other in division.others.values() if other.size > 1]
        dividing = division.dividing()
        if dividing:  # ranks have parts of matrices
            refuse_unless_elementwise(optimizer, gathered=True, otherwise=f"parallel.{next(iter(dividing))} 1")
        self.pipeline = division.pipeline
        broadcast_copies(module, comm, division)
        convert(module, self.precision)
        self.sharding = self._place(division)
        self.device = self.sharding.groups[0].device
        self.scale = scale if scale is not None else LossScale.of(self.precision)
        self.settled = True
        self._updater = Updater(self.sharding, others, list(dividing.values()))
        self._axes = [self.sharding.shard, *others]
        self._updating = comm.size  # ranks that divide the optimizer's states between them, or could
        self._state = EngineState(self.sharding, division)
        self.synchronous = any(isinstance(m, SyncBatchNorm) for m in module.modules())
        stages = self.pipeline.comm if self.pipeline is not None else None
        if stages is not None:
            self.synchronous = any(stages.all_gather_object(self.synchronous))
        self.terms = LossTerms(module, stages)
        self.term_sums = torch.zeros(0, len(self.terms.names), dtype=torch.float64)
        if self.terms.names and config.parallel.sequence:
            raise refusal(
                f"parallel.sequence gives ranks parts of activations, by one of which the model adds "
                f"{self.terms.names[0]!r} to the loss; set it to false"
            )
        self._meter: ActivationMeter | PipelineMeter = ActivationMeter(module)
        self.metering = True
        journal = comm.journal
        self.clock = StepClock(lambda: journal.waited, self.device)
        if self.pipeline is not None:
            self._meter = PipelineMeter(module)
            self.pipeline.watched = counting(self.clock, self._meter)
        self._example: Any = None  # a microbatch, for passes that other ranks need and this one has no samples for

    def _place(self, division: Division) -> Sharding:
        """Place the module and its optimizer. Collective."""
        return Sharding(self.module, self.optimizer, self.comm, self.config, division, self._reduce_dtype)

    # -- the pieces of a step

    def forward(self, x: Any, y: Any, *, empty: bool = False) -> torch.Tensor:
        """The mean loss of the samples. empty: None of their targets count; the loss is 0."""
        with self.clock.forward:
            return self._loss_of(x, y, empty=empty)

    def _loss_of(self, x: Any, y: Any, seen: Seen | None = None, *, empty: bool = False) -> torch.Tensor:
        if self.sharding.parameters.gathers:
            self._example = (x, y)

        def loss(x: Any) -> torch.Tensor:
            output = self.module(x)
            if seen is not None:
                seen(output, y)
            return nothing(output) if empty else self.loss(output, y)

        return self.compute(loss, x)

    def compute(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """function(*args, **kwargs) in the engine's precision, arguments included."""
        args = tuple(narrowed(a, self.precision) for a in args)
        kwargs = {name: narrowed(a, self.precision) for name, a in kwargs.items()}
        cast = torch.autocast(self.device.type, DTYPES[self.precision]) if self.precision != "fp32" else nullcontext()
        with cast, self._metered():
            return function(*args, **kwargs)

    @contextmanager
    def _metered(self) -> Iterator[None]:
        """Count what autograd keeps, where that was asked for."""
        if not self.metering or not torch.is_grad_enabled():
            yield
            return
        with self._meter.counting(self.sharding.parameters):
            yield
        self.metering = False

    def backward(self, loss: torch.Tensor, *, reduce: bool) -> None:
        """Add the gradients of a scalar.

        reduce: whether this is the last backward pass before the step; stages 2 and 3 reduce every pass anyway.
        """
        self.sharding.reducer.enabled = reduce or self.sharding.gradients.reduces_each_pass
        self.sharding.reducer.last = reduce
        with self.clock.backward:
            (loss * self.scale.value if self.scale.value != 1.0 else loss).backward()
            self.sharding.parameters.end_of_backward()

    # -- a step

    def forward_backward(
        self,
        workers: Sequence[Sequence[Microbatch]],
        samples: int,
        *,
        rounds: int = 1,
        before: Callable[[int], None] = lambda worker: None,
    ) -> torch.Tensor:
        """Gradients of one step, and the part of its loss that each virtual worker of this rank has.

        Gradients are summed in order within a virtual worker, and over virtual workers as a binary tree.

        Args:
            workers: Microbatches (x, y) of each virtual worker of this rank; may be empty.
            samples: Of the global batch.
            rounds: The most microbatches that any rank has.
            before: Called with the number of a virtual worker on this rank before its passes, to seed what is
                random in them.

        Returns:
            The parts of the loss, float64 [workers], on the device, which may still be at work on them.
        """
        self.sharding.gradients.zero()
        microbatches = [m for worker in workers for m in worker]
        shares = [len(x) / samples for x, _ in microbatches]
        weights = self.weigh([y for _, y in microbatches], shares)
        if self.pipeline is not None:
            before(0)
            told = self.through_pipeline(microbatches, weights, shares)
            return torch.tensor([told], dtype=torch.float64)
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
        for _ in range(done, rounds):  # the collective passes of the ranks that have more microbatches than this one
            if self.sharding.parameters.gathers:
                self.backward(self.forward(*self._example) * 0.0, reduce=False)
            elif self.sharding.gradients.reduces_each_pass:
                self.sharding.reducer.finish()
        if tree is not None or (done == 0 and not self.sharding.gradients.reduces_each_pass):
            self.sharding.reducer.finish()
        return losses

    def weigh(self, targets: Sequence[Any], shares: Sequence[float]) -> list[float]:
        """Return what each microbatch weighs in the mean loss of a step. Collective where targets may be masked.

        Args:
            targets: Of each microbatch of this rank.
            shares: Its samples over those of the global batch.
        """
        if self.counted is None:
            return list(shares)
        counts = numbers(self.counted(y) for y in targets)
        sums = torch.tensor([sum(counts), sum(shares)], dtype=torch.float64)
        self.comm.all_reduce(sums, reproducible=True)
        total, here = sums.tolist()
        part = 1.0 if math.isclose(here, 1.0) else here  # these ranks have all of the global batch, or a part of it
        return [count / total * part if total else 0.0 for count in counts]

    def through_pipeline(
        self, microbatches: Sequence[Microbatch], weights: Sequence[float], shares: Sequence[float]
    ) -> float:
        """Gradients of one step through the stages of the model, reduced. Collective.

        Args:
            microbatches: Of this rank.
            weights: Of the loss of each.
            shares: Of the terms that the model adds, in each.

        Returns:
            The sum of weights[i] * loss_i over this rank's microbatches, and what the model adds to it, on every rank
            of the pipeline.
        """
        pipeline = self.pipeline
        assert pipeline is not None
        self.sharding.reducer.enabled = False
        scaled = [weight * self.scale.value for weight in weights]
        cast = [(narrowed(x, self.precision), y) for x, y in microbatches]
        pipeline.counted = self.counted
        self.terms.weigh(0.0, self.scale.value)
        loss = self.compute(lambda: pipeline.forward_backward(cast, scaled, shares))
        with self.clock.backward:
            used = self.sharding.reducer.touched()
            self.sharding.gradients.settle()  # copies of tied parameters must lie alike on all ranks
            pipeline.synchronize_tied(used)
            self.sharding.reducer.finish()
        sums = self.terms.take(self.device).cpu()
        self.term_sums = sums[None, 1:]
        return loss / self.scale.value + float(sums[0])

    def step(self, lr: float | None = None) -> StepResult:
        """Clip the gradients and update, unless they are not finite on some rank. Collective.

        lr: The learning rate; None leaves the optimizer's own.
        """
        with self.clock.optimizer:
            if lr is not None:
                set_rate(self.optimizer, lr)
            squares = self._updater.squares()
            told = device.fetched(squares)
            if unseen := self._updater.skips:
                self._update_unseen(squares)
            found = float(told())
            norm = math.sqrt(found) / self.scale.value if math.isfinite(found) else math.nan
            finite = math.isfinite(norm)
            if finite and not unseen:
                self._update(norm)
            self.scale.update(overflowed=not finite)
        self.clock.settle()
        return StepResult(norm, not finite)

    def _update(self, norm: float) -> None:
        """Clip gradients of that norm, and update with them."""
        factor = 1.0 / self.scale.value
        if self.clip and norm > self.clip:
            factor *= self.clip / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_ does
        self.settled = False
        self._updater.apply(factor)
        self.settled = True

    def _update_unseen(self, squares: torch.Tensor) -> None:
        """Clip and update on the device, before the host knows the norm; the device decides whether to update."""
        norm = squares[0].sqrt() / self.scale.value
        divisor = torch.full_like(norm, self.scale.value)
        if self.clip:
            divisor *= torch.where(norm > self.clip, (norm + 1e-6) / self.clip, 1.0)
        self.settled = False
        self._updater.apply_unless((~norm.isfinite()).float(), divisor.float())
        self.settled = True

    @torch.no_grad()
    def evaluate(self, x: Any = None, y: Any = None, seen: Seen | None = None) -> torch.Tensor:
        """The loss of this rank's samples, without training on them: a scalar, on the device.

        Without samples: take part in the forward pass of other ranks; the result means nothing. seen: called with each
        output and its targets, where the model ends; the scores may be this tensor rank's part of them.
        """
        if x is None:
            if not self.sharding.parameters.gathers:
                return torch.zeros(())
            x, y = self._example
        if self.pipeline is not None:
            self.pipeline.counted = self.counted
            return torch.tensor(self.compute(self.pipeline.evaluate, x, y, seen), dtype=torch.float64)
        was_training = self.module.training
        self.module.eval()
        try:
            loss = self._loss_of(x, y, seen)
        finally:
            self.module.train(was_training)
        if self.counted is None:
            return loss
        some = torch.as_tensor(self.counted(y), device=loss.device) > 0
        return torch.where(some, loss, 0.0)  # instead of NaN: see `nothing`

    def count(self, x: Any, y: Any) -> Count:
        """Return what the mean loss of some samples is over: targets that are not masked, or samples."""
        return samples_in(x) if self.counted is None else self.counted(y)

    # -- checkpoints

    def parts(self, *, alone: bool = False) -> tuple[list[Part], dict[str, Any]]:
        """Return what this rank writes into a checkpoint, and the values that go with it. Collective, unless alone.

        alone: The parts of all data-parallel ranks, where each of them has everything (stage 0).
        """
        parts, values = self._state.parts(alone=alone)
        for axis in () if alone else self._axes:
            values["optimizer"] = merged(axis.all_gather_object(values["optimizer"]))
        return parts, values | {"loss_scale": self.scale.state(), "precision": self.precision}

    def checkpoint_bytes(self) -> int:
        """Bytes of what this rank writes into a checkpoint, with the optimizer's states that the first step makes."""
        parts, _ = self._state.parts()
        nbytes = sum(part.data.nbytes for part in parts)
        if any(self.optimizer.state.values()) or self.sharding.share is None:
            return nbytes
        return nbytes + self._state.trained() * state_bytes(self.optimizer) // self._updating

    def parts_to_load(self, manifest: Manifest) -> list[Part]:
        """Return the parts that this rank fills from a checkpoint; `finish_load` then puts them in place."""
        return self._state.parts_to_load(manifest)

    def finish_load(self, manifest: Manifest) -> None:
        """Put what `parts_to_load` named in place, once all of it is filled. Collective."""
        self._state.finish_load()
        if "loss_scale" in manifest.values:
            self.scale.load(manifest.values["loss_scale"])
        if groups := manifest.values.get("local"):
            self.note = f"of the {groups['groups']} groups that saved it, the optimizer's state is that of the first"

    # -- for people

    def memory(self) -> MemoryAccount:
        """Bytes by category on this rank, as they are, and by formula."""
        return measure(self.sharding, self._meter.nbytes)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """A copy of the module's whole state, on every rank, for torch's load_state_dict. Collective."""
        with self.sharding.parameters.whole():
            return {name: value.detach().clone() for name, value in self.module.state_dict().items()}

    def close(self) -> None:
        """Give the module's parameters memory of their own again. Collective; the engine is of no use afterwards."""
        self.sharding.close()
