"""`prepare`: makes a data set folder from the user's files.

    paths -> files -> one kind of input (the table KINDS) -> a Source -> write_dataset -> rename (folders.py)

The kind of a folder is that of most of its files. A few files of other kinds are skipped and counted; more than a tenth
is an error. Files and folders whose names begin with a dot are ignored.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mpitrain.data.folders import agree_on_errors, make_dataset, os_errors, require_package
from mpitrain.data.format import FORMAT, MANIFEST, DatasetManifest, read_manifest
from mpitrain.data.parallel_writer import make_grid_dataset
from mpitrain.data.sources import PrepareOptions, Source, TextFields, arrays, documents, images, table, tokens
from mpitrain.data.sources.encoder import BYTES, ENDS, replace_surrogates
from mpitrain.data.sources.grids import GridSource, grid_source
from mpitrain.data.sources.table_files import is_table
from mpitrain.data.sources.variables import has_variables, is_store
from mpitrain.data.writer import Progress, write_dataset
from mpitrain.errors import InputError, refusal
from mpitrain.storage.disk import write_whole

if TYPE_CHECKING:
    from mpitrain.comm import Communicator

_TEXT = "text"
_OTHERS = 0.1  # largest fraction of a folder's files that may be of other kinds, and are skipped
_KNOWN = (
    "text, JSON lines, .npy/.npz, HDF5, NetCDF, Zarr, images, archives of images, IDX (MNIST), .csv, .parquet, .arrow "
    "or .bin of tokens"
)
_DESCRIPTIONS = ("dataset_info.json", "state.json", "dataset_dict.json")
_LARGEST_ROW = 1 << 30  # bytes of a sample, which must fit into memory several times


class Found(NamedTuple):
    """A file of a source.

    Attributes:
        path: The file.
        root: Source in which it was found.
    """

    path: Path
    root: Path


@dataclass(frozen=True)
class Kind:
    """A kind of input.

    Attributes:
        name: Name in messages.
        matches: Function that returns True if a file is of this kind.
        source: Function that makes a `Source` of such files.
        option: Attribute of `PrepareOptions` that this kind uses, if any.
        also: Further attributes that it uses.
    """

    name: str
    matches: Callable[[Path], bool]
    source: Callable[[Sequence[Found], PrepareOptions], Source]
    option: str | None
    also: tuple[str, ...] = ()

    def takes(self, option: str) -> bool:
        """Return True if this kind uses an attribute of `PrepareOptions`."""
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
    world: Communicator | None = None,
) -> DatasetManifest:
    """Make the data set folder `out` from sources. Collective if there are ranks.

    Args:
        sources: Files and folders, all of one kind of input.
        out: Folder to make.
        held_out: Fraction of rows kept for evaluation, 0 to 0.5. An input with its own test set keeps that instead.
        options: Options for some kinds of input.
        shard_bytes: Bytes of data per shard.
        progress: Function called with a split and the rows and bytes of it that are written so far.
        more: Further kinds of input, which are tried before those of the table KINDS.
        world: Ranks that share the work on HDF5, NetCDF and Zarr files; None for this process alone.

    Returns:
        Manifest of the new data set.

    Raises:
        InputError: A source is missing, empty, or of an unknown kind, the sources are of several kinds, `out` exists,
            or the disk is full.
    """
    if not 0 <= held_out <= 0.5:
        raise InputError(f"--held-out {held_out:g} is not a fraction from 0 to 0.5")
    options = options or PrepareOptions()
    if os.path.lexists(out):
        raise refusal(f"output folder {out} exists already; use another --out, or remove it")
    named = options.text_fields
    if options.prompt is None and options.completion is not None:
        raise InputError("--completion is the answer to --prompt; set --prompt to the field of the prompt")
    if options.prompt is not None and options.text is not None:
        raise InputError("--text names the whole text and --prompt a part of it; use only one of them")
    # documents with fields that the user names come before any other kind of table
    before = [_documents(named)] if named != TextFields() else []
    source = agree_on_errors(world, lambda: recognise(sources, options, (*more, *before, *KINDS)))
    if isinstance(source, GridSource):
        make_grid_dataset(out, source, names=sources, held_out=held_out, shard_bytes=shard_bytes, world=world)
        if world is None:
            return read_manifest(out)
        # one rank reads it: others may still see a network file system on which it does not exist
        return DatasetManifest.model_validate(world.on_root(lambda: read_manifest(out).model_dump(mode="json")))
    if world is not None and world.size > 1:
        raise refusal("only HDF5, NetCDF and Zarr files are prepared by several ranks; start it without mpirun")

    def fill(folder: Path) -> None:
        write_dataset(folder, source, names=sources, held_out=held_out, shard_bytes=shard_bytes, progress=progress)

    make_dataset(out, fill, once=False)
    return read_manifest(out)


def recognise(sources: Sequence[str], options: PrepareOptions, among: Sequence[Kind]) -> Source:
    """Find the one kind of all sources, and make a `Source` of them.

    Args:
        sources: Files and folders.
        options: Options for some kinds of input.
        among: Kinds of input to try, in order.

    Raises:
        InputError: The sources are of several kinds or of none, or an option is for another kind.
    """
    kind, files, skipped = _classify_sources(sources, among)
    for option in (each.name for each in fields(options) if getattr(options, each.name) != each.default):
        if not kind.takes(option):
            owners = " and ".join(other.name for other in among if other.takes(option))
            flag = option.replace("_", "-")
            raise InputError(f"--{flag} is for {owners}, but these sources are {kind.name}; remove it")
    source = kind.source(files, options)
    row_bytes = sum(field.row_bytes for field in source.fields)
    if row_bytes > _LARGEST_ROW:
        shapes = " and ".join(str(list(field.shape)) for field in source.fields)
        raise InputError(
            f"source {files[0].path}: samples of {shapes:.200} ({row_bytes:,} bytes) are too large; use "
            f"samples of at most {_LARGEST_ROW >> 30} GiB"
        )
    if not skipped:
        return source
    note = f"skipped {len(skipped)} files of other kinds, such as {skipped[0].name}"
    return replace(source, notes=(*source.notes, note))


def _classify_sources(sources: Sequence[str], among: Sequence[Kind]) -> tuple[Kind, list[Found], list[Path]]:
    """Return the one kind of all sources, their files of that kind, and the files of other kinds in their folders."""
    files_of_kind: dict[Kind, list[Found]] = defaultdict(list)
    skipped: list[Path] = []
    for name in sources:
        kind, files, other_files = _classify(Path(name), among)
        files_of_kind[kind] += files
        skipped += other_files
    if len(files_of_kind) > 1:
        listed = " and ".join(f"{kind.name} ({files[0].path})" for kind, files in files_of_kind.items())
        raise InputError(f"the sources are of different kinds: {listed}; prepare each kind separately")
    ((kind, files),) = files_of_kind.items()
    return kind, files, skipped


def _classify(path: Path, among: Sequence[Kind]) -> tuple[Kind, list[Found], list[Path]]:
    """Return the kind of one source, its files of that kind in a fixed order, and its other files."""
    with os_errors(f"source {path} cannot be read"):
        if not os.path.lexists(path):
            raise InputError(f"source {path} does not exist; use an existing file or folder")
        if path.is_dir() and _is_prepared(path):
            raise InputError(f"source {path} is a data set already; train on it with --data.path, or use its sources")
        if path.is_dir() and not is_store(path):
            return _classify_folder(path, among)
        if path.stat().st_size == 0:
            raise InputError(f"source {path} is empty; use a file with data")
        kind = _kind_of(path, among)
    if kind is None:
        raise InputError(f"source {path} is of no kind that prepare can read; convert it to {_KNOWN}")
    return kind, [Found(path, path.parent)], []


def _classify_folder(folder: Path, among: Sequence[Kind]) -> tuple[Kind, list[Found], list[Path]]:
    by_kind: dict[Kind, list[Path]] = defaultdict(list)
    unknown: list[Path] = []
    for path in without_descriptions(files_below(folder)):
        if path.stat().st_size or path.suffix.lower() in images.SUFFIXES:  # an empty image counts as a broken one
            kind = _kind_of(path, among)
            (unknown if kind is None else by_kind[kind]).append(path)
    if not by_kind:
        content = f"only files that prepare cannot read, such as {unknown[0].name}" if unknown else "no data"
        raise InputError(f"source {folder} contains {content}; use {_KNOWN}")
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


def without_descriptions(paths: Sequence[Path]) -> list[Path]:
    """Return paths without the JSON files with which Hugging Face's `datasets` describes Arrow files and folders."""
    holders = {parent for path in paths if path.suffix.lower() == ".arrow" for parent in path.parents[:2]}
    return [path for path in paths if not (path.name in _DESCRIPTIONS and path.parent in holders)]


