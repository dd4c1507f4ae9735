"""Flat storage that collectives work on in place: shared by the ranks of a node, private, or on a device.

A shared arena is one MPI window per node with a segment for each rank. All ranks of the node map all segments:

    node A   | rank 0: numel | rank 1: numel | ...      each rank reads and writes its neighbours' segments
    node B   | rank 4: numel | ...

The kernel frees the memory of a window when the last of its processes ends, even if the process is killed.
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
from mpitrain.comm.job.traffic import Callbacks
from mpitrain.comm.memory.buffers import memory_at, tensor_at
from mpitrain.comm.memory.device import export_memory, import_memory, is_accelerator, synchronize
from mpitrain.comm.memory.elements import DTYPES, LARGEST_COUNT
from mpitrain.errors import InputError, MpitrainError
from mpitrain.storage.disk import ENLARGE, SHARED_MEMORY, free_bytes

_ALIGNMENT = 4096  # bytes: a page, which also suits vector instructions and file systems
_LIBRARY_BYTES = 2 << 20  # bytes per rank of /dev/shm left for the queues of the MPI library, which grow there as well


@dataclass(eq=False, repr=False)
class Arena:
    """Flat storage of `numel` elements on each rank.

    Attributes:
        kind: "shared" (a window of the node), "private" (memory of this process alone) or "device".
        tensor: Flat tensor of this rank's elements.
        start: Address of these elements.
        nbytes: Length of these elements in bytes.
        segments: Address, in this process, of each segment on this node, by world rank. Empty for memory that is not
            shared.
        window: MPI window of a shared arena.
        index: Index that contains the arena.
        name: Name of a shared arena, the same on all of its ranks.
        mapped: Memories of the node's ranks, for an arena on devices that these ranks have mapped from each other. Such
            an arena has `segments` and `name` like a shared one.
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
        """Return some of this rank's elements as a tensor over the same memory.

        Args:
            offset: First element.
            shape: Shape of the returned tensor.

        Raises:
            InputError: The view reaches beyond the arena.
        """
        numel = prod(shape)
        if offset < 0 or offset + numel > self.tensor.numel():
            raise InputError(
                f"a view of {numel} elements at offset {offset} does not fit into the arena of {self.tensor.numel()} "
                "elements; make the arena larger"
            )
        return self.tensor[offset : offset + numel].view(*shape)

    def peer(self, world_rank: int) -> torch.Tensor:
        """Return the elements of another rank of this node, as a flat tensor over its memory in a shared arena.

        Args:
            world_rank: World rank of the other rank.

        Raises:
            InputError: That rank shares no memory with this one.
        """
        if world_rank not in self.segments:
            raise InputError(f"rank {world_rank} shares no memory with this rank; peers are {sorted(self.segments)}")
        at = tensor_at if self.mapped is None else self.mapped.at
        return at(self.segments[world_rank], self.tensor.numel(), self.tensor.dtype)

    def free(self) -> None:
        """Free the memory. Tensors over it must not be used afterwards. Collective over the arena's ranks."""
        if self.index is not None:
            self.index.forget(self)
            self.index = None
        self.tensor = torch.empty(0, dtype=self.tensor.dtype)
        if self.window is not None:
            _free(self.window)
            self.window = None
        self.mapped = None


class ArenaIndex:
    """Index of all shared arenas of a process and of their windows, by address.

    Attributes:
        numbers: Counter of the arenas of which this process is the first rank; each name contains such a number.
        warned: True after the warning that shared memory has no room.
        generation: Counter that increases whenever an arena is added or removed, so cached look-ups become invalid.
        changed: Methods called after each increase of the generation.
        maps_devices: If true, ranks of a node map each other's arenas on devices.
    """

    def __init__(self) -> None:
        self._arenas: list[Arena] = []
        self._windows: dict[str, MPI.Win] = {}  # by the arena's name
        self.numbers = count(1)
        self.warned = False
        self.generation = 0
        self.maps_devices = True
        self.changed = Callbacks()

    def _change(self) -> None:
        self.generation += 1
        self.changed.call_all()

    def add(self, arena: Arena, node: MPI.Intracomm, first: int, *, for_tensors: bool) -> None:
        """Name an arena, equally on all ranks of the node, and add it to the index. Collective over the node.

        Args:
            arena: Arena to add.
            node: Communicator of the ranks of this node.
            first: World rank of the first of them.
            for_tensors: If true, `find` finds the arena.
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
        """Remove an arena from the index, before its memory is freed."""
        self._windows.pop(arena.name, None)
        if arena in self._arenas:
            self._arenas.remove(arena)
            self._change()

    def shared_bytes(self) -> int:
        """Return the bytes of this rank's tensors in memory that it shares with its node."""
        return sum(arena.nbytes for arena in self._arenas if arena.kind == "shared")

    def free_windows(self) -> None:
        """Free all windows at the end of the program. Collective over all ranks, all of which must be at their end.

        MPI_Finalize would free the windows in the order in which this process made them. This order differs between
        ranks if several threads make windows. In Open MPI, freeing a window synchronizes its ranks, so they would
        deadlock.
        """
        for name in sorted(self._windows, key=lambda name: [int(number) for number in name.split(".")]):
            _free(self._windows.pop(name))

    def find(self, address: int, nbytes: int) -> Arena | None:
        """Return the arena that contains all bytes of a piece of memory; None if there is none.

        Args:
            address: Address of the first byte.
            nbytes: Number of bytes.
        """
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
    """Make an arena of the same kind on all ranks. Collective over the ranks of `comm`.

    If /dev/shm of some node has no room, the arena is private memory on all ranks, and each such node prints one
    warning.

    Args:
        comm: Communicator of the arena's ranks.
        node: Communicator of those ranks that are on this node.
        world_ranks: World rank of each rank of `node`.
        numel: Elements of each rank.
        dtype: Element type.
        device: Device of the elements.
        index: Index to which a shared arena is added.
        for_tensors: If true, collectives recognize tensors in the arena by their addresses.

    Raises:
        InputError: MPI cannot communicate the dtype.
    """
    if dtype not in DTYPES:
        raise InputError(f"an arena of {dtype} is not possible; use one of {sorted(map(str, DTYPES))}")
    if is_accelerator(device):
        return _allocate_on_device(comm, node, world_ranks, torch.zeros(numel, dtype=dtype, device=device), index)
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


def _allocate_on_device(
    comm: MPI.Intracomm, node: MPI.Intracomm, world_ranks: Sequence[int], tensor: torch.Tensor, index: ArenaIndex
) -> Arena:
    """Return an arena on a device, mapped by the ranks of each node if this is enabled and possible. Collective."""
    should_map = index.maps_devices and comm.size > 1 and tensor.numel() > 0
    mapping = map_each_other(comm, node, tensor) if should_map else None
    if mapping is None:
        return Arena("device", tensor)
    addresses, mapped = mapping
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
    """Return a window of zeros with nbytes per rank; None on all ranks if some node has no room. Collective.

    Pages in /dev/shm are allocated on first touch, and a process that touches a page for which there is no room dies of
    SIGBUS. Therefore the kernel fills the memory at once, by read(2), which reports an error instead.
    """
    needed_bytes, free = _needed_and_free(node, nbytes)
    if free < needed_bytes:
        _warn(node, needed_bytes, free, index)
    if not all_agree(comm, free >= needed_bytes):
        return None
    info = MPI.Info.Create()
    info.Set("alloc_shared_noncontig", "true")
    window = MPI.Win.Allocate_shared(nbytes, 1, info, node)
    info.Free()
    window.Lock_all(MPI.MODE_NOCHECK)
    filled = all_agree(node, _fill_with_zeros(_address(window, node.rank), nbytes))
    if not filled:  # another program has taken the room meanwhile
        _warn(node, needed_bytes, free, index)
    if all_agree(comm, filled):
        return window
    _free(window)
    return None


def _needed_and_free(node: MPI.Intracomm, nbytes: int) -> tuple[int, int]:
    """Return the bytes that this node's ranks need together, and the free bytes of its /dev/shm. Collective."""
    needed_bytes = np.array([nbytes + _LIBRARY_BYTES], dtype=np.int64)
    node.Allreduce(MPI.IN_PLACE, needed_bytes)
    free = np.zeros(1, dtype=np.int64)
    if node.rank == 0:
        with suppress(OSError):
            free[0] = free_bytes(Path(SHARED_MEMORY))
    node.Bcast(free)
    return int(needed_bytes[0]), int(free[0])


