"""Arrays of torch, NumPy and CuPy in the form that MPI needs: an address, a number of elements and a type.

Nothing here copies, and memory that another library declares read-only is not written. MPI gets bytes if data are only
moved. If the MPI library must compute, the table `elements.NAMES` has the safe MPI type: mpi4py's own choice for 16-bit
types silently gives wrong results.

Tensor subclasses without memory of their own are communicated as the tensors that they wrap:

    TwoTensor           a, b                    two operations
    Float8Tensor        data, scale             two operations
    AsyncCollectiveTensor  elem                 one operation, after the collective that elem waits for
    a plain tensor      itself                  one operation

PyTorch's protocol for such classes is __tensor_flatten__ (torch/utils/_python_dispatch.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.memory.device import current_stream, foreign_stream, record_event
from mpitrain.comm.memory.elements import DTYPES, LARGEST_COUNT, NAMES
from mpitrain.errors import InputError

MPI_TYPES: dict[torch.dtype, MPI.Datatype] = {dtype: getattr(MPI, name) for dtype, name in NAMES.items()}


def is_wrapper(x: Any) -> bool:
    """Return True if x is a tensor subclass that consists of other tensors."""
    return type(x) is not torch.Tensor and isinstance(x, torch.Tensor) and bool(is_traceable_wrapper_subclass(x))


def inner_tensors(x: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors with memory of which a tensor consists, in the order of its class; [x] for a plain tensor.

    Raises:
        InputError: A tensor has no memory and no __tensor_flatten__.
    """
    if not is_wrapper(x):
        if type(x) is not torch.Tensor and not _has_memory(x):
            raise InputError(
                f"a tensor of class {type(x).__name__} has no memory of its own and no __tensor_flatten__; pass the "
                "tensors that it wraps"
            )
        return [x]
    if x.layout != torch.strided:  # a nested tensor has another shape on each rank
        return [x]
    wait: Any = getattr(x, "trigger_wait", None)  # of torch's AsyncCollectiveTensor
    if wait is not None:
        return inner_tensors(wait())
    names: list[str] = getattr(x, "__tensor_flatten__")()[0]  # noqa: B009 - torch.Tensor does not declare it
    return [inner for name in names for inner in inner_tensors(getattr(x, name))]


def _has_memory(x: torch.Tensor) -> bool:
    try:
        return x.layout != torch.strided or x.is_meta or not x.numel() or bool(x.data_ptr())
    except RuntimeError:  # FakeTensor, which stands for a tensor with memory
        return True


def as_tensor(x: Any, *, written: bool = True) -> torch.Tensor:
    """Return a torch tensor over the memory of an array.

    Args:
        x: Contiguous array with an element type of `DTYPES`: a torch tensor on the CPU or an accelerator, or an array
            of NumPy, CuPy or another library with __cuda_array_interface__ or __dlpack__.
        written: True if the operation writes into the array; then a read-only array is an error.

    Raises:
        InputError: The array cannot be communicated. The message says why, and what to pass instead.
    """
    if isinstance(x, torch.Tensor):
        inner = [x] if type(x) is torch.Tensor else inner_tensors(x)
        if len(inner) != 1:
            raise InputError(f"a {type(x).__name__} is made of {len(inner)} tensors; pass them one by one")
        tensor = inner[0]
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
        tensor = _wrap_numpy(x)
    else:
        tensor = _wrap_foreign(x, written)
    if tensor.dtype not in DTYPES:
        raise InputError(_unsupported_dtype(tensor.dtype))
    if not tensor.is_contiguous():
        raise InputError(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous; "
            "pass x.contiguous()"
        )
    return tensor


def is_negated(part: Any, whole: Any) -> bool:
    """Return True if one of the tensors is lazily negated, as the imaginary part of a lazily conjugated tensor is.

    Of such tensors, those of one element are contiguous.

    Args:
        part: Tensor of this rank.
        whole: Tensor of all ranks' elements, or None where a rank has none.
    """
    return bool(part.is_neg() or (whole is not None and whole.is_neg()))


def _wrap_numpy(x: np.ndarray) -> torch.Tensor:
    try:
        if x.flags.writeable:
            return torch.from_numpy(x)
        dtype = torch.from_numpy(np.empty(0, x.dtype)).dtype
    except (TypeError, ValueError):
        raise InputError(_unsupported_dtype(x.dtype)) from None
    return tensor_at(x.__array_interface__["data"][0], x.size, dtype).view(x.shape)


def _wrap_foreign(x: Any, written: bool) -> torch.Tensor:
    """Return a tensor over an array of a library other than torch and NumPy.

    If an array has both protocols and torch cannot use __cuda_array_interface__, for instance because it was built
    without CUDA, __dlpack__ is used.
    """
    kind = type(x)
    protocols = [name for name in ("__cuda_array_interface__", "__dlpack__") if hasattr(kind, name)]
    if not protocols:
        raise InputError(
            f"a {kind.__name__} cannot be communicated; pass a torch, NumPy or CuPy array, or one with __dlpack__"
        )
    problems = []
    for protocol in protocols:
        try:
            return _wrap_dlpack(x, written) if protocol == "__dlpack__" else _wrap_cuda_array(x)
        except InputError:
            raise
        except Exception as error:  # whatever another library raises
            problems.append(f"{protocol} of a {kind.__name__} cannot be used ({' '.join(str(error).split()):.200})")
    raise InputError(f"the {' and the '.join(problems)}; pass a torch tensor or a NumPy array")


