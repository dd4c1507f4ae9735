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

_SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class Facade(nn.Module):
    """Shares the tables of another module's children, parameters and buffers.

    What is put in the place of a child of either is the child of both. So a state has the names that transformers
    gives it, and what divides or replaces layers by their names does so in the module that computes.

    Args:
        module: In whose place it stands. Its own hooks are called as well.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for table in _SHARED:
            self.__dict__[table] = module.__dict__[table]
        self.__dict__["_inner"] = module  # as no child, or every name would begin with it
        self.training = module.training

    @property
    def inner(self) -> Any:
        """The module that computes, in the mode of this one."""
        inner = self.__dict__["_inner"]
        inner.training = self.training
        return inner

    def extra_repr(self) -> str:
        return f"in place of {type(self.__dict__['_inner']).__name__}"


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
    """A layer of which the hidden state alone is wanted.

    Args:
        module: The layer.
        rotary: Makes cosines and sines of positions, which the layer is told; it has no parameters, and brings its
            numbers to where x is. None: the layer asks for none.
    """

    def __init__(self, module: nn.Module, rotary: nn.Module | None = None) -> None:
        super().__init__(module)
        self.__dict__["_rotary"] = rotary  # shared by all layers, and no part of any

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._hidden(x, 0, {} if self.__dict__["_rotary"] is None else {"attention_mask": None})

    def forward_cached(self, x: torch.Tensor, earlier: Earlier) -> torch.Tensor:
        """As `forward`, for positions after earlier ones."""
        return self._hidden(x, earlier.length, Cache(earlier).of(self.inner, x))

    def _hidden(self, x: torch.Tensor, first: int, how: dict[str, Any]) -> torch.Tensor:
        """The hidden state, which some versions of transformers give in a tuple. first: the position of x."""
        if (rotary := self.__dict__["_rotary"]) is not None:
            positions = _positions(x, first)
            how |= {"position_ids": positions, "position_embeddings": rotary(x, position_ids=positions)}
        output = self.inner(x, **how)
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
