"""Unusual or malicious files: each is refused in one line, without reading other files or allocating claimed sizes."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import zipfile
import zlib
from collections import OrderedDict

import pytest
import torch
from support import little_memory, one_line

from mpitrain.checkpoint.__main__ import main
from mpitrain.checkpoint.contents import damaged_places, load_tensor
from mpitrain.checkpoint.convert import export, import_weights
from mpitrain.checkpoint.folders import point_to
from mpitrain.checkpoint.manifest import MANIFEST, NEWER, read_manifest
from mpitrain.errors import CheckpointError, InputError

WRONG = [[], [[]], "x", "../x", {}, {"x": 1}, 1.5, True, None, -1, 0, 1, 10**9, 10**30, float("nan")]
NAMES = ["", "/", ".", "..", "a/../../b", "/a", "a//b", "a\0b", "a\nb", "x" * 5000, "\ud800"]


def refused(capsys, arguments, code=2):
    """Run a command that must fail, and return its one-line error."""
    with little_memory():
        exit_code = main([str(a) for a in arguments])
    return one_line((exit_code, capsys.readouterr().err), code=code)


# -- weights to import


def safetensors(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(shape, lo, hi, dtype="F32", **more):
    return {"dtype": dtype, "shape": shape, "data_offsets": [lo, hi]} | more


ONE = entry([1], 0, 4)
SAFETENSORS = {
    "negative shape": safetensors({"x": entry([-1, -4], 0, 16)}, bytes(16)),
    "floating shape": safetensors({"x": entry([4.0], 0, 16)}, bytes(16)),
    "boolean shape": safetensors({"x": entry([True], 0, 4)}, bytes(4)),
    "shape in a list": safetensors({"x": entry([[4]], 0, 16)}, bytes(16)),
    "text for a shape": safetensors({"x": entry("4", 0, 16)}, bytes(16)),
    "no shape": safetensors({"x": {"dtype": "F32", "data_offsets": [0, 4]}}, bytes(4)),
    "shape that overflows": safetensors({"x": entry([2**32, 2**32, 2**32], 0, 0)}),
    "enormous shape": safetensors({"x": entry([10**30], 0, 4)}, bytes(4)),
    "empty and enormous": safetensors({"x": entry([0, 2**62, 2**62], 0, 0)}),
    "terabytes": safetensors({"x": entry([10**12], 0, 4 * 10**12)}, bytes(1500)),
    "many dimensions": safetensors({"x": entry([1] * 40, 0, 4)}, bytes(4)),
    "very many dimensions": safetensors({"x": entry([1] * 100_000, 0, 4)}, bytes(4)),
    "overlapping": safetensors({"x": entry([2], 0, 8), "y": entry([2], 4, 12)}, bytes(12)),
    "the same place": safetensors({"x": entry([2], 0, 8), "y": entry([2], 0, 8)}, bytes(8)),
    "a hole": safetensors({"x": ONE, "y": entry([1], 8, 12)}, bytes(12)),
    "more at the end": safetensors({"x": ONE}, bytes(8)),
    "outside": safetensors({"x": entry([1], 100, 104)}, bytes(4)),
    "backwards": safetensors({"x": entry([1], 4, 0)}, bytes(4)),
    "negative offsets": safetensors({"x": entry([1], -4, 0)}, bytes(4)),
    "three offsets": safetensors({"x": ONE | {"data_offsets": [0, 2, 4]}}, bytes(4)),
    "floating offsets": safetensors({"x": entry([1], 0.0, 4.0)}, bytes(4)),
    "unknown dtype": safetensors({"x": entry([1], 0, 4, "F33")}, bytes(4)),
    "dtype in a list": safetensors({"x": entry([1], 0, 4, ["F32"])}, bytes(4)),
    "dtype that contradicts": safetensors({"x": entry([1], 0, 4, "F64")}, bytes(4)),
    "further keys": safetensors({"x": entry([1], 0, 4, run="me")}, bytes(4)),
    "two of a name": safetensors(b'{"x": %b, "x": %b}' % ((json.dumps(ONE).encode(),) * 2), bytes(4)),
    "two keys of a name": safetensors(b'{"x": {"dtype": "F32", "dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'),
    "deep": safetensors(b"[" * 200_000 + b"]" * 200_000),
    "deep inside": safetensors(b'{"x": ' + b'{"x": ' * 200_000),
    "a list": safetensors([1, 2]),
    "a number": safetensors(b"12"),
    "not UTF-8": safetensors(b'{"\xff": 1}'),
    "no JSON": safetensors(b"{]"),
    "long header": (2**63).to_bytes(8, "little") + b"{}",
    "short": b"\1\0",
    "nothing": b"",
} | {f"name {i}": safetensors({name: ONE}, bytes(4)) for i, name in enumerate(NAMES)}


@pytest.mark.parametrize("case", SAFETENSORS)
def test_a_hostile_safetensors_file_is_refused_in_one_line(tmp_path, capsys, case):
    file = tmp_path / "w.safetensors"
    file.write_bytes(SAFETENSORS[case])
    assert str(file) in refused(capsys, ["import", file, tmp_path / "run"])
    assert not list(tmp_path.rglob("step-*"))


class _Storage:
    pass


def torch_file(path, claimed, shape, stride, offset=0, compression=zipfile.ZIP_STORED, stored=4):
    """Write a torch.save file whose tensor claims any size and strides; its storage has `stored` numbers."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            return ("storage", torch.FloatStorage, "0", "cpu", claimed) if isinstance(value, _Storage) else None

    class Tensor:
        def __reduce__(self):
            return torch._utils._rebuild_tensor_v2, (_Storage(), offset, shape, stride, False, OrderedDict())

    pickled = io.BytesIO()
    Pickler(pickled, 2).dump({"x": Tensor()})
    torch.save({"x": torch.ones(stored)}, path)
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, pickled.getvalue() if name.endswith("data.pkl") else content)


