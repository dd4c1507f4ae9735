"""`mpitrain.initialize`, which makes an engine for a user's training loop; its interface resembles DeepSpeed's.

engine = mt.initialize(model=model, optimizer=optimizer, config="train.toml")
for x, y in batches:                    # this rank's microbatches
    loss = engine(x, y)
    engine.backward(loss)
    engine.step()                       # updates after the last microbatch of a step, otherwise only counts
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mpitrain.comm import Communicator, carry_device_memory, init, set_timeout
from mpitrain.config.deepspeed import looks_like_deepspeed, read_deepspeed, read_json
from mpitrain.config.parallel import ParallelSection
from mpitrain.config.section import declared
from mpitrain.config.settings import Config, ConfigSource
from mpitrain.config.training import OptimSection
from mpitrain.errors import refusal
from mpitrain.layers.precision import DTYPES
from mpitrain.layout.mesh import BLOCKS, LAYERS, Mesh, axes_of, count_along
from mpitrain.parallel.dividing import ModelPart, Plan, divide, move
from mpitrain.parallel.rules import Combination, require_compatible
from mpitrain.shard.ddp import DistributedDataParallel, broadcast_state
from mpitrain.shard.flat_parameters import has_stepped
from mpitrain.trainer.assemble import compile_blocks
from mpitrain.trainer.device import device_of_module
from mpitrain.trainer.engine import Engine, Loss, LossScale
from mpitrain.trainer.optimizing import (
    ParameterRoles,
    avoid_importing_compiler,
    make_optimizer,
    make_scheduler,
    optimizer_class,
)
from mpitrain.trainer.options import Settings, every_setting, from_config, from_deepspeed
from mpitrain.trainer.user_loop.checks import UserModel
from mpitrain.trainer.user_loop.training_engine import PipelineEngine, TrainingEngine

Names = Mapping[nn.Parameter, Sequence[str]]
OptimizerOf = torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def initialize(
    model: nn.Module,
    optimizer: OptimizerOf | None = None,
    config: ConfigSource = None,
    *,
    loss: Loss | None = None,
    scheduler: Any = None,
    comm: Communicator | None = None,
    plan: Plan | None = None,
    blocks: Sequence[str] = (),
    auto: ConfigSource = None,
) -> TrainingEngine:
    """Make an engine that trains a model on the ranks of a communicator. Collective.

    Args:
        model: Module to train, on the device that this rank computes on. A model on the CPU is moved if run.device
            names another kind of device. With parallel.pipeline or parallel.tensor it is divided, and cannot be used by
            itself afterwards.
        optimizer: Optimizer of model.parameters(), or a function that makes one from parameters; None for the
            configuration's.
        config: TOML file or nested values of `mpitrain.config.settings`, also the config.toml of a finished run; or a
            DeepSpeed JSON file or its values.
        loss: Function called as loss(model(x), y), a mean over samples or targets; None for the model's `loss`, if any.
        scheduler: Scheduler to step after every update, or a function that makes one from the optimizer; None for the
            configuration's if `optimizer` is None, too.
        comm: Ranks to train on; None for all.
        plan: Division of layers with parallel.tensor (see `mpitrain.parallelize`); None for its `tensor_plan()`.
        blocks: Names of the modules that form the model in sequence, with parallel.pipeline; empty for the model's
            `pipeline_blocks()`, or the modules of an nn.Sequential.
        auto: Settings of mpitrain, in a TOML file or nested, that replace "auto" in a DeepSpeed configuration.

    Returns:
        The engine; with parallel.pipeline a `PipelineEngine`.

    Raises:
        InputError: If a key is not supported, settings or models differ between ranks, or the model has an engine.
    """
    _refuse_model(model)
    comm = comm if comm is not None else init()
    settings = _read(config, comm.size, auto, own_optimizer=optimizer is not None)
    read, ours = settings.deepspeed, settings.config
    _refuse_twice(_origin(config), "an optimizer", optimizer, read and "name" in ours.optim.model_fields_set)
    _refuse_twice(_origin(config), "a scheduler", scheduler, settings.schedule or (read and read.torch_schedule))
    return make_engine(
        model, settings, comm, optimizer=optimizer, loss=loss, scheduler=scheduler, plan=plan, blocks=blocks
    )


def make_engine(
    model: nn.Module,
    settings: Settings,
    comm: Communicator,
    *,
    optimizer: OptimizerOf | None = None,
    loss: Loss | None = None,
    scheduler: Any = None,
    plan: Plan | None = None,
    blocks: Sequence[str] = (),
) -> TrainingEngine:
    """Make an engine from settings that have been read. Collective; see `initialize` for the other arguments.

    Args:
        model: Module to train.
        settings: Settings, the same on all ranks.
        comm: Ranks to train on.
        optimizer: Optimizer, or a function that makes one; it replaces that of the settings.
        loss: Function called as loss(model(x), y).
        scheduler: Scheduler to step after every update, or a function that makes one.
        plan: Division of layers.
        blocks: Names of the modules that form the model in sequence.
    """
    ours, read = settings.config, settings.deepspeed
    passed_model = UserModel(model)
    arguments = flatten({"optimizer argument": optimizer is not None, "scheduler argument": scheduler is not None})
    require_equal(comm, [*describe_settings(settings, optimizer is not None), *arguments, *describe_model(model)])
    _apply_process_settings(settings, comm)
    make = _optimizer_maker(optimizer, settings, model, comm)
    mesh = make_mesh(comm, ours.parallel)
    divided, loss = place_on_mesh(model, mesh, ours, loss=loss, plan=plan, blocks=blocks)
    local_optimizer = make(divided.module)  # groups from the configuration may differ between stages
    require_equal(comm, [] if optimizer is None else [*describe_groups(local_optimizer, whole=not mesh.divided)])
    engine = _engine(divided, loss or (lambda output, y: output), local_optimizer, mesh, settings)
    if ours.model.compile:
        compile_blocks(divided.blocks, engine, comm)
    if read is not None and read.torch_schedule is not None:
        scheduler = partial(make_scheduler, *read.torch_schedule)
    kind = TrainingEngine if engine.pipeline is None else PipelineEngine
    return kind(engine, settings, loss, resolve_scheduler(scheduler, local_optimizer), mesh, passed_model)


def _engine(divided: ModelPart, loss: Loss, optimizer: torch.optim.Optimizer, mesh: Mesh, settings: Settings) -> Engine:
    read = settings.deepspeed
    scale = LossScale(**read.scale) if read is not None and read.scale is not None else None
    dtype = DTYPES[read.reduce_dtype] if read is not None and read.reduce_dtype is not None else None
    config, division = settings.config, divided.division
    return Engine(
        divided.module, loss, optimizer, mesh.replicas, config, division=division, scale=scale, reduce_dtype=dtype
    )


def _refuse_model(model: nn.Module) -> None:
    """Raise InputError for a model that another wrapper already averages, or that has nothing to train."""
    if isinstance(model, (DistributedDataParallel, nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise refusal(f"the model is already wrapped in {type(model).__name__}; pass its .module to mt.initialize")
    if not any(p.requires_grad for p in model.parameters()):
        raise refusal(f"no parameter of {type(model).__name__} requires gradients; set requires_grad of those to train")


def _refuse_twice(origin: str, what: str, argument: object, configured: object) -> None:
    """Raise InputError if both the caller and the configuration specify something."""
    if argument is not None and configured:
        raise refusal(f"{what} was passed, but {origin} names another; remove one of them")


def _optimizer_maker(
    user_optimizer: OptimizerOf | None, settings: Settings, model: nn.Module, comm: Communicator
) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Return a function that makes the optimizer of this rank's part, the caller's or the configuration's. Collective.

    model: the whole model, before its division. Its parameters' names and places determine their groups.
    """
    read = settings.deepspeed
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    section = _optim(settings) if user_optimizer is None else settings.config.optim
    roles = ParameterRoles.of(section, model) if user_optimizer is None else None

    def make(module: nn.Module) -> torch.optim.Optimizer:
        if user_optimizer is None:
            optimizer = make_optimizer(section, module.named_parameters(), roles)
        else:
            optimizer = optimizer_for_part(user_optimizer, names, module, comm)
        if read is not None and read.any_optimizer:
            optimizer.elementwise = True  # type: ignore[attr-defined]
        return optimizer

    return make


