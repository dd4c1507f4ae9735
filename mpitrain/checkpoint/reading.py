"""Restoring of checkpoints: each rank reads the blocks that contain its elements and verifies their hashes.

A checkpoint may be read in another layout than it was written in. A plan is made from the manifest alone; it lists the
blocks of files to read, and the places of their bytes. A few threads then read block by block, in the order of the
files. A block that several ranks of a node need is read by one of them, see `cooperative_read`.

In a cooperative read, blocks that only one rank needs are read by that rank (`reading.read`). The others are read in
rounds. In each round, every rank reads a few blocks into its slot of memory shared by the node
(`comm/collectives/alternating`), and copies what it needs from the slots of the previous round. Every byte is therefore
read and hashed once per node, and the bytes that are copied are the bytes that were hashed:

    turn      0             1                              2
    rank 0    reads A       reads C, copies of A and B     copies of C and D      A ... D: at most SLOT bytes each
    rank 1    reads B       reads D, copies of A and B     copies of C and D
                      meet                            meet
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise, repeat
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mpitrain.checkpoint.files import Part, bytes_of
from mpitrain.checkpoint.manifest import HASHED, Extent, Manifest, TensorSpec, distinct
from mpitrain.errors import CheckpointError
from mpitrain.layout.boxes import Piece, common_intervals
from mpitrain.storage.disk import opened
from mpitrain.storage.hdf5 import crc32, evenly, read_at

if TYPE_CHECKING:
    from mpitrain.checkpoint.device_memory import CopyStream, DeviceBytes
    from mpitrain.comm import Communicator
    from mpitrain.comm.communicator import Alternating

THREADS = 4
BlockIntervals = tuple[
    int, tuple[np.ndarray, np.ndarray, np.ndarray]
]  # block number; firsts, places and lengths of a `Use`
# intersection of two pieces: places in the target and lengths in elements, and the intervals in bytes by block
Overlap = tuple[np.ndarray, np.ndarray, list[BlockIntervals]]


@dataclass(frozen=True)
class Use:
    """Intervals of a block's bytes that are copied into the memory of a part.

    Attributes:
        memory: Bytes of the part, on the host or on a device.
        firsts: First byte of each interval in the block.
        places: First byte of each interval in the memory.
        lengths: Bytes of each interval.
    """

    memory: np.ndarray | DeviceBytes
    firsts: np.ndarray
    places: np.ndarray
    lengths: np.ndarray

    def copy(self, block: np.ndarray) -> None:
        """Copy the intervals out of the block's bytes; for memory on a device, only start the copy."""
        if not isinstance(self.memory, np.ndarray):
            self.memory.put(block, self.firsts, self.places, self.lengths)
            return
        for first, place, height, width, from_step, to_step in evenly(self.firsts, self.places, self.lengths):
            rows = np.ndarray((height, width), np.uint8, block, first, (from_step, 1))
            np.copyto(np.ndarray((height, width), np.uint8, self.memory, place, (to_step, 1)), rows)


@dataclass
class Block:
    """At most `HASHED` bytes covered by one hash, with the uses of these bytes.

    Attributes:
        extent: Extent that contains the block.
        number: Number of the block in the extent.
        size: Size in bytes.
        uses: Copies to make from the block.
    """

    extent: Extent
    number: int
    size: int
    uses: list[Use] = field(default_factory=list)

    @property
    def offset(self) -> int:
        """First byte of the block in the file."""
        return self.extent.offset + self.number * HASHED

    @property
    def direct_memory(self) -> memoryview | None:
        """Host memory to read the block into directly, if the whole block has one contiguous destination; else None."""
        if len(self.uses) != 1 or len(self.uses[0].lengths) != 1 or self.uses[0].lengths[0] != self.size:
            return None
        place, memory = int(self.uses[0].places[0]), self.uses[0].memory
        return memory[place : place + self.size].data if isinstance(memory, np.ndarray) else None


def _block_of(manifest: Manifest, extent: Extent, number: int) -> Block:
    """Return a block of an extent, without uses."""
    nbytes = extent.piece.numel * manifest.tensors[extent.piece.name].itemsize
    return Block(extent, number, min(HASHED, nbytes - number * HASHED))


