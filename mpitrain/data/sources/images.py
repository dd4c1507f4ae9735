"""Images in folders, one for each class, or in archives; any format Pillow reads; kept as uint8 [3, height, width].

    DIR/cat/1.png  DIR/dog/2.jpg          classes cat and dog
    DIR/train/cat/1.png  DIR/val/cat/9.png  the input's own held-out set (val, valid, validation, test, held_out)

Classes are numbered in the order of their names. Images are turned as their EXIF tag says and made RGB. With a
size, each is scaled until it covers height x width and its middle is cut out; without, all must have one size.

Archives are as WebDataset has them: tar files, plain or compressed, whose members are grouped by name.

    photos/0001.jpg  photos/0001.cls         one sample: what stands before the first dot of the name is its key
    photos/0002.png  photos/0002.json        an image, and its class: .cls, .json or .txt

A class is a number or a name: the text of .cls or .txt, or what a .json has, or has under "label", "cls" or "class".
Archives whose names begin with val, valid, validation, test or held_out are the input's own held-out set, where there
are others. They are read as streams, twice. Nothing is extracted to a disk, no link in them is followed, and their
paths serve as keys and in messages alone.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from mpitrain.data.folders import needing, os_errors
from mpitrain.data.format import FieldSpec
from mpitrain.data.sources import GATHER_BYTES, MOST_CLASSES, Columns, PrepareOptions, Source, partition
from mpitrain.data.sources.streams import opened
from mpitrain.errors import InputError

SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"))
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")  # not those for which Pillow starts programs
_HELD_OUT = frozenset(("val", "valid", "validation", "test", "held_out"))


@dataclass
class _Sample:
    """An image with its class.

    Attributes:
        place: What messages call it.
        image: Its file, or what is in that; None where an archive has a class alone.
        label: Its class; empty where a file of an archive tells none, None without such a file.
        others: Names of members of an archive that are neither.
    """

    place: str
    image: Path | bytes | None = None
    label: str | None = None
    others: Sequence[str] = ()

    def parts(self) -> tuple[Path | IO[bytes], str]:
        """Return the file of the image, and its class. Raises BadImage where one of them is missing."""
        leave = "or leave such samples out with --skip-bad"
        if not self.label:
            raise BadImage(f"{self.place} has no class in a .cls, .json or .txt; add it, {leave}")
        if self.image is None:
            raise BadImage(f"{self.place} has a class and no image; add one, {leave}")
        return io.BytesIO(self.image) if isinstance(self.image, bytes) else self.image, self.label


class BadImage(InputError):
    """An image that cannot be read, which may be left out."""


def is_image(path: Path) -> bool:
    """Whether a file has the name of an image."""
    return path.suffix.lower() in SUFFIXES


def images_source(files: Sequence[tuple[Path, Path]], options: PrepareOptions) -> Source:
    """Describe folders of images, one for each class.

    Args:
        files: Each image, and the folder it was found under.
        options: Size, and whether images that cannot be read are left out, and counted.

    Raises:
        InputError: Pillow is missing, or there is only one class.
    """
    load_decoders()
    train, test = _labelled(files)
    classes = sorted({image.label or "" for image in (*train, *test)})
    if len(classes) < 2:
        raise InputError(f"source {files[0][1]} has only the class {classes[0]}; put each class into its own folder")
    size = options.size or _first_size([*train, *test], skip_bad=options.skip_bad)
    number = {label: i for i, label in enumerate(classes)}
    return _pixels_source(
        lambda: train, (lambda: test) if test else None, number, size, options, len(files), tuple(classes)
    )


_Samples = Callable[[], Iterable[_Sample]]


def _pixels_source(
    train: _Samples,
    test: _Samples | None,
    number: Mapping[str, int],
    size: tuple[int, int],
    options: PrepareOptions,
    files: int,
    classes: tuple[str, ...] | None,
    notes: tuple[str, ...] = (),
) -> Source:
    """Describe images with classes.

    Args:
        train: Gives them.
        test: Gives those of the input's own test set; None without one.
        number: Number of each class.
        size: Height and width of all images.
        options: Whether images are scaled to that size, and those that cannot be read left out.
        files, classes, notes: As of `Source`.
    """
    skipped: list[str] = []
    step = max(1, GATHER_BYTES // (3 * size[0] * size[1]))

    def rows(samples: _Samples) -> Iterator[Columns]:
        readable = _readable(samples(), size, options, skipped)
        while together := list(islice(readable, step)):
            pixels, labels = zip(*together, strict=True)
            yield np.stack(pixels), np.array([number[label] for label in labels], np.int32)

    def found() -> tuple[str, ...]:
        return (f"left out {len(skipped)} images that cannot be read, such as {skipped[0]}",) if skipped else ()

    x = FieldSpec(name="x", dtype="uint8", shape=(3, *size), given="unit")
    y = FieldSpec(name="y", dtype="int32", shape=(), given="integer")
    return Source("arrays", (x, y), partition(rows, train, test), files, classes, notes=notes, found=found)


def _readable(
    samples: Iterable[_Sample], size: tuple[int, int], options: PrepareOptions, skipped: list[str]
) -> Iterator[tuple[npt.NDArray[np.uint8], str]]:
    """Yield image and class of each sample; with --skip-bad, `skipped` gets the names of others."""
    for sample in samples:
        try:
            file, label = sample.parts()
            yield fitted(file, sample.place, size, crop=options.size is not None), label
        except BadImage:
            if not options.skip_bad:
                raise
            skipped.append(sample.place.removeprefix("image "))


def load_decoders() -> None:
    """Load Pillow, before any work is done.

    Raises:
        InputError: It is missing.
    """
    with needing("images need", "pillow"):
        from PIL import Image
    Image.init()  # loads the decoders, which `open` does by itself only where it may use any


def _first_size(images: Sequence[_Sample], *, skip_bad: bool) -> tuple[int, int]:
    """The height and the width of the first image that can be read."""
    for image in images:
        try:
            height, width = decoded(image.parts()[0], image.place).shape[:2]
            return height, width
        except BadImage:
            if not skip_bad:
                raise
    raise InputError(f"{images[0].place} cannot be read, nor any other one; give images")


def _labelled(files: Sequence[tuple[Path, Path]]) -> tuple[list[_Sample], list[_Sample]]:
    """Return images to train on, and those of train's neighbours val/ ..., with the first folder below as their class.

    Of an image that lies in no folder, it is the source itself.
    """
    folders = [path.relative_to(root).parts[:-1] for path, root in files]
    tops = {parts[0] for parts in folders if parts}
    has_splits = "train" in tops and tops <= _HELD_OUT | {"train"}
    train: list[_Sample] = []
    test: list[_Sample] = []
    for (path, root), parts in zip(files, folders, strict=True):
        below = parts[1:] if has_splits else parts
        images = test if has_splits and parts[0] != "train" else train
        images.append(_Sample(f"image {path}", path, below[0] if below else root.resolve().name))
    return train, test


def fitted(file: Path | IO[bytes], label: str, size: tuple[int, int], *, crop: bool) -> npt.NDArray[np.uint8]:
    """An image of a certain size.

    Args:
        file: The image's file.
        label: What messages call it.
        size: The height and the width in pixels.
        crop: Whether it is scaled and cut to that size, instead of having it.

    Returns:
        uint8 [3, height, width].

    Raises:
        BadImage: It cannot be read.
        InputError: It has another size, or more than 8 bits.
    """
    pixels = decoded(file, label, size if crop else None)
    if pixels.shape[:2] != size:
        raise InputError(
            f"{label} is {pixels.shape[0]}x{pixels.shape[1]}, the first one {size[0]}x{size[1]} (height x width); "
            f"give a common size, such as --size {size[0]}x{size[1]}"
        )
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def decoded(file: Path | IO[bytes], label: str, fit: tuple[int, int] | None = None) -> npt.NDArray[np.uint8]:
    """uint8 [height, width, 3]; the arguments and errors are those of `fitted`."""
    from PIL import Image, ImageOps

    mend = "remove it, or leave such images out with --skip-bad"
    with os_errors(f"{label} cannot be read"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of large images, and of odd tags in them
        try:
            with Image.open(file, formats=_FORMATS) as opened:
                if opened.mode[0] in "IF":  # RGB would cut these off at 255
                    raise InputError(f"{label} has pixels of more than 8 bits; give such data as x.npy and y.npy")
                image: Any = ImageOps.exif_transpose(opened).convert("RGB")
            if fit:
                image = ImageOps.fit(image, (fit[1], fit[0]), Image.Resampling.BILINEAR)
            return np.asarray(image)
        except Image.UnidentifiedImageError:
            raise BadImage(f"{label} is not an image, although its name says so; {mend}") from None
        except InputError:
            raise
        except Exception as error:  # what a broken image makes a decoder raise is nowhere written
            if isinstance(error, OSError) and error.errno is not None:  # of the disk, not of the image
                raise
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise BadImage(f"{label} cannot be decoded ({reason}); {mend}") from None


# -- archives


_ARCHIVE = re.compile(r"\.(tar(\.(gz|bz2|xz|zst))?|tgz)$", re.IGNORECASE)
_ARCHIVE_OF_TEST = re.compile(r"(val|valid|validation|test|held_out)([-_.\d]|$)", re.IGNORECASE)
_LABELS = ("cls", "json", "txt")  # of several, the first one counts
_BROKEN: tuple[type[tarfile.TarError], ...] = tuple(
    getattr(tarfile, f"{what}HeaderError") for what in ("Invalid", "Truncated", "Empty")
)
_PAX = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
_IN_MEMORY = frozenset((tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, *_PAX))
_LARGEST_HEADER = 1 << 20  # bytes of a name, or of a PAX header
_IN_JSON = ("label", "cls", "class")
_LARGEST_IMAGE, _LARGEST_LABEL, _LONGEST_NAME = 256 << 20, 1 << 20, 200


def is_archive(path: Path) -> bool:
    """Whether a file has the name of a tar archive."""
    return bool(_ARCHIVE.search(path.name))


def archives_source(files: Sequence[Path], options: PrepareOptions) -> Source:
    """Describe archives of images.

    Args:
        files: The archives.
        options: Size, names of the classes, and whether samples without a readable image or a class are left out.

    Raises:
        InputError: Pillow is missing, an archive is damaged, or its samples have no classes.
    """
    load_decoders()
    own_test = [path for path in files if _ARCHIVE_OF_TEST.match(path.name)]
    test = own_test if len(own_test) < len(files) else []
    train = [path for path in files if path not in test]
    size, labels, passed_over = _survey(files, options)
    number, names = _classes(labels, options.classes, files[0])
    if size is None:
        raise InputError(f"archive {files[0]} holds no images with classes; give pairs such as 0001.jpg and 0001.cls")

    def samples(archives: Sequence[Path]) -> Iterator[_Sample]:
        return (one for path in archives for one in _samples(path) if one.image is not None or one.label is not None)

    others = partial(samples, test) if test else None
    return _pixels_source(partial(samples, train), others, number, size, options, len(files), names, passed_over)


def _survey(files: Sequence[Path], options: PrepareOptions) -> tuple[tuple[int, int] | None, set[str], tuple[str, ...]]:
    """Read archives for the size of the first image, all labels, and what is passed over, in words."""
    size, labels, others = options.size, set[str](), list[str]()
    for path in files:
        for sample in _samples(path):
            others += sample.others
            if sample.image is None and sample.label is None:
                continue
            try:
                image, label = sample.parts()
                size = size or decoded(image, sample.place).shape[:2]
            except BadImage:
                if not options.skip_bad:
                    raise
                continue
            labels.add(label)
            if len(labels) > MOST_CLASSES:
                raise InputError(f"archive {path}: more than {MOST_CLASSES} different classes; are these captions?")
    return size, labels, (f"passed over {len(others)} other members, such as {others[0]}",) if others else ()


def _classes(labels: set[str], file: Path | None, first: Path) -> tuple[dict[str, int], tuple[str, ...] | None]:
    """The number of each label, and the names of the classes."""
    numbers = {label: int(label) for label in labels if label.isdecimal() and label.isascii()}
    names = _names(file) if file else None
    if len(numbers) == len(labels):
        if names is None:
            return numbers, None
    else:
        names = names or tuple(sorted(labels))
        numbers = {name: number for number, name in enumerate(names)}
    for label in sorted(labels):
        if not 0 <= numbers.get(label, -1) < len(names):
            raise InputError(f"archive {first}: has class {label!a}, and {file} {len(names)} names; add it there")
    return numbers, names


def _label(content: bytes, is_json: bool) -> str:
    """What a file says of the class; "" if nothing."""
    try:
        text: Any = content.decode("utf-8").strip()
        if is_json:
            text = json.loads(text)
            text = next((text[key] for key in _IN_JSON if key in text), "") if isinstance(text, dict) else text
    except (ValueError, RecursionError):
        return ""
    if isinstance(text, bool) or not isinstance(text, (str, int)):
        return ""
    told = str(text).strip()
    return told if len(told) <= _LONGEST_NAME and "\n" not in told else ""


def _names(file: Path) -> tuple[str, ...]:
    try:
        names = tuple(line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--classes {file} cannot be read ({error}); give a file with a name a line") from None
    if len(set(names)) < len(names) or not names:
        raise InputError(f"--classes {file} holds {'a name twice' if names else 'no names'}; mend it")
    return names


class _TarHeader(tarfile.TarInfo):
    """A header. The module takes one that is damaged for the end of the archive; here it is an error.

    What the module reads into memory because a header says so, whatever its size, is refused: long names, PAX headers
    and maps of sparse files.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _TarHeader:
        header = super().frombuf(buf, encoding, errors)
        if header.type in _IN_MEMORY and header.size > _LARGEST_HEADER:
            raise tarfile.ReadError(f"a header of {header.size:,} bytes")
        if header.type == tarfile.GNUTYPE_SPARSE:
            raise tarfile.ReadError("a sparse file")
        return header

    def _proc_gnusparse_10(self, *_: Any) -> None:  # whose map would be read whole
        raise tarfile.ReadError("a sparse file")

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> _TarHeader:
        try:
            return super().fromtarfile(archive)
        except _BROKEN as error:
            raise tarfile.ReadError(f"it is cut off or damaged: {error}") from None


