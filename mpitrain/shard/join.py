"""Ranks with unequal numbers of batches: those that have no more take part in the others' steps with zeros."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpitrain.comm import Communicator
from mpitrain.shard.reducer import Reducer


class Joining:
    """Before each step all ranks meet, and tell each other whether they have a batch."""

    def __init__(self, comm: Communicator, divide_by_all: bool) -> None:
        self._comm, self._divide_by_all = comm, divide_by_all
        self._training = np.zeros(comm.size, dtype=np.uint8)
        self.source = 0  # the first rank that had a batch when the ranks last met
        self.factor = 1.0  # what turns an average over all ranks into the one wanted

    def meet(self, training: bool) -> bool:
        """Whether any rank has a batch. Collective."""
        self._comm.all_gather(self._training, np.array([training], dtype=np.uint8))
        count = int(self._training.sum())
        if count:
            self.source = int(self._training.argmax())
            self.factor = 1.0 if self._divide_by_all else self._comm.size / count
        return count > 0

    def take_part(self, follow: Callable[[], Reducer]) -> None:
        """Steps without a batch of one's own, until no rank has any. follow: what a forward pass does before it."""
        while self.meet(training=False):
            reducer = follow()
            reducer.gradients.zero()
            reducer.finish()
