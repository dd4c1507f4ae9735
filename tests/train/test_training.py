"""The main job inside one process group: the same training on any number of ranks, and after a restart."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from train.jobs import run

from mpitrain.data.prepare import prepare
from mpitrain.storage.disk import begin_folder

GPT = {"layers": 2, "width": 32, "heads": 2, "sequence": 32}


def by_one_rank(world, folder, /, **sections):
    """Train on rank 0 alone and return the result of `run` on every rank."""
    alone, lines = world.subgroup([0]), None
    if alone is not None:
        lines = run(alone, folder / "alone", **sections)
        alone.free()
    return world.broadcast_object(lines)


@pytest.mark.parametrize(
    ("zero", "microbatch"),
    [pytest.param("auto", 0, marks=pytest.mark.ranks(2)), pytest.param(0, 2, marks=pytest.mark.ranks(3))],
)
def test_losses_equal_those_of_one_rank(world, folder, text, capsys, zero, microbatch):
    sections = {
        "parallel": {"zero": zero},
        "data": {"path": text, "record_ids": True},
        "model": GPT,
        "train": {"steps": 20, "batch": 10, "microbatch": microbatch, "evaluate_every": 10, "evaluate_samples": 13},
        "checkpoint": {"every": 0},
    }
    lines = run(world, folder / "many", **sections)
    if world.rank == 0:
        assert ("zero 1 (auto)" in capsys.readouterr().out) == (zero == "auto")
    reference = by_one_rank(world, folder, **sections)
    assert len(lines) == 20
    for mine, theirs in zip(lines, reference, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        assert mine["ids"] == theirs["ids"] and len(mine["ids"]) == 10
    assert lines[-1]["held_out_loss"] == pytest.approx(reference[-1]["held_out_loss"], rel=1e-5)
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.3


@pytest.mark.parametrize(
    "model",
    [
        pytest.param({"name": "mlp", "layers": 2, "width": 32}, marks=pytest.mark.ranks(2)),
        pytest.param({"name": "resnet", "layers": 18, "width": 4}, marks=pytest.mark.ranks(3)),
    ],
    ids=lambda m: m["name"],
)
def test_classifiers_reach_the_same_losses(world, folder, model):
    if world.rank == 0:
        generator = np.random.default_rng(0)
        y = np.arange(90) % 3
        source = folder / "source"
        source.mkdir()
        np.save(source / "x.npy", (generator.random((90, 12, 12)) + y[:, None, None] / 3).astype(np.float32))
        np.save(source / "y.npy", y)
        prepare([str(source)], folder / "images")
    world.barrier()
    sections = {
        "data": {"path": str(folder / "images"), "augment": ["crop", "flip"], "augment_padding": 2},
        "model": model,
        "train": {"steps": 10, "batch": 12},
        "optim": {"name": "sgd", "lr": 0.05, "warmup": 0},
        "checkpoint": {"every": 0},
    }
    lines = run(world, folder / "many", **sections)
    reference = by_one_rank(world, folder, **sections)
    assert [m["loss"] for m in lines] == pytest.approx([m["loss"] for m in reference], rel=2e-5)
    assert min(m["loss"] for m in lines) < lines[0]["loss"]


@pytest.mark.ranks(3)
def test_a_batch_smaller_than_the_number_of_ranks_leaves_some_idle(world, folder, text):
    sections = {"data": {"path": text}, "model": GPT, "checkpoint": {"every": 0}}
    lines = run(world, folder / "many", train={"steps": 5, "batch": 2}, **sections)
    reference = by_one_rank(world, folder, train={"steps": 5, "batch": 2}, **sections)
    assert [m["loss"] for m in lines] == pytest.approx([m["loss"] for m in reference], rel=1e-5)


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param({"name": "adamw"}, marks=pytest.mark.ranks(1)),
        pytest.param({"name": "sgd", "options": {"momentum": 0.9}}, marks=pytest.mark.ranks(2)),
        pytest.param({"name": "Adagrad"}, marks=pytest.mark.ranks(3)),
    ],
)
def test_a_resumed_run_is_bitwise_equal_to_an_uninterrupted_one(world, folder, text, optimizer):
    sections = {
        "data": {"path": text, "record_ids": True},
        "model": {**GPT, "dropout": 0.1},
        "train": {"steps": 9, "batch": 7, "microbatch": 2},
        "optim": optimizer,
        "checkpoint": {"every": 4, "keep": 5},
    }
    whole = run(world, folder / "whole", **sections)
    if world.rank == 0:
        shutil.copytree(folder / "whole", folder / "resumed")
        shutil.rmtree(folder / "resumed/checkpoints/step-00000009")
        shutil.rmtree(folder / "resumed/checkpoints/step-00000008")
        begin_folder(folder / "resumed/checkpoints/step-00000008.tmp-0123dead")  # as a killed save leaves it
    world.barrier()
    resumed = run(world, folder / "resumed", **sections)
    drop = (
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
    )
    assert [{k: v for k, v in m.items() if k not in drop} for m in resumed] == [
        {k: v for k, v in m.items() if k not in drop} for m in whole
    ]
    for path in sorted((folder / "whole/checkpoints/step-00000009").glob("rank-*.h5")):
        other = folder / "resumed/checkpoints/step-00000009" / path.name
        assert _content(path) == _content(other)
    assert not list((folder / "resumed/checkpoints").glob("*.tmp-*"))


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    "sections",
    [
        {"parallel": {"zero": 1}, "train": {"precision": "bf16"}, "checkpoint": {"background": True}},
        {"parallel": {"zero": 2}, "train": {"microbatch": 2, "recompute": True}},
        {"parallel": {"zero": 3}, "train": {"precision": "fp16", "microbatch": 1}},
        {"parallel": {"zero": 3, "share_node": False}, "train": {"microbatch": 2}, "checkpoint": {"files": "node"}},
        {"parallel": {"zero": 2}, "comm": {"compression": "topk"}},
        {"comm": {"compression": "powersgd"}},
        {"comm": {"compression": "int4"}, "train": {"precision": "bf16"}},
        {
            "parallel": {"zero": 1, "share_node": False},
            "comm": {"compression": "int8", "parameter_compression": "int8"},
            "train": {"microbatch": 2},
        },
        {"parallel": {"zero": 3, "share_node": False}, "comm": {"parameter_compression": "int8"}},
    ],
    ids=str,
)
def test_sharded_runs_resume_bitwise_equal(world, folder, text, sections):
    def merged(**more):
        names = {*sections, *more}
        return {name: {**sections.get(name, {}), **more.get(name, {})} for name in names}

    common = {"data": {"path": text}, "model": {**GPT, "dropout": 0.1}}
    settings = {"train": {"steps": 4, "batch": 7}, "checkpoint": {"every": 2, "keep": 5}}
    whole = run(world, folder / "whole", **common, **merged(**settings))
    if world.rank == 0:
        shutil.copytree(folder / "whole", folder / "resumed")
        shutil.rmtree(folder / "resumed/checkpoints/step-00000004")
    world.barrier()
    resumed = run(world, folder / "resumed", **common, **merged(**settings))
    assert [m["loss"] for m in resumed] == [m["loss"] for m in whole]
    assert resumed[-1]["held_out_loss"] == whole[-1]["held_out_loss"]


@pytest.mark.ranks(1, 2)
def test_a_run_with_tiled_layers_trains_and_resumes_like_one_without(world, folder, text):
    losses = []
    for tiled in ({}, {"mlp.*": [2, 2]}):
        sections = {
            "data": {"path": text},
            "model": {**GPT, "tiled": tiled},
            "train": {"batch": 6, "recompute": "every 2"},
            "parallel": {"zero": 3, "share_node": False},
            "checkpoint": {"every": 2},
        }
        for steps in (2, 4):  # the second run resumes the first
            lines = run(world, folder / f"{len(tiled)}", **sections | {"train": sections["train"] | {"steps": steps}})
        losses.append([line["loss"] for line in lines])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.ranks(2)
def test_a_reproducible_run_is_bitwise_equal_to_one_rank(world, folder, text):
    alone = world.subgroup([world.rank])
    for zero in (0, 2):
        sections = {
            "data": {"path": text},
            "model": {**GPT, "dropout": 0.1},
            "train": {"steps": 6, "batch": 13, "evaluate_samples": 11},
            "parallel": {"zero": zero},
        }
        reproducible = {"reproducible": True, "workers": 4}
        lines = [
            run(comm, where, run={"dir": str(where), **reproducible}, **sections)
            for comm, where in ((world, folder / f"many-{zero}"), (alone, folder / f"alone-{zero}-{world.rank}"))
        ]
        figures = [[(m["loss"], m["grad_norm"], m.get("held_out_loss")) for m in ms] for ms in lines]
        assert figures[0] == figures[1]
    alone.free()


def _content(path):
    import h5py

    arrays = {}
    with h5py.File(path) as file:
        file.visititems(
            lambda name, item: arrays.update({name: item[...].tobytes()}) if hasattr(item, "dtype") else None
        )
    assert arrays
    return arrays


@pytest.mark.ranks(2)
def test_a_run_resumes_on_another_number_of_ranks(world, folder, text):
    sections = {
        "data": {"path": text, "record_ids": True},
        "model": GPT,
        "checkpoint": {"every": 5},
        "optim": {"schedule": "constant"},
    }
    alone = world.subgroup([world.rank])
    whole = run(alone, folder / f"alone-{world.rank}", train={"steps": 12, "batch": 6}, **sections)
    run(world, folder / "part", train={"steps": 5, "batch": 6}, **sections)
    mine = folder / f"go-on-{world.rank}"
    sections["checkpoint"] = {"resume": str(folder / "part"), "every": 0}
    rest = run(alone, mine, train={"steps": 12, "batch": 6}, **sections)
    assert [m["step"] for m in rest] == list(range(6, 13))
    assert [m["ids"] for m in rest] == [m["ids"] for m in whole[5:]]
    assert [m["loss"] for m in rest] == pytest.approx([m["loss"] for m in whole[5:]], rel=1e-5)
    alone.free()