def plan(folder: Path, manifest: Manifest, parts: Sequence[Part]) -> list[Block]:
    """Return the blocks to read to fill some parts.

    Args:
        folder: Folder of the checkpoint, for messages.
        manifest: Contents of the checkpoint.
        parts: Parts to fill.

    Returns:
        Blocks in the order of files and offsets.

    Raises:
        CheckpointError: The checkpoint lacks a tensor or elements of it, or has it in another shape or dtype.
    """
    blocks: dict[tuple[str, int, int], Block] = {}
    stream: CopyStream | None = None  # stream on which all parts on a device are filled
    overlaps: dict[tuple[object, ...], Overlap] = {}  # cached, because many layers of a model have the same overlap
    for part in parts:
        _check_spec(folder, manifest, part.spec)
        item, requested = part.spec.itemsize, part.piece
        memory, stream = _memory_of(part, stream)
        filled = []
        for extent in distinct(manifest.extents_of.get(part.spec.name, ())):
            saved = extent.piece
            key = (saved.box, saved.lo, saved.hi, requested.box, requested.lo, requested.hi, item)
            if key not in overlaps:
                sources, targets, lengths = common_intervals(saved, requested)
                cut = _split_at_blocks(sources * item, targets * item, lengths * item) if len(lengths) else ()
                overlaps[key] = targets, lengths, list(cut)
            targets, lengths, by_block = overlaps[key]
            if not len(lengths):
                continue
            filled.append((targets, lengths))
            for number, intervals in by_block:
                place = (extent.file, extent.offset, number)
                if place not in blocks:
                    blocks[place] = _block_of(manifest, extent, number)
                blocks[place].uses.append(Use(memory, *intervals))
        count = union(*(np.concatenate(a) for a in zip(*filled, strict=True))) if filled else 0
        if count != part.piece.numel:
            raise CheckpointError(
                f"{folder} contains only {count} of the {part.piece.numel} requested elements of {part.spec.name}; "
                "it is incomplete"
            )
    return [blocks[key] for key in sorted(blocks)]


def _memory_of(part: Part, stream: CopyStream | None) -> tuple[np.ndarray | DeviceBytes, CopyStream | None]:
    """Return the bytes of a part, and the stream for copies to a device, created for the first part on a device."""
    if part.data.is_cpu:
        return np.frombuffer(bytes_of(part.data), dtype=np.uint8), stream
    from mpitrain.checkpoint.device_memory import CopyStream, DeviceBytes

    stream = stream or CopyStream(part.data.device)
    return DeviceBytes(part.data, stream), stream


def copy_stream_of(blocks: Iterable[Block]) -> CopyStream | None:
    """Return the stream on which blocks are copied to a device; None if none is."""
    memories = (use.memory for block in blocks for use in block.uses)
    return next((memory.stream for memory in memories if not isinstance(memory, np.ndarray)), None)


def wait_for_copies(blocks: Iterable[Block]) -> None:
    """Wait until all data copied from these blocks has arrived on its device."""
    copy_stream = copy_stream_of(blocks)
    if copy_stream is not None:
        copy_stream.stream.synchronize()


def _split_at_blocks(sources: np.ndarray, targets: np.ndarray, lengths: np.ndarray) -> Iterator[BlockIntervals]:
    """Yield intervals of an extent's bytes, cut at the boundaries of its blocks."""
    begin, last = sources // HASHED, (sources + lengths - 1) // HASHED
    counts = last - begin + 1
    of = np.repeat(np.arange(len(sources)), counts)
    number = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts - begin, counts)
    lo = np.maximum(sources[of], number * HASHED)
    hi = np.minimum((sources + lengths)[of], (number + 1) * HASHED)
    places = targets[of] + lo - sources[of]
    bounds = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(number)]
    for first, end in pairwise(bounds):
        one = slice(first, end)
        yield int(number[first]), (lo[one] - number[one] * HASHED, places[one], (hi - lo)[one])


def files_of(blocks: Iterable[Block]) -> set[str]:
    """Return the names of the files that contain these blocks."""
    return {block.extent.file for block in blocks}


@contextmanager
def open_files(folder: Path, blocks: Iterable[Block]) -> Iterator[dict[str, int]]:
    """Open the files that contain these blocks, and give their descriptors by name. Raises OSError.

    Args:
        folder: Folder of the checkpoint.
        blocks: Blocks to read.
    """
    with ExitStack() as stack:
        yield {name: stack.enter_context(opened(folder / name)) for name in sorted(files_of(blocks))}


