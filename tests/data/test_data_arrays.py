"""NumPy arrays as data sets, and their split into train and held out."""

import io
import zipfile
from itertools import pairwise

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.data import open_dataset
from mpitrain.data.format import read_manifest
from mpitrain.data.sources import held_out_mask


def read_split(folder, split="train"):
    data = open_dataset(folder, split)
    return data.read(np.arange(len(data)))


@pytest.mark.parametrize(
    ("dtype", "returned_dtype", "factor"),
    [
        ("float16", np.float32, 1),
        ("float32", np.float32, 1),
        ("float64", np.float32, 1),
        (">f4", np.float32, 1),
        ("bool", np.float32, 1),
        ("uint8", np.float32, 1 / 255),
        ("int8", np.int64, 1),
        ("uint16", np.int64, 1),
        (">i4", np.int64, 1),
        ("int64", np.int64, 1),
    ],
)
def test_npy_round_trip(arrays_set, dtype, returned_dtype, factor):
    x = (np.arange(40 * 6).reshape(40, 2, 3) % (2 if dtype == "bool" else 120)).astype(dtype)
    y = np.linspace(-1, 1, 40)
    folder = arrays_set(x, y)
    got_x, got_y = read_split(folder)
    assert got_x.dtype == returned_dtype
    assert got_y.dtype == np.float32
    np.testing.assert_allclose(got_x, x.astype(returned_dtype) * returned_dtype(factor), rtol=1e-6)
    np.testing.assert_allclose(got_y, y, rtol=1e-6)
    with h5py.File(folder / "train-00000.h5") as shard:  # any HDF5 tool sees the values as they were
        assert np.array_equal(shard["x"][...], x)
        assert shard["x"].dtype == np.dtype(dtype).newbyteorder("<")


def test_arrays_in_fortran_order_keep_their_rows(arrays_set):
    x = np.asfortranarray(np.arange(60.0).reshape(20, 3))
    folder = arrays_set(x, np.zeros(20, np.int64))
    assert np.array_equal(read_split(folder)[0], x)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_round_trip_over_several_blocks(tmp_path, command, save):
    x = np.random.default_rng(0).normal(size=(3000, 500)).astype(np.float32)  # 6 MB: more than a block
    y = np.arange(3000) % 7
    save(tmp_path / "a.npz", X=x, y=y)
    assert command("prepare", tmp_path / "a.npz", "--out", tmp_path / "set", "--held-out", 0)[0] == 0
    got_x, got_y = read_split(tmp_path / "set")
    assert np.array_equal(got_x, x)
    assert np.array_equal(got_y, y)
    assert got_y.dtype == np.int64
    assert read_manifest(tmp_path / "set").splits["train"].class_counts == tuple(np.bincount(y))


def test_arrays_named_test_are_held_out(tmp_path, command):
    x = np.arange(10.0)[:, None]
    np.savez(tmp_path / "a.npz", x_train=x, y_train=x[:, 0] > 4, x_test=-x[:3], y_test=np.zeros(3, bool))
    assert command("prepare", tmp_path / "a.npz", "--out", tmp_path / "set")[0] == 0
    assert np.array_equal(read_split(tmp_path / "set")[0], x)
    assert np.array_equal(read_split(tmp_path / "set", "held_out")[0], -x[:3])


def test_classes_and_vocabulary_are_counted(arrays_set, command):
    x = np.array([[1, 2], [900, 3], [4, 5]] * 10, np.int32)
    y = np.array([0, 3, 0] * 10, np.uint8)
    folder = arrays_set(x, y)
    description = open_dataset(folder).description
    assert description.vocabulary == 901
    assert description.classes == ("0", "1", "2", "3")
    assert read_manifest(folder).splits["train"].class_counts == (20, 0, 0, 10)
    out = command("info", folder)[1]
    assert "2, stored as int32, read as int64" in out
    assert "vocabulary  901" in out


def test_targets_of_two_dimensions(arrays_set):
    x, y = np.zeros((6, 2)), np.arange(24.0).reshape(6, 2, 2)
    folder = arrays_set(x, y)
    assert np.array_equal(read_split(folder)[1], y)
    assert open_dataset(folder).description.y_shape == (2, 2)
    assert open_dataset(folder).description.classes is None


