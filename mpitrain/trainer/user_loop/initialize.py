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
from mpitrain.config.settings import Config, Given
from mpitrain.config.training import OptimSection
from mpitrain.errors import refusal
from mpitrain.layers.precision import DTYPES
from mpitrain.layout.mesh import BLOCKS, LAYERS, Mesh, axes_of, count_along
from mpitrain.parallel.dividing import ModelPart, Plan, divide, move
from mpitrain.parallel.rules import Combination, require_compatible
from mpitrain.shard.ddp import DistributedDataParallel, broadcast_state
from mpitrain.shard.flat_parameters import has_stepped
from mpitrain.trainer.assemble import compile_blocks
from mpitrain.trainer.device import found_on
from mpitrain.trainer.engine import Engine, Loss, LossScale
from mpitrain.trainer.optimizing import ParameterRoles, make_optimizer, make_scheduler, optimizer_class
from mpitrain.trainer.options import Settings, every_setting, from_config, from_deepspeed
from mpitrain.trainer.user_loop.training_engine import GivenModel, PipelineEngine, TrainingEngine

Names = Mapping[nn.Parameter, Sequence[str]]
OptimizerOf = torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


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
        loss: loss(model(x), y), a mean over samples or targets; by default the model's own `loss`, if it has one.
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
    require_alike(comm, [] if optimizer is None else [*groups_told(made, whole=not mesh.divided)])
    engine = _engine(divided, loss or (lambda output, y: output), made, mesh, settings)
    if ours.model.compile:
        compile_blocks(divided.blocks, engine, comm)
    if read is not None and read.torch_schedule is not None:
        scheduler = partial(make_scheduler, *read.torch_schedule)
    kind = TrainingEngine if engine.pipeline is None else PipelineEngine
    return kind(engine, settings, loss, scheduling(scheduler, made), mesh, given)


