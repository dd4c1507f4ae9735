"""Reading of data sets: rows across shards, a bounded number of open files, threads, and damaged bytes."""

import json
import os
import threading

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpitrain.data import folders, open_dataset
from mpitrain.data.format import read_manifest
from mpitrain.data.shards import OpenShard, verify
from mpitrain.errors import InputError


def expected(content, ids, sequence):
    windows = np.stack([content[i * sequence : i * sequence + sequence + 1] for i in ids]).astype(np.int64)
    return windows[:, :-1], windows[:, 1:]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_token_samples_cross_shard_boundaries(tokens_set, data, request):
    size, shard = data.draw(st.integers(2, 300)), data.draw(st.integers(15, 150))
    sequence = data.draw(st.integers(1, size - 1))
    folder, content = tokens_set(size, shard, name=f"t{os.urandom(8).hex()}")
    tokens = open_dataset(folder, sequence=sequence)
    assert len(tokens) == (size - 1) // sequence
    ids = data.draw(st.lists(st.integers(0, len(tokens) - 1), min_size=1, max_size=30))
    for got, want in zip(tokens.read(np.array(ids)), expected(content, ids, sequence), strict=True):
        assert got.dtype == np.int64
        assert np.array_equal(got, want)


def test_array_rows_come_in_the_requested_order(arrays_set):
    x, y = np.arange(600.0).reshape(200, 3), np.arange(200)
    rows = open_dataset(arrays_set(x, y, shard_bytes=700))
    for ids in ([5], [199, 0, 198], list(range(200)), [7, 7, 8, 9, 3, 2, 9], np.random.default_rng(0).permutation(200)):
        got_x, got_y = rows.read(np.array(ids))
        assert np.array_equal(got_x, x[ids])
        assert np.array_equal(got_y, y[ids])


def test_reading_no_samples_gives_empty_arrays_of_the_right_shape(tokens_set, arrays_set):
    none = np.zeros(0, np.int64)
    x, y = open_dataset(tokens_set(100)[0], sequence=8).read(none)
    assert (x.shape, y.shape, x.dtype, y.dtype) == ((0, 8), (0, 8), np.int64, np.int64)
    x, y = open_dataset(arrays_set(np.zeros((9, 2, 3), np.uint8), np.zeros(9, np.int32))).read(none)
    assert (x.shape, y.shape, x.dtype, y.dtype) == ((0, 2, 3), (0,), np.float32, np.int64)


@pytest.mark.parametrize("ids", [[-1], [12], [0, 12], [3, -5]])
def test_ids_out_of_range_are_refused(tokens_set, ids):
    tokens = open_dataset(tokens_set(100)[0], sequence=8)
    with pytest.raises(IndexError, match="but the data set has 12 samples"):
        tokens.read(np.array(ids))


def test_the_description_matches_the_data(tokens_set):
    description = open_dataset(tokens_set(1000, held_out=0.1)[0], sequence=9).description
    assert (description.kind, description.split, description.samples) == ("tokens", "train", 99)
    assert (description.x_shape, description.y_shape) == ((9,), (9,))
    assert (description.x_dtype, description.y_dtype) == (np.int64, np.int64)
    assert (description.vocabulary, description.classes) == (256, None)


def test_the_identity_depends_only_on_the_content(tokens_set):
    same = [open_dataset(tokens_set(1000, name=name)[0], sequence=9).description.identity for name in "ab"]
    other = open_dataset(tokens_set(1001, name="c")[0], sequence=9).description.identity
    assert same[0] == same[1] != other


def test_the_number_of_open_files_is_bounded(tokens_set, monkeypatch):
    monkeypatch.setattr(folders, "OPEN_FILES", 5)
    folder, content = tokens_set(2000, shard=50)
    tokens = open_dataset(folder, sequence=10)

    def open_here():
        links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
        return sum(str(folder) in os.readlink(link) for link in links if os.path.lexists(link))

    ids = np.random.default_rng(0).permutation(len(tokens))
    most = 0
    for some in np.split(ids, [50, 100, 150]):
        assert np.array_equal(tokens.read(some)[0], expected(content, some, 10)[0])
        most = max(most, open_here())
    assert 0 < most <= 5
    tokens.close()
    assert open_here() == 0
    assert np.array_equal(tokens.read(ids[:1])[0], expected(content, ids[:1], 10)[0])


