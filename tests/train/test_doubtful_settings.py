"""A run starts with one warning line for each setting that is probably unintended, and none for the others."""

from __future__ import annotations

import pytest

from mpitrain.config.settings import Config
from mpitrain.trainer.recording.console import doubtful_settings


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({}, ""),
        ({"train": {"precision": "bf16"}}, "train.precision bf16 is slower than fp32 on this CPU"),
        ({"train": {"precision": "fp16"}}, "train.precision fp16 is slower than fp32 on this CPU"),
        ({"train": {"steps": 20}}, "optim.warmup 20 takes all of train.steps 20"),
        ({"train": {"steps": 20}, "optim": {"schedule": "StepLR"}}, ""),
        ({"optim": {"schedule": "wsd", "decay_steps": 299}}, "optim.decay_steps 299 are more than train.steps 300"),
        ({"optim": {"lr_end": 0.5}}, "optim.lr_end 0.5 is above optim.lr 0.002"),
        ({"train": {"batch": 3}}, "train.batch 3 has no sample for 1 of 4 ranks"),
        ({"train": {"batch_warmup": [[5, 2]]}}, "train.batch_warmup 2 has no sample for 2 of 4 ranks"),
        ({"train": {"batch_warmup": [[200, 8], [100, 16]]}}, "train.batch_warmup takes all of train.steps 300"),
    ],
)
def test_what_is_hardly_meant_is_told(sections, told):
    lines = doubtful_settings(Config.from_dict(sections), columns=4, on_cpu=True, flags=frozenset({"avx2"}))
    assert len(lines) == bool(told) and told in "".join(lines)
    if "on this CPU" in told:
        able = frozenset({"avx512_bf16", "avx512_fp16"})
        assert not doubtful_settings(Config.from_dict(sections), columns=4, on_cpu=True, flags=able)
        assert not doubtful_settings(Config.from_dict(sections), columns=4, on_cpu=False, flags=frozenset({"avx2"}))
