"""`python -m mpitrain.data prepare | tokenizer | info`, for data sets and tokenizers. Imports neither torch nor MPI."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from mpitrain.data.format import HELD_OUT, TOKENIZER, TRAIN, Categories, DatasetManifest, Missing, Scale
from mpitrain.early import VERSION, is_launched, positive_integer
from mpitrain.errors import EXIT_DONE, InputError, echo, exit_code_of, printable
from mpitrain.storage.text import bytes_text, counted

if TYPE_CHECKING:
    from mpitrain.comm import Communicator

_SOURCES = """\
sources (all of one kind):
  text files, folders of text      bytes, or tokens with --tokenizer
  .jsonl, .json, .parquet, .arrow  one document per line or row: --text FIELD [text], or --prompt and --completion
  train.bin val.bin, tokens.npy    tokens made by another tool, also Megatron-LM's .idx and .bin; --dtype
  x.npy y.npy, or one .npz         rows of arrays; also x_train y_train x_test y_test
  a folder of image folders        one class per subfolder; --size if sizes differ
  IDX files (MNIST), also .gz      images and labels; t10k is held out
  .csv, .tsv, .parquet, .arrow     columns, one of which is the --label
  .tar, .tar.gz (WebDataset)       x.jpg with x.cls, x.json or x.txt; --size if sizes differ
  .h5, .nc, Zarr stores            variables --x and --y, or pairs of states --ahead N; also under mpirun
