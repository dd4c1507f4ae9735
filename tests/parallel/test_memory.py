"""Bytes of a model on each rank."""

from __future__ import annotations

import numpy as np
import pytest

from mpitrain.config.settings import Config
from mpitrain.data import Description
from mpitrain.parallel.layouts import ParallelLayout
from mpitrain.parallel.memory import _gradients_outside_flat
from mpitrain.planner.machine import MachineProfile
from mpitrain.planner.predictor import Predictor
from mpitrain.planner.profile import profile_of

INT, FLOAT = np.dtype("int64"), np.dtype("float32")
IMAGES = Description("arrays", "train", 1000, (8, 8), FLOAT, (), INT, None, tuple("0123456789"), "x")
CONFIG = Config.from_dict({"model": {"factory": "planner.planned_models:sequential"}, "train": {"batch": 32}})


def test_pipeline_gradients_outside_flat_memory_are_counted():
    profile = profile_of(CONFIG, IMAGES, measure=False)
    predictor = Predictor(profile, MachineProfile("m", "s", 4, 1 << 33), 1, 4)

    def outside_bytes(rank, **changes):
        layout = ParallelLayout(2, 2, microbatch=4, cut=(2, 2), **changes)
        flow, share = predictor.flow(layout), predictor.holdings(layout, predictor.places(layout), rank)
        return _gradients_outside_flat(layout, share, flow.shape, rank)

    first, last = 64 * 48 + 48, 48 * 10 + 10
    assert (
        outside_bytes(0) == outside_bytes(0, schedule="zero-bubble") == 4 * 64 * 48
    )  # the largest, until it is copied
    assert outside_bytes(1) == 4 * 48 * 10
    assert outside_bytes(1, schedule="zero-bubble") == 4 * (last + 48 * 10)
    assert outside_bytes(0, zero=2) == pytest.approx(4 * first, abs=4 * 64)  # padded
