"""What lies in a data set folder: the format, its manifest, and how a manifest is read and written.

    DIR/
      dataset.json         the manifest, written last: what is here, with the hash of everything else
      train-00000.h5       shards of the split `train`, filled one after the other
      train-00001.h5
      held_out-00000.h5    shards of the split `held_out`, where there is one
      tokenizer.json       a copy of the tokenizer file, for tokenized text only

A shard is an HDF5 file (libver v110, so that its metadata are checksummed) with one contiguous, little-endian
data set per field and one table of hashes per field:

    /tokens  (rows,)                         kind "tokens": one stream per split, cut into shards
    /mask    (rows,) uint8                   kind "tokens", where some are not trained on: 1 where a token is, else 0
    /x, /y   (rows, *shape)                  kind "arrays": one row per sample
    /crc32/FIELD  (extents,) uint32          CRC-32 of the stored bytes of each extent of that field

An extent is a whole number of rows, R = max(1, extent_bytes // bytes of a row); the last one may be short:

    rows     0 ... R-1 | R ... 2R-1 | 2R ... rows-1
    extent       0     |     1      |      2

Trust is a chain: dataset.json ends with the CRC-32 of its own content; it holds the CRC-32 of every shard's
hash tables; a table holds the CRC-32 of each extent. A reader checks just the links that it touches.

A sample of kind "tokens" with sequence length S is tokens[i*S : i*S + S + 1] of the concatenated stream: inputs
are its first S tokens, targets its last S. There are (rows - 1) // S samples.

How a stored field is handed over (`given`): "integer" as int64, "float" as float32, "unit" as float32 of the
stored value / 255 (images kept as uint8).
"""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, Field, StrictInt, StrictStr, ValidationError, model_validator

from mpitrain.errors import InputError, first_problem
from mpitrain.storage.disk import read_plain, write_durably

FORMAT: Literal["mpitrain-dataset"] = "mpitrain-dataset"
VERSION: Literal[1] = 1
MANIFEST = "dataset.json"
TOKENIZER = "tokenizer.json"
TRAIN = "train"
HELD_OUT = "held_out"
TOKENS, MASK = "tokens", "mask"  # fields
UNCOUNTED = -100  # a target that is not trained on, as torch's cross-entropy has it
EXTENT_BYTES = 64 * 1024  # small, because the first random read of a sample reads its whole extent

# what options of `prepare` choose among
Missing = Literal["mean", "median", "zero", "drop"]
Categories = Literal["onehot", "codes"]
Scale = Literal["standard"]

_PREPARE = "python -m mpitrain.data prepare"
_LARGEST_MANIFEST = 256 << 20  # bytes
Count = Annotated[StrictInt, Field(ge=0, lt=1 << 63)]
Crc = Annotated[StrictInt, Field(ge=0, lt=1 << 32)]
Dtype = Annotated[StrictStr, Field(pattern=r"^(bool|u?int(8|16|32|64)|float(16|32|64))$")]


class _Part(BaseModel, extra="forbid", frozen=True):
    """A part of the manifest, which never changes once made, and knows no other keys."""


