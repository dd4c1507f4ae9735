"""Several optimizers as one: each updates parameters of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpitrain.shard.update import optimizer_step


class CombinedOptimizer(torch.optim.Optimizer):
    """What has the parameter groups and the states of several optimizers, and lets each make its step.

    Args:
        parts: The optimizers, that have made no step yet.

    Attributes:
        parts: The same.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = list(parts)
        groups = [group for part in parts for group in part.param_groups]
        super().__init__([{"params": list(group["params"])} for group in groups], {})
        self.param_groups = groups  # theirs: what is changed in them here is changed there
        for part in parts:
            self.state.update(part.state)
            part.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update by each. Collective where one of them is."""
        for part in self.parts:
            optimizer_step(part)
