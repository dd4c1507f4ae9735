"""Folders with Hugging Face models: loading, saving, and the task that `model.factory = "hf:PATH"` makes of one.

transformers reads the configuration and the weights without a network. A folder is written with its tokenizer, so that
`from_pretrained` loads it. Nothing in a folder is executed: its Python files are ignored, and of weights written by
torch.save only tensors are loaded.
"""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mpitrain.choices import one_of
from mpitrain.config.named import told
from mpitrain.errors import InputError, refusal
from mpitrain.layers.images import image_form
from mpitrain.models.earlier import EarlierSlices, EarlierState, State, causal_mask
from mpitrain.models.losses import MaskedCrossEntropy, cross_entropy
from mpitrain.models.task import Criterion, Task
from mpitrain.storage.disk import sync

if TYPE_CHECKING:
    from mpitrain.data import Description


# -- Division of the models of known families into stages and over tensor ranks
#
#     gpt2       transformer.wte, .wpe, .drop, .h.*, .ln_f, lm_head
#     llama      model.embed_tokens, .layers.*, .norm, lm_head          (mistral, qwen2 and qwen3 have the same layout)
#
# Stages exchange only the hidden state. Positions and their rotary embeddings follow from its shape,
# and no mask is needed, because all tokens count and attention is causal by default. For generation, blocks have
# `forward_cached`, like our own models; the state is keys and values.


class Facade(nn.Module):
    """A module that shares the children, parameters and buffers of another module.

    Replacing a child of either one replaces it in both. So the state dictionary has the names of transformers, and code
    that divides or replaces layers by name changes the module that computes.

    Args:
        module: Module to stand for. Its own hooks are called as well.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[table] = module.__dict__[table]
        self.__dict__["_inner"] = module  # not a child, or every name would begin with it
        self.training = module.training

    @property
    def inner(self) -> Any:
        """Module that computes, in the mode (training or evaluation) of this one."""
        inner = self.__dict__["_inner"]
        inner.training = self.training
        return inner

    def extra_repr(self) -> str:
        return f"in place of {type(self.__dict__['_inner']).__name__}"


Blocks = list[tuple[str, nn.Module]]
CACHE_NAMES = ("cache", "past_key_values", "past_key_value", "layer_past")  # names in transformers, the newest first


@dataclass(frozen=True)
class Family:
    """Properties of the causal language models of one layout.

    Attributes:
        blocks: Function that returns the model's blocks with their names, in order; applied to tokens one after the
            other, they return its scores.
        plan: Style in which each layer may be divided over the ranks of the tensor axis, by name.
    """

    blocks: Callable[[Any], Blocks]
    plan: Mapping[str, str]


class Cache:
    """A cache for an attention layer of transformers, made of the state of earlier positions.

    Args:
        earlier: Earlier positions, with keys and values [batch, heads, positions, head_dim] as state.
    """

    def __init__(self, earlier: EarlierState) -> None:
        self._earlier = earlier

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> State:
        """Add the keys and values of new positions; return those of all positions.

        Args:
            keys: Keys [batch, heads, positions, head_dim].
            values: Values [batch, heads, positions, head_dim].
        """
        return self._earlier.add((keys, values))

    def arguments_of(self, layer: nn.Module, x: torch.Tensor) -> dict[str, Any]:
        """Return the keyword arguments with which a layer uses this cache.

        Args:
            layer: Layer of transformers.
            x: Features of the new positions, [batch, positions, width].
        """
        seen = causal_mask(self._earlier.length, x.shape[1], x.device)
        mask = None if seen is None else seen[None, None]
        return {_name_of_cache(type(layer).forward): self, "use_cache": True, "attention_mask": mask}


@cache
def _name_of_cache(forward: Callable[..., Any]) -> str:
    """Return the name of the cache argument of a layer in the installed version of transformers."""
    accepted = inspect.signature(forward).parameters
    for name in CACHE_NAMES:
        if name in accepted:
            return name
    raise InputError(
        f"{forward.__qualname__} of the installed transformers takes none of {', '.join(CACHE_NAMES)}; "
        "install a version of transformers that this version of mpitrain supports"
    )


class PositionsAdded(Facade):
    """An embedding of positions, in order, added to a hidden state [batch, sequence, width]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward_cached(x, EarlierSlices([]))

    def forward_cached(self, x: torch.Tensor, earlier: EarlierState) -> torch.Tensor:
        """Compute `forward` for positions that follow earlier ones. The state only counts positions.

        Args:
            x: Hidden state of the new positions.
            earlier: State of the earlier positions.
        """
        positions: torch.Tensor = self.inner(_positions(x, earlier.length))
        earlier.add((x.new_empty(len(x), 1, x.shape[1], 0),))
        return x + positions


