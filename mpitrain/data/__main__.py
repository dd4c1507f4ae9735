"""`python -m mpitrain.data prepare | info`: makes a data set folder, describes one. Imports neither torch nor MPI."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mpitrain.errors import EXIT_DONE, InputError, exit_code_of

_SOURCES = """\
sources (all of one kind):
  text files, folders of text      bytes, or tokens with --tokenizer
  x.npy y.npy, or one .npz         rows of arrays; also x_train y_train x_test y_test
  a folder of image folders        one class per subfolder; --size where sizes differ
  IDX files (MNIST), also .gz      images and labels; t10k is held out
  .csv, .tsv                       numbers and a --label column
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line says; returns the exit code."""
    arguments = _parser().parse_args(argv)
    return exit_code_of(lambda: arguments.act(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mpitrain.data", description="make and describe data sets")
    commands = parser.add_subparsers(dest="command", required=True)
    prepare = commands.add_parser(
        "prepare",
        help="make a data set folder of HDF5 shards",
        epilog=_SOURCES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    prepare.set_defaults(act=_prepare)
    prepare.add_argument("sources", nargs="+", metavar="SOURCE", help="files or folders, all of one kind")
    prepare.add_argument("--out", required=True, type=Path, metavar="DIR", help="the folder to make")
    prepare.add_argument("--held-out", type=float, default=0.05, metavar="F", help="fraction kept to evaluate [0.05]")
    prepare.add_argument("--tokenizer", type=Path, metavar="FILE", help="text: a Hugging Face tokenizer.json")
    prepare.add_argument("--size", type=_size, metavar="HxW", help="images: pixels, as 224 or 128x256")
    prepare.add_argument("--label", metavar="COLUMN", help="CSV: name or number (from 1) of the label's column")
    prepare.add_argument("--kind", metavar="MODULE:FUNCTION", help="a function of yours that returns a kind of input")
    prepare.add_argument("--shard-mb", type=_positive, default=256, metavar="MB", help="MiB of data per shard [256]")
    info = commands.add_parser("info", help="describe a data set folder")
    info.set_defaults(act=_info)
    info.add_argument("dir", type=Path, metavar="DIR")
    info.add_argument("--verify", action="store_true", help="read everything and check every hash")
    return parser


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


def _prepare(arguments: argparse.Namespace) -> int:
    from mpitrain.data.info import describe
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
            options=PrepareOptions(arguments.tokenizer, arguments.size, arguments.label),
            shard_bytes=max(1, round(arguments.shard_mb * 2**20)),
            progress=progress if sys.stderr.isatty() else None,
            more=more,
        )
    print(*describe(arguments.out, manifest), sep="\n")
    print(f"\ntrain on it: python -m mpitrain.train --data.path {arguments.out}")
    return EXIT_DONE


def _info(arguments: argparse.Namespace) -> int:
    from mpitrain.data.dataset import verify
    from mpitrain.data.format import read_manifest
    from mpitrain.data.info import describe

    folder = arguments.dir
    manifest = read_manifest(folder)
    print(*describe(folder, manifest), sep="\n")
    damages = list(verify(folder, manifest)) if arguments.verify else []
    if damages:
        print(*damages, sep="\n")
        raise InputError(f"data set {folder}: {len(damages)} damaged places, listed above; restore or prepare it again")
    print(f"hashes      {'all right' if arguments.verify else 'not checked (--verify reads everything)'}")
    return EXIT_DONE


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """One line on a terminal, rewritten twice a second and cleared at the end."""
    start = shown = time.monotonic()
    of_splits: dict[str, int] = {}  # bytes
    width = 0

    def show(split: str, rows: int, written: int) -> None:
        nonlocal shown, width
        of_splits[split] = written
        now = time.monotonic()
        if now - shown >= 0.5:
            shown = now
            total = sum(of_splits.values()) / 2**20
            line = f"{total:,.0f} MiB, {total / (now - start):,.0f} MiB/s"
            print("\r" + line.ljust(width), end="", file=sys.stderr, flush=True)
            width = max(width, len(line))

    try:
        yield show
    finally:
        if width:
            print("\r" + " " * width, end="\r", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
