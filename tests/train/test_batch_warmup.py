"""train.batch_warmup: smaller batches first, with the same samples in the same order for any ranks and restarts."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from loose.replicas import Replicas
from train.jobs import run

from mpitrain.checkpoint.manifest import read_manifest
from mpitrain.config.batch_sizes import BatchSizes
from mpitrain.config.settings import Config
from mpitrain.data import Loader, SampleOrder, dataset, open_dataset
from mpitrain.data.prepare import prepare
from mpitrain.errors import InputError
from mpitrain.layout.boxes import split
from mpitrain.loading import load_model
from mpitrain.monitor import read_metrics

GPT = {"layers": 2, "width": 32, "heads": 2, "sequence": 32}
WARMUP = [[2, 2], [3, 5], [1, 8]]
SIZES = [2, 2, 5, 5, 5, 8, 12, 12]  # samples of each step
TRAIN = {"steps": len(SIZES), "batch": 12, "batch_warmup": WARMUP, "microbatch": 2, "evaluate_samples": 8}
CLOCKS = (
    "time",
    "step_s",
    "data_s",
    "wait_s",
    "goodput",
    "tokens_per_s",
    "tflops_per_rank",
    "mfu",
    "memory_bytes",
    "memory",
    "start_s",
    "energy",
    "j_per_step",
    "j_per_sample",
    "between_nodes_bytes",
    "between_groups_bytes",
)


def settings(text, **sections):
    defaults = {"data": {"path": text, "record_ids": True}, "model": GPT, "train": TRAIN, "checkpoint": {"every": 0}}
    return {name: defaults.get(name, {}) | sections.get(name, {}) for name in defaults | sections}


def column(lines, name):
    return [line[name] for line in lines]


def comparable(lines):
    """Return the metrics without those that depend on the machine."""
    return [{name: value for name, value in line.items() if name not in CLOCKS} for line in lines]


def test_batch_sizes_and_positions_of_all_steps():
    sizes = BatchSizes(tuple(map(tuple, WARMUP)), 12)
    for step, size in enumerate([*SIZES, 12, 12]):
        assert sizes.size(step) == size
        assert sizes.before(step + 1) == sizes.before(step) + size and sizes.before(0) == 0
        assert sizes.steps(sizes.before(step)) == step
        assert sizes.after(step) == sorted({size, *SIZES[step:], 12})
    assert BatchSizes((), 3).warmup_after(7) == () and BatchSizes((), 3).before(7) == 21


def test_ranks_read_their_share_of_each_batch_from_any_step(tmp_path, monkeypatch):
    monkeypatch.setattr(dataset, "_AHEAD", 16)  # places that are looked up at once
    np.save(tmp_path / "x.npy", np.arange(97.0))
    np.save(tmp_path / "y.npy", np.arange(97))
    prepare([str(tmp_path)], tmp_path / "set", held_out=0.0)
    data, order = open_dataset(tmp_path / "set"), SampleOrder(97, 3)
    sizes = BatchSizes(((20, 2), (3, 5), (1, 8)), 12)
    for ranks, step in [(1, 0), (3, 0), (2, 1), (3, 19), (1, 22), (2, 23), (3, 30)]:
        for rank in range(ranks):
            at = {"position": sizes.before(step), "warmup": sizes.warmup_after(step)}
            share = lambda size: split(size, ranks)[rank : rank + 2]  # noqa: B023, E731
            with Loader(data, order, batch=12, share=share, workers=0, **at) as batches:
                for number, batch in zip(range(step, 32), batches):  # noqa: B905
                    lo, hi = share(sizes.size(number))
                    assert (batch.position, batch.first) == (sizes.before(number), lo)
                    assert batch.ids.tolist() == order.ids(batch.position + lo, hi - lo).tolist()


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param({}, marks=pytest.mark.ranks(2)),
        pytest.param({"zero": 2}, marks=pytest.mark.ranks(3)),
        pytest.param({"mode": "server"}, marks=pytest.mark.ranks(2)),
    ],
    ids=str,
)
def test_warm_up_has_the_losses_and_samples_of_one_rank(world, folder, text, parallel):
    least = {"batch_warmup": [[2, 3], *WARMUP[1:]]} if parallel.get("mode") else {}  # each worker needs a sample
    alone = world.subgroup([world.rank])
    lines = run(world, folder / "many", **settings(text, parallel=parallel, train=TRAIN | least))
    reference = run(alone, folder / f"alone-{world.rank}", **settings(text, train=TRAIN | least))
    sizes = [3, 3, *SIZES[2:]] if least else SIZES
    assert column(lines, "samples") == sizes and column(lines, "tokens") == [size * 32 for size in sizes]
    assert [len(ids) for ids in column(lines, "ids")] == sizes
    in_order = open_dataset(text, sequence=32).order(Config().run.seed).ids(0, sum(sizes)).tolist()
    assert [number for ids in column(lines, "ids") for number in ids] == in_order
    assert column(lines, "loss") == pytest.approx(column(reference, "loss"), rel=1e-5)
    assert column(lines, "grad_norm") == pytest.approx(column(reference, "grad_norm"), rel=1e-4)
    assert lines[-1]["held_out_loss"] == pytest.approx(reference[-1]["held_out_loss"], rel=1e-5)
    assert lines[0]["tokens_per_s"] == pytest.approx(sizes[0] * 32 / lines[0]["step_s"])
    alone.free()


@pytest.mark.ranks(2)
def test_warm_up_of_pipelines_and_reproducible_runs(world, folder, text):
    alone = world.subgroup([world.rank])
    reference = run(alone, folder / f"alone-{world.rank}", **settings(text))
    staged = settings(text, parallel={"pipeline": 2}, train=TRAIN | {"microbatch": 0})
    assert column(run(world, folder / "staged", **staged), "loss") == pytest.approx(column(reference, "loss"), rel=1e-5)
    both = []
    for ranks, where in ((world, folder / "two"), (alone, folder / f"one-{world.rank}")):
        same = {"dir": str(where), "reproducible": True, "workers": 4}
        lines = run(ranks, where, **settings(text, run=same, model=GPT | {"dropout": 0.1}))
        both.append([(m["loss"], m["grad_norm"], m["ids"]) for m in lines])
    assert both[0] == both[1]
    alone.free()


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("sync", marks=pytest.mark.ranks(1, 3)),
        pytest.param("server", marks=pytest.mark.ranks(3)),
        pytest.param("local", marks=pytest.mark.ranks(2)),
    ],
)
def test_run_stopped_in_the_warm_up_resumes_with_the_same_bits(world, folder, text, mode):
    warmup = [[2, 6], [3, 6 + 6 * (mode == "local")], [1, 18]]
    train = {"steps": 8, "batch": 24, "batch_warmup": warmup, "evaluate_samples": 8}
    parallel = {"mode": mode} | ({"local_steps": 2, "outer": "nesterov"} if mode == "local" else {})
    sections = settings(
        text, train=train, model=GPT | {"dropout": 0.1}, parallel=parallel, checkpoint={"every": 4, "keep": 3}
    )
    whole = run(world, folder / "whole", **sections)
    if world.rank == 0:
        shutil.copytree(folder / "whole", folder / "resumed")
        shutil.rmtree(folder / "resumed/checkpoints/step-00000008")
        values = read_manifest(folder / "whole/checkpoints/step-00000004").values
        assert values["position"] == sum(column(whole[:4], "samples"))
    world.barrier()
    resumed = run(world, folder / "resumed", **sections)
    assert column(resumed, "samples") == [6, 6, *[warmup[1][1]] * 3, 18, 24, 24]
    assert comparable(resumed) == comparable(whole)
    states = [load_model(folder / name).state_dict() for name in ("whole", "resumed")]
    assert all(states[0][name].equal(states[1][name]) for name in states[0])


@pytest.mark.ranks(3)
def test_local_groups_warm_up_like_replicas_in_one_process(world, folder, text):
    train = {"steps": 8, "batch": 12, "batch_warmup": [[1, 3], [4, 6]], "clip": 0.7, "evaluate_samples": 8}
    parallel = {"mode": "local", "local_steps": 3, "warm": 1}
    sections = settings(text, train=train, parallel=parallel)
    lines = run(world, folder / "r", **sections)
    replicas = Replicas(sections, world.size)
    replicas.train()
    assert column(lines, "loss") == pytest.approx(replicas.losses, rel=2e-5)
    assert column(lines, "samples") == [3, 6, 6, 6, 6, 12, 12, 12]


@pytest.mark.ranks(2)
def test_unsupported_warm_ups_are_refused_before_the_first_step(world, folder, text):
    if world.rank == 0:
        np.save(folder / "x.npy", np.random.default_rng(0).random((60, 12, 12), np.float32))
        np.save(folder / "y.npy", np.arange(60) % 3)
        prepare([str(folder)], folder / "images")
    world.barrier()
    images = {"data": {"path": str(folder / "images")}, "model": {"name": "resnet", "layers": 18, "width": 4}}
    wrong = {
        "multiples of its 2 groups, but train.batch_warmup has 5 samples": {"parallel": {"mode": "local"}},
        "train.batch_warmup 1 has fewer samples than there are workers": {
            "parallel": {"mode": "server"},
            "train": TRAIN | {"batch_warmup": [[2, 2], [2, 1]]},
        },
        "BatchNorm needs .* 5 samples on 2 ranks give different numbers": images,
        "a batch of 1 samples leaves some of 2 ranks without one": {
            "parallel": {"zero": 3, "share_node": False},
            "train": TRAIN | {"batch_warmup": [[2, 4], [2, 1]]},
        },
    }
    for number, (words, sections) in enumerate(wrong.items()):
        with pytest.raises(InputError, match=words) as caught:
            run(world, folder / f"r{number}", **settings(text, **sections))
        assert "\n" not in str(caught.value) and caught.value.agreed
        world.barrier()
        assert not (folder / f"r{number}/metrics.jsonl").exists() or not read_metrics(folder / f"r{number}")
