"""Checkpoints: saved whole or not at all, readable in any layout, and never silently wrong."""

from __future__ import annotations

import os
from dataclasses import replace

import h5py
import pytest
import torch

from mpitrain.checkpoint import Part, Store, TensorSpec, folders
from mpitrain.errors import CheckpointError, InputError
from mpitrain.layout.boxes import Box, Piece, shares, split
from mpitrain.storage.disk import begin_folder

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float16, torch.complex64)


def _tensors():
    generator = torch.Generator().manual_seed(3)
    shapes = [(), (1,), (5, 7), (0, 3), (300, 41), (1_100_000,)]  # the last: more than one hash
    tensors = {}
    for number, shape in enumerate(shapes):
        dtype = DTYPES[number % len(DTYPES)]
        tensors[f"t{number}.weight"] = (torch.rand(shape, generator=generator) * 100).to(dtype)
    tensors["last"] = torch.arange(2_500_000, dtype=torch.float32)
    return tensors


def _spec(name, tensor):
    return TensorSpec(name, tuple(tensor.shape), str(tensor.dtype)[6:])


def _shared_out(tensors, comm):
    """Give each rank its share of the elements, as when a replicated model is written."""
    names = list(tensors)
    parts = []
    for number, lo, hi in shares([tensors[n].numel() for n in names], comm.size, comm.rank):
        tensor = tensors[names[number]]
        piece = Piece(names[number], Box.whole(tensor.numel()), lo, hi)
        parts.append(Part(_spec(names[number], tensor), piece, tensor.reshape(-1)[lo:hi].clone()))
    empties = [n for n in names if not tensors[n].numel()]
    if comm.rank == 0:
        parts += [Part(_spec(n, tensors[n]), Piece.whole(n, 0), tensors[n].reshape(-1)) for n in empties]
    return parts


def _wholes(tensors, device=None):
    return [
        Part(_spec(n, t), Piece.whole(n, t.numel()), torch.zeros(t.numel(), dtype=t.dtype, device=device))
        for n, t in tensors.items()
    ]


@pytest.mark.ranks(1, 2, 3)
def test_saved_tensors_are_loaded_whole_and_in_columns(world, folder, device):
    tensors = _tensors()
    store = Store(folder / "c", world, keep=2)
    store.prepare(set_aside=False)
    # on a device the copies and the zeros of `_wholes` are yet to be made when saving and loading begin
    parts = [replace(part, data=part.data.to(device).clone()) for part in _shared_out(tensors, world)]
    path = store.save(7, parts, {"position": 3})
    wholes = _wholes(tensors, device)
    assert store.load(path, lambda manifest: wholes).values == {"position": 3}
    for part in wholes:
        assert torch.equal(part.data.view(part.spec.shape).cpu(), tensors[part.spec.name])
    matrix = tensors["t4.weight"]  # each rank its columns, as a tensor-parallel rank would
    lo, hi = split(41, world.size)[world.rank : world.rank + 2]
    box = Box.along((300, 41), 1, lo, hi)
    data = torch.empty(box.numel, dtype=matrix.dtype, device=device)
    mine = Part(_spec("t4.weight", matrix), Piece("t4.weight", box, 0, box.numel), data)
    store.load(path, lambda manifest: [mine])
    assert torch.equal(data.view(300, hi - lo).cpu(), matrix[:, lo:hi])


@pytest.mark.ranks(2)
def test_files_are_hdf5_with_every_tensor_under_its_name(world, folder):
    tensors = _tensors()
    store = Store(folder / "c", world, keep=2)
    store.prepare(set_aside=False)
    path = store.save(1, _shared_out(tensors, world), {})
    stored = {}
    for rank in range(2):
        with h5py.File(path / f"rank-{rank:05d}.h5") as file:
            for name in file:
                lo, _ = file[name].attrs["elements"]
                assert tuple(file[name].attrs["shape"]) == tuple(tensors[name].shape)
                stored.setdefault(name, []).append(
                    (lo, file[name][...] if tensors[name].dtype != torch.bfloat16 else None)
                )
    assert set(stored) == set(tensors)
    pieces = [torch.from_numpy(data) for _, data in sorted(stored["last"], key=lambda item: item[0])]
    assert torch.equal(torch.cat(pieces), tensors["last"])


