"""Mesh axes defined outside the package: one that only averages, and one along the height of images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from rank_files import read_rank_files
from train.jobs import run

import mpitrain as mt
from mpitrain.data.prepare import prepare
from mpitrain.errors import InputError
from mpitrain.layout.mesh import Mesh
from mpitrain.parallel.data import DataAxis

REPLICA, HEIGHT = "extensions:Replica", "train.height_axis:Height"
GPT = {"layers": 2, "width": 32, "heads": 2, "sequence": 16}


@pytest.fixture(scope="module")
def place(world, tmp_path_factory):
    return Path(world.broadcast_object(str(tmp_path_factory.mktemp("axes"))))


def text_settings(path):
    return {
        "data": {"path": path, "record_ids": True},
        "model": GPT,
        "train": {"steps": 4, "batch": 12, "microbatch": 2},
        "checkpoint": {"every": 2, "keep": 9},
    }


@pytest.fixture(scope="module")
def images(world, place):
    """Configuration of a run on images of 13 rows, which ranks cannot divide equally."""
    if world.rank == 0:
        generator, y = np.random.default_rng(0), np.arange(90) % 3
        (place / "source").mkdir()
        np.save(place / "source/x.npy", (generator.random((90, 13, 8)) + y[:, None, None] / 3).astype(np.float32))
        np.save(place / "source/y.npy", y)
        prepare([str(place / "source")], place / "images")
    world.barrier()
    return {
        "data": {"path": str(place / "images"), "record_ids": True},
        "model": {"factory": "train.height_axis:network"},
        "train": {"steps": 6, "batch": 12, "metrics": ["accuracy"]},
        "optim": {"name": "sgd", "lr": 0.05, "warmup": 0, "options": {"momentum": 0.9}},
        "checkpoint": {"every": 3, "keep": 9},
        "comm": {"algorithm": "ring"},  # the fastest one may send more on some of three ranks than the formula says
    }


def run_on_one_rank(world, folder, sections):
    alone, lines = world.subgroup([0]), None
    if alone is not None:
        lines = run(alone, folder, **sections)
        alone.free()
    return world.broadcast_object(lines)


def check_metrics(lines, expected):
    for key in ("loss", "grad_norm"):
        assert [m[key] for m in lines] == pytest.approx([m[key] for m in expected[-len(lines) :]], rel=2e-5)
    assert [m["ids"] for m in lines] == [m["ids"] for m in expected[-len(lines) :]]
    assert lines[-1]["held_out_loss"] == pytest.approx(expected[-1]["held_out_loss"], rel=2e-5)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("zero", [0, 2])
def test_averaging_axis_trains_like_one_process(world, place, text, zero):
    reference = run_on_one_rank(world, place / f"alone-{zero}", text_settings(text))
    rest = {"pipeline": 2} if world.size == 4 else {}
    folder = place / f"replica-{zero}"
    lines = run(world, folder, **text_settings(text), parallel={"zero": zero, "axes": {REPLICA: 2}, **rest})
    check_metrics(lines, reference)
    records = read_rank_files(folder)
    for rank, record in records.items():
        expected = record.starts[0]["expected_bytes"]
        sent = sum(
            row[4] + row[5] for line in record.lines for row in line["sent"] if row[1].split("/")[0] == "replica"
        )
        assert expected["replica"] > 0 and sent > 0 and len(record.starts[0]["coordinates"]) == 4, rank
    more = text_settings(text) | {"train": text_settings(text)["train"] | {"steps": 6}}
    longer = run_on_one_rank(world, place / f"alone-{zero}", more)
    check_metrics(run(world, folder, **more, parallel={"zero": zero}), longer)  # the checkpoint fits data parallel


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("zero", [0, 2])
def test_height_axis_trains_like_one_process(world, place, images, zero):
    reference = run_on_one_rank(world, place / f"whole-{zero}", images)
    height = 2 if world.size == 4 else world.size
    folder = place / f"height-{zero}"
    lines = run(world, folder, **images, parallel={"zero": zero, "axes": {HEIGHT: height}})
    check_metrics(lines, reference)
    assert lines[-1]["held_out_accuracy"] == reference[-1]["held_out_accuracy"]
    record = read_rank_files(folder)[world.rank]
    sent = sum(row[4] + row[5] for row in record.lines[0]["sent"] if row[1] in ("height", "data+height"))
    expected = record.starts[0]["expected_bytes"]
    by_formula = expected["height"] + expected.get("data+height", 0)
    # but for batch norms, and the order of gradients
    assert record.lines[0]["steps"] == 1 and sent == pytest.approx(by_formula, rel=0.07)
    more = images | {"train": images["train"] | {"steps": 8}}
    longer = run_on_one_rank(world, place / f"whole-{zero}", more)
    check_metrics(run(world, folder, **more, parallel={"zero": zero}), longer)  # the checkpoint fits data parallel


@pytest.mark.ranks(2)
def test_planner_keeps_configured_axes(world, place, text, capsys):
    planned = {"auto": True, "machine": "cpu-128", "axes": {REPLICA: 2}}
    lines = run(world, place / "planned", **text_settings(text), parallel=planned)
    assert len(lines) == 4 and (world.rank or f"axes:{REPLICA}=2, predicted" in capsys.readouterr().out)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("zero", [0, 1])
def test_user_loop_averages_along_a_further_axis(world, zero):
    x, y = torch.randn(12, 4, generator=torch.Generator().manual_seed(1)).split(2, 1)

    def train(comm, **parallel):
        torch.manual_seed(2)
        model = torch.nn.Linear(2, 2)
        config = {"train": {"batch": 12, "clip": 0.0}, "parallel": parallel}
        engine = mt.initialize(
            model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=config, comm=comm,
            loss=torch.nn.functional.mse_loss,
        )  # fmt: skip
        share = slice(engine.data_rank, None, engine.data_size)
        losses = [engine.train_batch(iter([(x[share], y[share])])) for _ in range(4)]
        shape = dict(engine.mesh.shape)
        engine.close()
        return losses, shape

    losses, shape = train(world, zero=zero, axes={REPLICA: 2})
    assert shape == {"data": 1, "replica": 2, "pipeline": 1, "tensor": 1}
    alone = world.subgroup([0])
    expected = world.broadcast_object(None if alone is None else train(alone)[0])
    assert losses == pytest.approx(expected, rel=1e-6)


class Twin(DataAxis):
    """An axis with the name of another axis."""


@pytest.mark.ranks(2)
def test_invalid_axes_are_refused(world):
    for path, message in (("extensions:Best", "not a subclass"), ("train.test_further_axes:Twin", "'data' as another")):
        with pytest.raises(InputError, match=message):
            Mesh.make(world, axes={path: 2})
    with pytest.raises(InputError, match=r"parallel.axes replica 3 x .* does not give 2 ranks"):
        Mesh.make(world, axes={REPLICA: 3})
