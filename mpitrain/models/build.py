"""Construction of a Task from the configuration's model section and the description of the data.

Before it, the caller seeds torch on every rank with the same number (`torch.manual_seed(config.run.seed)`). All weights
are drawn from torch's default generator, so every rank then has the same weights.

A user's model is a function, `model.factory = "package.module:function"`. It is called as function(description,
**model.options), and returns a module with a method `loss(output, y)`, or a pair (module, loss_function). The module
may list its blocks for a pipeline (`pipeline_blocks()`, or be an nn.Sequential). An error in the user's code is
reported in one line with its own message and place; the original exception is its cause. These errors are not `agreed`:
a missing package or file may concern one node only.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from mpitrain.choices import Model
from mpitrain.config.named import describe_error, find
from mpitrain.config.training import ModelSection
from mpitrain.errors import InputError, refusal
from mpitrain.layers.images import image_form, is_image
from mpitrain.layers.lora import BaseWeights, LoraLinear, linear_parts
from mpitrain.layers.tiled_linear import TiledLinear
from mpitrain.models import hugging_face
from mpitrain.models.losses import MaskedCrossEntropy, cross_entropy, squared_error
from mpitrain.models.task import Criterion, Task, TrainedBase

if TYPE_CHECKING:
    from mpitrain.data import Description


def build_from_factory(path: str, description: Description, options: Mapping[str, Any]) -> Task:
    """Import the user's factory, call it, and check the model that it returns.

    Args:
        path: Factory, "package.module:function".
        description: Description of the data.
        options: Keyword arguments of the factory.

    Raises:
        InputError: The factory is missing or raises, or the model has no loss or nothing to train.
    """
    function = find("model.factory", path)
    try:
        result = function(description, **options)
    except (Exception, SystemExit) as error:
        raise InputError(f"model.factory {path} raised {describe_error(error)}; fix it or model.options") from error
    module, loss = result if isinstance(result, tuple) and len(result) == 2 else (result, getattr(result, "loss", None))
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
        raise InputError(f"model.factory {path}: {type(module).__name__} has no parameter to train; return another")
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        raise InputError(
            f"model.factory {path}: the loss {type(loss).__name__} has parameters, which would not be trained; "
            "make them part of the module"
        )
    adapted = hasattr(module, "peft_config")
    return Task(module, loss, BaseWeights.of(module, f"model.factory {path}", {"kind": "peft"}) if adapted else None)


def build_model(section: ModelSection, description: Description, base: TrainedBase | None = None) -> Task:
    """Build the model of a configuration for the given data, on the CPU in fp32.

    Args:
        section: Model section of the configuration.
        description: Description of the data.
        base: Trained weights to load before adapters are added; None keeps the initial weights.

    Raises:
        InputError: The model does not fit the data (agreed: every rank raises it), or the user's factory is missing or
            does not return a model with a loss (not agreed).
    """
    if section.factory.startswith(hugging_face.PREFIX):
        task = hugging_face.build_hugging_face(section.factory, description, section.options)
    elif section.factory:
        task = build_from_factory(section.factory, description, section.options)
    elif section.options:
        raise refusal(
            f"model.options {sorted(section.options)} are for model.factory, but model.name {section.name} takes none; "
            "remove them"
        )
    else:
        task = MODELS[section.name](section, description)
    if base is not None:
        base.fill(task.module)
    _tile(task.module, section.tiled)
    return _add_adapters(section, task, base.checkpoint if base is not None else "") if section.lora else task


def _gpt(section: ModelSection, description: Description) -> Task:
    from mpitrain.models.gpt import GPT, Form

    if description.kind != "tokens" or description.vocabulary is None:
        raise _misfit_error(section, description, "tokens")
    if section.width % (2 * section.heads):
        fitting = math.ceil(section.width / (2 * section.heads)) * 2 * section.heads
        raise refusal(
            f"model.width {section.width} does not give each of model.heads {section.heads} an even number of "
            f"features; set model.width to {fitting}"
        )
    if 0 < section.vocabulary < description.vocabulary:
        raise refusal(
            f"the data have a vocabulary of {description.vocabulary} tokens, but model.vocabulary is "
            f"{section.vocabulary}; prepare the data with the model's own tokenizer, or set model.vocabulary to "
            f"{description.vocabulary}"
        )
    sizes = section.vocabulary or description.vocabulary, section.layers, section.width, section.heads, section.dropout
    positions = section.max_positions or section.sequence
    form = Form(**{field.name: getattr(section, field.name) for field in fields(Form)})
    model = GPT(*sizes, tied=section.tied, max_positions=positions, form=form, apart=description.apart)
    if description.masked:
        model.criterion = MaskedCrossEntropy()
    return Task(model, model.loss)


def _resnet(section: ModelSection, description: Description) -> Task:
    from mpitrain.models.resnet import SMALL_IMAGE, ResNet

    if description.kind != "arrays" or not is_image(description.x_shape):
        raise _misfit_error(section, description, "images")
    channels, sides, last = image_form(description.x_shape)
    outputs, criterion = _target(description)
    small = max(sides) <= SMALL_IMAGE
    model = ResNet(section.layers, section.width, channels, outputs, criterion, small=small, channels_last=last)
    return Task(model, model.loss)


def _mlp(section: ModelSection, description: Description) -> Task:
    from mpitrain.models.mlp import MLP

    if description.kind == "tokens":
        raise _misfit_error(section, description, "arrays")
    outputs, criterion = _target(description)
    model = MLP(math.prod(description.x_shape), outputs, section.layers, section.width, criterion, section.dropout)
    return Task(model, model.loss)


MODELS: dict[Model, Callable[[ModelSection, Description], Task]] = {"gpt": _gpt, "resnet": _resnet, "mlp": _mlp}


def _target(description: Description) -> tuple[int, Criterion]:
    """Return (outputs, loss): class scores and cross-entropy, or the numbers of y and squared error."""
    if description.classes:
        return len(description.classes), cross_entropy
    return math.prod(description.y_shape), squared_error


def loss_unit(section: ModelSection, description: Description) -> str:
    """Return the unit of a model's loss: "nats" or "squared error"; empty for a user's model, whose loss is unknown.

    Args:
        section: Model section of the configuration.
        description: Description of the data.
    """
    if section.factory and not section.factory.startswith(hugging_face.PREFIX):
        return ""
    return "nats" if description.kind == "tokens" or description.classes else "squared error"


def _misfit_error(section: ModelSection, description: Description, takes: str) -> InputError:
    shape = tuple(description.x_shape)
    if description.kind == "tokens":
        data, fitting = "tokens", "gpt"
    elif is_image(shape):
        data, fitting = f"images of shape {shape}", "resnet or mlp"
    else:
        data, fitting = f"arrays of shape {shape}", "mlp"
    return refusal(f"model.name {section.name} takes {takes}, but the data are {data}; set model.name to {fitting}")


def _tile(module: nn.Module, tiled: Mapping[str, tuple[int, int]]) -> None:
    """Replace linear layers by tiled ones with the same values, in place.

    Args:
        module: The whole model.
        tiled: Tiles along the inputs and outputs, by pattern of layers' names. If several patterns name a layer, the
            last one counts.

    Raises:
        InputError: A pattern names no layer, or one that shares its weight or has fewer features than tiles. It is
            raised on every rank.
    """
    linear = [name for name, layer in module.named_modules() if name and type(layer) is nn.Linear]
    tiles: dict[str, tuple[int, int]] = {}
    for pattern, counts in tiled.items():
        names = _choose_layers(module, [pattern], "the model", linear, key="model.tiled", otherwise="remove it")
        tiles |= dict.fromkeys(names, counts)
    for name, (in_tiles, out_tiles) in tiles.items():
        layer = module.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        parent, _, last = name.rpartition(".")
        setattr(module.get_submodule(parent), last, TiledLinear.of(layer, in_tiles=in_tiles, out_tiles=out_tiles))


# -- `model.lora`: low-rank adapters (Hu et al. 2021) in a model's linear layers; everything else is frozen
#
# By default the layers of attention get one: linear layers in modules named attention, attn or self_attn.


_ATTENTION = ("attention", "attn", "self_attn")


def _add_adapters(section: ModelSection, task: Task, checkpoint: str = "") -> Task:
    """Freeze the model of a task, and add the adapters requested by model.lora. The module is changed in place.

    Args:
        section: Model section of the configuration.
        task: Task without adapters.
        checkpoint: Folder that the weights were loaded from (model.base); empty if there is none.

    Raises:
        InputError: No layer is chosen, or one that cannot have an adapter. It is raised on every rank.
    """
    module = task.module
    source = f"model.factory {section.factory}" if section.factory else f"model.name {section.name}"
    if task.base is not None:
        raise refusal(f"{source} returns a model that already has adapters; set model.lora to 0")
    linear = [name for name, layer in module.named_modules() if name and linear_parts(layer) is not None]
    layer_names = [name for name in linear if set(_ATTENTION) & set(name.split(".")[:-1])]
    if targets := section.lora_targets:
        key, fix = "model.lora_targets", "leave model.lora at 0"
        layer_names = _choose_layers(module, targets, source, linear, key=key, otherwise=fix)
    elif not layer_names:
        raise refusal(
            f"model.lora: {source} has no linear layers in modules called {', '.join(_ATTENTION)}; name layers "
            "in model.lora_targets" + (f", such as {linear[0]!r}" if linear else "")
        )
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    adapted = partial(LoraLinear, rank=section.lora, alpha=section.lora_alpha, dropout=section.lora_dropout)
    for name in layer_names:
        layer = module.get_submodule(name)
        parts = linear_parts(layer)
        assert parts is not None
        lora_layer = adapted(parts.weight, parts.bias, transposed=parts.transposed)
        lora_layer.train(layer.training)
        parent, _, last = name.rpartition(".")
        setattr(module.get_submodule(parent), last, lora_layer)
    adapter = {"rank": section.lora, "alpha": section.lora_alpha, "layers": layer_names}
    source = f"model.base {checkpoint}" if checkpoint else source
    return Task(module, task.loss, BaseWeights.of(module, source, adapter, checkpoint))


def adapted_layers(module: nn.Module) -> dict[str, LoraLinear]:
    """Return the layers with adapters, by name."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, LoraLinear)}


