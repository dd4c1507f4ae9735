"""Ranks with unequal numbers of batches: those that have no more take part in the others' steps with zeros.

What torch calls join (`DistributedDataParallel.join`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpitrain.comm import Communicator
from mpitrain.shard.reducer import Reducer


class Joining:
    """Before each step all ranks tell each other whether they have a batch.

    Args:
        comm: The ranks that train together.
        divide_by_all: Average over all of them, else over those that have a batch.

    Attributes:
        source: The first rank that had a batch when they last told.
        factor: What an average over all ranks is to be multiplied by.
    """

    def __init__(self, comm: Communicator, divide_by_all: bool) -> None:
        self._comm, self._divide_by_all = comm, divide_by_all
        self._training = np.zeros(comm.size, dtype=np.uint8)
        self.source = 0
        self.factor = 1.0

    def meet(self, training: bool) -> bool:
        """Tell whether this rank has a batch; returns whether any has one. Collective."""
        self._comm.all_gather(self._training, np.array([training], dtype=np.uint8))
        count = int(self._training.sum())
        if count:
            self.source = int(self._training.argmax())
            self.factor = 1.0 if self._divide_by_all else self._comm.size / count
        return count > 0

    def take_part(self, follow: Callable[[], Reducer]) -> None:
        """Take part in steps without a batch of one's own, until no rank has any. Collective.

        follow: does what comes before a forward pass, and gives the reducer of the step.
        """
        while self.meet(training=False):
            reducer = follow()
            reducer.gradients.zero()
            reducer.finish()
