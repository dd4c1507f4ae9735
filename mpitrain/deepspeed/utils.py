"""Small helpers of scripts: messages of some ranks, endless loaders, seeds."""

from __future__ import annotations

import logging
import random
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from mpitrain.comm import init
from mpitrain.deepspeed.names import explain_missing

logger = logging.getLogger("deepspeed")


def __getattr__(name: str) -> Any:
    raise explain_missing(f"utils.{name}")


def log_dist(message: str, ranks: Collection[int] | None = None, level: int = logging.INFO) -> None:
    """Print a message.

    Args:
        message: The message.
        ranks: Ranks that print it; None or [-1] for all.
        level: Ignored.
    """
    rank = init().rank
    if not ranks or -1 in ranks or rank in ranks:
        print(f"[Rank {rank}] {message}", flush=True)


class RepeatingLoader:
    """Iterator over a loader that begins again at its end.

    Args:
        loader: Loader of batches.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)


def set_random_seed(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