@pytest.mark.ranks(1, 3)
def test_old_checkpoints_and_leftovers_of_killed_saves_are_removed(world, folder):
    store = Store(folder / "c", world, keep=2)
    store.prepare(set_aside=False)
    tensor = torch.arange(10.0)
    for step in (1, 2, 3, 10):
        store.save(step, _shared_out({"x": tensor + step}, world), {})
    assert [p.name for p in store.newest_first()] == ["step-00000010", "step-00000003"]
    assert (folder / "c/latest").read_text() == "step-00000010\n"
    if world.rank == 0:
        begin_folder(folder / "c/step-00000011.tmp-0123abcd")
        (folder / "c/step-00000011.tmp-0123abcd/rank-00000.h5").touch()
        (folder / "c/step-00000012.tmp-0123abcd").mkdir()  # killed before its first file
        folders.hide(folder / "c/step-00000003")  # killed while it was removed
        (folder / "c/latest.tmp-0123abcd").touch()
    world.barrier()
    store.prepare(set_aside=False)
    assert sorted(os.listdir(folder / "c")) == ["latest", "step-00000010"]
    world.barrier()
    store.prepare(set_aside=True)  # a run from the start keeps the old ones out of its way
    assert not store.newest_first() and len(list((folder / "c.1").glob("step-*"))) == 1


def _theirs(root):
    """Create somebody else's files under names like ours; return their contents by name."""
    contents = {
        "my.tmp-files/thesis.tex": "chapter 1",
        "step-00000001.tmp-backup/thesis.tex": "chapter 2",
        "step-00000007.tmp-0123abcd/thesis.tex": "chapter 3",
        "latest.tmp-0123abcd": "the latest news",
        "notes.tmp-1": "to do",
        "step-00000002/thesis.tex": "chapter 4",
    }
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return contents


def _assert_unchanged(root, contents):
    assert {name: (root / name).read_text() for name in contents} == contents


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("background", [False, True])
def test_foreign_files_are_neither_removed_nor_replaced(world, folder, background):
    parts = _shared_out({"x": torch.arange(9.0)}, world)
    root = folder / "c"
    theirs = world.on_root(lambda: _theirs(root))
    store = Store(root, world, keep=1)
    store.prepare(set_aside=False)
    before = sorted(os.listdir(root))
    world.barrier()
    with pytest.raises(InputError, match=r"step-00000002 exists already, but .* has no manifest\.json") as caught:
        store.save(2, parts, {}, background=background)
        store.finish()
    assert caught.value.agreed and "\n" not in str(caught.value)
    assert sorted(os.listdir(root)) == before
    _assert_unchanged(root, theirs)
    world.barrier()  # before there is anything else to list
    for step in (3, 4):  # keeps one: what has no manifest is not pruned
        store.save(step, parts, {}, background=background)
    store.finish()
    if world.rank == 0:
        (root / "step-00000004/mine.txt").write_text("beside a checkpoint's files")
        (root / "latest").unlink()
    store.comm.barrier()
    store.save(5, parts, {}, background=background)
    store.finish()
    world.barrier()
    assert (root / "step-00000004.1/mine.txt").exists() and len(os.listdir(root / "step-00000004.1")) == 1
    assert not (root / "step-00000003").exists() and not (root / "step-00000004").exists()
    _assert_unchanged(root, theirs)
    for content in ("yesterday's\n", None):
        if world.rank == 0:
            (root / "latest").unlink()
            (root / "latest").write_text(content) if content else (root / "latest").mkdir()
        world.barrier()
        with pytest.raises(InputError, match=r"latest exists already, but .* does not name a checkpoint"):
            store.save(6, parts, {}, background=background)
            store.finish()
        world.barrier()
        if world.rank == 0 and content:
            assert (root / "latest").read_text() == content
            (root / "latest").write_text("step-00000005\n")
        world.barrier()
        _assert_unchanged(root, theirs)