def _optim(settings: Settings) -> OptimSection:
    """Return the optimizer section, with the class's default learning rate if a DeepSpeed configuration has none."""
    section = settings.config.optim
    if settings.deepspeed is None or "lr" in section.model_fields_set:
        return section
    if "name" not in section.model_fields_set:
        raise refusal("no optimizer was passed, and the configuration has none; pass one to mt.initialize")
    rate = signature(optimizer_class("optimizer.type", section.name)).parameters["lr"].default
    return section.model_copy(update={"lr": float(rate)})


def _apply_process_settings(settings: Settings, comm: Communicator) -> None:
    """Apply the settings of the process, and print remarks about the settings on rank 0."""
    ours, read = settings.config.comm, settings.deepspeed
    if "timeout" in ours.model_fields_set:
        set_timeout(ours.timeout)
    if "device" in ours.model_fields_set:
        carry_device_memory(ours.device)
    if comm.rank > 0:
        return
    if settings.without_effect:
        print(f"without effect here: {', '.join(settings.without_effect)}", flush=True)
    if read is not None and read.filled:
        print(f'for "auto": {", ".join(read.filled)}', flush=True)
    if read is not None and read.trackers:
        print(
            f"your own loop has no trackers ({', '.join(read.trackers)}); log the loss, engine.lr and "
            f"engine.norm yourself, or run mpitrain.train with {', '.join(read.trackers.values())}",
            flush=True,
        )


