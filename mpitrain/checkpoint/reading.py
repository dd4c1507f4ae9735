"""Restoring: each rank reads the blocks that hold its elements, whoever wrote them, and checks their hashes.

First a plan, from the manifest alone (which blocks of which files, and where their bytes belong); then the reading,
block by block in the order of the files, by a few threads. Blocks that several ranks of a node need are read by one
of them (see `cooperative_read`).

Cooperative read: what several ranks of a node need of a checkpoint is read and checked by one, copied by all.

Blocks that only one rank needs it reads by itself (`reading.read`). The others are read in rounds, each by one rank
into its slot of memory that all ranks of the node see (`comm/collectives/alternating`), while everybody copies what it
needs of the round before. So every byte is read and hashed once a node, and what is copied is what was hashed:

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
from mpitrain.layout.boxes import Piece, stretches
from mpitrain.storage.disk import opened
from mpitrain.storage.hdf5 import crc32, evenly, read_at

if TYPE_CHECKING:
    from mpitrain.checkpoint.device_memory import Arrivals, DeviceBytes
    from mpitrain.comm import Communicator
    from mpitrain.comm.communicator import Alternating

THREADS = 4
BlockStretches = tuple[int, tuple[np.ndarray, np.ndarray, np.ndarray]]  # number of the block; of a `Use` all but memory
# what two pieces have in common: stretches of elements (places in the target, lengths), and as bytes by block
Overlap = tuple[np.ndarray, np.ndarray, list[BlockStretches]]


@dataclass(frozen=True)
class Use:
    """Stretches of a block's bytes that go to places in the memory of a part.

    Attributes:
        memory: The bytes of the part, on the host or on a device.
        firsts: The first byte of each stretch in the block.
        places: Where each goes in the memory.
        lengths: How many bytes each has.
    """

    memory: np.ndarray | DeviceBytes
    firsts: np.ndarray
    places: np.ndarray
    lengths: np.ndarray

    def copy(self, block: np.ndarray) -> None:
        """Copy the stretches out of the bytes of the block; where they go to a device only begin to."""
        if not isinstance(self.memory, np.ndarray):
            self.memory.put(block, self.firsts, self.places, self.lengths)
            return
        for first, place, height, width, from_step, to_step in evenly(self.firsts, self.places, self.lengths):
            rows = np.ndarray((height, width), np.uint8, block, first, (from_step, 1))
            np.copyto(np.ndarray((height, width), np.uint8, self.memory, place, (to_step, 1)), rows)


@dataclass
class Block:
    """At most HASHED bytes under one hash, and what they are read for.

    Attributes:
        extent: The extent that they lie in.
        number: The number of the block in the extent.
        size: How many bytes it has.
        uses: What its bytes are read for.
    """

    extent: Extent
    number: int
    size: int
    uses: list[Use] = field(default_factory=list)

    @property
    def offset(self) -> int:
        """Its first byte in the file."""
        return self.extent.offset + self.number * HASHED

    @property
    def whole(self) -> memoryview | None:
        """The memory to read into where all of the block goes to one place."""
        if len(self.uses) != 1 or len(self.uses[0].lengths) != 1 or self.uses[0].lengths[0] != self.size:
            return None
        place, memory = int(self.uses[0].places[0]), self.uses[0].memory
        return memory[place : place + self.size].data if isinstance(memory, np.ndarray) else None


def _block_of(manifest: Manifest, extent: Extent, number: int) -> Block:
    """Return a block of an extent, from which nothing is filled yet."""
    nbytes = extent.piece.numel * manifest.tensors[extent.piece.name].itemsize
    return Block(extent, number, min(HASHED, nbytes - number * HASHED))


def plan(folder: Path, manifest: Manifest, parts: Sequence[Part]) -> list[Block]:
    """Find the blocks that fill some parts.

    Args:
        folder: The checkpoint, for messages.
        manifest: What it holds.
        parts: What is to be filled.

    Returns:
        The blocks, in the order of files and offsets.

    Raises:
        CheckpointError: The checkpoint lacks a tensor, has it in another shape or type, or lacks elements of it.
    """
    blocks: dict[tuple[str, int, int], Block] = {}
    arrivals: Arrivals | None = None  # of parts on a device, which all come there on one stream
    overlaps: dict[tuple[object, ...], Overlap] = {}  # many layers of a model overlap alike
    for part in parts:
        _check_spec(folder, manifest, part.spec)
        item, wanted = part.spec.itemsize, part.piece
        memory, arrivals = _memory_of(part, arrivals)
        filled = []
        for extent in distinct(manifest.extents_of.get(part.spec.name, ())):
            held = extent.piece
            key = (held.box, held.lo, held.hi, wanted.box, wanted.lo, wanted.hi, item)
            if key not in overlaps:
                sources, targets, lengths = stretches(held, wanted)
                cut = _by_block(sources * item, targets * item, lengths * item) if len(lengths) else ()
                overlaps[key] = targets, lengths, list(cut)
            targets, lengths, by_block = overlaps[key]
            if not len(lengths):
                continue
            filled.append((targets, lengths))
            for number, stretches_of in by_block:
                place = (extent.file, extent.offset, number)
                if place not in blocks:
                    blocks[place] = _block_of(manifest, extent, number)
                blocks[place].uses.append(Use(memory, *stretches_of))
        found = union(*(np.concatenate(a) for a in zip(*filled, strict=True))) if filled else 0
        if found != part.piece.numel:
            raise CheckpointError(
                f"{folder} holds {found} of the {part.piece.numel} elements wanted of {part.spec.name}; "
                "it was not written whole"
            )
    return [blocks[key] for key in sorted(blocks)]


def _memory_of(part: Part, arrivals: Arrivals | None) -> tuple[np.ndarray | DeviceBytes, Arrivals | None]:
    """The bytes of a part, and the stream on which what lies on a device comes there, made by the first that does."""
    if part.data.is_cpu:
        return np.frombuffer(bytes_of(part.data), dtype=np.uint8), arrivals
    from mpitrain.checkpoint.device_memory import Arrivals, DeviceBytes

    arrivals = arrivals or Arrivals(part.data.device)
    return DeviceBytes(part.data, arrivals), arrivals


def arrivals_of(blocks: Iterable[Block]) -> Arrivals | None:
    """The stream on which what is read comes to a device; None where nothing does."""
    memories = (use.memory for block in blocks for use in block.uses)
    return next((memory.arrivals for memory in memories if not isinstance(memory, np.ndarray)), None)


def settle(blocks: Iterable[Block]) -> None:
    """Return when what was copied out of these blocks has arrived, on whichever device."""
    arrivals = arrivals_of(blocks)
    if arrivals is not None:
        arrivals.stream.synchronize()


def _by_block(sources: np.ndarray, targets: np.ndarray, lengths: np.ndarray) -> Iterator[BlockStretches]:
    """Stretches of an extent's bytes, cut at its blocks."""
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
    """The names of the files that hold these blocks."""
    return {block.extent.file for block in blocks}


