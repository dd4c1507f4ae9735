"""Checks of the arguments of a user's training loop, and of the model that has an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from mpitrain.errors import InputError, refusal

# attributes of DeepSpeed's engines and torch's modules, and their replacements here
INSTEAD = {
    "forward": "engine(...)",
    "get_global_grad_norm": "engine.norm",
    "get_lr": "engine.lr",
    "global_steps": "engine.steps",
    "gradient_accumulation_steps": "engine.settings.accumulate",
    "is_gradient_accumulation_boundary": "engine.at_boundary before backward, or the result of engine.step()",
    "load_checkpoint": "engine.load(folder)",
    "load_state_dict": "engine.load(folder), or load_state_dict of the model before mt.initialize",
    "lr_scheduler": "engine.lr and the scheduler that you passed",
    "named_parameters": "engine.module.named_parameters()",
    "no_sync": "not needed: only the last backward pass of a step reduces gradients",
    "parameters": "engine.module.parameters()",
    "save_checkpoint": "engine.save(folder)",
    "skipped_steps": "engine.skipped",
    "to": "not needed: the engine uses the device of its model; run.device selects another",
    "train_batch_size": "engine.settings.microbatch * engine.settings.accumulate * engine.data_size",
    "train_micro_batch_size_per_gpu": "engine.settings.microbatch",
    "zero_grad": "not needed: the first backward pass of a step resets the gradients",
}


def require_scalar(loss: Any) -> None:
    """Raise InputError unless `loss` is a tensor of one element that requires gradients."""
    wrong = ""
    if not isinstance(loss, torch.Tensor):
        wrong = f"a {type(loss).__name__}; pass the tensor that the loss function returned"
    elif loss.numel() != 1:
        wrong = f"a tensor of shape {list(loss.shape)}; pass its mean"
    elif not loss.requires_grad:
        wrong = "a tensor without a graph; compute it from engine(...) outside of torch.no_grad(), and do not detach it"
    if wrong:
        raise InputError(f"engine.backward needs a scalar loss, but got {wrong}")


def as_pair(batch: Any) -> tuple[Any, Any]:
    """Return a microbatch as (x, y). Raises InputError if it is not a pair."""
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    kind = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, (tuple, list)) else type(batch).__name__
    raise InputError(
        f"a microbatch must be a pair (x, y), but this is a {kind}; put several inputs into x as a tuple or a "
        "mapping, or call engine(...), engine.backward and engine.step yourself"
    )


def unsupported_in_stages(what: str) -> InputError:
    """Return the error for a method that a model in stages does not support."""
    return InputError(
        f"{what} does not support a model in pipeline stages, which takes all microbatches of a step at once; "
        "use engine.train_batch(iterator) and engine.evaluate(batches)"
    )


_MARK = "_mpitrain_engine"  # attribute of modules in an engine: the module's id, which differs from that of a copy


class UserModel:
    """The model that was passed to `mpitrain.initialize`.

    Attributes:
        names: Names of the tensors in the model's whole state, in order.

    Raises:
        InputError: If another engine, which was not closed, has some of the model's modules.
    """

    def __init__(self, model: nn.Module) -> None:
        self.names: Sequence[str] = list(model.state_dict())
        self._modules = [m for m in model.modules() if any(True for _ in m.parameters(recurse=False))]
        if any(vars(m).get(_MARK) == id(m) for m in self._modules):
            raise refusal(
                f"{type(model).__name__} already has an engine; call close() of that engine before "
                "mt.initialize, or pass another model"
            )
        self._frozen: list[tuple[str, nn.Parameter]] = []

    def mark(self, module: nn.Module) -> None:
        """Mark the model's modules as used by an engine. module: this rank's part of the model."""
        for m in self._modules:
            setattr(m, _MARK, id(m))
        self._frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]

    def release(self) -> None:
        """Remove the marks, after the engine was closed."""
        for m in self._modules:
            vars(m).pop(_MARK, None)

    def require_frozen(self) -> None:
        """Raise InputError if a parameter requires gradients that did not when the engine was made."""
        if switched := next((name for name, p in self._frozen if p.requires_grad), None):
            raise InputError(
                f"{switched} requires gradients now but did not when the engine was made, so its gradients "
                "would not be reduced; save, close the engine, and make a new one with mt.initialize"
            )


class ClosedEngine:
    """Replacement for the parts of a closed engine; any access to its attributes raises InputError."""

    def __getattr__(self, name: str) -> Any:
        raise InputError("the engine was closed; make another with mt.initialize, and load a checkpoint")