def test_threads_may_share_a_data_set(tokens_set, monkeypatch):
    monkeypatch.setattr(folders, "OPEN_FILES", 2)
    folder, content = tokens_set(3000, shard=100)
    tokens = open_dataset(folder, sequence=7)
    wrong = []

    def work(seed):
        random = np.random.default_rng(seed)
        for _ in range(20):
            ids = random.integers(0, len(tokens), 9)
            try:
                if not np.array_equal(tokens.read(ids)[1], expected(content, ids, 7)[1]):
                    wrong.append(ids)
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def flip(path, offset, bit=0):
    content = bytearray(path.read_bytes())
    content[offset] ^= 1 << bit
    path.write_bytes(content)


def test_a_flipped_bit_is_reported_and_other_extents_stay_readable(tokens_set):
    folder, content = tokens_set(400_000, shard=250_000)
    second = folder / "train-00001.h5"
    with h5py.File(second) as file:
        offset = file["tokens"].id.get_offset()
    flip(second, offset + 70_000, bit=3)  # extents have 65536 rows: number 1 of that shard
    tokens = open_dataset(folder, sequence=100)
    good = np.array([0, 2400, 2500, 3150, 3820])
    assert np.array_equal(tokens.read(good)[0], expected(content, good, 100)[0])
    with pytest.raises(InputError) as caught:
        tokens.read(np.array([3200]))
    assert str(caught.value) == (
        f"data set {folder}: shard train-00001.h5 field tokens, extent 1 (rows 65536 to 131071) is damaged; "
        "restore that file or prepare the data set again"
    )
    assert list(verify(folder, read_manifest(folder))) == [str(caught.value)]


def test_a_damaged_field_of_arrays_is_named(arrays_set):
    folder = arrays_set(np.zeros((50, 3)), np.arange(50))
    with h5py.File(folder / "train-00000.h5") as file:
        offset = file["y"].id.get_offset()
    flip(folder / "train-00000.h5", offset + 49 * 8)
    with pytest.raises(InputError, match=r"field y, extent 0 \(rows 0 to 49\) is damaged"):
        open_dataset(folder).read(np.array([3]))


def test_flipped_bits_throughout_a_shard_are_found(arrays_set):
    x, y = np.arange(60.0).reshape(20, 3), np.arange(20)
    folder = arrays_set(x, y)
    path = folder / "train-00000.h5"
    whole = path.read_bytes()
    errors = 0
    for offset in range(0, len(whole), 11):
        flip(path, offset, bit=offset % 8)
        try:
            got_x, got_y = open_dataset(folder).read(np.arange(20))
        except InputError as error:
            assert "train-00000.h5" in str(error)
            errors += 1
        else:  # a byte that belongs to nothing
            assert np.array_equal(got_x, x)
            assert np.array_equal(got_y, y)
        path.write_bytes(whole)
    assert errors >= (x.nbytes + y.nbytes) // 11


def test_an_extent_is_checked_once(tokens_set, monkeypatch):
    checked = []
    original = OpenShard.checked_extent
    monkeypatch.setattr(
        OpenShard, "checked_extent", lambda self, *where: checked.append(where) or original(self, *where)
    )
    tokens = open_dataset(tokens_set(200_000)[0], sequence=100)
    tokens.read(np.array([0, 1, 600, 650, 655]))  # 655 * 100 crosses into extent 1
    assert checked == [(0, 0), (0, 1)]
    tokens.close()
    tokens.read(np.array([0, 700]))
    assert checked == [(0, 0), (0, 1)]


