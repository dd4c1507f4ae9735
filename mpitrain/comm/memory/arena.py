"""Flat storage that collectives work on in place: shared by the ranks of a node, private, or on a device.

A shared arena is one MPI window per node, a segment per rank, all mapped by all ranks of the node:

    node A   | rank 0: numel | rank 1: numel | ...      each rank reads and writes its neighbours' segments
    node B   | rank 4: numel | ...

The kernel frees a window's memory when the last of its processes ends, however it ends.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.job.topology import all_gather_bytes
from mpitrain.comm.job.traffic import Watchers
from mpitrain.comm.memory.buffers import memory_at, tensor_at
from mpitrain.comm.memory.device import export_memory, import_memory, is_accelerator, synchronize
from mpitrain.comm.memory.elements import DTYPES, LARGEST_COUNT
from mpitrain.errors import InputError, MpitrainError
from mpitrain.storage.disk import SHARED_MEMORY, free_bytes

_ALIGNMENT = 4096  # bytes: pages, and whatever vector instructions and file systems like
_LIBRARY = 2 << 20  # bytes a rank that are left for the MPI library's own queues, which grow there as well


@dataclass(eq=False, repr=False)
class Arena:
    """Flat storage with `numel` elements for each rank.

    Attributes:
        kind: "shared" (a window of the node), "private" (memory of this process alone) or "device".
        tensor: This rank's elements, as a flat torch tensor.
        start: The address of these elements in memory.
        nbytes: Their length in bytes.
        segments: Of a shared arena, by the rank in the world of each rank of this node, the address of its segment
            here.
        window: The MPI window of a shared arena.
        index: Where it is entered.
        name: Of a shared arena, the same on all of its ranks.
        mapped: Of an arena on a device that the ranks of a node have mapped from each other, these memories; it then
            has segments and a name as a shared one has.
    """

    kind: str
    tensor: torch.Tensor
    segments: dict[int, int] = field(default_factory=dict)
    window: MPI.Win | None = None
    index: ArenaIndex | None = None
    mapped: MappedMemory | None = None
    name: str = ""

    def __post_init__(self) -> None:
        self.start, self.nbytes = self.tensor.data_ptr(), self.tensor.numel() * self.tensor.element_size()

    def view(self, offset: int, shape: Sequence[int]) -> torch.Tensor:
        """This rank's elements from `offset` on, as a tensor.

        Args:
            offset: In elements from the beginning of this rank's elements.
            shape: Of the tensor that is returned.

        Raises:
            InputError: The view reaches outside the arena.
        """
        numel = prod(shape)
        if offset < 0 or offset + numel > self.tensor.numel():
            raise InputError(
                f"view of {numel} elements at offset {offset} lies outside the arena of {self.tensor.numel()}; "
                "make the arena larger"
            )
        return self.tensor[offset : offset + numel].view(*shape)

    def peer(self, world_rank: int) -> torch.Tensor:
        """The flat tensor of another rank of this node, in a shared arena.

        Args:
            world_rank: That rank's number in the world.

        Raises:
            InputError: That rank shares no memory with this one.
        """
        if world_rank not in self.segments:
            raise InputError(f"rank {world_rank} shares no memory with this rank; peers are {sorted(self.segments)}")
        at = tensor_at if self.mapped is None else self.mapped.at
        return at(self.segments[world_rank], self.tensor.numel(), self.tensor.dtype)

    def free(self) -> None:
        """Release the memory. Collective over the arena's ranks; tensors over it must not be used afterwards."""
        if self.index is not None:
            self.index.forget(self)
            self.index = None
        self.tensor = torch.empty(0, dtype=self.tensor.dtype)
        if self.window is not None:
            _free(self.window)
            self.window = None
        self.mapped = None


