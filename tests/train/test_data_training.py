"""Masked prompts and mixes of data sets give the same training on any number of ranks and any mesh."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional
from train.jobs import run

from mpitrain.config.settings import Config
from mpitrain.data import open_dataset
from mpitrain.data.prepare import PrepareOptions, prepare
from mpitrain.errors import InputError
from mpitrain.loading import load_task
from mpitrain.models import build_model
from mpitrain.monitor import read_metrics
from mpitrain.monitor.run_files import summary
from mpitrain.trainer.held_out.measuring import evaluate_samples
from mpitrain.trainer.recording.records import figures_text
from mpitrain.trainer.run import Callback
from mpitrain.trainer.trainer import Trainer

STEPS, BATCH = 4, 7  # 7 samples divide by no number of ranks
GPT = {"layers": 2, "width": 16, "heads": 2, "sequence": 24}
CASES = {
    1: [{}, {"microbatch": 2}],
    2: [{"zero": 1, "microbatch": 2}, {"tensor": 2}, {"tensor": 2, "sequence": True}, {"pipeline": 2}],
    3: [{}, {"zero": 3, "microbatch": 1}],
}


@pytest.fixture(scope="module")
def place(world, tmp_path_factory):
    return Path(world.broadcast_object(str(tmp_path_factory.mktemp("data-training"))))


@pytest.fixture(scope="module")
def pairs(world, place):
    """Pairs of very different lengths, so that a mean over tokens and one over samples differ."""
    if world.rank == 0:
        source = place / "pairs.jsonl"
        records = [{"prompt": f"{i}+{i}=" + "?" * (i % 9), "completion": str(2 * i) * (1 + i % 3)} for i in range(300)]
        source.write_text("".join(f"{json.dumps(each)}\n" for each in records))
        options = PrepareOptions(prompt="prompt", completion="completion", pack=24)
        prepare([str(source)], place / "pairs", options=options)
    world.barrier()
    return str(place / "pairs")


def settings(data, parallel=(), **train):
    parallel = dict(parallel)
    train |= {"microbatch": parallel.pop("microbatch", 0)}
    return {
        "data": data,
        "model": GPT,
        "train": {"steps": STEPS, "batch": BATCH, "evaluate_samples": 5, **train},
        "checkpoint": {"every": 2, "keep": 9},
        "parallel": parallel,
    }


def loss_by_formula(config, data):
    """Return the loss in plain torch: the mean over samples of each sample's mean over its unmasked targets."""
    torch.manual_seed(config.run.seed)
    model = build_model(config.model, data.description).module
    x, y = data.read(data.order(config.run.seed).ids(0, BATCH))
    with torch.no_grad():
        scores = model(torch.from_numpy(x)).log_softmax(-1)
    each = []
    for sample, targets in zip(scores, y, strict=True):
        counted = [-sample[i, target].item() for i, target in enumerate(targets.tolist()) if target != -100]
        each.append(sum(counted) / len(counted))
    assert len({(targets != -100).sum() for targets in y}) > 1
    return sum(each) / len(each)


@pytest.mark.ranks(1, 2, 3)
def test_masked_losses_match_the_formula_on_any_number_of_ranks(world, place, pairs):
    alone = world.subgroup([0])
    reference = run(alone, place / "alone", **settings({"path": pairs})) if alone is not None else None
    reference = world.broadcast_object(reference)
    config = Config.from_dict(settings({"path": pairs}))
    formula = loss_by_formula(config, open_dataset(pairs, sequence=24))
    assert reference[0]["loss"] == pytest.approx(formula, rel=1e-5)
    for number, parallel in enumerate(CASES[world.size]):
        lines = run(world, place / f"masked-{world.size}-{number}", **settings({"path": pairs}, parallel))
        for key, rel in (("loss", 1e-5), ("grad_norm", 1e-4)):
            values, expected = ([line[key] for line in each] for each in (lines, reference))
            assert values == pytest.approx(expected, rel=rel), (parallel, key)
        assert lines[-1]["held_out_loss"] == pytest.approx(reference[-1]["held_out_loss"], rel=1e-5)


@pytest.mark.ranks(2)
def test_slices_of_masked_sequences_are_refused(world, place, pairs):
    with pytest.raises(InputError, match="slices 2 does not support data with masked targets"):
        run(world, place / "sliced", **settings({"path": pairs}, {"pipeline": 2, "slices": 2}))