text, JSON lines, tokens, tables and archives may be compressed: .gz, .bz2, .xz or .zst
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. Ranks of a job prepare HDF5, NetCDF and Zarr files together."""
    arguments = make_parser().parse_args(argv)
    if is_launched() and arguments.command == "prepare":
        return _prepare(arguments, _ranks())  # errors are raised, and end all ranks
    return exit_code_of(lambda: arguments.act(arguments))


def _ranks() -> Communicator:
    from mpitrain.comm import init

    return init()


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m mpitrain.data", description="Make and describe data sets.")
    parser.add_argument("--version", action="version", version=VERSION)
    commands = parser.add_subparsers(dest="command", required=True)
    prepare = commands.add_parser(
        "prepare",
        help="make a data set folder of HDF5 shards",
        epilog=_SOURCES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    prepare.set_defaults(act=_prepare)
    prepare.add_argument("sources", nargs="+", metavar="SOURCE", help="files or folders, all of one kind")
    prepare.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to create")
    prepare.add_argument("--held-out", type=float, default=0.05, metavar="F", help="fraction for evaluation [0.05]")
    prepare.add_argument("--tokenizer", type=Path, metavar="FILE", help="text: a Hugging Face tokenizer.json")
    _add_fields(prepare)
    pack = "pack whole documents into samples of S tokens; a file of text is one document"
    prepare.add_argument("--pack", type=positive_integer, metavar="S", help=pack)
    prepare.add_argument("--blank-lines", action="store_true", help="text: documents end at blank lines")
    prepare.add_argument("--end-token", metavar="T", help="token after each document: its name or number, or none")
    prepare.add_argument("--dtype", choices=("uint16", "uint32"), help="tokens in .bin: their type [uint16]")
    prepare.add_argument("--vocabulary", type=positive_integer, metavar="N", help="tokens: size of the vocabulary")
    prepare.add_argument("--size", type=_size, metavar="HxW", help="images: size in pixels, such as 224 or 128x256")
    prepare.add_argument("--label", metavar="COLUMN", help="tables: label column, by name or number from 1")
    _add_options(prepare)
    _add_variables(prepare)
    prepare.add_argument("--kind", metavar="MODULE:FUNCTION", help="your own function that returns a kind of input")
    prepare.add_argument("--shard-mb", type=_positive, default=256, metavar="MB", help="MiB of data per shard [256]")
    tokenizer = commands.add_parser("tokenizer", help="train a tokenizer on text, JSON lines or parquet")
    tokenizer.set_defaults(act=_tokenizer)
    tokenizer.add_argument("sources", nargs="+", metavar="SOURCE", help="files or folders of text, as for prepare")
    tokenizer.add_argument("--out", required=True, type=Path, metavar="FILE", help="tokenizer.json to create")
    tokenizer.add_argument("--vocabulary", type=positive_integer, default=32768, metavar="N", help="tokens [32768]")
    tokenizer.add_argument("--kind", choices=("bpe",), default="bpe", help="byte-level byte pair encoding [bpe]")
    _add_fields(tokenizer)
    info = commands.add_parser("info", help="describe a data set folder")
    info.set_defaults(act=_info)
    info.add_argument("dir", type=Path, metavar="DIR")
    info.add_argument("--verify", action="store_true", help="read everything and check every hash")
    return parser


def _add_fields(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", metavar="FIELD", help="JSON lines, parquet: field with the text [text]")
    parser.add_argument("--prompt", metavar="FIELD", help="JSON lines, parquet: field that is not trained on")
    parser.add_argument("--completion", metavar="FIELD", help="with --prompt: field that is trained on [completion]")
    parser.add_argument("--encoding", metavar="NAME", help="text: its encoding, if not UTF-8, such as utf-16")


def _add_options(prepare: argparse.ArgumentParser) -> None:
    add = prepare.add_argument
    add("--columns", type=_names, metavar="A,B", help="tables: columns to learn from, names or numbers [all]")
    add("--drop", type=_names, metavar="A,B", help="tables: columns not to learn from")
    add("--missing", choices=get_args(Missing), help="tables, HDF5...: replacement of missing values; drop skips rows")
    add("--categories", choices=get_args(Categories), help="tables: encoding of texts, as several numbers or one")
    add("--scale", choices=get_args(Scale), help="tables, HDF5...: scale numbers to mean 0 and deviation 1")
    add("--like", type=Path, metavar="DIR", help="tables, HDF5...: convert as data set DIR did, to evaluate")
    add("--allow-nonfinite", action="store_true", help="tables, arrays, HDF5...: accept nan and infinite numbers")
    add("--skip-bad", action="store_true", help="skip images that cannot be read, and table rows of another length")
    add("--classes", type=Path, metavar="FILE", help="archives of images: file with one class name per line")


def _add_variables(prepare: argparse.ArgumentParser) -> None:
    add = prepare.add_argument
    add("--x", type=_names, metavar="A,B", help="HDF5, NetCDF, Zarr: variables that become x [x]")
    add("--y", type=_names, metavar="A,B", help="variables that become y [y; with --ahead those of x]")
    add("--samples", metavar="AXIS", help="axis along which the samples lie, such as time [the first one]")
    add("--select", type=_names, metavar="AXIS=A:B", help="use a part of axes: time=0:365,level=2:5")
    add("--ahead", type=positive_integer, metavar="N", help="pairs on an axis of time: y lies N rows after x")
    add("--in-place", action="store_true", help="make an index of files and read them where they lie; also images")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def _size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 224 or 128x256 (height x width)")
    return int(match[1]), int(match[2] or match[1])


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _prepare(arguments: argparse.Namespace, world: Communicator | None = None) -> int:
    from mpitrain.data.prepare import PrepareOptions, prepare

    more = []
    if arguments.kind:
        from mpitrain.config.named import find

        more = [find("--kind", arguments.kind)()]
    with _progress() as progress:
        manifest = prepare(
            arguments.sources,
            arguments.out,
            held_out=arguments.held_out,
            options=PrepareOptions(**{each.name: getattr(arguments, each.name) for each in fields(PrepareOptions)}),
            shard_bytes=max(1, round(arguments.shard_mb * 2**20)),
            progress=progress if sys.stderr.isatty() else None,
            more=more,
            world=world,
        )
    if world is not None and world.rank:
        return EXIT_DONE
    echo(*describe(arguments.out, manifest))
    echo(f"\ntrain on it: python -m mpitrain.train --data.path {shlex.quote(str(arguments.out))}{_settings(manifest)}")
    return EXIT_DONE


def _settings(manifest: DatasetManifest) -> str:
    """Return the settings that training on a data set needs, as command-line arguments."""
    from mpitrain.config.training import TrainSection
    from mpitrain.layers.images import is_image

    arguments = f" --model.sequence {manifest.pack}" if manifest.pack else ""
    x = next((each for each in manifest.fields if each.name == "x"), None)
    if manifest.kind != "tokens" and x is not None:
        classifies_images = is_image(manifest.sample_shape) and not manifest.fields[-1].shape
        arguments += f" --model.name {'resnet' if classifies_images else 'mlp'}"
        samples = manifest.splits[TRAIN].rows
        arguments += f" --train.batch {samples}" if samples < TrainSection().batch else ""
    return arguments


def _tokenizer(arguments: argparse.Namespace) -> int:
    from mpitrain.data.prepare import PrepareOptions, train_tokenizer

    options = {key: getattr(arguments, key) for key in ("text", "prompt", "completion", "encoding")}
    size = train_tokenizer(arguments.sources, arguments.out, arguments.vocabulary, PrepareOptions(**options))
    fewer = " (the text gives no more than these)" if size < arguments.vocabulary else ""
    echo(f"{arguments.out}: {size:,} tokens{fewer}")
    echo(f"\nuse it: python -m mpitrain.data prepare SOURCE... --tokenizer {arguments.out} --out DIR")
    return EXIT_DONE


def _info(arguments: argparse.Namespace) -> int:
    from mpitrain.data.dataset import ArrayDataset, open_dataset
    from mpitrain.data.format import read_manifest
    from mpitrain.data.in_place import verify_in_place
    from mpitrain.data.shards import verify

    folder = arguments.dir
    manifest = read_manifest(folder)
    echo(*describe(folder, manifest))
    check = verify_in_place if manifest.in_place else verify
    damages = list(check(folder, manifest)) if arguments.verify else []
    for split in manifest.splits if arguments.verify and manifest.images and not damages else ():
        data = open_dataset(folder, split)
        assert isinstance(data, ArrayDataset)
        damages += data.damaged_images()
    if damages:
        echo(*damages)
        raise InputError(f"data set {folder}: {len(damages)} damaged places, listed above; restore or prepare it again")
    print(f"hashes      {'all right' if arguments.verify else 'not checked (--verify reads everything)'}")
    return EXIT_DONE


_CLEAR_LINE = "\r\x1b[K"  # back to the beginning of the terminal line, and clear it


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that shows progress on one terminal line, updated twice a second and cleared at the end."""
    start = shown = time.monotonic()
    of_splits: dict[str, int] = {}  # bytes

    def show(split: str, rows: int, written: int) -> None:
        nonlocal shown
        of_splits[split] = written
        now = time.monotonic()
        if now - shown >= 0.5:
            shown = now
            done = sum(of_splits.values()) / 2**20
            print(
                f"{_CLEAR_LINE}{done:,.0f} MiB, {done / (now - start):,.0f} MiB/s", end="", file=sys.stderr, flush=True
            )

    try:
        yield show
    finally:
        if shown > start:
            print(_CLEAR_LINE, end="", file=sys.stderr, flush=True)


