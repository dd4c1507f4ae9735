"""Runs that stop when the held-out loss no longer improves, and the best checkpoint, which is kept."""

from __future__ import annotations

import pytest
import torch
from train.jobs import run
from train.test_trainer import fit, settings

import mpitrain as mt
from mpitrain.checkpoint.contents import listing
from mpitrain.checkpoint.folders import finished_steps, marked_best
from mpitrain.checkpoint.manifest import read_manifest
from mpitrain.errors import EXIT_DONE, EXIT_REQUEUE, InputError
from mpitrain.monitor import read_metrics
from mpitrain.monitor.run_files import read_events
from mpitrain.trainer.stopping import Best


class FixedLosses(mt.Trainer):
    """A trainer with prescribed held-out losses, which are right on rank 0 only."""

    losses = (5.0, 4.0, 4.5, 3.0, 3.2, 2.95, 3.5, 4.0, 1.0, 1.0)

    def evaluate(self):
        super().evaluate()
        return self.losses[self.step - 1] + self.world.rank

    def say(self, text):
        vars(self).setdefault("lines", []).append(text)
        super().say(text)


def sections(text, folder, train=(), checkpoint=()):
    few = {"steps": 10, "evaluate_every": 1, "evaluate_samples": 3} | dict(train)
    return settings(text, folder, train=few, checkpoint={"every": 0, "keep": 1} | dict(checkpoint))


@pytest.mark.ranks(1, 2)
def test_early_stopping_ends_the_run_and_its_restart(world, folder, text):
    configuration = sections(text, folder / "r", {"patience": 3, "min_delta": 0.1})
    trainer = FixedLosses(configuration, world=world)
    assert fit(trainer) == EXIT_DONE and trainer.step == 7 and trainer.done
    (message,) = [line for line in trainer.lines if line.startswith("ending")]
    assert message == (
        "ending after step 7: held-out loss has not improved in 3 evaluations; the best was 3.0000 at step 4"
    )
    again = FixedLosses(configuration, world=world)
    assert fit(again) == EXIT_DONE and again.step == 7
    assert any("to continue, raise train.patience or set it to 0" in line for line in again.lines)
    assert fit(FixedLosses(sections(text, folder / "r", {"patience": 5, "min_delta": 0.1}), world=world)) == EXIT_DONE
    world.barrier()
    assert [m["step"] for m in read_metrics(folder / "r")] == [*range(1, 11)]  # step 9 was better than all
    outcomes = [e["outcome"] for e in read_events(folder / "r") if e["event"] == "end"]
    assert outcomes == ["done"] * 3


class StopAt(mt.Callback):
    def __init__(self, step):
        self.step = step

    def on_update(self, trainer, step):
        if step.number == self.step:
            trainer.request_stop("a test")


@pytest.mark.ranks(2)
def test_early_stopping_and_best_checkpoint_survive_a_restart(world, folder, text):
    configuration = sections(text, folder / "r", {"patience": 3, "min_delta": 0.1}, {"best": "held_out_loss"})
    first = FixedLosses(configuration, [StopAt(5)], world=world)
    assert fit(first) == EXIT_REQUEUE and first.step == 5
    assert finished_steps(folder / "r" / "checkpoints") == [5, 4]
    second = FixedLosses(configuration, world=world)
    assert fit(second) == EXIT_DONE and second.step == 7
    world.barrier()
    root = folder / "r" / "checkpoints"
    assert marked_best(folder / "r") == root / "step-00000006"  # without a margin
    assert finished_steps(root) == [7, 6]
    assert read_manifest(marked_best(folder / "r")).values["best_checkpoint"]["value"] == 2.95


@pytest.mark.ranks(1)
def test_best_checkpoint_is_not_pruned_and_is_listed(world, folder, text):
    run_dir = folder / "r"
    losses = (3.0, 2.0, 2.5, 2.6, 2.7, 2.8)

    class Falling(FixedLosses):
        pass

    Falling.losses = losses
    assert fit(Falling(sections(text, run_dir, {"steps": 6}, {"every": 1, "best": "loss"}), world=world)) == EXIT_DONE
    assert finished_steps(run_dir / "checkpoints") == [6, 2]
    assert (run_dir / "checkpoints" / "best").read_text() == "step-00000002\n"
    shown = list(listing(run_dir))
    assert shown[2].endswith("whole, best") and shown[1].endswith("whole")
    Falling.losses = (*losses, 1.9, 3.0)  # in another run that goes on from this one nothing is the best yet
    other = sections(text, folder / "s", {"steps": 8}, {"best": "loss", "resume": str(run_dir)})
    assert fit(Falling(other, world=world)) == EXIT_DONE
    assert marked_best(folder / "s").name == "step-00000007"


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("train", "checkpoint", "words"),
    [
        ({"patience": 2, "evaluate_every": 0}, {}, "train.evaluate_every 0 evaluates only at the end"),
        ({"patience": 2, "monitor": "acuracy"}, {}, "choose loss, perplexity, token_accuracy"),
        (
            {"metrics": ["train.own_metrics:without_direction"]},
            {"best": "without_direction"},
            "attribute higher_is_better",
        ),
    ],
)
def test_figures_that_cannot_be_compared_are_refused(world, folder, text, train, checkpoint, words):
    with pytest.raises(InputError, match=words):
        run(world, folder / "r", **{k: v for k, v in sections(text, folder, train, checkpoint).items() if k != "run"})
    assert not (folder / "r" / "checkpoints").exists() or not finished_steps(folder / "r" / "checkpoints")


def test_best_figure_and_its_saved_values():
    best = Best("accuracy")
    for step, value in enumerate((float("nan"), 0.5, 0.6, 0.55, float("inf")), 1):
        best = best.after(value, step, True)
    assert (best.value, best.step, best.waited) == (0.6, 3, 2)
    assert Best.of(best.saved_values(), "accuracy") == best and Best.of(best.saved_values(), "loss").step == 0
    assert torch.isnan(torch.tensor(Best.of(Best("loss").saved_values(), "loss").value))