def read(folder: Path, blocks: Sequence[Block]) -> None:
    """Read blocks and fill the parts that they were planned for.

    Args:
        folder: Folder of the checkpoint.
        blocks: Result of `plan`.

    Raises:
        CheckpointError: Bytes are damaged; the message names them.
        OSError: A file cannot be read.
    """
    scratch = threading.local()
    stream = copy_stream_of(blocks)
    with open_files(folder, blocks) as descriptors, ThreadPoolExecutor(THREADS, "mpitrain-read") as pool:

        def fill(block: Block) -> None:
            descriptor = descriptors[block.extent.file]
            if (direct := block.direct_memory) is not None:
                read_block(folder, block, descriptor, direct)
                return
            if not hasattr(scratch, "buffers"):
                scratch.buffers = _buffers(stream)
            memory = next(scratch.buffers)[: block.size]
            read_block(folder, block, descriptor, memory.data)
            for use in block.uses:
                use.copy(memory)

        for _ in pool.map(fill, blocks):  # raises the first error, and cancels the remaining blocks
            pass
    wait_for_copies(blocks)


def _buffers(stream: CopyStream | None) -> Iterator[np.ndarray]:
    """Yield the memory into which a thread reads each block before copying from it."""
    if stream is None:
        return repeat(np.empty(HASHED, dtype=np.uint8))
    from mpitrain.checkpoint.device_memory import read_buffers

    return read_buffers(HASHED, stream)


def check(folder: Path, manifest: Manifest, extent: Extent, descriptor: int, scratch: memoryview) -> list[str]:
    """Verify the hashes of an extent.

    Args:
        folder: Folder of the checkpoint.
        manifest: Contents of the checkpoint.
        extent: Extent to verify.
        descriptor: Descriptor of its file.
        scratch: Memory of `HASHED` bytes.

    Returns:
        Sentence for each damaged block of the extent.
    """
    problems = []
    for number in range(len(extent.hashes)):
        block = _block_of(manifest, extent, number)
        try:
            read_block(folder, block, descriptor, scratch[: block.size])
        except CheckpointError as error:
            problems.append(str(error))
    return problems


def read_block(folder: Path, block: Block, descriptor: int, into: memoryview) -> None:
    """Read a block and verify its hash.

    Args:
        folder: Folder of the checkpoint.
        block: Block to read.
        descriptor: Descriptor of its file.
        into: Memory of the block's size.

    Raises:
        CheckpointError: The bytes are damaged, or the file is too short.
        OSError: The file cannot be read.
    """
    path = folder / block.extent.file
    read_exactly(descriptor, into, block.offset, path)
    if crc32(into) != block.extent.hashes[block.number]:
        raise CheckpointError(
            f"{path}: bytes {block.offset} to {block.offset + block.size} ({block.extent.piece.name}) "
            "are damaged: their hash does not match"
        )


def read_exactly(descriptor: int, into: memoryview, offset: int, path: Path) -> None:
    """Fill memory from an offset of an open file.

    Args:
        descriptor: Descriptor of the file.
        into: Memory to fill.
        offset: First byte to read.
        path: Path of the file, for messages.

    Raises:
        CheckpointError: The file is too short.
        OSError: The file cannot be read.
    """
    done = read_at(descriptor, into, offset)
    if done < len(into):
        raise CheckpointError(f"{path} ends at byte {offset + done}; it was cut short")


def union(firsts: np.ndarray, lengths: np.ndarray) -> int:
    """Return the number of elements that lie in any of these intervals.

    Args:
        firsts: First element of each interval, shape (n,).
        lengths: Number of elements of each interval, shape (n,).
    """
    order = np.argsort(firsts, kind="stable")
    lo = firsts[order]
    hi = lo + lengths[order]
    before = np.concatenate([[0], np.maximum.accumulate(hi)[:-1]]) if len(lo) else lo
    return int(np.maximum(hi - np.maximum(lo, before), 0).sum())


def covered(pieces: Iterable[Piece]) -> int:
    """Return the number of elements of a tensor that lie in any of these pieces of it."""
    runs = [piece.runs() for piece in set(pieces)]
    if not runs:
        return 0
    return union(np.concatenate([starts for starts, *_ in runs]), np.concatenate([of for _, of, _ in runs]))


