"""A decoder-only transformer over bytes or tokens: by its settings GPT-2 (Radford et al. 2019) or Llama (Touvron et al.
2023).

    tokens -> embedding (+ positions) -> dropout -> [ + attention(norm) -> + mlp(norm) ] x layers -> norm -> head
                  \\______________________________ one tensor, where tied ___________________________________/

Positions are rotary by default: they need no parameter beside the embedding in the first pipeline stage, no table that
ends at some length, and on the default data they learn faster.

The model knows no parallelism, but is laid out for it: the forward pass is its blocks in order, and the linear
layers to be split are listed (`tensor_plan`).

Weights come from torch's default generator: after the same `torch.manual_seed` they are the same on every rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from mpitrain.errors import refusal
from mpitrain.models.earlier import Earlier, EarlierSlices, LooksBack, seen_before
from mpitrain.models.losses import cross_entropy, widened
from mpitrain.models.task import BlockModel

INIT_STD = 0.02  # GPT-2
Stream: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"  # features, or with the ends of documents
_MULTIPLE = 64  # features, of a derived width of a SwiGLU


@dataclass(frozen=True)
class Form:
    """The choices in which transformer blocks differ. The defaults are GPT-2's, with rotary positions.

    Attributes:
        norm: layernorm, or rmsnorm (Zhang and Sennrich 2019).
        norm_eps: What a norm adds to the variance.
        positions: rotary (Su et al. 2021), or learned: a table beside the embedding.
        rope_base: Of rotary positions, the base of the wavelengths.
        mlp: gelu (its tanh form), or swiglu (Shazeer 2020).
        hidden: Features inside the MLP; 0: see `hidden_features`.
        kv_heads: Heads of keys and values, which as many query heads each share (Ainslie et al. 2023); 0: as heads.
        bias: Whether linear layers and LayerNorms have one.
        qkv_bias: Whether the layer of queries, keys and values has one, though the others have none (Qwen2's).
        qk_norm: Whether the queries and the keys of each head are normed, by RMSNorm, before they are turned (Qwen3's).
    """

    norm: str = "layernorm"
    norm_eps: float = 1e-5
    positions: str = "rotary"
    rope_base: float = 10000.0
    mlp: str = "gelu"
    hidden: int = 0
    kv_heads: int = 0
    bias: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False

    def make_norm(self, width: int) -> nn.Module:
        """A norm over the features of a token."""
        if self.norm == "rmsnorm":
            return nn.RMSNorm(width, eps=self.norm_eps)
        return nn.LayerNorm(width, eps=self.norm_eps, bias=self.bias)

    def hidden_features(self, width: int) -> int:
        """Features inside the MLP: four times the width, or for a SwiGLU, which has a third matrix, as many numbers."""
        if self.hidden:
            return self.hidden
        return -(-8 * width // (3 * _MULTIPLE)) * _MULTIPLE if self.mlp == "swiglu" else 4 * width


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
        norms = (nn.RMSNorm(self.head_dim, eps=form.norm_eps) if form.qk_norm else None for _ in range(2))
        self.q_norm, self.k_norm = norms
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
        dropout = self.weights_dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, seen, dropout, seen is None and positions > 1)
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


class TransformerBlock(LooksBack):
    """[batch, sequence, width] -> the same: attention, then the MLP, each on the normed stream and added to it.

    Args:
        width: Features of a token.
        heads: Of attention.
        dropout: Of attention weights, and of what is added to the stream.
        form: What it is made of.
        last: Of documents that are kept apart, give the stream without their ends.
    """

    def __init__(self, width: int, heads: int, dropout: float, form: Form = Form(), last: bool = False) -> None:
        super().__init__()
        self.attention_norm = form.make_norm(width)
        self.attention = Attention(width, heads, dropout, form)
        self.mlp_norm = form.make_norm(width)
        self.mlp = FeedForward(width, form.hidden_features(width), dropout, form.bias, gated=form.mlp == "swiglu")
        self.last = last

    def forward(self, x: Stream) -> Stream:
        stream, ends = x if isinstance(x, tuple) else (x, None)
        stream = stream + self.attention(self.attention_norm(stream), ends)
        return self._with_ends(stream + self.mlp(self.mlp_norm(stream)), ends)

    def forward_cached(self, x: Stream, earlier: Earlier) -> Stream:
        """As `forward`, for positions after earlier ones."""
        stream, ends = x if isinstance(x, tuple) else (x, None)
        stream = stream + self.attention.forward_cached(self.attention_norm(stream), earlier, ends)
        return self._with_ends(stream + self.mlp(self.mlp_norm(stream)), ends)

    def _with_ends(self, stream: torch.Tensor, ends: torch.Tensor | None) -> Stream:
        return stream if ends is None or self.last else (stream, ends)


class FeedForward(nn.Module):
    """Two linear layers with a GELU between them; gated, SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, hidden: int, dropout: float, bias: bool, gated: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=bias) if gated else None
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up(x)
        inside = functional.gelu(up, approximate="tanh") if self.gate is None else functional.silu(self.gate(x)) * up
        return self.dropout(self.down(inside))


class GPT(BlockModel):
    """tokens [batch, sequence], int64 or int32 -> scores [batch, sequence, vocabulary].

    The score at a position depends on that token and earlier ones only. width must be a multiple of heads, heads one
    of form.kv_heads, and width / heads even; any sequence length works, with learned positions up to max_positions.

    Args:
        vocabulary: Tokens.
        layers: Blocks.
        width: Features of a token.
        heads: Of attention.
        dropout: Its probability.
        tied: The head has the embedding's weight.
        max_positions: Rows of the table of learned positions.
        form: What the blocks are made of.
        apart: The token that ends a document; attention then stays inside of documents, whose tokens are scored as if
            each were a sequence of its own. Between blocks go pairs then (see `documents`).
    """

    def __init__(
        self,
        vocabulary: int,
        layers: int,
        width: int,
        heads: int,
        dropout: float = 0.0,
        *,
        tied: bool = True,
        max_positions: int = 0,
        form: Form = Form(),
        apart: int | None = None,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = LearnedPositions(max_positions, width) if form.positions == "learned" else None
        self.dropout: nn.Module = nn.Dropout(dropout)
        ends = None if apart is None else layers - 1  # the block after which ends of documents are dropped
        blocks = (TransformerBlock(width, heads, dropout, form, last=index == ends) for index in range(layers))
        self.blocks = nn.ModuleList(blocks)
        self.norm, self._form = form.make_norm(width), form
        # of a tied head its own weight is never used
        self.head = nn.Linear(width, vocabulary, bias=False, device="meta" if tied else None)
        self._initialise(layers)
        if tied:
            self.head.weight = self.embedding.weight
        if apart is not None:
            self.embedding.register_forward_hook(partial(begin_pair, apart))
            self.dropout = OnStream(self.dropout)
        self.criterion = cross_entropy

    def pipeline_blocks(self) -> list[tuple[str, nn.Module]]:
        """(name, module) in order; feeding tokens through them equals `model(tokens)`."""
        blocks = [(f"blocks.{index}", block) for index, block in enumerate(self.blocks)]
        begin: list[tuple[str, nn.Module]] = [("embedding", self.embedding)]
        if self.positions is not None:
            begin.append(("positions", self.positions))
        return [*begin, ("dropout", self.dropout), *blocks, ("norm", self.norm), ("head", self.head)]

    def tensor_plan(self) -> dict[str, str]:
        """How each layer may be divided over ranks. `criterion` then has to take divided scores."""
        plan = {"embedding": "vocabulary", "head": "vocabulary"}
        plan |= {"blocks.*.attention.qkv": "column", "blocks.*.attention.out": "row"}
        plan |= {"blocks.*.mlp.up": "column", "blocks.*.mlp.down": "row"}
        if self._form.mlp == "swiglu":
            plan["blocks.*.mlp.gate"] = "column"
        if self._form.qk_norm:
            plan |= {"blocks.*.attention.q_norm": "heads", "blocks.*.attention.k_norm": "heads"}
        if self.positions is not None:
            plan["positions"] = "scatter"  # the table is added to whole sequences
        return plan

    def _initialise(self, layers: int) -> None:
        nn.init.normal_(self.embedding.weight, std=INIT_STD)
        for block in self.blocks:
            # each layer adds to the residual stream twice: scaled so that its variance stays put with depth
            into_residual = INIT_STD / math.sqrt(2 * layers)
            for name, linear in block.named_modules():
                if isinstance(linear, nn.Linear):
                    nn.init.normal_(linear.weight, std=into_residual if name.endswith(("out", "down")) else INIT_STD)
                    if linear.bias is not None:
                        nn.init.zeros_(linear.bias)
        if self.positions is not None:
            nn.init.normal_(self.positions.weight, std=INIT_STD)
        if not self.head.weight.is_meta:
            nn.init.normal_(self.head.weight, std=INIT_STD)


# -- Positions of tokens: rotary, in attention, and learned, beside the embedding; and documents that are kept apart
#
# Between the blocks of a model of documents there goes a pair: the stream of features, and of each token whether it
# ends a document. The embedding begins it, and the last block gives the stream alone.
#
#   token        a b . c d e . f          . ends a document, and belongs to it
#   end          0 0 1 0 0 0 1 0
#   document     0 0 0 1 1 1 1 2
#   place        0 1 2 0 1 2 3 0


def begin_pair(token: int, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> Stream:
    """Make a pair of an embedding's output and the places of the token that ends a document: a forward hook."""
    return output, (args[0] == token).to(torch.uint8)


class OnStream(nn.Module):
    """A module that works on the stream of features alone.

    Args:
        inner: It.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: tuple[torch.Tensor, torch.Tensor]) -> Stream:
        stream, ends = x
        return self.inner(stream), ends


def places_in_documents(ends: torch.Tensor) -> torch.Tensor:
    """The place of each token in its document, from the ends of documents, both [batch, tokens] and int64."""
    places = torch.arange(ends.shape[1], device=ends.device).expand_as(ends)
    follows = torch.cat([torch.zeros_like(ends[:, :1]), ends[:, :-1]], 1)  # the token before it is an end
    return places - (places * follows).cummax(1).values


def seen_inside(ends: torch.Tensor, length: int) -> torch.Tensor:
    """Which tokens the last `length` ones see: those of their document up to themselves, [batch, 1, length, tokens]."""
    number, before = ends.cumsum(1) - ends, ends.shape[1] - length  # of each token's document
    return (number[:, before:, None] == number[:, None, :]).tril(before).unsqueeze(1)


class LearnedPositions(LooksBack):
    """Adds a row of a table to each token, by its position; of documents that are kept apart, by that in its document.

    Args:
        positions: Rows of the table, the longest sequence there can be.
        width: Features of a token.
    """

    def __init__(self, positions: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(positions, width))

    def forward(self, x: Stream) -> Stream:
        return self.forward_cached(x, EarlierSlices([]))

    def forward_cached(self, x: Stream, earlier: Earlier) -> Stream:
        """As `forward`, for positions after earlier ones. A state has their number, and the ends of documents."""
        before = earlier.length
        if isinstance(x, tuple):
            stream, ends = x
            (every,) = earlier.add((ends[:, None].to(stream.dtype),))
            rows = functional.embedding(places_in_documents(every[:, 0].long())[:, before:], self.weight)
            return stream + rows, ends
        length = x.shape[1]
        if before + length > len(self.weight):
            raise refusal(
                f"a sequence of {before + length} tokens, and the model has learned positions for {len(self.weight)}; "
                "set model.sequence to that, or model.max_positions to more"
            )
        earlier.add((x.new_empty(len(x), 1, length, 0),))
        return x + self.weight[before : before + length]


def rotate(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Rotary positions: x [batch, sequence, heads, head_dim] -> the same, in x's dtype. turns: see `turns_of`."""
    numbers = torch.view_as_complex(widened(x).unflatten(-1, (-1, 2)))
    return torch.view_as_real(numbers * turns).flatten(-2).to(x.dtype)


def turns_of(first: int, sequence: int, head_dim: int, base: float, device: torch.device) -> torch.Tensor:
    """By what the features of positions from `first` on are turned: complex64 [sequence, 1, head_dim / 2].

    Features 2i and 2i+1 are one complex number, turned by position * base^(-2i / head_dim). So the product of a
    query and a key depends on their distance alone. The turns are made anew in each block: that is little beside it,
    and leaves no buffer to move or broadcast.
    """
    frequency = base ** (torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / -head_dim)
    position = torch.arange(first, first + sequence, device=device, dtype=torch.float32)
    angle = torch.outer(position, frequency).unsqueeze(1)
    return torch.polar(torch.ones_like(angle), angle)
