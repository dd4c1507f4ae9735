"""From a model and a configuration to an engine on a mesh: what is cut (`parallel.dividing`), trained and compiled."""

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
from mpitrain.trainer.folder import together

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
    """Divide a model over the ranks of a mesh. Collective.

    Args:
        task: the whole model, the same on all ranks.
        data: what it is to be trained on.
        make_optimizer: makes the optimizer of this rank's part, given the names and tensors of its parameters.
        device: what this rank computes on; its part of the model is moved there once it is cut out.
        make_engine: makes the engine, from what `Engine` takes.

    Returns:
        The engine, and the number of parameters of the whole model.
    """
    compiled, reproducible = config.model.compile, config.run.reproducible
    shared = config.parallel.share_node
    require_compatible(Combination(config.parallel, mesh.sizes, compiled, reproducible, one_copy=shared))
    cut = tried_out(config, mesh, task, data) if mesh.stages.size > 1 else config.parallel.cut
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


def tried_out(config: Config, mesh: Mesh, task: Task, data: Dataset) -> Cut:
    """Return how to cut the model: parallel.cut, or the cost of each block, measured by one rank for all. Collective.

    Before the model is divided in any other way: what its layers then do together, one rank cannot do alone.
    Raises InputError for a model that slices of a sequence do not go with.
    """
    parallel = config.parallel
    if parallel.cut != "time" and parallel.slices == 1:
        return parallel.cut
    blocks = listed_blocks(task.module)
    require_look_back(task.module, blocks, parallel.slices)
    precision = config.train.precision
    samples = np.arange(min(microbatch_size(config, mesh), len(data)))

    def found() -> list[float]:
        x, y = map(torch.from_numpy, data.read(samples))
        if parallel.slices > 1:
            check_slices(blocks, x, y, parallel.slices)
        if parallel.cut != "time":
            return []
        with torch.autocast("cpu", DTYPES[precision]) if precision != "fp32" else nullcontext():
            return time_costs(blocks, x)

    return mesh.world.on_root(found) or parallel.cut


def _criterion(task: Task) -> Callable[[Any, Any], torch.Tensor]:
    """The loss of an output and a target, by itself where it can be had: a method would keep its whole model."""
    criterion: Callable[[Any, Any], torch.Tensor] = getattr(task.module, "criterion", task.loss)
    return criterion


def compile_blocks(blocks: Sequence[nn.Module], engine: Engine, world: Communicator) -> None:
    """Compile the blocks of an engine's module (`model.compile`). Collective.

    Each block is compiled in place when it is called first, so that names in the model's state stay as they are. What
    lies between blocks, and the hooks on parameters, which reduce gradients, run as ever. What was tried and does not
    compile is refused here.

    Args:
        blocks: Of the model before it was divided; those on this rank are meant.
        engine: What trains them.
        world: All ranks that train the model.

    Raises:
        InputError: There are no blocks, they do not compile under this engine, or a compiler is missing somewhere.
    """
    gathers, synchronous = engine.sharding.parameters.gathers, engine.synchronous and engine.comm.size > 1
    parallel, has_blocks = engine.config.parallel, bool(blocks)
    require_compatible(
        Combination(parallel, compiled=True, has_blocks=has_blocks, gathers=gathers, synchronous=synchronous)
    )
    together(world, lambda: require_compiler(engine.device))
    import torch._inductor.config as inductor

    inductor.fallback_random = True  # dropout draws the numbers that it draws without the compiler
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        inductor.compile_threads = 1  # else each rank starts a process for every core
    mine = set(engine.module.modules())
    for block in blocks:
        if block in mine:
            block.compile()


def require_compiler(device: torch.device) -> None:
    """Raise InputError where what torch.compile needs for a kind of device is not there."""
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
    except Exception as error:  # of several kinds, in a part of PyTorch that is not documented
        raise InputError(
            f"model.compile needs a C++ compiler on the CPU, and PyTorch finds none ({type(error).__name__}); load one "
            "(g++ or clang, or name it in CXX), or set model.compile to false"
        ) from error
