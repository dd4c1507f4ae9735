"""From a model and a configuration to an engine on a mesh: what is cut, over which ranks, in which order.

task -> tensor parallel layers -> pipeline stages -> data parallel or ZeRO
        over mesh.tensor          over mesh.pipeline    over mesh.data
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from mpitrain.comm.memory.device import CPU
from mpitrain.config.settings import Config
from mpitrain.data import Dataset
from mpitrain.errors import refusal
from mpitrain.layers.precision import DTYPES
from mpitrain.layers.sync_batchnorm import SyncBatchNorm
from mpitrain.layout import is_replicated
from mpitrain.mesh import Mesh
from mpitrain.models.task import Task
from mpitrain.pipe.partition import listed_blocks, time_costs
from mpitrain.pipe.pipeline import Pipeline
from mpitrain.pipe.slices import check_slices, require_look_back
from mpitrain.shard.axes import Axes
from mpitrain.shard.units import blocks_of
from mpitrain.tensor import ParallelStyle, parallelize, plan_for
from mpitrain.tensor.plan import begins_sequence
from mpitrain.trainer.compiling import compile_blocks
from mpitrain.trainer.data import microbatch_size
from mpitrain.trainer.device import move
from mpitrain.trainer.engine import Engine
from mpitrain.trainer.options import options_of
from mpitrain.trainer.recompute import recompute_blocks
from mpitrain.trainer.state import tied_names

Cut = str | Sequence[float]
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
    refuse_what_does_not_go_together(config, mesh)
    cut = tried_out(config, mesh, task, data) if mesh.pipeline.size > 1 else config.parallel.cut
    module = SyncBatchNorm.convert(task.module, mesh.data)
    blocks = blocks_of(module)
    parameters = sum(p.numel() for p in module.parameters())
    aliases = tied_names(module)
    if mesh.tensor.size > 1:
        parallel = config.parallel
        parallelize(module, mesh.tensor, plan_of(module, config), sequence=parallel.sequence, whole=parallel.whole)
    pipeline, elsewhere = None, set()
    if mesh.pipeline.size > 1:
        pipeline = make_pipeline(config, mesh, module, task, cut, device)
        elsewhere = pipeline.counted_elsewhere()
        module = pipeline.module
    elif config.train.recompute:
        recompute_blocks(module)
    move(module, device)
    if isinstance(task.loss, nn.Module):
        move(task.loss, device)
    uncounted = {p for name, p in module.named_parameters() if name in elsewhere}

    def counted(parameter: nn.Parameter) -> bool:
        once = is_replicated(parameter) and mesh.tensor.rank > 0
        return not once and parameter not in uncounted

    engine = make_engine(
        module,
        task.loss if pipeline is None else _criterion(task),
        make_optimizer(module.named_parameters()),
        mesh.data,
        options_of(config),
        clip=config.train.clip,
        precision=config.train.precision,
        axes=Axes((mesh.pipeline, mesh.tensor), counted, pipeline, aliases),
    )
    if config.model.compile:
        compile_blocks(blocks, engine, mesh.world)
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


def make_pipeline(
    config: Config, mesh: Mesh, module: nn.Module, task: Task, cut: Cut, device: torch.device
) -> Pipeline:
    recorded = config.parallel.recording and mesh.data.rank == mesh.tensor.rank == 0
    pipeline = Pipeline(
        module,
        _criterion(task),
        mesh,
        schedule=config.parallel.schedule,
        chunks=config.parallel.chunks,
        slices=config.parallel.slices,
        cut=cut,
        blocks=() if isinstance(config.parallel.cut, str) else config.parallel.cut,
        microbatches=2 * mesh.pipeline.size,
        recompute=config.train.recompute,
        device=device,
        record=Path(config.parallel.recording) if recorded else False,
    )
    trains = mesh.pipeline.all_gather_object(any(p.requires_grad for p in pipeline.module.parameters()))
    if not all(trains):
        raise refusal(
            f"rank {trains.index(False)} of the pipeline would have no parameter to train; use fewer stages "
            "(parallel.pipeline x parallel.chunks), or set parallel.cut to parameters"
        )
    return pipeline


def _criterion(task: Task) -> Callable[[Any, Any], torch.Tensor]:
    """The loss of an output and a target, by itself where it can be had: a method would keep its whole model."""
    criterion: Callable[[Any, Any], torch.Tensor] = getattr(task.module, "criterion", task.loss)
    return criterion


def plan_of(module: nn.Module, config: Config) -> dict[str, str | ParallelStyle]:
    """How the model's layers are divided. Raises InputError where they cannot be as the configuration says."""
    plan = plan_for(module)
    if config.parallel.sequence and not begins_sequence(plan):
        raise refusal(
            f"parallel.sequence divides what is between an embedding and the head, and the plan of "
            f"{type(module).__name__} names none; set parallel.sequence to false"
        )
    return plan


def refuse_what_does_not_go_together(config: Config, mesh: Mesh) -> None:
    parallel = config.parallel
    if config.model.compile and (parallel.slices > 1 or config.run.reproducible):
        why = "run.reproducible needs sums whose order is known"
        why = "with parallel.slices blocks are called piece by piece, as they are" if parallel.slices > 1 else why
        raise refusal(f"model.compile: {why}; set one of them to its default")
    cut = parallel.pipeline > 1 or parallel.tensor > 1
    if cut and config.run.reproducible:
        raise refusal(
            "run.reproducible is for data parallel runs: a cut model sums in another order; set parallel.pipeline and "
            "parallel.tensor to 1, or run.reproducible to false"
        )
    if parallel.tensor > 1 and config.model.name == "resnet" and not config.model.factory:
        raise refusal(
            "model.name resnet cannot be divided over tensor ranks: its layers are convolutions, whose activations "
            "are larger than their weights, so that the ranks would wait for sums of them; set parallel.tensor to 1 "
            "and use parallel.data or parallel.pipeline"
        )
    if parallel.sequence and parallel.slices > 1 and mesh.tensor.size > 1 and mesh.pipeline.size > 1:
        raise refusal(
            "parallel.sequence does not go with parallel.slices: a slice cannot tell its length from a part of it; set "
            "parallel.sequence to false, or parallel.slices to 1"
        )
    if parallel.pipeline == 1 and not isinstance(parallel.cut, str):
        raise refusal(
            f"parallel.cut {list(parallel.cut)} says how many blocks each stage of a pipeline has, and "
            "parallel.pipeline is 1; raise that, or leave parallel.cut out"
        )
    if parallel.pipeline > 1 and parallel.zero == 3 and not parallel.share_node and mesh.data.size > 1:
        raise refusal(
            "parallel.zero 3 without parallel.share_node would gather each block of a stage twice for every "
            "microbatch, where a pipeline has many, and hold them whole while any of those computes; use "
            "parallel.share_node true or parallel.zero 2"
        )
