"""The data and the folders of training in these tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from train.conftest import text  # noqa: F401


@pytest.fixture(scope="module")
def place(world, tmp_path_factory) -> Path:
    """A folder for all tests of a module, the same on all ranks."""
    return Path(world.broadcast_object(str(tmp_path_factory.mktemp("runs"))))
