"""Settings of the model and of its training: what is computed, whatever the number of ranks."""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from mpitrain.choices import RESNET_LAYERS, Decay, Model, Precision, one_of
from mpitrain.config.section import Section, setting


class ModelSection(Section):
    """[model]"""

    name: Model = setting("gpt", "a model of mpitrain.models")
    factory: str = setting("", "package.module:function of your own model, instead of model.name")
    layers: int = setting(
        2,
        f"blocks (gpt), hidden layers (mlp) or {'|'.join(map(str, RESNET_LAYERS))} (resnet)",
        ge=1,
        also=["num_layers", "n_layer", "depth", "num_hidden_layers"],
    )
    width: int = setting(
        128,
        "features per token (gpt), per layer (mlp), of the stem (resnet)",
        ge=1,
        also=["hidden_size", "n_embd", "d_model", "dim"],
    )
    heads: int = setting(4, "attention heads (gpt)", ge=1, also=["num_heads", "n_head", "num_attention_heads"])
    sequence: int = setting(
        128, "tokens per sample", ge=1, also=["sequence_length", "seq_len", "seq_length", "block_size", "context"]
    )
    dropout: float = setting(0.0, "dropout probability (gpt, mlp)", ge=0.0, lt=1.0)
    compile: bool = setting(
        False, "compile the model's blocks with torch.compile: the first steps take longer", also=["torch_compile"]
    )
    options: dict[str, Any] = setting({}, "further keyword arguments for model.factory")

    @model_validator(mode="after")
    def _fits_the_model(self) -> ModelSection:
        if self.name == "gpt" and not self.factory and self.width % self.heads:
            raise ValueError(
                f"model.width {self.width} is not a multiple of model.heads {self.heads}; "
                f"set model.width to {-(-self.width // self.heads) * self.heads}"
            )
        if self.name == "resnet" and not self.factory and self.layers not in RESNET_LAYERS:
            raise ValueError(f"model.layers {self.layers}: a resnet has {one_of(RESNET_LAYERS)}; set one of these")
        return self


class TrainSection(Section):
    """[train]"""

    steps: int = setting(300, "optimizer steps in the whole run", ge=0, also=["max_steps", "iterations", "epochs"])
    batch: int = setting(
        32,
        "global batch in samples, whatever the number of ranks",
        ge=1,
        also=["batch_size", "global_batch_size", "train_batch_size"],
    )
    microbatch: int = setting(
        0,
        "samples per rank and forward pass; 0: the rank's whole share",
        ge=0,
        also=["micro_batch_size", "microbatch_size", "train_micro_batch_size_per_gpu"],
    )
    precision: Precision = setting("fp32", "precision of forward and backward", also=["dtype"])
    clip: float = setting(
        1.0,
        "largest global gradient norm; 0: no clipping",
        ge=0.0,
        also=["grad_clip", "gradient_clipping", "max_grad_norm", "clip_grad"],
    )
    recompute: bool = setting(
        False,
        "recompute block activations in backward instead of keeping them",
        also=["activation_checkpointing", "gradient_checkpointing"],
    )
    evaluate_every: int = setting(
        100, "steps between evaluations on held-out data; 0: at the end", ge=0, also=["eval_every", "eval_interval"]
    )
    evaluate_samples: int = setting(256, "held-out samples per evaluation, at most", ge=1)


class OptimSection(Section):
    """[optim]"""

    name: str = setting(
        "adamw", "adamw, sgd, any class of torch.optim, or package.module:Class of your own", also=["optimizer"]
    )
    lr: float = setting(2e-3, "peak learning rate", gt=0.0, also=["learning_rate"])
    schedule: Decay = setting("cosine", "decay after the warm-up", also=["scheduler", "lr_scheduler", "decay"])
    warmup: int = setting(20, "steps of linear warm-up", ge=0, also=["warmup_steps", "warmup_iters"])
    weight_decay: float = setting(0.01, "weight decay of tensors of two or more dimensions", ge=0.0)
    options: dict[str, Any] = setting(
        {}, "further keyword arguments of the torch optimizer", also=["betas", "momentum"]
    )
