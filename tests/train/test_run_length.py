"""The length of a run in epochs, and the division of its batches by gradient accumulation steps."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
from train.jobs import run

from mpitrain.config.settings import Config
from mpitrain.data import open_dataset
from mpitrain.data.prepare import prepare
from mpitrain.monitor import read_metrics
from mpitrain.trainer.run import Callback
from mpitrain.trainer.trainer import Trainer

MODEL = {"name": "mlp", "layers": 1, "width": 8}
OPTIM = {"warmup": 2, "lr": 0.01}


@pytest.fixture(scope="module")
def table(world, tmp_path_factory) -> str:
    """A data set of rows with classes, the same for all ranks."""
    path = Path(world.broadcast_object(str(tmp_path_factory.mktemp("rows"))))
    if world.rank == 0:
        draw = np.random.default_rng(0)
        np.savez(path / "rows.npz", x=draw.standard_normal((90, 5)).astype(np.float32), y=np.arange(90) % 3)
        prepare([str(path / "rows.npz")], path / "data")
    world.barrier()
    return str(path / "data")


class StopAfter(Callback):
    """A callback that makes the run save and stop after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_update(self, trainer, step):
        if step.number == self._step:
            trainer.request_stop("the test wants it")


def stopped(world, folder, step, **sections):
    trainer = Trainer(Config.from_dict({"run": {"dir": str(folder)}} | sections), [StopAfter(step)], world=world)
    with trainer.working():
        assert trainer.train() == 75


@pytest.mark.ranks(1, 2)
def test_epochs_are_passes_over_the_samples_also_after_a_restart(world, folder, table):
    samples = len(open_dataset(table))
    batch = samples // 4
    steps = math.ceil(1.5 * samples / batch)
    train = {"epochs": 1.5, "batch": batch, "evaluate_samples": 2}
    sections = {"data": {"path": table, "record_ids": True}, "model": MODEL, "optim": OPTIM}
    lines = run(world, folder / "whole", train=train, **sections)
    assert len(lines) == steps
    assert len({number for line in lines for number in line["ids"]}) == samples
    assert [line["lr"] for line in lines] == [
        line["lr"] for line in run(world, folder / "steps", train={**train, "epochs": 0, "steps": steps}, **sections)
    ]
    stopped(world, folder / "cut", 2, train=train, **sections)
    again = run(world, folder / "cut", train=train, **sections)
    assert [line["loss"] for line in again] == [line["loss"] for line in lines]
    settings = Config.from_args([str(folder / "cut/config.toml")])
    assert settings.train.epochs == 1.5 and "steps" not in settings.train.model_fields_set
    stopped(world, folder / "smaller", 2, train=train, **sections)
    less = run(world, folder / "smaller", train={**train, "batch": batch // 2}, **sections)
    assert len(less) == 2 + math.ceil((1.5 * samples - 2 * batch) / (batch // 2))
    assert less[-1]["lr"] < 0.1 * OPTIM["lr"]  # the cosine is at its end


@pytest.mark.ranks(1, 2)
def test_accumulation_steps_are_microbatches_of_each_rank(world, folder, table):
    sections = {"data": {"path": table}, "model": MODEL, "optim": OPTIM}
    steps = {"steps": 2, "batch": 8, "evaluate_samples": 2}
    ours = run(world, folder / "own", train=steps | {"microbatch": 8 // world.size // 2}, **sections)
    theirs = run(world, folder / "theirs", train=steps | {"gradient_accumulation_steps": 2}, **sections)
    assert [line["loss"] for line in theirs] == [line["loss"] for line in ours]
    config = Config.from_dict({"train": steps | {"gradient_accumulation_steps": 2}, "run": {"dir": str(folder / "x")}})
    assert Trainer(config, world=world).config.train.microbatch == 4 // world.size
    assert "microbatch" not in Path(folder / "theirs/config.toml").read_text()
    assert len(read_metrics(folder / "theirs")) == 2


def test_resume_hint_names_the_script_that_started_the_run(tmp_path, forked):
    words = ["--train.steps", 1, "--model.sequence", 8, "--train.batch", 2, "--train.evaluate_samples", 1]
    for script, again in (("N=2 jobs/local.sh", "N=2 jobs/local.sh"), ("", "mpirun -n 1 python -m mpitrain.train")):
        known = {"MPITRAIN_AGAIN": script} if script else {}
        done = forked.run("train", *words, "--run.dir", f"run-{len(script)}", cwd=tmp_path, **known)
        assert done.returncode == 0, done.stderr
        assert f"{again} run-{len(script)}/config.toml --train.steps 2\n" in done.stdout, done.stdout
        assert (f"{sys.executable} -m mpitrain.report" in done.stdout) == bool(script)
