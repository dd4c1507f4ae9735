"""From the configuration's model section and the data's description to a Task.

The caller seeds torch (`torch.manual_seed(config.run.seed)`) with the same number on every rank just before: all
weights are drawn from torch's default generator, so every rank then holds the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING

from mpitrain.choices import Model
from mpitrain.config.training import ModelSection
from mpitrain.errors import InputError, refusal
from mpitrain.layers.images import channels_last, is_image
from mpitrain.models import hugging_face
from mpitrain.models.adapters import with_adapters
from mpitrain.models.factory import build_from_factory
from mpitrain.models.losses import MaskedCrossEntropy, cross_entropy, squared_error
from mpitrain.models.task import Criterion, Task, TrainedBase

if TYPE_CHECKING:
    from mpitrain.data import Description


def build_model(section: ModelSection, description: Description, base: TrainedBase | None = None) -> Task:
    """The model `section` names, shaped for the data `description` describes, on the CPU in fp32.

    base: What is put into it before it gets adapters; None: the weights that it is made with.

    Raises InputError (agreed: every rank comes to the same verdict) when the model does not fit the data, and
    (not agreed) when the user's factory cannot be found or does not give a model with a loss.
    """
    task = _built(section, description)
    if base is not None:
        base.fill(task.module)
    return with_adapters(section, task, base.checkpoint if base is not None else "") if section.lora else task


def _built(section: ModelSection, description: Description) -> Task:
    if section.factory.startswith(hugging_face.PREFIX):
        return hugging_face.build_hugging_face(section.factory, description, section.options)
    if section.factory:
        return build_from_factory(section.factory, description, section.options)
    if section.options:
        raise refusal(
            f"model.options {sorted(section.options)} are for model.factory, and model.{section.name} takes none; "
            "remove them"
        )
    return MODELS[section.name](section, description)


def _gpt(section: ModelSection, description: Description) -> Task:
    from mpitrain.models.gpt import GPT, Form

    if description.kind != "tokens" or description.vocabulary is None:
        raise _misfit(section, description, "tokens")
    if section.width % (2 * section.heads):
        fitting = math.ceil(section.width / (2 * section.heads)) * 2 * section.heads
        raise refusal(
            f"model.width {section.width} does not give each of model.heads {section.heads} an even number of "
            f"features; set model.width to {fitting}"
        )
    if 0 < section.vocabulary < description.vocabulary:
        raise refusal(
            f"the data have a vocabulary of {description.vocabulary} tokens, and model.vocabulary is "
            f"{section.vocabulary}; prepare the data with the model's own tokenizer, or set model.vocabulary to "
            f"{description.vocabulary}"
        )
    model = GPT(
        section.vocabulary or description.vocabulary,
        section.layers,
        section.width,
        section.heads,
        section.dropout,
        tied=section.tied,
        max_positions=section.max_positions or section.sequence,
        form=Form(**{field.name: getattr(section, field.name) for field in fields(Form)}),
        apart=description.apart,
    )
    if description.masked:
        model.criterion = MaskedCrossEntropy()
    return Task(model, model.loss)


def _resnet(section: ModelSection, description: Description) -> Task:
    from mpitrain.models.resnet import SMALL_IMAGE, ResNet

    if not _is_image(description):
        raise _misfit(section, description, "images")
    shape = description.x_shape
    last = channels_last(shape)
    sides = shape[:2] if last else shape[-2:]
    channels = 1 if len(shape) == 2 else shape[-1] if last else shape[0]
    outputs, criterion = _target(description)
    model = ResNet(
        section.layers, section.width, channels, outputs, criterion, small=max(sides) <= SMALL_IMAGE, channels_last=last
    )
    return Task(model, model.loss)


def _mlp(section: ModelSection, description: Description) -> Task:
    from mpitrain.models.mlp import MLP

    if description.kind == "tokens":
        raise _misfit(section, description, "arrays")
    outputs, criterion = _target(description)
    model = MLP(math.prod(description.x_shape), outputs, section.layers, section.width, criterion, section.dropout)
    return Task(model, model.loss)


MODELS: dict[Model, Callable[[ModelSection, Description], Task]] = {"gpt": _gpt, "resnet": _resnet, "mlp": _mlp}


def _target(description: Description) -> tuple[int, Criterion]:
    """(outputs, loss): scores of the classes and cross-entropy, or y's numbers and squared error."""
    if description.classes:
        return len(description.classes), cross_entropy
    return math.prod(description.y_shape), squared_error


def loss_unit(section: ModelSection, description: Description) -> str:
    """Return the unit of a model's loss; empty for a model of one's own, which may have any loss."""
    if section.factory and not section.factory.startswith(hugging_face.PREFIX):
        return ""
    return "nats" if description.kind == "tokens" or description.classes else "squared error"


def _is_image(description: Description) -> bool:
    return description.kind == "arrays" and is_image(description.x_shape)


def _misfit(section: ModelSection, description: Description, takes: str) -> InputError:
    shape = tuple(description.x_shape)
    if description.kind == "tokens":
        data, fitting = "tokens", "gpt"
    elif _is_image(description):
        data, fitting = f"images of shape {shape}", "resnet or mlp"
    else:
        data, fitting = f"arrays of shape {shape}", "mlp"
    return refusal(f"model.name {section.name} takes {takes}, but the data are {data}; set model.name to {fitting}")
