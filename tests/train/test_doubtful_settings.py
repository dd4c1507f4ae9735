"""A run starts with one warning line for each setting that is probably unintended, and none for the others."""

from __future__ import annotations

import pytest

from mpitrain.config.settings import Config
from mpitrain.trainer.recording.console import doubtful_settings


@pytest.mark.parametrize(
    ("sections", "warning"),
    [
        ({}, ""),
        ({"train": {"precision": "bf16"}}, "train.precision bf16 is slower than fp32 on this CPU"),
        ({"train": {"precision": "fp16"}}, "train.precision fp16 is slower than fp32 on this CPU"),
        ({"train": {"steps": 20}}, "optim.warmup 20 lasts for all of train.steps 20"),
        ({"train": {"steps": 20}, "optim": {"schedule": "StepLR"}}, ""),
        ({"optim": {"schedule": "wsd", "decay_steps": 299}}, "optim.decay_steps 299 is above train.steps 300"),
        ({"optim": {"lr_end": 0.5}}, "optim.lr_end 0.5 is above optim.lr 0.002"),
        ({"train": {"average_start": 300}}, ""),
        (
            {"train": {"average": "swa", "average_start": 300}},
            "train.average_start 300 leaves out all of train.steps 300",
        ),
        ({"train": {"batch": 3}}, "train.batch 3 leaves 1 of 4 ranks without a sample"),
        ({"train": {"batch_warmup": [[5, 2]]}}, "train.batch_warmup 2 leaves 2 of 4 ranks without a sample"),
        ({"train": {"batch_warmup": [[200, 8], [100, 16]]}}, "train.batch_warmup lasts for all of train.steps 300"),
    ],
)
def test_doubtful_settings_are_reported(sections, warning):
    lines = doubtful_settings(Config.from_dict(sections), columns=4, on_cpu=True, flags=frozenset({"avx2"}))
    assert len(lines) == bool(warning) and warning in "".join(lines)
    if "on this CPU" in warning:
        able = frozenset({"avx512_bf16", "avx512_fp16"})
        assert not doubtful_settings(Config.from_dict(sections), columns=4, on_cpu=True, flags=able)
        assert not doubtful_settings(Config.from_dict(sections), columns=4, on_cpu=False, flags=frozenset({"avx2"}))