def _choose_layers(
    module: nn.Module, targets: Sequence[str], source: str, linear: Sequence[str], *, key: str, otherwise: str
) -> list[str]:
    """Return the names of the linear layers that patterns name, in the model's order.

    Args:
        module: The whole model.
        targets: Patterns of the whole name of a layer, or of its end.
        source: Where the model comes from, for errors.
        linear: Names of the layers to choose among.
        key: Setting that the patterns are from.
        otherwise: Fix if a pattern names no layer.

    Raises:
        InputError: A pattern names no layer, or one that shares its weight.
    """
    for target in targets:
        if not any(_matches(name, target) for name in linear):
            near = difflib.get_close_matches(target, linear, n=1, cutoff=0.0)
            raise refusal(
                f"{key}: {target!r} matches no linear layer of {source}"
                + (f"; did you mean {near[0]!r}?" if near else f"; {otherwise}")
            )
    chosen = [name for name in linear if any(_matches(name, target) for target in targets)]
    users: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        users.setdefault(parameter, []).append(name)
    for name in chosen:
        shared = users[module.get_submodule(name).get_parameter("weight")]
        if len(shared) > 1:
            raise refusal(f"{key}: {name} shares its weight ({' and '.join(shared)}); leave it out")
    return chosen


def _matches(name: str, target: str) -> bool:
    """Return True if a pattern matches the whole name of a layer, or the end of it, such as `q_proj`."""
    return fnmatchcase(name, target) or fnmatchcase(name, f"*.{target}")
