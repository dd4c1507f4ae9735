"""Engines that `mpitrain.initialize` returns for a user's training loop; their interface resembles DeepSpeed's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpitrain.checkpoint import MODEL, Manifest, Part, Store
from mpitrain.comm import Communicator
from mpitrain.comm.memory.device import CPU, start_copy_to_host
from mpitrain.config.learning_rate import WarmUp
from mpitrain.errors import CheckpointError, InputError, refusal
from mpitrain.layers.loss_terms import counted, counts_targets, zero_loss
from mpitrain.layout.mesh import Mesh
from mpitrain.shard.update import set_rate
from mpitrain.trainer.device import explain_out_of_memory, to_device
from mpitrain.trainer.engine import Engine, Loss
from mpitrain.trainer.memory import MemoryAccount
from mpitrain.trainer.optimizing import next_rate, states_after_step
from mpitrain.trainer.options import Settings
from mpitrain.trainer.state import OPTIMIZER
from mpitrain.trainer.user_loop.checks import (
    INSTEAD,
    ClosedEngine,
    UserModel,
    as_pair,
    require_scalar,
    unsupported_in_stages,
)
from mpitrain.trainer.user_loop.generators import DividedDraws, Generators

ALL = 1 << 30  # checkpoints to keep: only the caller removes any


class TrainingEngine:
    """A model that trains on the ranks of a communicator. `initialize` makes it.

    Gradients are averaged over data-parallel ranks and microbatches. In a loop of `backward` and `step` all
    microbatches have equal weight. In `train_batch`, if targets may be masked, a microbatch is weighted by its unmasked
    targets.

    Attributes:
        module: The model, or this rank's part of it.
        optimizer: Optimizer of this rank's part.
        device: Device of the model, to which batches are moved.
        mesh: Ranks along the axes data, pipeline and tensor.
        data_rank: This rank's number among those that read different samples: the `rank` of a DistributedSampler.
        data_size: Number of ranks that read different samples: the `num_replicas` of a DistributedSampler.
        is_first_stage: True if this rank has the model's first block, which uses x.
        is_last_stage: True if this rank has the model's last block, whose loss uses y.
        steps: Updates made so far, including skipped ones.
        norm: 2-norm of the last step's gradients, before clipping.
        loss_terms: Mean of each `LossTerm` of the model in the last `train_batch`, by name.
        scheduler: Scheduler that is stepped after every update; None without one.
        defers: If true, `backward` may be called several times before each `step`, which then sums gradients over ranks
            (with sharded gradients, each pass still sums them). Default false.
    """

    def __init__(
        self, engine: Engine, settings: Settings, loss: Loss | None, scheduler: Any, mesh: Mesh, model: UserModel
    ) -> None:
        self._engine: Any = engine  # an Engine, until it is closed
        self.settings, self._loss, self.scheduler = settings, loss, scheduler
        self.defers = False
        self.module, self.optimizer, self.device = engine.module, engine.optimizer, engine.device
        self.mesh, self._user_model, stages = mesh, model, mesh.stages
        self.data_rank, self.data_size = mesh.readers.rank, mesh.readers.size
        self.is_first_stage, self.is_last_stage = stages.rank == 0, stages.rank == stages.size - 1
        model.mark(engine.module)
        self.steps, self._passes, self.norm, self.skipped = 0, 0, 0.0, 0
        self._own_rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._store: Any = Store(Path(), mesh.world, ALL)  # one for all folders, because it has communicators
        self._generators = Generators(mesh, engine.device)
        self.loss_terms: dict[str, float] = {}
        self._share = 1.0 / (settings.accumulate * engine.comm.size)  # of a microbatch in a step
        self._pending = False  # true between `backward` and `step`
        self._divided = mesh.divided
        self._draws = DividedDraws(self._generators, mesh, engine.device) if self._divided else None

    def __getattr__(self, name: str) -> Any:
        instead = f"; here it is {INSTEAD[name]}" if name in INSTEAD else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{instead}")

    def __iter__(self) -> Iterator[Any]:
        raise InputError(  # DeepSpeed's initialize returns a tuple of four
            "mt.initialize returns only the engine; write engine = mt.initialize(...), and use engine.optimizer"
        )

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Use the model's random generators of this step, and explain an error of exhausted memory."""
        drawing = self._draws.drawing(self.steps) if self._draws is not None else nullcontext()
        with explain_out_of_memory(self.device, lambda: self._engine), drawing:
            yield

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def at_boundary(self) -> bool:
        """True if the next `backward` is the last one before an update."""
        return self._passes == self.settings.accumulate - 1

    @property
    def microbatches_done(self) -> int:
        """Number of microbatches of the step that has begun."""
        return self._passes

    @property
    def loss_scale(self) -> float:
        """Factor of the loss that keeps small fp16 gradients from becoming zero; 1 in other precisions."""
        return float(self._engine.scale.value)

    @contextmanager
    def gathered(self, parameters: Sequence[torch.Tensor], source: int | None = None) -> Iterator[None]:
        """Make all parameters whole in the block. Collective.

        Args:
            parameters: Parameters that the block may change, if the model is not divided.
            source: Rank whose changes of these parameters all ranks take at the end; None to discard changes.
        """
        sharding = self._engine.sharding
        with sharding.parameters.unshard_all():
            places = [parameter.data for parameter in parameters]
            for parameter in parameters:
                parameter.data = parameter.data.clone()  # the ranks of a node may share the original
            yield
            for parameter, place in zip(parameters, places, strict=True):
                changed, parameter.data = parameter.data, place
                if source is not None:
                    self.mesh.world.broadcast(changed, source)
                    place.copy_(changed)
            if source is not None:
                sharding.parameters.take_values()
        if source is not None:
            with torch.no_grad():
                for flat in sharding.flat_parameters:
                    if flat.stored is not None:
                        flat.value.copy_(flat.stored)
            sharding.parameters.publish()

    def train(self, mode: bool = True) -> TrainingEngine:
        self.module.train(mode)
        return self

    def eval(self) -> TrainingEngine:
        return self.train(False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output, or its loss if there is a loss function and the arguments are (x, y).

        Arguments on the host are moved to the model's device.
        """
        if self._loss is None or len(args) != 2 or kwargs:
            return self.output_of(*args, **kwargs)
        with self._computing():
            self._engine.terms.weigh(self._share, self._engine.scale.value)
            return self._loss_of(*self.mesh.take(*to_device(args, self.device)))

    def output_of(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output, also if there is a loss function. Arguments are moved to the model's device."""
        with self._computing():
            args, kwargs = to_device((args, kwargs), self.device)
            self._engine.terms.weigh(self._share, self._engine.scale.value)
            return self._engine.compute(self.module, *args, **kwargs)

    def _loss_of(self, x: Any, y: Any, *, empty: bool = False) -> torch.Tensor:
        """Return the mean loss of a microbatch; if `empty`, none of its targets count."""
        loss = self._loss if not empty else lambda output, y: zero_loss(output)
        assert loss is not None
        result: torch.Tensor = self._engine.compute(lambda x: loss(self.module(x), y), x)
        return result

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a microbatch's mean loss; the last pass before an update also reduces them over ranks.

        All microbatches of a step have equal weight. If they differ in the number of unmasked targets, use
        `train_batch`, or pass the sum over unmasked targets divided by their mean number per microbatch.

        Raises:
            InputError: If `step` was not called since the last `backward`, `loss` is not a scalar that depends on
                parameters, or a parameter requires gradients that did not when the engine was made.
        """
        if self._pending and not self.defers:
            raise InputError(
                "engine.backward was called twice without engine.step between; sum the losses for one "
                "backward pass, and call engine.step() after each"
            )
        self._backward(loss, self._share)

    def _backward(self, loss: torch.Tensor, weight: float) -> None:
        """Add the gradients of a microbatch's mean loss, times its weight in the step's loss."""
        require_scalar(loss)
        self._user_model.require_frozen()
        sharding = self._engine.sharding
        if self._passes == 0 and not self._pending:
            sharding.gradients.zero()
        self._pending = True
        reduce = self.at_boundary and (not self.defers or sharding.gradients.reduces_each_pass)
        with explain_out_of_memory(self.device, lambda: self._engine):
            self._engine.backward(loss * weight, reduce=reduce)

    def step(self) -> bool:
        """Update the parameters if the step's last microbatch is done, and return whether it is. Collective.

        The update is skipped on all ranks if a gradient is not finite on some rank.

        Raises:
            InputError: If `backward` was not called since the last `step`.
        """
        if not self._pending:
            raise InputError(
                "engine.step was called without engine.backward before it; call engine.backward(loss), not "
                "loss.backward(), on every microbatch"
            )
        self._pending = False
        self._passes += 1
        if self._passes < self.settings.accumulate:
            return False
        self._passes = 0
        reducer = self._engine.sharding.reducer
        if self.defers and not reducer.gradients.reduces_each_pass:
            reducer.last = True
            reducer.finish()
        self._update()
        return True

    def _update(self) -> None:
        """Update the parameters with the gradients of a whole step, and advance scheduler and counters."""
        with explain_out_of_memory(self.device, lambda: self._engine):
            result = self._engine.step(self._next_rate())
        if self.scheduler is not None and not result.skipped:
            self.scheduler.step()
        self.steps, self.norm = self.steps + 1, result.norm
        self.skipped += result.skipped

    def show_next_rate(self) -> None:
        """Set the optimizer's learning rate to that of the next update, which each update otherwise does itself."""
        rate = self._next_rate()
        if rate is not None:
            set_rate(self.optimizer, rate)

    def _next_rate(self) -> float | None:
        """Return the learning rate of the next update; None if the optimizer already has it."""
        schedule, deepspeed = self.settings.schedule, self.settings.deepspeed is not None
        update = self.steps - self.skipped * deepspeed  # DeepSpeed does not step a schedule for a skipped update
        if not isinstance(schedule, WarmUp) or schedule.peak is not None:
            return None if schedule is None else next_rate(schedule, self.optimizer, update)
        for group, base_rate in zip(self.optimizer.param_groups, self._own_rates, strict=True):
            group["lr"] = schedule.rate(update, base_rate)
        return None

    def train_batch(self, batches: Iterator[tuple[Any, Any]]) -> float:
        """Take a whole step on the next microbatches (x, y) of an iterator. Collective.

        Returns:
            Mean loss over microbatches and ranks, plus the loss terms of the model.

        Raises:
            InputError: If there is no loss function, a step has begun, or the iterator ends in the middle of a step.
            StopIteration: If the iterator has no microbatch left.
        """
        self._require_loss("train_batch")
        engine, size = self._engine, self._engine.comm.size
        microbatches = [self.mesh.take(*self._next(batches, n)) for n in range(self.settings.accumulate)]
        weights = self._weights(microbatches)
        mean = torch.zeros(1 + len(engine.terms.names), dtype=torch.float64, device=self.device)
        engine.terms.take(self.device)  # drop terms of passes before this step
        for batch, weight in zip(microbatches, weights, strict=True):
            with self._computing():
                x, y = to_device(batch, self.device)
                engine.terms.weigh(self._share, engine.scale.value)
                loss = self._loss_of(x, y, empty=not weight)
            self._backward(loss, weight)
            even = weight == self._share
            mean[0] += loss.detach() / self.settings.accumulate if even else loss.detach() * (weight * size)
            if self.at_boundary:
                mean += engine.terms.take(self.device) * size
                engine.comm.all_reduce(mean, "avg")
                fetched_mean = start_copy_to_host(mean)
            self.step()
        return self._set_loss_terms(fetched_mean().tolist())

    def _weights(self, microbatches: Sequence[tuple[Any, Any]]) -> list[float]:
        """Return the weight of each microbatch in the loss of a step. Collective if targets may be masked."""
        engine, loss = self._engine, self._loss
        engine.counted = partial(counted, loss) if counts_targets(loss, microbatches[0][1]) else None
        weights: list[float] = engine.weigh([y for _, y in microbatches], [self._share] * len(microbatches))
        return weights

    def _set_loss_terms(self, means: Sequence[float]) -> float:
        """Set `loss_terms`, and return the loss, from their means: first the loss, then each term."""
        self.loss_terms = dict(zip(self._engine.terms.names, means[1:], strict=True))
        return float(means[0])

    def eval_batch(self, batches: Iterator[tuple[Any, Any]]) -> float:
        """Return the mean loss of the next microbatches of an iterator, without training. Collective.

        It takes as many microbatches as a step has, and raises the errors of `train_batch`.
        """
        self._require_loss("eval_batch")
        return self.evaluate([self._next(batches, number) for number in range(self.settings.accumulate)])

    def evaluate(self, batches: Iterable[tuple[Any, Any]]) -> float:
        """Return the mean loss of the samples (x, y) of all ranks, in evaluation mode. Collective.

        If targets may be masked, the mean is over those that are not. The model's loss terms are not included.
        Data-parallel ranks may have different numbers of samples, but at stage 3 they need the same number of batches.
        """
        self._require_loss("evaluate")
        on = self.device if self._engine.pipeline is None else CPU  # a pipeline returns its losses on the host
        sums = torch.zeros(2, dtype=torch.float64, device=on)
        for batch in batches:
            with explain_out_of_memory(self.device, lambda: self._engine):
                x, y = to_device(as_pair(batch), self.device)
                self._engine.counted = partial(counted, self._loss) if counts_targets(self._loss, y) else None
                count = self._engine.count(x, y)
                sums[0] += self._engine.evaluate(x, y).double() * count
                sums[1] += count
        if self._engine.pipeline is not None:  # other stages may have no targets
            self._engine.pipeline.comm.broadcast(sums, self._engine.pipeline.last_rank)
        self._engine.comm.all_reduce(sums)
        total, samples = sums.tolist()
        if not samples:
            raise refusal("evaluate got no samples, or only masked targets; pass an iterable of (x, y)")
        return float(total / samples)

    def _require_loss(self, method: str) -> None:
        if self._passes or self._pending:
            raise refusal(f"{method} was called within a step; call engine.step() to finish the step first")
        if self._loss is None:
            raise refusal(f"{method} needs a loss; pass loss= to mt.initialize")

    def _next(self, batches: Iterator[tuple[Any, Any]], number: int) -> tuple[Any, Any]:
        """Return the next microbatch, which has index `number` in its step."""
        if not hasattr(batches, "__next__"):
            raise refusal(
                f"the microbatches of a step must come from an iterator, not a {type(batches).__name__}; call "
                "iter(...) on it once, before the first step"
            )
        try:
            return as_pair(next(batches))
        except StopIteration:
            if not number:
                raise
        raise InputError(
            f"the iterator ended after {number} of the {self.settings.accumulate} microbatches of a step; "
            "provide whole steps, or an endless iterator"
        )

    # -- checkpoints

    def save(self, path: str | Path, values: Mapping[str, Any] | None = None) -> Path:
        """Write a checkpoint into the folder path/step-N, and return that folder. Collective.

        The folder `path` belongs to this job until it ends: `save` of another job into it is refused. Only files that
        are known to belong to a checkpoint are removed or replaced.

        Args:
            path: Folder of the checkpoints.
            values: Values that `load` returns, representable as JSON; those of rank 0 are stored.

        Raises:
            InputError: If a step has begun, or another job uses the folder.
        """
        if self._passes or self._pending:
            raise InputError(
                "engine.save within a step would lose its gradients; save after engine.step() has returned True"
            )
        parts, rest = self._engine.parts()
        rates = [float(settings["lr"]) for settings in self.optimizer.param_groups]
        parts.append(self._generators.part())
        rest["random"] = self._generators.values()
        mine = {"steps": self.steps, "skipped": self.skipped, "rates": rates, "values": dict(values or {})}
        if self.scheduler is not None:
            kinds = (bool, int, float, str, list, type(None))  # JSON's types; functions are left out
            state = self.scheduler.state_dict()
            mine["scheduler"] = {key: value for key, value in state.items() if isinstance(value, kinds)}
        self._store.move_to(Path(path))
        self._store.prepare(set_aside=False, lock=True)
        folder = self._store.save(self.steps, parts, rest | {"engine": mine})
        self._store.finish()
        return folder

    def load(self, path: str | Path) -> dict[str, Any]:
        """Load the checkpoint at `path`, or the newest complete one in it, and return its `values`. Collective.

        ZeRO stage, mesh and number of ranks may differ from those that saved it. On the same mesh, random generators
        continue; on another, they are seeded for the step (see docs/loop.md).

        Raises:
            InputError: If there is no checkpoint, or its optimizer states belong to another optimizer.
            CheckpointError: If none of the checkpoints can be used.
        """
        self._store.move_to(Path(path))
        reasons = []

        def parts(manifest: Manifest) -> list[Part]:
            require_same_optimizer(self.optimizer, manifest, Path(path))
            return self._engine.parts_to_load(manifest) + self._generators.parts_to_load(manifest)

        try:
            folders = self._store.at(Path(path))
        except InputError:
            raise refusal(f"there is no checkpoint in {path}; give a folder that engine.save has written to") from None
        for folder in folders:
            try:
                manifest = self._store.load(folder, parts)
            except CheckpointError as error:
                reasons.append(str(error))
                continue
            self._engine.finish_load(manifest)
            self._generators.finish_load(manifest)
            if self._draws is not None:
                self._draws.restart()
            mine = manifest.values.get("engine", {"steps": manifest.step, "skipped": 0, "values": {}})
            self.steps, self.skipped, self._passes, self._pending = mine["steps"], mine["skipped"], 0, False
            for settings, rate in zip(self.optimizer.param_groups, mine.get("rates", ()), strict=False):
                settings["lr"] = rate
            if self.scheduler is not None and "scheduler" in mine:
                self.scheduler.load_state_dict(mine["scheduler"])
            return mine["values"]
        raise CheckpointError(f"no checkpoint in {path} can be used: {(reasons or ['it is empty'])[0]}")

    # -- for people

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return a copy of the whole model's state, on every rank. Collective."""
        if not self._divided:
            return self._engine.state_dict()
        parts, rest = self._engine.parts()
        return whole_state(self.mesh.world, parts, self._user_model.names, rest["tied"], self.device)

    def memory(self) -> MemoryAccount:
        """Return the bytes of each category on this rank, as measured and by formula."""
        return self._engine.memory()

    def close(self) -> None:
        """Copy the parameters back into memory that the model owns, and free all other resources. Collective.

        Model and optimizer can then be used without the engine; methods that train, save or load raise InputError.
        """
        if isinstance(self._engine, ClosedEngine):
            return
        self._store.close()
        self._engine.close()
        self.mesh.free()
        self._user_model.release()
        self._engine = self._store = ClosedEngine()


class PipelineEngine(TrainingEngine):
    """Engine of a model in stages, through which `train_batch` sends all microbatches of a step.

    All ranks of a pipeline pass the same microbatches. The first stage uses x and the last one y; on other stages,
    tensors of the same shapes are enough.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise unsupported_in_stages("engine(...)")

    def backward(self, loss: torch.Tensor) -> None:
        raise unsupported_in_stages("engine.backward")

    def step(self) -> bool:
        raise unsupported_in_stages("engine.step")

    def evaluate_whole_batches(self) -> None:
        """Let `evaluate` send each batch through the stages in one piece, for losses whose parts have other means."""
        self._engine.pipeline.microbatches = 1

    def train_batch(self, batches: Iterator[tuple[Any, Any]]) -> float:
        """Take a whole step on the next microbatches (x, y) of an iterator. Collective.

        Returns:
            Mean loss over microbatches and data-parallel ranks, plus the model's loss terms, on every rank.

        Raises:
            InputError: If the iterator ends in the middle of a step.
            StopIteration: If the iterator has no microbatch left.
        """
        self._user_model.require_frozen()
        count, engine = self.settings.accumulate, self._engine
        microbatches = [self.mesh.take(*self._next(batches, number)) for number in range(count)]
        weights = self._weights(microbatches) if self.is_last_stage else [self._share] * count
        engine.sharding.gradients.zero()
        with self._computing():
            microbatches = to_device(microbatches, self.device)
            loss = engine.through_pipeline(microbatches, weights, [self._share] * count)
        total = torch.tensor([loss, *engine.term_sums.sum(0).tolist()], dtype=torch.float64)
        engine.comm.all_reduce(total)
        self._update()
        return self._set_loss_terms(total.tolist())


def whole_state(
    world: Communicator, parts: Iterable[Part], names: Sequence[str], aliases: Mapping[str, str], device: torch.device
) -> dict[str, torch.Tensor]:
    """Assemble the whole state of a model from the parts of all ranks. Collective.

    Args:
        world: Ranks that have parts of the model.
        parts: Parts that this rank writes into a checkpoint.
        names: Names of the tensors in the model's state, in order.
        aliases: Further names of tensors, mapped to the names under which they are saved.
        device: Device of the result.

    Returns:
        The tensors by name; names of the same tensor share it.
    """
    model = [part for part in parts if part.spec.name.startswith(MODEL)]
    specs_of_ranks = world.all_gather_object([[p.spec.name, list(p.spec.shape), p.spec.dtype] for p in model])
    specs = {name: (shape, getattr(torch, dtype)) for of_rank in specs_of_ranks for name, shape, dtype in of_rank}
    mine: dict[str, list[Part]] = {}
    for part in model:
        mine.setdefault(part.spec.name, []).append(part)
    saved = {name: MODEL + aliases.get(name, name) for name in names}
    tensors: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys(saved.values()):
        shape, dtype = specs[name]
        whole = torch.zeros(prod(shape), dtype=dtype, device=device)
        for part in mine.get(name, ()):
            starts, lengths, places = part.piece.runs()
            at = np.repeat(starts - places, lengths) + np.arange(part.data.numel())
            whole[torch.from_numpy(at).to(device)] = part.data.to(device)
        if whole.numel():
            world.all_reduce(whole, "max" if dtype == torch.bool else "sum")
        tensors[name] = whole.view(shape)
    return {name: tensors[saved_name] for name, saved_name in saved.items()}


def require_same_optimizer(optimizer: torch.optim.Optimizer, manifest: Manifest, folder: Path) -> None:
    """Raise InputError if a checkpoint lacks states that the optimizer needs, or has states that it does not know.

    Checkpoints without optimizer states pass. All pass if a trial step cannot show which states the optimizer needs.

    Args:
        optimizer: Optimizer of the engine.
        manifest: Manifest of the checkpoint.
        folder: Folder of the checkpoint, for the message.
    """
    saved = {name.removeprefix(OPTIMIZER).split("/")[0] for name in manifest.tensors if name.startswith(OPTIMIZER)}
    trials = [
        states_after_step(optimizer, group, shape) for group in optimizer.param_groups for shape in ((8,), (8, 8))
    ]
    tried = [set(states) for states in trials if states is not None]
    if not saved or len(tried) < len(trials):
        return
    if saved <= set().union(*tried) and set.intersection(*tried) <= saved:
        return
    needed = ", ".join(sorted(set().union(*tried))) or "none"
    raise refusal(
        f"{folder} has states of another optimizer ({', '.join(sorted(saved))}) than "
        f"{type(optimizer).__name__} ({needed}); pass the optimizer that saved it to mt.initialize, or export "
        f"only the weights (python -m mpitrain.checkpoint export {folder} weights.pt) and load those"
    )
