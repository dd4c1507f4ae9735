"""`prepare`: from paths a person gives to a finished data set folder.

    paths -> files -> one kind of input (the table KINDS) -> a Source -> write_dataset -> rename (folders.py)

A folder's kind is that of most of its files; the few others are skipped and counted, and more than a tenth of
others is an error. Files and folders whose names begin with a dot are never looked at.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from mpitrain.data.folders import make_dataset, os_errors
from mpitrain.data.format import Categories, DatasetManifest, Missing, Scale, read_manifest
from mpitrain.data.sources import images, table, text, tokens
from mpitrain.data.sources.arrays import arrays_source, idx_source, is_idx
from mpitrain.data.sources.documents import TextFields, documents_source, is_documents
from mpitrain.data.sources.table_files import is_table
from mpitrain.data.sources.text import text_documents_source
from mpitrain.data.writer import Progress, Source, write_dataset
from mpitrain.errors import InputError

_TEXT = "text"
_OTHERS = 0.1  # of a folder's files may be of another kind and are skipped
_KNOWN = "text, JSON lines, .npy/.npz, images, archives of images, IDX (MNIST), .csv, .parquet and .bin of tokens"
_LARGEST_ROW = 1 << 30  # bytes of a sample, which must fit into memory several times


@dataclass(frozen=True)
class PrepareOptions:
    """What a person may say about the input, each for one kind of it.

    Attributes:
        tokenizer: The file of a Hugging Face tokenizer, for text.
        size: The height and the width of images, in pixels.
        label: The name or the number of a table's column.
        text: The field of JSON lines or parquet that holds the text.
        prompt: The field of what is given to a model, whose tokens are not trained on.
        completion: The field of what it learns to answer.
        pack: The tokens of a sample that whole documents are packed into.
        blank_lines: Whether documents of plain text end at blank lines, and not with their files.
        encoding: What text is in.
        end_token: What ends a document: a token's name or number, or "none".
        dtype: Of the numbers in files of tokens.
        vocabulary: How many tokens there are in files of tokens.
        columns: Names or numbers of the columns of a table that are used; None for all.
        drop: Those that are not used.
        missing: What missing values of a table become: "mean", "median", "zero", or "drop" for their rows.
        categories: What the texts of a table become: "onehot" or "codes".
        scale: What the numbers of a table become: "standard" for mean 0 and deviation 1.
        like: A data set of another table: what became of its columns is done here too.
        allow_nonfinite: Whether nan and infinite numbers are taken as they are.
        skip_bad: Whether images that cannot be read, and rows of tables with other columns, are left out and counted.
        classes: A file with the names of the classes, one a line, for archives of images.
    """

    tokenizer: Path | None = None
    size: tuple[int, int] | None = None
    label: str | None = None
    text: str | None = None
    prompt: str | None = None
    completion: str | None = None
    pack: int | None = None
    blank_lines: bool = False
    encoding: str | None = None
    end_token: str | None = None
    dtype: str | None = None
    vocabulary: int | None = None
    columns: tuple[str, ...] | None = None
    drop: tuple[str, ...] | None = None
    missing: Missing | None = None
    categories: Categories | None = None
    scale: Scale | None = None
    like: Path | None = None
    allow_nonfinite: bool = False
    skip_bad: bool = False
    classes: Path | None = None

    @property
    def text_fields(self) -> TextFields:
        """Which fields of JSON lines or parquet are read."""
        return TextFields(self.text or "text", self.prompt, self.completion)


@dataclass(frozen=True)
class Found:
    """A file that was found.

    Attributes:
        path: The file.
        root: The source under which it was found.
    """

    path: Path
    root: Path


@dataclass(frozen=True)
class Kind:
    """A kind of input.

    Attributes:
        name: What messages call it.
        matches: Whether a file is of this kind.
        source: Makes a `Source` of such files.
        option: The attribute of `PrepareOptions` that it takes, if any.
        also: Further ones.
    """

    name: str
    matches: Callable[[Path], bool]
    source: Callable[[Sequence[Found], PrepareOptions], Source]
    option: str | None
    also: tuple[str, ...] = ()

    def takes(self, option: str) -> bool:
        """Whether an attribute of `PrepareOptions` is for it."""
        return option == self.option or option in self.also


def prepare(
    sources: Sequence[str],
    out: Path,
    *,
    held_out: float = 0.05,
    options: PrepareOptions | None = None,
    shard_bytes: int = 256 << 20,
    progress: Progress | None = None,
    more: Sequence[Kind] = (),
) -> DatasetManifest:
    """Make the data set folder `out` of the sources.

    Args:
        sources: Files and folders, all of one kind of input.
        out: The folder to make.
        held_out: The fraction of rows kept for evaluation, 0 to 0.5. An input that brings its own test set keeps that.
        options: What some kinds of input need to know.
        shard_bytes: How many bytes of data a shard has.
        progress: Told of the rows that are written.
        more: Kinds of input of one's own, which are recognised before those of the table KINDS.

    Raises:
        InputError: Nothing is there, it is empty, of an unknown kind or of several, `out` exists, or the disk is full.
    """
    if not 0 <= held_out <= 0.5:
        raise InputError(f"--held-out {held_out:g} is not a fraction from 0 to 0.5")
    if os.path.lexists(out):
        raise InputError(f"output folder {out} exists already; give another --out, or remove it")
    options = options or PrepareOptions()
    source = recognise(sources, options, (*more, *_documents_with(options), *KINDS))

    def fill(folder: Path) -> None:
        write_dataset(folder, source, names=sources, held_out=held_out, shard_bytes=shard_bytes, progress=progress)

    make_dataset(out, fill, once=False)
    return read_manifest(out)


def recognise(sources: Sequence[str], options: PrepareOptions, among: Sequence[Kind]) -> Source:
    """Find the one kind that all sources are of, and make a `Source` of them.

    Args:
        sources: Files and folders.
        options: What some kinds of input need to know.
        among: The kinds of input that there are.

    Raises:
        InputError: The sources are of several kinds or of none, or an option is for another kind.
    """
    kind, found, skipped = _sorted_out(sources, among)
    for option in (each.name for each in fields(options) if getattr(options, each.name) != each.default):
        if not kind.takes(option):
            owners = " and ".join(other.name for other in among if other.takes(option))
            flag = option.replace("_", "-")
            raise InputError(f"--{flag} is for {owners}, these sources are {kind.name}; leave it out")
    source = kind.source(found, options)
    row_bytes = sum(field.row_bytes for field in source.fields)
    if row_bytes > _LARGEST_ROW:
        shapes = " and ".join(str(list(field.shape)) for field in source.fields)
        raise InputError(
            f"source {found[0].path}: samples of {shapes:.200} ({row_bytes:,} bytes) are too large; give "
            f"some of at most {_LARGEST_ROW >> 30} GiB"
        )
    if not skipped:
        return source
    note = f"skipped {len(skipped)} files of other kinds, such as {skipped[0].name}"
    return replace(source, notes=(*source.notes, note))


def text_files(sources: Sequence[str], options: PrepareOptions) -> tuple[bool, list[Found]]:
    """Find the files of text among the sources: whether they are JSON lines or parquet, and all of them.

    Raises:
        InputError: The sources are of several kinds, or not text.
    """
    documents = _documents(options.text_fields)
    kind, found, _ = _sorted_out(sources, (documents, *KINDS))
    if kind is not documents and kind.name != _TEXT:
        raise InputError(f"source {found[0].path} is of the kind {kind.name}; give text, JSON lines or parquet of text")
    return kind is documents, found


def _sorted_out(sources: Sequence[str], among: Sequence[Kind]) -> tuple[Kind, list[Found], list[Path]]:
    """The one kind that all sources are of, their files of that kind, and others that lie beside these in folders."""
    chosen: dict[Kind, list[Found]] = defaultdict(list)
    skipped: list[Path] = []
    for name in sources:
        kind, found, others = _look(Path(name), among)
        chosen[kind] += found
        skipped += others
    if len(chosen) > 1:
        listed = " and ".join(f"{kind.name} ({found[0].path})" for kind, found in chosen.items())
        raise InputError(f"sources of different kinds: {listed}; prepare each kind into a folder of its own")
    ((kind, found),) = chosen.items()
    return kind, found, skipped


def _look(path: Path, among: Sequence[Kind]) -> tuple[Kind, list[Found], list[Path]]:
    """The kind of one source, its files of that kind in a fixed order, and its other files."""
    with os_errors(f"source {path} cannot be read"):
        if not os.path.lexists(path):
            raise InputError(f"source {path} does not exist; give an existing file or folder")
        if path.is_dir():
            return _look_into(path, among)
        if path.stat().st_size == 0:
            raise InputError(f"source {path} is empty; give a file with data")
        kind = _kind_of(path, among)
    if kind is None:
        raise InputError(f"source {path} is of no kind that prepare reads: {_KNOWN}; convert it to one of these")
    return kind, [Found(path, path.parent)], []


def _look_into(folder: Path, among: Sequence[Kind]) -> tuple[Kind, list[Found], list[Path]]:
    by_kind: dict[Kind, list[Path]] = defaultdict(list)
    unknown: list[Path] = []
    for path in _walk(folder):
        if path.stat().st_size or path.suffix.lower() in images.SUFFIXES:  # an empty image is one that is broken
            kind = _kind_of(path, among)
            (unknown if kind is None else by_kind[kind]).append(path)
    if not by_kind:
        reason = f"only files of kinds that prepare does not read, such as {unknown[0].name}" if unknown else "no data"
        raise InputError(f"source {folder} holds {reason}; give {_KNOWN}")
    most = max(by_kind, key=lambda kind: len(by_kind[kind]))
    paths = by_kind.pop(most)
    others = [path for some in by_kind.values() for path in some]
    if len(others) > _OTHERS * (len(others) + len(paths)):
        other, some = next(iter(by_kind.items()))
        raise InputError(
            f"source {folder} mixes {most.name} ({paths[0].name}) and {other.name} ({some[0].name}); "
            "name the files or subfolders of one kind"
        )
    return most, [Found(path, folder) for path in paths], others + unknown


def _walk(folder: Path) -> list[Path]:
    """Every file below, sorted, without hidden ones; folders are not followed through links."""
    found = []
    for top, folders, files in os.walk(folder, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(top, name) for name in files if not name.startswith(".")]
    return sorted(path for path in found if path.is_file())


def _raise(error: OSError) -> None:
    raise error


def _kind_of(path: Path, among: Sequence[Kind]) -> Kind | None:
    return next((kind for kind in among if kind.matches(path)), None)


def _documents_with(options: PrepareOptions) -> tuple[Kind, ...]:
    """JSON lines and parquet with the fields that a person has named, before any other kind of table."""
    named = options.text_fields
    if options.prompt is None and options.completion is not None:
        raise InputError("--completion is the answer to --prompt; name the field of the prompt too")
    if options.prompt is not None and options.text is not None:
        raise InputError("--text names the whole text and --prompt a part of it; give one of the two")
    return (_documents(named),) if named != TextFields() else ()


def _documents(named: TextFields) -> Kind:
    return Kind(
        "JSON lines or parquet of text",
        lambda path: is_documents(path, named),
        lambda found, options: documents_source(
            _paths(found),
            named,
            options.tokenizer,
            pack=options.pack,
            encoding=options.encoding,
            end_token=options.end_token,
        ),
        "tokenizer",
        ("text", "prompt", "completion", "pack", "encoding", "end_token"),
    )


def _token_options(options: PrepareOptions) -> tokens.TokenOptions:
    return tokens.TokenOptions(options.tokenizer, options.dtype, options.vocabulary, options.end_token)


def _of_text(files: Sequence[Path], options: PrepareOptions) -> Source:
    if not options.pack and not options.blank_lines:
        return text.text_source(files, options.tokenizer, options.encoding, options.end_token)
    return text_documents_source(
        files,
        options.tokenizer,
        pack=options.pack,
        blank_lines=options.blank_lines,
        encoding=options.encoding,
        end_token=options.end_token,
    )


def _paths(found: Sequence[Found]) -> list[Path]:
    return [one.path for one in found]


def _of_table(options: PrepareOptions) -> table.TableOptions:
    return table.TableOptions(**{each.name: getattr(options, each.name) for each in fields(table.TableOptions)})


KINDS = (
    Kind(
        "IDX files",
        is_idx,
        lambda found, options: idx_source(_paths(found), allow_nonfinite=options.allow_nonfinite),
        None,
        ("allow_nonfinite",),
    ),
    Kind(
        "tokens",
        tokens.is_tokens,
        lambda found, options: tokens.token_source(_paths(found), _token_options(options)),
        "dtype",
        ("tokenizer", "vocabulary", "end_token"),
    ),
    Kind(
        "arrays",
        lambda p: p.suffix.lower() in (".npy", ".npz"),
        lambda found, options: arrays_source(_paths(found), allow_nonfinite=options.allow_nonfinite),
        None,
        ("allow_nonfinite",),
    ),
    Kind(
        "images",
        lambda p: p.suffix.lower() in images.SUFFIXES,
        lambda found, options: images.images_source(
            [(one.path, one.root) for one in found], options.size, skip_bad=options.skip_bad
        ),
        "size",
        ("skip_bad",),
    ),
    Kind(
        "archives of images",
        images.is_archive,
        lambda found, options: images.archives_source(
            _paths(found), options.size, skip_bad=options.skip_bad, classes=options.classes
        ),
        "size",
        ("skip_bad", "classes"),
    ),
    Kind(
        "tables",
        is_table,
        lambda found, options: table.table_source(_paths(found), _of_table(options)),
        "label",
        ("columns", "drop", "missing", "categories", "scale", "like", "allow_nonfinite", "skip_bad"),
    ),
    _documents(TextFields()),
    Kind(
        _TEXT,
        text.is_text,
        lambda found, options: _of_text(_paths(found), options),
        "tokenizer",
        ("encoding", "end_token", "pack", "blank_lines"),
    ),
)