@contextmanager
def open_files(folder: Path, blocks: Iterable[Block]) -> Iterator[dict[str, int]]:
    """The descriptors of the files that hold these blocks, by their names; they are open inside. Raises OSError."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(opened(folder / name)) for name in sorted(files_of(blocks))}


def read(folder: Path, blocks: Sequence[Block]) -> None:
    """Fill what a plan is for.

    Args:
        folder: The checkpoint.
        blocks: The plan, as of `plan`.

    Raises:
        CheckpointError: Bytes are damaged; the message names them.
        OSError: A file cannot be read.
    """
    scratch = threading.local()
    arrivals = arrivals_of(blocks)
    with open_files(folder, blocks) as descriptors, ThreadPoolExecutor(THREADS, "mpitrain-read") as pool:

        def fill(block: Block) -> None:
            descriptor = descriptors[block.extent.file]
            if (direct := block.whole) is not None:
                read_block(folder, block, descriptor, direct)
                return
            if not hasattr(scratch, "buffers"):
                scratch.buffers = _buffers(arrivals)
            memory = next(scratch.buffers)[: block.size]
            read_block(folder, block, descriptor, memory.data)
            for use in block.uses:
                use.copy(memory)

        for _ in pool.map(fill, blocks):  # which raises what the first one raised, and cancels the others
            pass
    settle(blocks)


def _buffers(arrivals: Arrivals | None) -> Iterator[np.ndarray]:
    """Memory of a thread to read each block into, out of which it then copies."""
    if arrivals is None:
        return repeat(np.empty(HASHED, dtype=np.uint8))
    from mpitrain.checkpoint.device_memory import read_buffers

    return read_buffers(HASHED, arrivals)


def check(folder: Path, manifest: Manifest, extent: Extent, descriptor: int, scratch: memoryview) -> list[str]:
    """Hash an extent again.

    Args:
        folder: The checkpoint.
        manifest: What it holds.
        extent: The extent.
        descriptor: That of the file that holds it.
        scratch: Memory of HASHED bytes.

    Returns:
        A sentence for each damaged block of the extent.
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
    """Read a block and check its hash.

    Args:
        folder: The checkpoint.
        block: The block.
        descriptor: That of the file that holds it.
        into: Memory of its size.

    Raises:
        CheckpointError: The bytes are damaged, or the file ends before.
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
    """Fill memory from an offset of an open file. Raises CheckpointError where the file ends before, or OSError."""
    done = read_at(descriptor, into, offset)
    if done < len(into):
        raise CheckpointError(f"{path} ends at byte {offset + done}; it was cut short")


def union(firsts: np.ndarray, lengths: np.ndarray) -> int:
    """How many elements lie in any of these stretches."""
    order = np.argsort(firsts, kind="stable")
    lo = firsts[order]
    hi = lo + lengths[order]
    before = np.concatenate([[0], np.maximum.accumulate(hi)[:-1]]) if len(lo) else lo
    return int(np.maximum(hi - np.maximum(lo, before), 0).sum())


def covered(pieces: Iterable[Piece]) -> int:
    """How many elements of a tensor lie in any of these pieces of it."""
    runs = [piece.runs() for piece in set(pieces)]
    if not runs:
        return 0
    return union(np.concatenate([starts for starts, *_ in runs]), np.concatenate([of for _, of, _ in runs]))


def _check_spec(folder: Path, manifest: Manifest, wanted: TensorSpec) -> None:
    found = manifest.tensors.get(wanted.name)
    if found is None:
        raise CheckpointError(f"{folder} holds no {wanted.name}; it belongs to another model or optimizer")
    if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        raise CheckpointError(
            f"{folder}: {wanted.name} is {found.dtype} {list(found.shape)} there and {wanted.dtype} "
            f"{list(wanted.shape)} here; the model must be the one that was saved"
        )


SLOT = HASHED  # bytes that a rank reads in a turn


def cooperative_read(node: Communicator, folder: Path, manifest: Manifest, blocks: Sequence[Block]) -> None:
    """Read blocks into the memory that they are planned for. Collective over the ranks of a node.

    Args:
        node: The ranks, which all see `folder`.
        folder: Of the checkpoint.
        manifest: Of the checkpoint.
        blocks: What this rank needs (see `reading.plan`).

    Raises:
        CheckpointError, OSError: On the rank that meets damaged bytes or a failing disk, and on no other. What the
            others were to get may then be wrong, so the ranks must agree on the outcome.
    """
    every = [(extent, number) for extent in manifest.extents for number in range(len(extent.hashes))]
    places = {(extent.file, extent.offset, number): place for place, (extent, number) in enumerate(every)}
    mine = {places[block.extent.file, block.extent.offset, block.number]: block for block in blocks}
    needing = np.zeros(len(every), dtype=np.int32)  # how many ranks need each block
    needing[list(mine)] = 1
    if node.size > 1:
        node.all_reduce(needing)
    shared = np.flatnonzero(needing > 1).tolist()
    slots = node.alternating(SLOT) if shared else None
    if slots is None:
        read(folder, blocks)
        return
    together = [mine.get(place) or _block_of(manifest, *every[place]) for place in shared]
    error = _read_shared(node, slots, folder, together)
    settle(together)
    slots.free()
    if error is not None:
        raise error
    read(folder, [block for place, block in mine.items() if needing[place] == 1])


def loads(sizes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Blocks of these sizes, in order, in loads of at most SLOT bytes: each block's number and place in the slot."""
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
    """Read these blocks, the same on all ranks, and fill what they are for here; returns what failed on this rank."""
    packed = loads([block.size for block in blocks])
    own = packed[node.rank :: node.size]
    memory = [[slot.numpy() for slot in of_turn] for of_turn in slots.slots]
    error: Exception | None = None
    with ExitStack() as stack:
        try:
            descriptors = stack.enter_context(open_files(folder, [blocks[n] for load in own for n, _ in load]))
        except OSError as caught:
            error = caught
        pool = stack.enter_context(ThreadPoolExecutor(THREADS, "mpitrain-read"))
        for turn in range(-(-len(packed) // node.size) + 1):
            own_slot, before = memory[slots.turn][node.rank], memory[1 - slots.turn]
            try:
                reading: list[Future[None]] = []
                for number, offset in own[turn] if error is None and turn < len(own) else ():
                    block = blocks[number]
                    into = own_slot[offset : offset + block.size].data
                    reading.append(pool.submit(read_block, folder, block, descriptors[block.extent.file], into))
                for source, load in enumerate(packed[max(0, turn - 1) * node.size : turn * node.size]):
                    for number, offset in load:
                        block = blocks[number]
                        for use in block.uses:
                            use.copy(before[source][offset : offset + block.size])
                for future in reading:
                    future.result()
            except Exception as caught:  # whatever it is: the others wait for this rank at every turn
                error = error or caught
            slots.meet()
    return error
