"""From a model and a configuration to an engine on a mesh: what is cut, over which ranks, in which order.

task -> tensor parallel layers -> pipeline stages -> data parallel or ZeRO
        over mesh.tensor          over mesh.pipeline    over mesh.data
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from mpitrain.comm.memory.device import CPU
from mpitrain.config.settings import Config
from mpitrain.data import Dataset
from mpitrain.layers.precision import DTYPES
from mpitrain.layers.sync_batchnorm import SyncBatchNorm
from mpitrain.mesh import Mesh
from mpitrain.models.task import Task
from mpitrain.pipe.partition import check_slices, listed_blocks, require_look_back, time_costs
from mpitrain.tensor import plan_for
from mpitrain.trainer.compiling import compile_blocks
from mpitrain.trainer.data import microbatch_size
from mpitrain.trainer.device import move
from mpitrain.trainer.dividing import Cut, divide, refuse_divisions
from mpitrain.trainer.engine import Engine
from mpitrain.trainer.options import options_of

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
    cut = tried_out(config, mesh, task, data) if mesh.pipeline.size > 1 else config.parallel.cut
    module = SyncBatchNorm.convert(task.module, mesh.data)
    parameters = sum(p.numel() for p in module.parameters())
    plan = plan_for(module, sequence=config.parallel.sequence) if mesh.tensor.size > 1 else {}
    divided = divide(
        module,
        mesh,
        config.parallel,
        plan=plan,
        criterion=lambda: _criterion(task),
        cut=cut,
        recompute=config.train.recompute,
        device=device,
    )
    if isinstance(task.loss, nn.Module):
        move(task.loss, device)
    engine = make_engine(
        divided.module,
        task.loss if divided.axes.pipeline is None else _criterion(task),
        make_optimizer(divided.module.named_parameters()),
        mesh.data,
        options_of(config),
        clip=config.train.clip,
        precision=config.train.precision,
        axes=replace(divided.axes, base=task.base),
    )
    if config.model.compile:
        compile_blocks(divided.blocks, engine, mesh.world)
    return engine, parameters


def tried_out(config: Config, mesh: Mesh, task: Task, data: Dataset) -> Cut:
    """How to cut the model: parallel.cut, or what each block costs, measured by one rank for all. Collective.

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