def _samples(path: Path) -> Iterator[_Sample]:
    """The samples of an archive, in order."""
    for (folder, key), members in groupby(_members(path), _key):
        image, labels, others = None, dict[str, bytes](), []
        for name, content in members:
            name = name.rpartition("/")[2]
            ending = name.partition(".")[2].lower()
            if f".{ending}" in SUFFIXES and image is None and content is not None:
                image = content
            elif ending in _LABELS and content is not None and len(content) <= _LARGEST_LABEL:
                labels[ending] = content
            else:
                others.append(ascii(name)[1:-1][:_LONGEST_NAME])
        ending = next((ending for ending in _LABELS if ending in labels), "")
        label = _label(labels[ending], ending == "json") if ending else None
        yield _Sample(f"{ascii(folder + key)[1:-1]:.200} in archive {path}", image, label, others)


def _key(member: tuple[str, object]) -> tuple[str, str]:
    """Return the folder, with its slash, and the key of a member."""
    folder, slash, name = member[0].rpartition("/")
    return folder + slash, name.partition(".")[0]


def _members(path: Path) -> Iterator[tuple[str, bytes | None]]:
    """(name, content) of every member but folders; None for what is no plain file, or none that is wanted."""
    with os_errors(f"archive {path} cannot be read"):
        try:
            with opened(path) as file, tarfile.open(fileobj=file, mode="r|*", tarinfo=_TarHeader) as archive:
                while (member := archive.next()) is not None:
                    archive.members.clear()  # type: ignore[attr-defined]  # kept by the module, of millions, too
                    if not member.isdir():
                        yield member.name, _content(archive, member, path)
        except (tarfile.TarError, EOFError, ValueError, RecursionError) as error:  # of headers that say odd things
            raise InputError(f"archive {path} is not a whole tar file ({error}); get it again") from None


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> bytes | None:
    ending = member.name.rpartition("/")[2].partition(".")[2].lower()
    if not member.isreg() or (f".{ending}" not in SUFFIXES and ending not in _LABELS):
        return None
    if member.size > _LARGEST_IMAGE:
        raise InputError(f"archive {path}: {member.name!a:.200} has {member.size:,} bytes, too many for an image")
    opened = archive.extractfile(member)
    content = opened.read() if opened else b""
    if len(content) != member.size:
        raise tarfile.ReadError("it ends inside of a member")
    return content
