"""Memory of devices by its address: this rank's and what it has mapped of its neighbours'."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpitrain.errors import InputError


class MappedMemory:
    """Finds the tensor over an address among some memories, which it keeps alive.

    Args:
        memories: Contiguous tensors on devices.
    """

    def __init__(self, memories: Sequence[torch.Tensor]) -> None:
        self._memories = [tensor.detach().view(-1).view(torch.uint8) for tensor in memories]

    def beside(self, tensor: torch.Tensor) -> MappedMemory:
        """The same memories and one more."""
        return MappedMemory([*self._memories, tensor])

    def at(self, address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The flat tensor of `numel` elements at an address.

        Raises:
            InputError: The address is in none of the memories.
        """
        nbytes = numel * dtype.itemsize
        for memory in self._memories:
            offset = address - memory.data_ptr()
            if offset >= 0 and offset + nbytes <= memory.numel():
                return memory[offset : offset + nbytes].view(dtype)
        raise InputError(f"{nbytes} bytes at {address:#x} are in no memory that this rank has mapped")
