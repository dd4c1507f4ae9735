"""The main job on a mesh: data x pipeline x tensor, with ZeRO, trains like one process; checkpoints fit any mesh."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from train.jobs import run

from mpitrain.config.settings import Config
from mpitrain.data import open_dataset
from mpitrain.data.prepare import prepare
from mpitrain.errors import InputError
from mpitrain.layout.mesh import Mesh
from mpitrain.models import build_model
from mpitrain.trainer.assemble import assemble
from mpitrain.trainer.optimizing import make_optimizer
from mpitrain.trainer.trainer import Trainer

STEPS, BATCH = 4, 12
GPT = {"layers": 4, "width": 32, "heads": 4, "sequence": 16}


@pytest.fixture(scope="module")
def place(world, tmp_path_factory):
    return Path(world.broadcast_object(str(tmp_path_factory.mktemp("mesh"))))


def settings(text, **parallel):
    precision, microbatch = parallel.pop("precision", "fp32"), parallel.pop("microbatch", 2)
    return {
        "data": {"path": text},
        "model": GPT,
        "train": {
            "steps": STEPS,
            "batch": BATCH,
            "microbatch": microbatch,
            "precision": precision,
            "evaluate_samples": 10,
        },
        "checkpoint": {"every": 2, "keep": 9},
        "parallel": parallel,
    }


@pytest.fixture(scope="module")
def expected(world, place, text):
    """Losses, gradient norms and held-out loss of one process."""
    alone = world.subgroup([0])
    lines = None
    if alone is not None:
        lines = run(alone, place / "alone", **settings(text))
        alone.free()
    return world.broadcast_object(lines)


def assert_equal_metrics(lines, expected, rel=1e-5):
    expected = expected[-len(lines) :]
    assert [m["loss"] for m in lines] == pytest.approx([m["loss"] for m in expected], rel=rel)
    assert [m["grad_norm"] for m in lines] == pytest.approx([m["grad_norm"] for m in expected], rel=max(rel, 1e-4))
    assert lines[-1]["held_out_loss"] == pytest.approx(expected[-1]["held_out_loss"], rel=rel)


CASES = {
    4: [
        {"pipeline": 2, "zero": 1, "schedule": "gpipe"},
        {"pipeline": 2, "zero": 2, "schedule": "interleaved", "chunks": 2},
        {"pipeline": 2, "zero": 3, "schedule": "zero-bubble"},
        {"tensor": 2, "zero": 1, "sequence": True},
        {"tensor": 4, "zero": 0},
        {"pipeline": 2, "tensor": 2, "cut": "time", "slices": 3},
        {"pipeline": 2, "slices": 4, "schedule": "interleaved", "chunks": 2},
        {"pipeline": 4, "cut": "parameters", "microbatch": 5},  # fewer microbatches than stages, the last one ragged
    ],
    8: [
        {"data": 2, "pipeline": 2, "tensor": 2, "zero": 1},
        {"data": 1, "pipeline": 4, "tensor": 2},
    ],
    3: [{"pipeline": 3}, {"pipeline": 3, "cut": "time", "slices": 2}],
    2: [{"pipeline": 2, "cut": [3, 5]}, {"tensor": 2}, {"pipeline": 2, "slices": 4}],
}


@pytest.mark.ranks(2, 3, 4, 8)
def test_meshes_train_like_one_process(world, place, text, expected):
    for number, parallel in enumerate(CASES[world.size]):
        lines = run(world, place / f"mesh-{number}", **settings(text, **parallel) | {"checkpoint": {"every": 0}})
        assert len(lines) == STEPS
        assert_equal_metrics(lines, expected)


@pytest.mark.ranks(4)
def test_checkpoints_can_be_loaded_on_other_meshes(world, place, text, expected):
    shapes = [{"pipeline": 2, "tensor": 2}, {"pipeline": 4}, {"zero": 2}, {"tensor": 2, "zero": 3}]
    for number, (source, target) in enumerate(zip(shapes, shapes[1:] + shapes[:1], strict=True)):
        first, then = place / f"source-{number}", place / f"target-{number}"
        sections = settings(text, **source)
        sections["train"]["steps"] = 2
        sections["optim"] = {"schedule": "constant"}
        run(world, first, **sections)
        sections = settings(text, **target)
        sections["optim"] = {"schedule": "constant"}
        sections["checkpoint"]["resume"] = str(first)
        lines = run(world, then, **sections)
        assert [m["step"] for m in lines] == [3, 4]
        sections = settings(text)
        sections["optim"] = {"schedule": "constant"}
        if number == 0:
            alone = world.subgroup([0])
            constant = run(alone, place / "constant", **sections) if alone is not None else None
            constant = world.broadcast_object(constant)
        assert_equal_metrics(lines, constant)


@pytest.mark.ranks(2)
def test_undivided_layers_train_and_are_saved_as_in_one_process(world, place, text, expected):
    whole = ["blocks.0.attention.*", "blocks.[13].mlp.*", "embedding", "head"]
    lines = run(world, place / "whole", **settings(text, tensor=2, whole=whole))
    assert len(lines) == STEPS
    assert_equal_metrics(lines, expected)
    assert [m["grad_norm"] for m in lines] == pytest.approx([m["grad_norm"] for m in expected], rel=1e-5)
    sections = settings(text)
    sections["checkpoint"]["resume"] = str(place / "whole/checkpoints/step-00000002")
    lines = run(world, place / "whole-read", **sections)
    assert [m["step"] for m in lines] == [3, 4]
    assert_equal_metrics(lines, expected)


@pytest.mark.ranks(2)
def test_a_job_plans_its_layout_at_the_start(world, place, text, capsys):
    if world.rank == 0:
        (place / "two.toml").write_text(
            'node = { cores = 2, memory = "8 GiB", memory_bandwidth = "10 GB/s" }\n'
            'core.matrix = { fp32 = "50 Gflop/s" }\n'
        )
    world.barrier()
    sections = settings(text, auto=True, machine=str(place / "two.toml"), tensor=1, schedule="gpipe")
    capsys.readouterr()
    lines = run(world, place / "planned", **sections)
    output = capsys.readouterr().out
    chosen = Config.from_args([str(place / "planned/config.toml")]).parallel
    assert (chosen.auto, chosen.tensor, chosen.schedule) == (False, 1, "gpipe") and chosen.data in (1, 2)
    assert world.rank or f"parallel.auto: {chosen.data}x{chosen.pipeline}x1" in output
    by_hand = settings(text, data=chosen.data, pipeline=chosen.pipeline, zero=chosen.zero, schedule="gpipe")
    assert [m["loss"] for m in lines] == [m["loss"] for m in run(world, place / "by-hand", **by_hand)]
    sections["parallel"]["zero"], sections["parallel"]["pipeline"] = 1, 2  # there is nothing to share out
    with pytest.raises(
        InputError, match=r"no layout of 2 ranks with .*parallel.zero 1.*; remove some of these settings"
    ):
        Trainer(Config.from_dict(sections), world=world)


@pytest.mark.ranks(4)
def test_sixteen_bit_meshes_learn_like_fp32(world, place, text, expected):
    shape = {"pipeline": 2, "tensor": 2, "precision": "bf16", "zero": 1}
    lines = run(world, place / "bf16", **settings(text, **shape))
    assert [m["loss"] for m in lines] == pytest.approx([m["loss"] for m in expected], rel=0.01)


SLOW = {"factory": "train.odd_models:slow_in_the_middle", "sequence": 16}


def assembled(world, sections):
    """Return the engine of a configuration, without training it."""
    config = Config.from_dict(sections)
    data = open_dataset(config.data.path, sequence=config.model.sequence)
    torch.manual_seed(config.run.seed)
    task = build_model(config.model, data.description)
    mesh = Mesh.make(world, "auto", config.parallel.pipeline, config.parallel.tensor)
    return assemble(config, mesh, task, data, partial(make_optimizer, config.optim))[0]


@pytest.mark.ranks(4)
def test_measured_stages_agree_on_all_ranks_and_resume_from_another_cut(world, place, text):
    measured = settings(text, pipeline=2, cut="time") | {"model": SLOW}
    engine = assembled(world, measured)
    bounds = world.all_gather_object(list(engine.pipeline.bounds))
    assert bounds == [[0, 2, 7]] * world.size  # block 1 takes longer than the five after it
    engine.close()
    whole, first, then = place / "slow", place / "slow-uniform", place / "slow-measured"
    constant = {"model": SLOW, "optim": {"schedule": "constant"}}
    reference = run(world, whole, **settings(text) | constant)
    part = settings(text, pipeline=2) | constant
    part["train"]["steps"] = 2
    run(world, first, **part)
    measured = settings(text, pipeline=2, cut="time") | constant
    measured["checkpoint"]["resume"] = str(first)
    lines = run(world, then, **measured)
    assert [m["step"] for m in lines] == [3, 4]
    assert_equal_metrics(lines, reference)


@pytest.fixture(scope="module")
def numbers(world, place):
    """Arrays of 90 samples with three classes."""
    path = place / "numbers"
    if world.rank == 0:
        source = place / "arrays"
        source.mkdir()
        generator = np.random.default_rng(5)
        y = generator.integers(0, 3, 90)
        np.save(source / "x.npy", (generator.random((90, 5, 3)) + y[:, None, None] / 3).astype(np.float32))
        np.save(source / "y.npy", y)
        prepare([str(source / "x.npy"), str(source / "y.npy")], path)
    world.barrier()
    return str(path)


@pytest.mark.parametrize(
    "layers", [pytest.param(2, marks=pytest.mark.ranks(2)), pytest.param(3, marks=pytest.mark.ranks(2, 4))]
)
def test_perceptrons_are_divided_over_tensor_ranks(world, place, numbers, layers):
    def sections(**parallel):
        return settings(numbers, **parallel) | {"model": {"name": "mlp", "layers": layers, "width": 18}}

    alone = world.subgroup([0])
    reference = run(alone, place / f"mlp-{layers}", **sections()) if alone is not None else None
    reference = world.broadcast_object(reference)
    lines = run(world, place / f"mlp-{layers}-mesh", **sections(tensor=2, pipeline=world.size // 2))
    assert_equal_metrics(lines, reference)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("model", "parallel", "message"),
    [
        (GPT, {"pipeline": 2, "slices": 17}, "cannot be divided into 17 slices"),
        (GPT, {"pipeline": 2, "slices": 2, "schedule": "zero-bubble"}, "parallel.schedule to gpipe, 1f1b"),
        (SLOW, {"pipeline": 2, "slices": 2}, "Sequential has none; set parallel.slices to 1"),
        ({"factory": "train.odd_models:looks_ahead", "sequence": 16}, {"pipeline": 2, "slices": 2}, "block 1 .Mixes.*"),
        (
            GPT,
            {"pipeline": 2, "tensor": 2, "slices": 2, "sequence": True},
            "sequence cannot be combined with parallel.slices",
        ),
        (GPT, {"pipeline": 2, "zero": 3, "share_node": False}, "twice for every microbatch"),
        (GPT, {"pipeline": 2, "cut": [4, 3, 1]}, r"parallel.cut \[4, 3, 1\] is for 3 stages, but there are 2 .*give 2"),
        (GPT, {"pipeline": 2, "cut": [4, 3]}, r"parallel.cut \[4, 3\] lists 7 blocks, but the model has 8, and"),
        (
            GPT,
            {"cut": [8]},
            r"parallel.cut \[8\] is for the stages of a pipeline, .* parallel.pipeline is 1; raise",
        ),
        (GPT, {"tensor": 2, "whole": ["head"]}, "parallel.whole names head but not embedding, which share a weight"),
        ({"name": "mlp", "width": 18}, {"pipeline": 2, "slices": 2}, "MLP has none; set parallel.slices to 1"),
        ({"name": "mlp", "width": 18}, {"tensor": 2, "sequence": True}, "the plan of MLP names no embedding"),
        ({"name": "resnet", "layers": 18, "width": 4}, {"tensor": 2}, "convolutions"),
    ],
)
def test_incompatible_settings_are_refused_by_name(world, text, numbers, model, parallel, message):
    path = numbers if model.get("name") in ("mlp", "resnet") else text
    with pytest.raises(InputError, match=message) as refused:
        assembled(world, settings(path, **parallel) | {"model": model})
    assert refused.value.agreed


@pytest.mark.ranks(2)
def test_zero_3_without_data_parallel_ranks_keeps_the_stages_parameters(world, place, text, expected):
    lines = run(world, place / "own", **settings(text, pipeline=2, zero=3, share_node=False))
    assert_equal_metrics(lines, expected)
