"""Memory for tensors that are communicated, kept by the process group and given out again.

FSDP2 allocates what it gathers into and reduces from anew for every layer of every step; the system then has to find,
clear and map its pages each time, which takes as long as the communication. After

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_allocate_memory_from_process_group_for_comm(True)

it asks the process group instead (`allocate_tensor`), and gets the memory that a tensor of the same size has left.
"""

from __future__ import annotations

import weakref
from collections import defaultdict

import numpy as np
import torch

_STEPS = 8  # sizes between one power of two and the next: at most so much of a block is unused
_LEAST = 4096  # bytes


class TensorMemory:
    """The blocks of one process group. Any thread may drop a tensor."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[np.ndarray]] = defaultdict(list)

    def tensor(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor of undefined values in host memory; the block is free again when its last view is gone."""
        nbytes = numel * dtype.itemsize
        free = self._free[_rounded(nbytes)]
        try:
            block = free.pop()
        except IndexError:
            block = np.empty(_rounded(nbytes), dtype=np.uint8)
        lent = block[:nbytes]  # torch keeps this object as long as it needs the memory
        weakref.finalize(lent, free.append, block).atexit = False
        return torch.from_numpy(lent).view(dtype)

    def clear(self) -> None:
        """Give the free blocks back to the system."""
        self._free.clear()


def _rounded(nbytes: int) -> int:
    """The size of the block for so many bytes."""
    unit = max(_LEAST, (1 << max(nbytes - 1, 1).bit_length()) // (2 * _STEPS))
    return -(-nbytes // unit) * unit
