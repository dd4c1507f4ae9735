"""A model of the user's, put onto a mesh by `mpitrain.initialize`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mpitrain.comm import Communicator
from mpitrain.config.parallel import ParallelSection
from mpitrain.errors import refusal
from mpitrain.mesh import Mesh
from mpitrain.ownership import Axes
from mpitrain.shard.ddp import broadcast_state
from mpitrain.shard.flat import blocks_of
from mpitrain.tensor import plan_for
from mpitrain.trainer.device import found_on, move, place
from mpitrain.trainer.dividing import DividedModel, Plan, divide, refuse_divisions
from mpitrain.trainer.engine import Loss
from mpitrain.trainer.options import Settings
from mpitrain.trainer.recompute import recompute_blocks


@dataclass(frozen=True)
class PlacedModel:
    """This rank's part of a model, and the loss of an output and a target; None where there is none."""

    divided: DividedModel
    loss: Loss | None


def places(comm: Communicator, parallel: ParallelSection) -> Mesh:
    """The mesh of a loop of one's own, whose data axis is `comm` itself where nothing is divided. Collective.

    Raises InputError for settings that do not go together.
    """
    if parallel.pipeline * parallel.tensor > 1:
        mesh = Mesh.make(comm, parallel.data, parallel.pipeline, parallel.tensor)
    else:
        alone = comm if comm.size == 1 else comm.split(comm.rank, label="alone")
        assert alone is not None
        mesh = Mesh(comm, comm, alone, alone)
    refuse_divisions(parallel, mesh)
    if parallel.cut == "time" and parallel.pipeline > 1:
        raise refusal(
            "parallel.cut time measures blocks with samples of the data set, which a loop of one's own has not; set it "
            "to parameters, or to how many blocks each stage has, as [5, 7]"
        )
    return mesh


def place_on_mesh(
    model: nn.Module, mesh: Mesh, settings: Settings, *, loss: Loss | None, plan: Plan | None, blocks: Sequence[str]
) -> PlacedModel:
    """Divide a model as the settings say, and move this rank's part to its device. Collective.

    Raises:
        InputError: It cannot be divided so, or there is no loss that a pipeline could have.
    """
    own = getattr(model, "loss", None)
    own = own if callable(own) else None
    if mesh.pipeline.size * mesh.tensor.size == 1:
        place(model, settings.device, mesh.world)
        found = blocks_of(model)
        if settings.recompute:
            recompute_blocks(model)
        if own is None and (blocks or plan is not None or hasattr(model, "pipeline_blocks")):
            own = getattr(model, "criterion", None)  # as it would be with stages
        return PlacedModel(DividedModel(model, Axes(), found), loss if loss is not None else own)
    parallel, before = settings.parallel, getattr(model, "criterion", None)
    device = found_on(model, settings.device, mesh.world)
    broadcast_state(model, mesh.world)  # parts are to be those of one model
    staged = mesh.pipeline.size > 1

    def criterion() -> Callable[[Any, Any], torch.Tensor]:
        chosen = _loss_of(model, loss, own, before, staged=staged)
        if chosen is None:
            raise refusal(
                f"stages need a loss, and {type(model).__name__} has none; give mt.initialize loss=, or the model an "
                "attribute `criterion`"
            )
        return chosen

    divided = divide(
        model,
        mesh,
        parallel,
        plan=plan_for(model, plan, sequence=parallel.sequence) if mesh.tensor.size > 1 else {},
        criterion=criterion,
        cut=parallel.cut,
        recompute=settings.recompute,
        device=device,
        blocks=blocks,
    )
    chosen = _loss_of(model, loss, own, before, staged=staged)
    if isinstance(chosen, nn.Module):
        move(chosen, device)
    return PlacedModel(divided, chosen)


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
