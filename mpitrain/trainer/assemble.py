"""From a model and a configuration to an engine on a mesh: what is cut, over which ranks, in which order.

task -> tensor parallel layers -> pipeline stages -> data parallel or ZeRO
        over mesh.layers          over mesh.stages      over mesh.replicas

`mpitrain.initialize` divides a model by the same functions.

Reference:
    Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost (`recompute_blocks`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mpitrain.comm import Communicator
from mpitrain.comm.memory.device import CPU, is_accelerator
from mpitrain.config.parallel import ParallelSection
from mpitrain.config.settings import Config
from mpitrain.data import Dataset
from mpitrain.errors import InputError, refusal
from mpitrain.layers.precision import DTYPES
from mpitrain.layers.sync_batchnorm import SyncBatchNorm
from mpitrain.layout.mesh import Mesh, conflict, uncompiled
from mpitrain.layout.ownership import Axes, owners_of
from mpitrain.models.task import Task
from mpitrain.pipe.partition import check_slices, listed_blocks, require_look_back, time_costs
from mpitrain.pipe.pipeline import Pipeline
from mpitrain.pipe.schedule import default_microbatches
from mpitrain.shard import placement
from mpitrain.shard.flat import blocks_of
from mpitrain.tensor import ParallelStyle, parallelize, plan_for
from mpitrain.trainer.data import microbatch_size
from mpitrain.trainer.device import move
from mpitrain.trainer.engine import Engine
from mpitrain.trainer.folder import together
from mpitrain.trainer.state import tied_names

Cut = str | Sequence[float]
Plan = Mapping[str, str | ParallelStyle]
Criterion = Callable[[Any, Any], torch.Tensor]
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
    refuse_divisions(config.parallel, mesh, compiled=compiled, reproducible=reproducible)
    cut = tried_out(config, mesh, task, data) if mesh.stages.size > 1 else config.parallel.cut
    module = SyncBatchNorm.convert(task.module, mesh.replicas)
    parameters = sum(p.numel() for p in module.parameters())
    divided = divide(module, mesh, config, criterion=lambda: _criterion(task), cut=cut, device=device)
    if isinstance(task.loss, nn.Module):
        move(task.loss, device)
    engine = make_engine(
        divided.module,
        task.loss if divided.axes.pipeline is None else _criterion(task),
        make_optimizer(divided.module.named_parameters()),
        mesh.replicas,
        config,
        axes=replace(divided.axes, base=task.base),
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


@dataclass(frozen=True)
class DividedModel:
    """This rank's part of a model.

    Attributes:
        module: The part, with the names of the whole model.
        axes: Its place in the mesh.
        blocks: Of the model, as `mpitrain.shard.flat.blocks_of` finds them before it is divided.
    """

    module: nn.Module
    axes: Axes
    blocks: list[nn.Module]


def divide(
    model: nn.Module,
    mesh: Mesh,
    config: Config,
    *,
    criterion: Callable[[], Criterion],
    cut: Cut,
    device: torch.device,
    plan: Plan | None = None,
    blocks: Sequence[str] = (),
) -> DividedModel:
    """Divide a model over the tensor and the pipeline axis, and move this rank's part to its device. Collective.

    Args:
        model: The whole model, the same on all ranks; it is changed in place.
        mesh: The ranks.
        config: The settings: how stages and layers are cut, and whether activations are computed again in backward.
        criterion: Gives the loss of an output and a target, once layers are divided, where there are stages.
        cut: What stages have equally much of, where it is not numbers of blocks.
        device: What this rank computes on.
        plan: How layers are divided (see `mpitrain.tensor.plan`), where there are tensor ranks; None: as it says.
        blocks: Names of the modules that one after the other are the model; empty: as the model says.
    """
    parallel, recompute = config.parallel, config.train.recompute
    found, aliases = blocks_of(model), tied_names(model)
    if mesh.layers.size > 1:
        plan = plan_for(model, plan, sequence=parallel.sequence)
        parallelize(model, mesh.layers, plan, sequence=parallel.sequence, whole=parallel.whole)
    pipeline, elsewhere, module = None, set[str](), model
    if mesh.stages.size > 1:
        listed = listed_blocks(model, blocks)
        require_look_back(model, listed, parallel.slices)
        pipeline = Pipeline(
            listed,
            criterion(),
            mesh,
            schedule=parallel.schedule,
            chunks=parallel.chunks,
            slices=parallel.slices,
            cut=cut,
            blocks=() if isinstance(parallel.cut, str) else parallel.cut,
            microbatches=default_microbatches(mesh.stages.size),
            recompute=recompute,
            device=device,
        )
        elsewhere, module = pipeline.counted_elsewhere(), pipeline.module
        _require_parameters(mesh, module)
    elif recompute:
        recompute_blocks(module)
    move(module, device)
    owners = owners_of(module, mesh.layers.rank, elsewhere)
    return DividedModel(module, Axes((mesh.stages, mesh.layers), owners, pipeline, aliases), found)


def _require_parameters(mesh: Mesh, stage: nn.Module) -> None:
    """Raise InputError where a stage would have nothing to train. Collective."""
    trains = mesh.stages.all_gather_object(any(p.requires_grad for p in stage.parameters()))
    if not all(trains):
        raise refusal(
            f"rank {trains.index(False)} of the pipeline would have no parameter to train; use fewer stages "
            "(parallel.pipeline x parallel.chunks), or set parallel.cut to parameters"
        )


def refuse_divisions(
    parallel: ParallelSection, mesh: Mesh, *, compiled: bool = False, reproducible: bool = False
) -> None:
    """Raise InputError for ways to divide a model that do not go together (see `mesh` and `shard.placement`)."""
    staged, shared = parallel.pipeline > 1, parallel.share_node
    why = conflict(parallel, compiled=compiled, reproducible=reproducible)
    if why := why or placement.conflict(parallel.zero, mesh.replicas.size, staged=staged, one_copy=shared):
        raise refusal(why)


def recompute_blocks(module: nn.Module) -> int:
    """Let every block of a model keep its input alone, and be computed again in backward. Changes the module.

    Dropout draws the same numbers again.

    Args:
        module: The model; `mpitrain.shard.flat.blocks_of` says what its blocks are.

    Returns:
        The number of blocks.

    Raises:
        InputError: The model has none.
    """
    blocks = blocks_of(module)
    _require_blocks("train.recompute", blocks)
    for block in blocks:
        block.forward = partial(_recomputed, block, block.forward)
    return len(blocks)


def _require_blocks(key: str, blocks: Sequence[nn.Module]) -> None:
    if not blocks:
        raise refusal(
            f"{key} finds no blocks in the model: put its layers into a ModuleList or Sequential, or set it to false"
        )


def _recomputed(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The block's forward in training, which keeps its input alone."""
    if not block.training:
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


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
    _require_blocks("model.compile", blocks)
    if why := uncompiled(engine.sharding.parameters.gathers, engine.synchronous and engine.comm.size > 1):
        raise refusal(why)
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
