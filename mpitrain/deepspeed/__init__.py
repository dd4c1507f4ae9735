"""Interface of DeepSpeed: scripts that import it train with the parts of mpitrain.

    import mpitrain.deepspeed as deepspeed

    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, training_data=data, config="ds.json")

`python -m mpitrain.run script.py` lets a script's own `import deepspeed` import this package. Each name that it lacks
raises an error that says what to use instead (`names`).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from mpitrain.comm import init
from mpitrain.comm.memory import device as devices
from mpitrain.config.deepspeed import DeepSpeedConfig, read_deepspeed, read_json
from mpitrain.deepspeed import accelerator, checkpointing, comm, moe, pipe, utils, zero
from mpitrain.deepspeed.comm import init_distributed
from mpitrain.deepspeed.engine import DeepSpeedEngine
from mpitrain.deepspeed.engine import DeepSpeedPipelineEngine as PipelineEngine
from mpitrain.deepspeed.names import explain_missing, install
from mpitrain.deepspeed.pipe import PipelineModule
from mpitrain.deepspeed.utils import log_dist, logger
from mpitrain.errors import refusal
from mpitrain.trainer.optimizing import optimizer_class
from mpitrain.trainer.options import from_deepspeed
from mpitrain.trainer.user_loop.initialize import make_engine

__all__ = [
    "DeepSpeedEngine",
    "PipelineEngine",
    "PipelineModule",
    "accelerator",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "init_distributed",
    "initialize",
    "install",
    "log_dist",
    "logger",
    "moe",
    "pipe",
    "utils",
    "zero",
]
__version__ = "0.19.8"  # of the interface; scripts compare it


def __getattr__(name: str) -> Any:
    raise explain_missing(name)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --deepspeed and --deepspeed_config to a parser, and make this rank's number the default of --local_rank.

    DeepSpeed's launcher passes --local_rank to each process; mpirun does not.
    """
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="for the script itself; no effect in the library")
    group.add_argument("--deepspeed_config", help="JSON file with the configuration")
    group.add_argument("--deepscale", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", help=argparse.SUPPRESS)
    if parser.get_default("local_rank") == -1:
        parser.set_defaults(local_rank=init().local_rank)
    return parser


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: str | Mapping[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | Mapping[str, Any] | None = None,
) -> tuple[DeepSpeedEngine, torch.optim.Optimizer, Any, Any]:
    """Make an engine from a model and a configuration. Collective.

    Args:
        args: Arguments of the script; `deepspeed_config` is used if `config` is None, and `local_rank` is set.
        model: Module to train, or a `PipelineModule`. It is moved to this rank's device.
        optimizer, lr_scheduler: Replacements of the configuration's, or functions that make them, as in DeepSpeed.
        model_parameters: Parameters, or groups of them, for the configuration's optimizer; None for all.
        training_data, collate_fn: Data set for the third result, and function that makes a batch from samples.
        distributed_port, dist_init_required: Ignored: MPI knows the ranks.
        mpu, mesh_param: Only None.
        config, config_params: JSON file or values of DeepSpeed's configuration; the second is the older name.

    Returns:
        Engine, optimizer, DataLoader of this rank's microbatches or None, and scheduler or None.

    Raises:
        InputError: A key or an argument is not supported, or ranks passed different ones.
    """
    if not isinstance(model, nn.Module):
        raise refusal(f"deepspeed.initialize needs a model, but got {type(model).__name__}; pass model=")
    if mpu is not None or mesh_param is not None:
        raise refusal("deepspeed.initialize has no mpu and mesh_param; divide layers with mt.initialize(plan=...)")
    init_distributed()
    world = init()
    values, origin = _values(args, config if config is not None else config_params)
    stages = model.num_stages if isinstance(model, PipelineModule) else 1
    if world.size % stages:
        raise refusal(f"{world.size} ranks are no multiple of num_stages {stages}; start another number of ranks")
    read = _adapt(read_deepspeed(values, world.size // stages, origin), model)
    settings = from_deepspeed(read, world.size)
    if lr_scheduler is not None:
        settings = replace(settings, schedule=None, deepspeed=replace(read, schedule=None, torch_schedule=None))
    engine = make_engine(
        model,
        settings,
        world,
        optimizer=optimizer if optimizer is not None else _with_groups(model, model_parameters, read),
        loss=model.make_loss() if isinstance(model, PipelineModule) else None,
        scheduler=lr_scheduler,
    )
    if hasattr(args, "local_rank"):
        args.local_rank = world.local_rank
    kind = PipelineEngine if isinstance(model, PipelineModule) else DeepSpeedEngine
    wrapper = kind(engine, values, training_data, collate_fn)
    return wrapper, wrapper.optimizer, wrapper.training_dataloader, wrapper.lr_scheduler


def _values(args: Any, config: str | Mapping[str, Any] | None) -> tuple[Mapping[str, Any], str]:
    """Return the values of the configuration, and its name for messages."""
    from_args = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    if config is None:
        config = from_args
    elif from_args is not None:
        raise refusal("config and --deepspeed_config both name a configuration; remove one of them")
    if config is None:
        raise refusal("deepspeed.initialize has no configuration; pass config=, or --deepspeed_config FILE")
    if isinstance(config, Mapping):
        return config, "config"
    return read_json(Path(os.fspath(config))), str(config)


def _adapt(read: DeepSpeedConfig, model: nn.Module) -> DeepSpeedConfig:
    """Return a configuration with the settings that follow from the model and from DeepSpeed's habits.

    Scripts change parameters in place, so each rank has its own copy of them. They recompute activations themselves.
    """
    if not read.config.train.batch or "batch" not in read.config.train.model_fields_set:
        raise refusal("the configuration has no batch size; set train_micro_batch_size_per_gpu")
    parallel: dict[str, Any] = {"share_node": False}
    recompute = False
    if isinstance(model, PipelineModule):
        parallel |= {"pipeline": model.num_stages, "cut": model.cut()}
        recompute = model.num_stages > 1 and model.activation_checkpoint_interval > 0
    sections = {"parallel": parallel, "train": {"recompute": recompute}}
    if kind := devices.accelerator():
        sections["run"] = {"device": kind}
    ours = read.config
    changed = {name: getattr(ours, name).model_copy(update=update) for name, update in sections.items()}
    ignored = tuple(key for key in read.without_effect if key not in ("steps_per_print", "dataloader_drop_last"))
    return replace(read, config=ours.model_copy(update=changed), without_effect=ignored)


def _with_groups(model: nn.Module, parameters: Iterable[Any] | None, read: DeepSpeedConfig) -> Any:
    """Return the configuration's optimizer of the groups in `parameters`; None if it has all parameters in one group.

    Raises InputError if a trained parameter is missing in the groups.
    """
    groups = list(parameters) if parameters is not None else []
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    listed = [p for g in groups for p in (g["params"] if isinstance(g, dict) else [g])]
    if groups and (missing := trained - {id(p) for p in listed}):
        raise refusal(f"model_parameters lacks {len(missing)} trained parameters; add them, or set requires_grad False")
    if not any(isinstance(g, dict) for g in groups):
        return None
    section = read.config.optim
    if "name" not in section.model_fields_set:
        return None  # `make_engine` explains it
    kind: Any = optimizer_class("optimizer.type", section.name)
    rate = {"lr": section.lr} if "lr" in section.model_fields_set else {}
    groups = [{**g, "params": list(g["params"])} if isinstance(g, dict) else {"params": [g]} for g in groups]
    return kind(groups, weight_decay=section.weight_decay, **rate, **section.options)


def as_deepspeed() -> ModuleType:
    """Let `import deepspeed`, and the modules of DeepSpeed that have counterparts here, import this package."""
    return install(__name__)
