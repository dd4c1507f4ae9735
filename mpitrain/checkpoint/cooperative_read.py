"""Cooperative read: what several ranks of a node need of a checkpoint is read and checked by one, copied by all.

Blocks that only one rank needs it reads by itself (`reading.read`). The others are read in rounds, each by one rank
into its slot of memory that all ranks of the node see (`comm/collectives/alternating`), while everybody copies what it
needs of the round before. So every byte is read and hashed once a node, and what is copied is what was hashed:

    turn      0             1                              2
    rank 0    reads A       reads C, copies of A and B     copies of C and D      A ... D: at most SLOT bytes each
    rank 1    reads B       reads D, copies of A and B     copies of C and D
                      meet                            meet
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mpitrain.checkpoint.manifest import HASHED, Manifest
from mpitrain.checkpoint.reading import THREADS, Block, open_files, read, read_block, settle

if TYPE_CHECKING:
    from mpitrain.comm import Communicator
    from mpitrain.comm.collectives.node_memory import Alternating

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
    numbering = Numbering(manifest)
    mine = {numbering.number(block): block for block in blocks}
    needing = np.zeros(numbering.count, dtype=np.int32)  # how many ranks need each block
    needing[list(mine)] = 1
    if node.size > 1:
        node.all_reduce(needing)
    shared = np.flatnonzero(needing > 1).tolist()
    slots = node.alternating(SLOT) if shared else None
    if slots is None:
        read(folder, blocks)
        return
    error = _read_shared(node, slots, folder, [mine.get(number) or numbering.block(number) for number in shared])
    settle([block for number, block in mine.items() if needing[number] > 1])
    slots.free()
    if error is not None:
        raise error
    read(folder, [block for number, block in mine.items() if needing[number] == 1])


class Numbering:
    """All blocks of a checkpoint, numbered in the order of the manifest: the same on all ranks."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._firsts = list(accumulate((len(extent.hashes) for extent in manifest.extents), initial=0))
        places = zip(manifest.extents, self._firsts, strict=False)
        self._first_at = {(extent.file, extent.offset): first for extent, first in places if extent.hashes}
        self.count = self._firsts[-1]

    def number(self, block: Block) -> int:
        return self._first_at[block.extent.file, block.extent.offset] + block.number

    def block(self, number: int) -> Block:
        """A block that nothing is filled from here."""
        place = bisect_right(self._firsts, number) - 1
        extent, within = self._manifest.extents[place], number - self._firsts[place]
        nbytes = extent.piece.numel * self._manifest.tensors[extent.piece.name].itemsize
        return Block(extent, within, min(HASHED, nbytes - within * HASHED))


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
