"""The collectives a compression is made of, carried out in the thread it runs in."""

from __future__ import annotations

from collections.abc import Callable

import torch

Perform = Callable[..., None]  # of the tensors, which of them it writes, and what else the operation is given


class Channel:
    """Stands for a `Communicator` inside one of its operations, so that all of that stays one operation."""

    def __init__(self, size: int, all_reduce: Perform, all_gather: Perform) -> None:
        """size: number of ranks. all_reduce, all_gather: perform these operations."""
        self.size = size
        self._all_reduce, self._all_gather = all_reduce, all_gather

    def all_reduce(
        self, x: torch.Tensor, op: str = "sum", algorithm: str = "auto", *, reproducible: bool = False
    ) -> None:
        self._all_reduce((x,), (True,), op, algorithm, reproducible)

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        self._all_gather((out, x), (True, False), "auto", None)
