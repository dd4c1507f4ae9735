"""HDF5, NetCDF and Zarr files read in place: the same losses on any number of ranks, after restarts and kills."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from fuzzed_files import variables_file, zarr_store
from support import PATIENCE, clean_environment, job, launcher, train_command
from train.jobs import run

from mpitrain.data.__main__ import main
from mpitrain.data.prepare import PrepareOptions, prepare
from mpitrain.errors import InputError
from mpitrain.monitor import read_metrics

PAIRS = {"x": ("t2m", "z"), "ahead": 2, "scale": "standard", "in_place": True}
SOURCES = {"hdf5": PAIRS, "netcdf": PAIRS, "zarr": {"in_place": True}}


def write_sources(folder: Path) -> None:
    variables_file(folder / "hdf5.h5", filters=False)
    variables_file(folder / "netcdf.nc", filters=True)
    zarr_store(folder / "zarr.zarr", 2)


@pytest.fixture(scope="module")
def place(world, tmp_path_factory):
    folder = Path(world.broadcast_object(str(tmp_path_factory.mktemp("variables"))))
    if world.rank == 0:
        write_sources(folder)
    world.barrier()
    return folder


def source_of(folder: Path, kind: str) -> list[str]:
    return [str(next(path for path in folder.iterdir() if path.stem == kind))]


@pytest.mark.ranks(1, 2, 4)
def test_files_in_place_give_the_same_losses_on_any_number_of_ranks_and_after_restarts(world, place):
    alone = world.subgroup([0])
    for kind, options in SOURCES.items():
        folders = [place / f"{kind}-{world.size}-{ranks}" for ranks in (world.size, "alone", "copy")]
        source, options = source_of(place, kind), PrepareOptions(**options)
        prepare(source, folders[0], held_out=0.2, options=options, world=world)
        copy = PrepareOptions(**{**vars(options), "in_place": False})
        prepare(source, folders[2], held_out=0.2, options=copy, world=world)

        def train(comm, run_folder, data, steps):
            return run(
                comm,
                place / run_folder,
                data={"path": str(data), "record_ids": True},
                model={"name": "mlp", "width": 16},
                train={"steps": steps, "batch": 5, "evaluate_samples": 2},
                checkpoint={"every": 2},
                optim={"schedule": "constant"},
                run={"reproducible": True, "workers": 4, "dir": str(place / run_folder)},
            )

        reference = None
        if alone is not None:
            prepare(source, folders[1], held_out=0.2, options=options)
            reference = train(alone, f"{kind}-run-alone-{world.size}", folders[1], 6)
        reference = world.broadcast_object(reference)
        train(world, f"{kind}-run-{world.size}", folders[0], 3)
        resumed = train(world, f"{kind}-run-{world.size}", folders[0], 6)
        copied = train(world, f"{kind}-copied-{world.size}", folders[2], 6)
        for lines in (resumed, copied):
            for key in ("loss", "ids"):
                assert [line[key] for line in lines] == [line[key] for line in reference], (kind, key)
            assert lines[-1]["held_out_loss"] == reference[-1]["held_out_loss"]


@pytest.mark.ranks(2, 3)
def test_an_error_of_one_rank_ends_prepare_on_all_ranks(world, place):
    source = place / f"broken-{world.size}.nc"
    if world.rank == 0:
        variables_file(source, filters=False)
        content = bytearray(source.read_bytes())
        content[-4:] = b"\xff\xff\xff\x7f"  # NaN, in the last shard
        source.write_bytes(content)
    world.barrier()
    out = place / f"broken-set-{world.size}"
    options = PrepareOptions(x=("z",), y=("t2m",))
    if world.rank == world.size - 1:
        source = place / "only this rank cannot find it.nc"
    with pytest.raises(InputError, match=f"rank {world.size - 1}: source .*only this rank cannot find it"):
        prepare([str(source)], out, options=options, world=world)
    with pytest.raises(InputError, match="exists already"):
        prepare([str(source)], place, options=options, world=world)
    world.barrier()
    assert not [path for path in place.iterdir() if "broken-set" in path.name]


@pytest.mark.campaign
@pytest.mark.parametrize("kind", SOURCES)
def test_ranks_prepare_and_a_killed_run_on_files_in_place_resumes_with_the_same_losses(tmp_path, kind):
    write_sources(tmp_path)
    pairs = ["--x", "t2m,z", "--ahead", "2", "--scale", "standard"] if "x" in SOURCES[kind] else []
    words = ["prepare", *source_of(tmp_path, kind), *pairs, "--in-place", "--held-out", "0.2", "--out"]
    assert main([*words, str(tmp_path / "alone")]) == 0
    command = [*train_command()[:2], "mpitrain.data", *words]
    done = job(2, [*command, str(tmp_path / "set")])
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "set/index.bin").read_bytes() == (tmp_path / "alone/index.bin").read_bytes()
    arguments = ("--data.path", tmp_path / "set", "--model.name", "mlp", "--train.batch", 4, "--train.steps", 150)
    arguments += ("--checkpoint.every", 10, "--data.record_ids", "true", "--run.reproducible", "true")
    arguments += ("--run.workers", 4)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert job(1, train_command("--run.dir", whole, *arguments)).returncode == 0
    start = [*launcher(2), *train_command("--run.dir", killed, *arguments)]
    process = subprocess.Popen(start, env=clean_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60 * PATIENCE
        while not (killed / "checkpoints/step-00000020/manifest.json").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
        for rank in range(2):
            started = (killed / f"logs/rank-{rank:05d}.log").read_text().splitlines()[0]
            os.kill(int(started.rpartition("process ")[2]), signal.SIGKILL)
        assert process.wait(30) != 0
    finally:
        process.kill()
    resumed = job(4, train_command("--run.dir", killed, *arguments))
    assert resumed.returncode == 0 and "resumed from" in resumed.stdout, resumed.stderr
    keys = ("step", "loss", "ids", "held_out_loss")
    lines, reference = ([[m.get(k) for k in keys] for m in read_metrics(folder)] for folder in (killed, whole))
    assert lines == reference and len(lines) == 150
