"""From a model and a configuration to an engine on a mesh: what is cut, over which ranks, in which order.

task -> tensor parallel layers -> pipeline stages -> data parallel or ZeRO
        over mesh.tensor          over mesh.pipeline    over mesh.data
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from mpitrain.config import Config
from mpitrain.errors import InputError
from mpitrain.layout import is_replicated
from mpitrain.mesh import Mesh
from mpitrain.models.task import Task
from mpitrain.pipe.pipeline import Pipeline
from mpitrain.shard.axes import Axes
from mpitrain.shard.batchnorm import SyncBatchNorm
from mpitrain.shard.engine import Engine
from mpitrain.shard.optim import make_optimizer
from mpitrain.shard.recompute import recompute_blocks
from mpitrain.shard.settings import options_of
from mpitrain.shard.state import tied_names
from mpitrain.tensor import parallelize, plan_for


@dataclass(frozen=True)
class Assembled:
    """parameters: of the whole model."""

    engine: Engine
    parameters: int


def assemble(config: Config, mesh: Mesh, task: Task) -> Assembled:
    """Collective. task: the whole model, the same on all ranks."""
    refuse_what_does_not_go_together(config)
    module = SyncBatchNorm.convert(task.module, mesh.data)
    parameters = sum(p.numel() for p in module.parameters())
    aliases = tied_names(module)
    if mesh.tensor.size > 1:
        parallelize(module, mesh.tensor, plan_for(module), sequence=config.parallel.sequence)
    pipeline, elsewhere = None, set()
    if mesh.pipeline.size > 1:
        pipeline = make_pipeline(config, mesh, module, task)
        elsewhere = pipeline.counted_elsewhere()
        module = pipeline.module
    elif config.train.recompute:
        recompute_blocks(module)
    uncounted = {p for name, p in module.named_parameters() if name in elsewhere}

    def counted(parameter: nn.Parameter) -> bool:
        once = is_replicated(parameter) and mesh.tensor.rank > 0
        return not once and parameter not in uncounted

    engine = Engine(
        module,
        task.loss,
        make_optimizer(config.optim, module.named_parameters()),
        mesh.data,
        options_of(config),
        clip=config.train.clip,
        precision=config.train.precision,
        axes=Axes((mesh.pipeline, mesh.tensor), counted, pipeline, aliases),
    )
    return Assembled(engine, parameters)


def make_pipeline(config: Config, mesh: Mesh, module: nn.Module, task: Task) -> Pipeline:
    loss = getattr(task.module, "criterion", task.loss)  # a bound method would keep the whole model
    return Pipeline(
        module,
        loss,
        mesh,
        schedule=config.parallel.schedule,
        chunks=config.parallel.chunks,
        cut=config.parallel.cut,
        microbatches=2 * mesh.pipeline.size,
        recompute=config.train.recompute,
    )


def refuse_what_does_not_go_together(config: Config) -> None:
    parallel = config.parallel
    cut = parallel.pipeline > 1 or parallel.tensor > 1
    if cut and config.run.reproducible:
        raise InputError(
            "run.reproducible is for data parallel runs: a cut model sums in another order; set parallel.pipeline and "
            "parallel.tensor to 1, or run.reproducible to false",
            agreed=True,
        )
    if parallel.pipeline > 1 and parallel.zero == 3 and not parallel.share_node:
        raise InputError(
            "parallel.zero 3 gathers blocks as they compute, which a pipeline does in an order of its own; use "
            "parallel.share_node true or parallel.zero 2",
            agreed=True,
        )
