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
from mpitrain.errors import InputError
from mpitrain.layers.precision import DTYPES
from mpitrain.layers.sync_batchnorm import SyncBatchNorm
from mpitrain.layout.mesh import Mesh
from mpitrain.models.task import Task
from mpitrain.parallel.dividing import Cut, ModelPart, divide, move
from mpitrain.parallel.rules import Combination, require_compatible
from mpitrain.pipe.partition import check_slices, listed_blocks, require_look_back, time_costs
from mpitrain.trainer.data import microbatch_size
from mpitrain.trainer.engine import Engine
from mpitrain.trainer.folder import agree_on_errors

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
    require_compatible(Combination(config.parallel, mesh.sizes, compiled, reproducible, one_copy=shared))
    cut = resolve_cut(config, mesh, task, data) if mesh.stages.size > 1 else config.parallel.cut
    module = SyncBatchNorm.convert(task.module, mesh.replicas)
    parameters = sum(p.numel() for p in module.parameters())
    whole = ModelPart(module, config.parallel, lambda: _criterion(task), cut, device, config.train.recompute)
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
    if config.model.compile:
        compile_blocks(divided.blocks, engine, mesh.world)
    return engine, parameters


def resolve_cut(config: Config, mesh: Mesh, task: Task, data: Dataset) -> Cut:
    """Return parallel.cut, or if it is "time", the measured cost of each block. Collective.

    Rank 0 measures alone and cannot compute divided layers, so call this before the model is divided.

    Args:
        config: The settings.
        mesh: Mesh of the ranks.
        task: The whole model and its loss.
        data: Training data set, of which one microbatch is used.

    Raises:
        InputError: If the model does not support slices of a sequence.
    """
    parallel = config.parallel
    if parallel.cut != "time" and parallel.slices == 1:
        return parallel.cut
    blocks = listed_blocks(task.module)
    require_look_back(task.module, blocks, parallel.slices)
    precision = config.train.precision
    samples = np.arange(min(microbatch_size(config, mesh), len(data)))

    def measure() -> list[float]:
        x, y = map(torch.from_numpy, data.read(samples))
        if parallel.slices > 1:
            check_slices(blocks, x, y, parallel.slices)
        if parallel.cut != "time":
            return []
        with torch.autocast("cpu", DTYPES[precision]) if precision != "fp32" else nullcontext():
            return time_costs(blocks, x)

    return mesh.world.on_root(measure) or parallel.cut


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
