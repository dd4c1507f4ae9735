"""Attention within documents: several documents share a sequence, and a token sees only its own.

Blocks then exchange a pair: the stream of features, and for each token whether it ends a document. The embedding makes
the pair, and the last block returns only the stream.

    token        a b . c d e . f          . ends a document and is part of it
    end          0 0 1 0 0 0 1 0
    document     0 0 0 1 1 1 1 2
    place        0 1 2 0 1 2 3 0

A mask of all tokens would cost the square of the sequence. Instead, the sequences are cut into pieces, one after the
other, and each piece is one call of causal attention: the work is the sum of the squares of the documents' lengths.
Short neighbours share a piece of at most 64 tokens, which has a mask.

    tokens       [ document A          | B | C | D | document E       ]
    pieces       [ causal              | mask      | causal           ]

The lengths of documents are needed on the host, so ends of documents are in its memory even if the stream is not. A
device is waited for once per microbatch and pipeline stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from mpitrain.models.earlier import causal_mask

Stream: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"  # features, alone or with the ends of documents
_SHARED = 64  # tokens of short documents that share a call; on a core, 32 to 128 take about the same time


def pair_with_ends(token: int, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> Stream:
    """Pair an embedding's output with a mask of the token that ends a document. Used as a forward hook.

    Args:
        token: Token that ends a document.
        module: Embedding.
        args: Arguments of its forward: the tokens [batch, sequence].
        output: Output of its forward [batch, sequence, width].

    Returns:
        (output, uint8 [batch, sequence] on the CPU: 1 for the token that ends a document).
    """
    return output, (args[0] == token).to("cpu", torch.uint8)


def split_pair(x: Stream) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the stream, and the ends of documents on the CPU or None. An earlier pipeline stage sends both alike."""
    return (x[0], x[1].cpu()) if isinstance(x, tuple) else (x, None)


