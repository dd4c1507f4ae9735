"""A decoder-only transformer (GPT-2: Radford et al. 2019) over bytes or tokens.

    tokens -> embedding -> dropout -> [ + attention(norm) -> + mlp(norm) ] x layers -> norm -> head -> scores
                  \\________________________ one tensor, tied __________________________/

Positions are rotary (Su et al. 2021), not learned: they need no parameter beside the embedding in the first
pipeline stage, no table that ends at some length, and on the default data they learn faster.

The model knows no parallelism, but is laid out for it: the forward pass is its blocks in order, and the linear
layers to be split are listed (`tensor_plan`). The output of `qkv` is laid out [3, heads, head_dim], and the number
of heads is read from its width, so a `qkv` that holds a part of the heads works unchanged.

Weights come from torch's default generator: after the same `torch.manual_seed` they are the same on every rank.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch import nn
from torch.nn import functional

from mpitrain.models.losses import cross_entropy, widened
from mpitrain.models.task import BlockModel

INIT_STD = 0.02  # GPT-2
ROTARY_BASE = 10000.0

State: TypeAlias = "tuple[torch.Tensor, ...]"  # what later slices of a sequence need of an earlier one


class GPT(BlockModel):
    """tokens [batch, sequence], int64 or int32 -> scores [batch, sequence, vocabulary].

    The score at a position depends on that token and earlier ones only. width must be a multiple of heads and
    width / heads even; any sequence length works.
    """

    def __init__(self, vocabulary: int, layers: int, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False, device="meta")  # its own weight is never used
        self._initialise(layers)
        self.head.weight = self.embedding.weight
        self.criterion = cross_entropy

    def pipeline_blocks(self) -> list[tuple[str, nn.Module]]:
        """(name, module) in order; feeding tokens through them equals `model(tokens)`."""
        blocks = [(f"blocks.{index}", block) for index, block in enumerate(self.blocks)]
        begin: list[tuple[str, nn.Module]] = [("embedding", self.embedding), ("dropout", self.dropout)]
        return [*begin, *blocks, ("norm", self.norm), ("head", self.head)]

    def tensor_plan(self) -> dict[str, str]:
        """How each layer may be divided over ranks. `criterion` then has to take divided scores."""
        return {
            "embedding": "vocabulary",
            "blocks.*.attention.qkv": "column",
            "blocks.*.attention.out": "row",
            "blocks.*.mlp.up": "column",
            "blocks.*.mlp.down": "row",
            "head": "vocabulary",
        }

    def _initialise(self, layers: int) -> None:
        nn.init.normal_(self.embedding.weight, std=INIT_STD)
        for block in self.blocks:
            assert isinstance(block, TransformerBlock)
            # each layer adds to the residual stream twice: scaled so that its variance stays put with depth
            into_residual = INIT_STD / math.sqrt(2 * layers)
            for linear, std in (
                (block.attention.qkv, INIT_STD),
                (block.attention.out, into_residual),
                (block.mlp.up, INIT_STD),
                (block.mlp.down, into_residual),
            ):
                nn.init.normal_(linear.weight, std=std)
                nn.init.zeros_(linear.bias)


class TransformerBlock(nn.Module):
    """[batch, sequence, width] -> the same: attention, then the MLP, each on the normed stream and added to it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = FeedForward(width, dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))

    def forward_slice(self, x: torch.Tensor, past: list[State]) -> tuple[torch.Tensor, State]:
        """A slice of the sequence, after earlier ones. past: their states; also returns this one's."""
        mixed, state = self.attention.forward_slice(self.attention_norm(x), past)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), state


class Attention(nn.Module):
    """Causal self-attention. q, k and v come from one linear layer, whose output is [3, heads, head_dim]."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.weights_dropout = dropout
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self._projections(x)
        mixed = functional.scaled_dot_product_attention(
            q, k, v, dropout_p=self.weights_dropout if self.training else 0.0, is_causal=True
        )
        return self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))

    def forward_slice(self, x: torch.Tensor, past: list[State]) -> tuple[torch.Tensor, State]:
        """As `forward`, for a slice of the sequence that attends to earlier slices too. A state is their k and v."""
        before = sum(k.shape[2] for k, _ in past)
        q, k, v = self._projections(x, before)
        length = x.shape[1]
        seen = torch.ones(length, before + length, dtype=torch.bool, device=x.device).tril(before)
        mixed = functional.scaled_dot_product_attention(
            q,
            torch.cat([*(k for k, _ in past), k], dim=2),
            torch.cat([*(v for _, v in past), v], dim=2),
            attn_mask=seen,
            dropout_p=self.weights_dropout if self.training else 0.0,
        )
        return self.dropout(self.out(mixed.transpose(1, 2).flatten(2))), (k, v)

    def _projections(self, x: torch.Tensor, first: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v, each [batch, heads, sequence, head_dim], of positions from `first` on."""
        qkv = self.qkv(x).unflatten(-1, (3, -1, self.head_dim))  # [batch, sequence, 3, heads, head_dim]
        q, k = rotate(qkv[:, :, :2], first).transpose(1, 3).unbind(2)
        return q, k, qkv[:, :, 2].transpose(1, 2)


class FeedForward(nn.Module):
    """Two linear layers, four times as wide between them."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.activation = nn.GELU(approximate="tanh")
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.down(self.activation(self.up(x))))


def rotate(x: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Rotary positions, from `first` on: x [batch, sequence, ..., head_dim] -> the same, in x's dtype; head_dim even.

    Features 2i and 2i+1 are one complex number, turned by position * base^(-2i / head_dim). So the product of a
    query and a key depends on their distance alone. The angles are made anew on each call: that is little beside
    the block, and leaves no buffer to move or broadcast.
    """
    sequence, head_dim = x.shape[1], x.shape[-1]
    frequency = ROTARY_BASE ** (torch.arange(0, head_dim, 2, device=x.device, dtype=torch.float32) / -head_dim)
    position = torch.arange(first, first + sequence, device=x.device, dtype=torch.float32)
    angle = torch.outer(position, frequency)
    angle = angle.view(sequence, *[1] * (x.dim() - 3), head_dim // 2)
    turn = torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(torch.view_as_complex(widened(x).unflatten(-1, (-1, 2))) * turn).flatten(-2).to(x.dtype)
