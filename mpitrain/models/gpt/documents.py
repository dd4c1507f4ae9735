"""Documents that follow each other in a sequence, and are kept apart.

Between the blocks there goes a pair then: the stream of features, and of each token whether it ends a document. The
embedding begins it, and the last block gives the stream alone.

    token        a b . c d e . f          . ends a document, and belongs to it
    end          0 0 1 0 0 0 1 0
    document     0 0 0 1 1 1 1 2
    place        0 1 2 0 1 2 3 0
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import nn

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


def numbers_of_documents(ends: torch.Tensor) -> torch.Tensor:
    """The number of each token's document, from the ends of documents, both [batch, tokens] and int64."""
    return ends.cumsum(1) - ends


def places_in_documents(ends: torch.Tensor) -> torch.Tensor:
    """The place of each token in its document, from the ends of documents, both [batch, tokens] and int64."""
    places = torch.arange(ends.shape[1], device=ends.device).expand_as(ends)
    follows = torch.cat([torch.zeros_like(ends[:, :1]), ends[:, :-1]], 1)  # the token before it is an end
    return places - (places * follows).cummax(1).values


def seen_inside(ends: torch.Tensor, length: int) -> torch.Tensor:
    """Which tokens the last `length` ones see: those of their document up to themselves, [batch, 1, length, tokens]."""
    number, before = numbers_of_documents(ends), ends.shape[1] - length
    same = number[:, before:, None] == number[:, None, :]
    return same.tril(before).unsqueeze(1)
