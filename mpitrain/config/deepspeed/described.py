"""What a DeepSpeed configuration asks for, in our words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpitrain.choices import Precision
from mpitrain.config.deepspeed.schedules import OfDeepSpeed


@dataclass(frozen=True)
class LossScaling:
    """What the loss is multiplied by in fp16.

    Attributes:
        value: The factor, or where a dynamic one begins.
        dynamic: Whether it is halved when gradients overflow and doubled after `patience` steps that did not.
        least: What a dynamic factor does not go below.
        spare: Overflows that are let pass before it is halved.
        refill: Whether each good step gives the spare ones back.
    """

    value: float
    dynamic: bool = False
    patience: int = 2000
    least: float = 1.0
    spare: int = 0
    refill: bool = False


@dataclass(frozen=True)
class DeepSpeedConfig:
    """What a DeepSpeed configuration asks for, in our words.

    Attributes:
        microbatch: Samples that a rank gives at a time; 0 where nothing is said.
        accumulate: Backward passes of an update.
        scale: Of the loss; None where the precision needs none.
        clip: Largest norm of the gradients; 0 for no clipping.
        offload: Where optimizer states go: `host`, a folder, or empty for the device.
        offload_parameters: The same for parameters between their uses, at stage 3.
        reduce_dtype: In which gradients are added up; None for the parameters' own.
        any_optimizer: Whether optimizers are taken that are not known to work element by element.
        optimizer: (class of torch.optim, its options), or None where there is none.
        schedule: Of the learning rate, where the configuration names one of DeepSpeed's.
        torch_schedule: (class of torch.optim.lr_scheduler, its options), where it names one of those.
        trackers: The monitors that are on.
        trackers_instead: What a configuration of ours has in their place.
        without_effect: Keys that were given and mean nothing here.
        filled: What was put in place of "auto", as `key value (whence)`.
    """

    microbatch: int
    accumulate: int
    precision: Precision
    scale: LossScaling | None
    clip: float
    recompute: bool
    zero: int
    offload: str
    offload_parameters: str
    reduce_dtype: Precision | None
    bucket_mb: float
    any_optimizer: bool
    optimizer: tuple[str, dict[str, Any]] | None
    schedule: OfDeepSpeed | None
    torch_schedule: tuple[str, dict[str, Any]] | None
    trackers: tuple[str, ...]
    trackers_instead: tuple[str, ...]
    without_effect: tuple[str, ...]
    filled: tuple[str, ...] = ()