@pytest.mark.ranks(2)
def test_a_damaged_checkpoint_is_renamed_and_foreign_files_are_refused(world, folder):
    parts = _shared_out({"x": torch.arange(9.0)}, world)
    store = Store(folder / "c", world, keep=5)
    store.prepare(set_aside=False)
    for step in (1, 2, 3):
        store.save(step, parts, {})
    if world.rank == 0:
        (folder / "c/step-00000003/manifest.json").unlink()
    world.barrier()
    assert store.make_way(3) == []
    (message,) = store.make_way(2)
    assert "step-00000003 has no valid manifest; renamed to" in message and message.endswith("step-00000003.1")
    store.save(3, parts, {})
    if world.rank == 0:
        (folder / "c/step-00000004").mkdir()
    world.barrier()
    with pytest.raises(InputError, match="step-00000004 exists already, but mpitrain did not write it"):
        store.make_way(3)


def _flip(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("damage", ["flip data", "flip manifest", "cut", "remove", "swap", "no manifest"])
def test_every_rank_names_the_damage(world, folder, damage):
    tensors = _tensors()
    store = Store(folder / "c", world, keep=5)
    store.prepare(set_aside=False)
    path = store.save(1, _shared_out(tensors, world), {})
    other = store.save(2, _shared_out({k: t if k == "last" else t + t for k, t in tensors.items()}, world), {})
    file = path / f"rank-{world.size - 1:05d}.h5"
    if world.rank == 0:
        if damage == "flip data":
            _flip(file, file.stat().st_size - 1000)
        elif damage == "flip manifest":
            _flip(path / "manifest.json", 200)
        elif damage == "cut":
            os.truncate(file, file.stat().st_size - 1)
        elif damage == "remove":
            file.unlink()
        elif damage == "swap":
            os.replace(other / "rank-00000.h5", path / "rank-00000.h5")
        else:
            (path / "manifest.json").unlink()
    world.barrier()
    with pytest.raises(CheckpointError) as caught:
        store.load(path, lambda manifest: _wholes(tensors))
    text = str(caught.value)
    named = "manifest.json" if "manifest" in damage else "rank-00000.h5" if damage == "swap" else file.name
    assert named in text and str(path) in text and "\n" not in text


@pytest.mark.ranks(1, 2)
def test_a_tensor_of_another_shape_or_name_is_refused(world, folder):
    store = Store(folder / "c", world, keep=5)
    store.prepare(set_aside=False)
    path = store.save(1, _shared_out({"w": torch.ones(4, 3)}, world), {})
    with pytest.raises(
        CheckpointError, match=r"w is float32 \[4, 3\] in the checkpoint and float32 \[3, 4\] in this run"
    ):
        store.load(path, lambda manifest: _wholes({"w": torch.ones(3, 4)}))
    with pytest.raises(CheckpointError, match="has no tensor v"):
        store.load(path, lambda manifest: _wholes({"v": torch.ones(3, 4)}))


@pytest.mark.ranks(2)
def test_a_save_that_fails_on_one_rank_fails_on_all_and_keeps_the_last(world, folder, monkeypatch):
    store = Store(folder / "c", world, keep=1)
    store.prepare(set_aside=False)
    store.save(1, _shared_out({"x": torch.arange(9.0)}, world), {})
    if world.rank == 1:

        def full(*args):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("mpitrain.checkpoint.commit.write_parts", full)
    with pytest.raises(Exception, match="step-00000002 could not be saved: the disk is full"):
        store.save(2, _shared_out({"x": torch.arange(9.0)}, world), {})
    world.barrier()
    assert sorted(os.listdir(folder / "c")) == ["latest", "step-00000001"]
