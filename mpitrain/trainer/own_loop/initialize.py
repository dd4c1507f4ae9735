"""`mpitrain.initialize`: an engine for a training loop of one's own, as users of DeepSpeed know it.

engine = mt.initialize(model=model, optimizer=optimizer, config="train.toml")
for x, y in batches:                    # this rank's microbatches
    loss = engine(x, y)
    engine.backward(loss)
    engine.step()                       # updates at the end of an accumulation, else only counts
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mpitrain.comm import Communicator, carry_device_memory, init, set_timeout
from mpitrain.config.deepspeed import looks_like_deepspeed, read_deepspeed, read_json
from mpitrain.config.section import declared
from mpitrain.config.settings import Config, Given
from mpitrain.config.training import OptimSection
from mpitrain.errors import refusal
from mpitrain.mesh import Mesh
from mpitrain.shard.ddp import DistributedDataParallel
from mpitrain.trainer.assemble import DividedModel, Plan, compile_blocks
from mpitrain.trainer.engine import Engine, Loss, LossScale
from mpitrain.trainer.optimizing.optimizer import ParameterRoles, make_optimizer, optimizer_class
from mpitrain.trainer.optimizing.schedules import make_scheduler
from mpitrain.trainer.options import Settings, every_setting, from_config, from_deepspeed, options_of
from mpitrain.trainer.own_loop.checks import GivenModel
from mpitrain.trainer.own_loop.model import OptimizerOf, following, names_of, place_on_mesh, places, scheduling
from mpitrain.trainer.own_loop.training_engine import PipelineEngine, TrainingEngine


def initialize(
    model: nn.Module,
    optimizer: OptimizerOf | None = None,
    config: Given = None,
    *,
    loss: Loss | None = None,
    scheduler: Any = None,
    comm: Communicator | None = None,
    plan: Plan | None = None,
    blocks: Sequence[str] = (),
    auto: Given = None,
) -> TrainingEngine:
    """Make an engine that trains a model over the ranks of a communicator. Collective.

    Args:
        model: The module to train, on the device that this rank computes on; one on the CPU is moved to a device of the
            kind that the key run.device names, if it names one. With parallel.pipeline or parallel.tensor it is
            divided, and of no use by itself afterwards.
        optimizer: Made for model.parameters(), or a function that makes one of the parameters given to it; without one,
            the configuration's.
        config: A TOML file or nested values of `mpitrain.config.settings`, also the config.toml of a finished run; or a
            DeepSpeed JSON file or its values.
        loss: loss(model(x), y), a mean over samples; by default the model's own `loss`, if it has one.
        scheduler: Stepped after every update, or a function that makes one of the optimizer; without it and without an
            optimizer of one's own, the configuration's.
        comm: The ranks to train over; by default all.
        plan: With parallel.tensor, how layers are divided (see `mpitrain.parallelize`); by default the model's
            `tensor_plan()`.
        blocks: With parallel.pipeline, the names of the modules that one after the other are the model; by default its
            `pipeline_blocks()`, or the modules of an nn.Sequential.
        auto: Settings of ours, in a TOML file or nested, that stand where a DeepSpeed configuration says "auto".

    Returns:
        The engine; with parallel.pipeline a `PipelineEngine`.

    Raises:
        InputError: A key is not supported, ranks give unlike settings or models, or the model has an engine already.
    """
    _refuse_model(model)
    comm = comm if comm is not None else init()
    settings = _read(config, comm.size, auto, own_optimizer=optimizer is not None)
    read, ours = settings.deepspeed, settings.config
    _refuse_twice(_origin(config), "an optimizer", optimizer, read and "name" in ours.optim.model_fields_set)
    _refuse_twice(_origin(config), "a scheduler", scheduler, settings.schedule or (read and read.torch_schedule))
    given = GivenModel(model)
    told = {"optimizer of your own": optimizer is not None, "scheduler of your own": scheduler is not None}
    require_alike(comm, [*settings_told(settings, optimizer is not None), *values_told(told), *model_told(model)])
    _begin(settings, comm)
    make = _optimizing(optimizer, settings, model, comm)
    mesh = places(comm, ours.parallel)
    divided, loss = place_on_mesh(model, mesh, ours, loss=loss, plan=plan, blocks=blocks)
    made = make(divided.module)  # stages may have other groups of the configuration's, which has been compared
    require_alike(comm, [] if optimizer is None else [*groups_told(made, whole=mesh.world.size == mesh.data.size)])
    engine = _engine(divided, loss, made, mesh, settings)
    if ours.model.compile:
        compile_blocks(divided.blocks, engine, comm)
    if read is not None and read.torch_schedule is not None:
        scheduler = partial(make_scheduler, *read.torch_schedule)
    kind = TrainingEngine if engine.pipeline is None else PipelineEngine
    return kind(engine, settings, loss, scheduling(scheduler, made), mesh, given)


def _engine(
    divided: DividedModel, loss: Loss | None, optimizer: torch.optim.Optimizer, mesh: Mesh, settings: Settings
) -> Engine:
    train, read = settings.config.train, settings.deepspeed
    return Engine(
        divided.module,
        loss or (lambda output, y: output),
        optimizer,
        mesh.data,
        options_of(settings.config, read),
        clip=train.clip,
        precision=train.precision,
        axes=divided.axes,
        scale=LossScale(**read.scale) if read is not None and read.scale is not None else None,
    )


def _refuse_model(model: nn.Module) -> None:
    """Raise InputError for a model that something else averages already, or that has nothing to train."""
    if isinstance(model, (DistributedDataParallel, nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise refusal(f"the model is in {type(model).__name__} already; give mt.initialize its .module")
    if not any(p.requires_grad for p in model.parameters()):
        raise refusal(f"no parameter of {type(model).__name__} requires gradients; leave some to train")


def _refuse_twice(origin: str, what: str, given: object, named: object) -> None:
    """Raise InputError where the caller and the configuration both bring something."""
    if given is not None and named:
        raise refusal(f"{what} was given, and {origin} names another; leave one out")


def _optimizing(
    given: OptimizerOf | None, settings: Settings, model: nn.Module, comm: Communicator
) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Return what makes the optimizer of this rank's part: of the caller's, or the configuration's. Collective.

    model: The whole model, before it is divided: its parameters' names and places decide what groups they are in.
    """
    names, read = names_of(model), settings.deepspeed
    section = _optim(settings) if given is None else settings.config.optim
    roles = ParameterRoles.of(section, model) if given is None else None

    def make(module: nn.Module) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer
        if given is None:
            made = make_optimizer(section, module.named_parameters(), roles)
        else:
            made = following(given, names, module, comm)
        if read is not None and read.any_optimizer:
            made.elementwise = True  # type: ignore[attr-defined]
        return made

    return make


