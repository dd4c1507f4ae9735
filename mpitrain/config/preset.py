"""Values of [model] from other sources: a Hugging Face config.json, the base run of adapters, defaults by model name.

The families GPT-2, Llama, Mistral, Qwen2 and Qwen3 are supported, for reading and for writing a config.json. A key of a
config.json that changes the computation, but has no counterpart in our gpt, is an error; keys for dropout, generation
and files are not read. A key that the user sets always wins.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from mpitrain.choices import Model
from mpitrain.config.toml_file import read_toml
from mpitrain.errors import InputError, refusing
from mpitrain.storage.disk import from_json, read_plain, reporting
from mpitrain.storage.run_folder import CONFIG

CONFIG_JSON = "config.json"
_LONGEST = 1 << 20  # bytes
_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")
Values = dict[str, Any]
Number = TypeVar("Number", int, float)


def with_preset(settings: Mapping[str, Any]) -> Values:
    """Return the keys of [model], completed with the values of the config.json that `preset` names.

    Args:
        settings: The keys of [model] that the user set, with `preset`; they win over the config.json.

    Raises:
        InputError: The config.json cannot be read, describes a model that gpt cannot represent, or contradicts
            `settings` although `settings` sets all of its keys.
    """
    path = Path(str(settings["preset"]))
    with refusing(f"model.preset {path} is not a config.json", "give the config.json of a model"):
        preset = preset_values(path := path.expanduser())
    other = [key for key, value in preset.items() if settings.get(key, value) != value]
    if other and preset.keys() <= settings.keys():
        raise InputError(
            f"model.preset {path} has {other[0]} {preset[other[0]]}, but model.{other[0]} is "
            f"{settings[other[0]]}, and all keys of the preset are set; remove these keys, or remove "
            "model.preset"
        )
    return {**preset, **settings, "preset": ""}


def preset_values(path: Path) -> Values:
    """Return the keys of [model] that describe the model of a config.json.

    Args:
        path: The config.json, or the folder that contains it.

    Raises:
        InputError: The file cannot be read, or describes a model that gpt cannot represent.
    """
    file = path / CONFIG_JSON if path.is_dir() else path
    source = _Source(file, _read(file))
    family = source.values.get("model_type")
    if not isinstance(family, str) or family not in _FAMILIES:
        raise InputError(
            f"model.preset {file}: model_type {family!r:.80} is not one of {', '.join(_FAMILIES)}; use "
            "model.factory for it"
        )
    source.require_one_of("quantization_config", None)
    return _FAMILIES[family](source)


def config_json(model: Mapping[str, Any], vocabulary: int, dtype: str) -> Values:
    """Return the contents of a Hugging Face config.json for a model.

    Args:
        model: All keys of [model].
        vocabulary: Number of tokens in the vocabulary.
        dtype: PyTorch's name for the type of the weights, such as "float32".

    Raises:
        InputError: No supported family has blocks like those of the model.
    """
    common = {
        "vocab_size": vocabulary,
        "tie_word_embeddings": model["tied"],
        "dtype": dtype,
        "torch_dtype": dtype,  # before transformers 5
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if (family := family_of(model)) == "gpt2":
        return common | {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "n_layer": model["layers"],
            "n_embd": model["width"],
            "n_head": model["heads"],
            "n_inner": model["hidden"] or None,
            "n_positions": model["max_positions"] or model["sequence"],
            "layer_norm_epsilon": model["norm_eps"],
            "activation_function": "gelu_new",
            **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), model["dropout"]),
        }
    by_family: dict[str, Values] = {
        "llama": {"attention_bias": model["bias"], "mlp_bias": model["bias"]},
        "qwen2": {"use_sliding_window": False},
        "qwen3": {"use_sliding_window": False, "attention_bias": False},
    }
    if family != "qwen2":
        by_family[family]["head_dim"] = model["width"] // model["heads"]
    return common | {
        "model_type": family,
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        **by_family[family],
        "num_hidden_layers": model["layers"],
        "hidden_size": model["width"],
        "num_attention_heads": model["heads"],
        "num_key_value_heads": model["kv_heads"] or model["heads"],
        "intermediate_size": model["hidden"],
        "max_position_embeddings": model["max_positions"] or model["sequence"],
        "rms_norm_eps": model["norm_eps"],
        "rope_theta": model["rope_base"],  # before transformers 5
        "rope_parameters": {"rope_type": "default", "rope_theta": model["rope_base"]},
        "hidden_act": "silu",
        "attention_dropout": model["dropout"],
    }


def family_of(model: Mapping[str, Any]) -> str:
    """Return the Hugging Face family whose blocks equal those of a model: gpt2, llama, qwen2 or qwen3.

    The blocks of Mistral are those of llama.

    Args:
        model: All keys of [model].

    Raises:
        InputError: The model belongs to none of these families.
    """
    forms: dict[str, Values] = {
        "llama": {"norm": "rmsnorm", "positions": "rotary", "mlp": "swiglu"},
        "gpt2": {"norm": "layernorm", "positions": "learned", "mlp": "gelu", "bias": True, "qk_norm": False},
    }
    if model.get("name", "gpt") != "gpt" or model.get("factory"):
        raise InputError(
            "only model.name gpt can be exported in a Hugging Face format; export other models to .safetensors or .pt"
        )
    if model["kv_heads"] in (0, model["heads"]) and all(model[key] == value for key, value in forms["gpt2"].items()):
        return "gpt2"
    if all(model[key] == value for key, value in forms["llama"].items()):
        if model["qk_norm"]:
            if model["bias"] or model["qkv_bias"]:
                raise InputError(
                    "a gpt with model.qk_norm corresponds to Hugging Face's qwen3, whose layers have no bias, "
                    "but this model has a bias; export it to .safetensors or .pt"
                )
            return "qwen3"
        return "qwen2" if model["qkv_bias"] and not model["bias"] else "llama"
    summary = ", ".join(f"{key} {model[key]}" for key in ("norm", "positions", "mlp"))
    raise InputError(
        f"a gpt with {summary} is neither Hugging Face's llama (rmsnorm, rotary, swiglu) nor gpt2 (layernorm, learned, "
        "gelu, with bias, without model.kv_heads); export it to .safetensors or .pt"
    )


class _Source:
    """Checked access to the keys of a config.json.

    Args:
        file: Path of the config.json, for error messages.
        values: Keys and values of the file.
    """

    def __init__(self, file: Path, values: Values) -> None:
        self.file, self.values = file, values

    def require_one_of(self, key: str, *fitting: Any) -> None:
        """Raise InputError unless `key` has one of the `fitting` values; the first of them is its default."""
        value = self.values.get(key, fitting[0])
        if value not in fitting:
            raise InputError(
                f"model.preset {self.file}: {key} {json.dumps(value):.80} cannot be represented by gpt, which "
                f"supports {' or '.join(json.dumps(v) for v in fitting)}; use model.factory for it"
            )

    def number(self, key: str, otherwise: Number, within: Mapping[str, Any] | None = None) -> Number:
        """Return the positive number under a key, of the same type (int or float) as `otherwise`.

        Args:
            key: The key.
            otherwise: Default, used if the key is missing or null.
            within: Mapping in which to look up the key; None: the whole file.

        Raises:
            InputError: The value is not a positive number of this type.
        """
        value = (self.values if within is None else within).get(key)
        value = otherwise if value is None else value
        kinds, limit = (int, 2**53) if isinstance(otherwise, int) else ((int, float), 1e300)
        if not isinstance(value, kinds) or isinstance(value, bool) or not 0 < value < limit:
            raise InputError(
                f"model.preset {self.file}: {key} is {value!r:.80}, not a positive number; fix it in that file"
            )
        return type(otherwise)(value)

    def flag(self, key: str, otherwise: bool) -> bool:
        """Return the boolean under a key.

        Args:
            key: The key.
            otherwise: Default, used if the key is missing.

        Raises:
            InputError: The value is not a boolean.
        """
        self.require_one_of(key, otherwise, not otherwise)
        return bool(self.values.get(key, otherwise))


def _gpt2(source: _Source) -> Values:
    source.require_one_of("activation_function", *_TANH_GELU)
    source.require_one_of("scale_attn_weights", True)
    source.require_one_of("scale_attn_by_inverse_layer_idx", False)
    source.require_one_of("add_cross_attention", False)
    width = source.number("n_embd", 768)
    return {
        "layers": source.number("n_layer", 12),
        "width": width,
        "heads": source.number("n_head", 12),
        "hidden": source.number("n_inner", 4 * width),
        "norm": "layernorm",
        "norm_eps": source.number("layer_norm_epsilon", 1e-5),
        "positions": "learned",
        "max_positions": source.number("n_positions", 1024),
        "mlp": "gelu",
        "bias": True,
        "tied": source.flag("tie_word_embeddings", True),
        "vocabulary": source.number("vocab_size", 50257),
    }


def _llama(source: _Source) -> Values:
    source.require_one_of("sliding_window", None)
    bias = source.flag("attention_bias", False)
    if source.flag("mlp_bias", False) != bias:
        raise InputError(
            f"model.preset {source.file}: attention_bias and mlp_bias differ, but gpt has biases in all layers "
            "or in none; use model.factory for it"
        )
    return _llama_keys(source) | {"bias": bias}


def _mistral(source: _Source) -> Values:
    positions = source.number("max_position_embeddings", 4096 * 32)
    window = source.values.get("sliding_window", 4096)
    if not (isinstance(window, int) and window >= positions):  # a window as long as the longest text has no effect
        source.values["sliding_window"] = window
        source.require_one_of("sliding_window", None)
    return _llama_keys(source, hidden=14336, kv_heads=8, positions=positions)


def _qwen2(source: _Source) -> Values:
    source.require_one_of("use_sliding_window", False)
    return _llama_keys(source, hidden=22016, kv_heads=32, positions=32768, vocabulary=151936) | {"qkv_bias": True}


def _qwen3(source: _Source) -> Values:
    source.require_one_of("use_sliding_window", False)
    source.require_one_of("attention_bias", False)
    if source.values.get("head_dim") is None:
        source.values["head_dim"] = 128  # Qwen3's default, whatever the width
    layers = source.values.get("layer_types") or []
    if not isinstance(layers, list) or any(layer != "full_attention" for layer in layers):
        source.require_one_of("layer_types", None)
    return _llama_keys(source, hidden=22016, kv_heads=32, positions=32768, vocabulary=151936) | {"qk_norm": True}


def _llama_keys(
    source: _Source, *, hidden: int = 11008, kv_heads: int | None = None, positions: int = 2048, vocabulary: int = 32000
) -> Values:
    """Return the keys of [model] that Llama, Mistral, Qwen2 and Qwen3 have in common.

    Args:
        source: The config.json.
        hidden: The family's default of intermediate_size.
        kv_heads: The family's default of num_key_value_heads; None: the number of attention heads.
        positions: The family's default of max_position_embeddings.
        vocabulary: The family's default of vocab_size.
    """
    source.require_one_of("hidden_act", "silu", "swish")
    width, heads = source.number("hidden_size", 4096), source.number("num_attention_heads", 32)
    if source.values.get("head_dim") is not None:
        source.require_one_of("head_dim", width // heads)
    return {
        "layers": source.number("num_hidden_layers", 32),
        "width": width,
        "heads": heads,
        "kv_heads": source.number("num_key_value_heads", kv_heads or heads),
        "hidden": source.number("intermediate_size", hidden),
        "norm": "rmsnorm",
        "norm_eps": source.number("rms_norm_eps", 1e-6),
        "positions": "rotary",
        "max_positions": source.number("max_position_embeddings", positions),
        "rope_base": _rope_base(source),
        "mlp": "swiglu",
        "bias": False,
        "tied": source.flag("tie_word_embeddings", False),
        "vocabulary": source.number("vocab_size", vocabulary),
    }


def _rope_base(source: _Source) -> float:
    """Return the base of plain rotary positions. Raises InputError if the file scales the positions in any way."""
    base = source.number("rope_theta", 10000.0)
    for key in ("rope_scaling", "rope_parameters"):
        rope = source.values.get(key)
        if rope is None:
            continue
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
        if kind != "default" or not isinstance(rope, dict):
            raise InputError(
                f"model.preset {source.file}: {key} of kind {kind!r:.80} is not supported by gpt, which has "
                "plain rotary positions; use model.factory for it"
            )
        base = source.number("rope_theta", base, rope)
    for where in (source.values, source.values.get("rope_parameters") or {}):
        if where.get("partial_rotary_factor", 1.0) != 1.0:
            source.values["partial_rotary_factor"] = where["partial_rotary_factor"]
            source.require_one_of("partial_rotary_factor", 1.0)
    return base


_FAMILIES = {"gpt2": _gpt2, "llama": _llama, "mistral": _mistral, "qwen2": _qwen2, "qwen3": _qwen3}


def _read(file: Path) -> Values:
    with reporting(f"model.preset {file} cannot be read", "give a folder with a config.json, or that file"):
        text = read_plain(file, _LONGEST)
    try:
        values = from_json(text)
    except ValueError as error:
        raise InputError(f"model.preset {file} is not a config.json: {str(error).splitlines()[0]}") from None
    if not isinstance(values, dict):
        raise InputError(
            f"model.preset {file} is not a config.json: it contains no keys; give the config.json of a model"
        )
    return values


# keys that are never copied from the base run
_NOT_COPIED = ("base", "compile", "lora", "lora_alpha", "lora_dropout", "lora_targets", "preset")


def with_base(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of [model], completed with the settings of the run or checkpoint that `base` names.

    A checkpoint outside a run folder has no settings, so nothing is added; loading its weights then reports a mismatch.

    Args:
        settings: The keys of [model] that the user set, with `base`; they win over those of the base run.

    Raises:
        InputError: `base` does not exist, or its settings cannot be read.
    """
    path = Path(str(settings["base"])).expanduser()
    if not path.exists():
        raise InputError(f"model.base: {path} does not exist; give a checkpoint folder or a run folder")
    files = [file for file in (path / CONFIG, path.absolute().parent.parent / CONFIG) if file.is_file()]
    base = read_toml(str(files[0])).get("model", {}) if files else {}
    return {key: value for key, value in base.items() if key not in _NOT_COPIED} | dict(settings)


