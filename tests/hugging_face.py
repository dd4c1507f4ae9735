"""Tiny transformers models in folders, as `save_pretrained` writes them."""

from __future__ import annotations

from pathlib import Path

import torch

VOCABULARY, POSITIONS = 256, 32
GPT2 = {"vocab_size": VOCABULARY, "n_positions": POSITIONS, "n_embd": 32, "n_layer": 2, "n_head": 4}
ROTARY = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": POSITIONS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def configuration(family: str, **changes):
    """Return a small configuration of a family of causal language models, without dropout."""
    import transformers

    if family == "gpt2":
        still = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return transformers.GPT2Config(**GPT2 | still | {"bos_token_id": 0, "eos_token_id": 0} | changes)
    kind = {"llama": "LlamaConfig", "mistral": "MistralConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}[family]
    more = {"head_dim": 8} if family == "qwen3" else {}
    return getattr(transformers, kind)(**ROTARY | more | {"bos_token_id": 0, "eos_token_id": 0} | changes)


def language_model(family: str, **changes):
    """Return a model with random weights, the same at each call, none of which is 0 or 1."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(configuration(family, **changes)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def save(folder: Path, family: str, **changes) -> Path:
    """Write a folder with config.json and model.safetensors."""
    language_model(family, **changes).save_pretrained(folder)
    return folder
