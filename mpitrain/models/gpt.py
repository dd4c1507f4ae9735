r"""A decoder-only transformer on bytes or tokens, like GPT-2 (Radford et al. 2019) or Llama (Touvron et al. 2023).

    tokens -> embedding (+ positions) -> dropout -> [ + attention(norm) -> + mlp(norm) ] x layers -> norm -> head
                  \______________________________ one tensor, if tied _______________________________________/

Positions are rotary by default: they need no parameter next to the embedding in the first pipeline stage, no table with
a maximum length, and on the default data they learn faster.

The model contains no parallelism, but is prepared for it: the forward pass applies its blocks in order, and the linear
layers that can be divided are listed by `tensor_plan`.

Weights are drawn from torch's default generator: after the same `torch.manual_seed` they are equal on every rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from mpitrain.errors import refusal
from mpitrain.models.documents import (
    OnStream,
    Stream,
    attend_within_documents,
    document_mask,
    pair_with_ends,
    places_in_documents,
    split_pair,
)
from mpitrain.models.earlier import CausalBlock, EarlierSlices, EarlierState, causal_mask
from mpitrain.models.losses import cross_entropy, widen
from mpitrain.models.task import BlockModel

INIT_STD = 0.02  # GPT-2
_MULTIPLE = 64  # the default width of a SwiGLU is a multiple of this
_MOST_FACTORS = 4  # rotations of rotary positions that are kept


@dataclass(frozen=True)
class Form:
    """Design choices of transformer blocks. The defaults are GPT-2's, with rotary positions.

    Attributes:
        norm: layernorm, or rmsnorm (Zhang and Sennrich 2019).
        norm_eps: Number that a norm adds to the variance.
        positions: rotary (Su et al. 2021), or learned: a table next to the embedding.
        rope_base: Base of the wavelengths of rotary positions.
        mlp: gelu (its tanh form), or swiglu (Shazeer 2020).
        hidden: Features inside the MLP; 0 for the default of `hidden_features`.
        kv_heads: Heads of keys and values, each for several query heads (Ainslie et al. 2023); 0: one per query head.
        bias: If true, linear layers and LayerNorms have a bias.
        qkv_bias: If true, the layer of queries, keys and values has a bias even without `bias` (Qwen2).
        qk_norm: If true, queries and keys of each head get an RMSNorm before the rotary positions (Qwen3).
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
        """Return a norm over the features of a token."""
        if self.norm == "rmsnorm":
            return nn.RMSNorm(width, eps=self.norm_eps)
        return nn.LayerNorm(width, eps=self.norm_eps, bias=self.bias)

    def hidden_features(self, width: int) -> int:
        """Return the features inside the MLP: four times the width by default.

        For SwiGLU, which has a third matrix, the default is 8/3 of the width, rounded up, for about as many parameters.
        """
        if self.hidden:
            return self.hidden
        return -(-8 * width // (3 * _MULTIPLE)) * _MULTIPLE if self.mlp == "swiglu" else 4 * width


class Attention(nn.Module):
    """Causal self-attention. One linear layer computes q, k and v; its output has the heads of q, then of k, then of v.

    Args:
        width: Features of a token, a multiple of heads; width / heads is even.
        heads: Number of query heads.
        dropout: Probability of dropout of attention weights and of the output.
        form: Design choices: positions, bias, heads of keys and values, norms of queries and keys.

    Attributes:
        num_key_value_groups: Query heads per head of keys and values. The number of heads itself follows from the width
            of `qkv`, so a module with a part of the heads works unchanged.
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
        """Attend to earlier positions of a whole sequence.

        Args:
            x: Features [batch, sequence, width].
            ends: Nonzero for the token that ends a document, [batch, sequence] on the CPU; attention then does not
                cross documents.

        Returns:
            Features [batch, sequence, width].
        """
        q, k, v = self._project(x, EarlierSlices([]))
        return self._attend(q, k, v, None, ends)

    def forward_cached(self, x: torch.Tensor, earlier: EarlierState, ends: torch.Tensor | None = None) -> torch.Tensor:
        """Compute `forward` for positions that also attend to earlier ones.

        The state is k and v, [batch, heads of keys and values, positions, head_dim]; and, if attention does not cross
        documents, the ends of documents, [batch, 1, positions] on the CPU.

        Args:
            x: Features of the new positions, [batch, positions, width].
            earlier: State of the earlier positions.
            ends: Nonzero for the token that ends a document, [batch, positions] on the CPU, or None.
        """
        before, length = earlier.length, x.shape[1]
        q, k, v = self._project(x, earlier)
        if ends is None:
            k, v = earlier.add((k, v))
            return self._attend(q, k, v, causal_mask(before, length, x.device))
        k, v, every = earlier.add((k, v, ends[:, None].to(k.dtype)))
        every = every[:, 0]
        if length == 1:  # generation: one call for all samples
            return self._attend(q, k, v, document_mask(every.long(), 1).to(x.device, non_blocking=True))
        return self._attend(q, k, v, None, every)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        seen: torch.Tensor | None,
        ends: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the attention output.

        Args:
            q: Queries [batch, heads, positions, head_dim].
            k: Keys [batch, heads of keys and values, all positions, head_dim].
            v: Values, like k.
            seen: Mask of keys for each query; None for a causal mask.
            ends: Ends of documents [batch, all positions], if attention does not cross them and `seen` is None.
        """
        positions, shared = q.shape[2], k.shape[1]
        if positions == 1:  # generation: the queries of a group become positions, so nothing is repeated
            q = q.unflatten(1, (shared, -1)).flatten(2, 3)
        elif self.num_key_value_groups > 1:
            k, v = (t.repeat_interleave(self.num_key_value_groups, dim=1) for t in (k, v))
        dropout = self.weights_dropout if self.training else 0.0
        if ends is not None:
            mixed = attend_within_documents(q, k, v, ends, dropout)
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v, seen, dropout, seen is None and positions > 1)
        if positions == 1:
            return self.dropout(self.out(mixed.flatten(1)[:, None]))
        return self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))

    def _project(self, x: torch.Tensor, earlier: EarlierState) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k and v of positions that follow earlier ones, each [batch, heads, sequence, head_dim]."""
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))  # [batch, sequence, heads of q, k and v, head_dim]
        groups, sequence = self.num_key_value_groups, heads.shape[1]  # x may have been a part of the sequence
        shared = heads.shape[2] // (groups + 2)
        heads_qk, v = heads.split([heads.shape[2] - shared, shared], dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = heads_qk.split([groups * shared, shared], dim=2)
            heads_qk = torch.cat([self.q_norm(q), self.k_norm(k)], 2)
        if self.rope_base is not None:
            factors = earlier.shared(recent_factors, earlier.length, sequence, self.head_dim, self.rope_base, x.device)
            heads_qk = rotate(heads_qk, factors)
        q, k = heads_qk.transpose(1, 2).split([groups * shared, shared], dim=1)
        return q, k, v.transpose(1, 2)


class TransformerBlock(CausalBlock):
    """A pre-norm transformer block: attention, then the MLP, each applied to the normed stream and added to it.

    Args:
        width: Features of a token.
        heads: Number of query heads.
        dropout: Probability of dropout of attention weights, and of both additions to the stream.
        form: Design choices.
        last: If true and the input has ends of documents, return the stream without them.

    Shape:
        Input and output [batch, sequence, width].
    """

    def __init__(self, width: int, heads: int, dropout: float, form: Form = Form(), last: bool = False) -> None:
        super().__init__()
        self.attention_norm = form.make_norm(width)
        self.attention = Attention(width, heads, dropout, form)
        self.mlp_norm = form.make_norm(width)
        self.mlp = FeedForward(width, form.hidden_features(width), dropout, form.bias, gated=form.mlp == "swiglu")
        self.last = last

    def forward(self, x: Stream) -> Stream:
        stream, ends = split_pair(x)
        stream = stream + self.attention(self.attention_norm(stream), ends)
        return self._with_ends(stream + self.mlp(self.mlp_norm(stream)), ends)

    def forward_cached(self, x: Stream, earlier: EarlierState) -> Stream:
        """Compute `forward` for positions that follow earlier ones.

        Args:
            x: Stream of the new positions, with the ends of documents if the input has them.
            earlier: State of the earlier positions.
        """
        stream, ends = split_pair(x)
        stream = stream + self.attention.forward_cached(self.attention_norm(stream), earlier, ends)
        return self._with_ends(stream + self.mlp(self.mlp_norm(stream)), ends)

    def skip(self, x: Stream) -> Stream:
        """Return the output of a block that adds nothing to the stream (`mpitrain.parallel.layer_drop`)."""
        return self._with_ends(*split_pair(x))

    def _with_ends(self, stream: torch.Tensor, ends: torch.Tensor | None) -> Stream:
        return stream if ends is None or self.last else (stream, ends)


class FeedForward(nn.Module):
    """Two linear layers with a GELU between them; if gated, SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x))."""

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
    """A decoder-only language model: tokens [batch, sequence], int64 or int32 -> scores [batch, sequence, vocabulary].

    The score at a position depends only on its token and earlier ones. width must be a multiple of heads, heads a
    multiple of form.kv_heads, and width / heads even. Any sequence length works; with learned positions, up to
    max_positions.

    Args:
        vocabulary: Number of tokens in the vocabulary.
        layers: Number of blocks.
        width: Features of a token.
        heads: Number of query heads.
        dropout: Probability of dropout.
        tied: If true, the head shares the embedding's weight.
        max_positions: Rows in the table of learned positions.
        form: Design choices of the blocks.
        apart: Token that ends a document. Attention then does not cross documents, and the tokens of each document are
            scored as a separate sequence. Blocks then exchange pairs (see `pair_with_ends`).
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
        # the weight of a tied head is replaced below
        self.head = nn.Linear(width, vocabulary, bias=False, device="meta" if tied else None)
        self._initialise(layers)
        if tied:
            self.head.weight = self.embedding.weight
        if apart is not None:
            self.embedding.register_forward_hook(partial(pair_with_ends, apart))
            self.dropout = OnStream(self.dropout)
        self.criterion = cross_entropy

    def pipeline_blocks(self) -> list[tuple[str, nn.Module]]:
        """Return (name, module) in order; applying them to tokens one after the other equals `model(tokens)`."""
        blocks = [(f"blocks.{index}", block) for index, block in enumerate(self.blocks)]
        begin: list[tuple[str, nn.Module]] = [("embedding", self.embedding)]
        if self.positions is not None:
            begin.append(("positions", self.positions))
        return [*begin, ("dropout", self.dropout), *blocks, ("norm", self.norm), ("head", self.head)]

    def tensor_plan(self) -> dict[str, str]:
        """Return how each layer may be divided over tensor ranks. `criterion` must then accept divided scores."""
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
            # each layer adds to the residual stream twice; scaled so that its variance does not grow with depth
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


