"""python -m mpitrain.evaluate: metrics of a checkpoint on any data and layout; the run's folder is only read."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from train.jobs import run

from mpitrain.data import open_dataset
from mpitrain.data.prepare import PrepareOptions, prepare
from mpitrain.data.sources import held_out_mask
from mpitrain.errors import CheckpointError, InputError
from mpitrain.evaluate import main
from mpitrain.monitor import read_metrics
from mpitrain.storage import locks

GPT = {"layers": 2, "width": 16, "heads": 2, "sequence": 16}


@pytest.fixture(scope="module")
def place(world, tmp_path_factory):
    return Path(world.broadcast_object(str(tmp_path_factory.mktemp("evaluate"))))


def table(folder, classes, features=5, samples=120):
    folder.mkdir()
    draw = np.random.default_rng(0)
    y = np.arange(samples) % classes
    np.save(folder / "x.npy", (draw.standard_normal((samples, features)) + y[:, None]).astype(np.float32))
    np.save(folder / "y.npy", y)
    prepare([str(folder)], folder / "data")
    return str(folder / "data")


@pytest.fixture(scope="module")
def runs(world, place, text):
    """A run of tokens and one of classes, trained by one rank."""
    if world.rank == 0:
        table(place / "seven", 7)
        table(place / "three", 3)
        table(place / "wide", 7, features=6)
    world.barrier()
    seven = str(place / "seven/data")
    alone = world.subgroup([0])
    if alone is not None:
        train = {"steps": 3, "batch": 6, "evaluate_every": 1, "evaluate_samples": 11}
        common = {"train": train, "optim": {"warmup": 0, "lr": 0.02}, "checkpoint": {"every": 1, "keep": 3}}
        common["checkpoint"]["best"] = "loss"
        run(alone, place / "tokens", data={"path": text}, model=GPT, **common)
        run(alone, place / "classes", data={"path": seven}, model={"name": "mlp", "layers": 1, "width": 8}, **common)
    world.barrier()
    return {"tokens": place / "tokens", "classes": place / "classes", "seven": seven}


def evaluate(world, path, *arguments):
    assert main([*map(str, arguments), "--json", str(path)], world) == 0
    world.barrier()
    return json.loads(path.read_text())


def snapshot(folder):
    """Return the names, times, modes and contents of all files in a folder."""
    return {
        path: (path.stat().st_mtime_ns, path.stat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in sorted([folder, *folder.rglob("*")])
    }


LAYOUTS = {
    1: [()],
    2: [("--parallel.tensor", 2), ("--parallel.pipeline", 2), ("--parallel.zero", 3)],
    3: [("--parallel.zero=3",)],
    4: [("--parallel.tensor", 2, "--parallel.pipeline", 2), ("--parallel.zero", "3")],
}


@pytest.mark.ranks(1, 2, 3, 4)
def test_evaluation_gives_the_figures_of_the_run_on_any_layout(world, folder, runs):
    names = ("loss", "perplexity", "token_accuracy")
    expected = [read_metrics(runs["tokens"])[-1][f"held_out_{name}"] for name in names]
    before = snapshot(runs["tokens"]) if world.rank == 0 else None
    top = None
    for number, layout in enumerate(LAYOUTS[world.size]):
        result = evaluate(world, folder / f"{number}.json", runs["tokens"], "--samples", 11, *layout)
        assert [result[name] for name in names] == pytest.approx(expected, rel=1e-6), layout
        assert result["samples"] == 11 and result["step"] == 3
        assert top in (None, result["top5_accuracy"]) and result["token_accuracy"] <= result["top5_accuracy"] <= 1
        top = result["top5_accuracy"]
        if not layout:
            assert [result[name] for name in names] == expected
    few = evaluate(world, folder / "few.json", runs["tokens"], "--samples", 1, *LAYOUTS[world.size][-1])
    assert few["samples"] == 1
    assert world.rank or snapshot(runs["tokens"]) == before


@pytest.mark.ranks(1, 2)
def test_confusion_matrix_of_another_data_set(world, folder, runs):
    from sklearn.metrics import confusion_matrix

    result = evaluate(
        world, folder / "f.json", runs["classes"], "--data", runs["seven"], "--split", "train",
        "--confusion", folder / "c.csv",
    )  # fmt: skip
    matrix, samples = np.array(result["confusion"]), result["samples"]
    assert matrix.sum() == samples == len(open_dataset(runs["seven"]))
    assert result["accuracy"] == pytest.approx(matrix.trace() / samples)
    y = open_dataset(runs["seven"]).read(np.arange(samples))[1]
    assert matrix.sum(1).tolist() == confusion_matrix(y, y).diagonal().tolist()
    lines = (folder / "c.csv").read_text().splitlines()
    assert lines[0].split(",")[1:] == result["classes"] and lines[3].split(",")[1:] == [str(n) for n in matrix[2]]


@pytest.mark.ranks(1)
def test_any_checkpoint_of_a_running_job_can_be_evaluated(world, folder, runs):
    lines = read_metrics(runs["tokens"])
    best = min(lines, key=lambda line: line["held_out_loss"])
    with closing(locks.take(runs["tokens"] / locks.LOCK)):
        for arguments, line in (
            ((runs["tokens"], "--step", 2), lines[1]),
            ((runs["tokens"] / "checkpoints/step-00000001",), lines[0]),
            ((runs["tokens"], "--best"), best),
        ):
            result = evaluate(world, folder / "f.json", *arguments, "--samples", 11)
            assert (result["step"], result["loss"]) == (line["step"], line["held_out_loss"])
    newest = runs["tokens"] / "checkpoints/step-00000003/manifest.json"
    whole = newest.read_bytes()
    newest.write_bytes(b"torn")
    try:
        assert evaluate(world, folder / "f.json", runs["tokens"], "--samples", 11)["step"] == 2
        with pytest.raises(CheckpointError, match="can be used"):
            main([str(runs["tokens"]), "--step", "3"], world)
    finally:
        newest.write_bytes(whole)


@pytest.mark.ranks(1)
def test_table_is_evaluated_with_the_column_scaling_of_training(world, folder):
    for name, first in (("old", 20), ("new", 200)):
        rows = [f"{first + i},{'yes' if i % 3 else 'no'}\n" for i in range(40)]
        (folder / f"{name}.csv").write_text("age,kind\n" + "".join(rows))
        prepare([str(folder / f"{name}.csv")], folder / name, options=PrepareOptions(scale="standard"), held_out=0.2)
    model = {"name": "mlp", "layers": 1, "width": 4}
    run(world, folder / "r", data={"path": str(folder / "old")}, model=model, train={"steps": 1, "batch": 4})
    with pytest.raises(InputError, match="converted its columns or variables in another way"):
        main([str(folder / "r"), "--data", str(folder / "new")], world)
    prepare([str(folder / "new.csv")], folder / "like", options=PrepareOptions(like=folder / "old"), held_out=0.2)
    result = evaluate(world, folder / "f.json", folder / "r", "--data", folder / "like")
    held_out, mask = open_dataset(folder / "like", "held_out"), held_out_mask(0, 40, 0.2)
    trained = np.arange(20, 60)[~mask]
    expected = (np.arange(200, 240)[mask] - trained.mean()) / trained.std()
    assert result["samples"] == len(held_out) == mask.sum() > 0
    np.testing.assert_allclose(held_out.read(np.arange(len(held_out)))[0][:, 0], expected, rtol=1e-5)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{classes}", "--data", "{place}/three/data"], "has 3 classes (0, 1, 2), but"),
        (["{classes}", "--data", "{place}/wide/data"], "x of 6 numbers [6], but"),
        (["{classes}", "--data", "{text}"], "has tokens, but"),
        (["{place}/three"], "is not a run folder"),
        (["{classes}", "--step", "9"], "has no checkpoint of step 9"),
        (["{classes}", "--step", "1", "--best"], "use only one of them"),
        (["{classes}", "--confusion", "a.png"], "ends in .csv"),
        (["{tokens}", "--confusion", "a.csv"], "needs classes, which"),
        (["{classes}", "--samples", "0"], "above 0"),
        (["{classes}", "--sample", "3"], "unrecognized arguments"),
        (["{classes}", "--parallel.tensr", "3"], "parallel.tensor"),
        (["{classes}", "--data", "nowhere"], "nowhere"),
    ],
)
def test_invalid_evaluations_are_refused(world, place, text, runs, arguments, words):
    known = {"place": place, "text": text, **runs}
    with pytest.raises(InputError) as caught:
        main([argument.format(**known) for argument in arguments], world)
    assert words in str(caught.value) and "\n" not in str(caught.value)
