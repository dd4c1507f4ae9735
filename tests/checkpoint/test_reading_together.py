"""Shared reading: one rank of a node reads and checks the blocks that several of its ranks need."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from checkpoint_states import empty, in_boxes, in_slices, part, same
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.checkpoint import Store
from mpitrain.checkpoint.manifest import HASHED, read_manifest
from mpitrain.checkpoint.reading import SLOT, pack_into_loads
from mpitrain.errors import CheckpointError


@given(st.lists(st.integers(1, HASHED)))
def test_every_block_is_packed_once_in_order_without_overlap(sizes):
    packed = pack_into_loads(sizes)
    assert [number for load in packed for number, _ in load] == list(range(len(sizes)))
    for load in packed:
        end = 0
        for number, offset in load:
            assert offset == end
            end += sizes[number]
        assert 0 < end <= SLOT
    for load, following in pairwise(packed):  # no load could have held one block more
        assert sum(sizes[number] for number, _ in load) + sizes[following[0][0]] > SLOT


def copies(tensors, rank, size):
    return [part(name, tensor, 0, tensor.numel()) for name, tensor in tensors.items()]


@pytest.fixture
def saved(world, folder):
    """Return a store, its tensors, and a checkpoint's folder in which each rank has a flat slice of each tensor."""
    generator = torch.Generator().manual_seed(5)
    tensors = {f"model/w{n}": torch.rand(1500, 1024, generator=generator) for n in range(5)}  # 6 MB each
    store = Store(folder / "c", world, keep=2)
    store.prepare(set_aside=False)
    return store, tensors, store.save(1, in_slices(tensors, world.rank, world.size), {})


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("layout", [in_boxes, copies])
def test_a_node_reads_each_byte_once(world, saved, layout):
    store, tensors, path = saved
    expected = layout(tensors, world.rank, world.size)
    filled = empty(expected)
    before = bytes_read()
    store.load(path, lambda manifest: filled)
    assert same(filled, expected)
    read = torch.tensor([bytes_read() - before])
    world.all_reduce(read)
    stored = sum(tensor.nbytes for tensor in tensors.values())
    window = 2 * SLOT * world.size  # filled with zeros by a read
    assert stored <= int(read) - window < 1.1 * stored  # the manifest is read, too


@pytest.mark.ranks(2, 3)
def test_no_rank_uses_a_block_that_one_rank_finds_damaged(world, saved):
    store, tensors, path = saved
    manifest = read_manifest(path)
    good = store.save(2, in_slices(tensors, world.rank, world.size), {})
    for extent in (manifest.extents[0], manifest.extents[-1]):
        file = path / extent.file
        if world.rank == 0:
            damage(file, extent.offset + 5)
        world.barrier()
        filled = empty(in_boxes(tensors, world.rank, world.size))
        with pytest.raises(CheckpointError, match=f"{extent.file}: bytes {extent.offset} to .* are damaged"):
            store.load(path, lambda manifest, filled=filled: filled)
        world.barrier()
        if world.rank == 0:
            damage(file, extent.offset + 5)  # as it was
        world.barrier()
    expected = in_boxes(tensors, world.rank, world.size)
    for folder in (path, good):
        filled = empty(expected)
        store.load(folder, lambda manifest, filled=filled: filled)
        assert same(filled, expected)


def damage(file: Path, offset: int) -> None:
    """Flip a bit of a file."""
    with open(file, "r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)[0]
        opened.seek(offset)
        opened.write(bytes([byte ^ 16]))


def bytes_read() -> int:
    """Return the number of bytes that this process has read so far."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["rchar"])