def files_below(folder: Path) -> list[Path]:
    """Return all files and Zarr stores below a folder, sorted, without hidden ones and those of prepared data sets.

    Links to folders are not followed.
    """

    def failed(error: OSError) -> None:
        raise error

    paths = []
    for top, folders, files in os.walk(folder, onerror=failed):
        stores = [name for name in folders if is_store(Path(top, name))]
        folders[:] = [
            name for name in folders if not (name.startswith(".") or name in stores or _is_prepared(Path(top, name)))
        ]
        paths += [Path(top, name) for name in (*files, *stores) if not name.startswith(".")]
    return sorted(path for path in paths if path.is_file() or path.is_dir())


def _is_prepared(folder: Path) -> bool:
    """Return True for a data set folder, complete or damaged; other programs have files called dataset.json, too."""
    try:
        with open(folder / MANIFEST, "rb") as file:
            return FORMAT.encode() in file.read(100)
    except OSError:
        return False


def _kind_of(path: Path, among: Sequence[Kind]) -> Kind | None:
    return next((kind for kind in among if kind.matches(path)), None)


def _kind(
    name: str, matches: Callable[[Path], bool], source: Callable[[Sequence[Path], PrepareOptions], Source], *takes: str
) -> Kind:
    """Return a kind of input whose source needs only the files, not the folders that contain them."""
    return Kind(name, matches, lambda matching, options: source([one.path for one in matching], options), None, takes)


