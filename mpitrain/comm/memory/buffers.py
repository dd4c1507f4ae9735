"""Arrays of torch, NumPy and CuPy as what MPI needs: an address, a number of elements and a type.

Nothing here copies, and memory that another library declares read-only is not written. MPI sees bytes wherever data
only move; where the library itself is to compute, the table `elements.NAMES` says which MPI type is safe, because
mpi4py's own guess silently gives garbage for 16-bit types.

Subclasses without memory of their own are communicated as what they wrap:

    TwoTensor           a, b                    two operations
    Float8Tensor        data, scale             two
    AsyncCollectiveTensor  elem                 one, after what it waits for
    a plain tensor      itself                  one

PyTorch's protocol for them is __tensor_flatten__ (torch/utils/_python_dispatch.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.memory.device import current_stream, foreign_stream, recorded
from mpitrain.comm.memory.elements import DTYPES, LARGEST_COUNT, NAMES
from mpitrain.errors import InputError

MPI_TYPES: dict[torch.dtype, MPI.Datatype] = {dtype: getattr(MPI, name) for dtype, name in NAMES.items()}


def is_wrapper(x: Any) -> bool:
    """Return whether x is a tensor that is made of others."""
    return type(x) is not torch.Tensor and isinstance(x, torch.Tensor) and bool(is_traceable_wrapper_subclass(x))


def inner_tensors(x: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors with memory that a tensor is made of, in the order of its class; a plain one is its own.

    Raises:
        InputError: One has no memory, and does not tell what it wraps.
    """
    if not is_wrapper(x):
        if type(x) is not torch.Tensor and not _has_memory(x):
            raise InputError(
                f"a tensor of class {type(x).__name__} has no memory of its own, and no __tensor_flatten__ tells what "
                "it wraps; pass the tensors that it is made of"
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
    except RuntimeError:  # FakeTensor, which stands for one that has
        return True


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
        tensor = _over_numpy(x)
    else:
        tensor = _over_foreign(x, written)
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


def _over_foreign(x: Any, written: bool) -> torch.Tensor:
    """Return a tensor over an array of a library that is neither torch nor NumPy.

    Where an array has both protocols, __dlpack__ serves if torch cannot use the other: it may be built without CUDA.
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
            return _over_dlpack(x, written) if protocol == "__dlpack__" else _over_cuda_interface(x)
        except InputError:
            raise
        except Exception as error:  # whatever another library raises
            problems.append(f"{protocol} of a {kind.__name__} cannot be used ({' '.join(str(error).split()):.200})")
    raise InputError(f"the {' and the '.join(problems)}; pass a torch tensor or a NumPy array")


def _over_cuda_interface(x: Any) -> torch.Tensor:
    """Return the tensor over an array of CuPy or Numba; what its stream was asked comes before what ours is asked.

    Torch refuses read-only arrays itself.
    """
    tensor = torch.as_tensor(x)
    handle = x.__cuda_array_interface__.get("stream")
    other = foreign_stream(tensor.device, handle) if handle is not None else None
    if other is not None:
        current_stream(tensor.device).wait_event(recorded(tensor.device, other))
    return tensor


def _over_dlpack(x: Any, written: bool) -> torch.Tensor:
    """Return the tensor over an array with __dlpack__, whose library orders its stream before ours."""
    writable = _writable(x) if written else True
    if not writable:
        why = "is read-only" if writable is False else "does not say whether it may be written (DLPack before 1.0)"
        instead = "pass a copy" if writable is False else "pass torch.from_dlpack(x) if it may, else a copy"
        raise InputError(f"the {type(x).__name__} {why}, but the result goes into it; {instead}")
    return torch.from_dlpack(x)


class _Versioned(ctypes.Structure):
    """The first members of DLManagedTensorVersioned, https://dmlc.github.io/dlpack/latest/c_api.html."""

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


def _writable(x: Any) -> bool | None:
    """Tell whether an array with __dlpack__ may be written; None where its library does not say."""
    try:
        capsule = x.__dlpack__(max_version=(1, 0))
    except TypeError:  # it knows no versions
        return None
    if _VERSIONED.decode() not in repr(capsule):
        return None
    address = _pointer_of(capsule, _VERSIONED)
    return not _Versioned.from_address(address).flags & _READ_ONLY


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
    return [bytes_at(tensor.data_ptr() + lo, n) for lo, n in pieces(tensor.nbytes)]


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the memories of two contiguous tensors have bytes in common."""
    a_end, b_end = a.data_ptr() + a.numel() * a.element_size(), b.data_ptr() + b.numel() * b.element_size()
    return a.data_ptr() < b_end and b.data_ptr() < a_end


def typed(address: int, numel: int, dtype: torch.dtype) -> list[Any]:
    """Elements that the library is to compute with."""
    return [memory_at(address, numel * dtype.itemsize), numel, MPI_TYPES[dtype]]


def typed_pieces(x: torch.Tensor) -> list[list[Any]]:
    """x for the library to compute with, in as many calls as it takes."""
    return [typed(x.data_ptr() + lo * x.element_size(), n, x.dtype) for lo, n in pieces(x.numel())]


def even_blocks(address: int, count: int, blocks: int, item: int) -> list[Any]:
    """Bytes in consecutive blocks of `count` elements each."""
    return [memory_at(address, count * item * blocks), count * item, MPI.BYTE]


def uneven_blocks(address: int, counts: Sequence[int], item: int) -> list[Any]:
    """Bytes in consecutive blocks of `counts` elements."""
    sizes = [count * item for count in counts]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [memory_at(address, sum(sizes)), sizes, starts, MPI.BYTE]


def pieces(numel: int) -> list[tuple[int, int]]:
    """Offset and length of what is passed in one call."""
    return [(lo, min(LARGEST_COUNT, numel - lo)) for lo in range(0, numel, LARGEST_COUNT)]
