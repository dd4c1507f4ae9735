"""The main job on a mesh: data x pipeline x tensor, with ZeRO, trains like one process; checkpoints fit any mesh."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from train.jobs import run

from mpitrain.data.prepare import prepare

STEPS, BATCH = 6, 12
GPT = {"layers": 4, "width": 32, "heads": 4, "sequence": 16}


@pytest.fixture(scope="module")
def place(world, tmp_path_factory):
    return Path(world.broadcast_object(str(tmp_path_factory.mktemp("mesh"))))


@pytest.fixture(scope="module")
def text(world, place):
    path = place / "text"
    if world.rank == 0:
        prepare([str(Path(torch.__file__).with_name("functional.py"))], path)
    world.barrier()
    return str(path)


def settings(text, **parallel):
    precision = parallel.pop("precision", "fp32")
    return {
        "data": {"path": text},
        "model": GPT,
        "train": {"steps": STEPS, "batch": BATCH, "microbatch": 2, "precision": precision, "evaluate_samples": 20},
        "checkpoint": {"every": 3, "keep": 9},
        "parallel": parallel,
    }


@pytest.fixture(scope="module")
def wanted(world, place, text):
    """Losses, gradient norms and held-out loss of one process."""
    alone = world.subgroup([0])
    lines = None
    if alone is not None:
        lines = run(alone, place / "alone", **settings(text))
        alone.free()
    return world.broadcast_object(lines)


def check(lines, wanted, rel=1e-5):
    wanted = wanted[-len(lines) :]
    assert [m["loss"] for m in lines] == pytest.approx([m["loss"] for m in wanted], rel=rel)
    assert [m["grad_norm"] for m in lines] == pytest.approx([m["grad_norm"] for m in wanted], rel=max(rel, 1e-4))
    assert lines[-1]["held_out_loss"] == pytest.approx(wanted[-1]["held_out_loss"], rel=rel)


CASES = {
    4: [
        {"pipeline": 2, "tensor": 2},
        {"pipeline": 2, "zero": 1},
        {"pipeline": 2, "zero": 2, "schedule": "interleaved", "chunks": 2},
        {"pipeline": 2, "zero": 3, "schedule": "zero-bubble"},
        {"tensor": 2, "zero": 1, "sequence": True},
        {"tensor": 4, "zero": 0},
    ],
    8: [
        {"data": 2, "pipeline": 2, "tensor": 2, "zero": 1},
        {"data": 1, "pipeline": 4, "tensor": 2},
        {"data": 4, "pipeline": 1, "tensor": 2, "zero": 2},
        {"data": 2, "pipeline": 4, "tensor": 1, "zero": 1, "schedule": "gpipe"},
        {"data": 8, "zero": 3},
    ],
    3: [{"pipeline": 3}],
    2: [{"pipeline": 2}, {"tensor": 2}],
}


@pytest.mark.ranks(2, 3, 4, 8)
def test_meshes_train_like_one_process(world, place, text, wanted):
    for number, parallel in enumerate(CASES[world.size]):
        lines = run(world, place / f"mesh-{number}", **settings(text, **parallel))
        assert len(lines) == STEPS
        check(lines, wanted)


@pytest.mark.ranks(4)
def test_checkpoints_go_from_mesh_to_mesh(world, place, text, wanted):
    shapes = [{"pipeline": 2, "tensor": 2}, {"pipeline": 4}, {"zero": 2}, {"tensor": 2, "zero": 3}]
    for number, (source, target) in enumerate(zip(shapes, shapes[1:] + shapes[:1], strict=True)):
        first, then = place / f"source-{number}", place / f"target-{number}"
        sections = settings(text, **source)
        sections["train"]["steps"] = 3
        sections["optim"] = {"schedule": "constant"}
        run(world, first, **sections)
        sections = settings(text, **target)
        sections["optim"] = {"schedule": "constant"}
        sections["checkpoint"]["resume"] = str(first)
        lines = run(world, then, **sections)
        assert [m["step"] for m in lines] == [4, 5, 6]
        sections = settings(text)
        sections["optim"] = {"schedule": "constant"}
        if number == 0:
            alone = world.subgroup([0])
            constant = run(alone, place / "constant", **sections) if alone is not None else None
            constant = world.broadcast_object(constant)
        check(lines, constant)


@pytest.mark.ranks(4)
def test_sixteen_bit_meshes_learn_like_fp32(world, place, text, wanted):
    shape = {"pipeline": 2, "tensor": 2, "precision": "bf16", "zero": 1}
    lines = run(world, place / "bf16", **settings(text, **shape))
    assert [m["loss"] for m in lines] == pytest.approx([m["loss"] for m in wanted], rel=0.01)