# -- Positions of tokens: rotary in attention, learned next to the embedding


class LearnedPositions(CausalBlock):
    """Learned positions: adds a row of a table to each token, by its position in the sequence, or in its document.

    The position in the document is used if the input has the ends of documents.

    Args:
        positions: Rows in the table, the length of the longest sequence.
        width: Features of a token.
    """

    def __init__(self, positions: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(positions, width))

    def forward(self, x: Stream) -> Stream:
        return self.forward_cached(x, EarlierSlices([]))

    def forward_cached(self, x: Stream, earlier: EarlierState) -> Stream:
        """Compute `forward` for positions that follow earlier ones.

        The state contains the number of positions; and, if attention does not cross documents, the ends of documents.

        Args:
            x: Stream of the new positions, with the ends of documents if the input has them.
            earlier: State of the earlier positions.
        """
        before = earlier.length
        if isinstance(x, tuple):
            stream, ends = x[0], x[1].cpu()
            (every,) = earlier.add((ends[:, None].to(stream.dtype),))
            places = places_in_documents(every[:, 0].long())[:, before:]
            return stream + functional.embedding(places.to(stream.device), self.weight), ends
        length = x.shape[1]
        if before + length > len(self.weight):
            raise refusal(
                f"a sequence has {before + length} tokens, but the model has {len(self.weight)} learned positions; "
                f"set model.sequence to {len(self.weight)}, or increase model.max_positions"
            )
        earlier.add((x.new_empty(len(x), 1, length, 0),))
        return x + self.weight[before : before + length]