SAVED = {
    "expanded": {"x": torch.zeros(1).expand(10**6, 10**6)},
    "expanded many times": {f"x{i}": torch.zeros(1).expand(10_000 + i) for i in range(60)},
    "sparse": {"x": torch.sparse_coo_tensor([[0], [0]], [1.0], (10**6, 10**6), check_invariants=True)},
    "on no device": {"x": torch.zeros(1, device="meta")},
    "many dimensions": {"x": torch.ones([1] * 40)},
    "numbers for names": {1: torch.zeros(1), "1": torch.ones(1)},
    "something else too": {"x": torch.ones(1), "y": None},
} | {f"name {i}": {name: torch.ones(2)} for i, name in enumerate(NAMES) if name.isprintable() or len(name) == 3}
CLAIMED = {
    "more than is there": (10**12, (10**6, 10**6), (10**6, 1)),
    "beyond its storage": (4, (10**6,), (1,)),
    "offset outside": (4, (4,), (1,), 10**9),
    "negative stride": (4, (4,), (-1,)),
    "compressed": (10**6, (10**6,), (1,), 0, zipfile.ZIP_DEFLATED, 10**6),
}


@pytest.mark.parametrize("case", [*SAVED, *CLAIMED])
def test_a_hostile_torch_file_is_refused_in_one_line(tmp_path, capsys, case):
    file = tmp_path / "w.pt"
    if case in SAVED:
        torch.save(SAVED[case], file)
    else:
        torch_file(file, *CLAIMED[case])
    assert str(file) in refused(capsys, ["import", file, tmp_path / "run"])
    assert not list(tmp_path.rglob("step-*"))


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_paths_that_are_not_files_are_refused_in_one_line(tmp_path, capsys, ending):
    folder, pipe, loop, device = (tmp_path / f"{name}.{ending}" for name in ("folder", "pipe", "loop", "device"))
    folder.mkdir()
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    device.symlink_to("/dev/zero")
    for file in (folder, pipe, loop, device):
        assert str(file) in refused(capsys, ["import", file, tmp_path / "run"])


