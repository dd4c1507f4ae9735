"""What a person wants to know about a data set, as lines of text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mpitrain.data.format import HELD_OUT, TOKENIZER, TRAIN, DatasetManifest, FieldSpec, SplitSpec
from mpitrain.errors import printable
from mpitrain.storage.text import bytes_text, counted

_MOST_CLASSES = 12  # shown by name
_LONGEST, _LONGEST_NAME = 1000, 100  # characters of a value, and of a class
_TITLES = {TRAIN: "train", HELD_OUT: "held out"}
_GIVEN = {"integer": "int64", "float": "float32", "unit": "float32 of value/255"}


def describe(folder: Path, manifest: DatasetManifest) -> Iterator[str]:
    """Lines about a data set, each of which is a label and a value, with the values under one another."""
    for label, value in _facts(folder, manifest):
        yield f"{printable(label):<12}{printable(value, _LONGEST)}"


def _facts(folder: Path, manifest: DatasetManifest) -> Iterator[tuple[str, str]]:
    unit = "tokens" if manifest.kind == "tokens" else "samples"
    yield "data set", str(folder)
    yield "kind", _kind(manifest)
    for name, split in manifest.splits.items():
        yield _TITLES.get(name, name), _split(split, unit)
    if manifest.kind == "arrays":
        for field in manifest.fields:
            yield field.name, _field(field)
    if manifest.vocabulary is not None:
        yield "vocabulary", f"{manifest.vocabulary:,}"
    if manifest.kind == "tokens":
        end = manifest.document_end
        yield "documents", "no token between them" if end is None else f"token {end} ends each of them"
        if manifest.pack:
            yield "samples", f"whole documents packed into {manifest.pack:,} tokens (model.sequence {manifest.pack})"
        if len(manifest.fields) > 1:
            yield "mask", "targets that are not trained on: prompts, and what fills up samples"
    if manifest.classes is not None:
        yield from _classes(manifest, manifest.classes)
    for place, source in enumerate(manifest.origin.sources):
        yield "source" if place == 0 else "", source
    for note in manifest.origin.notes:
        yield "", note
    yield "files read", f"{manifest.origin.files:,}"
    yield "prepared", manifest.origin.prepared.replace("T", " ").replace("+00:00", " UTC")
    yield "identity", manifest.identity


def _kind(manifest: DatasetManifest) -> str:
    if manifest.kind == "arrays":
        return "arrays (one row per sample)"
    if manifest.tokenizer_crc32:
        return f"tokens (by {TOKENIZER}, a copy is in the folder)"
    return "tokens (bytes)" if manifest.vocabulary in (256, 257) else "tokens"


def _split(split: SplitSpec, unit: str) -> str:
    size = sum(shard.bytes for shard in split.shards)
    return f"{split.rows:,} {unit}, {bytes_text(size)} in {counted(len(split.shards), 'shard')}"


def _field(field: FieldSpec) -> str:
    shape = " x ".join(str(n) for n in field.shape) or "one number"
    return f"{shape}, stored as {field.dtype}, read as {_GIVEN[field.given]}"


def _classes(manifest: DatasetManifest, classes: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    counts = [split.class_counts or (0,) * len(classes) for split in manifest.splits.values()]
    headings = ", ".join(_TITLES.get(name, name) for name in manifest.splits)
    yield "classes", f"{len(classes):,}; samples of each ({headings}):"
    for number, name in list(enumerate(classes))[:_MOST_CLASSES]:
        yield (
            "",
            f"{number:>3}  {printable(name, _LONGEST_NAME):<20} "
            + " ".join(f"{count[number]:>9,}" for count in counts),
        )
    if len(classes) > _MOST_CLASSES:
        yield "", f"...  and {len(classes) - _MOST_CLASSES:,} more"
