"""Image folders: one subfolder per class, any format Pillow reads; kept as uint8 [3, height, width].

    DIR/cat/1.png  DIR/dog/2.jpg          classes cat and dog
    DIR/train/cat/1.png  DIR/val/cat/9.png  the input's own held-out set (val, valid, validation, test, held_out)

Classes are numbered in the order of their names. Images are turned as their EXIF tag says and made RGB. With a
size, each is scaled until it covers height x width and its middle is cut out; without, all must have one size.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from mpitrain.data.commit import os_errors
from mpitrain.data.format import FieldSpec
from mpitrain.data.sources.split import partition
from mpitrain.data.writer import GATHER_BYTES, Columns, Source
from mpitrain.errors import InputError

SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"))
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")  # not those for which Pillow starts programs
_HELD_OUT = frozenset(("val", "valid", "validation", "test", "held_out"))


@dataclass(frozen=True)
class _Image:
    path: Path
    label: str
    held_out: bool


class BadImage(InputError):
    """An image that cannot be read, which may be left out."""


@dataclass
class Skipped:
    """Images that were left out, for people."""

    count: int = 0
    first: str = ""

    def add(self, error: BadImage, label: str) -> None:
        self.count += 1
        self.first = self.first or label

    def sentences(self) -> tuple[str, ...]:
        return (f"left out {self.count} images that cannot be read, such as {self.first}",) if self.count else ()


def images_source(
    files: Sequence[tuple[Path, Path]], size: tuple[int, int] | None, *, skip_bad: bool = False
) -> Source:
    """Describe folders of images, one for each class.

    Args:
        files: Each image, and the folder it was found under.
        size: The height and the width in pixels that images are scaled and cut to; None where all have one size.
        skip_bad: Whether images that cannot be read are left out, and counted.

    Raises:
        InputError: Pillow is missing, or there is only one class.
    """
    load_decoders()
    images = _labelled(files)
    classes = sorted({image.label for image in images})
    if len(classes) < 2:
        raise InputError(
            f"source {files[0][1]} has only the class {classes[0]}; put the images of each class into their own folder"
        )
    number = {label: i for i, label in enumerate(classes)}
    height, width = size or _first_size(images, skip_bad=skip_bad)
    skipped = Skipped()
    step = max(1, GATHER_BYTES // (3 * height * width))

    def rows(chosen: Sequence[_Image]) -> Iterator[Columns]:
        for start in range(0, len(chosen), step):
            block = chosen[start : start + step]
            pixels, labels = [], []
            for image in block:
                try:
                    pixels.append(fitted(image.path, f"image {image.path}", (height, width), crop=size is not None))
                except BadImage as error:
                    if not skip_bad:
                        raise
                    skipped.add(error, str(image.path))
                    continue
                labels.append(number[image.label])
            if pixels:
                yield np.stack(pixels), np.array(labels, np.int32)

    train = [image for image in images if not image.held_out]
    test = [image for image in images if image.held_out]
    blocks = partition(rows, train, test)
    x = FieldSpec(name="x", dtype="uint8", shape=(3, height, width), given="unit")
    y = FieldSpec(name="y", dtype="int32", shape=(), given="integer")
    return Source("arrays", (x, y), blocks, files=len(images), classes=tuple(classes), found=skipped.sentences)


def load_decoders() -> None:
    """Load Pillow, before any work is done.

    Raises:
        InputError: It is missing.
    """
    try:
        from PIL import Image
    except ImportError:
        raise InputError('images need the package pillow; pip install "mpitrain[data]"') from None
    Image.init()  # loads the decoders, which `open` does by itself only where it may use any


def _first_size(images: Sequence[_Image], *, skip_bad: bool) -> tuple[int, int]:
    """The height and the width of the first image that can be read."""
    for image in images:
        try:
            height, width = decoded(image.path, f"image {image.path}").shape[:2]
            return height, width
        except BadImage:
            if not skip_bad:
                raise
    raise InputError(f"image {images[0].path} cannot be read, nor any other one; give images")


def _labelled(files: Sequence[tuple[Path, Path]]) -> list[_Image]:
    """The class of an image is the first folder below its source, or below train/, val/ ...; else the source itself."""
    folders = [path.relative_to(root).parts[:-1] for path, root in files]
    tops = {parts[0] for parts in folders if parts}
    has_splits = "train" in tops and tops <= _HELD_OUT | {"train"}
    images = []
    for (path, root), parts in zip(files, folders, strict=True):
        below = parts[1:] if has_splits else parts
        images.append(_Image(path, below[0] if below else root.resolve().name, has_splits and parts[0] != "train"))
    return images


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
