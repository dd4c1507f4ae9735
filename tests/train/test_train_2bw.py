"""Training with parallel.schedule 2bw: delayed gradients, checkpoints with two versions of the weights, refusals."""

from __future__ import annotations

import pytest
import torch

import mpitrain as mt
from mpitrain.config.settings import Config
from mpitrain.errors import InputError
from mpitrain.parallel.rules import rules_of


def settings(folder, text, steps=6, dropout=0.0, **parallel):
    return {
        "run": {"dir": str(folder)},
        "data": {"path": text},
        "model": {"layers": 4, "width": 32, "heads": 4, "sequence": 16, "dropout": dropout},
        "train": {"steps": steps, "batch": 16, "microbatch": 2},
        "checkpoint": {"every": 0},
        "parallel": {"zero": 0, "schedule": "2bw"} | parallel,
    }


class Losses(mt.Callback):
    def __init__(self):
        self.losses = []

    def on_step_end(self, trainer, step):
        self.losses.append(step.loss)


class Drained(mt.Trainer):
    """Trainer that begins no step early, because it might change the batch."""

    def train_step(self, batch):
        return super().train_step(batch)


class Delayed(mt.Trainer):
    """Trainer of a whole model that computes gradients with the weights before the last step, by copying."""

    previous = None

    def train_step(self, batch):
        parameters, engine = list(self.engine.module.parameters()), self.engine
        newest = [p.detach().clone() for p in parameters]
        update = type(engine).step

        def put(values):
            with torch.no_grad():
                for p, value in zip(parameters, values, strict=True):
                    p.copy_(value)

        def step(lr):
            put(newest)
            return update(engine, lr)

        engine.step = step
        put(self.previous or newest)
        self.previous = newest
        return super().train_step(batch)


def train(world, config, kind=mt.Trainer):
    """Train, and return the losses, this rank's weights by name and the memory account."""
    recorded = Losses()
    trainer = kind(Config.from_dict(config), [recorded], world=world)
    with trainer.working():
        trainer.train()
        named = trainer.engine.module.named_parameters(remove_duplicate=False)
        weights = {name: p.detach().clone() for name, p in named}
        account = trainer.engine.memory()
    return recorded.losses, weights, account


@pytest.mark.ranks(2, 4)
def test_a_run_equals_one_that_applies_the_delayed_rule_to_the_whole_model(world, folder, text):
    losses, weights, account = train(world, settings(folder / "2bw", text, pipeline=2))
    expected, whole, _ = train(world, settings(folder / "whole", text), Delayed)
    exact, _, once = train(world, settings(folder / "1f1b", text, pipeline=2, schedule="1f1b"))
    assert losses == pytest.approx(expected, rel=0, abs=1e-6)
    for name, value in weights.items():
        torch.testing.assert_close(value, whole[name], rtol=0, atol=2e-5)
    assert losses[0] == exact[0] and losses[2:] != pytest.approx(exact[2:], rel=0, abs=1e-6)
    assert account.parameters == account.expected["parameters"] == 2 * once.parameters


@pytest.mark.ranks(2)
def test_a_resumed_run_equals_one_without_interruption_bit_by_bit(world, folder, text):
    whole, weights, _ = train(world, settings(folder / "whole", text, dropout=0.1, pipeline=2))
    drained, _, _ = train(world, settings(folder / "drained", text, dropout=0.1, pipeline=2), Drained)
    config = settings(folder / "parts", text, dropout=0.1, pipeline=2)
    stop = Stop(3)
    trainer = mt.Trainer(Config.from_dict(config), [stop], world=world)
    assert trainer.fit() == 75
    rest, resumed, _ = train(world, config)
    assert whole == drained == stop.losses + rest
    assert all(torch.equal(value, resumed[name]) for name, value in weights.items())


class Stop(Losses):
    def __init__(self, after):
        super().__init__()
        self.after = after

    def on_update(self, trainer, step):
        if step.number == self.after:
            trainer.request_stop("as the test wants it")


@pytest.mark.ranks(2)
def test_a_run_of_another_schedule_continues_with_2bw(world, folder, text):
    train(world, settings(folder / "run", text, steps=3, pipeline=2, schedule="1f1b"))
    losses, _, _ = train(world, settings(folder / "run", text, steps=6, pipeline=2))
    assert len(losses) == 3


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("section", "values", "why"),
    [
        ("parallel", {"zero": 1}, r"2bw keeps two versions of the weights, which does not work with parallel.zero 1"),
        ("train", {"precision": "bf16"}, r"does not work with train.precision bf16; change it"),
    ],
)
def test_conflicts_are_one_line(world, folder, text, section, values, why):
    config = settings(folder / "run", text, pipeline=2)
    config[section] |= values
    with pytest.raises(InputError, match=why):
        mt.Trainer(Config.from_dict(config), world=world).fit()


def test_the_planner_refuses_it():
    with pytest.raises(InputError, match=r"the planner compares layouts that train alike"):
        rules_of(Config.from_dict({"parallel": {"schedule": "2bw"}}))