def test_unusual_but_valid_weights_are_imported_and_exported(tmp_path):
    """Test names that are both HDF5 group and data set, names like ours, and empty, conjugated and shared tensors."""
    shared = torch.rand(3, 4)
    tensors = {
        "a": torch.rand(2), "a/b": torch.rand(3), "a#0": torch.rand(4), "a/b/c": torch.rand(5), "a b": torch.rand(1),
        "empty": torch.empty(0, 2**40), "conj": torch.rand(3, dtype=torch.complex64).conj(), "number": torch.tensor(3),
        "one": shared, "other": shared.t(), "same": shared, "a/b/c/d": shared, "pair": torch.zeros(1).expand(2),
    }  # fmt: skip
    torch.save(tensors, tmp_path / "w.pt")
    folder = import_weights(tmp_path / "w.pt", tmp_path / "run/checkpoints")
    assert not list(damaged_places(folder))
    export(folder, tmp_path / "again.pt")
    again = torch.load(tmp_path / "again.pt", weights_only=True)
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items()) and len(again) == len(tensors)


# -- manifests


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Return a checkpoint of two tensors, one of which has two names."""
    place = tmp_path_factory.mktemp("imported")
    weight = torch.rand(6, 5)
    torch.save({"a.weight": weight, "b": torch.rand(3).bfloat16(), "head": weight}, place / "w.pt")
    return import_weights(place / "w.pt", place / "run/checkpoints")


def payload_of(folder):
    payload = json.loads((folder / MANIFEST).read_text())["payload"]
    payload["parity"] = [[["rank-00000.h5", ""], ["parity-00000-00000.bin", "parity-00001-00000.bin"], 4096]]
    payload["values"] |= {"loss_scale": {"scale": 1.0, "good": 2}, "optimizer": {"b": {"step": 3}}, "data_ranks": 2}
    payload["values"] |= {"engine": {"steps": 3, "skipped": 0, "values": {}}}
    return payload


def put(folder, payload):
    """Write the content as a manifest with the right hash."""
    text = payload if isinstance(payload, str) else json.dumps(payload)
    (folder / MANIFEST).write_text(f'{{"crc32": {zlib.crc32(text.encode())}, "payload": {text}}}\n')


def places(value, path=()):
    """Yield the path of every value in nested lists and dictionaries."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in items:
        yield from places(below, (*path, key))


def changed(payload, path, change):
    payload = copy.deepcopy(payload)
    if not path:
        return change(payload)
    inner = payload
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = change(inner[path[-1]])
    return payload


def use(folder, out):
    """Call everything that reads a manifest; return the first refusal."""
    try:
        manifest = read_manifest(folder)
        list(damaged_places(folder))
        for name in manifest.tensors:
            load_tensor(folder, manifest, name)
        export(folder, out)
    except (CheckpointError, InputError) as error:
        return str(error)
    finally:
        out.unlink(missing_ok=True)
    return ""


@pytest.mark.parametrize("newer", [False, True])
def test_a_manifest_with_a_wrong_value_is_refused_in_one_line(tmp_path, imported, newer):
    folder = tmp_path / imported.name
    folder.mkdir()
    for file in imported.glob("*.h5"):
        os.link(file, folder / file.name)
    payload = payload_of(imported)
    if newer:
        payload["format"], shapes = NEWER, {name: shape for name, shape, _ in payload["tensors"]}
        place = next(extent for extent in payload["extents"] if len(shapes[extent[0]]) == 2)
        shape = shapes[place[0]]
        place[1] = [shape, [0, 0], shape, *place[1][-2:]]
    put(folder, payload)
    assert use(folder, tmp_path / "out.pt") == ""
    count = 0
    with little_memory():
        for path in places(payload):
            kind = type(payload_at(payload, path))
            for wrong in WRONG:
                put(folder, changed(payload, path, lambda _, wrong=wrong: wrong))
                problem = use(folder, tmp_path / "out.pt")
                assert "\n" not in problem and len(problem) < 1000
                same = type(wrong) in (kind, int if kind is float else kind) and not isinstance(wrong, list)
                free = path in (("values", "imported"), ("values", "data")) or "optimizer" in path
                if not same and not free and wrong not in ([], {}):
                    assert problem, f"{path}: {wrong!r} was taken for a {kind.__name__}"
                count += 1
    for field in payload:
        put(folder, {name: value for name, value in payload.items() if name != field})
        assert use(folder, tmp_path / "out.pt"), f"{field} is missed by nobody"
    assert count > 500


def payload_at(payload, path):
    for key in path:
        payload = payload[key]
    return payload


