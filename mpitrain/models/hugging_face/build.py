"""From `model.factory = "hf:PATH"` and the data's description to a Task: which of transformers' models, and whether it
fits the data; as the trainer wants them: a tensor in, scores out, and a criterion for these.

Tokens go to a causal language model; images with classes to an image classifier, and rows of integers with classes to
a classifier of sequences. A classifier's head is made for the data's classes, anew where the folder's is for others.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from mpitrain.choices import one_of
from mpitrain.errors import refusal
from mpitrain.layers.images import image_form
from mpitrain.models.hugging_face.families import FAMILIES, Blocks, Facade, Family
from mpitrain.models.hugging_face.folder import PREFIX, ModelFolder, open_folder
from mpitrain.models.losses import MaskedCrossEntropy, cross_entropy
from mpitrain.models.task import Criterion, Task

if TYPE_CHECKING:
    from mpitrain.data import Description


class HuggingFaceModel(Facade):
    """A model of transformers: its input by itself, as tensor -> its scores by themselves.

    Args:
        module: Of transformers.
        named: How messages name it.
    """

    criterion: Criterion

    def __init__(self, module: Any, named: str) -> None:
        super().__init__(module)
        self.named = named
        self.criterion = cross_entropy
        accepted = inspect.signature(type(module).forward).parameters
        self._constant = {"use_cache": False} if "use_cache" in accepted else {}

    @property
    def undivided(self) -> str:
        """Why neither stages nor tensor ranks can have parts of it, and what to do instead."""
        return (
            f"{self.named}: how {type(self.inner).__name__} is divided is known for {one_of(sorted(FAMILIES))}; use "
            "parallel.data and parallel.zero, and set parallel.pipeline and parallel.tensor to 1"
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.inner(x, **self._constant).logits
        return scores

    def loss(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The mean loss, in nats."""
        return self.criterion(output, y)


class KnownLanguageModel(HuggingFaceModel):
    """A causal language model of a known family: tokens [batch, sequence] -> scores [batch, sequence, vocabulary].

    Args:
        module: Of transformers.
        named: How messages name it.
        family: What is known of it.
        sequence: Tokens of a sample.

    Attributes:
        counts_positions: Positions are counted in hidden states, which therefore must be of whole sequences.
    """

    counts_positions = True

    def __init__(self, module: Any, named: str, family: Family, sequence: int) -> None:
        super().__init__(module, named)
        self._family, self._sequence = family, sequence

    def pipeline_blocks(self) -> Blocks:
        """(name, module) in order; feeding tokens through them equals `model(tokens)`."""
        config = self.inner.config
        window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        if window is not None and window < self._sequence:
            raise refusal(
                f"{self.named}: its attention sees {window} tokens, which stages of a pipeline cannot be told; set "
                f"model.sequence to {window}, or parallel.pipeline to 1"
            )
        attention = getattr(config, "_attn_implementation", "sdpa")
        if attention != "sdpa":
            raise refusal(
                f"{self.named}: stages of a pipeline compute with attn_implementation sdpa, not {attention}; leave "
                "it out of model.options, or set parallel.pipeline to 1"
            )
        return self._family.blocks(self)

    def tensor_plan(self) -> dict[str, str]:
        """How each layer may be divided over ranks. `criterion` then has to take divided scores."""
        return dict(self._family.plan)


class ImageClassifier(HuggingFaceModel):
    """Images as a data set has them -> scores of the classes [batch, classes].

    Args:
        module: Of transformers.
        named: How messages name it.
        channels: Of the images that the model takes; grey ones are repeated for as many.
        last: Whether images are [height, width, channels], rather than [channels, height, width].
    """

    def __init__(self, module: Any, named: str, channels: int, last: bool) -> None:
        super().__init__(module, named)
        self._channels, self._last = channels, last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unsqueeze(1) if x.dim() == 3 else x.movedim(-1, 1) if self._last else x
        return super().forward(x.expand(-1, self._channels, -1, -1) if x.shape[1] == 1 else x)


class SequenceClassifier(HuggingFaceModel):
    """Tokens [batch, sequence] -> scores of the classes [batch, classes].

    Args:
        module: Of transformers.
        named: How messages name it.
        padding: The token that does not count.
    """

    def __init__(self, module: Any, named: str, padding: int) -> None:
        super().__init__(module, named)
        self._padding = padding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.inner(x, attention_mask=(x != self._padding).long(), **self._constant).logits
        return scores


_HEADS = ("classifier", "score", "head", "cls_classifier", "fc")  # how classifiers of transformers name their heads


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
    channels, sides, last = image_form(description.x_shape)
    wanted = getattr(folder.config, "num_channels", channels)
    if channels not in (1, wanted):
        raise refusal(f"{folder.named} takes {wanted} channels, but the images have {channels}; give other data")
    size = getattr(folder.config, "image_size", None)
    if isinstance(size, int) and sides != (size, size):
        raise refusal(
            f"{folder.named} takes images of {size} x {size}, but the data's are {sides[0]} x {sides[1]}; give others, "
            f"or set model.options.image_size to {sides[0]} for new weights"
        )
    return ImageClassifier(folder.make("AutoModelForImageClassification", new=_HEADS), folder.named, wanted, last)


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
    return SequenceClassifier(folder.make("AutoModelForSequenceClassification", new=_HEADS), folder.named, padding)


def _require_architecture(folder: ModelFolder, *endings: str, data: str) -> None:
    """Raise InputError for a folder that says its model is for something else than these data."""
    architectures = getattr(folder.config, "architectures", None) or []
    if architectures and not any(ending in name for name in architectures for ending in endings):
        raise refusal(
            f"{folder.named} is a {architectures[0]}, but the data are {data}; give the folder of a model for these "
            f"(its config.json names one ...{endings[0]})"
        )