class ArenaIndex:
    """All shared arenas of a process, and their windows; finds an arena by an address in it.

    Attributes:
        numbers: Gives each arena of which this process is the first rank the number in its name.
        warned: Whether a warning was printed that shared memory has no room.
        generation: Changes whenever an address may have come to lie in an arena, or may do so no longer.
        changed: Called whenever the generation has changed.
        maps_devices: Whether the ranks of a node are to map each other's arenas on devices.
    """

    def __init__(self) -> None:
        self._arenas: list[Arena] = []
        self._windows: dict[str, MPI.Win] = {}  # by the arena's name
        self.numbers = count(1)  # of those that this process is the first rank of
        self.warned = False  # that there is no room in shared memory
        self.generation = 0  # changes whenever an address may have begun or ceased to lie in an arena
        self.maps_devices = True
        self.changed = Watchers()

    def _change(self) -> None:
        self.generation += 1
        self.changed.tell()

    def add(self, arena: Arena, node: MPI.Intracomm, first: int, *, for_tensors: bool) -> None:
        """Give an arena the same name on all ranks of the node, and enter it into the index. Collective over the node.

        Args:
            arena: Which one.
            node: The communicator of the ranks of this node.
            first: The rank in the world of the first of them.
            for_tensors: Whether `find` is to find it.
        """
        number = np.array([next(self.numbers)])
        node.Bcast(number)
        arena.name = f"{first}.{number[0]}"
        if arena.window is not None:
            self._windows[arena.name] = arena.window
        if for_tensors:
            self._arenas.append(arena)
            self._change()

    def forget(self, arena: Arena) -> None:
        """Take an arena out of the index, before its memory is released."""
        self._windows.pop(arena.name, None)
        if arena in self._arenas:
            self._arenas.remove(arena)
            self._change()

    def free_windows(self) -> None:
        """Release all memory, at the end of the program. Collective over all ranks, each of which has come there.

        MPI_Finalize would free the windows in the order in which this process made them. Where several threads make
        some, that differs from rank to rank, and Open MPI meets at each of them: it would wait for ever.
        """
        for name in sorted(self._windows, key=lambda name: [int(number) for number in name.split(".")]):
            _free(self._windows.pop(name))

    def find(self, address: int, nbytes: int) -> Arena | None:
        """The arena that contains all of the bytes [address, address + nbytes), or None if there is no such arena."""
        for arena in self._arenas:
            if arena.start <= address and address + nbytes <= arena.start + arena.nbytes:
                return arena
        return None


