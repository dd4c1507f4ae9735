"""Valid files of every kind that the package reads, their readers, and their damage, for `test_fuzzed_files`."""

from __future__ import annotations

import gzip
import io
import json
import random
import re
import shutil
import struct
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import h5py
import numpy as np
import torch
from monitor.report_runs import Story, make_run
from monitor.test_timeline import recorded
from PIL import Image
from rich.console import Console

from mpitrain.checkpoint.__main__ import main as checkpoint
from mpitrain.checkpoint.contents import damaged_places, load_tensor
from mpitrain.checkpoint.convert import os_errors, read_tensors
from mpitrain.checkpoint.manifest import read_manifest as read_checkpoint
from mpitrain.comm.tuning import Tuning
from mpitrain.config import deepspeed
from mpitrain.config.settings import Config
from mpitrain.data.dataset import open_dataset
from mpitrain.data.format import read_manifest
from mpitrain.data.prepare import PrepareOptions, prepare
from mpitrain.data.shards import verify
from mpitrain.errors import InputError
from mpitrain.inference.prompts import read_prompts
from mpitrain.monitor import read_events, read_metrics
from mpitrain.monitor.report.findings import NamedRun, comparison, findings
from mpitrain.monitor.report.reading import read_run
from mpitrain.monitor.run_files import summary
from mpitrain.monitor.timeline.merging import describe, merge
from mpitrain.monitor.timeline.spans import write_rank
from mpitrain.monitor.watch import frame, line
from mpitrain.monitor.watched import WatchedRun
from mpitrain.planner.machine import read_machine

ODD = (
    "null", "true", "-1", "0", "1e999", "NaN", "-Infinity", "1" * 400, "9" * 5000, str(2**63), str(2**64 - 1), '""',
    '"x"', '"\\u0000\\ud800"', "[]", "[[]]", "{}", '{"x": 1}', "[" * 2000, '"' + "x" * 5000 + '"', "1e-320", "0.5",
)  # fmt: skip
_VALUE = re.compile(rb'-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|"(?:[^"\\\n]|\\.)*"|\[[^\[\]{}\n]*\]|true|false|null')


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Return a file's content with one kind of damage."""
    kind = chance.choice(("value", "value", "value", "flip", "flip", "cut", "repeat", "remove", "insert", "same"))
    places = list(_VALUE.finditer(data)) if kind == "value" else []
    at, length = chance.randrange(len(data) + 1), chance.choice((1, 4, 30, 500))
    if kind == "value" and places:
        place = chance.choice(places)
        return data[: place.start()] + chance.choice(ODD).encode() + data[place.end() :]
    if kind == "cut":
        return data[:at]
    if kind == "repeat":
        return data[:at] + data[at : at + length] * chance.choice((2, 100)) + data[at + length :]
    if kind == "remove":
        return data[:at] + data[at + length :]
    if kind == "insert":
        return data[:at] + chance.choice((b"\0" * 8, b"\xff" * 8, b"\n", b'"', b"[" * 999, b"\x1b[2J")) + data[at:]
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 8, 40)) if data and kind != "same" else 0):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


@dataclass(frozen=True)
class FileKind:
    """Kind of file.

    Attributes:
        make: Function that writes valid files into an empty folder, and returns those to be damaged, one at a time.
        read: Function that reads them all from that folder; the text of its result shows what was read.
        exact: True if damaged files are read right or refused, because the kind has hashes.
    """

    make: Callable[[Path], list[Path]]
    read: Callable[[Path], Any]
    exact: bool = False


def _one(name: str, content: bytes | str) -> Callable[[Path], list[Path]]:
    def make(folder: Path) -> list[Path]:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return [folder / name]

    return make


def _several(contents: dict[str, bytes]) -> Callable[[Path], list[Path]]:
    return lambda folder: [path for name, content in contents.items() for path in _one(name, content)(folder)]


def _source(contents: dict[str, bytes], **options: Any) -> FileKind:
    def read(folder: Path) -> Any:
        out = folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        files = [str(folder / name) for name in contents]
        return prepare(files, out, held_out=0.0, options=PrepareOptions(**options)).splits["train"].rows

    return FileKind(_several(contents), read)


