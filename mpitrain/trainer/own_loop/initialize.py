"""`mpitrain.initialize`: an engine for a training loop of one's own, as users of DeepSpeed know it.

engine = mt.initialize(model=model, optimizer=optimizer, config="train.toml")
for x, y in batches:                    # this rank's microbatches
    loss = engine(x, y)
    engine.backward(loss)
    engine.step()                       # updates at the end of an accumulation, else only counts
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from mpitrain.comm import Communicator, carry_device_memory, init, set_timeout
from mpitrain.config.deepspeed import looks_like_deepspeed, read_deepspeed, read_json
from mpitrain.config.settings import Config
from mpitrain.config.toml_file import read_toml
from mpitrain.config.training import OptimSection
from mpitrain.errors import refusal
from mpitrain.mesh import Mesh
from mpitrain.shard.ddp import DistributedDataParallel
from mpitrain.trainer.assemble import Plan, compile_blocks
from mpitrain.trainer.engine import Engine, Loss
from mpitrain.trainer.optimizing.optimizer import ParameterRoles, make_optimizer, optimizer_class
from mpitrain.trainer.optimizing.schedules import make_scheduler
from mpitrain.trainer.options import Settings, from_config, from_deepspeed
from mpitrain.trainer.own_loop.alike import groups_told, model_told, require_alike, settings_told
from mpitrain.trainer.own_loop.in_use import GivenModel
from mpitrain.trainer.own_loop.model import PlacedModel, place_on_mesh, places
from mpitrain.trainer.own_loop.optimizer import OptimizerOf, following, names_of, scheduling
from mpitrain.trainer.own_loop.pipeline_engine import PipelineEngine
from mpitrain.trainer.own_loop.training_engine import TrainingEngine

Given: TypeAlias = str | Path | Mapping[str, Any] | Config | None  # a configuration, as a caller may have it


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
    settings, section = _read(config, comm.size, auto, own_optimizer=optimizer is not None)
    _refuse_twice(_origin(config), "an optimizer", optimizer, settings.optimizer)
    _refuse_twice(_origin(config), "a scheduler", scheduler, settings.schedule or settings.torch_schedule)
    given = GivenModel(model)
    told = {"parallel": settings.parallel, "optimizer of your own": optimizer is not None}
    told |= {"scheduler of your own": scheduler is not None, "optim": section if optimizer is None else None}
    require_alike(comm, [*settings_told(told), *settings_told(settings), *model_told(model)])
    _begin(settings, comm)
    make = _optimizing(optimizer, settings, section, model, comm)
    mesh = places(comm, settings.parallel)
    placed = place_on_mesh(model, mesh, settings, loss=loss, plan=plan, blocks=blocks)
    made = make(placed.divided.module)  # stages may have other groups of the configuration's, which has been compared
    require_alike(comm, [] if optimizer is None else [*groups_told(made, whole=mesh.world.size == mesh.data.size)])
    engine = _engine(placed, made, mesh, settings)
    if settings.compile:
        compile_blocks(placed.divided.blocks, engine, comm)
    if settings.torch_schedule is not None:
        scheduler = partial(make_scheduler, *settings.torch_schedule)
    kind = TrainingEngine if engine.pipeline is None else PipelineEngine
    return kind(engine, settings, placed.loss, scheduling(scheduler, made), mesh, given)


def _engine(placed: PlacedModel, optimizer: torch.optim.Optimizer, mesh: Mesh, settings: Settings) -> Engine:
    return Engine(
        placed.divided.module,
        placed.loss or (lambda output, y: output),
        optimizer,
        mesh.data,
        settings.options,
        clip=settings.clip,
        precision=settings.precision,
        axes=placed.divided.axes,
        scale=settings.scale,
    )


def _refuse_model(model: nn.Module) -> None:
    """Raise InputError for a model that something else averages already, or that has nothing to train."""
    if isinstance(model, (DistributedDataParallel, nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise refusal(f"the model is in {type(model).__name__} already; give mt.initialize its .module")
    if not any(p.requires_grad for p in model.parameters()):
        raise refusal(f"no parameter of {type(model).__name__} requires gradients; leave some to train")


def _refuse_twice(origin: str, what: str, given: object, named: object) -> None:
    """Raise InputError where the caller and the configuration both bring something."""
    if given is not None and named is not None:
        raise refusal(f"{what} was given, and {origin} names another; leave one out")


def _optimizing(
    given: OptimizerOf | None, settings: Settings, section: OptimSection | None, model: nn.Module, comm: Communicator
) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """What makes the optimizer of this rank's part of a model: of the caller's, or the configuration's. Collective.

    model: The whole model, before it is divided: its parameters' names and places decide what groups they are in.
    """
    names = names_of(model)
    wanted = section or (_section(settings) if given is None else OptimSection())
    roles = ParameterRoles.of(wanted, model) if given is None else None

    def make(module: nn.Module) -> torch.optim.Optimizer:
        if given is not None:
            made = following(given, names, module, comm)
        else:
            decay_all = section is None  # as DeepSpeed does
            made = make_optimizer(wanted, module.named_parameters(), roles, decay_all=decay_all)
        if settings.any_optimizer:
            made.elementwise = True  # type: ignore[attr-defined]
        return made

    return make


def _begin(settings: Settings, comm: Communicator) -> None:
    """What settings say of the process, and of themselves."""
    if settings.timeout is not None:
        set_timeout(settings.timeout)
    if settings.carry is not None:
        carry_device_memory(settings.carry)
    for what, keys in {"without effect here": settings.without_effect, 'for "auto"': settings.filled}.items():
        if keys and comm.rank == 0:
            print(f"{what}: {', '.join(keys)}", flush=True)
    trackers, instead = settings.trackers
    if trackers and comm.rank == 0:
        told = (
            f"no trackers in a loop of your own: {', '.join(trackers)}; log the loss, engine.lr and engine.norm there"
        )
        print(f"{told}, or run mpitrain.train, which has {', '.join(instead)}", flush=True)


def _read(config: Given, ranks: int, auto: Given, *, own_optimizer: bool) -> tuple[Settings, OptimSection | None]:
    """The settings, and the section that describes the optimizer; None for a DeepSpeed configuration."""
    if isinstance(config, (str, Path)) and str(config).endswith(".json"):
        return from_deepspeed(read_deepspeed(read_json(Path(config)), ranks, str(config), _ours(auto))), None
    if isinstance(config, Mapping) and looks_like_deepspeed(config):
        return from_deepspeed(read_deepspeed(config, ranks, auto=_ours(auto))), None
    if auto is not None:
        raise refusal('auto is for a DeepSpeed configuration that says "auto", and config is none; leave auto out')
    ours = _ours(config)
    return from_config(ours, ranks, own_optimizer=own_optimizer, origin=_origin(config)), ours.optim


def _ours(config: Given) -> Config:
    return config if isinstance(config, Config) else Config.from_dict(_values(config), _origin(config))


def _values(config: str | Path | Mapping[str, Any] | None) -> Mapping[str, Any]:
    if config is None:
        return {}
    return config if isinstance(config, Mapping) else read_toml(str(config))


def _origin(config: Given) -> str:
    return str(config) if isinstance(config, (str, Path)) else "config"


def _section(settings: Settings) -> OptimSection:
    """The optimizer section that a DeepSpeed configuration describes."""
    if settings.optimizer is None:
        raise refusal("no optimizer was given, and the configuration has none; give one")
    kind, params = settings.optimizer
    options = dict(params)
    default = signature(optimizer_class("optimizer.type", kind)).parameters["lr"].default
    rate, decay = options.pop("lr", default), options.pop("weight_decay", 0.0)
    return OptimSection(name=kind, lr=float(rate), weight_decay=decay, options=options)
