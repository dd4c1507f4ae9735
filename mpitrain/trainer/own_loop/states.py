"""States over all ranks: a divided model's put together on each, and an optimizer's compared with a checkpoint's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path

import numpy as np
import torch

from mpitrain.checkpoint import MODEL, Manifest, Part
from mpitrain.comm import Communicator
from mpitrain.errors import refusal
from mpitrain.trainer.optimizing.optimizer import states_after_step
from mpitrain.trainer.state import OPTIMIZER


def whole_state(
    world: Communicator, parts: Iterable[Part], names: Sequence[str], aliases: Mapping[str, str], device: torch.device
) -> dict[str, torch.Tensor]:
    """Put together what the ranks hold of a model. Collective.

    Args:
        world: All ranks that hold some of it.
        parts: What this rank writes into a checkpoint.
        names: Of the model's state, in order.
        aliases: Further names of tensors, each with the name that it is saved under.
        device: Where the state is wanted.

    Returns:
        A tensor of each name; names of one tensor have the same.
    """
    model = [part for part in parts if part.spec.name.startswith(MODEL)]
    told = world.all_gather_object([[p.spec.name, list(p.spec.shape), p.spec.dtype] for p in model])
    specs = {name: (shape, getattr(torch, dtype)) for of_rank in told for name, shape, dtype in of_rank}
    mine: dict[str, list[Part]] = {}
    for part in model:
        mine.setdefault(part.spec.name, []).append(part)
    saved = {name: MODEL + aliases.get(name, name) for name in names}
    found: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys(saved.values()):
        shape, dtype = specs[name]
        whole = torch.zeros(prod(shape), dtype=dtype, device=device)
        for part in mine.get(name, ()):
            starts, lengths, places = part.piece.runs()
            at = np.repeat(starts - places, lengths) + np.arange(part.data.numel())
            whole[torch.from_numpy(at).to(device)] = part.data.to(device)
        if whole.numel():
            world.all_reduce(whole, "max" if dtype == torch.bool else "sum")
        found[name] = whole.view(shape)
    return {name: found[of] for name, of in saved.items()}


def require_same_optimizer(optimizer: torch.optim.Optimizer, manifest: Manifest, folder: Path) -> None:
    """Raise InputError where a checkpoint has states that the optimizer does not know, or lacks some that it needs.

    One without any, of weights alone, will do, and so does each where a trial does not tell what there will be.
    """
    saved = {name.removeprefix(OPTIMIZER).split("/")[0] for name in manifest.tensors if name.startswith(OPTIMIZER)}
    trials = [
        states_after_step(optimizer, group, shape) for group in optimizer.param_groups for shape in ((8,), (8, 8))
    ]
    if not saved or any(kept is None for kept in trials):
        return
    tried = [set(kept) for kept in trials if kept is not None]
    if saved <= set().union(*tried) and set.intersection(*tried) <= saved:
        return
    needed = ", ".join(sorted(set().union(*tried))) or "none"
    raise refusal(
        f"{folder} has another optimizer's states ({', '.join(sorted(saved))}) than {type(optimizer).__name__} keeps "
        f"({needed}); give mt.initialize the optimizer that saved it, or take the weights alone: python -m "
        f"mpitrain.checkpoint export {folder} weights.pt, which the model loads before mt.initialize"
    )