def _fill_with_zeros(address: int, nbytes: int) -> bool:
    """Allocate the pages of some memory by writing zeros; return False if there is no room for all of them."""
    filled = 0
    with open("/dev/zero", "rb", buffering=0) as zeros:
        while filled < nbytes:
            try:
                memory: Any = memory_at(address + filled, min(LARGEST_COUNT, nbytes - filled))
                got = zeros.readinto(memory)
            except OSError:  # EFAULT: no page
                return False
            filled += got or 0
    return True


def _warn(node: MPI.Intracomm, needed: int, free: int, index: ArenaIndex) -> None:
    """Warn, once per node from its first rank, that its shared memory is too small."""
    if node.rank == 0 and not index.warned:
        index.warned = True
        warnings.warn(
            f"{SHARED_MEMORY} has {free >> 20} MiB free, but the ranks of this node need {needed >> 20} MiB; they use "
            f"private memory and messages instead, which is slower; {ENLARGE}",
            stacklevel=6,
        )


# -- Device memory of an arena: each rank of a node allocates its part and maps the parts of the others.

_MAPPING_ERRORS = (MpitrainError, RuntimeError, OSError, ValueError, TypeError, AttributeError)


class MappedMemory:
    """Memories on devices, kept alive, of which any part can be viewed as a tensor by its address.

    Args:
        memories: Contiguous tensors on devices.
    """

    def __init__(self, memories: Sequence[torch.Tensor]) -> None:
        self._memories = [tensor.detach().view(-1).view(torch.uint8) for tensor in memories]

    def with_memory(self, tensor: torch.Tensor) -> MappedMemory:
        """Return a copy that contains one more memory."""
        return MappedMemory([*self._memories, tensor])

    def at(self, address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor over the elements at an address.

        Args:
            address: Address of the first element.
            numel: Number of elements.
            dtype: Element type.

        Raises:
            InputError: None of the memories contains all of the elements.
        """
        nbytes = numel * dtype.itemsize
        for memory in self._memories:
            offset = address - memory.data_ptr()
            if offset >= 0 and offset + nbytes <= memory.numel():
                return memory[offset : offset + nbytes].view(dtype)
        raise InputError(f"no memory that this rank has mapped contains the {nbytes} bytes at {address:#x}")


def map_each_other(
    comm: MPI.Intracomm, node: MPI.Intracomm, tensor: torch.Tensor
) -> tuple[list[int], MappedMemory] | None:
    """Map the tensors of all ranks of a node into each other's address space. Collective over `comm`.

    Args:
        comm: Communicator of the ranks that must all succeed.
        node: Communicator of those ranks that are on this node.
        tensor: Tensor of this rank, which covers its whole storage.

    Returns:
        Address in this process of each rank's tensor, in the order of `node`, and the memories; None on all ranks if
        some rank cannot map its neighbours' memory.
    """
    try:
        description = json.dumps(export_memory(tensor))
    except _MAPPING_ERRORS:
        description = ""
    texts = all_gather_bytes(node, description.encode())
    memories = list[torch.Tensor]()
    try:
        for rank, text in enumerate(texts if all(texts) else []):
            memories.append(tensor if rank == node.rank else import_memory(json.loads(text), tensor.device))
    except _MAPPING_ERRORS:
        memories.clear()
    if not all_agree(comm, len(memories) == node.size) or not all_agree(
        comm, _maps_right_ranks(node, tensor, memories)
    ):
        return None
    return [memory.data_ptr() for memory in memories], MappedMemory(memories)


def _maps_right_ranks(node: MPI.Intracomm, tensor: torch.Tensor, memories: Sequence[torch.Tensor]) -> bool:
    """Return True if each mapping shows the right rank's memory. Device numbers may differ between processes."""
    first_byte = tensor.view(-1).view(torch.uint8)[:1]
    first_byte.fill_(1 + node.rank % 255)
    synchronize(tensor.device)
    node.Barrier()
    read = [int(memory.view(-1).view(torch.uint8)[0]) for memory in memories]
    node.Barrier()
    first_byte.zero_()
    synchronize(tensor.device)
    node.Barrier()
    return read == [1 + rank % 255 for rank in range(node.size)]


def all_agree(comm: MPI.Intracomm, agrees: bool) -> bool:
    """Return True if `agrees` is true on all ranks. Collective.

    Args:
        comm: Communicator of the ranks.
        agrees: This rank's answer.
    """
    answer = np.array([agrees], dtype=np.int64)
    comm.Allreduce(MPI.IN_PLACE, answer, MPI.MIN)
    return bool(answer[0])
