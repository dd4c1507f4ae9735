"""The parameters of a GPT in Hugging Face's GPT-2 and Llama: their names, and how they lie there.

Mistral's, Qwen2's and Qwen3's are named as Llama's; of Qwen2's linear layers q, k and v alone have a bias, and Qwen3's
norms of queries and keys have a number for each feature of a head, in the order of the features.

    here                     GPT-2                                  Llama
    qkv [q + k + v, width]   c_attn [width, q + k + v]: transposed  q_proj, k_proj, v_proj [features, width]
    rotary pairs             -                                      features i and i + head_dim / 2, here 2i and 2i + 1
    the other linear layers  transposed (Conv1D)                    as here

Turning the pairs of a head into neighbours is a permutation of the rows of q and k, the same for both, so that their
products stay what they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_BUFFERS = re.compile(r"(^|\.)(attn\.(bias|masked_bias)|rotary_emb\.inv_freq)$")  # written by older versions
_PREFIX = {"gpt2": "transformer.", "llama": "model.", "qwen2": "model.", "qwen3": "model."}
_HEAD = "lm_head.weight"
Shape = tuple[int, ...]


@dataclass(frozen=True)
class NamedPart:
    """A tensor of theirs, and which rows of one of ours it is.

    Attributes:
        theirs: Its name there.
        ours: The name of the parameter here.
        shape: Of theirs.
        first: The first row of ours.
        transposed: Whether theirs is ours transposed.
        head_dim: Of rotary features, whose pairs lie apart there; 0 where there are none.
    """

    theirs: str
    ours: str
    shape: Shape
    first: int = 0
    transposed: bool = False
    head_dim: int = 0

    def to_ours(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of ours, from the tensor of theirs."""
        if self.transposed:
            return tensor.t()
        if self.head_dim:
            return tensor.unflatten(0, (-1, 2, self.head_dim // 2)).transpose(1, 2).flatten(0, 2)
        return tensor

    def to_theirs(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of theirs, from the whole of ours."""
        if self.transposed:
            return tensor.t().contiguous()
        rows = tensor.narrow(0, self.first, self.shape[0])
        if self.head_dim:
            return rows.unflatten(0, (-1, self.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
        return rows.contiguous()


def named_parts(family: str, model: Mapping[str, Any], vocabulary: int) -> list[NamedPart]:
    """All tensors of a model there, in their order.

    Args:
        family: gpt2, llama, qwen2 or qwen3.
        model: The keys of [model]; hidden and max_positions are said, where they matter.
        vocabulary: Tokens.
    """
    parts = _gpt2(model, vocabulary) if family == "gpt2" else _llama(model, vocabulary)
    if not model["tied"]:
        parts.append(NamedPart(_HEAD, "head.weight", (vocabulary, model["width"])))
    return parts


def from_theirs(parts: Sequence[NamedPart], tensors: Mapping[str, torch.Tensor], tied: bool) -> dict[str, torch.Tensor]:
    """The parameters by their names here, from the tensors of all parts."""
    rows: dict[str, list[torch.Tensor]] = {}
    for part in parts:
        rows.setdefault(part.ours, []).append(part.to_ours(tensors[part.theirs]))
    ours = {name: pieces[0] if len(pieces) == 1 else torch.cat(pieces) for name, pieces in rows.items()}
    return ours | ({"head.weight": ours["embedding.weight"]} if tied else {})


def as_saved(family: str, names: Iterable[str], tied: bool) -> dict[str, str]:
    """What files call the tensors that count: {name of a whole model with its head: name in the files}.

    A model that was saved without its head has no prefix; buffers, and the head of a tied one, are left out.
    """
    prefix, found = _PREFIX[family], {}
    listed = [name for name in names if not _BUFFERS.search(name) and not (tied and name == _HEAD)]
    bare = not any(name.startswith(prefix) for name in listed)
    for name in listed:
        found[prefix + name if bare and name != _HEAD else name] = name
    return found


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
            own = f"{here}attention.{norm}.weight"
            parts.append(NamedPart(f"{there}self_attn.{norm}.weight", own, (head_dim,), head_dim=head_dim))
        for theirs, ours in (("input_layernorm", "attention_norm"), ("post_attention_layernorm", "mlp_norm")):
            parts.append(NamedPart(f"{there}{theirs}.weight", f"{here}{ours}.weight", (width,)))
    return [*parts, NamedPart("model.norm.weight", "norm.weight", (width,))]