def rotate(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions.

    Args:
        x: Queries or keys [batch, sequence, heads, head_dim].
        factors: Rotation of each position, from `rotary_factors`.

    Returns:
        Rotated x, of its shape and dtype.
    """
    numbers = torch.view_as_complex(widen(x).unflatten(-1, (-1, 2)))
    return torch.view_as_real(numbers * factors).flatten(-2).to(x.dtype)


_recent_factors: dict[tuple[int, int, int, float], torch.Tensor] = {}


def recent_factors(first: int, sequence: int, head_dim: int, base: float, device: torch.device) -> torch.Tensor:
    """Return a copy of `rotary_factors`, kept from earlier calls: they would cost 8 % of a small block's forward.

    Each block gets a copy, so the memory that it keeps for backward does not depend on the other blocks. Nothing is
    kept on devices, which hardly notice, and where tensors may have no values or belong to a transform: in dispatch
    modes, torch.compile and torch.func. The arguments are those of `rotary_factors`.
    """
    if (
        device.type != "cpu"
        or torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
    ):
        return rotary_factors(first, sequence, head_dim, base, device)
    key = first, sequence, head_dim, base
    factors = _recent_factors.get(key)
    if factors is None:
        factors = rotary_factors(first, sequence, head_dim, base, device)
        if len(_recent_factors) >= _MOST_FACTORS:
            _recent_factors.clear()
        _recent_factors[key] = factors
    return factors.clone()


def rotary_factors(first: int, sequence: int, head_dim: int, base: float, device: torch.device) -> torch.Tensor:
    """Return the rotations of rotary positions.

    Features 2i and 2i+1 form a complex number, which is rotated by the angle position * base^(-2i / head_dim). So the
    product of a query and a key depends only on their distance.

    Args:
        first: First position.
        sequence: Number of positions.
        head_dim: Features of a head.
        base: Base of the wavelengths.
        device: Device of the result.

    Returns:
        complex64 [sequence, 1, head_dim / 2].
    """
    frequency = base ** (torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / -head_dim)
    position = torch.arange(first, first + sequence, device=device, dtype=torch.float32)
    angle = torch.outer(position, frequency).unsqueeze(1)
    return torch.polar(torch.ones_like(angle), angle)