class HiddenState(Facade):
    """A layer that returns only the hidden state.

    Args:
        module: Layer of transformers.
        rotary: Module that computes the cosines and sines of positions for the layer; it has no parameters, and returns
            them on the device of x. None: the layer needs none.
    """

    def __init__(self, module: nn.Module, rotary: nn.Module | None = None) -> None:
        super().__init__(module)
        self.__dict__["_rotary"] = rotary  # shared by all layers, not a child of any

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._hidden(x, 0, {} if self.__dict__["_rotary"] is None else {"attention_mask": None})

    def forward_cached(self, x: torch.Tensor, earlier: EarlierState) -> torch.Tensor:
        """Compute `forward` for positions that follow earlier ones.

        Args:
            x: Hidden state of the new positions.
            earlier: State of the earlier positions.
        """
        return self._hidden(x, earlier.length, Cache(earlier).arguments_of(self.inner, x))

    def _hidden(self, x: torch.Tensor, first: int, arguments: dict[str, Any]) -> torch.Tensor:
        """Return the layer's hidden state, which some versions of transformers return in a tuple.

        Args:
            x: Hidden state [batch, sequence, width].
            first: Position of the first token of x.
            arguments: Further arguments of the layer.
        """
        if (rotary := self.__dict__["_rotary"]) is not None:
            positions = _positions(x, first)
            arguments |= {"position_ids": positions, "position_embeddings": rotary(x, position_ids=positions)}
        output = self.inner(x, **arguments)
        state: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return state


def _gpt2_blocks(model: Any) -> Blocks:
    body = model.transformer
    layers = [(f"transformer.h.{number}", HiddenState(layer)) for number, layer in enumerate(body.h)]
    begin: Blocks = [("transformer.wte", body.wte), ("transformer.wpe", PositionsAdded(body.wpe))]
    end: Blocks = [("transformer.ln_f", body.ln_f), ("lm_head", model.lm_head)]
    return [*begin, ("transformer.drop", body.drop), *layers, *end]


def _rotary_blocks(model: Any) -> Blocks:
    body = model.model
    layers = [(f"model.layers.{n}", HiddenState(layer, body.rotary_emb)) for n, layer in enumerate(body.layers)]
    return [("model.embed_tokens", body.embed_tokens), *layers, ("model.norm", body.norm), ("lm_head", model.lm_head)]


def _positions(x: torch.Tensor, first: int = 0) -> torch.Tensor:
    return torch.arange(first, first + x.shape[1], device=x.device).unsqueeze(0)


_GPT2 = Family(
    _gpt2_blocks,
    {
        "transformer.wte": "vocabulary",
        "transformer.h.*.attn.c_attn": "column",
        "transformer.h.*.attn.c_proj": "row",
        "transformer.h.*.mlp.c_fc": "column",
        "transformer.h.*.mlp.c_proj": "row",
        "lm_head": "vocabulary",
    },
)
_LLAMA = Family(
    _rotary_blocks,
    {
        "model.embed_tokens": "vocabulary",
        "model.layers.*.self_attn.[qkv]_proj": "column",
        "model.layers.*.self_attn.o_proj": "row",
        "model.layers.*.mlp.gate_proj": "column",
        "model.layers.*.mlp.up_proj": "column",
        "model.layers.*.mlp.down_proj": "row",
        "lm_head": "vocabulary",
    },
)
_QWEN3 = replace(_LLAMA, plan={**_LLAMA.plan, "model.layers.*.self_attn.[qk]_norm": "heads"})
FAMILIES: Mapping[str, Family] = {"gpt2": _GPT2, "llama": _LLAMA, "mistral": _LLAMA, "qwen2": _LLAMA, "qwen3": _QWEN3}


# -- Folder of a model


