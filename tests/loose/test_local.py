"""parallel.mode local computes what its papers say, whatever else the run does, and goes on as if not stopped."""

from __future__ import annotations

import pytest
import torch
from loose.replicas import Replicas
from torch.nn.utils import parameters_to_vector

import mpitrain as mt
from mpitrain.errors import EXIT_DONE, EXIT_REQUEUE
from mpitrain.loose.outer import make_outer
from mpitrain.monitor import read_metrics


def settings(text, folder, *, steps=8, batch=5, **sections):
    given = {
        "run": {"dir": str(folder)},
        "data": {"path": text},
        "model": {"layers": 2, "width": 16, "heads": 2, "sequence": 16},
        "train": {"steps": steps, "batch": batch, "evaluate_samples": 8, "clip": 0.7},
        "checkpoint": {"every": 0},
        "optim": {"name": "adamw", "lr": 0.01},
    }
    return {name: given.get(name, {}) | sections.get(name, {}) for name in given | sections}


def local(**keys):
    return {"mode": "local"} | keys


def fit(world, sections, *callbacks):
    """Train; returns the trainer and the lines of its metrics."""
    trainer = mt.Trainer(sections, callbacks, world=world)
    with trainer.working():
        code = trainer.train()
    world.barrier()
    lines = read_metrics(trainer.folder.path)
    world.barrier()
    return trainer, lines, code


def losses(lines):
    return [line["loss"] for line in lines]


@pytest.mark.ranks(2, 3)
def test_averaging_after_each_step_is_synchronous_training(world, folder, text):
    plain, expected, _ = fit(world, settings(text, folder / "sync"))
    averaged, found, _ = fit(world, settings(text, folder / "local", parallel=local(local_steps=1)))
    assert losses(found) == pytest.approx(losses(expected), rel=1e-5)
    assert [m["grad_norm"] for m in found] == pytest.approx([m["grad_norm"] for m in expected], rel=1e-4)
    assert found[-1]["held_out_loss"] == pytest.approx(expected[-1]["held_out_loss"], rel=1e-5)
    want, got = plain.engine.state_dict(), averaged.engine.state_dict()
    assert all(torch.allclose(want[name], got[name], rtol=1e-4, atol=1e-5) for name in want)


CASES = {
    "local SGD": ({"local_steps": 4}, {"name": "sgd", "lr": 0.1}),
    "AdamW, after synchronous steps": ({"local_steps": 3, "warm": 2}, {}),
    "DiLoCo": ({"local_steps": 2, "outer": "nesterov"}, {}),
    "one period late": ({"local_steps": 2, "overlap": True}, {}),
    "DiLoCo, one period late, a last short period": (
        {"local_steps": 3, "outer": "nesterov", "overlap": True, "warm": 1},
        {},
    ),
}


def check(world, sections, groups):
    """Train on ranks what one process trains with as many replicas."""
    trainer, lines, _ = fit(world, sections)
    replicas = Replicas(sections, groups)
    shared = replicas.train()
    assert losses(lines) == pytest.approx(replicas.losses, rel=2e-5)
    return trainer, shared


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", CASES)
def test_groups_average_what_they_trained_apart(world, folder, text, name):
    parallel, optim = CASES[name]
    trainer, shared = check(
        world, settings(text, folder / "r", parallel=local(**parallel), optim=optim), groups=world.size
    )
    found = parameters_to_vector(trainer.engine.module.parameters()).detach()
    assert torch.allclose(found, shared, rtol=1e-4, atol=2e-5)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_group_of_ranks_is_one_replica_at_every_stage_of_zero(world, folder, text, zero):
    parallel = local(local_steps=3, local_group=2, zero=zero, outer="nesterov", warm=1, overlap=zero == 2)
    check(world, settings(text, folder / "r", batch=9, parallel=parallel), groups=2)
