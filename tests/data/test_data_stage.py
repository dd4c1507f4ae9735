"""Staged copies on a node's local disk: complete and checked or absent, made once and reused."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from mpitrain.data import open_dataset, stage_on_nodes, staged_folder
from mpitrain.data.folders import stage
from mpitrain.data.format import read_manifest, write_manifest
from mpitrain.data.prepare import prepare
from mpitrain.errors import InputError


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_copy_has_the_same_files_and_is_reused(tokens_set, tmp_path):
    source, content = tokens_set(300_000, shard=70_000, held_out=0.2)
    place = tmp_path / "disk" / "of the node"
    stage(source, place)
    copy = staged_folder(source, place)
    assert files_of(copy) == files_of(source) and len(files_of(copy)) > 5
    assert [path.name for path in place.iterdir()] == [copy.name]  # no temporary folder, no lock
    inodes = {path.name: path.stat().st_ino for path in copy.iterdir()}
    stage(source, place)
    assert {path.name: path.stat().st_ino for path in copy.iterdir()} == inodes
    dataset = open_dataset(copy, sequence=100)
    x, _ = dataset.read(np.array([0, len(dataset) - 1]))
    assert x[0].tolist() == content[:100].tolist()


@pytest.mark.parametrize("harm", ["shorten", "remove", "manifest"])
def test_an_incomplete_copy_is_replaced(tokens_set, tmp_path, harm):
    source, _ = tokens_set(300_000, shard=70_000)
    stage(source, tmp_path / "disk")
    copy = staged_folder(source, tmp_path / "disk")
    shard = sorted(copy.glob("*.h5"))[1]
    if harm == "shorten":
        os.truncate(shard, 1000)
    elif harm == "remove":
        shard.unlink()
    else:
        (copy / "dataset.json").write_text("{")
    stage(source, tmp_path / "disk")
    assert files_of(copy) == files_of(source)
    assert [path.name for path in (tmp_path / "disk").iterdir()] == [copy.name]


def test_damaged_shards_are_reported_and_leave_no_copy(tokens_set, tmp_path):
    source, _ = tokens_set(300_000, shard=70_000)
    shard = sorted(source.glob("*.h5"))[2]
    data = bytearray(shard.read_bytes())
    data[40_000] ^= 1
    shard.write_bytes(data)
    with pytest.raises(InputError, match=rf"{source}: shard {shard.name} field tokens, extent 0 .* is damaged"):
        stage(source, tmp_path / "disk")
    assert not list((tmp_path / "disk").iterdir())


def test_too_little_space_is_reported_with_the_required_size(tokens_set, tmp_path):
    source, _ = tokens_set(300_000)
    read = read_manifest(source)
    [spec] = read.splits["train"].shards
    split = read.splits["train"].model_copy(update={"shards": (spec.model_copy(update={"bytes": 1 << 50}),)})
    write_manifest(source, read.model_copy(update={"splits": {"train": split}}))
    with pytest.raises(InputError, match=r"data.stage .*disk has [\d.]+ GB free, but the data set needs 1125900.0 GB"):
        stage(source, tmp_path / "disk")
    assert not list((tmp_path / "disk").iterdir())


def test_concurrent_processes_make_one_copy(tokens_set, tmp_path):
    source, _ = tokens_set(300_000, shard=30_000)
    errors = []

    def run():
        try:
            stage(source, tmp_path / "disk")
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    copy = staged_folder(source, tmp_path / "disk")
    assert files_of(copy) == files_of(source)
    assert [path.name for path in (tmp_path / "disk").iterdir()] == [copy.name]


@pytest.mark.ranks(1, 2, 3)
def test_the_first_rank_of_a_node_copies_for_all(world, folder):
    world.on_root(lambda: make(folder))
    for _ in range(2):
        stage_on_nodes(world, str(folder / "set"), folder / "disk")
        dataset = open_dataset(staged_folder(folder / "set", folder / "disk"), sequence=64)
        x, _ = dataset.read(np.arange(len(dataset)))
        assert x.reshape(-1).tolist() == [number % 200 + 1 for number in range(x.size)]


@pytest.mark.ranks(1, 2, 3)
def test_a_failure_on_one_rank_is_raised_on_all(world, folder):
    world.on_root(lambda: make(folder))
    world.on_root(lambda: (folder / "disk").write_text("no folder"))
    with pytest.raises(InputError, match=r"disk.*a file exists where a folder is needed"):
        stage_on_nodes(world, str(folder / "set"), folder / "disk")
    with pytest.raises(InputError, match=r"nowhere"):
        stage_on_nodes(world, str(folder / "nowhere"), folder / "other")


def make(folder):
    (folder / "text.txt").write_bytes((np.arange(100_000) % 200 + 1).astype(np.uint8).tobytes())
    prepare([str(folder / "text.txt")], folder / "set", held_out=0.0, shard_bytes=30_000)
