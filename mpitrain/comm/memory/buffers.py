"""Arrays of torch, NumPy and CuPy as what MPI needs: an address, a number of elements and a type.

Nothing here copies. MPI sees bytes wherever data only move; where the library itself is to compute, the table
`elements.NAMES` says which MPI type is safe, because mpi4py's own guess silently gives garbage for 16-bit types.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mpitrain.comm.memory.device import current_stream, foreign_stream, recorded
from mpitrain.comm.memory.elements import DTYPES, LARGEST_COUNT, NAMES
from mpitrain.comm.process.mpi import MPI
from mpitrain.errors import InputError

MPI_TYPES: dict[torch.dtype, MPI.Datatype] = {dtype: getattr(MPI, name) for dtype, name in NAMES.items()}


def as_tensor(x: Any, *, written: bool = True) -> torch.Tensor:
    """View an array as a torch tensor over the same memory.

    Args:
        x: A contiguous torch tensor on the CPU or an accelerator, or array of NumPy, of CuPy or of another library that
            has __cuda_array_interface__ or __dlpack__, of one of `DTYPES`.
        written: Whether the operation writes into it; a read-only array is then an error.

    Raises:
        InputError: It cannot be communicated; the message says why, and what to pass instead.
    """
    if isinstance(x, torch.Tensor):
        tensor = x
        if tensor.layout != torch.strided:
            raise InputError(f"a {tensor.layout} tensor cannot be communicated; call .to_dense() first")
        if tensor.device.type == "meta":
            raise InputError("a tensor on meta has no data to communicate; move it to a device with to_empty(device=…)")
        if tensor.is_conj() or tensor.is_neg():
            raise InputError("a lazily conjugated tensor cannot be communicated; pass x.resolve_conj().resolve_neg()")
    elif isinstance(x, np.ndarray):
        if written and not x.flags.writeable:
            raise InputError("the NumPy array is read-only, but the result goes into it; pass a copy")
        if not x.flags.c_contiguous:
            raise InputError(f"a NumPy array of shape {x.shape} is not contiguous; pass numpy.ascontiguousarray(x)")
        tensor = _over_numpy(x)
    elif hasattr(x, "__cuda_array_interface__"):
        tensor = _over_device_memory(x)
    elif hasattr(x, "__dlpack__"):
        tensor = torch.from_dlpack(x)  # which has its library order its stream before ours
    else:
        raise InputError(
            f"a {type(x).__name__} cannot be communicated; pass a torch, NumPy or CuPy array, or one with __dlpack__"
        )
    if tensor.dtype not in DTYPES:
        raise InputError(_no_dtype(tensor.dtype))
    if not tensor.is_contiguous():
        raise InputError(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous; "
            "pass x.contiguous()"
        )
    return tensor


def _over_numpy(x: np.ndarray) -> torch.Tensor:
    try:
        if x.flags.writeable:
            return torch.from_numpy(x)
        dtype = torch.from_numpy(np.empty(0, x.dtype)).dtype
    except (TypeError, ValueError):
        raise InputError(_no_dtype(x.dtype)) from None
    return tensor_at(x.__array_interface__["data"][0], x.size, dtype).view(x.shape)


def _over_device_memory(x: Any) -> torch.Tensor:
    """The tensor over an array of CuPy or Numba; what its stream was asked comes before what ours is asked."""
    tensor = torch.as_tensor(x)
    handle = x.__cuda_array_interface__.get("stream")
    other = foreign_stream(tensor.device, handle) if handle is not None else None
    if other is not None:
        current_stream(tensor.device).wait_event(recorded(tensor.device, other))
    return tensor


def _no_dtype(dtype: object) -> str:
    names = ", ".join(sorted(str(d).removeprefix("torch.") for d in DTYPES))
    return f"dtype {dtype} cannot be communicated; convert to one of {names}"


def tensor_at(address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """The flat tensor over `numel` elements at an address in host memory.

    It does not own the memory, which must live as long as the tensor is used.

    Args:
        address: Of the first element.
        numel: Number of elements.
        dtype: Of the elements.
    """
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(MPI.memory.fromaddress(address, numel * dtype.itemsize), dtype=dtype, count=numel)


def memory_at(address: int, nbytes: int) -> MPI.memory:
    """View `nbytes` bytes at an address as mpi4py does; for 0 bytes any address will do (an empty tensor has none)."""
    return MPI.memory.fromaddress(address, nbytes) if nbytes else MPI.memory.allocate(0)


def bytes_at(address: int, nbytes: int) -> list[Any]:
    """An mpi4py buffer specification of raw bytes at an address; `nbytes` must not exceed LARGEST_COUNT."""
    return [memory_at(address, nbytes), nbytes, MPI.BYTE]


def in_messages(tensor: torch.Tensor) -> list[list[Any]]:
    """A contiguous tensor's bytes as the buffers of messages, none longer than MPI takes; none for an empty tensor."""
    address, nbytes = tensor.data_ptr(), tensor.nbytes
    return [bytes_at(address + lo, min(LARGEST_COUNT, nbytes - lo)) for lo in range(0, nbytes, LARGEST_COUNT)]