def variables_file(path: Path, *, filters: bool, first: int = 0) -> None:
    """Write an HDF5 file as NetCDF-4 does, with named axes, units and packed numbers; `first` shifts its time."""
    chunks = {"chunks": (1, 3, 2), "shuffle": True, "compression": "gzip", "fletcher32": True} if filters else {}
    with h5py.File(path, "w") as file:
        for name, values in (("time", first + np.arange(12.0)), ("lat", np.arange(3.0)), ("lon", np.arange(4.0))):
            file[name] = values
            file[name].make_scale(name)
        drawn = np.random.default_rng(first)
        numbers = {"t2m": drawn.standard_normal((12, 3, 4)).astype("f4"), "z": drawn.integers(-9, 9, (12, 3, 4), "i2")}
        for name, values in numbers.items():
            variable = file.create_dataset(name, data=values, **chunks)
            variable.attrs["units"] = "K"
            for axis, scale in enumerate(("time", "lat", "lon")):
                variable.dims[axis].attach_scale(file[scale])
        file["z"].attrs["scale_factor"], file["z"].attrs["_FillValue"] = 0.5, np.int16(-99)


def zarr_store(path: Path, version: int) -> None:
    """Write a Zarr store with the arrays x and y."""
    import zarr

    group = zarr.open_group(str(path), mode="w", zarr_format=version)
    for name, values in (("x", np.arange(36, dtype="f4").reshape(12, 3)), ("y", np.arange(12, dtype="i4") % 3)):
        group.create_array(name, shape=values.shape, chunks=(4, *values.shape[1:]), dtype=values.dtype)[:] = values


def _hdf5(filters: bool, **options: Any) -> FileKind:
    def make(folder: Path) -> list[Path]:
        variables_file(folder / "v.nc", filters=filters)
        return [folder / "v.nc"]

    return _variables("v.nc", make, x=("t2m", "z"), ahead=2, **options)


def _zarr(version: int, **options: Any) -> FileKind:
    def make(folder: Path) -> list[Path]:
        zarr_store(folder / "v.zarr", version)
        return sorted(path for path in (folder / "v.zarr").rglob("*") if path.is_file())

    return _variables("v.zarr", make, **options)


def _variables(name: str, make: Callable[[Path], list[Path]], **options: Any) -> FileKind:
    """Return a kind of sources of arrays: prepared after the damage; with `in_place`, before it."""

    def index(folder: Path) -> None:
        prepare([str(folder / name)], folder / "set", held_out=0.0, options=PrepareOptions(**options))

    def make_and_index(folder: Path) -> list[Path]:
        files = make(folder)
        index(folder)
        return [*files, *sorted(path for path in (folder / "set").iterdir() if path.is_file())]

    def read(folder: Path) -> Any:
        if "in_place" not in options:
            shutil.rmtree(folder / "set", ignore_errors=True)
            index(folder)
        data = open_dataset(folder / "set")
        return [values.tolist() for values in data.read(np.arange(len(data)))]

    exact = "in_place" in options
    return FileKind(make_and_index if exact else make, read, exact)


def _npz(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def _npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _tar() -> bytes:
    file = io.BytesIO()
    picture = io.BytesIO()
    Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3)).save(picture, "PNG")
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for key in ("a", "b" * 120):  # which takes a header of its own
            for ending, content in (("png", picture.getvalue()), ("cls", b"1")):
                member = tarfile.TarInfo(f"{key}.{ending}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def _parquet() -> bytes:
    import pyarrow
    from pyarrow import parquet

    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"a": [1.0, 2.0, 3.0], "b": ["x", "y", "x"]}), file)
    return file.getvalue()


def _arrow(stream: bool) -> bytes:
    import pyarrow
    from pyarrow import ipc

    table = pyarrow.table({"a": [1.0, 2.0, 3.0], "b": ["x", "y", "x"]})
    file = io.BytesIO()
    with (ipc.new_stream if stream else ipc.new_file)(file, table.schema) as writer:
        writer.write_table(table)
    return file.getvalue()


def _idx(kind: int, sizes: list[int], data: bytes) -> bytes:
    return b"\0\0" + bytes([kind, len(sizes)]) + struct.pack(f">{len(sizes)}I", *sizes) + data


def _megatron() -> dict[str, bytes]:
    tokens = np.arange(30, dtype="<u2").tobytes()
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 3, 4)
    rows = np.array([10] * 3, "<i4").tobytes() + np.array([0, 20, 40], "<i8").tobytes()
    return {"c.idx": head + rows + np.arange(4, dtype="<i8").tobytes(), "c.bin": tokens}


