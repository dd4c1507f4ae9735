"""Process groups of torch end with the tests of a file, because those of other files begin their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True, scope="module")
def process_group() -> Iterator[None]:
    """Remove the process group that `deepspeed.initialize` has made, as DeepSpeed does."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