@pytest.mark.parametrize("labels", ["sorted", "in turn"])
def test_held_out_rows_have_every_class_for_sorted_and_alternating_input(arrays_set, labels):
    classes = np.repeat(np.arange(10), 200) if labels == "sorted" else np.arange(2000) % 10
    rows = np.arange(2000.0)[:, None]
    folder = arrays_set(rows, classes, held_out=0.05)
    train, held_out = read_manifest(folder).splits["train"], read_manifest(folder).splits["held_out"]
    assert held_out.rows == 100
    assert train.rows == 1900
    assert min(held_out.class_counts) >= 3
    both = np.concatenate([read_split(folder)[0], read_split(folder, "held_out")[0]])
    assert np.array_equal(np.sort(both[:, 0]), rows[:, 0])


def test_a_few_rows_have_one_held_out(arrays_set):
    folder = arrays_set(np.zeros((3, 2)), np.zeros(3), held_out=0.05)
    assert [read_manifest(folder).splits[name].rows for name in ("train", "held_out")] == [2, 1]


@settings(max_examples=80, deadline=None)
@given(total=st.integers(0, 400), fraction=st.floats(0, 0.5), cuts=st.lists(st.integers(0, 400), max_size=5))
def test_held_out_rows_do_not_depend_on_the_block_size(total, fraction, cuts):
    whole = held_out_mask(0, total, fraction)
    edges = sorted({0, total, *(cut for cut in cuts if cut < total)})
    parts = [held_out_mask(a, b - a, fraction) for a, b in pairwise(edges)]
    assert np.array_equal(whole, np.concatenate([*parts, np.zeros(0, bool)]))
    assert abs(whole.sum() - total * fraction) <= 1.001
    prefix = np.cumsum(whole)
    assert (np.abs(prefix - np.arange(1, total + 1) * fraction) <= 1.01).all()


def test_memory_stays_small_for_large_arrays(tmp_path, python):
    """Prepare 64 MB of rows within 40 MB above the bare start (a mapped file counts only as cache)."""
    shape = (16_000, 1000)
    np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float32, shape)
    np.save(tmp_path / "y.npy", np.zeros(shape[0], np.int64))
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("x", "y"):
            archive.write(tmp_path / f"{name}.npy", f"{name}.npy")
    code = """if True:
        import sys
        from pathlib import Path
        from mpitrain.data.prepare import prepare
        def anonymous():
            return int(next(l for l in open('/proc/self/status') if l.startswith('RssAnon')).split()[1])
        before, peak = anonymous(), 0
        def watch(split, rows, written):
            global peak
            peak = max(peak, anonymous())
        prepare([sys.argv[1]], Path(sys.argv[2]), progress=watch, shard_bytes=25 << 20)
        print((peak - before) // 1024)
    """
    (tmp_path / "npy").mkdir()
    for name in ("x.npy", "y.npy"):
        (tmp_path / name).rename(tmp_path / "npy" / name)
    for source in ("npy", "a.npz"):
        out, error = python(code, tmp_path / source, tmp_path / f"{source}-set").communicate(timeout=100)
        assert error == ""
        assert int(out) < 40
    assert read_manifest(tmp_path / "npy-set").identity == read_manifest(tmp_path / "a.npz-set").identity


