"""Checkpoints on node-local disks: the loss of a node loses no data.

All ranks run on one machine here, so the tests assign the nodes and give each its own folder.
"""

from __future__ import annotations

import os
import shutil
from itertools import combinations

import pytest
from checkpoint_states import empty, in_shares, in_slices, same, small_tensors, whole_parts

from mpitrain.checkpoint import Store
from mpitrain.checkpoint.contents import has_intact_tensors
from mpitrain.checkpoint.manifest import ParitySet, read_manifest
from mpitrain.checkpoint.parity import parity_sets, partner_copies, segment
from mpitrain.errors import CheckpointError, InputError

NODES = {2: (0, 1), 3: (0, 1, 2), 4: (0, 0, 1, 2), 8: (0, 0, 0, 1, 1, 2, 2, 2)}


def _store(world, folder, redundancy, *, nodes=None, places=None, files="rank", flush_every=100):
    """Return a store on folders that stand for nodes. places: the folder number of each node."""
    nodes = nodes or NODES[world.size]
    number = nodes[world.rank] if places is None else places[nodes[world.rank]]
    local = str(folder / f"node-{number}")
    return Store(
        folder / "c", world, 2, files=files, local=local, redundancy=redundancy, flush_every=flush_every, nodes=nodes
    )


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("redundancy", ["partner", "xor"])
@pytest.mark.parametrize("files", ["rank", "node"])
def test_a_lost_node_loses_no_data(world, folder, redundancy, files):
    tensors = small_tensors()
    nodes = NODES[world.size]
    parts = in_slices(tensors, world.rank, world.size)
    for lost in sorted(set(nodes)):
        here = folder / f"without-{lost}"
        store = _store(world, here, redundancy, files=files)
        store.prepare(set_aside=False)
        store.save(3, parts, {"position": 1})
        path = store.save(7, parts, {"position": 2})
        assert not store.comm.on_root(lambda here=here: [p.name for p in (here / "c").glob("step-*")])
        world.barrier()
        if world.rank == 0:
            shutil.rmtree(here / f"node-{lost}")
        world.barrier()
        again = _store(world, here, redundancy, files=files)
        again.prepare(set_aside=False)
        assert again.newest_first() == [path] and again.owns(path)
        filled = empty(parts)
        assert again.load(path, lambda manifest, filled=filled: filled).values == {"position": 2}
        assert same(filled, parts)
        again.save(8, parts, {})  # and it goes on
        assert [p.name for p in again.newest_first()] == ["step-00000008"]


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("redundancy", ["partner", "xor"])
def test_a_restart_on_other_hosts_and_layout_loads_everything(world, folder, redundancy):
    tensors = small_tensors()
    store = _store(world, folder, redundancy)
    store.prepare(set_aside=False)
    path = store.save(5, in_slices(tensors, world.rank, world.size), {})
    world.barrier()
    if world.rank == 0:
        shutil.rmtree(folder / "node-1")
    world.barrier()
    # host 2 is now node 0, and host 0 node 1; a fresh host 9 is node 2
    again = _store(world, folder, redundancy, places={0: 2, 1: 0, 2: 9})
    again.prepare(set_aside=False)
    wholes = whole_parts(tensors)
    again.load(again.newest_first()[0], lambda manifest: wholes)
    assert same(wholes, in_shares(tensors, 0, 1))
    assert path.name == again.newest_first()[0].name


@pytest.mark.ranks(3)
def test_a_file_that_cannot_be_rebuilt_is_named(world, folder):
    tensors = small_tensors()
    parts = in_slices(tensors, world.rank, world.size)
    for redundancy in ("none", "partner", "xor"):
        here = folder / redundancy
        store = _store(world, here, redundancy)
        store.prepare(set_aside=False)
        path = store.save(5, parts, {})
        world.barrier()
        if world.rank == 0:
            shutil.rmtree(here / "node-1")
            if redundancy != "none":
                shutil.rmtree(here / "node-2")
        world.barrier()
        again = _store(world, here, redundancy)
        again.prepare(set_aside=False)
        with pytest.raises(CheckpointError, match=r"rank-0000\d.h5 is on no node of this job") as caught:
            again.load(again.newest_first()[0], lambda manifest: empty(parts))
        assert caught.value.agreed and path.name in str(caught.value)


@pytest.mark.ranks(2)
def test_every_kth_and_durable_checkpoints_are_in_the_run_folder(world, folder):
    parts = in_slices(small_tensors(), world.rank, world.size)
    store = _store(world, folder, "partner", flush_every=3)
    store.prepare(set_aside=False)
    with store:
        for step in range(1, 5):
            store.save(step, parts, {}, background=True)
        store.finish()
        assert [(p.name, p.parent == folder / "c") for p in store.newest_first()] == [
            ("step-00000004", False),
            ("step-00000003", True),
        ]
        store.save(5, parts, {}, durable=True)
        assert [(p.name, p.parent == folder / "c") for p in store.newest_first()] == [
            ("step-00000005", True),
            ("step-00000003", True),
        ]
    again = _store(world, folder, "partner")
    again.prepare(set_aside=True)  # another run: what the disks have is not its own
    assert again.newest_first() == []


