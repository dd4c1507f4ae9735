"""The RNG tracker: which stream of random numbers dropout draws from (Megatron-LM's name for it).

Dropout of activations that all ranks of the tensor axis have must draw the same numbers on all of them; dropout of
activations of which each has its own part must draw different ones.

Torch's default generator, which the trainer seeds alike on all ranks of the axis at each step, is the replicated
stream. Between a column-parallel layer and the row-parallel one after it, activations are split: there the generator
goes on from a seed that is drawn from the replicated stream and increased by the rank, and afterwards from where it
was before. So nothing is kept from step to step, the step's seed gives all masks of the step, and a recomputed
forward pass, which restores the generator, draws what the first one drew.
"""

from __future__ import annotations

import torch

_LARGEST_SEED = (1 << 63) - 1


class RngTracker:
    """Switches the default generator between the replicated stream and the rank's own.

    Args:
        rank: This rank's number on the tensor axis.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._opener: object = None
        self._generator = torch.default_generator
        self._seed = 0
        self._before: torch.Tensor | None = None

    @property
    def _inside(self) -> bool:
        """Whether the generator is on the rank's own stream still, and was not seeded anew by a step or recompute."""
        return self._before is not None and self._generator.initial_seed() == self._seed

    def enter(self, opener: object, device: torch.device) -> None:
        """Go to the rank's own stream, unless the generator is on it already.

        Args:
            opener: The module that goes there; see `leave`.
            device: Whose generator is meant.
        """
        if self._inside:
            return
        drawn = int(torch.empty((), dtype=torch.int64).random_())
        self._opener, self._generator = opener, _generator(device)
        self._before = self._generator.get_state()
        self._seed = (drawn + self._rank) & _LARGEST_SEED
        self._generator.manual_seed(self._seed)

    def leave(self, opener: object = None) -> None:
        """Go back to the replicated stream; with an opener, only if it was the one that left that stream."""
        if opener is None or opener is self._opener:
            if self._before is not None and self._inside:
                self._generator.set_state(self._before)
            self._opener = self._before = None


def _generator(device: torch.device) -> torch.Generator:
    """The default generator of a device."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator
