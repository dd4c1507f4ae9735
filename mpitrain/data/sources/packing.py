"""Whole documents packed into samples of S + 1 tokens: S inputs, and the same moved by one as targets.

    sample      [ document A  end | document B        end | end end end ]      filled up with the end token
    mask          0 0 0 1 1 1  1    0 0 1 1 1 1 1 1    1    0   0   0          1: trained on

A document goes into the first sample that is still open and has room for it (first-fit, Johnson 1974, "Fast algorithms
for bin packing"); so many samples are open at once, and the fullest is given away where one more is needed. What is
longer than a sample is cut: of a text the pieces overlap by the token that the next one begins with, so that each
token is a target once; of a prompt with its completion only the beginning is kept, which is counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mpitrain.data.sources.encoder import Tokens
from mpitrain.data.writer import Columns

_OPEN = 64  # samples


class Packer:
    """Packs documents, in the order in which they are added.

    Args:
        sequence: S, the tokens of a sample that a model is given.
        end: The token that ends each document, and fills up samples.
        dtype: Of the tokens.
        whole: Whether a document that is too long is cut off, instead of going on in other samples.
    """

    def __init__(self, sequence: int, end: int, dtype: str, *, whole: bool) -> None:
        self._size, self._end, self._dtype, self._whole = sequence + 1, end, dtype, whole
        self._open: list[_Sample] = []
        self._documents = self._cut = self._filled = self._given = 0

    def add(self, documents: Sequence[tuple[Tokens, int]]) -> Columns:
        """Add documents: (tokens, how many of the first are not trained on). Returns the samples that are full."""
        full: list[_Sample] = []
        for tokens, untrained in documents:
            self._documents += 1
            for piece, masked in self._pieces(tokens, untrained):
                full += self._put(piece, masked)
        return self._columns(full)

    def finish(self) -> Columns:
        """The samples that are open yet."""
        full, self._open = self._open, []
        return self._columns(full)

    def notes(self) -> tuple[str, ...]:
        """What a person should know of it."""
        notes = [f"packed {self._documents:,} documents, {self._filled / max(1, self._given):.1%} of the places used"]
        if self._cut:
            notes.append(f"{self._cut:,} were longer than {self._size:,} tokens and lost their end; raise --pack")
        return tuple(notes)

    def _pieces(self, tokens: Tokens, untrained: int) -> list[tuple[Tokens, int]]:
        if len(tokens) <= self._size:
            return [(tokens, untrained)]
        if self._whole:
            self._cut += 1
            return [(tokens[: self._size], min(untrained, self._size))]
        step = self._size - 1
        starts = range(0, len(tokens) - 1, step)
        return [(tokens[start : start + self._size], untrained if start == 0 else 1) for start in starts]

    def _put(self, tokens: Tokens, untrained: int) -> list[_Sample]:
        """Find room for a piece; returns the sample that is full or had to make way, if any."""
        full: list[_Sample] = []
        place = next((i for i, sample in enumerate(self._open) if sample.length + len(tokens) <= self._size), None)
        if place is None:
            if len(self._open) == _OPEN:
                lengths = [sample.length for sample in self._open]
                full.append(self._open.pop(lengths.index(max(lengths))))
            self._open.append(_Sample(self._size, self._end, self._dtype))
            place = len(self._open) - 1
        self._open[place].put(tokens, untrained)
        if self._open[place].length == self._size:
            full.append(self._open.pop(place))
        return full

    def _columns(self, samples: Sequence[_Sample]) -> Columns:
        self._filled += sum(sample.length for sample in samples)
        self._given += self._size * len(samples)
        tokens = [sample.tokens for sample in samples] or [np.empty(0, self._dtype)]
        masks = [sample.mask for sample in samples] or [np.empty(0, np.uint8)]
        return np.concatenate(tokens), np.concatenate(masks)


class _Sample:
    """A sample that is being filled."""

    def __init__(self, size: int, end: int, dtype: str) -> None:
        self.tokens: Tokens = np.full(size, end, dtype)
        self.mask: npt.NDArray[np.uint8] = np.zeros(size, np.uint8)
        self.length = 0

    def put(self, tokens: Tokens, untrained: int) -> None:
        stop = self.length + len(tokens)
        self.tokens[self.length : stop] = tokens
        self.mask[self.length + untrained : stop] = 1
        self.length = stop
