"""Choices of settings: each name is implemented, and no two mean the same."""

from __future__ import annotations

import re
from typing import get_args

import numpy as np
import pytest
import torch

from mpitrain import choices
from mpitrain.comm import compression
from mpitrain.comm.selection import ALL_REDUCE
from mpitrain.comm.world import WAYS
from mpitrain.config.learning_rate import CYCLES, DECAYS, LearningRate
from mpitrain.data.on_device import Augment
from mpitrain.errors import InputError
from mpitrain.layers.precision import DTYPES
from mpitrain.models.build import MODELS
from mpitrain.models.resnet import STAGES
from mpitrain.pipe.schedule import DELAYED, SCHEDULES
from mpitrain.trainer.trainer import STRATEGIES


def test_every_model_depth_schedule_and_precision_is_implemented():
    assert list(MODELS) == list(get_args(choices.Model))
    assert tuple(STAGES) == choices.RESNET_LAYERS
    assert list(SCHEDULES) == list(get_args(choices.PipelineSchedule))
    assert list(DELAYED) == list(get_args(choices.DelayedSchedule))
    assert list(DTYPES) == list(get_args(choices.Precision))


def test_every_augmentation_changes_images_differently():
    x, ids = torch.rand(64, 3, 9, 9), np.arange(64)
    augmented = [Augment((name,), 2, seed=1)(x, ids, ids * 0) for name in get_args(choices.Augmentation)]
    assert all(not torch.equal(one, other) for one, other in zip(augmented, [*augmented[1:], x], strict=True))


def test_every_mode_has_a_strategy():
    assert set(STRATEGIES) <= set(get_args(choices.Mode))


def test_every_transport_of_device_memory_is_known():
    assert list(WAYS) == ["auto", *get_args(choices.DeviceWay)]


def test_every_learning_rate_decay_is_a_different_curve():
    kinds = get_args(choices.Decay)
    assert list(DECAYS) == list(kinds)
    curves = {tuple(LearningRate(kind, 1.0, steps=9).rate(step) for step in range(9)) for kind in kinds}
    assert len(curves) == len(kinds)
    assert list(CYCLES) == list(get_args(choices.Cycle))


def test_every_compression_is_listed_and_implemented():
    for name in get_args(choices.Compression):
        assert compression.from_name(name).name == name
    with pytest.raises(InputError) as caught:
        compression.from_name("nonsense")
    assert _listed(str(caught.value)) == set(get_args(choices.Compression))


@pytest.mark.ranks(1, 2)
def test_every_all_reduce_algorithm_is_listed_and_sums(world):
    for name in get_args(choices.AllReduce):
        x = torch.full((100,), float(world.rank + 1))
        world.all_reduce(x, algorithm=name)
        assert x.tolist() == [sum(range(1, world.size + 1))] * 100
    assert set(ALL_REDUCE) == set(get_args(choices.AllReduce))


def _listed(message: str) -> set[str]:
    """Return the names that a refusal lists at its end: use a, b, c."""
    return set(re.findall(r"[\w-]+", re.split(r"use (?:one of )?", message)[-1]))
