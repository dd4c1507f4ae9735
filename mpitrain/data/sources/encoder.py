"""What makes tokens of text, and which token ends a document.

    bytes       0 ... 255 are the bytes of the text in UTF-8; 256 ends a document, where documents have an end
    tokenizer   a file of Hugging Face's `tokenizers`; the end is one of its special tokens

Text is encoded without the special tokens that a tokenizer would put around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mpitrain.errors import InputError

BYTES = 256  # numbers of them, and the number of the token after a document of bytes
NO_END = "none"
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<EOS>", "[SEP]")  # of tokenizers

Tokens = npt.NDArray[Any]


@dataclass(frozen=True)
class Encoder:
    """Makes tokens of text.

    Attributes:
        tokenizer: Of Hugging Face; None for bytes.
        file: The tokenizer's file.
        vocabulary: How many tokens there are.
        end: The token after a document; None where documents follow each other with nothing between them.
    """

    tokenizer: Any
    file: Path | None
    vocabulary: int
    end: int | None

    @property
    def dtype(self) -> str:
        """The smallest dtype that holds all tokens."""
        return smallest_dtype(self.vocabulary)

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """The tokens of each text, without an end. The tokenizer library spreads them over the cores.

        Half a surrogate pair, which JSON can hold and UTF-8 cannot, becomes "?".
        """
        if self.tokenizer is None:
            return [np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(self.dtype) for text in texts]
        try:
            found = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        except TypeError:  # what the library says of text that has no UTF-8; a rare one, so nobody looks before
            mended = [without_surrogates(text) for text in texts]
            found = self.tokenizer.encode_batch(mended, add_special_tokens=False)
        return [np.array(encoding.ids, self.dtype) for encoding in found]


def without_surrogates(text: str) -> str:
    """The text with "?" for each half of a surrogate pair."""
    return text.encode("utf-8", "replace").decode()


def smallest_dtype(vocabulary: int) -> str:
    """The unsigned dtype that tokens below `vocabulary` are kept in."""
    return "uint8" if vocabulary <= 1 << 8 else "uint16" if vocabulary <= 1 << 16 else "uint32"


def make_encoder(file: Path | None, end_token: str | None, *, documents: bool) -> Encoder:
    """Make an encoder.

    Args:
        file: A tokenizer's file; None for bytes.
        end_token: Of a tokenizer the name of a token, of bytes the number of one up to 256; "none" for no end. None
            takes the first of ENDS that the tokenizer has, and 256 for bytes that are `documents`.
        documents: Whether the input says itself where its documents end, as JSON lines do.

    Raises:
        InputError: The file is no tokenizer, or it has no such token.
    """
    if file is None:
        end = _end_of_bytes(end_token, documents)
        return Encoder(None, None, BYTES + (end == BYTES), end)
    tokenizer = load_tokenizer(file)
    known = tokenizer.get_vocab()
    return Encoder(tokenizer, file, max(known.values()) + 1, end_of_vocabulary(known, end_token, file))


def end_of_vocabulary(known: dict[str, int], end_token: str | None, file: Path) -> int | None:
    """The token that ends a document, of a tokenizer's vocabulary."""
    if end_token == NO_END:
        return None
    if end_token is None:
        return next((known[name] for name in ENDS if name in known), None)
    if end_token not in known:
        raise InputError(
            f"tokenizer file {file} has no token {end_token!r} for --end-token; name one that it has, or none"
        )
    return known[end_token]


def _end_of_bytes(end_token: str | None, documents: bool) -> int | None:
    if end_token is None:
        return BYTES if documents else None
    if end_token == NO_END:
        return None
    if not end_token.isdecimal() or int(end_token) > BYTES:
        raise InputError(
            f"--end-token {end_token} is for a tokenizer; without one give the number of a byte, {BYTES}, or none"
        )
    return int(end_token)


def load_tokenizer(path: Path) -> Any:
    """A tokenizer of Hugging Face's `tokenizers`, which neither truncates nor pads."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise InputError('--tokenizer needs the package tokenizers; pip install "mpitrain[data]"') from None
    if not path.is_file():
        raise InputError(f"tokenizer file {path} does not exist; give a tokenizer.json")
    try:
        encoder = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        reason = str(error).splitlines()[0]
        raise InputError(f"tokenizer file {path} is not one of Hugging Face tokenizers ({reason})") from None
    encoder.no_truncation()  # a file may ask for both, and would silently cut our pieces
    encoder.no_padding()
    return encoder
