"""What the HDF5 files of data sets and checkpoints have in common.

HDF5 makes the structure and says where each data set's bytes lie; it never gets to write or read those bytes, which
`extents` does: HDF5 2.0 may crash the process when it first meets a full disk while closing a file.
"""

from __future__ import annotations

import h5py

SIGNATURE = b"\x89HDF\r\n\x1a\n"  # what every HDF5 file begins with
VERSIONS = ("v110", "v110")  # of the file format: metadata with checksums, and readable by HDF5 1.10


def contiguous() -> h5py.h5p.PropDCID:
    """How to create a data set whose bytes lie in one piece, which HDF5 places at once and never touches.

    Its `get_offset()` is then the place of its first byte in the file.
    """
    how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    how.set_layout(h5py.h5d.CONTIGUOUS)
    how.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    how.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    return how
