"""`model.lora`: low-rank adapters (Hu et al. 2021) in a model's linear layers; all else is frozen.

By default those of attention get one: the linear layers in modules that are called attention, attn or self_attn.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from mpitrain.config.training import ModelSection
from mpitrain.errors import refusal
from mpitrain.layers.lora import BaseWeights, LoraLinear, linear_parts
from mpitrain.models.task import Task

_ATTENTION = ("attention", "attn", "self_attn")


def with_adapters(section: ModelSection, task: Task, checkpoint: str = "") -> Task:
    """The task with its model frozen but for adapters, as model.lora and the keys beside it say; changed in place.

    checkpoint: The folder that the model's weights were read from, as model.base says; empty where they were not.

    Raises:
        InputError: On all ranks alike, where no layer is meant, or one that cannot have an adapter.
    """
    module = task.module
    source = f"model.factory {section.factory}" if section.factory else f"model.name {section.name}"
    if task.base is not None:
        raise refusal(f"{source} gives a model with adapters already; set model.lora to 0")
    chosen = _chosen(module, section.lora_targets, source)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    for name in chosen:
        layer = module.get_submodule(name)
        parts = linear_parts(layer)
        assert parts is not None
        made = LoraLinear(
            parts.weight,
            parts.bias,
            rank=section.lora,
            alpha=section.lora_alpha,
            dropout=section.lora_dropout,
            transposed=parts.transposed,
        )
        made.train(layer.training)
        parent, _, last = name.rpartition(".")
        setattr(module.get_submodule(parent), last, made)
    adapter = {"rank": section.lora, "alpha": section.lora_alpha, "layers": chosen}
    source = f"model.base {checkpoint}" if checkpoint else source
    return Task(module, task.loss, BaseWeights.of(module, source, adapter, checkpoint))


def adapted_layers(module: nn.Module) -> dict[str, LoraLinear]:
    """The layers with adapters of ours, by name."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, LoraLinear)}


def _chosen(module: nn.Module, targets: Sequence[str], source: str) -> list[str]:
    """The names of the layers that get an adapter, in the model's order."""
    linear = [name for name, layer in module.named_modules() if name and linear_parts(layer) is not None]
    if not targets:
        chosen = [name for name in linear if set(_ATTENTION) & set(name.split(".")[:-1])]
        if not chosen:
            raise refusal(
                f"model.lora: {source} has no linear layers in modules called {', '.join(_ATTENTION)}; name layers "
                "in model.lora_targets" + (f", such as {linear[0]!r}" if linear else "")
            )
        return chosen
    for target in targets:
        if not any(_matches(name, target) for name in linear):
            near = difflib.get_close_matches(target, linear, n=1, cutoff=0.0)
            raise refusal(
                f"model.lora_targets: {target!r} matches no linear layer of {source}"
                + (f"; did you mean {near[0]!r}?" if near else "; leave model.lora at 0")
            )
    chosen = [name for name in linear if any(_matches(name, target) for target in targets)]
    users: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        users.setdefault(parameter, []).append(name)
    for name in chosen:
        shared = users[module.get_submodule(name).get_parameter("weight")]
        if len(shared) > 1:
            raise refusal(f"model.lora_targets: {name} shares its weight ({' and '.join(shared)}); leave it out")
    return chosen


def _matches(name: str, target: str) -> bool:
    """Whether a pattern means a layer: by its whole name, or the end of it, as `q_proj`."""
    return fnmatchcase(name, target) or fnmatchcase(name, f"*.{target}")