def _run(folder: Path) -> list[Path]:
    run = make_run(folder / "run", Story(ranks=2, steps=10, killed_at=0, save_every=5))
    (run / "logs").mkdir()
    (run / "logs/rank-00000.log").write_text("2026-01-31T23:59:59.123 rank 0 WARNING it is slow\n")
    files = ("metrics.jsonl", "events.jsonl", "ranks/rank-00001.jsonl", "config.toml", "logs/rank-00000.log")
    return [run / name for name in files]


def _each(*reads: Callable[[], Any]) -> list[str]:
    """Return each reader's result as text, or its refusal."""
    results = []
    for read in reads:
        try:
            results.append(str(read()))
        except InputError as error:
            results.append(f"refused: {error}")
    return results


def _watch(folder: Path) -> str:
    watched, console = WatchedRun(folder / "run"), Console(file=io.StringIO(), width=100)
    watched.read()
    for plain in (False, True):
        console.print(frame(watched, 100, plain=plain))
    return line(watched)


def _read_run(folder: Path) -> list[str]:
    def report() -> str:
        from mpitrain.monitor.report.page import _facts, _header

        run = read_run(folder / "run")
        runs = [NamedRun("a", run), NamedRun("b", run)]
        return comparison(runs) + str(findings(run)) + _header(runs[:1]) + _facts(runs[:1])

    run = folder / "run"
    return _each(
        lambda: summary(run), report, lambda: _watch(folder), lambda: len(read_metrics(run)),
        lambda: len(read_events(run)),
    )  # fmt: skip


def _timeline(folder: Path) -> list[Path]:
    for rank in range(2):
        write_rank(folder, recorded(rank))
    return sorted(folder.glob("rank-*.json"))


def _read_timeline(folder: Path) -> list[str]:
    with without_pictures():
        return describe(merge(folder))


def _dataset(folder: Path) -> list[Path]:
    (folder / "source.txt").write_bytes(bytes(range(1, 250)))
    prepare([str(folder / "source.txt")], folder / "set", held_out=0.0)
    return [path for path in (folder / "set").iterdir() if path.is_file()]


@contextmanager
def without_pictures() -> Iterator[None]:
    """Hide matplotlib in this context: a picture takes seconds."""
    with patch.dict(sys.modules, {"matplotlib.figure": None}):
        yield


def _read_dataset(folder: Path) -> Any:
    manifest = read_manifest(folder / "set")
    for problem in verify(folder / "set", manifest):
        raise InputError(problem)
    return open_dataset(folder / "set", sequence=8).read(np.arange(2))


def _checkpoint(folder: Path) -> list[Path]:
    torch.save({"x": torch.arange(40.0), "y": torch.ones(3, 2)}, folder / "w.pt")
    assert checkpoint(["import", str(folder / "w.pt"), str(folder / "run")]) == 0
    return [path for path in (folder / "run/checkpoints/step-00000000").iterdir() if path.is_file()]


def _read_checkpoint(folder: Path) -> Any:
    step = folder / "run/checkpoints/step-00000000"
    for problem in damaged_places(step):
        raise InputError(problem)
    manifest = read_checkpoint(step)
    return [(name, load_tensor(step, manifest, name).tolist()) for name in sorted(manifest.tensors)]


def _read_weights(file: Path) -> int:
    with os_errors(file):
        return len(read_tensors(file))


def _torch_file(folder: Path) -> list[Path]:
    torch.save({"x": torch.arange(4.0), "y": torch.ones(3, 2)}, folder / "w.pt")
    return [folder / "w.pt"]


def _tuning(folder: Path) -> str:
    try:
        return Tuning.from_json((folder / "t.json").read_bytes().decode()).to_json()
    except ValueError as error:  # the built-in defaults are taken instead
        return str(error)


