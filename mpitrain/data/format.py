"""Format of a data set folder, its manifest, and functions that read and write a manifest.

    DIR/
      dataset.json         the manifest, written last: lists the content, with the hash of everything else
      train-00000.h5       shards of the split `train`, filled one after the other
      train-00001.h5
      held_out-00000.h5    shards of the split `held_out`, if there is one
      tokenizer.json       a copy of the tokenizer file, for tokenized text only
      index.bin            for a data set in place: the hashes and places of its chunks, instead of shards

A shard is an HDF5 file (libver v110, so that its metadata is checksummed) with one contiguous, little-endian
data set per field and one table of hashes per field:

    /tokens  (rows,)                         kind "tokens": one stream per split, cut into shards
    /mask    (rows,) uint8                   kind "tokens", optional: 1 for a token that is trained on, else 0
    /x, /y   (rows, *shape)                  kind "arrays": one row per sample
    /crc32/FIELD  (extents,) uint32          CRC-32 of the stored bytes of each extent of that field

An extent is a whole number of rows, R = max(1, extent_bytes // bytes of a row); the last one may be shorter:

    rows     0 ... R-1 | R ... 2R-1 | 2R ... rows-1
    extent       0     |     1      |      2

The hashes form a chain: dataset.json ends with the CRC-32 of its own content; it contains the CRC-32 of every shard's
hash tables; a table contains the CRC-32 of each extent. A reader checks only the parts of the chain that it uses.

A sample of kind "tokens" with sequence length S is tokens[i*S : i*S + S + 1] of the concatenated stream: the inputs
are its first S tokens, the targets its last S. There are (rows - 1) // S samples.

The entry `given` of a field defines how stored values are returned: "integer" as int64, "float" as float32, "unit" as
float32 of the stored value / 255 (images stored as uint8).
"""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, Field, StrictBool, StrictInt, StrictStr, ValidationError, model_validator

from mpitrain.errors import InputError, first_problem
from mpitrain.storage.disk import read_plain, write_durably

FORMAT: Literal["mpitrain-dataset"] = "mpitrain-dataset"
VERSION: Literal[1] = 1
MANIFEST = "dataset.json"
TOKENIZER = "tokenizer.json"
INDEX = "index.bin"
TRAIN = "train"
HELD_OUT = "held_out"
TOKENS, MASK = "tokens", "mask"  # fields
UNCOUNTED = -100  # a target excluded from training, as in torch's cross-entropy
EXTENT_BYTES = 64 * 1024  # small, because the first random read of a sample reads its whole extent

# values of options of `prepare`
Missing = Literal["mean", "median", "zero", "drop"]
Categories = Literal["onehot", "codes"]
Scale = Literal["standard"]

LARGEST_CHUNK = 1 << 30  # bytes of a chunk of an array in place, which must fit into memory
_PREPARE = "python -m mpitrain.data prepare"
_OPTIONAL = ("document_end", "pack", "variables", "in_place", "images")  # keys left out where there is no value
_LARGEST_MANIFEST = 256 << 20  # bytes
Count = Annotated[StrictInt, Field(ge=0, lt=1 << 63)]
Crc = Annotated[StrictInt, Field(ge=0, lt=1 << 32)]
Dtype = Annotated[StrictStr, Field(pattern=r"^(bool|u?int(8|16|32|64)|float(16|32|64))$")]


class _Part(BaseModel, extra="forbid", frozen=True):
    """A part of the manifest: immutable, and without unknown keys."""