def allocate(
    comm: MPI.Intracomm,
    node: MPI.Intracomm,
    world_ranks: Sequence[int],
    numel: int,
    dtype: torch.dtype,
    device: torch.device,
    index: ArenaIndex,
    *,
    for_tensors: bool = True,
) -> Arena:
    """Make an arena, of the same kind on all ranks. Collective over the ranks of `comm`.

    Where /dev/shm of some node has no room for it, the arena is private memory, and each such node warns once.

    Args:
        comm: The ranks of the arena.
        node: The communicator of those of them that are on this node.
        world_ranks: The rank in the world of each rank of `node`.
        numel: Elements for each rank.
        dtype: Of the elements.
        device: On which they lie.
        index: Where a shared arena is entered.
        for_tensors: Whether collectives find the arena in the index, by the address of what they are given.

    Raises:
        InputError: MPI cannot communicate the dtype.
    """
    if dtype not in DTYPES:
        raise InputError(f"an arena of {dtype} is not possible; use one of {sorted(map(str, DTYPES))}")
    if is_accelerator(device):
        return _on_device(comm, node, world_ranks, torch.zeros(numel, dtype=dtype, device=device), index)
    nbytes = -(-max(numel * dtype.itemsize, 1) // _ALIGNMENT) * _ALIGNMENT
    window = _shared_window(comm, node, nbytes, index) if comm.size > 1 else None
    if window is None:
        return Arena("private", torch.zeros(numel, dtype=dtype))
    segments = {world: _address(window, local) for local, world in enumerate(world_ranks)}
    mine = segments[world_ranks[node.rank]]
    arena = Arena("shared", tensor_at(mine, numel, dtype), segments, window, index)
    arena.start, arena.nbytes = mine, numel * dtype.itemsize
    index.add(arena, node, world_ranks[0], for_tensors=for_tensors)
    return arena


def _on_device(
    comm: MPI.Intracomm, node: MPI.Intracomm, world_ranks: Sequence[int], tensor: torch.Tensor, index: ArenaIndex
) -> Arena:
    """An arena on a device, mapped by the ranks of each node where that is wanted and possible. Collective."""
    wanted = index.maps_devices and comm.size > 1 and tensor.numel() > 0
    found = map_each_other(comm, node, tensor) if wanted else None
    if found is None:
        return Arena("device", tensor)
    addresses, mapped = found
    arena = Arena("device", tensor, dict(zip(world_ranks, addresses, strict=True)), index=index, mapped=mapped)
    index.add(arena, node, world_ranks[0], for_tensors=True)
    return arena


def _free(window: MPI.Win) -> None:
    window.Unlock_all()
    window.Free()


def _address(window: MPI.Win, local_rank: int) -> int:
    memory, _ = window.Shared_query(local_rank)
    return memory.address if hasattr(memory, "address") else MPI.memory.frombuffer(memory).address


def _shared_window(comm: MPI.Intracomm, node: MPI.Intracomm, nbytes: int, index: ArenaIndex) -> MPI.Win | None:
    """A window of zeros, nbytes a rank; None on all ranks of `comm` when some node has no room. Collective.

    Memory in /dev/shm is given out page by page on first touch, and a process that touches one for which there is
    no room dies of a bus error. So what seems to have room is filled at once, by the kernel, which only reports it.
    """
    wanted, free = _wanted_and_free(node, nbytes)
    if free < wanted:
        _warn(node, wanted, free, index)
    if not all_agree(comm, free >= wanted):
        return None
    info = MPI.Info.Create()
    info.Set("alloc_shared_noncontig", "true")
    window = MPI.Win.Allocate_shared(nbytes, 1, info, node)
    info.Free()
    window.Lock_all(MPI.MODE_NOCHECK)
    filled = all_agree(node, _fill_with_zeros(_address(window, node.rank), nbytes))
    if not filled:  # somebody else took it
        _warn(node, wanted, free, index)
    if all_agree(comm, filled):
        return window
    _free(window)
    return None


def _wanted_and_free(node: MPI.Intracomm, nbytes: int) -> tuple[int, int]:
    """Bytes that this node's ranks need together, and those that are free in its /dev/shm. Collective."""
    wanted = np.array([nbytes + _LIBRARY], dtype=np.int64)
    node.Allreduce(MPI.IN_PLACE, wanted)
    free = np.zeros(1, dtype=np.int64)
    if node.rank == 0:
        with suppress(OSError):
            free[0] = free_bytes(Path(SHARED_MEMORY))
    node.Bcast(free)
    return int(wanted[0]), int(free[0])


def _fill_with_zeros(address: int, nbytes: int) -> bool:
    """Whether there are pages behind all of it; there are afterwards."""
    done = 0
    with open("/dev/zero", "rb", buffering=0) as zeros:
        while done < nbytes:
            try:
                memory: Any = memory_at(address + done, min(LARGEST_COUNT, nbytes - done))
                got = zeros.readinto(memory)
            except OSError:  # EFAULT: no page
                return False
            done += got or 0
    return True


def _warn(node: MPI.Intracomm, wanted: int, free: int, index: ArenaIndex) -> None:
    """Say once a node, from its first rank, that shared memory is too small there."""
    if node.rank == 0 and not index.warned:
        index.warned = True
        warnings.warn(
            f"{SHARED_MEMORY} has {free >> 20} MiB free, {wanted >> 20} MiB are wanted on this node: using "
            "private memory and messages instead, which is slower; enlarge it "
            "(mount -o remount,size=50% /dev/shm; containers: --shm-size)",
            stacklevel=6,
        )


# -- Device memory that the ranks of a node map from each other, each its own part of an arena.

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
