"""Names and types of tensors in the HDF5 images of checkpoints (see `storage.hdf5`)."""

from __future__ import annotations

import h5py
import torch


def link(file: h5py.File, name: str, dataset: h5py.h5d.DatasetID) -> None:
    """Give a data set its name, and make the groups in that."""
    how = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    how.set_create_intermediate_group(True)
    how.set_char_encoding(h5py.h5t.CSET_UTF8)
    h5py.h5o.link(dataset, file["/"].id, name.encode(), lcpl=how)


def hdf5_type(dtype: torch.dtype) -> h5py.h5t.TypeID:
    """The HDF5 type of a torch dtype; bfloat16 is a float type of its own that other tools read as float32."""
    if dtype == torch.bfloat16:
        kind = h5py.h5t.IEEE_F32LE.copy()
        kind.set_fields(15, 7, 8, 0, 7)
        kind.set_size(2)
        kind.set_ebias(127)
        return kind
    if dtype == torch.bool:
        dtype = torch.uint8
    return h5py.h5t.py_create(torch.empty(0, dtype=dtype).numpy().dtype)
