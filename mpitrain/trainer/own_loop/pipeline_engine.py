"""The engine of `mpitrain.initialize` for a model in stages, through which the microbatches of a step go together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mpitrain.trainer.device import moved
from mpitrain.trainer.own_loop.checks import whole_steps
from mpitrain.trainer.own_loop.training_engine import TrainingEngine


class PipelineEngine(TrainingEngine):
    """A model in stages: all microbatches of a step go through them together, by `train_batch`.

    Ranks of one pipeline give the same microbatches; x is used on the first stage, y on the last. On the others tensors
    of the same shapes will do.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise whole_steps("engine(...)")

    def backward(self, loss: torch.Tensor) -> None:
        raise whole_steps("engine.backward")

    def step(self) -> bool:
        raise whole_steps("engine.step")

    def train_batch(self, batches: Iterator[tuple[Any, Any]]) -> float:
        """A whole step on the next microbatches (x, y) of an iterator, as many as a step has. Collective.

        Returns:
            The mean loss over microbatches and data-parallel ranks, on every rank.

        Raises:
            InputError: The iterator ends in the middle of a step.
            StopIteration: It has ended before.
        """
        self._given.require_frozen()
        count, data = self.settings.accumulate, self._engine.comm
        microbatches = [self._next(batches, number) for number in range(count)]
        self._engine.sharding.gradients.zero()
        with self._computing():
            microbatches = moved(microbatches, self.device)
            loss = self._engine.through_pipeline(microbatches, [1.0 / (count * data.size)] * count)
        total = torch.tensor([loss], dtype=torch.float64)
        data.all_reduce(total)
        self._update()
        return float(total)
