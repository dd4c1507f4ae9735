"""CUDA tensors: passed to an MPI that can read device memory, else through pinned host memory.

MPI knows nothing of streams. Before it reads a device buffer the caller's current stream is synchronised, so
the operation comes after the work queued there; MPI's calls return when the data have arrived, so later
work on any stream sees them.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence

import torch
from mpi4py import MPI


def cuda_aware() -> bool:
    """Whether the MPI library takes addresses of CUDA memory. MPITRAIN_CUDA_AWARE=0|1 overrides what is found out.

    Open MPI and libraries made of it are asked by their MPIX_Query_cuda_support; MPICH names the kinds of memory that
    it was built or started for.
    """
    override = os.environ.get("MPITRAIN_CUDA_AWARE")
    if override is not None:
        return override not in ("0", "", "no", "false")
    try:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            paths = {line.split()[-1] for line in maps if "libmpi" in line}
    except OSError:
        return False
    for path in sorted(paths):
        try:
            query = ctypes.CDLL(path).MPIX_Query_cuda_support
        except (OSError, AttributeError):
            continue
        query.restype = ctypes.c_int
        if query():
            return True
    kinds = MPI.COMM_WORLD.Get_info().Get("mpi_memory_alloc_kinds") or ""
    return "cuda" in kinds


def synchronize(tensor: torch.Tensor) -> None:
    """Wait for the work that is queued on the caller's current stream of the tensor's device."""
    torch.cuda.current_stream(tensor.device).synchronize()


def through_host(
    bind: Callable[..., Callable[[], object]], tensors: Sequence[torch.Tensor | None], written: Sequence[bool]
) -> None:
    """Run an operation on pinned host copies of CUDA tensors, and copy back what it changed.

    Args:
        bind: Called with the host tensors, returns the call that performs the operation.
        tensors: CUDA tensors of the operation; None where an argument is missing.
        written: For each of them, whether the operation changes it.
    """
    host = [None if t is None else torch.empty_like(t, device="cpu", pin_memory=True) for t in tensors]
    pairs = [
        (mine, theirs, changed)
        for mine, theirs, changed in zip(host, tensors, written, strict=True)
        if mine is not None and theirs is not None
    ]
    for mine, theirs, _ in pairs:
        mine.copy_(theirs, non_blocking=True)
    for _, theirs, _ in pairs:
        synchronize(theirs)
    bind(*host)()
    for mine, theirs, changed in pairs:
        if changed:
            theirs.copy_(mine, non_blocking=True)
            synchronize(theirs)