class TestRefused:
    def test_a_missing_path(self, tmp_path):
        with pytest.raises(InputError, match=r"none does not exist; make it with `python -m mpitrain.data prepare"):
            open_dataset(tmp_path / "none")

    def test_a_file(self, tmp_path):
        (tmp_path / "a.txt").write_text("abc")
        with pytest.raises(InputError, match=r"is a file, not a data set folder; .* prepare .*a.txt --out DIR"):
            open_dataset(str(tmp_path / "a.txt"))

    def test_a_folder_without_a_manifest(self, tmp_path):
        with pytest.raises(InputError, match=r"has no dataset.json, so it is not a data set"):
            open_dataset(tmp_path)

    def test_no_such_split(self, tokens_set):
        with pytest.raises(InputError, match=r"has no held_out samples \(splits: train\); .* larger --held-out"):
            open_dataset(tokens_set(100)[0], "held_out", sequence=3)

    def test_too_few_tokens(self, tokens_set):
        folder, _ = tokens_set(100)
        assert len(open_dataset(folder, sequence=99)) == 1
        with pytest.raises(InputError, match=r"has 100 train tokens, but one sample of model.sequence 100 needs 101"):
            open_dataset(folder, sequence=100)

    @pytest.mark.parametrize("sequence", [None, 0])
    def test_tokens_without_a_sequence_length(self, tokens_set, sequence):
        with pytest.raises(InputError, match=r"is a stream of tokens; set model.sequence"):
            open_dataset(tokens_set(100)[0], sequence=sequence)

    def test_a_missing_shard(self, tokens_set):
        folder, _ = tokens_set(100, shard=40)
        (folder / "train-00002.h5").unlink()
        with pytest.raises(InputError, match=r"shard train-00002.h5 is missing; restore that file"):
            open_dataset(folder, sequence=8)

    def test_a_shard_that_is_not_hdf5(self, tokens_set):
        folder, _ = tokens_set(100)
        (folder / "train-00000.h5").write_bytes(b"x" * (folder / "train-00000.h5").stat().st_size)
        with pytest.raises(InputError, match=r"shard train-00000.h5 is not an HDF5 file"):
            open_dataset(folder, sequence=8)

    @pytest.mark.parametrize("cut", [1, 100])
    def test_a_truncated_shard(self, tokens_set, cut):
        folder, _ = tokens_set(1000)
        os.truncate(folder / "train-00000.h5", size := (folder / "train-00000.h5").stat().st_size - cut)
        with pytest.raises(InputError, match=rf"has {size} bytes where the manifest says {size + cut}"):
            open_dataset(folder, sequence=8)

    def test_a_shard_truncated_while_in_use(self, tokens_set):
        folder, _ = tokens_set(200_000)
        tokens = open_dataset(folder, sequence=8)
        os.truncate(folder / "train-00000.h5", 10_000)
        with pytest.raises(InputError, match=r"shard train-00000.h5 ends too early"):
            tokens.read(np.array([20_000]))

    def test_swapped_shards(self, tokens_set):
        folder, _ = tokens_set(100, shard=50)
        (folder / "train-00000.h5").rename(folder / "x")
        (folder / "train-00001.h5").rename(folder / "train-00000.h5")
        (folder / "x").rename(folder / "train-00001.h5")
        with pytest.raises(InputError, match=r"field tokens: its table of hashes is damaged"):
            open_dataset(folder, sequence=8)

    @pytest.mark.parametrize("key", ["kind", "vocabulary", "extent_bytes", "splits", "fields", "origin"])
    def test_a_changed_manifest(self, tokens_set, key):
        folder, _ = tokens_set(100)
        content = json.loads((folder / "dataset.json").read_text())
        del content[key]
        (folder / "dataset.json").write_text(json.dumps(content))
        with pytest.raises(InputError, match=r"dataset.json was changed or damaged \(its hash does not match\)"):
            read_manifest(folder)

    @pytest.mark.parametrize(
        ("content", "problem"),
        [
            (b"", "is damaged (not JSON)"),
            (b'{"format": "mpi', "is damaged (not JSON)"),
            (b"\xff\xfe{}", "is damaged (not JSON)"),
            (b"[]", "is not a manifest of mpitrain"),
            (b"{}", "is not a manifest of mpitrain"),
            (b'{"format": "mpitrain-dataset", "version": 9}', "has format version 9, but this mpitrain reads 1"),
        ],
    )
    def test_an_invalid_manifest(self, tokens_set, content, problem):
        folder, _ = tokens_set(100)
        (folder / "dataset.json").write_bytes(content)
        with pytest.raises(InputError) as caught:
            read_manifest(folder)
        assert problem in str(caught.value)

    def test_no_permission(self, open_folder, python):
        code = """if True:
            import os, sys
            from pathlib import Path
            import numpy as np
            from mpitrain.data import open_dataset, resolve
            from mpitrain.data.prepare import prepare
            from mpitrain.errors import InputError
            folder = Path(sys.argv[1])
            (folder / 'a.txt').write_text('abc' * 100)
            prepare([str(folder / 'a.txt')], folder / 'set', held_out=0)
            if os.geteuid() == 0:
                os.seteuid(65534)  # root may read everything
            for locked in ('set/train-00000.h5', 'set/dataset.json', 'set', ''):
                if os.getuid() == 0: os.seteuid(0)
                (folder / locked).chmod(0)
                if os.getuid() == 0: os.seteuid(65534)
                try:
                    resolve(str(folder / 'set'))
                    open_dataset(folder / 'set', sequence=4)
                except InputError as error:
                    print(error)
        """
        out, error = python(code, open_folder).communicate(timeout=60)
        assert error == ""
        lines = out.splitlines()
        assert "shard train-00000.h5: no permission to read it; ask its owner for access" in lines[0]
        assert len(lines) == 4
        for line in lines[1:]:
            assert "no permission to read dataset.json; ask its owner for access" in line
