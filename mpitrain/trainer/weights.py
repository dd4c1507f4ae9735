"""Import of weights from a file or a Hugging Face folder into a new run, and export of a run as such a folder.

GPT-2, Llama, Mistral, Qwen2 and Qwen3 become runs of mpitrain's GPT, and a run of that GPT becomes one of these models.
If model.factory is hf:PATH, the run has transformers' own model, of any family, and is exported as that model.

A folder is in the format of `save_pretrained`: config.json; model.safetensors, or several such files and their index
(or pytorch_model.bin, of which only plain tensors are read); tokenizer.json.

Weights that do not suit the run's model are refused by the import, before a job waits in a queue.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from mpitrain.checkpoint.contents import complete_manifest, load_tensor
from mpitrain.checkpoint.convert import (
    import_weights,
    make_first_checkpoint,
    os_errors,
    read_tensors,
    write_safetensors,
)
from mpitrain.checkpoint.manifest import DTYPES, MODEL, Manifest, trained_source
from mpitrain.config.preset import CONFIG_JSON, config_json, family_of, preset_values
from mpitrain.config.settings import Config
from mpitrain.data.format import TOKENIZER
from mpitrain.errors import InputError
from mpitrain.loading import BASE, TASK, read_saved_model
from mpitrain.models.hugging_face import PREFIX, Facade, save_folder
from mpitrain.planner.machine import size_of
from mpitrain.planner.subject import Subject, description_of
from mpitrain.storage.disk import new_folder, require_new, sync, write_durably, write_whole
from mpitrain.storage.run_folder import CHECKPOINTS, CONFIG

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_SHOWN = 3  # differences that one message lists
Shapes = Mapping[str, Sequence[int]]


def import_plain(file: Path, run: Path, arguments: Sequence[str]) -> Path:
    """Make a run whose checkpoint of step 0 has the tensors of a file, under the same names.

    Args:
        file: A .safetensors file, or one that torch.save wrote.
        run: The run folder. If its settings are known, from its config.toml or from `arguments`, the tensors must be
            those of the run's model.
        arguments: Settings as on a training's command line, which are written into the folder's config.toml.

    Returns:
        Folder of the checkpoint.

    Raises:
        InputError: See `import_weights`; or if the tensors are not those of the run's model.
    """
    config = settings_of(run, arguments) if arguments or os.path.lexists(run / CONFIG) else None

    def check(tensors: Mapping[str, torch.Tensor]) -> None:
        if config is not None:
            require_model_of(config, {name: tensor.shape for name, tensor in tensors.items()}, str(file))

    with write_settings(run, config) if config is not None else nullcontext():
        return import_weights(file, run / CHECKPOINTS, check)


def settings_of(run: Path, arguments: Sequence[str]) -> Config:
    """Return the settings of a run, from its folder or from a command line.

    Args:
        run: The run folder.
        arguments: Settings as on a training's command line; must be empty if the folder has settings.

    Raises:
        InputError: If a setting is invalid, or both the folder and the command line have settings.
    """
    file = run / CONFIG
    if not os.path.lexists(file):
        return Config.from_args([*arguments, "--run.dir", str(run)])
    if arguments:
        raise InputError(
            f"{file} already has this run's settings, so {arguments[0]} is refused; change that file instead"
        )
    return Config.from_args([str(file)])


@contextmanager
def write_settings(run: Path, config: Config) -> Iterator[None]:
    """Write the settings into the run's folder if it has none; remove them again if the import in the block fails.

    The checkpoint is written last, so a folder with a checkpoint comes from an import that succeeded.

    Args:
        run: The run folder.
        config: The settings.
    """
    path, wrote = run / CONFIG, False
    with os_errors(path):
        if not os.path.lexists(path):
            run.mkdir(parents=True, exist_ok=True)
            write_whole(path, config.to_toml())
            wrote = True
    try:
        yield
    except BaseException:
        if wrote:
            path.unlink(missing_ok=True)
        raise


def require_model_of(config: Config, shapes: Shapes, origin: str) -> None:
    """Raise InputError unless tensors have the names and shapes of the run's model.

    Args:
        config: Settings of the run. Its data set is read, because the model depends on it.
        shapes: Shapes of the tensors, by name.
        origin: Source of the tensors, for the message.
    """
    module = Subject(config, description_of(config), real=False).module
    every = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    first = {name for name, _ in module.named_parameters()} | {name for name, _ in module.named_buffers()}
    later = {name for name, _ in module.named_parameters(remove_duplicate=False)} - first  # tied parameters
    mismatches = list(islice(differences(every, shapes, later), _SHOWN))
    if mismatches:
        raise InputError(
            f"{origin} does not match the run's model: {'; '.join(mismatches)}; fix [model], or give other weights"
        )


def differences(expected: Shapes, actual: Shapes, optional: set[str] | frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield descriptions of missing tensors, tensors of another shape, and surplus tensors.

    Args:
        expected: Shapes of the model's tensors, by name.
        actual: Shapes of the tensors that exist, by name.
        optional: Names in `expected` that may be missing.
    """
    for name, shape in expected.items():
        if name not in actual:
            if name not in optional:
                yield f"{name} {list(shape)} is missing"
        elif tuple(actual[name]) != tuple(shape):
            yield f"{name} is {list(actual[name])} instead of {list(shape)}"
    for name in actual:
        if name not in expected:
            yield f"{name!r:.100} is not in the model"


