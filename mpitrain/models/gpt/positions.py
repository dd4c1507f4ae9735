"""Positions of tokens: rotary, in attention, and learned, beside the embedding; and documents that are kept apart.

Between the blocks of a model of documents there goes a pair: the stream of features, and of each token whether it ends
a document. The embedding begins it, and the last block gives the stream alone.

    token        a b . c d e . f          . ends a document, and belongs to it
    end          0 0 1 0 0 0 1 0
    document     0 0 0 1 1 1 1 2
    place        0 1 2 0 1 2 3 0
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from mpitrain.errors import refusal
from mpitrain.models.earlier import Earlier, EarlierSlices, LooksBack
from mpitrain.models.losses import widened

Stream: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"  # features, or with the ends of documents


class BeginPair:
    """A forward hook of an embedding: its output becomes a pair with the tokens that end a document.

    Args:
        token: Which one does.
    """

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> Stream:
        return output, (args[0] == self.token).to(torch.uint8)


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