def _read(config: ConfigSource, ranks: int, auto: ConfigSource, *, own_optimizer: bool) -> Settings:
    file = isinstance(config, (str, Path)) and str(config).endswith(".json")
    if file or (isinstance(config, Mapping) and looks_like_deepspeed(config)):
        values = read_json(Path(str(config))) if file else config
        assert isinstance(values, Mapping)
        return from_deepspeed(read_deepspeed(values, ranks, _origin(config), Config.of(auto)), ranks)
    if auto is not None:
        raise refusal(
            'the argument auto is for a DeepSpeed configuration with "auto", and config is not one; remove auto'
        )
    return from_config(Config.of(config), ranks, own_optimizer=own_optimizer, origin=_origin(config))


def _origin(config: ConfigSource) -> str:
    return str(config) if isinstance(config, (str, Path)) else "config"


def describe_settings(settings: Settings, own_optimizer: bool) -> Iterator[tuple[str, str]]:
    """Yield the settings that must be equal on all ranks, as (section.key, value).

    Each rank updates its slice of the parameters with its own settings, so a difference would silently change the
    training.

    Args:
        settings: Settings of this rank.
        own_optimizer: If true, the user's optimizer replaces the configuration's, whose settings are left out.
    """
    for name, field, value in every_setting(settings.config):
        loop = declared(field, "loop")
        if loop == "followed_folder":
            yield (name, value if value in ("", "host") else "a folder")
        elif loop == "followed" or (loop == "for_optimizer" and not own_optimizer):
            yield from flatten(value, name)
    yield from flatten({"train.microbatch": settings.microbatch, "train.accumulation": settings.accumulate})
    if (read := settings.deepspeed) is not None:
        yield from flatten({"scheduler": read.schedule or read.torch_schedule, "fp16": read.scale})
        yield from flatten({"reduced in": read.reduce_dtype, "any optimizer": read.any_optimizer})