def import_folder(source: Path, run: Path, arguments: Sequence[str]) -> Path:
    """Make a run of mpitrain's GPT whose checkpoint of step 0 has the weights of a Hugging Face model.

    The run folder gets config.toml with the model's settings, and tokenizer.json if the source has one.

    Args:
        source: Folder of the model.
        run: The run folder.
        arguments: Further settings, as on a training's command line.

    Returns:
        Folder of the checkpoint.

    Raises:
        InputError: If mpitrain's GPT cannot represent the model, a file is missing, or tensors are not those of the
            model.
    """
    preset = preset_values(source)
    existing = os.path.lexists(run / CONFIG)
    config = settings_of(run, arguments if existing else [*arguments, "--model.preset", str(source)])
    model = config.model.model_dump()
    for key, value in preset.items():
        if existing and model[key] != value and model[key] != 0:
            raise InputError(
                f"{run / CONFIG} has model.{key} {model[key]}, but {source} has {value}; change it to "
                f"{value}, or give a new run folder"
            )
    model |= {key: model[key] or preset.get(key, 0) for key in ("vocabulary", "hidden", "max_positions")}
    files = _weight_files(source)
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        with os_errors(file):
            tensors |= read_tensors(file)
    family = family_of(model)
    parts = named_parts(family, model, model["vocabulary"])
    named = as_saved(family, tensors, model["tied"])
    shapes = {name: tuple(tensors[saved].shape) for name, saved in named.items()}
    if mismatches := list(islice(differences({part.theirs: part.shape for part in parts}, shapes), _SHOWN)):
        raise InputError(
            f"the tensors of {source} do not match its {CONFIG_JSON}: {'; '.join(mismatches)}; fix one of them"
        )
    ours = from_theirs(parts, {name: tensors[saved] for name, saved in named.items()}, model["tied"])
    if existing or "path" in config.data.model_fields_set:
        require_model_of(config, {name: tensor.shape for name, tensor in ours.items()}, str(source))
    size = sum(file.stat().st_size for file in files)
    with write_settings(run, config):
        _copy_tokenizer(source, run)
        return make_first_checkpoint(
            run / CHECKPOINTS, source, ours, size, {"task": _task(config, model["vocabulary"])}
        )


def export_folder(folder: Path, out: Path, shard: str) -> int:
    """Write a checkpoint of mpitrain's GPT, or of a transformers model, as a Hugging Face folder.

    Args:
        folder: The checkpoint.
        out: A new folder.
        shard: Largest size of one file, for example 5GB.

    Returns:
        Number of tensors written.

    Raises:
        InputError: If the folder exists already or cannot be written, no family has such blocks, the checkpoint
            contains only adapters, or the folder that an hf: model came from is missing.
        CheckpointError: If the checkpoint is not complete.
    """
    require_new(out)
    most, manifest = max(1, int(size_of(shard, "--shard-size"))), complete_manifest(folder)
    if str(((manifest.values.get(TASK) or {}).get("model") or {}).get("factory", "")).startswith(PREFIX):
        return _export_theirs(folder, out, most)
    model, vocabulary = _model_of(folder, manifest)
    parts = _present(folder, manifest, named_parts(family_of(model), model, vocabulary))
    config = config_json(model, vocabulary, manifest.tensors[MODEL + parts[0].ours].dtype)
    config["eos_token_id"] = ((manifest.values.get(TASK) or {}).get("data") or {}).get("document_end")

    @lru_cache(maxsize=1)
    def loaded(ours: str) -> torch.Tensor:
        tensor = load_tensor(folder, manifest, trained_source(manifest, ours))
        return tensor.to(DTYPES[manifest.tensors[MODEL + ours].dtype])

    by_name = {part.theirs: part for part in parts}
    groups = list(_sharded(manifest, parts, most))
    with os_errors(out), new_folder(out) as temporary:
        total = 0
        weight_map: dict[str, str] = {}
        for number, group in enumerate(groups, 1):
            many = f"-{number:05}-of-{len(groups):05}" if len(groups) > 1 else ""
            path = temporary / f"model{many}.safetensors"
            specs = {part.theirs: (_dtype(manifest, part), part.shape) for part in group}
            write_safetensors(path, specs, lambda name: by_name[name].to_theirs(loaded(by_name[name].ours)))
            sync(path)
            weight_map |= dict.fromkeys(specs, path.name)
            total += sum(_nbytes(manifest, part) for part in group)
        if len(groups) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            _write_json(temporary / f"{_WEIGHTS[0]}.index.json", index)
        _copy_tokenizer(folder.parent.parent, temporary)
        _write_json(temporary / CONFIG_JSON, config)
    return len(parts)


