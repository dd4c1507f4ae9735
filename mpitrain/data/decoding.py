"""Decoding of images by a pool of threads, and the reader of images that stay encoded in the user's files.

Such a data set has the place of each image as a row of its shards, which is checked like any row. The image is checked
by its own hash, before it is decoded:

    dataset.json             `images`: their folder, and the size of a sample
    train-00000.h5  /x       row i: offset, bytes, CRC-32 and path of image i
                    /y       row i: its class

Pillow decodes and scales without Python's global lock, so threads use all cores of a rank. An image depends on its file
alone, and images are returned in the order of their rows: the number of threads affects nothing but the time.
"""

from __future__ import annotations

import io
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import numpy.typing as npt

from mpitrain.data.conversion import convert
from mpitrain.data.folders import os_errors, require_package
from mpitrain.data.format import FieldSpec, ImagesSpec
from mpitrain.errors import InputError, printable
from mpitrain.storage import hdf5
from mpitrain.storage.disk import open_plain, reason

S = TypeVar("S")
T = TypeVar("T")
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")  # without those for which Pillow starts other programs
_NUMBERS = 20  # bytes of the numbers of an image's place: offset, bytes and CRC-32


class BadImage(InputError):
    """An image that cannot be read. Such an image may be skipped."""


def load_decoders() -> None:
    """Load Pillow, before any other work is done.

    Raises:
        InputError: Pillow is not installed.
    """
    with require_package("images need", "pillow"):
        from PIL import Image
    Image.init()  # loads the decoders; `open` does so only if no list of formats is given
    # about large images and odd tags; not for each image, because Python's filters belong to all threads
    warnings.filterwarnings("ignore", module="PIL")


def read_image(file: Path | IO[bytes], label: str, size: tuple[int, int], *, crop: bool) -> npt.NDArray[np.uint8]:
    """Return an image of a given size.

    Args:
        file: Image file.
        label: Name in messages.
        size: Height and width in pixels.
        crop: If true, scale and crop the image to `size`; if false, it must have that size.

    Returns:
        Pixels, uint8 [3, height, width].

    Raises:
        BadImage: The image cannot be read.
        InputError: The image has another size, or more than 8 bits.
    """
    pixels = decode_image(file, label, size if crop else None)
    if pixels.shape[:2] != size:
        raise InputError(
            f"{label} is {pixels.shape[0]}x{pixels.shape[1]}, but the first is {size[0]}x{size[1]} (height x width); "
            f"choose a common size, such as --size {size[0]}x{size[1]}"
        )
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def decode_image(file: Path | IO[bytes], label: str, fit: tuple[int, int] | None = None) -> npt.NDArray[np.uint8]:
    """Decode an image to RGB.

    Args:
        file: Image file.
        label: Name in messages.
        fit: Height and width to which it is scaled and cropped; None keeps its size.

    Returns:
        Pixels, uint8 [height, width, 3].

    Raises:
        BadImage: The image cannot be read.
        InputError: The image has more than 8 bits.
    """
    from PIL import Image, ImageOps

    fix = "remove it, or skip such images with --skip-bad"
    with os_errors(f"{label} cannot be read"):
        try:
            with Image.open(file, formats=_FORMATS) as image_file:
                if image_file.mode[0] in "IF":  # RGB would cut these off at 255
                    raise InputError(f"{label} has pixels of more than 8 bits; save such data as x.npy and y.npy")
                ImageOps.exif_transpose(image_file, in_place=True)
                # no copy of what is RGB: Pillow copies while it holds Python's lock
                image: Any = image_file if image_file.mode == "RGB" else image_file.convert("RGB")
                if fit:
                    image = ImageOps.fit(image, (fit[1], fit[0]), Image.Resampling.BILINEAR)
                return np.asarray(image)
        except Image.UnidentifiedImageError:
            raise BadImage(f"{label} is not an image, although its name says so; {fix}") from None
        except InputError:
            raise
        except Exception as error:  # decoders document no exceptions for broken images
            if isinstance(error, OSError) and error.errno is not None:  # an error of the disk, not of the image
                raise
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise BadImage(f"{label} cannot be decoded ({reason}); {fix}") from None


