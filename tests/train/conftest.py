"""Data sets on which the tests train jobs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mpitrain.data.prepare import prepare


@pytest.fixture(scope="session")
def text(world, tmp_path_factory) -> str:
    """A small text data set, the same for all ranks."""
    path = Path(world.broadcast_object(str(tmp_path_factory.mktemp("text")))) / "text"
    if world.rank == 0:
        prepare([str(Path(torch.__file__).with_name("functional.py"))], path)
    world.barrier()
    return str(path)


@pytest.fixture(scope="session")
def sentence(tmp_path_factory) -> Path:
    """A data set for jobs started by a test: one sentence, repeated."""
    folder = tmp_path_factory.mktemp("sentence")
    source = folder / "a.txt"
    source.write_text("All happy families are alike; each unhappy family is unhappy in its own way.\n" * 400)
    prepare([str(source)], folder / "text")
    return folder / "text"