def commands(folder, out):
    return [["show", folder], ["ls", folder], ["verify", folder], ["diff", folder, folder], ["export", folder, out]]


def test_files_outside_the_folder_are_never_read(tmp_path, capsys, imported):
    folder = tmp_path / imported.name
    folder.mkdir()
    os.link(imported / "rank-00000.h5", tmp_path / "rank-00000.h5")
    for name in ("../rank-00000.h5", str(tmp_path / "rank-00000.h5"), "./../rank-00000.h5", "manifest.json", ""):
        put(folder, json.dumps(payload_of(imported)).replace('"rank-00000.h5"', json.dumps(name)))
        assert main(["verify", str(folder)]) == 1
        assert "all right" not in capsys.readouterr().out
        assert str(folder) in refused(capsys, ["export", folder, tmp_path / "out.pt"], 1)
        assert not (tmp_path / "out.pt").exists()


def test_claimed_sizes_are_checked_against_the_files(tmp_path, capsys, imported):
    """Test a claimed tensor of 275 GB in 10^9 rows, in a consistent manifest and in one that contradicts itself."""
    folder = tmp_path / imported.name
    folder.mkdir()
    os.link(imported / "rank-00000.h5", folder / "rank-00000.h5")
    rows, size = 10**9, 1 << 38
    columns = size // 4 // rows
    place = [rows, columns, 1, 0, columns, 0, rows * columns]
    payload = payload_of(imported) | {"parity": [], "views": {}, "tensors": [["model/x", [rows, columns], "float32"]]}
    payload["extents"] = [["model/x", place, "rank-00000.h5", 0, [1] * -(-4 * rows * columns // (4 << 20))]]
    sizes = payload["files"]
    for files in ({"rank-00000.h5": size}, sizes):
        put(folder, payload | {"files": files})
        for arguments in commands(folder, tmp_path / "out.pt"):
            if arguments[0] in ("export", "diff"):
                refused(capsys, arguments, 1)
                continue
            with little_memory():
                assert main([str(a) for a in arguments]) in (0, 1)
            assert "all right" not in capsys.readouterr().out
    one = [["model/x", [rows, 1, 1, 0, 1, n, n + 1], "rank-00000.h5", 0, [1]] for n in range(3)]
    payload |= {"files": sizes, "extents": one, "tensors": [["model/x", [rows], "float32"]]}
    put(folder, payload)
    assert "holds" not in refused(capsys, ["export", folder, tmp_path / "out.pt"], 1)


def test_a_manifest_that_is_not_a_file_is_refused_in_one_line(tmp_path, capsys, imported):
    folder = tmp_path / imported.name
    folder.mkdir()
    manifest = folder / MANIFEST
    for make, undo in [
        (manifest.mkdir, manifest.rmdir),
        (lambda: os.mkfifo(manifest), manifest.unlink),
        (lambda: manifest.symlink_to(manifest), manifest.unlink),
        (lambda: manifest.symlink_to("/dev/zero"), manifest.unlink),
        (manifest.touch, manifest.unlink),
        (lambda: manifest.write_bytes(b"\xff\0" * 99), manifest.unlink),
        (lambda: put(folder, "[" * 200_000), manifest.unlink),
        (lambda: put(folder, "[]"), manifest.unlink),
        (lambda: os.truncate(os.open(manifest, os.O_CREAT | os.O_WRONLY), 1 << 42), manifest.unlink),
    ]:
        make()
        assert str(manifest) in refused(capsys, ["export", folder, tmp_path / "out.pt"], 1)
        undo()


def test_a_missing_rank_file_is_named(tmp_path, capsys, imported):
    folder = tmp_path / imported.name
    folder.mkdir()
    put(folder, payload_of(imported))
    for arguments in commands(folder, tmp_path / "out.pt")[3:]:
        line = refused(capsys, arguments, 1)
        assert f"{folder}/rank-00000.h5 is missing" in line and "out.pt" not in line


def test_a_folder_called_latest_does_no_harm(tmp_path):
    final = tmp_path / "step-00000001"
    (tmp_path / "latest/kept").mkdir(parents=True)
    final.mkdir()
    point_to(final)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]
    assert (tmp_path / "latest/kept").is_dir()
