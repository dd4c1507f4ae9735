"""Settings of the model, its training and its optimizer; all are independent of the number of ranks."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from mpitrain import choices
from mpitrain.config.batch_sizes import BatchSizes, Stages, check_warmup
from mpitrain.config.named import suggestion
from mpitrain.config.preset import with_base, with_preset
from mpitrain.config.section import (
    ClassName,
    Named,
    Section,
    followed,
    followed_apart,
    followed_folder,
    for_optimizer,
    setting,
)

_Metric = choices.Measured | choices.OfClasses
_Tiles = Annotated[int, Ge(1)]
_Weight = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
# keys of [train]: (key, the key that it replaces, the quantity that both set)
EXCLUSIVE = (
    ("epochs", "steps", "the length of the run"),
    ("accumulation", "microbatch", "how the samples of a rank are divided"),
)


GROUP_KEYS = ("match", "optimizer", "lr", "lr_scale")  # keys of a group that are not options of the optimizer


def _check_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups unchanged. Raises ValueError, which names the entry and the fix, if one of them is invalid."""
    for number, group in enumerate(groups):
        where = f"optim.groups, entry {number + 1}"
        if not patterns_of(group):
            raise ValueError(f'{where}: match = {group.get("match")!r} is not a pattern; write match = "*.norm.*"')
        if not group.keys() - {"match"}:
            raise ValueError(
                f"{where}: the entry sets nothing but match; add settings such as lr_scale = 0.1 or weight_decay = 0.0"
            )
        if {"lr", "lr_scale"} <= group.keys():
            raise ValueError(f"{where}: lr and lr_scale both set the learning rate; remove one of them")
        for key in {"lr", "lr_scale", "weight_decay"} & group.keys():
            value = group[key]
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
                raise ValueError(f"{where}: {key} = {value!r} is wrong; give a number of at least 0")
        if not isinstance(group.get("optimizer", ""), str):
            raise ValueError(f'{where}: optimizer = {group["optimizer"]!r} is not a name; write optimizer = "sgd"')
    return groups


def patterns_of(group: Mapping[str, Any]) -> list[str]:
    """Return the patterns in `match` of an optimizer group; empty if `match` is not text or a list of texts."""
    match = group.get("match")
    patterns = [match] if isinstance(match, str) else match
    if not isinstance(patterns, (list, tuple)) or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        return []
    return list(patterns)