PREFIX = "hf:"
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_SHOWN = 3  # names of tensors in a message


@dataclass(frozen=True)
class ModelFolder:
    """A folder with a config.json, and the changes that model.options make to it.

    Attributes:
        path: The folder.
        config: Configuration object of transformers.
        label: Name in messages.
    """

    path: Path
    config: Any
    label: str

    def make(self, kind: str, new: tuple[str, ...] = ()) -> nn.Module:
        """Return the model in fp32, with the weights of the folder, or with random ones if the folder has none.

        Random weights are drawn from torch's generator.

        Args:
            kind: Auto class of transformers, such as "AutoModelForCausalLM".
            new: Prefixes of parameter names that may be missing or of another shape; these are initialized at random.

        Raises:
            InputError: transformers refuses the folder, or weights are missing.
        """
        import transformers

        auto = getattr(transformers, kind)
        with quiet(), transformers_errors(self.label, "use another folder, or fix this one"):
            if not any((self.path / name).is_file() for name in _WEIGHTS):
                return auto.from_config(self.config, trust_remote_code=False).float()
            model, info = auto.from_pretrained(
                str(self.path),
                config=self.config,
                local_files_only=True,
                trust_remote_code=False,
                weights_only=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        mismatched = {each[0] if isinstance(each, tuple) else each for each in info.get("mismatched_keys", ())}
        missing = [name for name in sorted({*info["missing_keys"], *mismatched}) if not name.startswith(new or "\0")]
        if missing:
            more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            raise InputError(
                f"{self.label}: its weights lack {', '.join(missing[:_SHOWN])}{more}, which this "
                f"{type(model).__name__} needs; use a folder with complete weights"
            )
        return model.float()


def open_folder(label: str, path: str, options: Mapping[str, Any]) -> ModelFolder:
    """Read a folder's config.json.

    Args:
        label: Setting that names the folder, for messages.
        path: The folder.
        options: Values that replace those of the configuration, by key.

    Raises:
        InputError: The folder is missing, transformers is missing or refuses it, or an option is unknown. Not agreed: a
            folder may be missing on one node only.
    """
    folder = Path(path).expanduser()
    if not path or not folder.is_dir():
        raise InputError(
            f"{label}: there is no folder {path!r}; use a folder with a config.json (nothing is downloaded "
            "here; `hf download NAME --local-dir FOLDER` downloads a model)"
        )
    if not (folder / "config.json").is_file():
        raise InputError(f"{label}: {folder} has no config.json; use a folder that save_pretrained wrote")
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported; keeps it off the network
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # ranks fork and share cores
    try:
        from transformers import AutoConfig
    except ImportError:
        raise InputError(f'{label} needs the package transformers; pip install "mpitrain[hf]"') from None
    with quiet(), transformers_errors(label, "fix its config.json"):
        config, unknown = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False, return_unused_kwargs=True, **options
        )
    if unknown:
        raise refusal(f"{label}: model.options {sorted(unknown)} are not keys of its config.json; remove them")
    return ModelFolder(folder, config, label)


