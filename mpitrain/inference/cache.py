"""What blocks have to remember of earlier positions, keys and values in attention, while a text grows."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from mpitrain.models.earlier import POSITIONS, State

_ROOM = 64  # positions that there is room for at first


class StateCache:
    """The states of one block, kept as one state.

    Its tensors have more room than they use, and double it when it is full: a position is written once.

    Args:
        notes: The same for all blocks of a model: what they share, the last of it.
    """

    def __init__(self, notes: dict[tuple[Hashable, ...], torch.Tensor]) -> None:
        self._memory: list[torch.Tensor] = []
        self._notes = notes
        self.length = 0

    def past(self) -> list[State]:
        """What the block's `forward_slice` is given: the state of all positions so far, if there are any."""
        return [tuple(t.narrow(POSITIONS, 0, self.length) for t in self._memory)] if self.length else []

    def add(self, state: State) -> State:
        """Add the state of the positions that come next; gives that of all, as views."""
        begin, own = self.length, state[0].shape[POSITIONS]
        end = begin + own
        if not self._memory or end > self._memory[0].shape[POSITIONS]:
            room = max(_ROOM, 2 * end)
            grown = [t.new_empty((*t.shape[:POSITIONS], room, *t.shape[POSITIONS + 1 :])) for t in state]
            for new, old in zip(grown, self._memory, strict=False):
                new.narrow(POSITIONS, 0, begin).copy_(old.narrow(POSITIONS, 0, begin))
            self._memory = grown
        for kept, t in zip(self._memory, state, strict=True):
            kept.narrow(POSITIONS, begin, own).copy_(t)
        self.length = end
        return self.past()[0]

    def shared(self, make: Callable[..., torch.Tensor], *of: Hashable) -> torch.Tensor:
        """What `make(*of)` gives, made once while blocks ask for the same."""
        key = (make, *of)
        if key not in self._notes:
            self._notes.clear()
            self._notes[key] = make(*of)
        return self._notes[key]

    def select(self, rows: Sequence[int]) -> None:
        """Keep some rows of the batch."""
        if self._memory:
            chosen = torch.tensor(rows, device=self._memory[0].device)
            self._memory = [t.index_select(0, chosen) for t in self._memory]
