"""The file model.h5, in which any HDF5 tool sees the whole parameters."""

from __future__ import annotations

import shutil
import subprocess
from math import prod

import h5py
import numpy as np
import pytest
import torch
from checkpoint_states import in_boxes, in_grid, in_shares, in_slices, part, small_tensors
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.checkpoint import Store
from mpitrain.checkpoint.files import rectangles
from mpitrain.layout.boxes import Box, Piece


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("files", ["rank", "node"])
def test_the_view_shows_every_parameter_whole_under_its_name(world, folder, files):
    tensors = small_tensors() | {"optimizer/exp_avg/a.weight": torch.ones(11, 7)}
    tensors["model/none"] = torch.empty(0, 4)
    for number, layout in enumerate((in_shares, in_slices, in_boxes, in_grid)):
        store = Store(folder / f"c{number}", world, 2, files=files)
        store.prepare(set_aside=False)
        path = store.save(1, layout(tensors, world.rank, world.size), {"tied": {"head.weight": "a.weight"}})
        if world.rank == 0:
            moved = path.with_name("moved")  # the view finds its files beside it
            path.rename(moved)
            with h5py.File(moved / "model.h5") as file:
                assert set(file) == {"a.weight", "b.weight", "c.bias", "d.table", "n", "head.weight", "none"}
                for name, tensor in tensors.items():
                    if name.startswith("model/"):
                        shown = file[name.removeprefix("model/")]
                        assert shown.shape == tuple(tensor.shape)
                        expected = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
                        assert shown[()].dtype == expected.numpy().dtype, name
                        assert np.array_equal(shown[()], expected.numpy()), (layout, name)
                assert np.array_equal(file["head.weight"][()], tensors["model/a.weight"].numpy())
            if number == 0:
                (moved / ("rank-00000.h5" if files == "rank" else "node-00000.h5")).unlink()
                with h5py.File(moved / "model.h5") as file:
                    assert np.isnan(file["a.weight"][0, 0])
        world.barrier()


@pytest.mark.ranks(1, 2)
@pytest.mark.skipif(shutil.which("h5dump") is None, reason="h5dump is not installed (apt-get install hdf5-tools)")
def test_h5dump_reads_the_view(world, folder):
    tensors = small_tensors()
    store = Store(folder / "c", world, 2)
    store.prepare(set_aside=False)
    path = store.save(1, in_slices(tensors, world.rank, world.size), {})
    if world.rank == 0:
        for name in ("a.weight", "b.weight"):
            out = folder / f"{name}.txt"
            command = ["h5dump", "-y", "-w", "0", "-m", "%.9g", "-d", name, "-o", out, path / "model.h5"]
            subprocess.run(command, check=True, capture_output=True, timeout=30)
            dumped = np.array(out.read_text().replace(",", " ").split(), dtype=np.float32)
            assert np.array_equal(dumped, tensors[f"model/{name}"].float().reshape(-1).numpy())
        header = subprocess.run(["h5dump", "-H", path / "model.h5"], check=True, capture_output=True, text=True).stdout
        assert '"d.table"' in header and "( 40, 2, 3, 2 )" in header
    world.barrier()


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_rectangles_cover_a_piece_in_order(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    kind = data.draw(st.sampled_from(["whole", "axis", "axes", "merged"]))
    numel = prod(shape)
    if kind == "whole":
        box = Box.whole(numel)
    elif kind == "axis":
        axis = data.draw(st.integers(0, len(shape) - 1))
        start = data.draw(st.integers(0, shape[axis] - 1))
        box = Box.along(shape, axis, start, data.draw(st.integers(start + 1, shape[axis])))
    elif kind == "axes":
        start = [data.draw(st.integers(0, length - 1)) for length in shape]
        box = Box(shape, start, [data.draw(st.integers(lo + 1, n)) for lo, n in zip(start, shape, strict=True)])
    else:  # a slice of the elements as they would lie in two other dimensions
        outer = data.draw(st.sampled_from([n for n in range(1, numel + 1) if numel % n == 0]))
        start = data.draw(st.integers(0, numel // outer - 1))
        box = Box.along((outer, numel // outer), 1, start, data.draw(st.integers(start + 1, numel // outer)))
    lo = data.draw(st.integers(0, box.numel))
    piece = Piece("x", box, lo, data.draw(st.integers(lo, box.numel)))
    tensor = torch.arange(numel).reshape(shape)
    elements = part("x", tensor, piece.lo, piece.hi, box).data
    blocks, place = [], 0
    for first, size, at in rectangles(piece, shape):
        assert at == place
        block = tensor[tuple(slice(f, f + s) for f, s in zip(first, size, strict=True))].reshape(-1)
        blocks.append(block)
        place += len(block)
    assert torch.equal(torch.cat(blocks) if blocks else torch.empty(0, dtype=torch.int64), elements)
    assert kind == "merged" or box.ranges(shape) is not None
    if kind == "whole":
        assert len(blocks) <= 2 * len(shape) - 1
