"""From `model.factory = "hf:PATH"` and the data's description to a Task: which of transformers' models, and whether it
fits the data.

Tokens go to a causal language model; images with classes to an image classifier, and rows of integers with classes to
a classifier of sequences. A classifier's head is made for the data's classes, anew where the folder's is for others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mpitrain.errors import refusal
from mpitrain.models.hugging_face.families import FAMILIES
from mpitrain.models.hugging_face.folder import ModelFolder, open_folder
from mpitrain.models.hugging_face.models import (
    HuggingFaceModel,
    ImageClassifier,
    KnownLanguageModel,
    SequenceClassifier,
)
from mpitrain.models.losses import MaskedCrossEntropy
from mpitrain.models.task import Task

if TYPE_CHECKING:
    from mpitrain.data import Description

PREFIX = "hf:"
_HEADS = ("classifier", "score", "head", "cls_classifier", "fc")  # how classifiers of transformers name their heads
_CHANNELS = (1, 3, 4)


def build_hugging_face(factory: str, description: Description, options: Mapping[str, Any]) -> Task:
    """The model of a folder, for data that are described so, on the CPU in fp32.

    Args:
        factory: The setting, "hf:PATH".
        description: Of the data.
        options: Keys of config.json with other values.

    Raises:
        InputError: In one line, where the folder, transformers or the data are not what it takes.
    """
    named = f"model.factory {factory}"
    folder = open_folder(named, factory.removeprefix(PREFIX), options)
    if description.kind == "tokens":
        model = _language_model(folder, description)
    elif description.classes and len(description.x_shape) in (2, 3):
        model = _image_classifier(folder, description)
    elif description.classes and len(description.x_shape) == 1 and description.x_dtype.kind in "iu":
        model = _sequence_classifier(folder, description)
    else:
        raise refusal(
            f"{named} takes tokens, or images or rows of integers with classes, but the data are arrays of shape "
            f"{tuple(description.x_shape)}{'' if description.classes else ' without classes'}; give other data, or a "
            "model.factory of your own"
        )
    return Task(model, model.loss)


def _language_model(folder: ModelFolder, description: Description) -> HuggingFaceModel:
    _require_architecture(folder, "CausalLM", "LMHead", data="tokens")
    if description.apart is not None:
        raise refusal(
            f"{folder.named}: its attention cannot be kept within documents; set data.documents to joined, or use "
            "model.name gpt"
        )
    config, sequence = folder.config, description.x_shape[0]
    vocabulary, longest = getattr(config, "vocab_size", None), getattr(config, "max_position_embeddings", None)
    if vocabulary is not None and description.vocabulary is not None and description.vocabulary > vocabulary:
        raise refusal(
            f"{folder.named} has a vocabulary of {vocabulary}, but the data's is {description.vocabulary}; prepare "
            f"them with the tokenizer in {folder.path}"
        )
    if longest is not None and sequence > longest:
        raise refusal(
            f"{folder.named} has {longest} positions, but samples have {sequence} tokens; set model.sequence to "
            f"{longest} or less"
        )
    config.use_cache = False
    made = folder.make("AutoModelForCausalLM")
    family = FAMILIES.get(config.model_type)
    if family is None or getattr(config, "add_cross_attention", False):
        model = HuggingFaceModel(made, folder.named)
    else:
        model = KnownLanguageModel(made, folder.named, family, sequence)
    if description.masked:
        model.criterion = MaskedCrossEntropy()
    return model


def _image_classifier(folder: ModelFolder, description: Description) -> HuggingFaceModel:
    _require_architecture(folder, "ForImageClassification", data="images with classes")
    assert description.classes is not None
    folder.config.num_labels = len(description.classes)
    shape = tuple(description.x_shape)
    last = len(shape) == 3 and shape[-1] in _CHANNELS and shape[0] not in _CHANNELS
    channels = 1 if len(shape) == 2 else shape[-1] if last else shape[0]
    wanted = getattr(folder.config, "num_channels", channels)
    if channels not in (1, wanted):
        raise refusal(f"{folder.named} takes {wanted} channels, but the images have {channels}; give other data")
    size = getattr(folder.config, "image_size", None)
    sides = shape[-2:] if not last else shape[:2]
    if isinstance(size, int) and sides != (size, size):
        raise refusal(
            f"{folder.named} takes images of {size} x {size}, but the data's are {sides[0]} x {sides[1]}; give others, "
            f"or set model.options.image_size to {sides[0]} for new weights"
        )
    model = folder.make("AutoModelForImageClassification", new=_HEADS)
    return ImageClassifier(model, folder.named, wanted, last)


def _sequence_classifier(folder: ModelFolder, description: Description) -> HuggingFaceModel:
    _require_architecture(folder, "ForSequenceClassification", data="rows of integers with classes")
    assert description.classes is not None
    folder.config.num_labels = len(description.classes)
    padding = folder.config.pad_token_id
    if padding is None:
        raise refusal(
            f"{folder.named}: its config.json has no pad_token_id, by which the end of a sample is found; set "
            "model.options.pad_token_id"
        )
    model = folder.make("AutoModelForSequenceClassification", new=_HEADS)
    return SequenceClassifier(model, folder.named, padding)


def _require_architecture(folder: ModelFolder, *endings: str, data: str) -> None:
    """Raise InputError for a folder that says its model is for something else than these data."""
    architectures = getattr(folder.config, "architectures", None) or []
    if architectures and not any(ending in name for name in architectures for ending in endings):
        raise refusal(
            f"{folder.named} is a {architectures[0]}, but the data are {data}; give the folder of a model for these "
            f"(its config.json names one ...{endings[0]})"
        )
