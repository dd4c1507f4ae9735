"""Device memory that the ranks of a node map from each other, each its own part of an arena."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import torch

from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.job.topology import all_gather_bytes
from mpitrain.comm.memory.device import export_memory, import_memory, synchronize
from mpitrain.errors import InputError, MpitrainError

_IMPOSSIBLE = (MpitrainError, RuntimeError, OSError, ValueError, TypeError, AttributeError)


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


def map_each_other(
    comm: MPI.Intracomm, node: MPI.Intracomm, tensor: torch.Tensor
) -> tuple[list[int], MappedMemory] | None:
    """Map the tensors of all ranks of a node. Collective over `comm`.

    Args:
        comm: The ranks that are to come to one answer.
        node: The communicator of those of them that are on this node.
        tensor: This rank's, which is the whole of its storage.

    Returns:
        The address of each rank's tensor in this process, in the order of `node`, and these memories; None on all ranks
        where some rank cannot map its neighbours' memory.
    """
    try:
        told = json.dumps(export_memory(tensor))
    except _IMPOSSIBLE:
        told = ""
    texts = all_gather_bytes(node, told.encode())
    memories = list[torch.Tensor]()
    try:
        for rank, text in enumerate(texts if all(texts) else []):
            memories.append(tensor if rank == node.rank else import_memory(json.loads(text), tensor.device))
    except _IMPOSSIBLE:
        memories.clear()
    if not all_agree(comm, len(memories) == node.size) or not all_agree(comm, _are_each_others(node, tensor, memories)):
        return None
    return [memory.data_ptr() for memory in memories], MappedMemory(memories)


def _are_each_others(node: MPI.Intracomm, tensor: torch.Tensor, memories: Sequence[torch.Tensor]) -> bool:
    """Whether what each rank writes is read in its memory: devices may have other numbers in another process."""
    own = tensor.view(-1).view(torch.uint8)[:1]
    own.fill_(1 + node.rank % 255)
    synchronize(tensor.device)
    node.Barrier()
    read = [int(memory.view(-1).view(torch.uint8)[0]) for memory in memories]
    node.Barrier()
    own.zero_()
    synchronize(tensor.device)
    node.Barrier()
    return read == [1 + rank % 255 for rank in range(node.size)]


def all_agree(comm: MPI.Intracomm, yes: bool) -> bool:
    """Whether all ranks say yes. Collective."""
    answer = np.array([yes], dtype=np.int64)
    comm.Allreduce(MPI.IN_PLACE, answer, MPI.MIN)
    return bool(answer[0])
