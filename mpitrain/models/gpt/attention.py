"""Causal self-attention, whose query heads may share the heads of keys and values."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from mpitrain.models.earlier import Earlier, EarlierSlices, seen_before
from mpitrain.models.gpt.documents import seen_inside
from mpitrain.models.gpt.form import Form
from mpitrain.models.gpt.positions import rotate, turns_of


class Attention(nn.Module):
    """Causal self-attention. q, k and v come from one linear layer, whose output is heads of q, then of k, then of v.

    Args:
        width: Features of a token, a multiple of heads; width / heads is even.
        heads: Of queries.
        dropout: Of attention weights and of the output.
        form: Positions, bias, heads of keys and values, norms of queries and keys.

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
        self.q_norm, self.k_norm = (form.make_qk_norm(self.head_dim) for _ in range(2))
        self.out = nn.Linear(width, width, bias=form.bias)
        self.weights_dropout = dropout
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, ends: torch.Tensor | None = None) -> torch.Tensor:
        """x: [batch, sequence, width]. ends: of documents, [batch, sequence], where they are kept apart."""
        q, k, v = self._projections(x, EarlierSlices([]))
        return self._mixed(q, k, v, None if ends is None else seen_inside(ends.long(), ends.shape[1]))

    def forward_cached(self, x: torch.Tensor, earlier: Earlier, ends: torch.Tensor | None = None) -> torch.Tensor:
        """As `forward`, for positions that attend to earlier ones too.

        A state is k and v, [batch, heads of keys and values, positions, head_dim], and the ends of documents,
        [batch, 1, positions], where they are kept apart.
        """
        before, length = earlier.length, x.shape[1]
        q, k, v = self._projections(x, earlier)
        if ends is None:
            k, v = earlier.add((k, v))
            return self._mixed(q, k, v, seen_before(before, length, x.device))
        k, v, every = earlier.add((k, v, ends[:, None].to(k.dtype)))
        return self._mixed(q, k, v, seen_inside(every[:, 0].long(), length))

    def _mixed(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        """The output. seen: which keys each query sees; None: all up to its own."""
        positions, shared = q.shape[2], k.shape[1]
        if positions == 1:  # a text that grows: queries of a group are as many positions, and nothing is repeated
            q = q.unflatten(1, (shared, -1)).flatten(2, 3)
        elif self.num_key_value_groups > 1:
            k, v = (t.repeat_interleave(self.num_key_value_groups, dim=1) for t in (k, v))
        mixed = functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=seen,
            dropout_p=self.weights_dropout if self.training else 0.0,
            is_causal=seen is None and positions > 1,
        )
        if positions == 1:
            return self.dropout(self.out(mixed.flatten(1)[:, None]))
        return self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))

    def _projections(self, x: torch.Tensor, earlier: Earlier) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v, each [batch, heads, sequence, head_dim], of positions after earlier ones."""
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))  # [batch, sequence, heads of q, k and v, head_dim]
        groups, sequence = self.num_key_value_groups, heads.shape[1]  # of x it may have been a part
        shared = heads.shape[2] // (groups + 2)
        turned, v = heads[:, :, :-shared], heads[:, :, -shared:]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = turned.split([groups * shared, shared], dim=2)
            turned = torch.cat([self.q_norm(q), self.k_norm(k)], 2)
        if self.rope_base is not None:
            turns = earlier.shared(turns_of, earlier.length, sequence, self.head_dim, self.rope_base, x.device)
            turned = rotate(turned, turns)
        q, k = turned.transpose(1, 2).split([groups * shared, shared], dim=1)
        return q, k, v.transpose(1, 2)