def _wrap_cuda_array(x: Any) -> torch.Tensor:
    """Return a tensor over an array of CuPy or Numba; work queued on the array's stream precedes later work on ours.

    Torch itself refuses read-only arrays.
    """
    tensor = torch.as_tensor(x)
    handle = x.__cuda_array_interface__.get("stream")
    other = foreign_stream(tensor.device, handle) if handle is not None else None
    if other is not None:
        current_stream(tensor.device).wait_event(record_event(tensor.device, other))
    return tensor


def _wrap_dlpack(x: Any, written: bool) -> torch.Tensor:
    """Return a tensor over an array with __dlpack__. Its library orders the array's stream before ours."""
    writable = _is_writable(x) if written else True
    if not writable:
        why = "is read-only" if writable is False else "does not say whether it may be written (DLPack before 1.0)"
        instead = "pass a copy" if writable is False else "pass torch.from_dlpack(x) if it may, else a copy"
        raise InputError(f"the {type(x).__name__} {why}, but the result goes into it; {instead}")
    return torch.from_dlpack(x)


class _Versioned(ctypes.Structure):
    """First members of DLManagedTensorVersioned, https://dmlc.github.io/dlpack/latest/c_api.html."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
    )


_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY
_VERSIONED = b"dltensor_versioned"  # name of the capsule
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _is_writable(x: Any) -> bool | None:
    """Return whether an array with __dlpack__ may be written; None if its library does not say."""
    try:
        capsule = x.__dlpack__(max_version=(1, 0))
    except TypeError:  # the library predates DLPack versions
        return None
    if _VERSIONED.decode() not in repr(capsule):
        return None
    address = _pointer_of(capsule, _VERSIONED)
    return not _Versioned.from_address(address).flags & _READ_ONLY


def _unsupported_dtype(dtype: object) -> str:
    names = ", ".join(sorted(str(d).removeprefix("torch.") for d in DTYPES))
    return f"dtype {dtype} cannot be communicated; convert to one of {names}"


def tensor_at(address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a flat tensor over elements in host memory.

    The tensor does not own the memory, which must outlive it.

    Args:
        address: Address of the first element.
        numel: Number of elements.
        dtype: Element type.
    """
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(MPI.memory.fromaddress(address, numel * dtype.itemsize), dtype=dtype, count=numel)


def memory_at(address: int, nbytes: int) -> MPI.memory:
    """Return some bytes of host memory as an mpi4py memory object.

    Args:
        address: Address of the first byte; ignored if there are 0 bytes, because an empty tensor has no address.
        nbytes: Number of bytes.
    """
    return MPI.memory.fromaddress(address, nbytes) if nbytes else MPI.memory.allocate(0)


def bytes_at(address: int, nbytes: int) -> list[Any]:
    """Return the mpi4py buffer specification of some bytes of host memory.

    Args:
        address: Address of the first byte.
        nbytes: Number of bytes, at most LARGEST_COUNT.
    """
    return [memory_at(address, nbytes), nbytes, MPI.BYTE]


def message_buffers(tensor: torch.Tensor) -> list[list[Any]]:
    """Return a contiguous tensor's bytes as mpi4py buffers, none longer than MPI accepts; none for an empty tensor."""
    return [bytes_at(tensor.data_ptr() + lo, n) for lo, n in pieces(tensor.nbytes)]


def shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if two contiguous tensors have bytes of memory in common."""
    a_end, b_end = a.data_ptr() + a.numel() * a.element_size(), b.data_ptr() + b.numel() * b.element_size()
    return a.data_ptr() < b_end and b.data_ptr() < a_end


def typed_buffer(address: int, numel: int, dtype: torch.dtype) -> list[Any]:
    """Return the mpi4py buffer specification of elements with which MPI computes.

    Args:
        address: Address of the first element.
        numel: Number of elements.
        dtype: Element type.
    """
    return [memory_at(address, numel * dtype.itemsize), numel, MPI_TYPES[dtype]]


def typed_buffers(x: torch.Tensor) -> list[list[Any]]:
    """Return a tensor as mpi4py buffers with which MPI computes, one per call: none is longer than MPI accepts."""
    return [typed_buffer(x.data_ptr() + lo * x.element_size(), n, x.dtype) for lo, n in pieces(x.numel())]


def even_blocks(address: int, count: int, blocks: int, item: int) -> list[Any]:
    """Return the mpi4py buffer specification, in bytes, of consecutive blocks of equal length.

    Args:
        address: Address of the first block.
        count: Elements of each block.
        blocks: Number of blocks.
        item: Bytes of an element.
    """
    return [memory_at(address, count * item * blocks), count * item, MPI.BYTE]


def uneven_blocks(address: int, counts: Sequence[int], item: int) -> list[Any]:
    """Return the mpi4py buffer specification, in bytes, of consecutive blocks of different lengths.

    Args:
        address: Address of the first block.
        counts: Elements of each block.
        item: Bytes of an element.
    """
    sizes = [count * item for count in counts]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [memory_at(address, sum(sizes)), sizes, starts, MPI.BYTE]


def pieces(numel: int) -> list[tuple[int, int]]:
    """Return the offset and length of each piece of `numel` elements that one MPI call accepts."""
    return [(lo, min(LARGEST_COUNT, numel - lo)) for lo in range(0, numel, LARGEST_COUNT)]
