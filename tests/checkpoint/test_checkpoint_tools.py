"""The command `python -m mpitrain.checkpoint`, which needs no MPI."""

from __future__ import annotations

import fcntl
import json

import numpy as np
import pytest
import torch
from checkpoint_states import empty, in_slices, same, small_tensors, whole_parts
from support import one_line

from mpitrain.checkpoint import Store
from mpitrain.checkpoint.__main__ import main
from mpitrain.checkpoint.manifest import read_manifest


@pytest.fixture
def run(folder):
    return folder / "run"


def _saved(world, run, steps=(1,), *, keep=9, seed=3):
    store = Store(run / "checkpoints", world, keep)
    store.prepare(set_aside=False)
    tensors = small_tensors() | {"optimizer/exp_avg/a.weight": torch.rand(11, 7)}
    for step in steps:
        state = {name: t + step if t.is_floating_point() else t for name, t in tensors.items()}
        store.save(step, in_slices(state, world.rank, world.size), {"position": step, "tied": {"head": "a.weight"}})
    store.finish()
    world.barrier()
    return store, state


def _flip(path, offset, bit=3):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.ranks(1, 2)
def test_ls_and_show_print_the_contents(world, run, capsys):
    _saved(world, run, (1, 20))
    if world.rank == 0:
        (run / "checkpoints/step-00000020/rank-00000.h5").unlink()
        assert main(["ls", str(run)]) == 0
        head, newest, oldest = capsys.readouterr().out.splitlines()
        assert "state" in head and newest.split()[0] == "20" and "rank-00000.h5 is missing" in newest
        assert oldest.split()[0] == "1" and oldest.endswith("whole")
        assert main(["show", str(run), "--tensors", "model/b*"]) == 0
        shown = capsys.readouterr().out
        assert "step         1" in shown and "bfloat16 [3, 5, 6]" in shown and "model/a.weight" not in shown
        assert main(["show", str(run / "nothing")]) == 2
        assert "does not exist" in capsys.readouterr().err
    world.barrier()


@pytest.mark.ranks(2)
def test_verify_names_the_damaged_extent(world, run, capsys):
    _saved(world, run)
    if world.rank == 0:
        folder = run / "checkpoints/step-00000001"
        assert main(["verify", str(run)]) == 0
        assert capsys.readouterr().out == f"{folder}: all right\n"
        extent = next(e for e in read_manifest(folder).extents if e.piece.name == "model/d.table")
        _flip(folder / extent.file, extent.offset + 5)
        assert main(["verify", str(folder)]) == 1
        out = capsys.readouterr().out
        size = 4 * extent.piece.numel
        assert f"{extent.file}: bytes {extent.offset} to {extent.offset + size} (model/d.table) are damaged" in out
        assert "1 damaged place\n" in out
        _flip(folder / extent.file, extent.offset + 5)  # back
        for name, offset, words in [("rank-00001.h5", 9, "HDF5 structure"), ("model.h5", 700, "content is damaged")]:
            _flip(folder / name, offset)
            assert main(["verify", str(folder)]) == 1
            out = capsys.readouterr().out
            assert words in out and name in out
            _flip(folder / name, offset)
        assert main(["verify", str(folder)]) == 0
    world.barrier()


@pytest.mark.ranks(1, 2)
def test_diff_prints_the_largest_difference(world, run, capsys):
    _saved(world, run, (1, 2))
    if world.rank == 0:
        one, two = (run / f"checkpoints/step-0000000{n}" for n in (1, 2))
        assert main(["diff", str(one), str(one)]) == 0
        assert capsys.readouterr().out == "bitwise the same\n"
        assert main(["diff", str(one), str(two)]) == 1
        lines = capsys.readouterr().out.splitlines()
        assert "model/c.bias: 13 of 13 elements differ, by at most 1" in lines
        assert lines[-1] == "5 tensors not the same"  # all but the integer
    world.barrier()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("ending", ["safetensors", "pt"])
def test_exported_weights_are_imported_bitwise(world, run, capsys, ending):
    _, state = _saved(world, run)
    file, back = run / f"model.{ending}", run.with_name(f"again-{ending}")
    if world.rank == 0:
        assert main(["export", str(run), str(file)]) == 0
        assert main(["export", str(run), str(file)]) == 2  # nothing is overwritten
        names = {name.removeprefix("model/") for name in state if name.startswith("model/")} | {"head"}
        if ending == "pt":
            loaded = torch.load(file, weights_only=True)
            assert set(loaded) == names
            assert torch.equal(loaded["b.weight"], state["model/b.weight"])
            assert loaded["head"].data_ptr() == loaded["a.weight"].data_ptr()
        else:
            raw = file.read_bytes()
            length = int.from_bytes(raw[:8], "little")
            header = json.loads(raw[8 : 8 + length])
            assert set(header) == names | {"__metadata__"} and length % 8 == 0
            lo, hi = header["c.bias"]["data_offsets"]
            assert header["c.bias"]["dtype"] == "F64" and header["c.bias"]["shape"] == [13]
            assert np.array_equal(np.frombuffer(raw[8 + length :][lo:hi]), state["model/c.bias"].numpy())
        assert main(["import", str(file), str(back)]) == 0
        assert main(["verify", str(back)]) == 0
        assert main(["import", str(file), str(back)]) == 2
        assert "already has checkpoints" in capsys.readouterr().err
    world.barrier()
    model = {name: t for name, t in state.items() if name.startswith("model/")}
    filled = whole_parts(model)
    store = Store(back / "checkpoints", world, 2)
    manifest = store.load(store.newest_first()[0], lambda manifest: filled)
    assert same(filled, in_slices(model, 0, 1))
    assert manifest.step == 0 and manifest.values["position"] == 0
    assert manifest.values["tied"] == ({"head": "a.weight"} if ending == "pt" else {})


@pytest.mark.ranks(1)
def test_other_files_are_refused_as_weights_in_one_line(world, run, capsys, tmp_path):
    class Evil:
        def __reduce__(self):
            return (print, ("executed",))

    bad = {
        "empty.safetensors": b"",
        "short.safetensors": (99).to_bytes(8, "little") + b"{}",
        "over.safetensors": (75).to_bytes(8, "little")
        + b'{"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}'.ljust(75)
        + b"1234",
        "text.pt": b"not a pickle",
    }
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
    torch.save({"x": Evil()}, tmp_path / "evil.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    for name in [*bad, "evil.pt", "list.pt", "missing.pt"]:
        code, streams = main(["import", str(tmp_path / name), str(tmp_path / "new")]), capsys.readouterr()
        one_line((code, streams.err), name)
        assert "executed" not in streams.out
    assert not list((tmp_path / "new").glob("checkpoints/*"))


@pytest.mark.ranks(1, 2)
def test_prune_keeps_the_newest_valid_checkpoint(world, run, capsys):
    store, state = _saved(world, run, (1, 2, 3, 4))
    if world.rank == 0:
        for step in (3, 4):
            folder = run / f"checkpoints/step-0000000{step}"
            _flip(folder / "rank-00000.h5", read_manifest(folder).extents[0].offset)
        with open(run / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert main(["prune", str(run), "--keep", "1"]) == 2
            assert "in use by a job" in capsys.readouterr().err
        assert main(["prune", str(run), "--keep", "1"]) == 0
        assert "step-00000002 passes verification" in capsys.readouterr().out
    world.barrier()
    assert [p.name[-1] for p in store.newest_first()] == ["4", "3", "2"]
    filled = empty(whole_parts(state))
    store.load(store.folder(2), lambda manifest: filled)
