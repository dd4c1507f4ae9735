"""The RNG tracker: which stream of random numbers dropout draws from (Megatron-LM's name for it).

Dropout of activations that all ranks of the tensor axis have must draw the same numbers on all of them; dropout of
activations of which each has its own part must draw different ones.

The default generators of the CPU and of the device, which the trainer seeds alike on all ranks of the axis at each
step, are the replicated stream. Between a column-parallel layer and the row-parallel one after it, activations are
split: there they go on from a seed that is drawn from the replicated stream and increased by the rank, and afterwards
from where they were before. So nothing is kept from step to step, the step's seed gives all masks of the step, and a
recomputed forward pass, which restores the generators, draws what the first one drew.
"""

from __future__ import annotations

import torch

from mpitrain.comm.memory import device as devices

_LARGEST_SEED = (1 << 63) - 1


class RngTracker:
    """Switches the default generators between the replicated stream and the rank's own.

    Args:
        rank: This rank's number on the tensor axis.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._opener: object = None
        self._seed = 0
        self._before: list[tuple[torch.device, torch.Tensor]] = []  # of each generator, the state it is put back to

    @property
    def _inside(self) -> bool:
        """Whether the generators are on the rank's own stream still, and were not seeded anew by a step or recompute.

        That of the CPU tells for both: whoever seeds or restores that of a device does so with the CPU's.
        """
        return bool(self._before) and torch.default_generator.initial_seed() == self._seed

    def enter(self, opener: object, device: torch.device) -> None:
        """Go to the rank's own stream, unless the generators are on it already.

        Args:
            opener: The module that goes there; see `leave`.
            device: Whose generator is meant, beside the CPU's.
        """
        if self._inside:
            return
        drawn = int(torch.empty((), dtype=torch.int64).random_())
        self._opener = opener
        ours = [devices.CPU, device] if devices.is_accelerator(device) else [devices.CPU]
        self._before = [(of, devices.generator_state(of)) for of in ours]
        self._seed = (drawn + self._rank) & _LARGEST_SEED
        for of in ours:
            devices.seed_generator(of, self._seed)

    def leave(self, opener: object = None) -> None:
        """Go back to the replicated stream; with an opener, only if it was the one that left that stream."""
        if opener is None or opener is self._opener:
            for device, state in self._before if self._inside else ():
                devices.set_generator_state(device, state)
            self._opener, self._before = None, []