@contextmanager
def transformers_errors(label: str, fix: str) -> Iterator[None]:
    """Turn any error of transformers in the `with` block into an InputError of one line.

    Args:
        label: Name of the folder in messages.
        fix: Advice on what to do.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        raise InputError(f"{label}: {told(error)}; {fix}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Silence messages and progress bars of transformers in the `with` block, because every rank would show them."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


_COPIED_FILES = ["tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model"]
_COPIED_FILES += ["chat_template*", "generation_config.json", "preprocessor_config.json", "processor_config.json"]


def save_folder(
    module: Facade, factory: str, state: Mapping[str, torch.Tensor], target: Path, shard: int = 5 * 10**9
) -> None:
    """Write a model's config.json and weights, and the other files of its original folder, such as its tokenizer.

    The weights are written as safetensors files.

    Args:
        module: Trained model.
        factory: Setting that the model was made by, "hf:PATH".
        state: Tensors of the model, by the names of transformers.
        target: Folder to make.
        shard: Largest size of a file in bytes; several files get an index.
    """
    from transformers import AutoConfig

    source, config = Path(factory.removeprefix(PREFIX)).expanduser(), module.inner.config
    with quiet():
        if hasattr(config, "use_cache"):  # training switches it off
            config.use_cache = AutoConfig.from_pretrained(str(source), local_files_only=True).use_cache
        module.inner.save_pretrained(target, state_dict=dict(state), max_shard_size=shard)
    for pattern in _COPIED_FILES:
        for path in source.glob(pattern):
            if path.is_file() and not (target / path.name).exists():
                shutil.copyfile(path, target / path.name)
    for path in target.iterdir():
        sync(path)


# -- Construction of a Task from a folder and the description of the data: a tensor in, scores out, a criterion
#
# Tokens need a causal language model, images with classes an image classifier, and rows of integers with classes
# a sequence classifier. If a classifier's head has another number of classes than the data, it is replaced.


Arguments = tuple[torch.Tensor, dict[str, torch.Tensor]]  # first argument, and others by name


class HuggingFaceModel(Facade):
    """A model of transformers as a function of one tensor that returns only the scores.

    Args:
        module: Model of transformers.
        label: Name in messages.
        arguments: Function of an input that returns the module's arguments: the first one, and others by name.
    """

    def __init__(self, module: Any, label: str, arguments: Callable[[torch.Tensor], Arguments] = lambda x: (x, {})):
        super().__init__(module)
        self.label, self._arguments = label, arguments
        self.criterion: Criterion = cross_entropy
        accepted = inspect.signature(type(module).forward).parameters
        self._constant = {"use_cache": False} if "use_cache" in accepted else {}

    @property
    def undivided(self) -> str:
        """Reason why the model cannot be divided into stages or over tensor ranks, and advice on what to do instead."""
        return (
            f"{self.label}: {type(self.inner).__name__} cannot be divided, only {one_of(sorted(FAMILIES))}; use "
            "parallel.data and parallel.zero, and set parallel.pipeline and parallel.tensor to 1"
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, others = self._arguments(x)
        scores: torch.Tensor = self.inner(first, **others, **self._constant).logits
        return scores

    def loss(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the mean loss, in nats.

        Args:
            output: Scores.
            y: Targets.
        """
        return self.criterion(output, y)


class KnownLanguageModel(HuggingFaceModel):
    """A causal language model of a known family: tokens [batch, sequence] -> scores [batch, sequence, vocabulary].

    Args:
        module: Model of transformers.
        label: Name in messages.
        family: Properties of its family.
        sequence: Tokens per sample.

    Attributes:
        counts_positions: True, because positions are counted in hidden states, which must therefore be whole sequences.
    """

    counts_positions = True

    def __init__(self, module: Any, label: str, family: Family, sequence: int) -> None:
        super().__init__(module, label)
        self._family, self._sequence = family, sequence

    def pipeline_blocks(self) -> Blocks:
        """Return (name, module) in order; applying them to tokens one after the other equals `model(tokens)`."""
        config = self.inner.config
        window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        if window is not None and window < self._sequence:
            raise refusal(
                f"{self.label}: its attention is limited to {window} tokens, which a pipeline does not support; set "
                f"model.sequence to {window}, or parallel.pipeline to 1"
            )
        attention = getattr(config, "_attn_implementation", "sdpa")
        if attention != "sdpa":
            raise refusal(
                f"{self.label}: a pipeline needs attn_implementation sdpa, not {attention}; remove it "
                "from model.options, or set parallel.pipeline to 1"
            )
        return self._family.blocks(self)

    def tensor_plan(self) -> dict[str, str]:
        """Return how each layer may be divided over tensor ranks. `criterion` must then accept divided scores."""
        return dict(self._family.plan)


_HEADS = ("classifier", "score", "head", "cls_classifier", "fc")  # names of classifier heads in transformers


