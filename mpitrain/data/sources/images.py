"""Images in folders, one per class, or in archives. Any format that Pillow reads becomes uint8 [3, height, width].

    DIR/cat/1.png  DIR/dog/2.jpg          classes cat and dog
    DIR/train/cat/1.png  DIR/val/cat/9.png  the input's own held-out set (val, valid, validation, test, held_out)

Classes are numbered in the order of their names. Images are rotated according to their EXIF tag and converted to RGB.
If a size is given, each image is scaled until it covers height x width, then cropped to its middle; otherwise all must
have one size.

Archives have WebDataset's layout: tar files, plain or compressed, whose members are grouped by name.

    photos/0001.jpg  photos/0001.cls         one sample: the name before its first dot is the key
    photos/0002.png  photos/0002.json        an image, and its class: .cls, .json or .txt

A class is a number or a name: the text of .cls or .txt, or the value of a .json or of its key "label", "cls" or
"class". Archives whose names begin with val, valid, validation, test or held_out are the input's own held-out set, if
there are other archives too. Archives are read as streams, twice. Nothing is extracted to a disk, links in them are not
followed, and their paths are used only as keys and in messages.

With --in-place, images stay where they lie, in their files or in uncompressed archives. Each is decoded once, to see
that it can be, and its place becomes the row of x (see `mpitrain.data.decoding`).
"""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from mpitrain.data.decoding import (
    BadImage,
    DecodingThreads,
    decode_image,
    encode_place,
    load_decoders,
    place_bytes,
    read_image,
)
from mpitrain.data.folders import os_errors
from mpitrain.data.format import FieldSpec, ImagesSpec
from mpitrain.data.sources import (
    GATHER_BYTES,
    MOST_CLASSES,
    TEST_NAMES,
    Columns,
    PrepareOptions,
    Source,
    partition,
    split_own_test,
)
from mpitrain.data.sources.streams import open_stream
from mpitrain.errors import InputError

SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"))
_AT_ONCE = 64  # images in memory


@dataclass
class _Sample:
    """An image with its class.

    Attributes:
        place: Name in messages.
        file: Image file, or archive.
        image: Content of the image; None for an image file, or if an archive has only a class.
        label: Class; empty if a file of an archive contains none, None if there is no such file.
        others: Names of other members of the archive.
        offset: Offset of the image in an archive, in bytes.
    """

    place: str
    file: Path
    image: bytes | None = None
    label: str | None = None
    others: Sequence[str] = ()
    offset: int = 0

    def parts(self) -> tuple[IO[bytes], str]:
        """Return the image as a file in memory, and the class. Raises BadImage if one of them is missing."""
        skip = "or skip such samples with --skip-bad"
        if not self.label:
            raise BadImage(f"{self.place} has no class in a .cls, .json or .txt file; add one, {skip}")
        if self.image is None and is_archive(self.file):
            raise BadImage(f"{self.place} has a class but no image; add one, {skip}")
        with os_errors(f"{self.place} cannot be read"):
            return io.BytesIO(self.file.read_bytes() if self.image is None else self.image), self.label


def is_image(path: Path) -> bool:
    """Return True if the file name is one of an image."""
    return path.suffix.lower() in SUFFIXES


def images_source(files: Sequence[tuple[Path, Path]], options: PrepareOptions) -> Source:
    """Describe folders of images, one folder per class.

    Args:
        files: (image file, source in which it was found) of each image.
        options: Size of the images; with `skip_bad`, unreadable ones are skipped and counted.

    Raises:
        InputError: Pillow is missing, or there is only one class.
    """
    load_decoders()
    train, test = _split_samples(files)
    classes = sorted({image.label or "" for image in (*train, *test)})
    if len(classes) < 2:
        raise InputError(f"source {files[0][1]} has only the class {classes[0]}; put each class into its own folder")
    size = options.size or _first_size([*train, *test], skip_bad=options.skip_bad)
    number = {label: i for i, label in enumerate(classes)}
    every = [path for path, _ in files]
    return _pixels_source(lambda: train, (lambda: test) if test else None, number, size, options, every, tuple(classes))


_Samples = Callable[[], Iterable[_Sample]]