class OnStream(nn.Module):
    """A module applied to the stream of a pair (stream, ends of documents); the ends are unchanged.

    Args:
        inner: Module to apply.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: tuple[torch.Tensor, torch.Tensor]) -> Stream:
        stream, ends = x
        return self.inner(stream), ends


def places_in_documents(ends: torch.Tensor) -> torch.Tensor:
    """Return the position of each token in its document.

    Args:
        ends: 1 for the token that ends a document, else 0, int64 [batch, tokens].

    Returns:
        Positions from 0, int64 [batch, tokens].
    """
    places = torch.arange(ends.shape[1], device=ends.device).expand_as(ends)
    follows = torch.cat([torch.zeros_like(ends[:, :1]), ends[:, :-1]], 1)  # the token before it is an end
    return places - (places * follows).cummax(1).values


def document_mask(ends: torch.Tensor, length: int) -> torch.Tensor:
    """Return the attention mask of the last `length` tokens: causal, and within each document.

    Args:
        ends: 1 for the token that ends a document, else 0, int64 [batch, tokens].
        length: Number of tokens that attend.

    Returns:
        True where a token attends to another, bool [batch, 1, length, tokens].
    """
    number, before = ends.cumsum(1) - ends, ends.shape[1] - length  # number of each token's document
    return (number[:, before:, None] == number[:, None, :]).tril(before).unsqueeze(1)


class DocumentPiece(NamedTuple):
    """Consecutive tokens that one call of attention computes: one document, or short ones that follow each other.

    Attributes:
        queries: Tokens that attend.
        keys: Tokens that they attend to: the same, after the document's tokens in earlier slices.
        skipped: Tokens of earlier slices before these, to which no token attends.
        ends: Ends of documents of the keys [1, keys] if the piece has several documents, else None.
        number: Number of pieces of this size next to each other, each one document.
    """

    queries: int
    keys: int
    skipped: int
    ends: torch.Tensor | None
    number: int = 1

    def mask(self, device: torch.device) -> torch.Tensor | None:
        """Return the attention mask [..., queries, keys]; None for a whole document, or for one token."""
        if self.ends is None:
            return causal_mask(self.keys - self.queries, self.queries, device)
        return document_mask(self.ends.long(), self.queries).to(device, non_blocking=True)


def cut_into_pieces(ends: torch.Tensor, length: int) -> list[DocumentPiece]:
    """Cut the last `length` tokens of each sample into pieces. Those of the next sample follow.

    Args:
        ends: Nonzero for the token that ends a document, [batch, tokens] on the CPU. Without values (a fake tensor),
            each sample is one document.
        length: Number of tokens that attend; the others are in earlier slices.
    """
    pieces: list[DocumentPiece] = []
    for row, borders in zip(ends, _borders(ends), strict=True):
        previous = 0
        for begin, end, several in _runs(borders, ends.shape[1] - length, ends.shape[1]):
            queries = min(end - begin, end - ends.shape[1] + length)
            piece = DocumentPiece(queries, end - begin, begin - previous, row[None, begin:end] if several else None)
            previous = end
            equal = bool(pieces) and pieces[-1][:3] == piece[:3] and pieces[-1].ends is None
            if equal and not several and not piece.skipped:
                piece = piece._replace(number=pieces.pop().number + 1)
            pieces.append(piece)
    return pieces


def _borders(ends: torch.Tensor) -> list[list[int]]:
    """Return for each sample the number of tokens up to each end of a document."""
    try:
        values = ends.detach().bool().numpy()  # NumPy has no bf16
    except RuntimeError:  # FakeTensor, which has no values
        return [[]] * len(ends)
    return [(row.nonzero()[0] + 1).tolist() for row in values]


def _runs(borders: list[int], before: int, tokens: int) -> Iterator[tuple[int, int, bool]]:
    """Yield (begin, end, whether several documents) of each piece with a token from `before` on, in order."""
    first = max((border for border in borders if border <= before), default=0)
    begin, several = first, False
    for lo, hi in pairwise([first, *(border for border in borders if before < border < tokens), tokens]):
        if lo > begin and hi - begin > _SHARED:
            yield begin, lo, several
            begin, several = lo, False
        several = several or lo > begin
    yield begin, tokens, several


def attend_within_documents(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, dropout: float
) -> torch.Tensor:
    """Compute causal attention that does not cross documents.

    Args:
        q: Queries of the last tokens of each sample, [batch, heads, length, head_dim].
        k: Keys of all tokens, [batch, heads, tokens, head_dim].
        v: Values of all tokens, like k.
        ends: Nonzero for the token that ends a document, [batch, tokens] on the CPU.
        dropout: Probability of dropout of attention weights.

    Returns:
        Mixed values, shaped like q.
    """
    if torch.compiler.is_compiling():  # sizes depend on the data, so each would be compiled anew
        return torch.compiler.disable(_attend_in_pieces)(q, k, v, ends, dropout)
    return _attend_in_pieces(q, k, v, ends, dropout)


def _attend_in_pieces(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, dropout: float
) -> torch.Tensor:
    batch, _, length, _ = q.shape
    pieces = cut_into_pieces(ends, length)
    flat_q, flat_k, flat_v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))  # [tokens, heads, head_dim]
    # split and cat, because the gradient of a slice is as large as the whole tensor
    queries = flat_q.split([piece.queries * piece.number for piece in pieces])
    sizes = [size for piece in pieces for size in (piece.skipped, piece.keys * piece.number)]
    keys, values = flat_k.split(sizes)[1::2], flat_v.split(sizes)[1::2]
    mixed = []
    for piece, *tensors in zip(pieces, queries, keys, values, strict=True):
        q, k, v = (t.unflatten(0, (piece.number, -1)).transpose(1, 2) for t in tensors)
        mask = piece.mask(q.device)
        is_causal = mask is None and piece.queries > 1
        out = scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
        mixed.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(mixed).unflatten(0, (batch, length)).transpose(1, 2)
