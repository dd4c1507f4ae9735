"""Causal self-attention, whose query heads may share the heads of keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from mpitrain.models.gpt.documents import State, ends_of, seen_inside
from mpitrain.models.gpt.form import Form
from mpitrain.models.gpt.positions import rotate


class Attention(nn.Module):
    """Causal self-attention. q, k and v come from one linear layer, whose output is heads of q, then of k, then of v.

    Args:
        width: Features of a token, a multiple of heads; width / heads is even.
        heads: Of queries.
        dropout: Of attention weights and of the output.
        form: Positions, bias, heads of keys and values.

    Attributes:
        num_key_value_groups: Query heads for each head of keys and values. The number of heads itself is read from
            the width of `qkv`, so that one that holds a part of them works unchanged.
    """

    def __init__(self, width: int, heads: int, dropout: float, form: Form = Form()) -> None:
        super().__init__()
        kv_heads = form.kv_heads or heads
        self.head_dim = width // heads
        self.num_key_value_groups = heads // kv_heads
        self.rope_base = form.rope_base if form.positions == "rotary" else None
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.head_dim, bias=form.bias or form.qkv_bias)
        self.out = nn.Linear(width, width, bias=form.bias)
        self.weights_dropout = dropout
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, ends: torch.Tensor | None = None) -> torch.Tensor:
        """x: [batch, sequence, width]. ends: of documents, [batch, sequence], where they are kept apart."""
        q, k, v = self._projections(x)
        return self._mixed(q, k, v, None if ends is None else seen_inside(ends.long(), ends.shape[1]))

    def forward_slice(
        self, x: torch.Tensor, past: Sequence[State], ends: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, State]:
        """As `forward`, for a slice of the sequence that attends to earlier slices too.

        A state is the slice's k and v, [batch, heads of keys and values, slice, head_dim], and the ends of documents,
        [batch, 1, slice], where they are kept apart.
        """
        before, length = sum(state[0].shape[2] for state in past), x.shape[1]
        q, k, v = self._projections(x, before)
        if ends is None:
            seen = torch.ones(length, before + length, dtype=torch.bool, device=x.device).tril(before)
            state: State = (k, v)
        else:
            seen = seen_inside(ends_of([state[2][:, 0] for state in past], ends), length)
            state = (k, v, ends[:, None].to(k.dtype))
        every_k, every_v = (torch.cat([*(state[i] for state in past), own], dim=2) for i, own in enumerate((k, v)))
        return self._mixed(q, every_k, every_v, seen), state

    def _mixed(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        """The output. seen: which keys each query sees; None: all up to its own."""
        if self.num_key_value_groups > 1:
            k, v = (t.repeat_interleave(self.num_key_value_groups, dim=1) for t in (k, v))
        mixed = functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=seen,
            dropout_p=self.weights_dropout if self.training else 0.0,
            is_causal=seen is None,
        )
        return self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))

    def _projections(self, x: torch.Tensor, first: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v, each [batch, heads, sequence, head_dim], of positions from `first` on."""
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))  # [batch, sequence, heads of q, k and v, head_dim]
        groups = self.num_key_value_groups
        shared = heads.shape[2] // (groups + 2)
        turned, v = heads[:, :, :-shared], heads[:, :, -shared:]
        if self.rope_base is not None:
            turned = rotate(turned, first, self.rope_base)
        q, k = turned.transpose(1, 2).split([groups * shared, shared], dim=1)
        return q, k, v.transpose(1, 2)