def _pixels_source(
    train: _Samples,
    test: _Samples | None,
    number: Mapping[str, int],
    size: tuple[int, int],
    options: PrepareOptions,
    files: Sequence[Path],
    classes: tuple[str, ...] | None,
    notes: tuple[str, ...] = (),
) -> Source:
    """Describe images with classes.

    Args:
        train: Function that returns the training samples.
        test: Function that returns the input's own test samples; None if it has none.
        number: Number of each class, by label.
        size: Height and width of all images.
        options: With `size`, images are scaled to it; with `skip_bad`, unreadable ones are skipped.
        files: Image files, or archives.
        classes, notes: Attributes of the `Source`.
    """
    skipped: list[str] = []
    images, width = None, 0
    if options.in_place:
        root = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in files])
        images = ImagesSpec(root=root, shape=(3, *size), crop=options.size is not None)
        width = place_bytes(os.path.relpath(path, root) for path in files)

    def row(sample: _Sample) -> tuple[npt.NDArray[np.uint8], str]:
        file, label = sample.parts()
        pixels = read_image(file, sample.place, size, crop=options.size is not None)
        if images is None:
            return pixels, label
        file.seek(0)
        return encode_place(os.path.relpath(sample.file, images.root), sample.offset, file.read(), width), label

    step = max(1, GATHER_BYTES // (3 * size[0] * size[1]))

    def rows(samples: _Samples) -> Iterator[Columns]:
        readable = _read_images(samples(), row, skipped if options.skip_bad else None)
        while batch := list(islice(readable, step)):
            of_x, labels = zip(*batch, strict=True)
            yield np.stack(of_x), np.array([number[label] for label in labels], np.int32)

    def skipped_note() -> tuple[str, ...]:
        return (f"left out {len(skipped)} images that cannot be read, such as {skipped[0]}",) if skipped else ()

    x = FieldSpec(name="x", dtype="uint8", shape=(width,) if images else (3, *size), given="unit")
    y = FieldSpec(name="y", dtype="int32", shape=(), given="integer")
    blocks = partition(rows, train, test)
    return Source("arrays", (x, y), blocks, len(files), classes, notes=notes, found=skipped_note, images=images)


def _read_images(
    samples: Iterable[_Sample],
    row: Callable[[_Sample], tuple[npt.NDArray[np.uint8], str]],
    skipped: list[str] | None,
) -> Iterator[tuple[npt.NDArray[np.uint8], str]]:
    """Yield (row of x, class) of each sample, in order, computed by threads.

    Args:
        samples: Images with their classes.
        row: Function of a sample that returns its row. Raises BadImage.
        skipped: List to which the names of unreadable images are appended; None if these raise BadImage.
    """

    def attempt(sample: _Sample) -> tuple[npt.NDArray[np.uint8], str] | None:
        try:
            return row(sample)
        except BadImage:
            if skipped is None:
                raise
            return None

    remaining = iter(samples)
    with DecodingThreads() as threads:
        while some := list(islice(remaining, _AT_ONCE)):
            for sample, result in zip(some, threads.map(attempt, some), strict=True):
                if result is not None:
                    yield result
                elif skipped is not None:
                    skipped.append(sample.place.removeprefix("image "))


def _first_size(images: Sequence[_Sample], *, skip_bad: bool) -> tuple[int, int]:
    """Return the height and width of the first readable image."""
    for image in images:
        try:
            height, width = decode_image(image.parts()[0], image.place).shape[:2]
            return height, width
        except BadImage:
            if not skip_bad:
                raise
    raise InputError(f"{images[0].place} and all other images cannot be read; check these files")


def _split_samples(files: Sequence[tuple[Path, Path]]) -> tuple[list[_Sample], list[_Sample]]:
    """Return the training samples and the held-out samples.

    The class of an image is the first folder below the source, or below train, val, ...; for an image in no such
    folder, it is the name of the source itself.
    """
    folders = [path.relative_to(root).parts[:-1] for path, root in files]
    tops = {parts[0] for parts in folders if parts}
    has_splits = "train" in tops and tops <= {"train", *TEST_NAMES}
    train: list[_Sample] = []
    test: list[_Sample] = []
    for (path, root), parts in zip(files, folders, strict=True):
        below = parts[1:] if has_splits else parts
        images = test if has_splits and parts[0] != "train" else train
        images.append(_Sample(f"image {path}", path, label=below[0] if below else root.resolve().name))
    return train, test


# -- archives


_ARCHIVE = re.compile(r"\.(tar(\.(gz|bz2|xz|zst))?|tgz)$", re.IGNORECASE)
_LABELS = ("cls", "json", "txt")  # if there are several, the first one counts
_BROKEN: tuple[type[tarfile.TarError], ...] = tuple(
    getattr(tarfile, f"{what}HeaderError") for what in ("Invalid", "Truncated", "Empty")
)
_PAX = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
_IN_MEMORY = frozenset((tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, *_PAX))
_LARGEST_HEADER = 1 << 20  # bytes of a name, or of a PAX header
_IN_JSON = ("label", "cls", "class")
_LARGEST_IMAGE, _LARGEST_LABEL, _LONGEST_NAME = 256 << 20, 1 << 20, 200


def is_archive(path: Path) -> bool:
    """Return True if the file name is one of a tar archive."""
    return bool(_ARCHIVE.search(path.name))


def archives_source(files: Sequence[Path], options: PrepareOptions) -> Source:
    """Describe archives of images.

    Args:
        files: Archives.
        options: Size and class names; with `skip_bad`, samples without a readable image or a class are skipped.

    Raises:
        InputError: Pillow is missing, an archive is damaged, or its samples have no classes.
    """
    load_decoders()
    if packed := [path for path in files if options.in_place and path.suffix.lower() != ".tar"]:
        raise InputError(f"archive {packed[0]} is compressed, so --in-place cannot read it; decompress it to a .tar")
    train, test = split_own_test(files)
    size, labels, archive_notes = _survey_archives(files, options)
    number, names = _number_classes(labels, options.classes, files[0])
    if size is None:
        raise InputError(f"archive {files[0]} has no images with classes; use pairs such as 0001.jpg and 0001.cls")

    def samples(archives: Sequence[Path]) -> Iterator[_Sample]:
        return (
            one for path in archives for one in _read_samples(path) if one.image is not None or one.label is not None
        )

    others = partial(samples, test) if test else None
    return _pixels_source(partial(samples, train), others, number, size, options, files, names, archive_notes)


def _survey_archives(
    files: Sequence[Path], options: PrepareOptions
) -> tuple[tuple[int, int] | None, set[str], tuple[str, ...]]:
    """Read archives; return the size of the first image, all labels, and notes about other members."""
    size, labels, others = options.size, set[str](), list[str]()
    for path in files:
        for sample in _read_samples(path):
            others += sample.others
            if sample.image is None and sample.label is None:
                continue
            try:
                image, label = sample.parts()
                size = size or decode_image(image, sample.place).shape[:2]
            except BadImage:
                if not options.skip_bad:
                    raise
                continue
            labels.add(label)
            if len(labels) > MOST_CLASSES:
                raise InputError(f"archive {path} has more than {MOST_CLASSES} classes; use class names, not captions")
    return size, labels, (f"ignored {len(others)} other files, such as {others[0]}",) if others else ()


def _number_classes(labels: set[str], file: Path | None, first: Path) -> tuple[dict[str, int], tuple[str, ...] | None]:
    """Return the number of each label, and the names of the classes."""
    numbers = {label: int(label) for label in labels if label.isdecimal() and label.isascii()}
    names = _read_class_names(file) if file else None
    if len(numbers) == len(labels):
        if names is None:
            return numbers, None
    else:
        names = names or tuple(sorted(labels))
        numbers = {name: number for number, name in enumerate(names)}
    for label in sorted(labels):
        if not 0 <= numbers.get(label, -1) < len(names):
            raise InputError(
                f"archive {first} has the class {label!a}, which is not among the {len(names)} names in {file}; "
                "add it there"
            )
    return numbers, names


def _parse_label(content: bytes, is_json: bool) -> str:
    """Return the class that a file names; "" if it names none."""
    try:
        text: Any = content.decode("utf-8").strip()
        if is_json:
            text = json.loads(text)
            text = next((text[key] for key in _IN_JSON if key in text), "") if isinstance(text, dict) else text
    except (ValueError, RecursionError):
        return ""
    if isinstance(text, bool) or not isinstance(text, (str, int)):
        return ""
    label = str(text).strip()
    return label if len(label) <= _LONGEST_NAME and "\n" not in label else ""


def _read_class_names(file: Path) -> tuple[str, ...]:
    try:
        names = tuple(line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--classes {file} cannot be read ({error}); use a text file with one name per line") from None
    if len(set(names)) < len(names) or not names:
        raise InputError(f"--classes {file} contains {'a name twice' if names else 'no names'}; fix it")
    return names


class _TarHeader(tarfile.TarInfo):
    """A tar header whose damage is an error; the tarfile module takes a damaged header for the end of the archive.

    Some members are refused because tarfile would read them into memory whatever size their header claims: large long
    names, large PAX headers, and maps of sparse files.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _TarHeader:
        header = super().frombuf(buf, encoding, errors)
        if header.type in _IN_MEMORY and header.size > _LARGEST_HEADER:
            raise tarfile.ReadError(f"a header of {header.size:,} bytes")
        if header.type == tarfile.GNUTYPE_SPARSE:
            raise tarfile.ReadError("a sparse file")
        return header

    def _proc_gnusparse_10(self, *_: Any) -> None:  # a map that would be read as a whole
        raise tarfile.ReadError("a sparse file")

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> _TarHeader:
        try:
            return super().fromtarfile(archive)
        except _BROKEN as error:
            raise tarfile.ReadError(f"it is cut off or damaged: {error}") from None


def _read_samples(path: Path) -> Iterator[_Sample]:
    """Yield the samples of an archive, in order."""
    for (folder, key), members in groupby(_read_members(path), _key):
        image, offset, labels, others = None, 0, dict[str, bytes](), []
        for name, content, begin in members:
            name = name.rpartition("/")[2]
            ending = name.partition(".")[2].lower()
            if f".{ending}" in SUFFIXES and image is None and content is not None:
                image, offset = content, begin
            elif ending in _LABELS and content is not None and len(content) <= _LARGEST_LABEL:
                labels[ending] = content
            else:
                others.append(ascii(name)[1:-1][:_LONGEST_NAME])
        ending = next((ending for ending in _LABELS if ending in labels), "")
        label = _parse_label(labels[ending], ending == "json") if ending else None
        yield _Sample(f"{ascii(folder + key)[1:-1]:.200} in archive {path}", path, image, label, others, offset)


def _key(member: tuple[str, object, object]) -> tuple[str, str]:
    """Return the folder of a member, with its slash, and its key."""
    folder, slash, name = member[0].rpartition("/")
    return folder + slash, name.partition(".")[0]


def _read_members(path: Path) -> Iterator[tuple[str, bytes | None, int]]:
    """Yield (name, content, offset) of every member except folders; content is None unless it is an image or a label.

    The offset is that in the decompressed archive, in bytes.
    """
    with os_errors(f"archive {path} cannot be read"):
        try:
            with open_stream(path) as file, tarfile.open(fileobj=file, mode="r|*", tarinfo=_TarHeader) as archive:
                while (member := archive.next()) is not None:
                    archive.members.clear()  # type: ignore[attr-defined]  # else tarfile keeps all of them
                    if not member.isdir():
                        yield member.name, _read_member(archive, member, path), member.offset_data
        except (tarfile.TarError, EOFError, ValueError, RecursionError) as error:  # from malformed headers
            raise InputError(f"archive {path} is not a complete tar file ({error}); restore it") from None


def _read_member(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> bytes | None:
    ending = member.name.rpartition("/")[2].partition(".")[2].lower()
    if not member.isreg() or (f".{ending}" not in SUFFIXES and ending not in _LABELS):
        return None
    if member.size > _LARGEST_IMAGE:
        raise InputError(f"archive {path}: {member.name!a:.200} is too large, {member.size:,} bytes; remove it")
    member_file = archive.extractfile(member)
    content = member_file.read() if member_file else b""
    if len(content) != member.size:
        raise tarfile.ReadError("its last member is incomplete")
    return content
