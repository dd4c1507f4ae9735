"""Text encoded as tokens, the token that ends a document, and whole documents packed into samples.

    bytes       0 ... 255 are the bytes of the text in UTF-8; 256 ends a document, if documents have an end token
    tokenizer   a file of Hugging Face's `tokenizers`; the end token is one of its special tokens

Text is encoded without the special tokens that a tokenizer would add around it.

A packed sample has S + 1 tokens: S inputs, and the same shifted by one as targets.

    sample      [ document A  end | document B        end | end end end ]      filled up with the end token
    mask          0 0 0 1 1 1  1    0 0 1 1 1 1 1 1    1    0   0   0          1: trained on

A document goes into the first open sample that has room for it (first-fit, Johnson 1974, "Fast algorithms for bin
packing"). A fixed number of samples is open; if another one is needed, the fullest is completed. A document longer than
a sample is cut. Plain text continues in other samples, whose pieces overlap by one token, so that each token is a
target once; of a prompt with its completion only the beginning is kept, and the cut is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mpitrain.data.folders import require_package
from mpitrain.data.sources import Columns
from mpitrain.errors import InputError, refusing

BYTES = 256  # number of byte values, and the token that ends a document of bytes
NO_END = "none"
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<EOS>", "[SEP]")  # usual names

Tokens = npt.NDArray[Any]


@dataclass(frozen=True)
class Encoder:
    """Encoder of text as tokens.

    Attributes:
        tokenizer: Hugging Face tokenizer; None for bytes.
        vocabulary: Number of tokens.
        end: Token after each document; None if nothing separates documents.
    """

    tokenizer: Any
    vocabulary: int
    end: int | None

    @property
    def dtype(self) -> str:
        """Smallest dtype that can store every token."""
        return smallest_dtype(self.vocabulary)

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of each text, without an end token. The tokenizer library uses all cores.

        Half of a surrogate pair, which is possible in JSON but not in UTF-8, becomes "?".
        """
        if self.tokenizer is None:
            return [np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(self.dtype) for text in texts]
        try:
            encodings = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        except TypeError:  # raised by the library for text without UTF-8, which is too rare to check before
            clean_texts = [replace_surrogates(text) for text in texts]
            encodings = self.tokenizer.encode_batch(clean_texts, add_special_tokens=False)
        return [np.array(encoding.ids, self.dtype) for encoding in encodings]


def replace_surrogates(text: str) -> str:
    """Replace each half of a surrogate pair in a text by "?"."""
    return text.encode("utf-8", "replace").decode()


def smallest_dtype(vocabulary: int) -> str:
    """Return the smallest unsigned dtype for tokens below `vocabulary`."""
    return "uint8" if vocabulary <= 1 << 8 else "uint16" if vocabulary <= 1 << 16 else "uint32"


def make_encoder(file: Path | None, end_token: str | None, *, documents: bool) -> Encoder:
    """Make an encoder.

    Args:
        file: Tokenizer file; None for bytes.
        end_token: End token: the name of a tokenizer's token, or the number of a byte, up to 256; "none" for no end
            token. The default None takes the first of ENDS that the tokenizer has, or 256 for bytes if `documents` is
            true.
        documents: If true, the input itself marks where its documents end, as JSON lines do.

    Raises:
        InputError: The file is not a tokenizer, or it has no such token.
    """
    if file is None:
        end = BYTES if documents and end_token is None else None
        if end_token not in (None, NO_END):
            if not end_token.isdecimal() or int(end_token) > BYTES:
                raise InputError(
                    f"--end-token {end_token} needs a --tokenizer; without one, use a byte's number, {BYTES} or none"
                )
            end = int(end_token)
        return Encoder(None, BYTES + (end == BYTES), end)
    tokenizer = load_tokenizer(file)
    known = tokenizer.get_vocab()
    return Encoder(tokenizer, max(known.values()) + 1, end_of_vocabulary(known, end_token, file))


def end_of_vocabulary(known: dict[str, int], end_token: str | None, file: Path) -> int | None:
    """Return the end token in a tokenizer's vocabulary; None for no end token.

    Args:
        known: Number of each token, by name.
        end_token: Name of the end token; "none" for no end token; None for the first of ENDS in the vocabulary.
        file: Tokenizer file, for the message.

    Raises:
        InputError: The vocabulary has no such token.
    """
    if end_token == NO_END:
        return None
    if end_token is None:
        return next((known[name] for name in ENDS if name in known), None)
    if end_token not in known:
        raise InputError(
            f"tokenizer file {file} has no token {end_token!r} for --end-token; use one of its tokens, or none"
        )
    return known[end_token]


def load_tokenizer(path: Path) -> Any:
    """Load a tokenizer of Hugging Face's `tokenizers`, without truncation and padding."""
    with require_package(f"{path} needs", "tokenizers"):
        from tokenizers import Tokenizer
    if not path.is_file():
        raise InputError(f"tokenizer file {path} does not exist; use a tokenizer.json")
    with refusing(f"tokenizer file {path} is not a Hugging Face tokenizer", "use a tokenizer.json"):
        encoder = Tokenizer.from_file(str(path))
    encoder.no_truncation()  # a file may request both, and would silently cut our pieces
    encoder.no_padding()
    return encoder


_OPEN = 64  # samples


class Packer:
    """Packer of documents into samples, in the order in which they are added.

    Args:
        sequence: S, the tokens per sample that a model is given.
        end: Token that ends each document, and fills up samples.
        dtype: Dtype of the tokens.
        whole: If true, a document that is too long is cut off, instead of being continued in other samples.
    """

    def __init__(self, sequence: int, end: int, dtype: str, *, whole: bool) -> None:
        self._size, self._end, self._dtype, self._whole = sequence + 1, end, dtype, whole
        self._open: list[_Sample] = []
        self._documents = self._cut = self._filled = self._places = 0

    def add(self, documents: Sequence[tuple[Tokens, int]]) -> Columns:
        """Add documents; return the samples that are complete.

        Args:
            documents: (tokens, number of the first tokens that are not trained on) of each document.
        """
        full: list[_Sample] = []
        for tokens, untrained in documents:
            self._documents += 1
            for piece, masked in self._pieces(tokens, untrained):
                full += self._put(piece, masked)
        return self._columns(full)

    def finish(self) -> Columns:
        """Return the samples that are still open."""
        full, self._open = self._open, []
        return self._columns(full)

    def notes(self) -> tuple[str, ...]:
        """Return sentences about the packing, for people."""
        notes = [
            f"packed {self._documents:,} documents, which fill {self._filled / max(1, self._places):.1%} of the samples"
        ]
        if self._cut:
            notes.append(f"{self._cut:,} were longer than {self._size:,} tokens and were cut; use a larger --pack")
        return tuple(notes)

    def _pieces(self, tokens: Tokens, untrained: int) -> list[tuple[Tokens, int]]:
        if len(tokens) <= self._size:
            return [(tokens, untrained)]
        if self._whole:
            self._cut += 1
            return [(tokens[: self._size], min(untrained, self._size))]
        starts = range(0, len(tokens) - 1, self._size - 1)
        return [(tokens[start : start + self._size], untrained if start == 0 else 1) for start in starts]

    def _put(self, tokens: Tokens, untrained: int) -> list[_Sample]:
        """Find room for a piece; return the sample that is now full or had to be completed, if any."""
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
        self._places += self._size * len(samples)
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
