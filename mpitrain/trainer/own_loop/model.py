"""A model, an optimizer and a scheduler of the user's, put onto a mesh by `mpitrain.initialize`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mpitrain.comm import Communicator
from mpitrain.config.parallel import ParallelSection
from mpitrain.config.settings import Config
from mpitrain.errors import refusal
from mpitrain.mesh import Mesh
from mpitrain.ownership import Axes
from mpitrain.shard.ddp import broadcast_state
from mpitrain.shard.flat import blocks_of
from mpitrain.shard.flat_parameters import has_stepped
from mpitrain.tensor import plan_for
from mpitrain.trainer.assemble import DividedModel, Plan, divide, recompute_blocks, refuse_divisions
from mpitrain.trainer.device import found_on, move
from mpitrain.trainer.engine import Loss


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
    model: nn.Module, mesh: Mesh, config: Config, *, loss: Loss | None, plan: Plan | None, blocks: Sequence[str]
) -> tuple[DividedModel, Loss | None]:
    """Divide a model as the configuration says, and move this rank's part to its device. Collective.

    Returns:
        This rank's part, and the loss of an output and a target; None where there is none.

    Raises:
        InputError: It cannot be divided so, or there is no loss that a pipeline could have.
    """
    own = getattr(model, "loss", None)
    own = own if callable(own) else None
    if mesh.pipeline.size * mesh.tensor.size == 1:
        move(model, found_on(model, config.run.device, mesh.world))
        found = blocks_of(model)
        if config.train.recompute:
            recompute_blocks(model)
        if own is None and (blocks or plan is not None or hasattr(model, "pipeline_blocks")):
            own = getattr(model, "criterion", None)  # as it would be with stages
        return DividedModel(model, Axes(), found), loss if loss is not None else own
    parallel, before = config.parallel, getattr(model, "criterion", None)
    device = found_on(model, config.run.device, mesh.world)
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
        recompute=config.train.recompute,
        device=device,
        blocks=blocks,
    )
    chosen = _loss_of(model, loss, own, before, staged=staged)
    if isinstance(chosen, nn.Module):
        move(chosen, device)
    return divided, chosen


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


Names = Mapping[nn.Parameter, Sequence[str]]
OptimizerOf = torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def names_of(model: nn.Module) -> Names:
    """Return all names of each parameter, before the model is divided."""
    found: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(parameter, []).append(name)
    return found


def following(given: Any, names: Names, module: nn.Module, comm: Communicator) -> torch.optim.Optimizer:
    """The optimizer of this rank's part of a model. Collective.

    Args:
        given: An optimizer of the whole model's parameters, or what makes one of parameters: a class or a function.
        names: Of the whole model's parameters.
        module: This rank's part of the model; the whole, where it is not divided.
        comm: All ranks.

    Raises:
        InputError: It has a state or strange parameters, it is none, or its groups are not the same on all ranks.
    """
    if isinstance(given, type) or not hasattr(given, "param_groups"):
        return _made(given, module, comm)
    if any(p not in names for group in given.param_groups for p in group["params"]):
        raise refusal("the optimizer has parameters that are not the model's; give it those alone")
    parts = dict(module.named_parameters(remove_duplicate=False))
    kept = {p: [parts[name] for name in named if name in parts][:1] for p, named in names.items()}
    if all(len(found) == 1 and found[0] is p for p, found in kept.items()):
        return given
    if has_stepped(given):
        raise refusal(
            "the optimizer has a state already, of parameters that are divided now; give mt.initialize a new one, and "
            "load a checkpoint after"
        )
    for group in given.param_groups:
        group["params"] = [part for p in group["params"] for part in kept[p]]
    return given


def _made(make: Any, module: nn.Module, comm: Communicator) -> torch.optim.Optimizer:
    """The optimizer that `make` makes of this rank's parameters."""
    if not callable(make):
        raise refusal(
            f"optimizer is a {type(make).__name__}; give an optimizer, or a function of parameters that makes one"
        )
    made = make([p for p in module.parameters() if p.requires_grad])
    if not hasattr(made, "param_groups"):
        raise refusal(f"the function given as optimizer returned a {type(made).__name__}; let it return an optimizer")
    counts = comm.all_gather_object(len(made.param_groups))
    if other := next((rank for rank, count in enumerate(counts) if count != counts[0]), 0):
        raise refusal(
            f"the function given as optimizer made {counts[0]} groups of parameters on rank 0 and {counts[other]} on "
            f"rank {other}; let it make as many on every rank, empty ones too"
        )
    return made


def scheduling(given: Any, optimizer: torch.optim.Optimizer) -> Any:
    """A learning-rate scheduler: as it is given, or what the given function makes of the optimizer.

    Raises:
        InputError: It is none, it follows a loss, or it is of another optimizer.
    """
    if given is None:
        return None
    if hasattr(given, "step") and not isinstance(given, type):
        made = given
    elif callable(given):
        made = given(optimizer)
    else:
        raise refusal(
            f"scheduler is a {type(given).__name__}; give a scheduler, or a function of an optimizer that makes one"
        )
    if isinstance(made, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise refusal(
            "scheduler ReduceLROnPlateau follows held-out losses, which a loop of your own has; leave it out, and step "
            "it with what engine.evaluate returns"
        )
    if getattr(made, "optimizer", optimizer) is not optimizer:
        raise refusal(
            "the scheduler is of another optimizer than the engine's, whose learning rates it would not change; make "
            "it of the one that mt.initialize is given"
        )
    return made


def plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a scheduler's state that JSON can hold; the rest is functions."""
    kinds = (bool, int, float, str, list, type(None))
    return {key: value for key, value in state.items() if isinstance(value, kinds)}