class FieldSpec(_Part):
    """One array of a row.

    Attributes:
        name: Name of the field.
        dtype: Stored dtype, by NumPy's name.
        shape: Shape of the array in one row.
        given: Form in which a reader returns it: "integer" as int64, "float" as float32, "unit" as value / 255 in
            float32.
    """

    name: Literal["tokens", "mask", "x", "y"]
    dtype: Dtype
    shape: Annotated[tuple[Count, ...], Field(max_length=31)]
    given: Literal["integer", "float", "unit"]

    @property
    def stored(self) -> np.dtype[Any]:
        """Dtype of the bytes on the disk, always little-endian."""
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def handed(self) -> np.dtype[Any]:
        """Dtype that a reader returns, int64 or float32."""
        return np.dtype(np.int64 if self.given == "integer" else np.float32)

    @property
    def row_bytes(self) -> int:
        """Bytes of the field in one row."""
        return self.stored.itemsize * math.prod(self.shape)

    def extent_rows(self, extent_bytes: int) -> int:
        """Return the number of rows in an extent of about `extent_bytes` bytes."""
        return max(1, extent_bytes // max(1, self.row_bytes))

    def extents(self, rows: int, extent_bytes: int) -> int:
        """Return the number of extents of a field with `rows` rows.

        Args:
            rows: Number of rows.
            extent_bytes: Approximate bytes of an extent.
        """
        return -(-rows // self.extent_rows(extent_bytes))


class ShardSpec(_Part):
    """One shard.

    Attributes:
        file: File name.
        rows: Number of rows.
        bytes: Size of the file in bytes.
        tables: CRC-32 of the table of hashes of each field, by the name of the field.
    """

    file: StrictStr = Field(pattern=r"^[a-z_]+-[0-9]{5,}\.h5$", max_length=100)
    rows: Count = Field(ge=1)
    bytes: Count = Field(ge=1)
    tables: dict[str, Crc]


class SplitSpec(_Part):
    """One split.

    Attributes:
        rows: Number of rows.
        shards: Shards, in order.
        class_counts: Number of rows of each class, if y are class numbers.
    """

    rows: Count = Field(ge=1)
    shards: tuple[ShardSpec, ...]
    class_counts: tuple[Count, ...] | None = None


class Origin(_Part):
    """Origin of the data.

    Attributes:
        sources: Names of the sources that were prepared.
        files: Number of files read.
        prepared: Time of preparation, in UTC.
        notes: Sentences about the input, for people.
    """

    sources: tuple[StrictStr, ...]
    files: Count
    prepared: StrictStr
    notes: tuple[StrictStr, ...] = ()


class ColumnSpec(_Part):
    """A column of a table and its conversion to numbers of x, which `mpitrain.data.sources.table_files` applies.

    A number becomes (number - shift) / scale.

    Attributes:
        name: Name of the column, or its number from 1 in a table without a header.
        categories: Texts of the column, numbered in this order; "" is a missing one. None for a column of numbers.
        onehot: If true, a text becomes one number per category, one of which is 1; else it becomes its number.
        fill: Replacement of a missing number; None if there must be none.
        nonfinite: If true, nan and infinite numbers are accepted.
        shift: Number to subtract.
        scale: Number to divide by, after the subtraction.
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
        """Count of numbers in x that the column becomes."""
        return len(self.categories) if self.categories and self.onehot else 1


class VariableSpec(_Part):
    """A variable of HDF5, NetCDF or Zarr files, and the conversion of its stored numbers into those of a sample.

    A stored number is missing if it is NaN or one of `missing`, and then becomes `fill`; every other one becomes stored
    * factor + offset. The model gets (number - shift) / scale.

    Attributes:
        field: Field that the variable is a part of.
        name: Name of the variable in its files.
        units: Units of the numbers, before shift and scale; "" if the files do not say.
        dimensions: Names of the axes of a sample, without the axis along which the samples lie.
        channels: Length that the variable takes of the field's first axis; 0 if the variable is the whole field.
        factor: Number to multiply a stored number with.
        offset: Number to add after that.
        missing: Stored numbers that mark missing values, besides NaN.
        fill: Replacement of a missing value, in `units`; None if there must be none.
        shift: Number to subtract.
        scale: Number to divide by, after the subtraction.
    """

    field: Literal["x", "y"]
    name: StrictStr
    units: StrictStr = ""
    dimensions: tuple[StrictStr, ...] = ()
    channels: Count = 0
    factor: float = 1.0
    offset: float = 0.0
    missing: tuple[float, ...] = ()
    fill: float | None = None
    shift: float = 0.0
    scale: Annotated[float, Field(gt=0)] = 1.0

    @property
    def meaning(self) -> tuple[str | float, ...]:
        """Properties that must be equal in data to train on and data to evaluate; the packing may differ."""
        return self.field, self.name, self.units, self.channels, self.shift, self.scale

    @property
    def converts(self) -> bool:
        """True if stored numbers differ from those of a sample."""
        plain = (self.factor, self.offset, self.fill, self.shift, self.scale) == (1.0, 0.0, None, 0.0, 1.0)
        return not plain


class PlacedArray(_Part):
    """A variable of one file that is read where it lies.

    Attributes:
        file: Number of the file.
        name: Name of the variable in it.
        dtype: Stored dtype with its byte order, as NumPy writes it.
        shape: Shape, with the axis of rows first.
        chunk: Shape of a chunk. A chunk at the end of an axis may be shorter, except in HDF5 files with filters.
        filters: Filters that HDF5 applied to each chunk, in this order; None if the array is contiguous.
        chunks: Number of chunks.
    """

    file: Count
    name: StrictStr
    dtype: Annotated[StrictStr, Field(pattern=r"^([<>][iuf][248]|\|[iub]1)$")]
    shape: Annotated[tuple[Count, ...], Field(min_length=1, max_length=32)]
    chunk: Annotated[tuple[Annotated[StrictInt, Field(ge=1, lt=1 << 63)], ...], Field(min_length=1, max_length=32)]
    filters: tuple[Literal["shuffle", "deflate", "fletcher32"], ...] | None = None
    chunks: Count

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks along each axis."""
        return tuple(-(-length // step) for length, step in zip(self.shape, self.chunk, strict=True))

    @model_validator(mode="after")
    def _consistent(self) -> PlacedArray:
        if len(self.chunk) != len(self.shape) or math.prod(self.grid) != self.chunks:
            raise ValueError(f"array {self.name} of shape {self.shape} has chunks of {self.chunk}")
        if math.prod(self.chunk) * np.dtype(self.dtype).itemsize > LARGEST_CHUNK:
            raise ValueError(f"array {self.name} has chunks of {self.chunk}")
        return self


class PlacedFile(_Part):
    """A user's file that is read where it lies.

    Attributes:
        path: Absolute path.
        store: "hdf5", or "zarr" for a folder.
        rows: Number of rows.
        bytes: Size in bytes of an HDF5 file; 0 for a Zarr store.
    """

    path: StrictStr
    store: Literal["hdf5", "zarr"]
    rows: Count
    bytes: Count


class SplitRows(_Part):
    """The rows of an input that are the samples of one split: some rows of a range, in order.

    Attributes:
        first: First row of the range.
        stop: Row after the last one.
        fraction: Numerator and denominator of the fraction of rows held out of the range (see `data.sources`); (0, 1)
            if all rows of the range are samples.
        held_out: If true, the samples are the rows that are held out; if false, the others.
    """

    first: Count
    stop: Count
    fraction: tuple[Count, Annotated[StrictInt, Field(ge=1, le=10**6)]] = (0, 1)
    held_out: StrictBool = False


class InPlaceSpec(_Part):
    """Place of the arrays of a data set that has no shards.

    Attributes:
        files: Files, whose rows are numbered one file after the other.
        arrays: Arrays of all files, file by file.
        ahead: Number of rows by which y lies after x.
        samples: Rows of each split.
        index_crc32: CRC-32 of the index.
    """

    files: tuple[PlacedFile, ...]
    arrays: tuple[PlacedArray, ...]
    ahead: Count
    samples: dict[StrictStr, SplitRows]
    index_crc32: Crc


class ImagesSpec(_Part):
    """Encoded images that stay in the user's files. The rows of x are their places; see `mpitrain.data.decoding`.

    Attributes:
        root: Absolute folder, to which the paths of the images are relative.
        shape: Shape of a decoded image, 3 x height x width.
        crop: True if an image of another size is scaled and cropped; false if all have this size.
    """

    root: StrictStr
    shape: tuple[Literal[3], Annotated[StrictInt, Field(ge=1)], Annotated[StrictInt, Field(ge=1)]]
    crop: StrictBool


class DatasetManifest(_Part):
    """Content of dataset.json.

    Attributes:
        format: Name of the file format.
        version: Version of the file format.
        kind: "tokens" or "arrays".
        fields: Arrays of a row.
        extent_bytes: Approximate number of bytes that share one hash.
        vocabulary: Size of the vocabulary, if x are tokens or codes.
        tokenizer_crc32: CRC-32 of the copied tokenizer file, if there is one.
        document_end: Token that ends each document, if documents have one.
        pack: Tokens per sample, if whole documents were packed into samples; None for a stream.
        classes: Names of the classes, if y are class numbers.
        splits: Splits, by name.
        columns: Columns of the table that x was made of, if it was a table.
        variables: Variables that x and y were made of, if they lay in HDF5, NetCDF or Zarr files.
        in_place: Place of the arrays, if they stay in the user's files; None if they lie in shards.
        images: Form of the images, if they stay encoded in the user's files.
        origin: Origin of the data.
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
    variables: tuple[VariableSpec, ...] | None = None
    in_place: InPlaceSpec | None = None
    images: ImagesSpec | None = None
    origin: Origin

    @model_validator(mode="after")
    def _consistent(self) -> DatasetManifest:
        """Check that the parts of the manifest agree, and that the rows fit into files of the listed sizes.

        The listed sizes are compared with the files when these are opened.
        """
        names = [field.name for field in self.fields]
        if names not in ([[TOKENS], [TOKENS, MASK]] if self.kind == "tokens" else [["x", "y"]]):
            raise ValueError(f"fields {names} are not those of {self.kind}")
        if self.kind == "tokens" and any(field.shape for field in self.fields):
            raise ValueError("a token is one number")
        if self.images and (self.fields[0].dtype, len(self.fields[0].shape), self.kind) != ("uint8", 1, "arrays"):
            raise ValueError("places of images are rows of bytes")
        if self.document_end is not None and self.document_end >= (self.vocabulary or 0):
            raise ValueError(f"document_end {self.document_end} is outside the vocabulary")
        for name, split in self.splits.items():
            if self.in_place is None and split.rows != sum(shard.rows for shard in split.shards):
                raise ValueError(f"split {name} has {split.rows} rows, but its shards have another number")
            if self.pack and split.rows % (self.pack + 1):
                raise ValueError(
                    f"split {name} has {split.rows} rows, not a multiple of the {self.pack + 1} of a sample"
                )
            for shard in split.shards:
                nbytes = sum(
                    shard.rows * f.row_bytes + 4 * f.extents(shard.rows, self.extent_bytes) for f in self.fields
                )
                if nbytes > shard.bytes or list(shard.tables) != names:
                    raise ValueError(f"shard {shard.file} of {shard.bytes} bytes cannot hold its {shard.rows} rows")
        return self

    @property
    def shards(self) -> list[ShardSpec]:
        """Shards of all splits."""
        return [shard for split in self.splits.values() for shard in split.shards]

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of x in a sample of arrays."""
        return self.images.shape if self.images else self.fields[0].shape

    @property
    def identity(self) -> str:
        """Eight hexadecimal digits that change if a stored value does, but not with the time or place of making."""
        splits = {name: split.model_dump(mode="json") for name, split in self.splits.items()}
        fields = [field.model_dump(mode="json") for field in self.fields]
        parts = [part.model_dump(mode="json") for part in self.variables or ()]
        place = (
            None
            if self.in_place is None
            else self.in_place.model_dump(mode="json", exclude={"files": {"__all__": {"path"}}})
        )
        images = self.images and self.images.model_dump(mode="json", exclude={"root"})
        # none of these exist in old manifests
        extras = [value for value in (self.document_end, self.pack, parts or None, place, images) if value is not None]
        return f"{zlib.crc32(_canonical([self.kind, fields, splits, *extras])):08x}"


def _canonical(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def write_manifest(folder: Path, manifest: DatasetManifest) -> None:
    """Write dataset.json, with its own CRC-32 as the last key, and flush it to the disk.

    Args:
        folder: Folder of the data set.
        manifest: Content to write.
    """
    content = manifest.model_dump(mode="json")
    for key in _OPTIONAL:
        if content[key] is None:
            del content[key]
    content["crc32"] = zlib.crc32(_canonical(content))
    write_durably(folder / MANIFEST, f"{json.dumps(content, indent=1)}\n".encode("ascii"))


def is_dataset(folder: Path) -> bool:
    """Return True if the folder is a complete data set. An incomplete one never has its final name."""
    return (folder / MANIFEST).is_file()


def read_manifest(folder: Path) -> DatasetManifest:
    """Read and check dataset.json.

    Raises:
        InputError: The folder does not exist or is not a data set, or dataset.json cannot be read or is damaged.
    """
    path = folder / MANIFEST
    try:
        text = read_plain(path, _LARGEST_MANIFEST)
    except NotADirectoryError:
        raise InputError(
            f"data set {folder} is a file, not a data set folder; make one from it with `{_PREPARE} {folder} --out DIR`"
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
            f"data set {folder} has format version {content.get('version')!r:.40}, but this mpitrain reads {VERSION}; "
            "prepare the data set again"
        )
    if content.pop("crc32", None) != zlib.crc32(_canonical(content)):
        raise InputError(f"data set {folder}: {MANIFEST} was changed or damaged (its hash does not match); {again}")
    try:
        return DatasetManifest.model_validate(content)
    except ValidationError as error:
        raise InputError(f"data set {folder}: {MANIFEST}: {first_problem(error)}; {again}") from None