_ENTRY = {"x": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}
_HEADER = json.dumps(_ENTRY).encode()
_CSV = b"height,width,kind\n" + b"".join(b"%d,%.1f,%s\n" % (n, n / 3, b"ab"[n % 2 : n % 2 + 1]) for n in range(30))
_LINES = b"".join(json.dumps({"text": f"document {n}", "n": n}).encode() + b"\n" for n in range(20))
_ARRAY = json.dumps([{"text": f"document {n}"} for n in range(20)], indent=1).encode()
_X, _Y = np.arange(12, dtype=np.float32).reshape(4, 3), np.array([0, 1, 0, 1])
_IMAGES = {"a-images-idx3-ubyte": _idx(8, [4, 3, 3], bytes(36)), "a-labels-idx1-ubyte": _idx(8, [4], bytes([0, 1] * 2))}
_PRESET = {
    "model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "head_dim": 16,
    "num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "layer_types": ["full_attention"],
    "tie_word_embeddings": True, "vocab_size": 256, "hidden_act": "silu", "use_sliding_window": False,
}  # fmt: skip
_DEEPSPEED = {
    "train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "wandb": {"enabled": False},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e7, "offload_optimizer": {"device": "cpu"}},
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 100, "hysteresis": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 100}},
    "communication_data_type": "fp16", "activation_checkpointing": {"partition_activations": False},
}  # fmt: skip
_GPU = (Path(__file__).parents[1] / "mpitrain/planner/machines/gpu-8.toml").read_bytes()

KINDS: dict[str, FileKind] = {
    "configuration": FileKind(
        _one("c.toml", Config().to_toml()), lambda folder: Config.from_args([str(folder / "c.toml")])
    ),
    "DeepSpeed": FileKind(
        _one("d.json", json.dumps(_DEEPSPEED, indent=1) + "// end\n"),
        lambda folder: deepspeed.read_deepspeed(deepspeed.read_json(folder / "d.json"), 2, "d.json"),
    ),
    "preset": FileKind(
        _one("config.json", json.dumps(_PRESET)),
        lambda folder: Config.from_dict({"model": {"preset": str(folder / "config.json")}}),
    ),
    "machine": FileKind(_one("m.toml", _GPU), lambda folder: read_machine(folder / "m.toml")),
    "tuning table": FileKind(
        _one("t.json", Tuning({"all_reduce node/2": ((1024, "mpi"), (1 << 62, "shared"))}, "x").to_json()), _tuning
    ),
    "run": FileKind(_run, _read_run),
    "timeline": FileKind(_timeline, _read_timeline),
    "prompts": FileKind(
        _one("p.jsonl", b'{"prompt": "a"}\n{"prompt": "b"}\n'), lambda folder: read_prompts(folder / "p.jsonl")
    ),
    "data set": FileKind(_dataset, _read_dataset, exact=True),
    "checkpoint": FileKind(_checkpoint, _read_checkpoint, exact=True),
    "torch file": FileKind(_torch_file, lambda folder: _read_weights(folder / "w.pt")),
    "safetensors": FileKind(
        _one("w.safetensors", len(_HEADER).to_bytes(8, "little") + _HEADER + bytes(16)),
        lambda folder: _read_weights(folder / "w.safetensors"),
    ),
    "CSV": _source({"t.csv": _CSV}),
    "CSV, compressed": _source({"t.csv.gz": gzip.compress(_CSV)}),
    "JSON lines": _source({"d.jsonl": _LINES}),
    "JSON lines, compressed": _source({"d.jsonl.gz": gzip.compress(_LINES)}, pack=64),
    "JSON array": _source({"d.json": _ARRAY}),
    "text": _source({"a.txt": b"a line of text\n\n" * 40}, pack=32, blank_lines=True),
    "npy": _source({"x.npy": _npy(_X), "y.npy": _npy(_Y)}),
    "npz": _source({"d.npz": _npz(x=_X, y=_Y)}),
    "IDX": _source(_IMAGES),
    "IDX, compressed": _source({f"{name}.gz": gzip.compress(content) for name, content in _IMAGES.items()}),
    "tar": _source({"t.tar": _tar()}),
    "tar in place": _variables("t.tar", _one("t.tar", _tar()), in_place=True),
    "tar, compressed": _source({"t.tar.gz": gzip.compress(_tar())}),
    "parquet": _source({"t.parquet": _parquet()}),
    "Arrow": _source({"t.arrow": _arrow(False)}),
    "Arrow stream": _source({"t.arrow": _arrow(True)}),
    "Megatron": _source(_megatron()),
    "HDF5": _hdf5(False),
    "NetCDF": _hdf5(True),
    "HDF5 in place": _hdf5(False, in_place=True),
    "NetCDF in place": _hdf5(True, in_place=True),
    "Zarr": _zarr(3),
    "Zarr in place": _zarr(2, in_place=True),
}
