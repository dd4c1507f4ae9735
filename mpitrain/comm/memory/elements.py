"""Element types that can be communicated, and the largest count of one MPI call. This module does not load MPI."""

from __future__ import annotations

import torch

# MPI's names of the types that it can reduce; mpitrain itself converts or reduces fp16 and bf16.
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