# defaults of single models, where they differ from those of `ModelSection` and `OptimSection`
_BY_MODEL: dict[Model, dict[str, dict[str, Any]]] = {
    # 18 layers, 64 channels and momentum from He et al. 2015; the usual weight decay and learning rate for images as
    # small as CIFAR's with batches of 32 to 128
    "resnet": {
        "model": {"layers": 18, "width": 64},
        "optim": {"name": "sgd", "lr": 0.05, "weight_decay": 5e-4, "options": {"momentum": 0.9}},
    },
}


def with_model_defaults(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values of a configuration, by section and key, completed with the defaults of its model.name.

    If the user chose an optimizer, nothing is added to [optim], because a learning rate for one optimizer does not suit
    another one.
    """
    model, result = values.get("model"), dict(values)
    name: Any = model.get("name") if isinstance(model, Mapping) and not model.get("factory") else None
    by_section = _BY_MODEL[name] if isinstance(name, str) and name in _BY_MODEL else {}
    for section, defaults in by_section.items():
        known = result.get(section, {})
        if isinstance(known, Mapping) and not (section == "optim" and "name" in known):
            result[section] = {**defaults, **known}
    return result


def defaults_by_model(section: str, key: str) -> str:
    """Return the defaults of a setting that hold for single models only, as text such as "resnet: 18".

    Args:
        section: Section of the setting, such as "model".
        key: Key of the setting, such as "layers".
    """
    of_models = ((name, sections.get(section, {})) for name, sections in _BY_MODEL.items())
    return ", ".join(f"{name}: {defaults[key]!r}" for name, defaults in of_models if key in defaults)
