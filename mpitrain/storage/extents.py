"""Extents: stretches of a file, written and read at their places, each with a CRC-32 (ISO 3309) of its own.

Data sets and checkpoints let HDF5 say where the bytes of a data set lie (`hdf5`) and move them by the functions here:
a full or failing disk is then an OSError at the call that met it, threads need no lock, and writing is as fast as the
disk. A large request is met in parts; these functions see to all of it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

try:  # the same numbers as zlib's in a fraction of the time; both let other threads run meanwhile
    from zlib_ng.zlib_ng import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write bytes at an offset of an open file, all of them. Raises OSError."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)


def read_at(descriptor: int, into: memoryview, offset: int) -> int:
    """Fill `into` from an offset of an open file. Raises OSError.

    Returns:
        The bytes read: fewer than `into` has only where the file ends.
    """
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def bytes_of_array(values: npt.NDArray[Any]) -> memoryview:
    """The bytes of a contiguous array, shared with it."""
    return values.reshape(-1).view(np.uint8).data


class ExtentHasher:
    """The CRC-32 of each extent of a sequence that comes in pieces, which need not end where extents do.

    Args:
        length: Items of an extent; the last one may be shorter. An item is what `len` of a piece counts: a byte of a
            memoryview, a row of an array.
    """

    def __init__(self, length: int) -> None:
        self._length, self._filled, self._crc = length, 0, 0
        self._done: list[int] = []

    def update(self, items: memoryview | npt.NDArray[Any]) -> None:
        """Hash the next items, which lie one after the other in memory."""
        taken = 0
        while taken < len(items):
            piece = items[taken : taken + self._length - self._filled]
            self._crc = crc32(piece, self._crc)
            self._filled += len(piece)
            taken += len(piece)
            if self._filled == self._length:
                self._done.append(self._crc)
                self._filled, self._crc = 0, 0

    def hashes(self) -> Sequence[int]:
        """Of the extents so far; the last one as far as it came."""
        return [*self._done, *([self._crc] if self._filled else [])]
