"""The trainer as a library: callbacks see every event, and each part of a step can be replaced without the others."""

from __future__ import annotations

import json

import pytest
import torch

import mpitrain as mt
from mpitrain.errors import EXIT_DONE, EXIT_REQUEUE, InputError
from mpitrain.monitor import read_metrics


def settings(text, folder, **sections):
    defaults = {
        "run": {"dir": str(folder)},
        "data": {"path": text},
        "model": {"layers": 1, "width": 16, "heads": 2, "sequence": 16},
        "train": {"steps": 4, "batch": 5, "evaluate_samples": 8},
        "checkpoint": {"every": 2},
    }
    return {name: defaults.get(name, {}) | sections.get(name, {}) for name in defaults | sections}


def fit(trainer):
    with trainer.working():
        return trainer.train()


class Notes(mt.Callback):
    """A callback that lists its calls and keeps a number in checkpoints."""

    def __init__(self):
        self.events, self.seen = [], 0

    def setup(self, trainer):
        self.events.append("setup")

    def on_restore(self, trainer, values):
        self.seen = values.get("seen", 0)
        self.events.append(f"restore {trainer.step}")

    def on_fit_start(self, trainer):
        self.events.append("start")

    def on_update(self, trainer, step):
        self.seen += 1
        self.events.append(f"update {step.number}")

    def on_evaluate(self, trainer, loss):
        self.events.append("evaluate")

    def on_step_end(self, trainer, step):
        step.extras["seen"] = self.seen
        self.events.append("end")

    def state(self, trainer):
        return {"seen": self.seen}

    def on_save(self, trainer, folder):
        self.events.append(f"save {folder.name[-1]}")

    def on_fit_end(self, trainer):
        self.events.append("finish")

    def on_exception(self, trainer, error):
        self.events.append(type(error).__name__)

    def teardown(self, trainer):
        self.events.append("teardown")


@pytest.mark.ranks(1, 2, 3)
def test_callbacks_get_every_event_and_their_state_is_saved(world, folder, text):
    notes = Notes()
    trainer = mt.Trainer(settings(text, folder / "r"), [notes], world=world)
    assert fit(trainer) == EXIT_DONE and trainer.step == 4 and trainer.position == 20
    first, second = ["update 1", "end", "update 2", "end", "save 2"], ["update 3", "end"]
    last = ["update 4", "evaluate", "end", "save 4", "finish", "teardown"]
    assert notes.events == ["setup", "restore 0", "start", *first, *second, *last]
    world.barrier()
    assert [m["seen"] for m in read_metrics(folder / "r")] == [1, 2, 3, 4]
    again = Notes()
    assert fit(mt.Trainer(settings(text, folder / "r", train={"steps": 5}), [again], world=world)) == EXIT_DONE
    assert again.events[:2] == ["setup", "restore 4"] and again.seen == 5


@pytest.mark.ranks(2)
def test_one_rank_can_request_a_stop_and_the_run_resumes(world, folder, text):
    class StopAt(mt.Callback):
        def on_update(self, trainer, step):
            if step.number == 3 and trainer.world.rank == 1:
                trainer.request_stop("rank 1 has seen enough")

    assert fit(mt.Trainer(settings(text, folder / "r"), [StopAt()], world=world)) == EXIT_REQUEUE
    assert fit(mt.Trainer(settings(text, folder / "r"), world=world)) == EXIT_DONE
    assert fit(mt.Trainer(settings(text, folder / "whole"), world=world)) == EXIT_DONE
    world.barrier()
    metrics = [[(m["step"], m["loss"]) for m in read_metrics(folder / name)] for name in ("r", "whole")]
    assert metrics[0] == metrics[1]


@pytest.mark.ranks(2)
def test_trainer_methods_can_be_overridden(world, folder, text):
    class MyTrainer(mt.Trainer):
        def make_optimizer(self, named):
            return torch.optim.SGD([parameter for _, parameter in named], lr=0.5)

        def train_step(self, batch):
            step = super().train_step(batch)
            step.extras["largest"] = float(batch.x.max())
            return step

        def evaluate(self):
            return super().evaluate() * 2

    path = folder / "mine.toml"
    if world.rank == 0:
        config = settings(text, folder / "r", train={"evaluate_every": 1})
        path.write_text("".join(f"[{name}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in keys.items())
                                for name, keys in config.items()))  # fmt: skip
    world.barrier()
    trainer = MyTrainer(path, world=world)
    assert fit(trainer) == EXIT_DONE
    assert isinstance(trainer.engine.optimizer, torch.optim.SGD)
    plain = mt.Trainer(settings(text, folder / "plain", train={"evaluate_every": 1}), world=world)
    assert fit(plain) == EXIT_DONE
    world.barrier()
    mine, theirs = read_metrics(folder / "r"), read_metrics(folder / "plain")
    assert mine[0]["loss"] == theirs[0]["loss"] and mine[2]["loss"] != theirs[2]["loss"]
    assert all("largest" in line for line in mine) and mine[0]["held_out_loss"] > 1.5 * mine[0]["loss"]


@pytest.mark.ranks(1, 2)
def test_a_settings_function_is_called_on_rank_0_only(world, folder, text):
    called = []

    def make_settings():
        called.append(world.rank)
        return settings(text, folder / "r", train={"steps": 2})

    trainer = mt.Trainer(make_settings, world=world)
    assert called == [0] * (world.rank == 0)
    assert (trainer.config.train.steps, trainer.config.model.width) == (2, 16)
    assert "steps" in trainer.config.train.model_fields_set  # as if the values themselves had been given
    assert fit(trainer) == EXIT_DONE and trainer.step == 2
    with pytest.raises(InputError, match=r"did you mean 'train\.steps'"):
        mt.Trainer(lambda: {"train": {"step": 1}}, world=world)


@pytest.mark.ranks(2)
def test_an_error_reaches_the_callbacks_and_unlocks_the_folder(world, folder, text):
    class Broken(mt.Trainer):
        def train_step(self, batch):
            raise ValueError("my own step is broken")

    notes = Notes()
    with pytest.raises(ValueError, match="my own step"):
        fit(Broken(settings(text, folder / "r"), [notes], world=world))
    assert notes.events[-2:] == ["ValueError", "teardown"]
    world.barrier()
    assert fit(mt.Trainer(settings(text, folder / "r"), world=world)) == EXIT_DONE
    with pytest.raises(InputError, match="steps"):
        mt.Trainer({"train": {"stpes": 3}}, world=world)


def test_the_public_names_are_listed():
    assert {"Callback", "Communicator", "Trainer", "init", "initialize"} <= set(dir(mt))
    assert set(dir(mt)) == set(mt.__all__) and all(getattr(mt, name) is not None for name in mt.__all__)
