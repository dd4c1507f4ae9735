"""Recomputation of activations, as torch.utils.checkpoint does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

from mpitrain.deepspeed.names import explain_missing
from mpitrain.errors import refusal


def __getattr__(name: str) -> Any:
    raise explain_missing(f"checkpointing.{name}")


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return function(*args, **kwargs), whose activations are computed again in backward.

    Args:
        function: Function of tensors.
        args, kwargs: Its arguments.
    """
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


non_reentrant_checkpoint = checkpoint


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Do nothing: these settings decide where kept inputs lie, and torch keeps them where they are.

    Args:
        mpu_, deepspeed_config, partition_activations, contiguous_checkpointing, num_checkpoints: Ignored.
        checkpoint_in_cpu: Only false; the configuration has activation_checkpointing.cpu_checkpointing.
        synchronize, profile: Ignored.
    """
    if checkpoint_in_cpu:
        raise refusal("configure has no checkpoint_in_cpu; set cpu_checkpointing in activation_checkpointing")


def is_configured() -> bool:
    """Return True: nothing has to be configured."""
    return True


def reset() -> None:
    """Do nothing: no buffers are kept."""