def _documents(named: TextFields) -> Kind:
    takes = "tokenizer", "text", "prompt", "completion", "pack", "encoding", "end_token"
    matches = partial(documents.is_documents, fields=named)
    return _kind("JSON lines or parquet of text", matches, documents.documents_source, *takes)


_OF_TOKENS = "dtype", "tokenizer", "vocabulary", "end_token"
_OF_TABLES = "label", "columns", "drop", "missing", "categories", "scale", "like", "allow_nonfinite", "skip_bad"
_OF_GRIDS = "x", "y", "samples", "select", "ahead", "in_place", "missing", "scale", "like", "allow_nonfinite"
_OF_TEXT = "tokenizer", "encoding", "end_token", "pack", "blank_lines"
KINDS = (
    _kind("IDX files", arrays.is_idx, arrays.idx_source, "allow_nonfinite"),
    _kind("HDF5, NetCDF or Zarr", has_variables, grid_source, *_OF_GRIDS),
    _kind("tokens", tokens.is_tokens, tokens.tokens_source, *_OF_TOKENS),
    _kind("arrays", arrays.is_array, arrays.arrays_source, "allow_nonfinite"),
    Kind("images", images.is_image, images.images_source, "size", ("skip_bad", "in_place")),
    _kind("archives of images", images.is_archive, images.archives_source, "size", "skip_bad", "classes", "in_place"),
    _kind("tables", is_table, table.table_source, *_OF_TABLES),
    _documents(TextFields()),
    _kind(_TEXT, documents.is_text, documents.text_source, *_OF_TEXT),
)


# -- A tokenizer.json of byte-level BPE (Sennrich et al. 2016; Radford et al. 2019), trained on the user's text
#
#   token 0                  <|endoftext|>, which ends documents
#   tokens 1 to 256          the bytes, so that any text can be encoded and decoded without loss
#   the others               merges of two earlier tokens, the most frequent pair first
#
# The same text gives the same file. Memory use: the different words of the text with their counts, not the text.


def train_tokenizer(sources: Sequence[str], out: Path, vocabulary: int, options: PrepareOptions | None = None) -> int:
    """Train a tokenizer on text, JSON lines or parquet, and write its file.

    Args:
        sources: Files and folders of text, as for `prepare`.
        out: File to make.
        vocabulary: Number of tokens to train.
        options: Fields that contain the text, and its encoding.

    Returns:
        Number of tokens; smaller than `vocabulary` if the text does not give more.

    Raises:
        InputError: The sources contain no text, the file exists, or the vocabulary is too small.
    """
    with require_package("a tokenizer needs", "tokenizers"):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    if vocabulary <= BYTES:
        raise InputError(
            f"--vocabulary {vocabulary} is too small for the {BYTES} bytes and {ENDS[0]}; use {BYTES + 1} or more"
        )
    if os.path.lexists(out):
        raise InputError(f"output file {out} exists already; use another --out, or remove it")
    options = options or PrepareOptions()
    with_fields = _documents(options.text_fields)
    kind, files, _ = _classify_sources(sources, (with_fields, *KINDS))
    if kind is not with_fields and kind.name != _TEXT:
        raise InputError(f"source {files[0].path} is of the kind {kind.name}; use text, JSON lines or parquet of text")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[ENDS[0]], initial_alphabet=alphabet, show_progress=False
    )
    failure: list[BaseException] = []
    tokenizer.train_from_iterator(_texts([one.path for one in files], options, kind is with_fields, failure), trainer)
    if failure:
        raise failure[0]
    with os_errors(f"output file {out} cannot be written"):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, f"{tokenizer.to_str(pretty=True)}\n")
    return int(tokenizer.get_vocab_size())


def _texts(
    paths: Sequence[Path], options: PrepareOptions, with_fields: bool, failure: list[BaseException]
) -> Iterator[str]:
    """Yield the text of files. An error is stored in `failure`, because the library would raise its own instead."""
    try:
        encoding = options.encoding if with_fields else documents.encoding_of(paths, options.encoding)
        for path in paths:
            if with_fields:
                for texts in documents.documents_of(path, options.text_fields, encoding):
                    yield from map(replace_surrogates, texts)
            else:
                yield from documents.text_pieces(path, encoding)
    except BaseException as error:
        failure.append(error)
