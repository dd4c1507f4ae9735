"""Construction of an engine on a mesh: the model is divided (`parallel.dividing`) and, if requested, compiled."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from mpitrain.comm import Communicator
from mpitrain.comm.memory.device import CPU, is_accelerator
from mpitrain.config.settings import Config
from mpitrain.data import Dataset
from mpitrain.data.folders import agree_on_errors
from mpitrain.errors import InputError, refusal
from mpitrain.layers.precision import DTYPES
from mpitrain.layers.sync_batchnorm import SyncBatchNorm
from mpitrain.layout.mesh import Mesh
from mpitrain.models.hugging_face import PREFIX
from mpitrain.models.task import Task
from mpitrain.parallel.dividing import ModelPart, divide, move
from mpitrain.parallel.layer_drop import LayerDrop
from mpitrain.parallel.rules import Combination, require_compatible
from mpitrain.pipe.partition import Cut, check_slices, costs_by_rank, listed_blocks, require_look_back, time_costs
from mpitrain.trainer.data import GroupPlaces, microbatch_size
from mpitrain.trainer.engine import Engine, Microbatch

MakeOptimizer = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


def assemble(
    config: Config,
    mesh: Mesh,
    task: Task,
    data: Dataset,
    make_optimizer: MakeOptimizer,
    device: torch.device = CPU,
    make_engine: Callable[..., Engine] = Engine,
) -> tuple[Engine, int]:
    """Divide a model over the ranks of a mesh, and make its engine. Collective.

    Args:
        config: The settings.
        mesh: Mesh of the ranks.
        task: The whole model and its loss, equal on all ranks.
        data: Training data set.
        make_optimizer: Function that returns the optimizer of this rank's part, from names and parameters.
        device: Device of this rank, to which its part of the model is moved.
        make_engine: Function that returns the engine, called like `Engine`.

    Returns:
        The engine, and the number of parameters of the whole model.
    """
    compiled, reproducible = config.model.compile, config.run.reproducible
    shared = config.parallel.share_node
    if config.train.average != "none" and config.parallel.mode != "sync":
        raise refusal(
            f"train.average {config.train.average} needs parallel.mode sync, and the mode is {config.parallel.mode}; "
            "remove one of them"
        )
    require_compatible(Combination(config.parallel, mesh.sizes, compiled, reproducible, one_copy=shared))
    cut = resolve_cut(config, mesh, task, data, device) if mesh.stages.size > 1 else config.parallel.cut
    module = SyncBatchNorm.convert(task.module, mesh.replicas)
    parameters = sum(p.numel() for p in module.parameters())
    whole = ModelPart(module, config.parallel, lambda: _criterion(task), cut, device, config.train)
    divided = divide(whole, mesh)
    if isinstance(task.loss, nn.Module):
        move(task.loss, device)
    engine = make_engine(
        divided.module,
        task.loss if divided.pipeline is None else _criterion(task),
        make_optimizer(divided.module.named_parameters()),
        mesh.replicas,
        config,
        division=replace(divided.division, base=task.base),
    )
    if divided.pipeline is not None and divided.pipeline.versions is not None:
        agree_on_errors(mesh.world, lambda: _require_versions(config, engine))
    if config.model.layer_drop:
        engine.layer_drop = _layer_drop(config, divided)
    if config.model.compile:
        compile_blocks(divided.blocks, engine, mesh.world)
    return engine, parameters


def _layer_drop(config: Config, part: ModelPart) -> LayerDrop:
    """Return the blocks of a model that steps may leave out, after the model has been divided.

    Raises:
        InputError: The model or another setting does not allow it; on every rank.
    """
    model, parallel = config.model, config.parallel
    conflicts = {
        f"model.name {model.name}": not model.factory and model.name != "gpt",
        f"model.factory {model.factory}": model.factory.startswith(PREFIX),
        "model.compile": model.compile,
        f"parallel.slices {parallel.slices}": parallel.slices > 1,
        "parallel.schedule 2bw": parallel.schedule == "2bw",
    }
    if why := next((what for what, conflicting in conflicts.items() if conflicting), ""):
        raise refusal(f"model.layer_drop {model.layer_drop} cannot be combined with {why}; set model.layer_drop to 0")
    return LayerDrop(part.module, part.blocks, model.layer_drop)


def _require_versions(config: Config, engine: Engine) -> None:
    """Raise InputError if the run has something that does not support two versions of the weights."""
    norms = [m for m in engine.module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    conflicts = {
        f"parallel.mode {config.parallel.mode}": config.parallel.mode != "sync",
        f"parallel.zero {engine.sharding.zero}": engine.sharding.zero != 0,
        "parallel.offload": bool(config.parallel.offload),
        f"train.precision {config.train.precision}": config.train.precision != "fp32",
        "train.class_weights": bool(config.train.class_weights),
        "a model that adds loss terms": bool(engine.terms.names),
        "batch norm with running statistics": any(norm.track_running_stats for norm in norms),
    }
    if why := next((what for what, conflicting in conflicts.items() if conflicting), ""):
        raise refusal(
            f"parallel.schedule 2bw keeps two versions of the weights, which does not work with {why}; change it, or "
            "set parallel.schedule to 1f1b"
        )


def resolve_cut(config: Config, mesh: Mesh, task: Task, data: Dataset, device: torch.device = CPU) -> Cut:
    """Return parallel.cut, or if it is "time", the measured cost of each block on each rank. Collective.

    Each rank measures all blocks and cannot compute divided layers, so call this before the model is divided.

    Args:
        config: The settings.
        mesh: Mesh of the ranks.
        task: The whole model and its loss.
        data: Training data set, of which one microbatch is used.
        device: Device of this rank, on which it measures.

    Raises:
        InputError: If the model does not support slices of a sequence.
    """
    parallel = config.parallel
    if parallel.cut != "time" and parallel.slices == 1:
        return parallel.cut
    blocks = listed_blocks(task.module)
    require_look_back(task.module, blocks, parallel.slices)

    def check() -> None:
        check_slices(blocks, *_first_microbatch(config, mesh, data), parallel.slices)

    if parallel.slices > 1:
        mesh.world.on_root(check)
    return _measure(config, mesh, mesh.stages, blocks, data, device) if parallel.cut == "time" else parallel.cut


_TOLERANCE = 0.95  # speed, relative to the fastest rank, from which a rank counts as equally fast: timings vary


def with_shares(config: Config, places: GroupPlaces, task: Task, data: Dataset, device: torch.device) -> GroupPlaces:
    """Return the places with parts of each batch in proportion to measured speeds (`parallel.shares time`). Collective.

    Each rank measures the whole model, so call this before the model is divided. Of ranks that read the same samples,
    the slowest counts.

    Args:
        config: The settings.
        places: Places with equal parts.
        task: The whole model and its loss.
        data: Training data set, of which one microbatch is used.
        device: Device of this rank, on which it measures.

    Raises:
        InputError: On all ranks, if another setting excludes such shares.
    """
    mesh = places.mesh
    if config.parallel.shares == "equal" or mesh.readers.size == 1:
        return places
    require_compatible(Combination(config.parallel, mesh.sizes, reproducible=config.run.reproducible))
    try:
        blocks = listed_blocks(task.module)
    except InputError:
        blocks = [("", task.module)]
    seconds = [sum(each) for each in _measure(config, mesh, mesh.readers, blocks, data, device)]
    speeds = tuple(1.0 if min(seconds) > _TOLERANCE * each else min(seconds) / each for each in seconds)
    workers = replace(places.workers, speeds=speeds)
    return replace(places, workers=workers, evaluating=workers)


def _measure(
    config: Config,
    mesh: Mesh,
    ranks: Communicator,
    blocks: Sequence[tuple[str, nn.Module]],
    data: Dataset,
    device: torch.device,
) -> list[list[float]]:
    """Return the seconds of each block on each of `ranks`, for a microbatch. Collective over all ranks."""
    precision = config.train.precision

    def measure() -> list[float]:
        x, _ = _first_microbatch(config, mesh, data)
        with torch.autocast(device.type, DTYPES[precision]) if precision != "fp32" else nullcontext():
            return time_costs(blocks, x, device)

    return costs_by_rank(mesh.world, ranks, measure)


def _first_microbatch(config: Config, mesh: Mesh, data: Dataset) -> Microbatch:
    size = microbatch_size(config, mesh) or -(-config.train.batch // mesh.readers.size)
    x, y = map(torch.from_numpy, data.read(np.arange(min(size, len(data)))))
    return x, y


def _criterion(task: Task) -> Callable[[Any, Any], torch.Tensor]:
    """Return the loss of an output and a target, as a separate object if possible.

    A method of the model would keep the whole model in memory.
    """
    criterion: Callable[[Any, Any], torch.Tensor] = getattr(task.module, "criterion", task.loss)
    return criterion


def compile_blocks(blocks: Sequence[nn.Module], engine: Engine, world: Communicator) -> None:
    """Compile the blocks of an engine's module (`model.compile`). Collective.

    Each block is compiled in place at its first call, so names in the model's state do not change. Code between blocks
    and the hooks on parameters, which reduce gradients, are not compiled. Combinations known to fail are refused.

    Args:
        blocks: Blocks of the model before its division; those that are not on this rank are ignored.
        engine: Engine that trains them.
        world: All ranks that train the model.

    Raises:
        InputError: If there are no blocks, they do not compile under this engine, or a rank has no compiler.
    """
    if engine.config.train.offload_activations:
        raise refusal("model.compile cannot be combined with train.offload_activations; remove one of them")
    if not isinstance(recompute := engine.config.train.recompute, bool):
        raise refusal(
            f"model.compile cannot be combined with train.recompute {recompute}; set train.recompute to true or false, "
            "or model.compile to false"
        )
    gathers, synchronous = engine.sharding.parameters.gathers, engine.synchronous and engine.comm.size > 1
    parallel, has_blocks = engine.config.parallel, bool(blocks)
    require_compatible(
        Combination(parallel, compiled=True, has_blocks=has_blocks, gathers=gathers, synchronous=synchronous)
    )
    agree_on_errors(world, lambda: require_compiler(engine.device))
    import torch._inductor.config as inductor

    inductor.fallback_random = True  # dropout draws the same numbers as without the compiler
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        inductor.compile_threads = 1  # otherwise each rank starts a process for every core
    mine = set(engine.module.modules())
    for block in blocks:
        if block in mine:
            block.compile()


def require_compiler(device: torch.device) -> None:
    """Raise InputError if torch.compile lacks Triton or a C++ compiler, depending on the kind of device."""
    if is_accelerator(device):
        from torch.utils._triton import has_triton

        if not has_triton():
            raise InputError(
                f"model.compile needs Triton for {device.type} devices, and PyTorch finds none; install it, or set "
                "model.compile to false"
            )
        return
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:  # PyTorch does not document the types of this error
        raise InputError(
            f"model.compile needs a C++ compiler on the CPU, and PyTorch finds none ({type(error).__name__}); "
            "install or load g++ or clang, set CXX to another compiler, or set model.compile to false"
        ) from error
