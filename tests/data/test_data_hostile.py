"""Odd or malicious inputs and data sets: each is refused in one line, without allocating claimed sizes."""

from __future__ import annotations

import copy
import gzip
import io
import json
import os
import shutil
import struct
import zipfile
import zlib

import h5py
import numpy as np
import pytest
from support import little_memory, one_line

from mpitrain.data.dataset import open_dataset
from mpitrain.data.format import MANIFEST, _canonical, read_manifest
from mpitrain.data.shards import verify
from mpitrain.errors import InputError

WRONG = [[], [[]], "x", "../x", {}, {"x": 1}, 1.5, True, None, -1, 0, 1, 10**9, 10**30]


def npy(shape, dtype="<f4", data=bytes(16)):
    header = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header + data


def idx(kind, sizes, data=b""):
    return b"\0\0" + bytes([kind, len(sizes)]) + struct.pack(f">{len(sizes)}I", *sizes) + data


def png(width, height):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(8 * 25)) if width == 8 else b""
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


ARRAYS = {
    "terabytes": npy("(1000000000000,)"),
    "terabytes a row": npy("(4, 1000000000000)"),
    "negative": npy("(-4,)"),
    "negative rows": npy("(4, -1)"),
    "floating": npy("(4.0,)"),
    "boolean": npy("(True,)"),
    "enormous": npy(f"({10**30},)"),
    "none": npy("(4, 0, 1000000000000)"),
    "objects": npy("(4,)", "|O"),
    "many dimensions": npy("(4, " + "1, " * 40 + ")"),
    "very many dimensions": npy("(4, " + "1, " * 99 + ")"),
    "deep": npy("(" * 3000 + ")" * 3000),
    "records": npy("(4,)", [("a", "<f4")]),
    "long text": npy("(4,)", "<U1000000000"),
    "version": b"\x93NUMPY\x09\0" + bytes(20),
    "short": npy("(4,)", data=bytes(3)),
}
LABELS = npy("(4,)", "<i8", bytes(32))
IDX = {
    "cut off": idx(8, [4, 28, 28]),
    "enormous": idx(8, [2**32 - 1] * 3),
    "an enormous image": idx(8, [4, 2**32 - 1, 2**32 - 1]),
    "without pixels": idx(8, [4, 0, 0]),
    "many dimensions": idx(8, [4] + [2**32 - 1] * 200),
    "sizes cut off": b"\0\0\x08\xff",
}
IMAGES = {
    "bomb": png(60_000, 60_000),
    "larger": png(2**31 - 1, 2**31 - 1),
    "no pixels": png(0, 0),
    "GIF": b"GIF89a" + bytes(3),
    "TIFF": b"II*\0" + b"\x17" * 60,
    "PPM": b"P6 99999999999 1 255\n",
    "BMP": b"BM" + bytes(60),
    "WebP": b"RIFF\x10\0\0\0WEBPVP8 " + bytes(9),
    "JPEG": b"\xff\xd8\xff\xe0" + b"\x17" * 99,
    "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n",  # a program
}
TABLES = {
    "a long line": b"1,2," * (5 << 20),
    "a long cell": b"9" * 200_000 + b",1\n2,3\n",
    "no numbers": b"1e999,1\nnan,2\n",
    "zeros": b"\0,1\n\0,2\n",
    "quotes": b'"' * 11,
}


def archive(x, y):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as members:
        members.writestr("x.npy", x)
        members.writestr("y.npy", y)
    return content.getvalue()


CASES = (
    {f"array, {name}": {"x.npy": x, "y.npy": LABELS} for name, x in ARRAYS.items()}
    | {f"archive, {name}": {"d.npz": archive(x, LABELS)} for name, x in ARRAYS.items()}
    | {"archive, a bomb": {"d.npz": archive(npy(f"(1, {1 << 40})", data=bytes(1 << 24)), npy("(1,)", "<i8", bytes(8)))}}
    | {f"IDX, {n}": {"a-images-idx3-ubyte": x, "a-labels-idx1-ubyte": idx(8, [4], bytes(4))} for n, x in IDX.items()}
    | {
        f"IDX.gz, {n}": {
            "a-images-idx3-ubyte.gz": gzip.compress(x),
            "a-labels-idx1-ubyte.gz": gzip.compress(idx(8, [4], bytes(4))),
        }
        for n, x in IDX.items()
    }
    | {f"image, {name}": {"a/1.png": png(8, 8), "b/2.png": x} for name, x in IMAGES.items()}
    | {f"first image, {name}": {"a/1.png": x, "b/2.png": png(8, 8)} for name, x in IMAGES.items()}
    | {f"table, {name}": {"t.csv": x} for name, x in TABLES.items()}
)


@pytest.mark.parametrize("case", CASES)
def test_a_hostile_input_is_refused_in_one_line(tmp_path, command, case):
    source = tmp_path / "source"
    for name, content in CASES[case].items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(content)
    with little_memory():
        code, _, errors = command("prepare", source, "--out", tmp_path / "out", "--held-out", 0)
    one_line((code, errors))
    assert not (tmp_path / "out").exists()


def test_an_image_size_beyond_memory_is_refused(tmp_path, command):
    for name in ("a/1.png", "b/2.png"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(png(8, 8))
    code, _, errors = command("prepare", tmp_path, "--out", tmp_path / "out", "--size", "100000x100000")
    one_line((code, errors), "are too large")


# -- data sets


def put(folder, content):
    """Write the content as a manifest with the right hash."""
    content = {name: value for name, value in content.items() if name != "crc32"}
    (folder / MANIFEST).write_text(json.dumps(content | {"crc32": zlib.crc32(_canonical(content))}))


def places(value, path=()):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in items:
        yield (*path, key), below
        yield from places(below, (*path, key))


def use(folder):
    """Call everything that reads a data set; return the first refusal."""
    try:
        manifest = read_manifest(folder)
        for problem in verify(folder, manifest):
            return problem
        with np.errstate(all="raise"):
            open_dataset(folder, sequence=3).read(np.arange(2))
    except InputError as error:
        return str(error)
    return ""


def test_a_manifest_with_a_wrong_value_is_refused_in_one_line(tokens_set, arrays_set):
    tokens, _ = tokens_set(300, held_out=0.1)
    arrays = arrays_set(np.ones((5, 2), np.float32), np.arange(5) % 2)
    count = 0
    with little_memory():
        for folder in (tokens, arrays):
            content = json.loads((folder / MANIFEST).read_text())
            del content["crc32"]
            assert use(folder) == ""
            for path, value in places(content):
                for wrong in WRONG:
                    changed = copy.deepcopy(content)
                    inner = changed
                    for key in path[:-1]:
                        inner = inner[key]
                    inner[path[-1]] = wrong
                    put(folder, changed)
                    problem = use(folder)
                    assert "\n" not in problem and len(problem) < 1000
                    optional = path[-1] in ("vocabulary", "tokenizer_crc32", "classes", "class_counts", "columns")
                    if type(wrong) is not type(value) and wrong not in ([], {}, value) and not optional:
                        assert problem, f"{path}: {wrong!r} was taken for a {type(value).__name__}"
                    count += 1
            for field in content.keys() - {"columns"}:  # which older data sets do not have
                put(folder, {name: value for name, value in content.items() if name != field})
                assert use(folder), f"{field} is missed by nobody"
            put(folder, content)
    assert count > 500


def test_a_manifest_that_is_not_a_file_is_refused_in_one_line(tmp_path, command):
    manifest = tmp_path / MANIFEST
    for make, undo in [
        (manifest.mkdir, manifest.rmdir),
        (lambda: os.mkfifo(manifest), manifest.unlink),
        (lambda: manifest.symlink_to(manifest), manifest.unlink),
        (lambda: manifest.symlink_to("/dev/zero"), manifest.unlink),
        (lambda: manifest.write_bytes(b"\xff\0" * 99), manifest.unlink),
        (lambda: manifest.write_text("[" * 200_000), manifest.unlink),
        (lambda: put(tmp_path, {"format": "mpitrain-dataset", "version": [[1]] * 999}), manifest.unlink),
    ]:
        make()
        code, _, errors = command("info", tmp_path)
        one_line((code, errors))
        undo()


def _huge(file, outside):
    file.create_dataset("tokens", (10**13,), "u1", chunks=(1 << 20,), fillvalue=7)


def _huge_table(file, outside):
    del file["crc32/tokens"]
    file.create_dataset("crc32/tokens", (10**13,), "<u4", chunks=(1 << 20,), fillvalue=7)


def _filled(file, outside):
    rows = file["tokens"].shape
    del file["tokens"]
    file.create_dataset("tokens", rows, "u1", chunks=(10,), fillvalue=7)


def _external(file, outside):
    rows = file["tokens"].shape
    del file["tokens"]
    file.create_dataset("tokens", rows, "u1", external=[(str(outside), 0, rows[0])])


def _external_table(file, outside):
    shape = file["crc32/tokens"].shape
    del file["crc32/tokens"]
    file.create_dataset("crc32/tokens", shape, "<u4", external=[(str(outside), 0, 4 * shape[0])])


def _link(file, outside):
    del file["crc32"]
    file["crc32"] = h5py.ExternalLink(str(outside), "crc32")


def _soft(file, outside):
    file.move("tokens", "other")
    file["tokens"] = h5py.SoftLink("/other")


def _group(file, outside):
    del file["tokens"]
    file.create_group("tokens")


def _text(file, outside):
    rows = file["tokens"].shape
    del file["tokens"]
    file.create_dataset("tokens", rows, h5py.string_dtype())


@pytest.mark.parametrize(
    "change", [_huge, _huge_table, _filled, _external, _external_table, _link, _soft, _group, _text]
)
def test_shards_with_external_or_overlong_data_are_refused(tokens_set, tmp_path, change):
    """Refuse other HDF5 files, links into them, and fill values that HDF5 supplies."""
    folder, _ = tokens_set(300)
    shard = folder / "train-00000.h5"
    outside = tmp_path / "outside.h5"
    shutil.copy(shard, outside)
    with h5py.File(shard, "r+") as file:
        if change is _huge:
            del file["tokens"]
        change(file, outside)
    content = json.loads((folder / MANIFEST).read_text())
    content["splits"]["train"]["shards"][0]["bytes"] = shard.stat().st_size
    put(folder, content)
    with little_memory():
        problem = use(folder)
    assert "train-00000.h5" in problem and "\n" not in problem, problem


def test_a_shard_that_is_not_a_file_is_refused_in_one_line(tokens_set):
    folder, _ = tokens_set(300)
    shard = folder / "train-00000.h5"
    shard.unlink()
    for make, undo in [
        (shard.mkdir, shard.rmdir),
        (lambda: os.mkfifo(shard), shard.unlink),
        (lambda: shard.symlink_to(shard), shard.unlink),
    ]:
        make()
        assert "train-00000.h5 cannot be read" in use(folder)
        undo()