def _check_spec(folder: Path, manifest: Manifest, spec: TensorSpec) -> None:
    saved = manifest.tensors.get(spec.name)
    if saved is None:
        raise CheckpointError(f"{folder} has no tensor {spec.name}; it belongs to another model or optimizer")
    if (saved.shape, saved.dtype) != (spec.shape, spec.dtype):
        raise CheckpointError(
            f"{folder}: {spec.name} is {saved.dtype} {list(saved.shape)} in the checkpoint and {spec.dtype} "
            f"{list(spec.shape)} in this run; use the settings of the saved model"
        )


SLOT = HASHED  # bytes that a rank reads in a round


def cooperative_read(node: Communicator, folder: Path, manifest: Manifest, blocks: Sequence[Block]) -> None:
    """Read blocks that the ranks of a node need, each block once per node, and fill the planned parts. Collective.

    Args:
        node: Ranks of a node, which all can read `folder`.
        folder: Folder of the checkpoint.
        manifest: Contents of the checkpoint.
        blocks: Blocks that this rank needs; see `plan`.

    Raises:
        CheckpointError, OSError: Only on the rank that finds damaged bytes or a failing disk. The data of the other
            ranks may then be wrong, so the ranks must agree on the outcome.
    """
    every = [(extent, number) for extent in manifest.extents for number in range(len(extent.hashes))]
    places = {(extent.file, extent.offset, number): place for place, (extent, number) in enumerate(every)}
    mine = {places[block.extent.file, block.extent.offset, block.number]: block for block in blocks}
    needing = np.zeros(len(every), dtype=np.int32)  # number of ranks that need each block
    needing[list(mine)] = 1
    if node.size > 1:
        node.all_reduce(needing)
    shared = np.flatnonzero(needing > 1).tolist()
    slots = node.alternating(SLOT) if shared else None
    if slots is None:
        read(folder, blocks)
        return
    shared_blocks = [mine.get(place) or _block_of(manifest, *every[place]) for place in shared]
    error = _read_shared(node, slots, folder, shared_blocks)
    wait_for_copies(shared_blocks)
    slots.free()
    if error is not None:
        raise error
    read(folder, [block for place, block in mine.items() if needing[place] == 1])


def pack_into_loads(sizes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Pack blocks in order into loads of at most SLOT bytes; each load lists block numbers and offsets in the slot."""
    packed: list[list[tuple[int, int]]] = []
    end = SLOT
    for number, size in enumerate(sizes):
        if end + size > SLOT:
            packed.append([])
            end = 0
        packed[-1].append((number, end))
        end += size
    return packed


def _read_shared(node: Communicator, slots: Alternating, folder: Path, blocks: Sequence[Block]) -> Exception | None:
    """Read blocks that several ranks need, and fill this rank's parts. Collective.

    Returns:
        Error of this rank, or None. All ranks give the same blocks.
    """
    packed = pack_into_loads([block.size for block in blocks])
    own_loads = packed[node.rank :: node.size]
    memory = [[slot.numpy() for slot in of_turn] for of_turn in slots.slots]
    error: Exception | None = None
    with ExitStack() as stack:
        try:
            descriptors = stack.enter_context(open_files(folder, [blocks[n] for load in own_loads for n, _ in load]))
        except OSError as caught:
            error = caught
        pool = stack.enter_context(ThreadPoolExecutor(THREADS, "mpitrain-read"))
        for turn in range(-(-len(packed) // node.size) + 1):
            own_slot, before = memory[slots.turn][node.rank], memory[1 - slots.turn]
            try:
                reading: list[Future[None]] = []
                for number, offset in own_loads[turn] if error is None and turn < len(own_loads) else ():
                    block = blocks[number]
                    buffer = own_slot[offset : offset + block.size].data
                    reading.append(pool.submit(read_block, folder, block, descriptors[block.extent.file], buffer))
                for source, load in enumerate(packed[max(0, turn - 1) * node.size : turn * node.size]):
                    for number, offset in load:
                        block = blocks[number]
                        for use in block.uses:
                            use.copy(before[source][offset : offset + block.size])
                for future in reading:
                    future.result()
            except Exception as caught:  # any error: the other ranks wait for this rank in every round
                error = error or caught
            slots.meet()
    return error