def build_hugging_face(factory: str, description: Description, options: Mapping[str, Any]) -> Task:
    """Build the model of a folder for the given data, on the CPU in fp32.

    Args:
        factory: Setting of the model, "hf:PATH".
        description: Description of the data.
        options: Values that replace those of config.json, by key.

    Raises:
        InputError: The folder, transformers or the data do not fit; the message has one line.
    """
    label = f"model.factory {factory}"
    folder = open_folder(label, factory.removeprefix(PREFIX), options)
    if description.classes:
        folder.config.num_labels = len(description.classes)
    if description.kind == "tokens":
        model = _language_model(folder, description)
    elif description.classes and len(description.x_shape) in (2, 3):
        model = _image_classifier(folder, description)
    elif description.classes and len(description.x_shape) == 1 and description.x_dtype.kind in "iu":
        model = _sequence_classifier(folder, description)
    else:
        raise refusal(
            f"{label} takes tokens, or images or rows of integers with classes, but the data are arrays of shape "
            f"{tuple(description.x_shape)}{'' if description.classes else ' without classes'}; use other data, or your "
            "own model.factory"
        )
    return Task(model, model.loss)


def _language_model(folder: ModelFolder, description: Description) -> HuggingFaceModel:
    _require_architecture(folder, "CausalLM", "LMHead", data="tokens")
    if description.apart is not None:
        raise refusal(
            f"{folder.label}: its attention cannot stay within documents; set data.documents joined, or use model.name "
            "gpt"
        )
    config, sequence = folder.config, description.x_shape[0]
    vocabulary, longest = getattr(config, "vocab_size", None), getattr(config, "max_position_embeddings", None)
    if vocabulary is not None and description.vocabulary is not None and description.vocabulary > vocabulary:
        raise refusal(
            f"{folder.label} has a vocabulary of {vocabulary}, but the data have {description.vocabulary} tokens; "
            f"prepare them with the tokenizer in {folder.path}"
        )
    if longest is not None and sequence > longest:
        raise refusal(
            f"{folder.label} has {longest} positions, but samples have {sequence} tokens; set model.sequence to "
            f"{longest} or less"
        )
    config.use_cache = False
    module = folder.make("AutoModelForCausalLM")
    family = FAMILIES.get(config.model_type)
    if family is None or getattr(config, "add_cross_attention", False):
        model = HuggingFaceModel(module, folder.label)
    else:
        model = KnownLanguageModel(module, folder.label, family, sequence)
    if description.masked:
        model.criterion = MaskedCrossEntropy()
    return model


def _image_classifier(folder: ModelFolder, description: Description) -> HuggingFaceModel:
    _require_architecture(folder, "ForImageClassification", data="images with classes")
    channels, sides, last = image_form(description.x_shape)
    model_channels = getattr(folder.config, "num_channels", channels)
    if channels not in (1, model_channels):
        raise refusal(f"{folder.label} takes {model_channels} channels, but the images have {channels}; use other data")
    size = getattr(folder.config, "image_size", None)
    if isinstance(size, int) and sides != (size, size):
        raise refusal(
            f"{folder.label} takes images of {size} x {size}, but the data have {sides[0]} x {sides[1]}; prepare "
            f"them with --size {size}, or set model.options.image_size to {sides[0]} for new weights"
        )

    def arguments(x: torch.Tensor) -> Arguments:
        x = x.unsqueeze(1) if x.dim() == 3 else x.movedim(-1, 1) if last else x
        return (x.expand(-1, model_channels, -1, -1) if x.shape[1] == 1 else x), {}  # grey images are repeated

    return HuggingFaceModel(folder.make("AutoModelForImageClassification", new=_HEADS), folder.label, arguments)


def _sequence_classifier(folder: ModelFolder, description: Description) -> HuggingFaceModel:
    _require_architecture(folder, "ForSequenceClassification", data="rows of integers with classes")
    padding = folder.config.pad_token_id
    if padding is None:
        raise refusal(
            f"{folder.label}: its config.json has no pad_token_id, which marks the end of a sample; set "
            "model.options.pad_token_id"
        )

    def arguments(x: torch.Tensor) -> Arguments:
        return x, {"attention_mask": (x != padding).long()}

    return HuggingFaceModel(folder.make("AutoModelForSequenceClassification", new=_HEADS), folder.label, arguments)


def _require_architecture(folder: ModelFolder, *endings: str, data: str) -> None:
    """Raise InputError if the folder's config.json names an architecture for another kind of data."""
    architectures = getattr(folder.config, "architectures", None) or []
    if architectures and not any(ending in name for name in architectures for ending in endings):
        raise refusal(
            f"{folder.label} is a {architectures[0]}, but the data are {data}; use a folder whose config.json "
            f"names a model ...{endings[0]}"
        )
