"""What a block asks of earlier positions, while a sequence comes slice by slice or a text grows.

    before = earlier.length                  positions so far
    every = earlier.add(own)                 the state of all of them and the new ones, [batch, heads, positions, ...]

Slices keep the graph for backward. A cache of generated text (`inference.placing.StateCache`) writes
into memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

State: TypeAlias = "tuple[torch.Tensor, ...]"  # what later positions need of earlier ones
POSITIONS = 2  # the axis of a state along which it grows


class Earlier(Protocol):
    """The positions before those that a block is given. length: how many they are."""

    @property
    def length(self) -> int: ...

    def add(self, state: State) -> State:
        """Take the state of the positions that come next; returns that of all. Called once a pass."""

    def shared(self, make: Callable[..., torch.Tensor], *of: Hashable) -> torch.Tensor:
        """What `make(*of)` gives, where blocks can share it made once a pass."""


class LooksBack(nn.Module):
    """A module whose sequences may come slice by slice."""

    def forward_cached(self, x: Any, earlier: Earlier) -> Any:
        """As `forward`, for positions after earlier ones."""
        raise NotImplementedError

    def forward_slice(self, x: Any, past: Sequence[State]) -> tuple[Any, State]:
        """A slice of the sequence, after earlier ones. past: their states; also returns this one's."""
        earlier = EarlierSlices(past)
        return self.forward_cached(x, earlier), earlier.state


class EarlierSlices:
    """The states of earlier slices of a sequence.

    Args:
        past: They, in order.

    Attributes:
        state: That of the new slice, when it was told.
    """

    def __init__(self, past: Sequence[State]) -> None:
        self._past = past
        self.state: State = ()

    @property
    def length(self) -> int:
        return sum(state[0].shape[POSITIONS] for state in self._past)

    def add(self, state: State) -> State:
        self.state = state
        if not self._past:
            return state
        return tuple(torch.cat(each, POSITIONS) for each in zip(*self._past, state, strict=True))

    def shared(self, make: Callable[..., torch.Tensor], *of: Hashable) -> torch.Tensor:
        return make(*of)


def seen_before(before: int, length: int, device: torch.device) -> torch.Tensor | None:
    """Which tokens `length` ones see after `before` others: all up to themselves, [length, tokens].

    None where that is what attention does without a mask: of a whole sequence, and of one token.
    """
    if before == 0 or length == 1:
        return None
    return torch.ones(length, before + length, dtype=torch.bool, device=device).tril(before)
