"""A transformer block, and the MLPs in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from mpitrain.models.earlier import Earlier, EarlierSlices, State
from mpitrain.models.gpt.attention import Attention
from mpitrain.models.gpt.documents import Stream
from mpitrain.models.gpt.form import Form


class TransformerBlock(nn.Module):
    """[batch, sequence, width] -> the same: attention, then the MLP, each on the normed stream and added to it.

    Args:
        width: Features of a token.
        heads: Of attention.
        dropout: Of attention weights, and of what is added to the stream.
        form: What it is made of.
        last: Of documents that are kept apart, give the stream without their ends.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        dropout: float,
        form: Form = Form(),
        last: bool = False,
    ) -> None:
        super().__init__()
        self.attention_norm = form.make_norm(width)
        self.attention = Attention(width, heads, dropout, form)
        self.mlp_norm = form.make_norm(width)
        hidden = form.hidden_features(width)
        make = GatedFeedForward if form.mlp == "swiglu" else FeedForward
        self.mlp = make(width, hidden, dropout, form.bias)
        self.last = last

    def forward(self, x: Stream) -> Stream:
        stream, ends = x if isinstance(x, tuple) else (x, None)
        stream = stream + self.attention(self.attention_norm(stream), ends)
        return self._with_ends(stream + self.mlp(self.mlp_norm(stream)), ends)

    def forward_slice(self, x: Stream, past: Sequence[State]) -> tuple[Stream, State]:
        """A slice of the sequence, after earlier ones. past: their states; also returns this one's."""
        earlier = EarlierSlices(past)
        return self.forward_cached(x, earlier), earlier.state

    def forward_cached(self, x: Stream, earlier: Earlier) -> Stream:
        """As `forward`, for positions after earlier ones."""
        stream, ends = x if isinstance(x, tuple) else (x, None)
        stream = stream + self.attention.forward_cached(self.attention_norm(stream), earlier, ends)
        return self._with_ends(stream + self.mlp(self.mlp_norm(stream)), ends)

    def _with_ends(self, stream: torch.Tensor, ends: torch.Tensor | None) -> Stream:
        return stream if ends is None or self.last else (stream, ends)


class FeedForward(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, width: int, hidden: int, dropout: float, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=bias)
        self.activation = nn.GELU(approximate="tanh")
        self.down = nn.Linear(hidden, width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.down(self.activation(self.up(x))))


class GatedFeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, hidden: int, dropout: float, bias: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=bias)
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.down(functional.silu(self.gate(x)) * self.up(x)))
