"""Weight averages in a run: saved, resumed, evaluated, and used by everything that loads the model."""

from __future__ import annotations

import json

import pytest
import torch
from train.test_trainer import fit, settings

import mpitrain as mt
from mpitrain.checkpoint.contents import complete_manifest, load_tensor
from mpitrain.checkpoint.convert import export, read_tensors
from mpitrain.checkpoint.folders import find
from mpitrain.checkpoint.manifest import AVERAGE, MODEL
from mpitrain.errors import EXIT_DONE, InputError
from mpitrain.evaluate import main
from mpitrain.monitor import read_metrics

EMA = {"average": "ema", "average_decay": 0.7, "average_start": 1, "evaluate_every": 2}


def tensors_of(folder, prefix):
    """Return a checkpoint's tensors with a prefix, by name without it."""
    manifest = complete_manifest(folder)
    names = [name for name in manifest.tensors if name.startswith(prefix)]
    return {name.removeprefix(prefix): load_tensor(folder, manifest, name) for name in names}


def run(text, folder, world, *, steps=6, train=EMA, **sections):
    trainer = mt.Trainer(settings(text, folder, train=train | {"steps": steps}, **sections), world=world)
    assert fit(trainer) == EXIT_DONE
    world.barrier()
    return trainer


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_a_resumed_run_has_the_same_averages_bit_by_bit(world, folder, text, zero):
    parallel = {"zero": zero, "share_node": zero == 2}
    run(text, folder / "whole", world, parallel=parallel)
    run(text, folder / "r", world, steps=3, parallel=parallel)
    run(text, folder / "r", world, parallel=parallel)
    first, second = (tensors_of(max(find(folder / name)), AVERAGE) for name in ("whole", "r"))
    assert first and first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    losses = [[(m["loss"], m.get("held_out_loss")) for m in read_metrics(folder / name)][-1] for name in ("whole", "r")]
    assert losses[0] == losses[1]


@pytest.mark.ranks(1, 2, 3)
def test_running_statistics_are_averaged_saved_and_used_by_everything_that_loads_the_model(world, folder):
    sections = {"model": {"name": "resnet", "layers": 18, "width": 4, "sequence": 128}, "parallel": {"zero": 2}}
    for name, steps in {"r": 2, "whole": 4}.items():
        run("digits", folder / name, world, steps=steps, train=EMA | {"batch": 6}, **sections)
    run("digits", folder / "r", world, steps=4, train=EMA | {"batch": 6}, **sections)
    folders = [max(find(folder / name)) for name in ("whole", "r")]
    first, second = (tensors_of(each, AVERAGE) for each in folders)
    weights = tensors_of(folders[0], MODEL)
    assert all(torch.equal(first[name], second[name]) for name in first)
    statistics = [name for name in weights if "running" in name]
    assert statistics and not any(torch.equal(first[name], weights[name]) for name in statistics)
    state = mt.load_model(folder / "r").state_dict()
    assert all(torch.equal(state[name], first[name]) for name in first)
    losses = [read_metrics(folder / name)[-1]["held_out_loss"] for name in ("whole", "r")]
    assert main([str(folder / "r"), "--samples", "8", "--json", str(folder / "figures.json")], world) == 0
    world.barrier()
    assert losses[0] == losses[1]
    assert json.loads((folder / "figures.json").read_text())["loss"] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.ranks(2, 4)
def test_averages_are_the_same_on_every_mesh(world, folder, text):
    model = {"model": {"layers": 2, "width": 16, "heads": 2, "sequence": 16}}
    alone = world.subgroup([0])
    if alone is not None:
        run(text, folder / "alone", alone, **model)
        alone.free()
    world.barrier()
    shapes = {2: [{"pipeline": 2}, {"tensor": 2}], 4: [{"pipeline": 2, "tensor": 2}, {"pipeline": 2, "zero": 2}]}
    expected = tensors_of(max(find(folder / "alone")), AVERAGE)
    for number, parallel in enumerate(shapes[world.size]):
        run(text, folder / str(number), world, parallel=parallel, **model)
        averages = tensors_of(max(find(folder / str(number))), AVERAGE)
        assert averages.keys() == expected.keys()
        for name, average in averages.items():
            torch.testing.assert_close(average, expected[name], rtol=1e-3, atol=1e-5)
        lines = [read_metrics(folder / name)[-1]["held_out_loss"] for name in ("alone", str(number))]
        assert lines[1] == pytest.approx(lines[0], rel=1e-5)


@pytest.mark.ranks(1, 2)
def test_evaluation_and_everything_that_loads_the_model_use_the_average(world, folder, text, tmp_path):
    trainer = run(text, folder / "r", world)
    plain = run(text, folder / "plain", world, train={"evaluate_every": 2})
    mine, theirs = read_metrics(folder / "r"), read_metrics(folder / "plain")
    assert [m["loss"] for m in mine] == [m["loss"] for m in theirs]  # training does not use the average
    assert trainer.figures["loss"] != plain.figures["loss"]
    checkpoint = max(find(folder / "r"))
    averages, weights = tensors_of(checkpoint, AVERAGE), tensors_of(checkpoint, MODEL)
    assert any(not torch.equal(averages[name], weights[name]) for name in averages)
    state = mt.load_model(folder / "r").state_dict()
    assert all(torch.equal(state[name], averages[name]) for name in averages)
    assert main([str(folder / "r"), "--samples", "8", "--json", str(folder / "figures.json")], world) == 0
    world.barrier()
    figures = json.loads((folder / "figures.json").read_text())
    assert figures["loss"] == pytest.approx(mine[-1]["held_out_loss"], rel=1e-6)
    export(checkpoint, tmp_path / "model.safetensors")
    exported = read_tensors(tmp_path / "model.safetensors")
    assert all(torch.equal(exported[name], averages[name]) for name in averages)


@pytest.mark.ranks(1, 2)
def test_a_run_without_averages_continues_one_with_them_and_back(world, folder, text):
    run(text, folder / "r", world, steps=2)
    run(text, folder / "r", world, steps=3, train={})
    assert not tensors_of(max(find(folder / "r")), AVERAGE)
    run(text, folder / "r", world, steps=4, train={"average": "swa"})
    checkpoint = max(find(folder / "r"))
    averages, weights = tensors_of(checkpoint, AVERAGE), tensors_of(checkpoint, MODEL)
    assert averages and all(torch.equal(averages[name], weights[name]) for name in averages)  # begins anew


@pytest.mark.ranks(2)
def test_an_average_needs_ranks_that_take_steps_together(world, folder, text):
    config = settings(text, folder / "r", train=EMA, parallel={"mode": "local", "local_steps": 2})
    with pytest.raises(InputError, match=r"train\.average ema needs parallel\.mode sync"):
        fit(mt.Trainer(config, world=world))