class ModelSection(Section):
    """Settings of [model]: the model, and adapters on it."""

    name: choices.Model = setting("gpt", "a model of mpitrain.models")
    factory: str = setting(
        "", "your own model as package.module:function, or a Hugging Face model as hf:FOLDER; replaces model.name"
    )
    layers: int = setting(
        2,
        f"blocks (gpt), hidden layers (mlp) or {'|'.join(map(str, choices.RESNET_LAYERS))} (resnet)",
        ge=1,
        alias=["num_layers", "n_layer", "num_hidden_layers"],
        also=["depth"],
    )
    width: int = setting(
        128,
        "features per token (gpt), per layer (mlp) or of the stem (resnet)",
        ge=1,
        alias=["hidden_size", "n_embd", "d_model"],
        also=["dim"],
    )
    heads: int = setting(4, "attention heads (gpt)", ge=1, alias=["num_heads", "n_head", "num_attention_heads"])
    kv_heads: int = setting(
        0,
        "heads of keys and values (gpt), each shared by several query heads; 0: one for each query head",
        ge=0,
        alias=["num_key_value_heads", "n_kv_heads", "num_kv_heads"],
    )
    hidden: int = setting(
        0,
        "features inside the MLP of a block (gpt); 0: 4 times model.width, or with swiglu 8/3 times, rounded "
        "up to a multiple of 64",
        ge=0,
        alias=["intermediate_size", "n_inner", "ffn_hidden_size", "d_ff"],
    )
    norm: choices.Norm = setting("layernorm", "normalization in the blocks (gpt)")
    norm_eps: float = setting(
        1e-5, "epsilon that a norm adds to the variance (gpt)", gt=0.0, alias=["rms_norm_eps", "layer_norm_epsilon"]
    )
    positions: choices.Positions = setting("rotary", "position encoding of tokens (gpt)")
    max_positions: int = setting(
        0,
        "rows of the table of learned positions, which limit the sequence (gpt); 0: model.sequence",
        ge=0,
        alias=["max_position_embeddings", "n_positions"],
    )
    rope_base: float = setting(
        10000.0, "base of the wavelengths of rotary positions (gpt)", gt=0.0, alias=["rope_theta"]
    )
    mlp: choices.FeedForward = setting(
        "gelu", "activation in the MLP of a block (gpt)", also=["hidden_act", "activation"]
    )
    bias: bool = setting(True, "linear layers and LayerNorms of the blocks have a bias (gpt)", also=["attention_bias"])
    qkv_bias: bool = setting(
        False,
        "queries, keys and values have a bias even if model.bias is false, as in Qwen2 (gpt)",
        alias=["add_qkv_bias"],
    )
    qk_norm: bool = setting(
        False, "queries and keys of each head are normed by RMSNorm, as in Qwen3 (gpt)", alias=["use_qk_norm"]
    )
    tied: bool = setting(
        True, "the output layer shares the weight of the embedding (gpt)", alias=["tie_word_embeddings"]
    )
    vocabulary: int = setting(
        0,
        "size of the vocabulary, at least that of the data (gpt); 0: that of the data",
        ge=0,
        alias=["vocab_size", "n_vocab"],
    )
    preset: str = setting(
        "",
        "config.json of a Hugging Face GPT-2, Llama, Mistral, Qwen2 or Qwen3, or its folder; it sets all keys "
        "of [model] that you do not set",
    )
    sequence: int = setting(
        128,
        "tokens per sample; with learned positions, at most and by default model.max_positions",
        ge=1,
        alias=["sequence_length", "seq_len", "seq_length", "block_size"],
        also=["context"],
    )
    dropout: float = setting(0.0, "dropout probability (gpt, mlp)", ge=0.0, lt=1.0)
    layer_drop: float = setting(
        0.0,
        "probability with which a step leaves out the last block; it grows linearly from the first block to the last "
        "(gpt, or your own model whose blocks add to their input)",
        ge=0.0,
        lt=1.0,
        also=["drop_path", "stochastic_depth", "layerdrop"],
    )
    compile: bool = followed(
        False, "compile the model's blocks with torch.compile; the first steps take longer", alias=["torch_compile"]
    )
    tiled: dict[str, tuple[_Tiles, _Tiles]] = setting(
        {},
        'linear layers that are computed in tiles, which parallel.zero 3 gathers one by one: {"*.mlp.up" = [1, 4]} for '
        "1 tile along the inputs and 4 along the outputs",
        also=["tiled_linear", "memory_centric_tiling"],
    )
    options: dict[str, Any] = setting(
        {}, "keyword arguments for model.factory, or values that replace those in the config.json of an hf: model"
    )
    lora: int = setting(
        0,
        "rank of the adapters (LoRA) that are trained instead of the model; 0: none",
        ge=0,
        alias=["lora_rank", "lora_r"],
    )
    lora_alpha: float = setting(16.0, "the output of an adapter is multiplied by lora_alpha / lora", gt=0.0)
    lora_dropout: float = setting(0.0, "dropout probability of an adapter's input", ge=0.0, lt=1.0)
    lora_targets: list[str] = setting(
        [],
        "patterns of the linear layers that get adapters, such as ['q_proj']; []: those of attention",
        alias=["target_modules"],
    )

    base: str = setting(
        "",
        "run folder or checkpoint with trained weights, which replace random weights under the adapters of "
        "model.lora; it sets all keys of [model] that you do not set",
        also=["base_model", "base_checkpoint", "base_model_name_or_path", "pretrained"],
    )

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("base") and cls.model_fields.keys() - values.keys():
            values = with_base(values)
        if isinstance(values, dict) and values.get("preset"):
            values = with_preset(values)
        rows = values.get("max_positions") if isinstance(values, dict) else None
        if isinstance(rows, int) and values.get("positions") == "learned":
            longest = min(rows, cls.model_fields["sequence"].default)
            values = {"sequence": longest, **values} if longest > 0 else values
        return values

    @model_validator(mode="after")
    def _check_model(self) -> ModelSection:
        if self.tiled and self.lora:
            raise ValueError("model.tiled cannot be combined with model.lora, whose layers stay whole; remove one")
        if self.base and not self.lora:
            raise ValueError(
                f"model.base {self.base} needs adapters, but model.lora is 0; set model.lora, or, to train all "
                "weights, make a run with python -m mpitrain.checkpoint export and import"
            )
        if self.name == "gpt" and not self.factory and self.width % self.heads:
            raise ValueError(
                f"model.width {self.width} is not a multiple of model.heads {self.heads}; "
                f"set model.width to {-(-self.width // self.heads) * self.heads}"
            )
        learned = self.name == "gpt" and not self.factory and self.positions == "learned"
        if learned and 0 < self.max_positions < self.sequence:
            raise ValueError(
                f"model.sequence {self.sequence} is longer than model.max_positions {self.max_positions}; set "
                f"model.sequence to {self.max_positions}, or model.positions to rotary"
            )
        if self.name == "gpt" and not self.factory and self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(
                f"model.heads {self.heads} is not a multiple of model.kv_heads {self.kv_heads}; "
                f"set model.kv_heads to {math.gcd(self.heads, self.kv_heads)}"
            )
        if self.name == "resnet" and not self.factory and self.layers not in choices.RESNET_LAYERS:
            raise ValueError(
                f"model.layers {self.layers}: a resnet has {choices.one_of(choices.RESNET_LAYERS)}; set one of these"
            )
        return self