class DecodingThreads:
    """Pool of threads that apply a function to items, started at the first use. Any number of threads may use it.

    Args:
        threads: Number of threads; None for one per core that this process may use.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads or len(os.sched_getaffinity(0))
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def map(self, function: Callable[[S], T], items: Sequence[S]) -> list[T]:
        """Return the function's value for each item, in order. Raises the error of the first item that has one.

        Args:
            function: Function of one item. With a single thread, or a single item, the caller computes it.
            items: Items.
        """
        if min(self._threads, len(items)) < 2:
            return [function(item) for item in items]
        with self._lock:
            self._pool = self._pool or ThreadPoolExecutor(self._threads, "image-decoder")
            values = self._pool.map(function, items)
        return list(values)

    def close(self) -> None:
        """End the threads, after the work that they have accepted. A later `map` starts others."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()

    def __enter__(self) -> DecodingThreads:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _place_dtype(row_bytes: int) -> np.dtype[Any]:
    return np.dtype([("offset", "<i8"), ("bytes", "<i8"), ("crc32", "<u4"), ("path", f"S{row_bytes - _NUMBERS}")])


def place_bytes(paths: Iterable[str]) -> int:
    """Return the bytes of the place of an image in any of these files."""
    return _NUMBERS + max(len(os.fsencode(path)) for path in paths)


def encode_place(path: str, offset: int, content: bytes, row_bytes: int) -> npt.NDArray[np.uint8]:
    """Return the place of an image, uint8 [row_bytes].

    Args:
        path: File, relative to the folder of the images.
        offset: Offset of the image in it, in bytes.
        content: Encoded image.
        row_bytes: Bytes of the place; see `place_bytes`.
    """
    place = (offset, len(content), hdf5.crc32(content), os.fsencode(path))
    return np.array([place], _place_dtype(row_bytes)).view(np.uint8)


class ImageReader:
    """Reader of encoded images. Any number of threads may use it.

    Args:
        label: Beginning of messages.
        spec: Folder and size of the images.
        field: Field of x, whose pixels are converted for a model by the same threads.
        threads: Number of decoding threads; None for one per core that this process may use.

    Raises:
        InputError: Pillow is missing.
    """

    def __init__(self, label: str, spec: ImagesSpec, field: FieldSpec, threads: int | None) -> None:
        load_decoders()
        self._label, self._spec, self._field = label, spec, field
        self._threads = DecodingThreads(threads)

    def read(self, rows: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
        """Read and decode images.

        Args:
            rows: Places of the images, uint8 [n, bytes of a place].

        Returns:
            Pixels as a model gets them, float32 [n, 3, height, width].

        Raises:
            InputError: An image is damaged, or cannot be read; the message names its file.
        """
        out = np.empty((len(rows), *self._spec.shape), self._field.handed)
        crop, (height, width) = self._spec.crop, self._spec.shape[1:]

        def decode(number: int) -> None:
            content, name = self._content(rows[number])
            out[number] = convert(self._field, (), read_image(io.BytesIO(content), name, (height, width), crop=crop))

        self._threads.map(decode, range(len(rows)))
        return out

    def damages(self, rows: npt.NDArray[np.uint8]) -> list[str]:
        """Return one line for each image that is damaged or cannot be read; see `read`."""

        def check(row: npt.NDArray[np.uint8]) -> str:
            try:
                self._content(row)
            except InputError as error:
                return str(error)
            return ""

        return [line for line in self._threads.map(check, list(rows)) if line]

    def close(self) -> None:
        """End the threads. A later read starts others."""
        self._threads.close()

    def _content(self, row: npt.NDArray[np.uint8]) -> tuple[bytearray, str]:
        """Return the file content of an image, and its name in messages."""
        offset, size, crc32, name = row.view(_place_dtype(len(row)))[0].tolist()
        path = Path(self._spec.root, os.fsdecode(name))
        label = f"image {printable(path)}" + (f" at byte {offset}" if offset else "")
        fix = "restore that file, or prepare the data set again"
        content = bytearray()
        try:
            with open_plain(path) as file:
                if offset >= 0 and 0 <= size <= os.fstat(file.fileno()).st_size - offset:
                    content = bytearray(size)
                    hdf5.read_at(file.fileno(), memoryview(content), offset)
        except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
            why = reason(error) if isinstance(error, OSError) else error
            raise InputError(f"{self._label}: {label} cannot be read ({why}); {fix}") from None
        if len(content) != size or hdf5.crc32(content) != crc32:
            raise InputError(f"{self._label}: {label} was changed or damaged after it was indexed; {fix}")
        return content, label