def flatten(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the numbers, strings and booleans in a nested value as (name, text).

    Other objects yield the name of their type.

    Args:
        value: The value.
        name: Name of the value.
    """
    if is_dataclass(value) and not isinstance(value, type):
        yield (name, type(value).__name__)
        value = vars(value)
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from flatten(value[key], f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for number, each in enumerate(value):
            yield from flatten(each, f"{name}[{number}]")
    else:
        yield (name, _as_text(value))


def describe_model(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield dtype and shape of each parameter, and "frozen" if it is not trained, as (name, text)."""
    for name, p in model.named_parameters():
        kind = str(p.dtype).removeprefix("torch.")
        yield (f"model.{name}", f"{kind} {list(p.shape)}{'' if p.requires_grad else ' frozen'}")


def describe_groups(optimizer: torch.optim.Optimizer, *, whole: bool) -> Iterator[tuple[str, str]]:
    """Yield the class and the group settings of an optimizer, as (name, text).

    Args:
        optimizer: The optimizer.
        whole: If true, the groups must have the same number of parameters on all ranks.
    """
    yield ("optimizer", type(optimizer).__name__)
    for number, group in enumerate(optimizer.param_groups):
        name = f"optimizer.param_groups[{number}]"
        yield from flatten({key: each for key, each in group.items() if key not in ("params", "param_names")}, name)
        if whole:
            yield (f"parameters in {name}", str(len(group["params"])))


def require_equal(comm: Communicator, values: Sequence[tuple[str, str]]) -> None:
    """Raise InputError if values differ between ranks, naming the first that does. Collective.

    Args:
        comm: All ranks.
        values: Names and values, as text.
    """
    mine = dict(values)
    digests = comm.all_gather_object(hashlib.sha256(json.dumps(mine).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    rank = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    everything = comm.all_gather_object(mine)
    first, other = everything[0], everything[rank]
    name = next((name for name in (*first, *other) if first.get(name) != other.get(name)), "the order of parameters")
    raise refusal(
        f"{name} is {first.get(name, 'missing')} on rank 0 and {other.get(name, 'missing')} on rank "
        f"{rank}; pass the same to mt.initialize on every rank"
    )


def _as_text(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))  # 1.0 equals 1
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return str(value) if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__


# -- the user's model, optimizer and scheduler on a mesh


def make_mesh(comm: Communicator, parallel: ParallelSection) -> Mesh:
    """Return the mesh of a user's training loop. Collective.

    If the model is not divided, the communicator of all ranks is `comm` itself.

    Args:
        comm: All ranks.
        parallel: The [parallel] settings.

    Raises:
        InputError: If settings conflict.
    """
    axes = axes_of(parallel)
    mesh = Mesh.of(comm, axes, itself=count_along(axes, BLOCKS, LAYERS) == 1)
    require_compatible(Combination(parallel, mesh.sizes, one_copy=parallel.share_node, has_data=False))
    return mesh


def place_on_mesh(
    model: nn.Module, mesh: Mesh, config: Config, *, loss: Loss | None, plan: Plan | None, blocks: Sequence[str]
) -> tuple[ModelPart, Loss | None]:
    """Divide a model as the configuration says, and move this rank's part to its device. Collective.

    Args:
        model: The whole model.
        mesh: Mesh of the ranks.
        config: The settings.
        loss: The user's loss; None for the model's own.
        plan: Division of layers; None for the model's own.
        blocks: Names of the modules that form the model in sequence; empty for the model's own.

    Returns:
        This rank's part, and the loss of an output and a target; None if there is no loss.

    Raises:
        InputError: If the model cannot be divided like this, or a pipeline lacks a loss.
    """
    own_loss = getattr(model, "loss", None)
    own_loss, before = own_loss if callable(own_loss) else None, getattr(model, "criterion", None)
    staged, whole = mesh.stages.size > 1, not mesh.divided
    device = device_of_module(model, config.run.device, mesh.world)
    if not whole:
        broadcast_state(model, mesh.world)  # so that all ranks get parts of the same model

    def criterion() -> Callable[[Any, Any], torch.Tensor]:
        chosen = _loss_of(model, loss, own_loss, before, staged=staged)
        if chosen is None:
            raise refusal(
                f"pipeline stages need a loss, but {type(model).__name__} has none; pass loss= to "
                "mt.initialize, or add an attribute `criterion` to the model"
            )
        return chosen

    part = ModelPart(model, config.parallel, criterion, config.parallel.cut, device, config.train, plan, names=blocks)
    divided = divide(part, mesh)
    if whole:
        if own_loss is None and (blocks or plan is not None or hasattr(model, "pipeline_blocks")):
            own_loss = before  # as it would be with stages
        return divided, loss if loss is not None else own_loss
    chosen = _loss_of(model, loss, own_loss, before, staged=staged)
    if isinstance(chosen, nn.Module):
        move(chosen, device)
    return divided, chosen


def _loss_of(
    model: nn.Module, user_loss: Loss | None, model_loss: Loss | None, old_criterion: Any, *, staged: bool
) -> Loss | None:
    """Return the loss of a model whose layers are divided.

    Args:
        model: The model; its `criterion` was replaced if its scores are divided.
        user_loss: Loss from the user; None if there is none.
        model_loss: The model's method `loss`; None if it has none.
        old_criterion: The model's `criterion` before the division.
        staged: If true, the loss must not be a method, because a method would keep the whole model in memory.
    """
    criterion: Loss | None = getattr(model, "criterion", None)
    if user_loss is not None and user_loss not in (model_loss, old_criterion):
        if criterion is not old_criterion:
            raise refusal(
                f"the plan leaves the scores of {type(model).__name__} divided over ranks, which the loss that "
                "you passed does not support; remove loss to use a replacement of the model's `criterion`, or "
                "plan the head as Column(gather=True)"
            )
        return user_loss
    if user_loss is not None and user_loss == old_criterion:
        return criterion
    return criterion if criterion is not None and (staged or model_loss is None) else model_loss


def optimizer_for_part(
    user_optimizer: Any, names: Names, module: nn.Module, comm: Communicator
) -> torch.optim.Optimizer:
    """Return the optimizer of this rank's part of a model. Collective.

    Args:
        user_optimizer: Optimizer of the whole model's parameters, or a class or function that makes one from
            parameters.
        names: Names of each parameter of the whole model.
        module: This rank's part of the model; the whole model if it is not divided.
        comm: All ranks.

    Raises:
        InputError: If the optimizer already has a state or has parameters of another model, the function does not
            return an optimizer, or the number of its groups differs between ranks.
    """
    if isinstance(user_optimizer, type) or not hasattr(user_optimizer, "param_groups"):
        return _call_maker(user_optimizer, module, comm)
    if any(p not in names for group in user_optimizer.param_groups for p in group["params"]):
        raise refusal(
            "the optimizer has parameters that are not in the model; create it from the model's parameters only"
        )
    parts = dict(module.named_parameters(remove_duplicate=False))
    local_parts = {p: [parts[name] for name in named if name in parts][:1] for p, named in names.items()}
    if all(len(local) == 1 and local[0] is p for p, local in local_parts.items()):
        return user_optimizer
    if has_stepped(user_optimizer):
        raise refusal(
            "the optimizer already has a state, but its parameters are now divided; pass a new optimizer to "
            "mt.initialize, and load a checkpoint afterwards"
        )
    for group in user_optimizer.param_groups:
        group["params"] = [part for p in group["params"] for part in local_parts[p]]
    return user_optimizer


def _call_maker(make: Any, module: nn.Module, comm: Communicator) -> torch.optim.Optimizer:
    """Return the optimizer that `make` returns for this rank's parameters."""
    if not callable(make):
        raise refusal(
            f"optimizer is a {type(make).__name__}; pass an optimizer, or a function that makes one from parameters"
        )
    avoid_importing_compiler()
    optimizer = make([p for p in module.parameters() if p.requires_grad])
    if not hasattr(optimizer, "param_groups"):
        raise refusal(
            f"the function passed as optimizer returned a {type(optimizer).__name__}; it must return an optimizer"
        )
    counts = comm.all_gather_object(len(optimizer.param_groups))
    if other := next((rank for rank, count in enumerate(counts) if count != counts[0]), 0):
        raise refusal(
            f"the function passed as optimizer made {counts[0]} groups of parameters on rank 0 and "
            f"{counts[other]} on rank {other}; it must make the same number on every rank, including empty "
            "groups"
        )
    return optimizer


def resolve_scheduler(user_scheduler: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Return the user's learning-rate scheduler, or the one that the user's function makes from the optimizer.

    Args:
        user_scheduler: Scheduler or function; None if there is none.
        optimizer: Optimizer of the engine.

    Raises:
        InputError: If it is not a scheduler, follows a loss, or belongs to another optimizer.
    """
    if user_scheduler is None:
        return None
    if hasattr(user_scheduler, "step") and not isinstance(user_scheduler, type):
        scheduler = user_scheduler
    elif callable(user_scheduler):
        scheduler = user_scheduler(optimizer)
    else:
        raise refusal(
            f"scheduler is a {type(user_scheduler).__name__}; pass a scheduler, or a function that makes one "
            "from an optimizer"
        )
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise refusal(
            "scheduler ReduceLROnPlateau needs held-out losses, which only your own loop has; do not pass it, "
            "and step it with the result of engine.evaluate"
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise refusal(
            "the scheduler belongs to another optimizer than the engine's, so it would not change the "
            "learning rate; create it from the optimizer that you pass to mt.initialize"
        )
    return scheduler