def _check_metrics(names: Any) -> Any:
    known = (*get_args(choices.Measured), *get_args(choices.OfClasses))
    for name in names if isinstance(names, (list, tuple)) else ():
        if isinstance(name, str) and ":" not in name and name not in known:
            hint = suggestion(name, known, f"choose {', '.join(known)}, or package.module:function")
            raise ValueError(f"train.metrics: unknown metric {name!r}; {hint}")
    return names


def recomputes_stages(train: Any) -> bool:
    """Return whether the stages of a pipeline are recomputed as a whole, not in segments.

    Args:
        train: The settings [train], or an object with those about activations.
    """
    return train.recompute is True and not (train.offload_activations or train.partition_activations)


def _check_recompute(value: Any) -> Any:
    if isinstance(value, str):
        value = {"true": True, "false": False}.get(value, value)
    if value in ([], ()):
        return False
    if isinstance(value, str) and not re.fullmatch(r"selective|every [1-9]\d*", value):
        raise ValueError(
            f'train.recompute {value!r} is unknown; set it to true, false, "selective", "every 4" for one segment of 4 '
            "blocks, or a list of blocks such as [0, 2]"
        )
    return value


class TrainSection(Section):
    """Settings of [train]: steps, batches, precision, evaluation and early stopping."""

    steps: int = for_optimizer(
        300, "optimizer steps in the whole run", ge=0, alias=["max_steps", "iterations", "max_iters", "train_iters"]
    )
    epochs: float = setting(
        0.0,
        "passes over the training data in the whole run, instead of train.steps; 0: use train.steps",
        ge=0.0,
        alias=["num_epochs", "max_epochs", "num_train_epochs", "n_epochs"],
        decisive=True,
    )
    batch: int = followed_apart(
        32,
        "samples of the global batch, over all ranks",
        ge=1,
        alias=["global_batch_size", "train_batch_size"],
        also=["batch_size"],
    )
    batch_warmup: Annotated[Stages, BeforeValidator(check_warmup)] = setting(
        (),
        "smaller global batches of the first steps: [[100, 8], [100, 16]] for 100 steps of 8 samples, then 100 of 16",
        also=["rampup_batch_size", "batch_size_warmup", "batch_rampup"],
    )
    microbatch: int = followed_apart(
        0,
        "samples per rank and forward pass; 0: the rank's whole share of the batch",
        ge=0,
        alias=["micro_batch_size", "microbatch_size", "train_micro_batch_size_per_gpu"],
        also=["per_device_train_batch_size", "per_device_batch_size"],
    )
    accumulation: int = followed_apart(
        0,
        "microbatches of a rank in each step, instead of train.microbatch; train.batch stays the global "
        "batch; 0: follows from train.microbatch",
        ge=0,
        alias=["gradient_accumulation_steps", "accumulate_grad_batches", "gradient_accumulation", "accumulation_steps"],
    )
    precision: choices.Precision = followed(
        "fp32",
        "precision of forward and backward",
        also=["dtype", "amp", "use_amp", "autocast", "mixed_precision", "fp16", "bf16"],
    )
    clip: float = followed(
        1.0,
        "largest global gradient norm; 0: no clipping",
        ge=0.0,
        alias=["grad_clip", "gradient_clipping", "gradient_clip_val", "max_grad_norm", "clip_grad"],
    )
    recompute: Annotated[bool | str | tuple[Annotated[int, Ge(0)], ...], BeforeValidator(_check_recompute)] = followed(
        False,
        "recompute block activations in backward instead of keeping them; selective: but keep the outputs of matrix "
        'products and attention; "every 4": keep the input of every fourth block only; [0, 2]: recompute these blocks',
        alias=["activation_checkpointing", "gradient_checkpointing"],
    )
    offload_activations: str = followed_folder(
        "",
        "store activations, or the kept inputs of recomputed blocks, until backward in `host` memory, or in "
        "memory-mapped files in the folder PATH",
        also=["cpu_checkpointing", "activation_offload", "activation_offloading", "cpu_offload_activations"],
    )
    partition_activations: bool = followed(
        False, "with parallel.tensor: divide the kept inputs of recomputed blocks over the tensor ranks"
    )
    average: Literal["none", "ema", "swa"] = setting(
        "none",
        "weights averaged over steps, with which the model is evaluated and used after training: ema (exponential "
        "moving average) or swa (equal weights)",
        off="none",
        decisive=True,
        also=["ema", "swa", "use_ema", "weight_averaging"],
    )
    average_decay: float = setting(
        0.999, "part of the average that each update keeps (ema)", ge=0.0, lt=1.0, alias=["ema_decay"]
    )
    average_start: int = setting(0, "first steps whose weights are not averaged", ge=0, alias=["swa_start"])
    average_every: int = setting(1, "steps between weights that are averaged", ge=1)
    evaluate_every: int = setting(
        100,
        "steps between evaluations on held-out data; 0: only at the end",
        ge=0,
        alias=["eval_every", "eval_interval", "eval_steps"],
        off=0,
    )
    evaluate_samples: int = setting(256, "largest number of held-out samples per evaluation", ge=1)
    abort_after: int = setting(
        50,
        "consecutive steps without an update, or with a loss that is not finite, after which the run fails; 0: never",
        ge=0,
        also=["max_skipped_steps", "skip_limit"],
    )
    metrics: Annotated[tuple[Named | _Metric, ...], BeforeValidator(_check_metrics)] = setting(
        (),
        'additional metrics: ["f1", "auroc", ...], or your own as "package.module:function", called as '
        "function(output, y)",
        also=["compute_metrics"],
    )
    class_weights: Literal["balanced"] | tuple[_Weight, ...] = setting(
        (),
        "weight of each class in the training loss, such as [1.0, 5.0]; balanced: rarer classes get larger weights",
        also=["class_weight"],
    )
    patience: int = setting(
        0,
        "consecutive evaluations without a better train.monitor, after which the run ends; 0: never end early",
        ge=0,
        alias=["early_stopping_patience"],
        also=["early_stopping"],
    )
    monitor: str = setting(
        "held_out_loss",
        "value that train.patience compares: held_out_loss or a metric",
        also=["metric_for_best_model", "early_stopping_metric"],
    )
    min_delta: float = setting(
        0.0,
        "amount by which train.monitor must improve to count as better for train.patience",
        ge=0.0,
        also=["early_stopping_threshold"],
    )

    @model_validator(mode="after")
    def _check_exclusive_keys(self) -> TrainSection:
        for key, other, what in EXCLUSIVE:
            if getattr(self, key) and {key, other} <= self.model_fields_set and getattr(self, other):
                raise ValueError(f"train.{key} and train.{other} both set {what}; remove one of them")
        return self

    @property
    def batch_sizes(self) -> BatchSizes:
        """Global batch size of each step of the run."""
        return BatchSizes(self.batch_warmup, self.batch)

    @model_validator(mode="after")
    def _check_warmup_batches(self) -> TrainSection:
        largest = max((size for _, size in self.batch_warmup), default=0)
        if largest > self.batch:
            raise ValueError(
                f"train.batch_warmup has a batch of {largest} samples, more than train.batch {self.batch}, "
                "which all later steps take; raise train.batch, or use smaller batches in the warm-up"
            )
        return self


