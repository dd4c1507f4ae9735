"""The user's own model: `model.factory = "package.module:function"`.

The function is called as function(description, **model.options) and returns a module with a method
`loss(output, y)`, or a pair (module, loss_function). It may list its blocks for a pipeline (`pipeline_blocks()`,
or be an nn.Sequential). Whatever goes wrong in code that is not ours ends in one line with its own message and
place; the original exception stays attached as the cause.

The errors are not `agreed`: a missing package or file may be one node's alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from mpitrain.config.named import find, told
from mpitrain.errors import InputError
from mpitrain.layers.base_weights import BaseWeights
from mpitrain.models.task import Task

if TYPE_CHECKING:
    from mpitrain.data import Description


def build_from_factory(path: str, description: Description, options: Mapping[str, Any]) -> Task:
    """Import, call, check. Raises InputError for everything the user can mend."""
    function = find("model.factory", path)
    try:
        made = function(description, **options)
    except (Exception, SystemExit) as error:
        raise InputError(f"model.factory {path} raised {told(error)}; mend it or model.options") from error
    module, loss = made if isinstance(made, tuple) and len(made) == 2 else (made, getattr(made, "loss", None))
    if not isinstance(module, nn.Module):
        raise InputError(
            f"model.factory {path} returned {type(module).__name__}, not a model; "
            "return a torch.nn.Module with a loss(output, y) method, or (module, loss_function)"
        )
    if not callable(loss):
        raise InputError(
            f"model.factory {path}: {type(module).__name__} has no loss; "
            "give it a method loss(output, y), or return (module, loss_function)"
        )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise InputError(
            f"model.factory {path}: {type(module).__name__} has no parameter to train; return one that has"
        )
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        raise InputError(
            f"model.factory {path}: the loss {type(loss).__name__} has parameters of its own, which nobody would "
            "train; make them part of the module"
        )
    adapted = hasattr(module, "peft_config")
    return Task(module, loss, BaseWeights.of(module, f"model.factory {path}", {"kind": "peft"}) if adapted else None)