class TestRefused:
    def save(self, folder, **arrays):
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array)
        return [folder / f"{name}.npy" for name in arrays]

    def test_a_missing_y_is_named(self, tmp_path, refused):
        assert "has x, but not y" in refused(*self.save(tmp_path, x=np.zeros(3)))

    def test_arrays_of_different_lengths(self, tmp_path, refused):
        message = refused(*self.save(tmp_path, x=np.zeros((3, 2)), y=np.zeros(4)))
        assert "x.npy has the shape (3, 2)" in message
        assert "y.npy has (4,); save equal numbers of rows" in message

    def test_no_rows(self, tmp_path, refused):
        assert "x.npy is empty (shape (0, 2)" in refused(*self.save(tmp_path, x=np.zeros((0, 2)), y=np.zeros(0)))

    def test_python_objects_are_never_loaded(self, tmp_path, refused):
        class Evil:
            def __reduce__(self):
                return (open, (str(tmp_path / "pwned"), "w"))

        array = np.array([Evil(), Evil()], dtype=object)
        np.savez(tmp_path / "a.npz", x=array, y=np.zeros(2))
        np.save(tmp_path / "x.npy", array)
        np.save(tmp_path / "y.npy", np.zeros(2))
        assert "contains Python objects, which are never loaded" in refused(tmp_path / "a.npz")
        assert "is not a plain .npy array" in refused(tmp_path / "x.npy", tmp_path / "y.npy")
        assert not (tmp_path / "pwned").exists()

    def test_an_unsupported_dtype(self, tmp_path, refused):
        for array in (np.zeros(3, complex), np.array(["a", "b", "c"]), np.zeros(3, np.uint64)):
            message = refused(*self.save(tmp_path, x=array, y=np.zeros(3)))
            assert f"x.npy has the dtype {array.dtype}; save it as" in message

    def test_a_file_that_is_not_an_array(self, tmp_path, refused):
        x, y = self.save(tmp_path, x=np.zeros(3), y=np.zeros(3))
        x.write_bytes(b"hello")
        assert "x.npy is not a plain .npy array" in refused(x, y)
        (tmp_path / "a.npz").write_bytes(b"hello")
        assert "a.npz is not a complete .npz file" in refused(tmp_path / "a.npz")

    def test_a_truncated_file(self, tmp_path, refused):
        x, y = self.save(tmp_path, x=np.zeros(3000), y=np.zeros(3000))
        x.write_bytes(x.read_bytes()[:-100])
        assert "x.npy is not a plain .npy array" in refused(x, y)

    def test_an_archive_with_a_flipped_bit(self, tmp_path, refused):
        np.savez(tmp_path / "a.npz", x=np.zeros(30_000), y=np.zeros(30_000))
        content = bytearray((tmp_path / "a.npz").read_bytes())
        content[1000] ^= 1
        (tmp_path / "a.npz").write_bytes(content)
        assert "array x of" in (message := refused(tmp_path / "a.npz"))
        assert "is damaged" in message

    def test_a_truncated_member(self, tmp_path, refused):
        whole = io.BytesIO()
        np.save(whole, np.zeros(100))
        with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
            archive.writestr("x.npy", whole.getvalue()[:-8])
            archive.writestr("y.npy", whole.getvalue())
        assert "array x of" in (message := refused(tmp_path / "a.npz"))
        assert "ends too early" in message

    def test_fortran_order_in_an_archive(self, tmp_path, refused):
        np.savez(tmp_path / "a.npz", x=np.asfortranarray(np.zeros((4, 3))), y=np.zeros(4))
        assert "is in Fortran order; save np.ascontiguousarray(array)" in refused(tmp_path / "a.npz")

    def test_class_numbers_out_of_range(self, tmp_path, refused):
        files = self.save(tmp_path, x=np.zeros((30, 2)), y=np.arange(30) - 5)
        assert "y contains the class -5, but classes are numbered from 0" in refused(*files)
        files = self.save(tmp_path, x=np.zeros((30, 2)), y=np.arange(30) * 10_000)
        assert "to at most 65535" in refused(*files)

    def test_negative_codes(self, tmp_path, refused):
        files = self.save(tmp_path, x=np.zeros((30, 2), int) - 1, y=np.zeros(30))
        assert "x has negative integers, which cannot be codes" in refused(*files)

    def test_a_single_row_cannot_be_split(self, tmp_path, refused):
        files = self.save(tmp_path, x=np.zeros((1, 2)), y=np.zeros(1))
        assert "is too small: all of it is held out" in refused(*files)

    def test_two_archives(self, tmp_path, refused):
        for name in ("a.npz", "b.npz"):
            np.savez(tmp_path / name, x=np.zeros(3), y=np.zeros(3))
        assert "use one .npz file" in refused(tmp_path / "a.npz", tmp_path / "b.npz")

    def test_test_arrays_of_another_shape(self, tmp_path, refused):
        np.savez(
            tmp_path / "a.npz",
            x_train=np.zeros((4, 2)),
            y_train=np.zeros(4),
            x_test=np.zeros((4, 3)),
            y_test=np.zeros(4),
        )
        assert "use one dtype and shape" in refused(tmp_path / "a.npz")
