"""Process group of a test, created before it and destroyed after it."""

from __future__ import annotations

from datetime import timedelta

import pytest


@pytest.fixture
def group(world):
    """Yield torch.distributed, initialised with this backend over all ranks."""
    import torch.distributed as dist

    import mpitrain.backend  # noqa: F401

    dist.init_process_group("mpitrain", timeout=timedelta(minutes=10))
    yield dist
    if dist.is_initialized():
        dist.destroy_process_group()
