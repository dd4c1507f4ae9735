"""Positions of tokens: rotary, in attention, and learned, beside the embedding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from mpitrain.errors import refusal
from mpitrain.models.earlier import Earlier, EarlierSlices, State
from mpitrain.models.gpt.documents import Stream, places_in_documents
from mpitrain.models.losses import widened


class LearnedPositions(nn.Module):
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

    def forward_slice(self, x: Stream, past: Sequence[State]) -> tuple[Stream, State]:
        """A slice of the sequence, after earlier ones. past: their states; also returns this one's."""
        earlier = EarlierSlices(past)
        return self.forward_cached(x, earlier), earlier.state

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
