"""Tiny models of transformers with random weights, and their training in plain torch."""

from __future__ import annotations

from pathlib import Path

import torch

from mpitrain.config.settings import Config
from mpitrain.data import SampleOrder, open_dataset

FAMILIES = ("gpt2", "llama")
SEQUENCE, VOCABULARY = 16, 260  # more than bytes have


def save_tiny(family: str, folder: Path, **options) -> torch.nn.Module:
    """Save a model with random weights large enough for distinct scores, and return it in evaluation mode."""
    import transformers

    torch.manual_seed(0)
    transformers.logging.disable_progress_bar()
    if family == "gpt2":
        shape = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 20, "n_inner": 72}
        rest = {"initializer_range": 0.1, "bos_token_id": 0, "eos_token_id": 0, "vocab_size": VOCABULARY}
        config = transformers.GPT2Config(**(shape | rest | options))
        model = transformers.GPT2LMHeadModel(config)
    else:
        shape = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
        rest = {"intermediate_size": 48, "initializer_range": 0.1, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-6}
        rope = {"rope_type": "default", "rope_theta": 500.0}
        name = family.capitalize()
        shape |= {"head_dim": 8} if family == "qwen3" else {}
        config = getattr(transformers, f"{name}Config")(**(shape | rest | {"rope_parameters": rope} | options))
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.eval().save_pretrained(folder, max_shard_size="30KB" if family == "llama" else "5GB")
    return model


def train_in_torch(model: torch.nn.Module, config: Config) -> list[float]:
    """Train a model of transformers in place on the batches of a run, with AdamW, and return the losses."""
    data = open_dataset(config.data.path, sequence=config.model.sequence)
    order = SampleOrder(len(data), config.run.seed)
    decayed = [p for p in model.parameters() if p.dim() >= 2], config.optim.weight_decay
    plain = [p for p in model.parameters() if p.dim() < 2], 0.0
    groups = [{"params": params, "weight_decay": decay} for params, decay in (decayed, plain)]
    optimizer = torch.optim.AdamW(groups, lr=config.optim.lr)
    losses = []
    for step in range(config.train.steps):
        x, y = map(torch.from_numpy, data.read(order.ids(step * config.train.batch, config.train.batch)))
        loss = torch.nn.functional.cross_entropy(model(x).logits.flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