@pytest.mark.ranks(2)
def test_local_folders_without_protection_are_refused(world, folder):
    with pytest.raises(InputError, match=r"checkpoint\.local, which is not set"):
        Store(folder / "c", world, 2, redundancy="xor")
    assert "one node" in Store(folder / "c", world, 2, local="x", nodes=(0, 0)).remark
    store = Store(folder / "c", world, 2, local=str(folder / "same"), redundancy="partner", nodes=(0, 1))
    assert store.remark == ""
    with pytest.raises(InputError, match="one folder for several nodes"):
        store.prepare(set_aside=False)
    assert os.listdir(folder / "c") == ["identity"]


def _flip(world, path, *ranks):
    """Flip a bit in each tensor of the copies of a file that `ranks` hold."""
    if world.rank in ranks:
        data = bytearray(path.read_bytes())
        for extent in read_manifest(path.parent).extents:
            if extent.file == path.name and extent.piece.numel:
                data[extent.offset] ^= 1
        if path.name.startswith("parity"):
            data = bytearray(byte ^ 1 for byte in data)
        path.write_bytes(data)
    world.barrier()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("redundancy", ["none", "partner", "xor"])
def test_flipped_bits_are_repaired_from_other_nodes_or_refused(world, folder, redundancy):
    """Damage rank 1's file, which rank 2 has a copy of, or ranks 0 and 2 the parities."""
    parts = in_slices(small_tensors(), world.rank, world.size)
    store = _store(world, folder, redundancy)
    store.prepare(set_aside=False)
    store.save(4, parts, {}, durable=True)
    path = store.save(5, parts, {})
    name = "rank-00001.h5"
    before = (path / name).read_bytes() if world.rank == 1 else b""
    _flip(world, path / name, 1)
    if redundancy == "none":
        with pytest.raises(CheckpointError, match=r"rank-00001\.h5 is damaged on every node that has it") as caught:
            store.load(path, lambda manifest: empty(parts))
        assert caught.value.agreed
        return
    filled = empty(parts)
    assert store.load(path, lambda manifest: filled).step == 5 and same(filled, parts)
    assert [text.split()[0] for text in store.repairs] == [str(path / name)]
    if world.rank == 1:  # on the disk too, but for HDF5's structure nothing is left of the damage
        assert has_intact_tensors(path, read_manifest(path), name) and len((path / name).read_bytes()) == len(before)
    protection = "parity-00000-00000.bin" if redundancy == "xor" else name
    holder = 0 if redundancy == "xor" else 2
    _flip(world, path / protection, holder)  # what protects it alone is no harm
    assert store.load(path, lambda manifest: empty(parts)).step == 5
    _flip(world, path / name, 1)
    wrong = r"is damaged on every node|cannot be rebuilt: a parity file that it is computed from is damaged"
    with pytest.raises(CheckpointError, match=rf"rank-00001\.h5 ({wrong})") as caught:
        store.load(path, lambda manifest: empty(parts))
    assert caught.value.agreed and "\n" not in str(caught.value)
    again = store.newest_first()
    assert [p.name for p in again] == ["step-00000005", "step-00000004"]
    assert store.load(again[1], lambda manifest: filled).step == 4 and same(filled, parts)


@pytest.mark.ranks(3)
def test_damage_on_two_nodes_is_refused_and_a_damaged_manifest_is_harmless(world, folder):
    parts = in_slices(small_tensors(), world.rank, world.size)
    store = _store(world, folder, "xor")
    store.prepare(set_aside=False)
    path = store.save(5, parts, {})
    if world.rank == 2:
        (path / "manifest.json").write_bytes(b"x" + (path / "manifest.json").read_bytes()[1:])
    world.barrier()
    _flip(world, path / "rank-00001.h5", 1)
    filled = empty(parts)
    assert store.load(path, lambda manifest: filled).step == 5 and same(filled, parts)
    assert read_manifest(path).step == 5
    _flip(world, path / "rank-00000.h5", 0)
    _flip(world, path / "rank-00001.h5", 1)
    with pytest.raises(CheckpointError, match=r"damaged on every node .* cannot be rebuilt without rank-0000[01]\.h5"):
        store.load(path, lambda manifest: empty(parts))


def test_any_member_of_a_parity_set_is_rebuilt_from_the_others():
    for nodes in [(0, 1), (0, 1, 2), (0, 0, 1), (0, 0, 1, 1, 1, 2), tuple(range(19))]:
        owners = {f"rank-{rank}": rank for rank in range(len(nodes))}
        sizes = {file: 10 + rank for file, rank in owners.items()}
        sets = parity_sets(owners, sizes, nodes)
        assert sorted(f for one, _ in sets for f in one.files if f) == sorted(owners)
        for one, ranks in sets:
            assert len({nodes[rank] for rank in ranks}) == len(ranks) > 1
            assert all(sizes[f] <= one.chunk * (len(ranks) - 1) for f in one.files if f)
            members = range(len(ranks))
            for member in members:  # its segments lie with all others, each with another
                assert sorted(segment(member, h) for h in members if h != member) == list(range(len(ranks) - 1))
            for holder, a, b in ((h, a, b) for h in members for a, b in combinations(members, 2) if h not in (a, b)):
                assert segment(a, holder) < len(ranks) - 1 and segment(b, holder) < len(ranks) - 1
        moves = partner_copies(owners, sizes, nodes)
        assert {m.file for m in moves} == set(owners)
        assert all(nodes[m.dest] != nodes[m.source] for m in moves)
    assert parity_sets({"rank-0": 0}, {"rank-0": 1}, (0, 0)) == [] == partner_copies({"rank-0": 0}, {}, (0, 0))
    assert ParitySet(("a",), ("p",), 1).chunk == 1
