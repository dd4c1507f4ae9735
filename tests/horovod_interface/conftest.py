"""Horovod's interface on the test's ranks."""

from __future__ import annotations

import pytest


@pytest.fixture
def hvd(world):
    """Return the initialized module, on a world in debug mode."""
    import mpitrain.horovod.torch as hvd

    hvd.init()
    return hvd
