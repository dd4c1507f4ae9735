"""A model divided over the ranks of a mesh: its layers over the tensor axis, then its blocks over the pipeline axis.

The trainer and `mpitrain.initialize` do it alike; the data axis comes after it, with the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mpitrain.config.parallel import ParallelSection
from mpitrain.errors import refusal
from mpitrain.mesh import Mesh, conflict
from mpitrain.ownership import Axes, owners_of
from mpitrain.pipe.partition import listed_blocks
from mpitrain.pipe.pipeline import Pipeline
from mpitrain.pipe.schedules import default_microbatches
from mpitrain.pipe.slices import require_look_back
from mpitrain.shard import placement
from mpitrain.shard.flat import blocks_of
from mpitrain.tensor import ParallelStyle, parallelize
from mpitrain.trainer.device import move
from mpitrain.trainer.recompute import recompute_blocks
from mpitrain.trainer.state import tied_names

Cut = str | Sequence[float]
Plan = Mapping[str, str | ParallelStyle]
Criterion = Callable[[Any, Any], torch.Tensor]


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
    parallel: ParallelSection,
    *,
    plan: Plan,
    criterion: Callable[[], Criterion],
    cut: Cut,
    recompute: bool,
    device: torch.device,
    blocks: Sequence[str] = (),
) -> DividedModel:
    """Divide a model over the tensor and the pipeline axis, and move this rank's part to its device. Collective.

    Args:
        model: The whole model, the same on all ranks; it is changed in place.
        mesh: The ranks.
        parallel: How stages and layers are cut.
        plan: How layers are divided (see `mpitrain.tensor.plan`), where there are tensor ranks.
        criterion: Gives the loss of an output and a target, once layers are divided, where there are stages.
        cut: What stages have equally much of, where it is not numbers of blocks.
        recompute: Whether activations are computed again in backward.
        device: What this rank computes on.
        blocks: Names of the modules that one after the other are the model; empty: as the model says.
    """
    found, aliases = blocks_of(model), tied_names(model)
    if mesh.tensor.size > 1:
        parallelize(model, mesh.tensor, plan, sequence=parallel.sequence, whole=parallel.whole)
    pipeline, elsewhere, module = None, set[str](), model
    if mesh.pipeline.size > 1:
        listed = listed_blocks(model, blocks)
        pipeline = make_pipeline(parallel, mesh, model, listed, criterion(), cut, recompute, device)
        elsewhere, module = pipeline.counted_elsewhere(), pipeline.module
    elif recompute:
        recompute_blocks(module)
    move(module, device)
    owners = owners_of(module, mesh.tensor.rank, elsewhere)
    return DividedModel(module, Axes((mesh.pipeline, mesh.tensor), owners, pipeline, aliases), found)


def make_pipeline(
    parallel: ParallelSection,
    mesh: Mesh,
    model: nn.Module,
    listed: Sequence[tuple[str, nn.Module]],
    criterion: Criterion,
    cut: Cut,
    recompute: bool,
    device: torch.device,
) -> Pipeline:
    """The stages of a model whose blocks are listed. Raises InputError where one would have nothing to train."""
    require_look_back(model, listed, parallel.slices)
    pipeline = Pipeline(
        listed,
        criterion,
        mesh,
        schedule=parallel.schedule,
        chunks=parallel.chunks,
        slices=parallel.slices,
        cut=cut,
        blocks=() if isinstance(parallel.cut, str) else parallel.cut,
        microbatches=default_microbatches(mesh.pipeline.size),
        recompute=recompute,
        device=device,
    )
    trains = mesh.pipeline.all_gather_object(any(p.requires_grad for p in pipeline.module.parameters()))
    if not all(trains):
        raise refusal(
            f"rank {trains.index(False)} of the pipeline would have no parameter to train; use fewer stages "
            "(parallel.pipeline x parallel.chunks), or set parallel.cut to parameters"
        )
    return pipeline


def refuse_divisions(
    parallel: ParallelSection, mesh: Mesh, *, compiled: bool = False, reproducible: bool = False
) -> None:
    """Raise InputError for ways to divide a model that do not go together (see `mesh` and `shard.placement`)."""
    staged, shared = parallel.pipeline > 1, parallel.share_node
    why = conflict(parallel, compiled=compiled, reproducible=reproducible)
    if why := why or placement.conflict(parallel.zero, mesh.data.size, staged=staged, one_copy=shared):
        raise refusal(why)
