"""Checks of what a training loop of one's own gives an engine, and the models that have one already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mpitrain.errors import InputError, refusal

# what engines of DeepSpeed and modules of torch have, and what stands for it here
_INSTEAD = {
    "forward": "engine(...)",
    "get_global_grad_norm": "engine.norm",
    "get_lr": "engine.lr",
    "global_steps": "engine.steps",
    "gradient_accumulation_steps": "engine.settings.accumulate",
    "is_gradient_accumulation_boundary": "engine.at_boundary before backward, or what engine.step() returns",
    "load_checkpoint": "engine.load(folder)",
    "load_state_dict": "engine.load(folder), or the model's before mt.initialize",
    "lr_scheduler": "engine.lr and the scheduler that you gave",
    "named_parameters": "engine.module.named_parameters()",
    "no_sync": "not needed: only the last backward pass of a step reduces gradients",
    "parameters": "engine.module.parameters()",
    "save_checkpoint": "engine.save(folder)",
    "skipped_steps": "engine.skipped",
    "to": "not needed: the engine has the device of its model, and run.device names another",
    "train_batch_size": "engine.settings.microbatch * engine.settings.accumulate * engine.data_size",
    "train_micro_batch_size_per_gpu": "engine.settings.microbatch",
    "zero_grad": "not needed: the first backward pass of a step begins anew",
}


def instead_of(name: str, kind: str) -> str:
    """Return what an AttributeError says of a name that engines do not have. kind: The class of the engine."""
    instead = f"; here it is {_INSTEAD[name]}" if name in _INSTEAD else ""
    return f"{kind!r} object has no attribute {name!r}{instead}"


def require_scalar(loss: Any) -> None:
    """Raise InputError for what has no gradients that a step could use."""
    wrong = ""
    if not isinstance(loss, torch.Tensor):
        wrong = f"a {type(loss).__name__}; give the tensor that the loss function returned"
    elif loss.numel() != 1:
        wrong = f"a tensor of shape {list(loss.shape)}; give its mean"
    elif not loss.requires_grad:
        wrong = "a tensor without a graph; compute it from engine(...) outside of torch.no_grad(), and do not detach it"
    if wrong:
        raise InputError(f"engine.backward takes a scalar loss, and this is {wrong}")


def pair(batch: Any) -> tuple[Any, Any]:
    """A microbatch as (x, y). Raises InputError where it is something else."""
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    found = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, (tuple, list)) else type(batch).__name__
    raise InputError(
        f"a microbatch is (x, y), and this is a {found}; put the inputs together as x, in a tuple or a mapping, or "
        "write engine(...), engine.backward and engine.step yourself"
    )


def samples_in(x: Any) -> int:
    """Return how many samples an input has: a tensor, or a tuple, list or mapping of tensors."""
    while not isinstance(x, torch.Tensor):
        x = next(iter(x.values() if isinstance(x, Mapping) else x))
    return len(x)


def whole_steps(what: str) -> InputError:
    """The error of a call that a model in stages has no use for."""
    return InputError(
        f"{what} is not for a model in stages, through which all microbatches of a step go together; use "
        "engine.train_batch(iterator) and engine.evaluate(batches)"
    )


_MARK = "_mpitrain_engine"  # attribute of a module that an engine has: its own id, which no copy of it has


class GivenModel:
    """The model that an engine was made of.

    Attributes:
        names: Of its whole state, in order.

    Raises:
        InputError: Another engine, which was not closed, has some of it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.names: Sequence[str] = list(model.state_dict())
        self._modules = [m for m in model.modules() if any(True for _ in m.parameters(recurse=False))]
        if any(vars(m).get(_MARK) == id(m) for m in self._modules):
            raise refusal(
                f"{type(model).__name__} has an engine already; call that one's close() before mt.initialize makes "
                "another, or give it a model of its own"
            )
        self._frozen: list[tuple[str, nn.Parameter]] = []

    def take(self, module: nn.Module) -> None:
        """An engine has it now. module: This rank's part of it."""
        for m in self._modules:
            setattr(m, _MARK, id(m))
        self._frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]

    def release(self) -> None:
        """The engine was closed."""
        for m in self._modules:
            vars(m).pop(_MARK, None)

    def require_frozen(self) -> None:
        """Raise InputError for a parameter that is trained only since the engine was made."""
        if switched := next((name for name, p in self._frozen if p.requires_grad), None):
            raise InputError(
                f"{switched} requires gradients, and did not when the engine was made, so that its gradients are "
                "not reduced; save, close the engine, and make another with mt.initialize"
            )


class ClosedEngine:
    """Stand-in for the parts of an engine that was closed: whatever is asked of it is an error."""

    def __getattr__(self, name: str) -> Any:
        raise InputError("the engine was closed; make another with mt.initialize, and load a checkpoint")
