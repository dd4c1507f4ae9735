"""torch.distributed over MPI, under the name by which DeepSpeed's scripts import it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from mpitrain.backend import NAME
from mpitrain.backend.registration import set_environment, use_for_all_groups
from mpitrain.comm import init


def __getattr__(name: str) -> Any:
    return getattr(dist, name)


def init_distributed(dist_backend: str | None = None, *_: Any, **__: Any) -> None:
    """Start torch.distributed over MPI, if it is not running, and set RANK, LOCAL_RANK and WORLD_SIZE. Collective.

    Args:
        dist_backend: Ignored, as are all other arguments: MPI knows the ranks, and carries tensors of all devices.
    """
    set_environment(init())
    use_for_all_groups()
    if not dist.is_initialized():
        dist.init_process_group(NAME)
