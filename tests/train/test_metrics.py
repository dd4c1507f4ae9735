"""Metrics of held-out samples equal scikit-learn's, count each sample once, on any ranks and layout."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional
from train.jobs import run

from mpitrain import report
from mpitrain.config.settings import Config
from mpitrain.data import open_dataset
from mpitrain.data.prepare import prepare
from mpitrain.errors import InputError
from mpitrain.models.build import build_model
from mpitrain.models.metrics import (
    R2,
    RMSE,
    Accuracy,
    Confusion,
    Perplexity,
    TopAccuracy,
    compare_targets,
    measure_of_classes,
)
from mpitrain.monitor.run_files import read_events
from mpitrain.tensor import Axis
from mpitrain.tensor.vocabulary import evaluate_scores, gather_scores
from mpitrain.trainer.trainer import Trainer

GPT = {"layers": 2, "width": 16, "heads": 2, "sequence": 16}
NAMED = {
    "classes": ["f1", "f1_macro", "f1_micro", "precision", "recall", "per_class", "auroc", "accuracy"],
    "numbers": ["rmse", "r2"],
}
OWN = ["train.own_metrics:margin", "train.own_metrics:mean_margin"]


@pytest.fixture(scope="module")
def place(world, tmp_path_factory):
    return Path(world.broadcast_object(str(tmp_path_factory.mktemp("metrics"))))


@pytest.fixture(scope="module")
def arrays(world, place):
    """Data sets of classes and of numbers."""
    if world.rank == 0:
        draw = np.random.default_rng(0)
        x = draw.standard_normal((300, 6)).astype(np.float32)
        targets = {"classes": (x[:, 0] > 0) + 2 * (x[:, 1] > 0.5).astype(int), "numbers": (x[:, :2] * 3 + 5)}
        for name, y in targets.items():
            (place / name).mkdir()
            np.save(place / name / "x.npy", x)
            np.save(place / name / "y.npy", y if name == "classes" else y.astype(np.float32))
            prepare([str(place / name)], place / f"{name}-data")
    world.barrier()
    return {name: str(place / f"{name}-data") for name in ("classes", "numbers")}


def trained(comm, folder, **sections):
    """Train and return the trainer."""
    trainer = Trainer(Config.from_dict({"run": {"dir": str(folder)}} | sections), world=comm)
    with trainer.working():
        assert trainer.train() == 0
    return trainer


def by_scikit_learn(scores, y, names):
    """Return the metrics of a classification by scikit-learn, by name."""
    from sklearn import metrics

    guess, labels, figures = scores.argmax(1), list(range(len(names))), {}
    kinds = {"f1": metrics.f1_score, "precision": metrics.precision_score, "recall": metrics.recall_score}
    for name, score in kinds.items():
        figures[name] = score(y, guess, average="macro", zero_division=0)
        each = score(y, guess, labels=labels, average=None, zero_division=0)
        figures |= {f"{name} of {class_name}": value for class_name, value in zip(names, each, strict=True)}
    figures["f1_macro"], figures["f1_micro"] = figures["f1"], metrics.f1_score(y, guess, average="micro")
    chances = scores.double().softmax(1)
    areas = {n: metrics.roc_auc_score(y == n, chances[:, n]) for n in labels if 0 < (y == n).sum() < len(y)}
    figures |= {f"auroc of {names[n]}": area for n, area in areas.items() if len(names) > 2}
    return figures | {"auroc": sum(areas.values()) / len(areas) if len(names) > 2 else areas[1]}


def held(lines):
    return {name.removeprefix("held_out_"): value for name, value in lines[-1].items() if name.startswith("held_out_")}


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("task", ["classes", "numbers"])
def test_figures_are_those_of_scikit_learn_for_all_samples_at_once(world, folder, arrays, task, capsys):
    from sklearn.metrics import accuracy_score, r2_score, root_mean_squared_error

    sections = {
        "data": {"path": arrays[task]},
        "model": {"name": "mlp", "layers": 1, "width": 8},
        "train": {"steps": 6, "batch": 7, "microbatch": 2, "evaluate_samples": 11, "metrics": OWN + NAMED[task]},
        "optim": {"lr": 0.05, "warmup": 0},
        "parallel": {"zero": world.size if world.size < 3 else 3},
    }
    trainer = trained(world, folder / task, **sections)
    data = open_dataset(arrays[task], "held_out")
    x, y = map(torch.from_numpy, data.read(np.arange(11) * len(data) // 11))
    with trainer.engine.sharding.parameters.unshard_all(), torch.no_grad():
        output = trainer.engine.module.eval()(x)
    figures = trainer.figures
    if task == "classes":
        assert figures["accuracy"] == pytest.approx(accuracy_score(y, output.argmax(1)), abs=1e-12)
        assert figures["loss"] == pytest.approx(functional.cross_entropy(output, y).item(), rel=1e-6)
        assert figures["accuracy"] > 0.3
        names = open_dataset(arrays[task]).description.classes
        for name, value in by_scikit_learn(output, y, names).items():
            assert figures[name] == pytest.approx(value, abs=1e-12), name
    else:
        assert figures["r2"] == pytest.approx(r2_score(y, output), rel=1e-5)
        assert figures["rmse"] == pytest.approx(root_mean_squared_error(y, output), rel=1e-5)
    margin = (output.amax(1) - output.mean(1)).mean().item()
    assert figures["margin"] == pytest.approx(margin, rel=1e-6) == figures["mean_margin"]
    if world.rank == 0:
        (event,) = [e for e in read_events(folder / task) if e["event"] == "evaluate"]
        assert {"loss": event["loss"], **event["metrics"]} == figures
        ((start,), closing) = [e for e in read_events(folder / task) if e["event"] == "start"], capsys.readouterr().out
        assert start["loss_unit"] == {"classes": "nats", "numbers": "squared error"}[task]
        assert report.main([str(folder / task)]) == 0
        rate = re.compile(r"[\d.k]+ samples/s.*")  # of the time in steps, without that of the start and of evaluating
        assert rate.findall(closing)[-1:] == rate.findall(capsys.readouterr().out) != []


LAYOUTS = {
    2: [
        {"tensor": 2, "sequence": True},
        {"pipeline": 2, "slices": 2},
    ],
    3: [{"mode": "server", "servers": 1}],
    4: [{"tensor": 2, "pipeline": 2}],
}
MORE = {
    2: [{"mode": "local", "local_steps": 1}, {"mode": "server", "servers": 0}],
    3: [{"tensor": 3}],
    4: [{"zero": 3}],
}


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("layouts", [LAYOUTS, pytest.param(MORE, marks=pytest.mark.campaign)], ids=["few", "more"])
def test_layouts_measure_what_one_rank_does(world, place, text, layouts):
    sections = {
        "data": {"path": text},
        "model": GPT | ({"heads": 3, "width": 18} if world.size == 3 else {}),
        "train": {"steps": 2, "batch": 5, "evaluate_samples": 11, "metrics": OWN},
        "optim": {"warmup": 0},
        "checkpoint": {"every": 0},
    }
    alone = world.subgroup([0])
    reference = held(run(alone, place / "alone", **sections)) if alone is not None else None
    reference = world.broadcast_object(reference)
    assert set(reference) == {"loss", "perplexity", "token_accuracy", "margin", "mean_margin"}
    assert reference["perplexity"] == pytest.approx(math.exp(reference["loss"]), rel=1e-6)
    for number, parallel in enumerate(layouts[world.size]):
        bulk = {"staleness": 0} if parallel.get("mode") == "server" else {}
        lines = run(world, place / f"layout-{number}", **sections, parallel=parallel | bulk)
        assert held(lines) == pytest.approx(reference, rel=1e-5), parallel


@pytest.mark.ranks(2)
def test_a_model_measures_itself_also_where_a_pipeline_ends(world, folder, arrays):
    sections = {
        "data": {"path": arrays["classes"]},
        "model": {"factory": "train.own_metrics:with_metrics"},
        "train": {"steps": 3, "batch": 3, "evaluate_samples": 9},
    }
    for pipeline in (1, 2):
        figures = held(run(world, folder / f"p{pipeline}", **sections, parallel={"pipeline": pipeline}))
        assert set(figures) == {"loss", "accuracy", "off", "largest"}
        assert figures["off"] == pytest.approx(1 - figures["accuracy"], abs=1e-7)


@pytest.mark.ranks(2)
def test_virtual_workers_give_the_same_bits_on_one_rank_and_on_two(world, folder, arrays):
    sections = {
        "data": {"path": arrays["numbers"]},
        "model": {"name": "mlp", "layers": 1, "width": 8},
        "train": {"steps": 2, "batch": 8, "evaluate_samples": 21},
    }
    figures = []
    for name, comm in ((f"alone-{world.rank}", world.subgroup([world.rank])), ("all", world)):
        run_settings = {"dir": str(folder / name), "reproducible": True, "workers": 4}
        trainer = Trainer(Config.from_dict(sections | {"run": run_settings}), world=comm)
        with trainer.working():
            assert trainer.train() == 0
        figures.append(trainer.figures)
    assert figures[0] == figures[1] and set(figures[0]) == {"loss", "r2"}


@pytest.mark.ranks(1, 2, 3)
def test_divided_scores_are_judged_as_whole_ones(world):
    axis, draw = Axis(world), torch.Generator().manual_seed(3)
    scores, y = torch.randn(4, 5, 11, generator=draw), torch.randint(11, (4, 5), generator=draw)
    y[1, 2] = -100
    bounds = axis.bounds(11)
    part = scores[..., bounds[world.rank] : bounds[world.rank + 1]]
    expected = compare_targets(scores, y, top=True)
    nats, guess, above = evaluate_scores(part, y, axis, 11, top=True)
    counted = expected.counted
    assert torch.allclose(nats[counted].float(), expected.nats[counted], atol=1e-6)
    assert torch.equal(guess, expected.guess) and torch.equal(above[counted], expected.above[counted])
    assert torch.equal(gather_scores(part, axis, 11), scores)
    axis.free()


def test_sums_of_parts_come_to_the_formulas():
    from sklearn.metrics import accuracy_score, confusion_matrix, r2_score, root_mean_squared_error

    draw = torch.Generator().manual_seed(0)
    scores, y = torch.randn(40, 7, generator=draw) * 2, torch.randint(7, (40,), generator=draw)
    y[5], counted = -100, torch.arange(40) != 5
    best = scores.topk(5).indices

    def value(metric):
        return metric.value(sum(metric.sums(scores[lo : lo + 9], y[lo : lo + 9]) for lo in range(0, 40, 9)))

    assert value(Accuracy(7)) == pytest.approx(accuracy_score(y[counted], scores.argmax(1)[counted]))
    assert value(TopAccuracy(7)) == pytest.approx((best == y[:, None]).any(1)[counted].double().mean().item())
    assert value(Perplexity(7)) == pytest.approx(functional.cross_entropy(scores, y).exp().item(), rel=1e-6)
    sums = Confusion(7).sums(scores, y)
    assert np.array_equal(Confusion(7).matrix(sums), confusion_matrix(y[counted], scores.argmax(1)[counted]))
    for classes in (2, 7, 9):  # two of nine classes are never right, and some are never guessed
        scores = (torch.randn(40, classes, generator=draw) * 2).round()  # so that some are equal
        y = torch.randint(min(classes, 7), (40,), generator=draw)
        names = [f"class {number}" for number in range(classes)]
        for name, expected in by_scikit_learn(scores, y, names).items():
            kind = name.partition(" of ")[0] if " of " not in name or name.startswith("auroc") else "per_class"
            metric = measure_of_classes(kind, names, each=True)
            if kind == "auroc":
                for lo in range(0, 40, 9):
                    metric.update(scores[lo : lo + 9], y[lo : lo + 9])
                assert metric.figures(lambda own: [own])[name] == pytest.approx(expected, abs=1e-12)
            else:
                sums = sum(metric.sums(scores[lo : lo + 9], y[lo : lo + 9]) for lo in range(0, 40, 9))
                assert metric.figures(sums)[name] == pytest.approx(expected, abs=1e-12), name
    numbers = torch.randn(40, 3, generator=draw) + 100
    numbers[:, 2] = 4
    guesses = numbers + torch.randn(40, 3, generator=draw) * 0.3
    sums = sum(R2(3).sums(guesses[lo : lo + 9], numbers[lo : lo + 9]) for lo in range(0, 40, 9))
    assert R2(3).value(sums) == pytest.approx(r2_score(numbers, guesses), rel=1e-6)
    sums = sum(RMSE(3).sums(guesses[lo : lo + 9], numbers[lo : lo + 9]) for lo in range(0, 40, 9))
    assert RMSE(3).value(sums) == pytest.approx(root_mean_squared_error(numbers, guesses), rel=1e-6)
    assert (
        TopAccuracy(7).target_sums(
            compare_targets(torch.full((1, 7), math.nan), torch.zeros(1, dtype=torch.long), top=True)
        )[0]
        == 0
    )


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("metric", "words"),
    [
        ("rmse", "train.metrics rmse is not available for targets that are classes; choose accuracy, f1,"),
        ("train.own_metrics:margn", "did you mean 'margin'"),
        ("train.own_metrics:accuracy", "the name 'accuracy' is already used"),
        ("train.own_metrics:broken", "raised ValueError: no such thing (own_metrics.py:"),
        ("train.own_metrics:wrong_shape", "return one number per sample, or the mean over them"),
    ],
)
def test_a_metric_of_ones_own_that_is_none_is_told_in_one_line(world, folder, arrays, metric, words):
    sections = {
        "data": {"path": arrays["classes"]},
        "model": {"name": "mlp", "layers": 1, "width": 8},
        "train": {"steps": 1, "batch": 8, "metrics": [metric]},
    }
    with pytest.raises(InputError) as caught:
        run(world, folder / "r", **sections)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.ranks(1, 2, 3)
def test_metrics_of_torchmetrics_are_exact_over_ranks_of_which_some_have_no_samples(world, folder, arrays):
    torchmetrics = pytest.importorskip("torchmetrics")
    sections = {
        "data": {"path": arrays["classes"]},
        "model": {"name": "mlp", "layers": 1, "width": 8},
        "train": {"steps": 3, "batch": 7, "evaluate_every": 2, "evaluate_samples": 8},  # of the last batch, one
        "optim": {"lr": 0.05, "warmup": 0},
    }
    names = ["f1_of_each", "area", "both", "spread"]
    sections["train"]["metrics"] = [f"train.library_metrics:{name}" for name in names]
    trainer = trained(world, folder / "r", **sections)
    data = open_dataset(arrays["classes"], "held_out")
    x, y = map(torch.from_numpy, data.read(np.arange(8) * len(data) // 8))
    with torch.no_grad():
        output = trainer.engine.module.eval()(x)
    functional_ones = torchmetrics.functional.classification
    each = functional_ones.multiclass_f1_score(output, y, 4, average=None).tolist()
    expected = {f"f1_of_each of {name}": value for name, value in zip(data.description.classes, each, strict=True)}
    expected["area"] = functional_ones.multiclass_auroc(output, y, 4).item()
    expected["both_recall"] = functional_ones.multiclass_recall(output, y, 4).item()
    expected["both_precision"] = functional_ones.multiclass_precision(output, y, 4).item()
    expected["spread"] = output.amax(1).var(correction=0).item()
    assert {name: trainer.figures[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert trainer.meter.directions["area"] is True


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("weights", [[0.5, 3.0, 0.0, 2.0], "balanced"])
def test_class_weights_give_torchs_weighted_loss_of_the_whole_batch(world, folder, arrays, weights):
    sections = {
        "data": {"path": arrays["classes"], "record_ids": True},
        "model": {"name": "mlp", "layers": 1, "width": 8},
        "train": {"steps": 4, "batch": 7, "microbatch": 2, "class_weights": weights, "clip": 0.0},
        "optim": {"name": "SGD", "lr": 0.2, "warmup": 0, "schedule": "constant", "weight_decay": 0.0},
        "parallel": {"pipeline": 2 if world.size == 2 else 1, "zero": 2 if world.size == 3 else 0},
    }
    lines = run(world, folder / "r", **sections)
    data = open_dataset(arrays["classes"])
    if weights == "balanced":
        from sklearn.utils.class_weight import compute_class_weight

        y = data.read(np.arange(len(data)))[1]
        weights = compute_class_weight("balanced", classes=np.arange(4), y=y)
    config = Config.from_dict(sections)
    torch.manual_seed(config.run.seed)
    model = build_model(config.model, data.description).module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    weighted = torch.nn.CrossEntropyLoss(torch.tensor(weights, dtype=torch.float32))
    for line in lines:
        x, y = map(torch.from_numpy, data.read(np.array(line["ids"])))
        loss = weighted(model(x), y)
        assert line["loss"] == pytest.approx(loss.item(), rel=1e-5), line["step"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    held_out = open_dataset(arrays["classes"], "held_out")
    x, y = map(torch.from_numpy, held_out.read(np.arange(7) * len(held_out) // 7))
    assert lines[-1]["held_out_loss"] == pytest.approx(functional.cross_entropy(model(x), y).item(), rel=1e-5)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"train": {"class_weights": [1, 2]}}, "has 2 weights, but the data have 4 classes"),
        ({"train": {"class_weights": "balanced"}, "data": "numbers"}, "on data with classes"),
        (
            {"train": {"class_weights": "balanced"}, "model": {"factory": "train.own_metrics:with_metrics"}},
            "in the loss of your",
        ),
        ({"train": {"class_weights": "balanced"}, "parallel": {"mode": "local"}}, "needs parallel.mode sync"),
    ],
    ids=["number", "numbers", "own", "local"],
)
def test_class_weights_that_do_not_fit_are_told_in_one_line(world, folder, arrays, changed, words):
    sections = {"model": {"name": "mlp", "layers": 1}, "train": {"steps": 1, "batch": 8}} | changed
    with pytest.raises(InputError) as caught:
        run(world, folder / "r", **sections | {"data": {"path": arrays[changed.get("data", "classes")]}})
    assert words in str(caught.value) and "\n" not in str(caught.value)
