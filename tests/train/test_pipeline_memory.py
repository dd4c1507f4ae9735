"""The activation memory that pipeline ranks report is that of the microbatches their schedule keeps."""

from __future__ import annotations

import pytest

import mpitrain as mt
from mpitrain.config.settings import Config

MICROBATCHES = 4


def activations(world, folder, text, batch, **parallel):
    """Return the activation bytes that each rank recorded in training with microbatches of two samples."""
    config = Config.from_dict(
        {
            "run": {"dir": str(folder)},
            "data": {"path": text},
            "model": {"layers": 4, "width": 32, "heads": 4, "sequence": 16},
            "train": {"steps": 2, "batch": batch, "microbatch": 2},
            "checkpoint": {"every": 0},
            "parallel": parallel,
        }
    )
    trainer = mt.Trainer(config, world=world)
    with trainer.working():
        assert trainer.train() == 0
        return world.all_gather_object(trainer.engine.memory().activations)


@pytest.mark.ranks(2)
def test_activation_memory_of_each_schedule(world, folder, text):
    (one, _) = activations(world, folder / "whole", text, 4)  # a microbatch of the whole model on each rank
    sizes = {
        schedule: activations(world, folder / schedule, text, 2 * MICROBATCHES, pipeline=2, schedule=schedule)
        for schedule in ("gpipe", "1f1b", "zero-bubble")
    }
    first, last = (nbytes / MICROBATCHES for nbytes in sizes["gpipe"])
    assert first + last == pytest.approx(one, rel=0.01) and min(first, last) > one / 4
    assert sizes["1f1b"] == [2 * first, last]
    assert sizes["zero-bubble"][0] <= sizes["gpipe"][0] and sizes["zero-bubble"][1] >= last
