"""Activation bytes that the planner predicts for each way of recomputing, compared with those that a job counts."""

from __future__ import annotations

import pytest

import mpitrain as mt
from mpitrain.config.settings import Config
from mpitrain.parallel.layouts import layout_of
from mpitrain.parallel.memory import in_flight
from mpitrain.planner.machine import MachineProfile
from mpitrain.planner.predictor import Predictor
from mpitrain.planner.profile import profile_of
from mpitrain.planner.subject import description_of

GPT = {"layers": 6, "width": 32, "heads": 4, "sequence": 32}
MLP = {"name": "mlp", "layers": 6, "width": 64}
WAYS = (False, True, "selective", "every 2", [0, 2])
MACHINE = MachineProfile("made up", "specification", 2, 64 << 30)


class Activations(mt.Callback):
    """Callback that stores the activation bytes of the last step."""

    def on_step_end(self, trainer, step):
        memory = trainer.engine.memory()
        self.nbytes = memory.activations + memory.offloaded


def counted_bytes(world, text, model, way, moves, **parallel):
    """Return the configuration, and the activation bytes of each rank after a step, with those that were moved out."""
    share = world.size // (parallel.get("pipeline", 1) * parallel.get("tensor", 1))
    settings = {
        "data": {"path": text},
        "model": model,
        "train": {"batch": 4 * share, "microbatch": 2, "steps": 1, "evaluate_every": 0, "recompute": way} | moves,
        "checkpoint": {"every": 0},
        "parallel": parallel,
        "run": {"dir": ""},
    }
    measured, config = Activations(), Config.from_dict(settings)
    trainer = mt.Trainer(config, [measured], world=world)
    trainer.print = lambda line: None
    trainer.fit()
    return config, world.all_gather_object(measured.nbytes)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_predicted_activations_are_within_a_tenth_of_those_that_a_job_counts(world, profiles, text, folder, way):
    for data, model in ((text, GPT), ("digits", MLP), ("digits", {"name": "resnet", "layers": 18, "width": 8})):
        check_prediction(world, profiles, data, model, way, {})
    if way is True:
        check_prediction(world, profiles, text, GPT, way, {"offload_activations": str(folder / "files")})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_predicted_activations_of_stages_and_tensor_ranks_are_within_a_tenth(world, profiles, text, folder, way):
    if way is True:  # a stage's own input is no tensor that autograd keeps: the job does not count it
        parts = {"partition_activations": True}
        for moves in (parts, parts | {"offload_activations": str(folder / "files")}):
            check_prediction(world, profiles, text, GPT, way, moves, tensor=2)
    else:
        check_prediction(world, profiles, text, GPT, way, {}, pipeline=2)
        check_prediction(world, profiles, "digits", MLP, way, {}, pipeline=2)
    if way == "selective":
        check_prediction(world, profiles, text, GPT, way, {}, tensor=2)
        check_prediction(world, profiles, "digits", MLP, way, {}, tensor=2)


@pytest.fixture(scope="module")
def profiles():
    """Profiles of the models by name: they are those of any way of recomputing, and take longer than a job."""
    return {}


def check_prediction(world, profiles, data, model, way, moves, **parallel):
    """Compare the activations that the planner predicts with those that a job counts."""
    config, measured = counted_bytes(world, data, model, way, moves, **parallel)
    if config.model.name not in profiles:
        profiles[config.model.name] = profile_of(config, description_of(config), MACHINE, measure=False)
    predictor = Predictor(profiles[config.model.name], MACHINE, 1, world.size)
    layout = layout_of(config, world.size, predictor.model.blocks(1))
    assert layout.recompute == config.train.recompute
    flow, places = predictor.flow(layout), predictor.places(layout)
    holds = [predictor.holdings(layout, places, rank) for rank in range(layout.pipeline)]
    predicted = in_flight(flow, holds) if flow is not None else [holds[0].kept_bytes] * world.size
    assert predicted == pytest.approx(measured, rel=0.1), (model, moves, parallel)
    if layout.offload_activations and flow is None:
        assert predictor.memory(layout)["activations"] == 0
