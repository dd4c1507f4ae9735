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
from typing import Any

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


def images_source(files: Sequence[tuple[Path, Path]], size: tuple[int, int] | None) -> Source:
    """Describe folders of images, one for each class.

    Args:
        files: Each image, and the folder it was found under.
        size: The height and the width in pixels that images are scaled and cut to; None where all have one size.

    Raises:
        InputError: Pillow is missing, or there is only one class.
    """
    try:
        from PIL import Image  # asked for before any work is done
    except ImportError:
        raise InputError('images need the package pillow; pip install "mpitrain[data]"') from None
    Image.init()  # loads the decoders, which `open` does by itself only where it may use any
    images = _labelled(files)
    classes = sorted({image.label for image in images})
    if len(classes) < 2:
        raise InputError(
            f"source {files[0][1]} has only the class {classes[0]}; put the images of each class into their own folder"
        )
    number = {label: i for i, label in enumerate(classes)}
    height, width = size or _opened(images[0].path).shape[:2]
    step = max(1, GATHER_BYTES // (3 * height * width))

    def rows(chosen: Sequence[_Image]) -> Iterator[Columns]:
        for start in range(0, len(chosen), step):
            block = chosen[start : start + step]
            pixels = [_pixels(image.path, (height, width), crop=size is not None) for image in block]
            yield np.stack(pixels), np.array([number[image.label] for image in block], np.int32)

    train = [image for image in images if not image.held_out]
    test = [image for image in images if image.held_out]
    blocks = partition(rows, train, test)
    x = FieldSpec(name="x", dtype="uint8", shape=(3, height, width), given="unit")
    y = FieldSpec(name="y", dtype="int32", shape=(), given="integer")
    return Source("arrays", (x, y), blocks, files=len(images), classes=tuple(classes))


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


def _pixels(path: Path, size: tuple[int, int], *, crop: bool) -> npt.NDArray[np.uint8]:
    """uint8 [3, height, width]."""
    pixels = _opened(path, size if crop else None)
    if pixels.shape[:2] != size:
        raise InputError(
            f"image {path} is {pixels.shape[0]}x{pixels.shape[1]}, the first one {size[0]}x{size[1]} (height x width); "
            f"give a common size, such as --size {size[0]}x{size[1]}"
        )
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _opened(path: Path, fit: tuple[int, int] | None = None) -> npt.NDArray[np.uint8]:
    """uint8 [height, width, 3]."""
    from PIL import Image, ImageOps

    with os_errors(f"image {path} cannot be read"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of large images, and of odd tags in them
        try:
            with Image.open(path, formats=_FORMATS) as file:
                if file.mode[0] in "IF":  # RGB would cut these off at 255
                    raise InputError(f"image {path} has pixels of more than 8 bits; give such data as x.npy and y.npy")
                image: Any = ImageOps.exif_transpose(file).convert("RGB")
            if fit:
                image = ImageOps.fit(image, (fit[1], fit[0]), Image.Resampling.BILINEAR)
            return np.asarray(image)
        except Image.UnidentifiedImageError:
            raise InputError(f"image {path} is not an image, although its name says so; remove it") from None
        except (InputError, OSError):
            raise
        except Exception as error:  # what a broken image makes a decoder raise is nowhere written
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InputError(f"image {path} cannot be decoded ({reason}); remove it") from None