def _engine(divided: ModelPart, loss: Loss, optimizer: torch.optim.Optimizer, mesh: Mesh, settings: Settings) -> Engine:
    read = settings.deepspeed
    scale = LossScale(**read.scale) if read is not None and read.scale is not None else None
    dtype = DTYPES[read.reduce_dtype] if read is not None and read.reduce_dtype is not None else None
    config, division = settings.config, divided.division
    return Engine(
        divided.module, loss, optimizer, mesh.replicas, config, division=division, scale=scale, reduce_dtype=dtype
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
    read = settings.deepspeed
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    section = _optim(settings) if given is None else settings.config.optim
    roles = ParameterRoles.of(section, model) if given is None else None

    def make(module: nn.Module) -> torch.optim.Optimizer:
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
    return str(value) if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__


# -- the model, the optimizer and the scheduler of the user, put onto a mesh


def places(comm: Communicator, parallel: ParallelSection) -> Mesh:
    """Return the mesh of a loop of one's own. Collective.

    Where the model is not divided, a group of all ranks is `comm` itself. Raises InputError for settings that do not go
    together.
    """
    axes = axes_of(parallel)
    mesh = Mesh.of(comm, axes, itself=count_along(axes, BLOCKS, LAYERS) == 1)
    require_compatible(Combination(parallel, mesh.sizes, one_copy=parallel.share_node, has_data=False))
    return mesh


def place_on_mesh(
    model: nn.Module, mesh: Mesh, config: Config, *, loss: Loss | None, plan: Plan | None, blocks: Sequence[str]
) -> tuple[ModelPart, Loss | None]:
    """Divide a model as the configuration says, and move this rank's part to its device. Collective.

    Returns:
        This rank's part, and the loss of an output and a target; None where there is none.

    Raises:
        InputError: It cannot be divided so, or there is no loss that a pipeline could have.
    """
    own = getattr(model, "loss", None)
    own, before = own if callable(own) else None, getattr(model, "criterion", None)
    staged, whole = mesh.stages.size > 1, not mesh.divided
    device = found_on(model, config.run.device, mesh.world)
    if not whole:
        broadcast_state(model, mesh.world)  # parts are to be those of one model

    def criterion() -> Callable[[Any, Any], torch.Tensor]:
        chosen = _loss_of(model, loss, own, before, staged=staged)
        if chosen is None:
            raise refusal(
                f"stages need a loss, and {type(model).__name__} has none; give mt.initialize loss=, or the model an "
                "attribute `criterion`"
            )
        return chosen

    parallel, recompute = config.parallel, config.train.recompute
    divided = divide(ModelPart(model, parallel, criterion, parallel.cut, device, recompute, plan, blocks), mesh)
    if whole:
        if own is None and (blocks or plan is not None or hasattr(model, "pipeline_blocks")):
            own = before  # as it would be with stages
        return divided, loss if loss is not None else own
    chosen = _loss_of(model, loss, own, before, staged=staged)
    if isinstance(chosen, nn.Module):
        move(chosen, device)
    return divided, chosen


def _loss_of(model: nn.Module, given: Loss | None, own: Loss | None, before: Any, *, staged: bool) -> Loss | None:
    """The loss of a model whose layers are divided.

    Args:
        model: The model, whose `criterion` is another now if its scores are divided.
        given: What the user gave.
        own: The model's method `loss`.
        before: The `criterion` that it had.
        staged: Whether it is to be had without the model, which a method would keep.
    """
    criterion: Loss | None = getattr(model, "criterion", None)
    if given is not None and given not in (own, before):
        if criterion is not before:
            raise refusal(
                f"the plan leaves the scores of {type(model).__name__} divided, which the given loss cannot know; "
                "leave loss out, and the model's `criterion` is replaced, or plan the head as Column(gather=True)"
            )
        return given
    if given is not None and given == before:
        return criterion
    return criterion if criterion is not None and (staged or own is None) else own


def following(given: Any, names: Names, module: nn.Module, comm: Communicator) -> torch.optim.Optimizer:
    """The optimizer of this rank's part of a model. Collective.

    Args:
        given: An optimizer of the whole model's parameters, or what makes one of parameters: a class or a function.
        names: Of the whole model's parameters.
        module: This rank's part of the model; the whole, where it is not divided.
        comm: All ranks.

    Raises:
        InputError: It has a state or strange parameters, it is none, or its groups are not the same on all ranks.
    """
    if isinstance(given, type) or not hasattr(given, "param_groups"):
        return _made(given, module, comm)
    if any(p not in names for group in given.param_groups for p in group["params"]):
        raise refusal("the optimizer has parameters that are not the model's; give it those alone")
    parts = dict(module.named_parameters(remove_duplicate=False))
    kept = {p: [parts[name] for name in named if name in parts][:1] for p, named in names.items()}
    if all(len(found) == 1 and found[0] is p for p, found in kept.items()):
        return given
    if has_stepped(given):
        raise refusal(
            "the optimizer has a state already, of parameters that are divided now; give mt.initialize a new one, and "
            "load a checkpoint after"
        )
    for group in given.param_groups:
        group["params"] = [part for p in group["params"] for part in kept[p]]
    return given


def _made(make: Any, module: nn.Module, comm: Communicator) -> torch.optim.Optimizer:
    """The optimizer that `make` makes of this rank's parameters."""
    if not callable(make):
        raise refusal(
            f"optimizer is a {type(make).__name__}; give an optimizer, or a function of parameters that makes one"
        )
    made = make([p for p in module.parameters() if p.requires_grad])
    if not hasattr(made, "param_groups"):
        raise refusal(f"the function given as optimizer returned a {type(made).__name__}; let it return an optimizer")
    counts = comm.all_gather_object(len(made.param_groups))
    if other := next((rank for rank, count in enumerate(counts) if count != counts[0]), 0):
        raise refusal(
            f"the function given as optimizer made {counts[0]} groups of parameters on rank 0 and {counts[other]} on "
            f"rank {other}; let it make as many on every rank, empty ones too"
        )
    return made


def scheduling(given: Any, optimizer: torch.optim.Optimizer) -> Any:
    """A learning-rate scheduler: as it is given, or what the given function makes of the optimizer.

    Raises:
        InputError: It is none, it follows a loss, or it is of another optimizer.
    """
    if given is None:
        return None
    if hasattr(given, "step") and not isinstance(given, type):
        made = given
    elif callable(given):
        made = given(optimizer)
    else:
        raise refusal(
            f"scheduler is a {type(given).__name__}; give a scheduler, or a function of an optimizer that makes one"
        )
    if isinstance(made, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise refusal(
            "scheduler ReduceLROnPlateau follows held-out losses, which a loop of your own has; leave it out, and step "
            "it with what engine.evaluate returns"
        )
    if getattr(made, "optimizer", optimizer) is not optimizer:
        raise refusal(
            "the scheduler is of another optimizer than the engine's, whose learning rates it would not change; make "
            "it of the one that mt.initialize is given"
        )
    return made
