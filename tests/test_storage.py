"""Storage functions of data sets and checkpoints: positioned reads and writes, extent hashes, atomic folders."""

from __future__ import annotations

import os
import re
import subprocess
import zlib

import h5py
import numpy as np
import pytest

from mpitrain.storage import proc
from mpitrain.storage.disk import MARK, begin_folder, end_folder, leftovers, new_folder, replacing
from mpitrain.storage.hdf5 import SIGNATURE, VERSIONS, ExtentHasher, bytes_of_array, contiguous, read_at, write_at
from mpitrain.storage.text import bytes_text, number_text, seconds_text


@pytest.fixture
def descriptor(tmp_path):
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


def test_partial_reads_and_writes_are_completed(descriptor, monkeypatch):
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, data[:3], offset))
    monkeypatch.setattr(os, "preadv", lambda file, into, offset: preadv(file, [into[0][:2]], offset))
    values = np.arange(10, dtype="<u4").reshape(5, 2)
    write_at(descriptor, bytes_of_array(values), 7)
    read = np.zeros_like(values)
    assert read_at(descriptor, bytes_of_array(read), 7) == values.nbytes
    assert (read == values).all()
    assert read_at(descriptor, memoryview(bytearray(50)), 40) == 7  # where the file ends
    assert read_at(descriptor, memoryview(bytearray(0)), 0) == 0


@pytest.mark.parametrize("pieces", [[23], [1] * 23, [5, 5, 13], [0, 4, 1, 18]])
@pytest.mark.parametrize("length", [1, 5, 23, 100])
def test_extent_hashes_do_not_depend_on_the_pieces(pieces, length):
    rows = np.random.default_rng(0).integers(0, 255, (23, 3, 2), dtype=np.uint16)
    by_rows, by_bytes = ExtentHasher(length), ExtentHasher(length * 12)
    done = 0
    for count in pieces:
        by_rows.update(rows[done : done + count])
        by_bytes.update(bytes_of_array(rows[done : done + count]))
        done += count
    expected = [zlib.crc32(rows[lo : lo + length].tobytes()) for lo in range(0, 23, length)]
    assert by_rows.hashes() == by_bytes.hashes() == expected
    assert ExtentHasher(length).hashes() == []


def test_hdf5_offsets_point_to_the_data_sets(tmp_path):
    path, values = tmp_path / "file.h5", np.arange(1000, dtype="<i8")
    with h5py.File(path, "w", libver=VERSIONS) as file:
        space, kind = h5py.h5s.create_simple(values.shape), h5py.h5t.py_create(values.dtype)
        offset = h5py.h5d.create(file.id, b"x", kind, space, contiguous()).get_offset()
    opened = os.open(path, os.O_RDWR)
    write_at(opened, bytes_of_array(values), offset)
    os.close(opened)
    assert path.read_bytes().startswith(SIGNATURE)
    with h5py.File(path) as file:
        assert (file["x"][...] == values).all()


def test_only_unfinished_or_recognized_folders_are_leftovers(tmp_path):
    for name in ("a.tmp-1", "b.tmp-1", "c.tmp-1", "d.tmp-1", "e"):
        begin_folder(tmp_path / name)
    for name in ("b.tmp-1", "c.tmp-1"):
        (tmp_path / name / "content").touch()
        end_folder(tmp_path / name)
    (tmp_path / "link.tmp-1").symlink_to("a.tmp-1")
    assert not (tmp_path / "b.tmp-1" / MARK).exists()
    removable = leftovers(tmp_path, re.compile(r"\w\.tmp-1"), lambda folder: folder.name.startswith("c"))
    assert sorted(path.name for path in removable) == ["a.tmp-1", "c.tmp-1", "d.tmp-1"]


def test_a_folder_is_named_when_complete_and_removed_on_failure(tmp_path):
    with new_folder(tmp_path / "whole") as folder:
        (folder / "file").write_text("content")
        assert os.listdir(tmp_path) == [folder.name] != ["whole"]
    assert (tmp_path / "whole" / "file").read_text() == "content"
    with pytest.raises(KeyError), new_folder(tmp_path / "half") as folder:
        (folder / "file").write_text("content")
        raise KeyError
    assert os.listdir(tmp_path) == ["whole"]


@pytest.mark.parametrize("durable", [True, False])
def test_replacing_uses_the_given_temporary_name(tmp_path, durable, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(file))
    (tmp_path / "file").write_text("old")
    with replacing(tmp_path / "file", tmp_path / "new", durable=durable) as aside:
        assert aside == tmp_path / "new"
        aside.write_text("new")
    assert (os.listdir(tmp_path), (tmp_path / "file").read_text()) == (["file"], "new")
    assert len(synced) == durable


def test_sizes_and_times_have_three_digits_and_a_suitable_unit():
    sizes = {0: "0 bytes", 1023: "1023 bytes", 1024: "1 KiB", 1536: "1.5 KiB", 1000 << 10: "1000 KiB", 1 << 20: "1 MiB"}
    sizes |= {(1 << 30) - 1: "1 GiB", 5000 << 40: "5000 TiB"}
    assert {nbytes: bytes_text(nbytes) for nbytes in sizes} == sizes
    times = {7.8e-5: "78 us", 0.00999: "9.99 ms", 0.29604: "296 ms", 0.9999: "1 s", 2.8249: "2.82 s", 7300: "7300 s"}
    assert {seconds: seconds_text(seconds) for seconds in times} == times
    assert [number_text(1.23456), number_text(None), number_text(2.0, ".4f")] == ["1.235", "not finite", "2.0000"]


def test_proc_reports_only_existing_processes(monkeypatch, tmp_path):
    child = subprocess.Popen(["sleep", "60"])
    assert child.pid in proc.processes()
    started = proc.start_of(child.pid)
    assert proc.state_and_parent_of(child.pid)[1] == os.getpid() and int(started) >= int(proc.start_of(os.getpid()))
    child.kill()
    child.wait()
    assert (proc.state_and_parent_of(child.pid), proc.command_of(child.pid), proc.start_of(child.pid)) == (
        ("Z", 0),
        "",
        "",
    )
    assert 0 < proc.nbytes_of("self/status", "VmRSS") <= proc.nbytes_of("self/status", "VmHWM")
    assert proc.nbytes_of("self/status", "Vm") is None
    assert any(os.path.samefile(path, h5py.h5.__file__) for path in proc.mapped("h5py/h5."))
    monkeypatch.setattr(proc, "PROC", tmp_path)
    assert (proc.read("self/status"), proc.processes(), proc.mapped("")) == ("", [], [])
