"""An optimizer and a scheduler of the user's, for a model that may have been divided since they were made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mpitrain.comm import Communicator
from mpitrain.errors import refusal
from mpitrain.shard.flat_parameters import has_stepped

Names = Mapping[nn.Parameter, Sequence[str]]
OptimizerOf = torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def names_of(model: nn.Module) -> Names:
    """Of each parameter all its names, before the model is divided."""
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
