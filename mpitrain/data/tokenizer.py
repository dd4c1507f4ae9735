"""`tokenizer`: from a person's text to a tokenizer.json of byte-level BPE (Sennrich et al. 2016; Radford et al. 2019).

    token 0                  <|endoftext|>, which ends documents
    tokens 1 to 256          the bytes, so that any text can be encoded, and decoded to what it was
    the others               merges of two earlier tokens, the most frequent pair first

The same text gives the same file. Memory in use: the different words of the text with their numbers, not the text.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mpitrain.data.folders import needing, os_errors
from mpitrain.data.prepare import Found, PrepareOptions, text_files
from mpitrain.data.sources.documents import documents_of
from mpitrain.data.sources.encoder import BYTES, ENDS, without_surrogates
from mpitrain.data.sources.text import encoding_of, text_pieces
from mpitrain.errors import InputError
from mpitrain.storage.disk import write_whole

END = ENDS[0]


def train_tokenizer(sources: Sequence[str], out: Path, vocabulary: int, options: PrepareOptions | None = None) -> int:
    """Train a tokenizer on text, JSON lines or parquet, and write its file.

    Args:
        sources: Files and folders of text, as of `prepare`.
        out: The file to make.
        vocabulary: How many tokens there are to be.
        options: Which fields hold the text, and its encoding.

    Returns:
        How many tokens there are: fewer than asked for, where the text gives no more.

    Raises:
        InputError: The sources hold no text, the file exists, or the vocabulary is too small.
    """
    with needing("a tokenizer needs", "tokenizers"):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    if vocabulary <= BYTES:
        raise InputError(f"--vocabulary {vocabulary} has no room for {BYTES} bytes and {END}; give {BYTES + 1} or more")
    if os.path.lexists(out):
        raise InputError(f"output file {out} exists already; give another --out, or remove it")
    options = options or PrepareOptions()
    documents, found = text_files(sources, options)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = _document_texts(found, options) if documents else _file_texts(found, options)
    _train(tokenizer, texts, trainer)
    with os_errors(f"output file {out} cannot be written"):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, f"{tokenizer.to_str(pretty=True)}\n")
    return int(tokenizer.get_vocab_size())


def _train(tokenizer: Any, texts: Iterator[str], trainer: Any) -> None:
    """An error of reading the text is raised as itself, not as the library's error about an iterator that failed."""
    failure: list[BaseException] = []

    def guarded() -> Iterator[str]:
        try:
            yield from texts
        except BaseException as error:
            failure.append(error)

    tokenizer.train_from_iterator(guarded(), trainer)
    if failure:
        raise failure[0]


def _document_texts(found: Sequence[Found], options: PrepareOptions) -> Iterator[str]:
    for one in found:
        for texts in documents_of(one.path, options.text_fields, options.encoding):
            yield from map(without_surrogates, texts)


def _file_texts(found: Sequence[Found], options: PrepareOptions) -> Iterator[str]:
    paths = [one.path for one in found]
    encoding = encoding_of(paths, options.encoding)
    return (piece for path in paths for piece in text_pieces(path, encoding))