class FieldSpec(_Part):
    """One array of a row.

    Attributes:
        name: Its name.
        dtype: The dtype that it is stored in, by NumPy's name.
        shape: The shape that it has in a row.
        given: What form a reader hands it over in; see above.
    """

    name: Literal["tokens", "mask", "x", "y"]
    dtype: Dtype
    shape: Annotated[tuple[Count, ...], Field(max_length=31)]
    given: Literal["integer", "float", "unit"]

    @property
    def stored(self) -> np.dtype[Any]:
        """The dtype of the bytes on the disk, which are always little-endian."""
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def handed(self) -> np.dtype[Any]:
        """The dtype that a reader hands over, int64 or float32."""
        return np.dtype(np.int64 if self.given == "integer" else np.float32)

    @property
    def row_bytes(self) -> int:
        """How many bytes of it a row has."""
        return self.stored.itemsize * math.prod(self.shape)

    def extent_rows(self, extent_bytes: int) -> int:
        """How many rows an extent of about so many bytes has."""
        return max(1, extent_bytes // max(1, self.row_bytes))

    def extents(self, rows: int, extent_bytes: int) -> int:
        """How many extents so many rows have."""
        return -(-rows // self.extent_rows(extent_bytes))


class ShardSpec(_Part):
    """One shard.

    Attributes:
        file: The name of its file.
        rows: How many rows it has.
        bytes: How many bytes the file has.
        tables: The CRC-32 of each field's table of hashes.
    """

    file: StrictStr = Field(pattern=r"^[a-z_]+-[0-9]{5,}\.h5$", max_length=100)
    rows: Count = Field(ge=1)
    bytes: Count = Field(ge=1)
    tables: dict[str, Crc]


class SplitSpec(_Part):
    """One split.

    Attributes:
        rows: How many rows it has.
        shards: Its shards, in order.
        class_counts: How many rows of each class it has, where y are class numbers.
    """

    rows: Count = Field(ge=1)
    shards: tuple[ShardSpec, ...]
    class_counts: tuple[Count, ...] | None = None


class Origin(_Part):
    """Where the data came from.

    Attributes:
        sources: What was given.
        files: How many files that was.
        prepared: When the data set was made, in UTC.
        notes: Sentences about the input, for people.
    """

    sources: tuple[StrictStr, ...]
    files: Count
    prepared: StrictStr
    notes: tuple[StrictStr, ...] = ()


class ColumnSpec(_Part):
    """A column of a table, and what becomes of it in x; `mpitrain.data.sources.table_files` applies it.

    Attributes:
        name: Its name, or its number from 1 in a table without a header.
        categories: The texts that it has, numbered in this order; "" is a missing one. None for a column of numbers.
        onehot: Whether a text becomes one number for each category, of which one is 1, instead of its number.
        fill: What a missing number becomes; None where there must be none.
        nonfinite: Whether nan and infinite numbers are taken as they are.
        shift: Subtracted from its numbers, before they are
        scale: divided by this.
    """

    name: StrictStr
    categories: tuple[StrictStr, ...] | None = None
    onehot: bool = False
    fill: float | None = None
    nonfinite: bool = False
    shift: float = 0.0
    scale: float = 1.0

    @property
    def width(self) -> int:
        """How many numbers of x it becomes."""
        return len(self.categories) if self.categories and self.onehot else 1


class DatasetManifest(_Part):
    """The content of dataset.json.

    Attributes:
        format: What kind of file it is.
        version: The version of the format.
        kind: "tokens" or "arrays".
        fields: The arrays of a row.
        extent_bytes: About how many bytes have a hash of their own.
        vocabulary: The size of the vocabulary, where x are tokens or codes.
        tokenizer_crc32: The CRC-32 of the copied tokenizer file, where there is one.
        document_end: The token after each document, where documents have one.
        pack: The tokens of a sample that whole documents were packed into; None for a stream.
        classes: The names of the classes, where y are class numbers.
        splits: The splits, by their names.
        columns: The columns of the table that x was made of, where it was one.
        origin: Where the data came from.
    """

    format: Literal["mpitrain-dataset"] = FORMAT
    version: Literal[1] = VERSION
    kind: Literal["tokens", "arrays"]
    fields: tuple[FieldSpec, ...]
    extent_bytes: Count = Field(ge=1)
    vocabulary: Count | None
    tokenizer_crc32: Crc | None
    document_end: Count | None = None
    pack: Annotated[StrictInt, Field(ge=1, lt=1 << 32)] | None = None
    classes: tuple[StrictStr, ...] | None
    splits: dict[Annotated[StrictStr, Field(pattern=f"^({TRAIN}|{HELD_OUT})$")], SplitSpec]
    columns: tuple[ColumnSpec, ...] | None = None
    origin: Origin

    @model_validator(mode="after")
    def _consistent(self) -> DatasetManifest:
        """Nothing is larger than the files that hold it, whose sizes are compared when they are opened."""
        names = [field.name for field in self.fields]
        if names not in ([[TOKENS], [TOKENS, MASK]] if self.kind == "tokens" else [["x", "y"]]):
            raise ValueError(f"fields {names} are not those of {self.kind}")
        if self.kind == "tokens" and any(field.shape for field in self.fields):
            raise ValueError("a token is one number")
        if self.document_end is not None and self.document_end >= (self.vocabulary or 0):
            raise ValueError(f"document_end {self.document_end} is beyond the vocabulary")
        for name, split in self.splits.items():
            if split.rows != sum(shard.rows for shard in split.shards):
                raise ValueError(f"split {name} has {split.rows} rows, its shards have others")
            if self.pack and split.rows % (self.pack + 1):
                raise ValueError(f"split {name} has {split.rows} rows, which are no samples of {self.pack + 1}")
            for shard in split.shards:
                nbytes = sum(
                    shard.rows * f.row_bytes + 4 * f.extents(shard.rows, self.extent_bytes) for f in self.fields
                )
                if nbytes > shard.bytes or list(shard.tables) != names:
                    raise ValueError(f"shard {shard.file} of {shard.bytes} bytes cannot hold its {shard.rows} rows")
        return self

    @property
    def shards(self) -> list[ShardSpec]:
        """The shards of all splits."""
        return [shard for split in self.splits.values() for shard in split.shards]

    @property
    def identity(self) -> str:
        """Eight hexadecimal digits that change when any stored value does (not with time or place of the making)."""
        splits = {name: split.model_dump(mode="json") for name, split in self.splits.items()}
        fields = [field.model_dump(mode="json") for field in self.fields]
        kept = [value for value in (self.document_end, self.pack) if value is not None]  # none of them: as ever
        return f"{zlib.crc32(_canonical([self.kind, fields, splits, *kept])):08x}"


def _canonical(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def write_manifest(folder: Path, manifest: DatasetManifest) -> None:
    """Write dataset.json, with its own CRC-32 as the last key. It is on the disk afterwards."""
    content = manifest.model_dump(mode="json")
    for key in ("document_end", "pack"):
        if content[key] is None:
            del content[key]
    content["crc32"] = zlib.crc32(_canonical(content))
    write_durably(folder / MANIFEST, f"{json.dumps(content, indent=1)}\n".encode("ascii"))


def is_dataset(folder: Path) -> bool:
    """Whether a finished data set is there. One that is half made never has its final name."""
    return (folder / MANIFEST).is_file()


def read_manifest(folder: Path) -> DatasetManifest:
    """Read and check dataset.json.

    Raises:
        InputError: There is no such folder, it is no data set, or dataset.json cannot be read or is damaged.
    """
    path = folder / MANIFEST
    try:
        text = read_plain(path, _LARGEST_MANIFEST)
    except NotADirectoryError:
        raise InputError(
            f"data set {folder} is a file, not a data set folder; make one of it with `{_PREPARE} {folder} --out DIR`"
        ) from None
    except FileNotFoundError:
        if not folder.exists():
            raise InputError(
                f"data set {folder} does not exist; make it with `{_PREPARE} SOURCE... --out {folder}`"
            ) from None
        raise InputError(
            f"data set {folder} has no {MANIFEST}, so it is not a data set; make one with "
            f"`{_PREPARE} SOURCE... --out DIR`"
        ) from None
    except PermissionError:
        raise InputError(f"data set {folder}: no permission to read {MANIFEST}; ask its owner for access") from None
    except OSError as error:
        raise InputError(f"data set {folder}: {MANIFEST} cannot be read: {error.strerror}") from None
    return _parse(text, folder)


def _parse(text: bytes, folder: Path) -> DatasetManifest:
    again = f"prepare the data set again, or restore {MANIFEST}"
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise InputError(f"data set {folder}: {MANIFEST} is damaged (not JSON); {again}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InputError(f"data set {folder}: {MANIFEST} is not a manifest of mpitrain; {again}")
    if content.get("version") != VERSION:
        raise InputError(
            f"data set {folder} has format version {content.get('version')!r:.40}, this mpitrain reads {VERSION}; "
            "prepare the data set again"
        )
    if content.pop("crc32", None) != zlib.crc32(_canonical(content)):
        raise InputError(f"data set {folder}: {MANIFEST} was changed or damaged (its hash does not match); {again}")
    try:
        return DatasetManifest.model_validate(content)
    except ValidationError as error:
        raise InputError(f"data set {folder}: {MANIFEST}: {first_problem(error)}; {again}") from None