class OptimSection(Section):
    """Settings of [optim]: the optimizer, its learning rate and its parameter groups."""

    name: str = for_optimizer(
        "adamw",
        "adamw, sgd, muon, lion, lamb, lars, any class of torch.optim, or your own as package.module:Class",
        alias=["optimizer"],
    )
    lr: float = for_optimizer(2e-3, "peak learning rate", gt=0.0, alias=["learning_rate"])
    schedule: choices.Rates | ClassName = for_optimizer(
        "cosine",
        "decay after the warm-up (wsd: constant until optim.decay_steps before the end); or, without "
        "optim.warmup, a cycle up and down, a test of growing rates, or a class of torch.optim.lr_scheduler",
        also=["scheduler", "lr_scheduler", "decay", "lr_scheduler_type"],
    )
    schedule_options: dict[str, Any] = for_optimizer(
        {},
        "options of the schedule: keyword arguments of a class of torch.optim.lr_scheduler; power for "
        "polynomial; the keys of DeepSpeed's OneCycle and LRRangeTest for one-cycle and range-test",
        also=["scheduler_options"],
    )
    lr_end: float = for_optimizer(
        0.0, "learning rate at the end of a decay", ge=0.0, alias=["min_lr", "lr_min", "final_lr", "eta_min"]
    )
    decay_steps: float = for_optimizer(
        0.2, "steps of the decay of wsd; below 1: fraction of all steps", gt=0.0, also=["cooldown", "num_decay_steps"]
    )
    warmup: int = for_optimizer(
        20,
        "steps of linear warm-up",
        ge=0,
        alias=["warmup_steps", "warmup_iters", "num_warmup_steps"],
        also=["warmup_ratio"],
    )
    weight_decay: float = for_optimizer(
        0.01, "weight decay of all parameters that optim.no_decay does not exclude", ge=0.0
    )
    no_decay: choices.NoDecay = for_optimizer(
        "vectors",
        "parameters without weight decay: norms and biases, embeddings too, or none",
        also=["no_weight_decay"],
    )
    options: dict[str, Any] = for_optimizer(
        {}, "additional keyword arguments of the optimizer, such as {betas = [0.9, 0.95]}", also=["betas", "momentum"]
    )
    groups: Annotated[list[dict[str, Any]], AfterValidator(_check_groups)] = for_optimizer(
        [],
        'groups of parameters with other settings, of which the first match counts: [{match = "*.norm.*", '
        "weight_decay = 0.0}]; keys: lr, lr_scale, weight_decay, optimizer, and options of that optimizer",
        also=["param_groups", "parameter_groups"],
    )