def _optim(settings: Settings) -> OptimSection:
    """Return the section of the optimizer, with the rate that its class has where DeepSpeed's names none."""
    section = settings.config.optim
    if settings.deepspeed is None or "lr" in section.model_fields_set:
        return section
    if "name" not in section.model_fields_set:
        raise refusal("no optimizer was given, and the configuration has none; give one")
    rate = signature(optimizer_class("optimizer.type", section.name)).parameters["lr"].default
    return section.model_copy(update={"lr": float(rate)})


def _begin(settings: Settings, comm: Communicator) -> None:
    """Do what settings say of the process, and print what they say of themselves."""
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
            f"no trackers in a loop of your own: {', '.join(read.trackers)}; log the loss, engine.lr and engine.norm "
            f"there, or run mpitrain.train, which has {', '.join(read.trackers.values())}",
            flush=True,
        )


def _read(config: Given, ranks: int, auto: Given, *, own_optimizer: bool) -> Settings:
    file = isinstance(config, (str, Path)) and str(config).endswith(".json")
    if file or (isinstance(config, Mapping) and looks_like_deepspeed(config)):
        values = read_json(Path(str(config))) if file else config
        assert isinstance(values, Mapping)
        return from_deepspeed(read_deepspeed(values, ranks, _origin(config), Config.of(auto)), ranks)
    if auto is not None:
        raise refusal('auto is for a DeepSpeed configuration that says "auto", and config is none; leave auto out')
    return from_config(Config.of(config), ranks, own_optimizer=own_optimizer, origin=_origin(config))


def _origin(config: Given) -> str:
    return str(config) if isinstance(config, (str, Path)) else "config"


def settings_told(settings: Settings, own_optimizer: bool) -> Iterator[tuple[str, str]]:
    """Yield what ranks must have alike in their settings, by section.key.

    Each rank updates its slice of the parameters with the settings that it has itself: others on another rank would be
    training that nobody asked for, and no error.
    """
    for name, field, value in every_setting(settings.config):
        loop = declared(field, "loop")
        if loop == "followed_folder":
            yield (name, value if value in ("", "host") else "a folder")
        elif loop == "followed" or (loop == "for_optimizer" and not own_optimizer):
            yield from values_told(value, name)
    yield from values_told({"train.microbatch": settings.microbatch, "train.accumulation": settings.accumulate})
    if (read := settings.deepspeed) is not None:
        yield from values_told({"scheduler": read.schedule or read.torch_schedule, "fp16": read.scale})
        yield from values_told({"reduced in": read.reduce_dtype, "any optimizer": read.any_optimizer})


def values_told(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the plain numbers, strings and booleans in a value, by name; of objects only what kind they are."""
    if is_dataclass(value) and not isinstance(value, type):
        yield (name, type(value).__name__)
        value = vars(value)
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from values_told(value[key], f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for number, each in enumerate(value):
            yield from values_told(each, f"{name}[{number}]")
    else:
        yield (name, _shown(value))


def model_told(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the shapes of a model's parameters, and which are trained."""
    for name, p in model.named_parameters():
        if not is_lazy(p):
            kind = str(p.dtype).removeprefix("torch.")
            yield (f"model.{name}", f"{kind} {list(p.shape)}{'' if p.requires_grad else ' frozen'}")


def groups_told(optimizer: torch.optim.Optimizer, *, whole: bool) -> Iterator[tuple[str, str]]:
    """Yield what an optimizer updates its groups with. whole: Whether ranks have the same parameters in them."""
    yield ("optimizer", type(optimizer).__name__)
    for number, group in enumerate(optimizer.param_groups):
        name = f"optimizer.param_groups[{number}]"
        yield from values_told({key: each for key, each in group.items() if key not in ("params", "param_names")}, name)
        if whole:
            yield (f"parameters in {name}", str(len(group["params"])))


def require_alike(comm: Communicator, told: Sequence[tuple[str, str]]) -> None:
    """Raise InputError where ranks were told unlike things, naming the first of them. Collective."""
    mine = dict(told)
    digests = comm.all_gather_object(hashlib.sha256(json.dumps(mine).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    rank = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    everything = comm.all_gather_object(mine)
    first, other = everything[0], everything[rank]
    name = next((name for name in (*first, *other) if first.get(name) != other.get(name)), "the order of parameters")
    raise refusal(
        f"{name} is {first.get(name, 'not there')} on rank 0 and {other.get(name, 'not there')} on rank {rank}; "
        "give mt.initialize the same on every rank"
    )


def _shown(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))  # 1.0 is no other setting than 1
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    plain = value is None or isinstance(value, (bool, int, float, str))
    return str(value) if plain else type(value).__name__
