"""The data that groups of ranks are trained on, and what they are asked for in each test."""

from __future__ import annotations

from train.conftest import text  # noqa: F401