# -- Description of a data set, as lines of text


_MOST_CLASSES = 12  # shown by name
_LONGEST, _LONGEST_NAME = 1000, 100  # characters of a value, and of a class
_TITLES = {TRAIN: "train", HELD_OUT: "held out"}
_READ_AS = {"integer": "int64", "float": "float32", "unit": "float32 of value/255"}


def describe(folder: Path, manifest: DatasetManifest) -> Iterator[str]:
    """Yield lines that describe a data set: a label and a value, with the values aligned.

    Args:
        folder: Folder of the data set, to be named in the first line.
        manifest: Manifest of the data set.
    """
    for label, value in _facts(folder, manifest):
        yield f"{printable(label):<12}{printable(value, _LONGEST)}"


def _facts(folder: Path, manifest: DatasetManifest) -> Iterator[tuple[str, str]]:
    unit = "tokens" if manifest.kind == "tokens" else "samples"
    yield "data set", str(folder)
    yield "kind", _kind(manifest)
    for name, split in manifest.splits.items():
        size = bytes_text(sum(shard.bytes for shard in split.shards))
        where = "in place" if manifest.in_place else f"{size} in {counted(len(split.shards), 'shard')}"
        yield _TITLES[name], f"{split.rows:,} {unit}, {where}"
    if manifest.kind == "arrays":
        for field in manifest.fields:
            encoded = manifest.images is not None and field.name == "x"
            shape = " x ".join(str(n) for n in (manifest.sample_shape if encoded else field.shape)) or "one number"
            stored = "decoded when it is read" if encoded else f"stored as {field.dtype}"
            yield field.name, f"{shape}, {stored}, read as {_READ_AS[field.given]}"
    for variable in (manifest.variables or ())[:_MOST_CLASSES]:
        units = f" in {variable.units}" if variable.units else ""
        scaled = (variable.shift, variable.scale) != (0.0, 1.0)
        how = f", minus {variable.shift:g}, divided by {variable.scale:g}" if scaled else ""
        yield "", f"{variable.field}: {variable.name} [{', '.join(variable.dimensions)}]{units}{how}"
    if manifest.in_place:
        later = manifest.in_place.ahead
        yield "in place", f"{counted(len(manifest.in_place.files), 'file')}, such as {manifest.in_place.files[0].path}"
        yield from [("pairs", f"y lies {counted(later, 'row')} after x")] * bool(later)
    if manifest.images:
        yield "in place", f"images in {manifest.images.root}"
    if manifest.vocabulary is not None:
        yield "vocabulary", f"{manifest.vocabulary:,}"
    if manifest.kind == "tokens":
        end = manifest.document_end
        yield "documents", "no token between them" if end is None else f"token {end} ends each of them"
        if manifest.pack:
            yield "samples", f"whole documents packed into {manifest.pack:,} tokens (model.sequence {manifest.pack})"
        if len(manifest.fields) > 1:
            yield "mask", "targets that are not trained on: prompts, and padding of samples"
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


def _classes(manifest: DatasetManifest, classes: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    counts = [split.class_counts or (0,) * len(classes) for split in manifest.splits.values()]
    headings = ", ".join(_TITLES[name] for name in manifest.splits)
    yield "classes", f"{len(classes):,}; samples of each ({headings}):"
    for number, name in list(enumerate(classes))[:_MOST_CLASSES]:
        of_each = " ".join(f"{count[number]:>9,}" for count in counts)
        yield "", f"{number:>3}  {printable(name, _LONGEST_NAME):<20} {of_each}"
    if len(classes) > _MOST_CLASSES:
        yield "", f"...  and {len(classes) - _MOST_CLASSES:,} more"


if __name__ == "__main__":
    sys.exit(main())
