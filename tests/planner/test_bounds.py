"""Bounds on the seconds and bytes of layouts, compared with the full prediction."""

import random

import numpy as np
import pytest
from fakes import FakeModel

from mpitrain.config.settings import Config
from mpitrain.data import Description
from mpitrain.errors import InputError
from mpitrain.planner.bounds import Bounds
from mpitrain.planner.candidates import candidates
from mpitrain.planner.machine import read_machine
from mpitrain.planner.predictor import Predictor
from mpitrain.planner.profile import profile_of
from mpitrain.planner.refine import Refinement

INT = np.dtype("int64")
TOKENS = Description("tokens", "train", 1000, (32,), INT, (32,), INT, 256, None, "x")
GPT = {"name": "gpt", "layers": 3, "width": 64, "heads": 4, "sequence": 32}


def counted(machine):
    settings = Config.from_dict({"model": GPT, "train": {"batch": 64, "precision": "bf16"}})
    return profile_of(settings, TOKENS, machine, measure=False)


@pytest.mark.parametrize(
    ("model", "name", "nodes", "each"),
    [("made up", "gpu-8", 4, 8), ("made up", "gpu-4", 2, 8), ("made up", "cpu-128", 2, 8), ("counted", "gpu-4", 2, 4)],
)
def test_no_prediction_is_below_its_lower_bound(model, name, nodes, each):
    machine = read_machine(name)
    predictor = Predictor(FakeModel(6, 64) if model == "made up" else counted(machine), machine, nodes, each)
    bounds, refine = Bounds(predictor), Refinement(predictor)
    layouts = list(candidates(predictor.model, predictor.at))
    layouts = [layout for layout in layouts if model == "made up" or layout.slices == 1]
    tried = 0
    for layout in random.Random(3).sample(layouts, 60 if model == "made up" else 24):
        for variant in dict.fromkeys(refine(layout)) if tried % 20 == 0 else [layout]:
            try:
                prediction = bounds.predict(variant)
            except InputError:
                continue
            tried += 1
            assert bounds.lower_bound(layout) <= prediction.seconds * (1 + 1e-9), variant
            if not variant.whole:
                assert sum(bounds.least_memory(layout).values()) <= prediction.total_memory * (1 + 1e-9), variant
    assert tried > 12