def _export_theirs(folder: Path, out: Path, most: int) -> int:
    """Write a checkpoint of a transformers model as `save_pretrained` does, and return the number of tensors."""
    saved = read_saved_model(folder)
    if isinstance(saved.manifest.values.get(BASE), dict):
        raise InputError(
            f"{folder} contains only adapters; write the model with python -m mpitrain.adapters merge {saved.run} {out}"
        )
    module = saved.load().module
    assert isinstance(module, Facade)
    state = module.state_dict()
    with os_errors(out), new_folder(out) as temporary:
        save_folder(module, saved.section.factory, state, temporary, most)
        if saved.tokenizer is not None:
            _copy_tokenizer(saved.tokenizer.parent, temporary)
    return len(state)


def _task(config: Config, vocabulary: int) -> dict[str, Any]:
    """Return the value `task` of a checkpoint: description of the model and of its data."""
    tokens = {"x_shape": [config.model.sequence], "x_dtype": "int64", "y_shape": [config.model.sequence]}
    none = dict.fromkeys(("classes", "apart", "document_end"))
    data = {"kind": "tokens", **tokens, "y_dtype": "int64", "vocabulary": vocabulary, "masked": False, **none}
    return {"model": config.model.model_dump(), "data": data}


def _weight_files(source: Path) -> list[Path]:
    """Return the files with tensors in a folder."""
    for name in _WEIGHTS:
        if (source / name).is_file():
            return [source / name]
        index = source / f"{name}.index.json"
        if not index.is_file():
            continue
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            if not names or any(Path(each).name != each for each in names):
                raise ValueError("it names no files, or files outside the folder")
        except OSError as error:
            raise InputError(f"{index}: {error.strerror or error}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"{index} is not an index of weights: {str(error).splitlines()[0]}") from None
        return [source / each for each in names]
    raise InputError(
        f"{source} has neither {' nor '.join(_WEIGHTS)}, nor an index of such files; give the model's folder"
    )


def _model_of(folder: Path, manifest: Manifest) -> tuple[dict[str, Any], int]:
    """Return the [model] settings of a checkpoint, with sizes read from its tensors, and the size of its vocabulary."""
    settings = (manifest.values.get("task") or {}).get("model")
    if settings is None:
        file = folder.parent.parent / CONFIG
        if not file.is_file():
            raise InputError(
                f"{folder} does not contain the model's settings, and {file} is missing; copy the run's settings there"
            )
        settings = Config.from_args([str(file)]).model.model_dump()
    model = Config.from_dict({"model": settings}, str(folder)).model.model_dump()
    family_of(model)
    sizes = {"embedding.weight": "vocabulary", "blocks.0.mlp.up.weight": "hidden", "positions.weight": "max_positions"}
    for name, key in sizes.items():
        spec = manifest.tensors.get(MODEL + name)
        if spec is not None and spec.shape:
            model[key] = spec.shape[0]
    return model, model["vocabulary"]


def _present(folder: Path, manifest: Manifest, parts: list[NamedPart]) -> list[NamedPart]:
    """Return the parts. Raises InputError unless the checkpoint has exactly their tensors."""
    expected: dict[str, tuple[int, ...]] = {}
    for part in parts:
        shape = part.shape[::-1] if part.transposed else part.shape
        expected[part.ours] = (part.first + shape[0], *shape[1:])
    shapes = {n.removeprefix(MODEL): spec.shape for n, spec in manifest.tensors.items() if n.startswith(MODEL)}
    if mismatches := list(islice(differences(expected, shapes), _SHOWN)):
        raise InputError(f"{folder} does not match the model in its settings: {'; '.join(mismatches)}")
    return parts


def _sharded(manifest: Manifest, parts: Sequence[NamedPart], most: int) -> Iterator[list[NamedPart]]:
    """Yield the parts in order, in groups of at most `most` bytes, or of one larger part."""
    group: list[NamedPart] = []
    size = 0
    for part in parts:
        nbytes = _nbytes(manifest, part)
        if group and size + nbytes > most:
            yield group
            group, size = [], 0
        group.append(part)
        size += nbytes
    yield group


def _dtype(manifest: Manifest, part: NamedPart) -> torch.dtype:
    return DTYPES[manifest.tensors[MODEL + part.ours].dtype]


def _nbytes(manifest: Manifest, part: NamedPart) -> int:
    return int(torch.Size(part.shape).numel()) * _dtype(manifest, part).itemsize


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_durably(path, f"{json.dumps(content, indent=2)}\n".encode())


def _copy_tokenizer(source: Path, target: Path) -> None:
    """Copy a folder's tokenizer, if it has one and the target has none."""
    if (source / TOKENIZER).is_file() and not os.path.lexists(target / TOKENIZER):
        with os_errors(target / TOKENIZER):
            write_whole(target / TOKENIZER, (source / TOKENIZER).read_bytes())


# -- names and layout of a GPT's parameters in Hugging Face's GPT-2 and Llama
#
# Mistral, Qwen2 and Qwen3 use Llama's names. In Qwen2, only the linear layers q, k and v have a bias. Qwen3's norms of
# queries and keys have one number for each feature of a head, in the order of the features.
#
# mpitrain                 GPT-2                                  Llama
# qkv [q + k + v, width]   c_attn [width, q + k + v]: transposed  q_proj, k_proj, v_proj [features, width]
# rotary pairs 2i, 2i + 1  -                                      features i and i + head_dim / 2
# other linear layers      transposed (Conv1D)                    same as mpitrain
#
# The change of the rotary pairs permutes the rows of q and k in the same way, so their products do not change.


_BUFFERS = re.compile(r"(^|\.)(attn\.(bias|masked_bias)|rotary_emb\.inv_freq)$")  # written by older versions
_PREFIX = {"gpt2": "transformer.", "llama": "model.", "qwen2": "model.", "qwen3": "model."}
_HEAD = "lm_head.weight"
Shape = tuple[int, ...]


@dataclass(frozen=True)
class NamedPart:
    """A tensor of Hugging Face's model ("theirs"), and the rows of mpitrain's parameter ("ours") that correspond to it.

    Attributes:
        theirs: Name of their tensor.
        ours: Name of our parameter.
        shape: Shape of their tensor.
        first: First row of our parameter.
        transposed: True if their tensor is our parameter transposed.
        head_dim: Features of a head whose rotary pairs are ordered differently; 0 without rotary pairs.
    """

    theirs: str
    ours: str
    shape: Shape
    first: int = 0
    transposed: bool = False
    head_dim: int = 0

    def to_ours(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rows of our parameter that correspond to their tensor."""
        if self.transposed:
            return tensor.t()
        if self.head_dim:
            return tensor.unflatten(0, (-1, 2, self.head_dim // 2)).transpose(1, 2).flatten(0, 2)
        return tensor

    def to_theirs(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return their tensor, made from rows of our whole parameter."""
        if self.transposed:
            return tensor.t().contiguous()
        rows = tensor.narrow(0, self.first, self.shape[0])
        if self.head_dim:
            return rows.unflatten(0, (-1, self.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
        return rows.contiguous()


def named_parts(family: str, model: Mapping[str, Any], vocabulary: int) -> list[NamedPart]:
    """Return all tensors of Hugging Face's model, in its order.

    Args:
        family: gpt2, llama, qwen2 or qwen3.
        model: The [model] settings; hidden and max_positions must be set if the family uses them.
        vocabulary: Number of tokens in the vocabulary.
    """
    parts = _gpt2(model, vocabulary) if family == "gpt2" else _llama(model, vocabulary)
    if not model["tied"]:
        parts.append(NamedPart(_HEAD, "head.weight", (vocabulary, model["width"])))
    return parts


def from_theirs(parts: Sequence[NamedPart], tensors: Mapping[str, torch.Tensor], tied: bool) -> dict[str, torch.Tensor]:
    """Return the parameters by mpitrain's names.

    Args:
        parts: All parts of the model.
        tensors: Hugging Face's tensors, by their names in `parts`.
        tied: If true, the head shares the weights of the embedding.
    """
    rows: dict[str, list[torch.Tensor]] = {}
    for part in parts:
        rows.setdefault(part.ours, []).append(part.to_ours(tensors[part.theirs]))
    ours = {name: pieces[0] if len(pieces) == 1 else torch.cat(pieces) for name, pieces in rows.items()}
    return ours | ({"head.weight": ours["embedding.weight"]} if tied else {})


def as_saved(family: str, names: Iterable[str], tied: bool) -> dict[str, str]:
    """Return, for each tensor name in a whole model with its head, the name of the tensor in the weight files.

    A model that was saved without its head has names without a prefix. Buffers are left out, and so is a tied head.

    Args:
        family: gpt2, llama, qwen2 or qwen3.
        names: Names in the files.
        tied: If true, the head shares the weights of the embedding.
    """
    prefix = _PREFIX[family]
    listed = [name for name in names if not _BUFFERS.search(name) and not (tied and name == _HEAD)]
    bare = not any(name.startswith(prefix) for name in listed)
    return {prefix + name if bare and name != _HEAD else name: name for name in listed}


def _gpt2(model: Mapping[str, Any], vocabulary: int) -> list[NamedPart]:
    width, hidden = model["width"], model["hidden"]
    parts = [
        NamedPart("transformer.wte.weight", "embedding.weight", (vocabulary, width)),
        NamedPart("transformer.wpe.weight", "positions.weight", (model["max_positions"], width)),
    ]
    linear = {
        "attn.c_attn": ("attention.qkv", width, 3 * width),
        "attn.c_proj": ("attention.out", width, width),
        "mlp.c_fc": ("mlp.up", width, hidden),
        "mlp.c_proj": ("mlp.down", hidden, width),
    }
    for layer in range(model["layers"]):
        there, here = f"transformer.h.{layer}.", f"blocks.{layer}."
        parts += _norm(there + "ln_1", here + "attention_norm", width) + _norm(there + "ln_2", here + "mlp_norm", width)
        for theirs, (ours, inputs, outputs) in linear.items():
            parts.append(
                NamedPart(f"{there}{theirs}.weight", f"{here}{ours}.weight", (inputs, outputs), transposed=True)
            )
            parts.append(NamedPart(f"{there}{theirs}.bias", f"{here}{ours}.bias", (outputs,)))
    return parts + _norm("transformer.ln_f", "norm", width)


def _norm(theirs: str, ours: str, width: int) -> list[NamedPart]:
    return [NamedPart(f"{theirs}.{key}", f"{ours}.{key}", (width,)) for key in ("weight", "bias")]


def _llama(model: Mapping[str, Any], vocabulary: int) -> list[NamedPart]:
    width, hidden, heads = model["width"], model["hidden"], model["heads"]
    head_dim = width // heads
    keys = (model["kv_heads"] or heads) * head_dim
    parts = [NamedPart("model.embed_tokens.weight", "embedding.weight", (vocabulary, width))]
    for layer in range(model["layers"]):
        there, here = f"model.layers.{layer}.", f"blocks.{layer}."
        linear = [
            ("self_attn.q_proj", "attention.qkv", width, width, 0, head_dim),
            ("self_attn.k_proj", "attention.qkv", keys, width, width, head_dim),
            ("self_attn.v_proj", "attention.qkv", keys, width, width + keys, 0),
            ("self_attn.o_proj", "attention.out", width, width, 0, 0),
            ("mlp.gate_proj", "mlp.gate", hidden, width, 0, 0),
            ("mlp.up_proj", "mlp.up", hidden, width, 0, 0),
            ("mlp.down_proj", "mlp.down", width, hidden, 0, 0),
        ]
        for theirs, ours, outputs, inputs, first, rotary in linear:
            biased = model["bias"] or (model["qkv_bias"] and ours == "attention.qkv")
            for key, shape in (("weight", (outputs, inputs)), ("bias", (outputs,)))[: 2 if biased else 1]:
                name = f"{there}{theirs}.{key}"
                parts.append(NamedPart(name, f"{here}{ours}.{key}", shape, first, head_dim=rotary))
        for norm in ("q_norm", "k_norm") if model["qk_norm"] else ():
            norm_name = f"{here}attention.{norm}.weight"
            parts.append(NamedPart(f"{there}self_attn.{norm}.weight", norm_name, (head_dim,), head_dim=head_dim))
        for theirs, ours in (("input_layernorm", "attention_norm"), ("post_attention_layernorm", "mlp_norm")):
            parts.append(NamedPart(f"{there}{theirs}.weight", f"{here}{ours}.weight", (width,)))
    return [*parts, NamedPart("model.norm.weight", "norm.weight", (width,))]
