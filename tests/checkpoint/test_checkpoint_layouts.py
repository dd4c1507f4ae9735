"""Checkpoints between layouts: any layout reads what any other wrote, from one file per rank or per node."""

from __future__ import annotations

import pytest
import torch
from checkpoint_states import (
    empty,
    in_boxes,
    in_grid,
    in_shares,
    in_slices,
    part,
    same,
    small_tensors,
    some_tensors,
    spec,
    whole_parts,
)

from mpitrain.checkpoint import Store
from mpitrain.checkpoint.manifest import FORMAT, NEWER, read_manifest
from mpitrain.errors import CheckpointError


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("files", ["rank", "node"])
def test_every_layout_reads_checkpoints_of_every_layout(world, folder, files):
    tensors = small_tensors()
    layouts = [in_shares, in_slices, in_boxes, in_grid]
    nodes = [rank // 2 for rank in range(world.size)]
    for number, write in enumerate(layouts):
        store = Store(folder / f"c{number}", world, keep=2, files=files, nodes=nodes)
        store.prepare(set_aside=False)
        path = store.save(1, write(tensors, world.rank, world.size), {})
        expected = {"rank": world.size, "node": len(set(nodes))}[files]
        assert len(list(path.glob(f"{files}-*.h5"))) == expected
        manifest_format = (
            NEWER if write is in_grid and world.size > 1 else FORMAT
        )  # only where boxes have ranges of two dimensions
        assert f'"format": "{manifest_format}"' in (path / "manifest.json").read_text()
        for read in layouts:
            parts = read(tensors, world.rank, world.size)
            filled = empty(parts)
            store.load(path, lambda manifest, filled=filled: filled)
            assert same(filled, parts), (write, read)


@pytest.mark.ranks(2, 3)
def test_node_files_store_large_tensors_of_every_dtype(world, folder):
    tensors = some_tensors("model/")
    store = Store(folder / "c", world, keep=2, files="node")
    store.prepare(set_aside=False)
    path = store.save(1, in_slices(tensors, world.rank, world.size), {})
    wholes = whole_parts(tensors)
    store.load(path, lambda manifest: wholes)
    for each in wholes:
        assert torch.equal(each.data.view(each.spec.shape), tensors[each.spec.name])


@pytest.mark.ranks(2, 4)
def test_elements_written_by_several_ranks_are_counted_once(world, folder):
    tensor = torch.arange(1000.0)
    store = Store(folder / "c", world, keep=2)
    store.prepare(set_aside=False)
    loaded = []
    for step, first in ((1, 0), (2, world.rank * 10)):
        path = store.save(step, [part("model/x", tensor, first, 1000)], {})
        filled = whole_parts({"model/x": tensor})
        store.load(path, lambda manifest, filled=filled: filled)
        loaded.append(filled[0].data)
    assert torch.equal(loaded[0], tensor) and torch.equal(loaded[1], tensor)


@pytest.mark.ranks(1, 2)
def test_a_state_with_missing_elements_is_not_saved(world, folder):
    tensor = torch.arange(100.0)
    store = Store(folder / "c", world, keep=2)
    store.prepare(set_aside=False)
    lo, hi = (0, 40) if world.rank == 0 else (41, 100)
    with pytest.raises(CheckpointError, match=r"passed \d+ of the 100 elements of model/x"):
        store.save(1, [part("model/x", tensor, lo, hi)], {})
    assert not store.newest_first()
    assert spec("model/x", tensor).itemsize == 4


@pytest.mark.ranks(1, 2)
def test_a_new_checkpoint_is_kept_beside_a_newer_damaged_one(world, folder):
    tensors = small_tensors()
    parts = in_slices(tensors, world.rank, world.size)
    store = Store(folder / "c", world, keep=1)
    store.prepare(set_aside=False)
    newer = store.save(400, parts, {})
    if world.rank == 0:
        file = newer / "rank-00000.h5"
        data = bytearray(file.read_bytes())
        data[read_manifest(newer).extents[0].offset] ^= 4
        file.write_bytes(data)
    world.barrier()
    resumed = Store(folder / "c", world, keep=1)
    resumed.prepare(set_aside=False)
    with pytest.raises(CheckpointError, match="damaged"):
        resumed.load(newer, lambda manifest: whole_parts(tensors))
    for step in (300, 310):
        resumed.save(step, parts, {})
    filled = empty(parts)
    assert [p.name for p in resumed.newest_first()] == ["step-00000400", "step-00000310"]
    assert resumed.load(resumed.newest_first()[1], lambda manifest: filled).step == 310
    assert same(filled, parts)
