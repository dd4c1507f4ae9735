"""Runs with a user's schedule, kind of data, optimizer and callback (`extensions.py`)."""

from __future__ import annotations

import inspect

import extensions
import pytest
from support import ROOT, one_line

import mpitrain as mt
from mpitrain.data.prepare import prepare
from mpitrain.errors import InputError
from mpitrain.monitor import read_metrics
from mpitrain.pipe.schedule import make_schedule
from mpitrain.pipe.simulate import verify, with_messages


def fit(world, config, callbacks=()):
    trainer = mt.Trainer(config, callbacks, world=world)
    with trainer.working():
        assert trainer.train() == 0
    world.barrier()
    return trainer


@pytest.mark.ranks(2)
def test_user_defined_data_optimizer_schedule_and_callback_train_a_model(world, folder):
    if world.rank == 0:
        extensions.write_numbers(folder / "points.numbers")
        kind = extensions.lines_of_numbers()
        prepare([str(folder / "points.numbers")], folder / "points", held_out=0.25, more=[kind])
    world.barrier()
    config = {
        "run": {"dir": str(folder / "r")},
        "data": {"path": str(folder / "points")},
        "model": {"name": "mlp", "layers": 4, "width": 16},
        "train": {"steps": 12, "batch": 16, "evaluate_every": 3, "evaluate_samples": 16},
        "optim": {"name": "extensions:SignDescent", "lr": 0.01, "schedule": "constant", "warmup": 0},
        "checkpoint": {"every": 6},
    }
    best = extensions.Best()
    trainer = fit(world, config, [best])
    assert isinstance(trainer.engine.optimizer, extensions.SignDescent)
    first_losses = [line["loss"] for line in read_metrics(folder / "r")]
    assert first_losses[-1] < first_losses[0] and best.best == min(
        line["held_out_loss"] for line in read_metrics(folder / "r") if "held_out_loss" in line
    )
    again = extensions.Best()
    fit(world, config | {"train": config["train"] | {"steps": 13, "evaluate_every": 0}}, [again])
    assert again.best <= best.best
    piped = config | {"run": {"dir": str(folder / "p")}}
    piped["parallel"] = {"pipeline": 2, "zero": 0, "schedule": "extensions:one_by_one"}
    fit(world, piped)
    losses = [line["loss"] for line in read_metrics(folder / "p")]
    assert losses[0] == pytest.approx(first_losses[0], rel=1e-5) and losses[-1] < losses[0]


def test_the_user_defined_schedule_is_verified():
    for ranks in (1, 2, 4):
        for microbatches in (1, 3, 8):
            verify(with_messages(extensions.one_by_one(ranks, microbatches, 1)))


def test_each_extension_takes_less_than_thirty_lines():
    for extension in (extensions.one_by_one, extensions.lines_of_numbers, extensions.SignDescent, extensions.Best):
        assert len(inspect.getsource(extension).splitlines()) < 30


def test_a_missing_extension_is_refused_in_one_line(tmp_path, forked):
    with pytest.raises(InputError, match=r"parallel.schedule extensions:nothing: .* has no function 'nothing'"):
        make_schedule("extensions:nothing", 2, 2)
    arguments = ("--optim.name", "extensions:nothing", "--run.dir", "r")
    done = forked.run("train", *arguments, cwd=tmp_path, PYTHONPATH=str(ROOT / "tests"))
    one_line(done, "optim.name extensions:nothing: ")
