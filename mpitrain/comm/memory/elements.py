"""Which tensors can be communicated: their elements, how many in one call of MPI, and the tensors that others wrap.

Subclasses without memory of their own are communicated as what they wrap:

    TwoTensor           a, b                    two operations
    Float8Tensor        data, scale             two
    AsyncCollectiveTensor  elem                 one, after what it waits for
    a plain tensor      itself                  one

PyTorch's protocol for them is __tensor_flatten__ (torch/utils/_python_dispatch.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mpitrain.errors import InputError

# The library computes with these types only, under its names; fp16 and bf16 are converted or reduced by us.
NAMES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.uint8: "UINT8_T",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
    torch.bool: "UINT8_T",  # with the logical operations
}
HALVES = (torch.float16, torch.bfloat16)
SMALL_INTEGERS = (torch.int8, torch.int16, torch.uint8)
DTYPES = frozenset(NAMES) | frozenset(HALVES)
LARGEST_COUNT = 2**30  # bytes or elements in one MPI call: some libraries fail above 2^31 - 1


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
