"""Whether the optimizer's states in a checkpoint are of the optimizer that is to go on with them."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import torch

from mpitrain.checkpoint import Manifest
from mpitrain.errors import refusal
from mpitrain.shard.flat_parameters import begin_states
from mpitrain.trainer.state import OPTIMIZER


def require_same_optimizer(optimizer: torch.optim.Optimizer, manifest: Manifest, folder: Path) -> None:
    """Raise InputError where a checkpoint has states that the optimizer does not know, or lacks some that it needs.

    One without any, of weights alone, will do, and so does each where a trial does not tell what there will be.
    """
    saved = {name.removeprefix(OPTIMIZER).split("/")[0] for name in manifest.tensors if name.startswith(OPTIMIZER)}
    trials = [_kept(optimizer, group, shape) for group in optimizer.param_groups for shape in ((8,), (8, 8))]
    if not saved or any(kept is None for kept in trials):
        return
    tried = [kept for kept in trials if kept is not None]
    if saved <= set().union(*tried) and set.intersection(*tried) <= saved:
        return
    needed = ", ".join(sorted(set().union(*tried))) or "none"
    raise refusal(
        f"{folder} has another optimizer's states ({', '.join(sorted(saved))}) than {type(optimizer).__name__} keeps "
        f"({needed}); give mt.initialize the optimizer that saved it, or take the weights alone: python -m "
        f"mpitrain.checkpoint export {folder} weights.pt, which the model loads before mt.initialize"
    )


def _kept(optimizer: torch.optim.Optimizer, group: dict[str, Any], shape: tuple[int, ...]) -> set[str] | None:
    """The tensors that a copy of the optimizer keeps of a parameter after a step; None where it does not tell."""
    if hasattr(optimizer, "parts"):  # several in one, whose copy would step the originals
        return None
    tensor = torch.zeros(shape, requires_grad=True)
    tensor.grad = torch.ones(shape)
    try:
        trial: Any = copy.copy(optimizer)
        trial.state, trial.param_groups = defaultdict(dict), [{**group, "params": [tensor]}]
        trial._optimizer_step_pre_hooks = trial._optimizer_step_post_hooks = OrderedDict()
        trial.gather = None  # of Muon
        begin_states(trial)
        type(optimizer).step(trial)  # a scheduler replaces the object's own, by one that steps the original
        return {key for key, value in trial.state[tensor].items() if torch.is_tensor(value)}
    except Exception:  # what an optimizer of somebody else's does with a copy is nowhere written
        return None