@pytest.mark.ranks(1, 2, 3)
def test_mix_has_the_same_samples_on_any_number_of_ranks_and_after_restarts(world, place, text, pairs):
    exact = world.size != 3  # whose sums no other number of ranks can have
    options = settings({"mix": {text: 0.7, pairs: 0.3}, "record_ids": True}) | {"optim": {"schedule": "constant"}}

    def train(comm, folder, steps, **data):
        sections = options | {"train": options["train"] | {"steps": steps}, "data": options["data"] | data}
        sections["run"] = {"reproducible": exact, "workers": 4, "dir": str(place / folder)}
        return [[line["loss"], line["ids"]] for line in run(comm, place / folder, **sections)]

    alone = world.subgroup([0])
    reference = world.broadcast_object(train(alone, "mix-alone", STEPS) if alone is not None else None)
    folder = f"mix-{world.size}"
    train(world, folder, 2)
    results = train(world, folder, STEPS)
    assert [ids for _, ids in results] == [ids for _, ids in reference]
    losses, reference_losses = ([loss for loss, _ in each] for each in (results, reference))
    assert losses == reference_losses if exact else losses == pytest.approx(reference_losses, rel=1e-5)
    first = len(open_dataset(text, sequence=24))
    ids = np.concatenate([ids for _, ids in reference])
    assert abs((ids < first).sum() - 0.7 * len(ids)) < 1
    with pytest.raises(InputError, match=r"was trained on another data set than data\.mix"):
        train(world, folder, STEPS + 1, mix={text: 0.5, pairs: 0.5})


class WithoutParts(Callback):
    """A callback that evaluates a mix again, as a single data set."""

    def on_evaluate(self, trainer, loss):
        parts, trainer.held_out.parts = trainer.held_out.parts, lambda chosen: {}
        engine, meter = trainer.engine, trainer.meter
        self.loss = evaluate_samples(trainer.config, trainer.places, engine, trainer.held_out, meter)["loss"]
        trainer.held_out.parts = parts


@pytest.mark.ranks(2, 3)
def test_mix_has_a_held_out_loss_for_each_data_set(world, folder, text, pairs):
    for number, parallel in enumerate(CASES[world.size]):
        if "tensor" in parallel and "sequence" in parallel:
            continue
        sections = settings({"mix": {text: 0.7, pairs: 0.3}}, parallel, steps=1, evaluate_samples=11)
        sections["run"] = {"dir": str(folder / str(number))}
        sections["train"]["monitor"], sections["train"]["patience"] = f"held_out_loss of {pairs}", 3
        plain = WithoutParts()
        trainer = Trainer(Config.from_dict(sections), [plain], world=world)
        with trainer.working():
            assert trainer.train() == 0
        (line,) = read_metrics(folder / str(number))
        assert line["held_out_loss"] == plain.loss
        task, _ = load_task(folder / str(number))
        places, first = np.arange(11), len(open_dataset(text, "held_out", sequence=24))
        x, y = map(torch.from_numpy, trainer.held_out.read(ids := trainer.held_out.spread(places, 11)))
        for name, mask in {text: ids < first, pairs: ids >= first}.items():
            with torch.no_grad():
                expected = task.loss(task.module(x[mask]), y[mask]).item()
            assert 3 <= mask.sum() <= 8 and line[f"held_out_loss of {name}"] == pytest.approx(expected, rel=1e-5)
    assert f"held-out loss of {pairs}" in summary(folder / "0")
    assert f", loss of {text} " in figures_text(trainer.figures)


def test_fully_masked_sample_has_no_loss():
    from mpitrain.models.losses import MaskedCrossEntropy

    scores = torch.randn(3, 5, 11, requires_grad=True)
    y = torch.randint(11, (3, 5))
    y[0], y[1, 2:] = -100, -100
    loss = MaskedCrossEntropy()(scores, y)
    loss.backward()
    parts = [functional.cross_entropy(scores[1, :2], y[1, :2]), functional.cross_entropy(scores[2], y[2])]
    torch.testing.assert_close(loss, sum(parts) / 3)
    assert scores.grad[0].abs().sum() == 0
