"""What `data.path` means: a data set folder, the word `digits`, or nothing for Python's own source as text.

The two embedded data sets are made on first use, by one process per node while the others wait (commit.py).
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

from mpitrain.data.commit import make_dataset
from mpitrain.data.format import TOKENIZER, read_manifest
from mpitrain.errors import InputError

DIGITS = "digits"
PYTHON_SOURCE = "python-source"

_SHARD_BYTES = 256 << 20
_HELD_OUT_TEXT = 0.05
_HELD_OUT_DIGITS = 0.1
# other people's packages, and tests: half of the tree, and mostly tables
_NOT_TEXT = frozenset(("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"))


def resolve(data_path: str, root: Path = Path("data")) -> Path:
    """Find the data set folder that `data.path` names. Any number of processes may ask at once.

    Args:
        data_path: A folder, the word `digits`, or nothing for Python's own source. A folder of your own called digits
            is reached as ./digits.
        root: Where the embedded data sets are made, if they are not there.

    Raises:
        InputError: There is no data set, or the embedded one cannot be made.
    """
    embedded = {"": (PYTHON_SOURCE, _fill_python_source), DIGITS: (DIGITS, _fill_digits)}
    if data_path not in embedded:
        read_manifest(Path(data_path))
        return Path(data_path)
    name, fill = embedded[data_path]
    make_dataset(root / name, fill, once=True)
    return root / name


def tokenizer_of(data_path: str) -> Path | None:
    """The file of the tokenizer that the data set of `data.path` was made with; None where there is none."""
    path = Path(data_path) / TOKENIZER
    return path if data_path not in ("", DIGITS) and path.is_file() else None


def _fill_python_source(folder: Path) -> None:
    from mpitrain.data.sources.text import text_source
    from mpitrain.data.writer import write_dataset

    library = Path(sysconfig.get_paths()["stdlib"])
    files = python_files(library)
    if not files:
        raise InputError(f"Python's standard library has no source in {library}; give data.path")
    name = f"Python {sys.version.split()[0]} standard library"
    write_dataset(folder, text_source(files, None), names=(name,), held_out=_HELD_OUT_TEXT, shard_bytes=_SHARD_BYTES)


def python_files(library: Path) -> list[Path]:
    """The .py files of a standard library, in the order of their paths, without packages of others and tests."""
    found: list[Path] = []
    for top, folders, files in os.walk(library):
        folders[:] = [name for name in folders if name not in _NOT_TEXT]
        found += [Path(top, name) for name in files if name.endswith(".py")]
    return sorted(path for path in found if path.is_file())


def _fill_digits(folder: Path) -> None:
    import numpy as np

    from mpitrain.data.format import FieldSpec
    from mpitrain.data.sources.split import partition
    from mpitrain.data.writer import Source, write_dataset

    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise InputError('data.path digits needs the package scikit-learn; pip install "mpitrain[digits]"') from None
    digits = load_digits()
    x = (digits.images / 16.0).astype(np.float32)[:, None]  # grey values are 0 to 16
    y = digits.target.astype(np.int32)

    fields = (
        FieldSpec(name="x", dtype="float32", shape=x.shape[1:], given="float"),
        FieldSpec(name="y", dtype="int32", shape=(), given="integer"),
    )
    write_dataset(
        folder,
        Source("arrays", fields, partition(iter, [(x, y)]), files=1),
        names=("scikit-learn's bundled digits (UCI optical recognition of handwritten digits)",),
        held_out=_HELD_OUT_DIGITS,
        shard_bytes=_SHARD_BYTES,
    )
