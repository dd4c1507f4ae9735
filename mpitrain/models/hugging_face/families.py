"""How the models of known families are cut into stages and divided over tensor ranks, on transformers' own modules.

    gpt2       transformer.wte, .wpe, .drop, .h.*, .ln_f, lm_head
    llama      model.embed_tokens, .layers.*, .norm, lm_head          (mistral, qwen2 and qwen3 are laid out alike)

Between stages goes the hidden state alone: positions, and what rotary embeddings make of them, follow from its shape,
and no mask is needed, because all tokens count and attention is causal by itself. For text that grows, blocks have
`forward_cached`, as ours have: a state is keys and values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn

from mpitrain.errors import InputError
from mpitrain.models.earlier import Earlier, EarlierSlices, State, seen_before
from mpitrain.models.hugging_face.facade import Facade

Blocks = list[tuple[str, nn.Module]]
CACHE_NAMES = ("cache", "past_key_values", "past_key_value", "layer_past")  # of transformers, the newest first


@dataclass(frozen=True)
class Family:
    """What is known of the causal language models of one layout.

    Attributes:
        blocks: The model's blocks under their names, in order: fed with tokens they give its scores.
        plan: How its layers may be divided over the ranks of the tensor axis.
    """

    blocks: Callable[[Any], Blocks]
    plan: Mapping[str, str]


class Cache:
    """What an attention layer of transformers asks for earlier keys and values, and tells its own.

    Args:
        earlier: The positions before, whose state is keys and values, [batch, heads, positions, head_dim].
    """

    def __init__(self, earlier: Earlier) -> None:
        self._earlier = earlier

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> State:
        """Take the keys and values of new positions; returns those of all."""
        return self._earlier.add((keys, values))

    def of(self, layer: nn.Module, x: torch.Tensor) -> dict[str, Any]:
        """The arguments of a layer that is given the new positions x [batch, positions, width]."""
        seen = seen_before(self._earlier.length, x.shape[1], x.device)
        mask = None if seen is None else seen[None, None]
        return {_name_of_cache(type(layer).forward): self, "use_cache": True, "attention_mask": mask}


@cache
def _name_of_cache(forward: Callable[..., Any]) -> str:
    """Return the name that this version of transformers gives the cache in the arguments of a layer."""
    accepted = inspect.signature(forward).parameters
    for name in CACHE_NAMES:
        if name in accepted:
            return name
    raise InputError(
        f"{forward.__qualname__} of the installed transformers takes none of {', '.join(CACHE_NAMES)}; "
        "install a version of transformers that this version of mpitrain knows"
    )


class PositionsAdded(Facade):
    """An embedding of positions, in order, added to a hidden state [batch, sequence, width]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward_cached(x, EarlierSlices([]))

    def forward_cached(self, x: torch.Tensor, earlier: Earlier) -> torch.Tensor:
        """As `forward`, for positions after earlier ones; of a state the length alone matters."""
        positions: torch.Tensor = self.inner(_positions(x, earlier.length))
        earlier.add((x.new_empty(len(x), 1, x.shape[1], 0),))
        return x + positions


class HiddenState(Facade):
    """A layer of which the hidden state alone is wanted."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _hidden(self.inner(x))

    def forward_cached(self, x: torch.Tensor, earlier: Earlier) -> torch.Tensor:
        """As `forward`, for positions after earlier ones."""
        return _hidden(self.inner(x, **Cache(earlier).of(self.inner, x)))


class RotaryLayer(Facade):
    """A layer that is told the rotary embeddings of its positions.

    Args:
        module: The layer.
        rotary: Makes cosines and sines of positions; it has no parameters, and brings its numbers to where x is.
    """

    def __init__(self, module: nn.Module, rotary: nn.Module) -> None:
        super().__init__(module)
        self.__dict__["_rotary"] = rotary  # shared by all layers, and no part of any

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = _positions(x)
        turned = self.__dict__["_rotary"](x, position_ids=positions)
        return _hidden(self.inner(x, attention_mask=None, position_ids=positions, position_embeddings=turned))

    def forward_cached(self, x: torch.Tensor, earlier: Earlier) -> torch.Tensor:
        """As `forward`, for positions after earlier ones."""
        positions, how = _positions(x, earlier.length), Cache(earlier).of(self.inner, x)
        turned = self.__dict__["_rotary"](x, position_ids=positions)
        return _hidden(self.inner(x, position_ids=positions, position_embeddings=turned, **how))


def _gpt2_blocks(model: Any) -> Blocks:
    body = model.transformer
    layers = [(f"transformer.h.{number}", HiddenState(layer)) for number, layer in enumerate(body.h)]
    begin: Blocks = [("transformer.wte", body.wte), ("transformer.wpe", PositionsAdded(body.wpe))]
    return [
        *begin,
        ("transformer.drop", body.drop),
        *layers,
        ("transformer.ln_f", body.ln_f),
        ("lm_head", model.lm_head),
    ]


def _rotary_blocks(model: Any) -> Blocks:
    body = model.model
    layers = [(f"model.layers.{n}", RotaryLayer(layer, body.rotary_emb)) for n, layer in enumerate(body.layers)]
    return [("model.embed_tokens", body.embed_tokens), *layers, ("model.norm", body.norm), ("lm_head", model.lm_head)]


def _positions(x: torch.Tensor, first: int = 0) -> torch.Tensor:
    return torch.arange(first, first + x.shape[1], device=x.device).unsqueeze(0)


def _hidden(output: Any) -> torch.Tensor:
    """The hidden state, which some versions of transformers give in a tuple."""
    state: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return state


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
FAMILIES: Mapping[str, Family] = {
    "gpt2": _GPT2,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _QWEN3,
}
