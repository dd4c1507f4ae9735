"""State of earlier positions that a block needs, if a sequence is processed in slices or generated token by token.

    before = earlier.length                  number of earlier positions
    every = earlier.add(own)                 state of all positions, earlier and new, [batch, heads, positions, ...]

Slices keep the graph for backward. A cache for generated text (`inference.placing.StateCache`) writes into its own
memory instead.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

State: TypeAlias = "tuple[torch.Tensor, ...]"  # tensors of a position that later ones need
POSITIONS = 2  # the axis of a state along which it grows


class EarlierState(Protocol):
    """State of the positions before those that a block is given.

    Attributes:
        length: Number of these positions.
    """

    @property
    def length(self) -> int: ...

    def add(self, state: State) -> State:
        """Add the state of the next positions, and return the state of all positions. Called once per pass."""

    def shared(self, make: Callable[..., torch.Tensor], *of: Hashable) -> torch.Tensor:
        """Return `make(*of)`, computed once per pass if several blocks can share it.

        Args:
            make: Function that computes a tensor.
            of: Arguments of `make`, which identify the result.
        """


class CausalBlock(nn.Module):
    """A module that can process a sequence in slices."""

    def forward_cached(self, x: Any, earlier: EarlierState) -> Any:
        """Compute `forward` for positions that follow earlier ones.

        Args:
            x: Input of the new positions.
            earlier: State of the earlier positions.

        Returns:
            Output of the new positions.
        """
        raise NotImplementedError

    def forward_slice(self, x: Any, past: Sequence[State]) -> tuple[Any, State]:
        """Compute one slice of a sequence that follows earlier slices.

        Args:
            x: Input of the slice.
            past: State of each earlier slice, in order.

        Returns:
            (output of the slice, its state).
        """
        earlier = EarlierSlices(past)
        return self.forward_cached(x, earlier), earlier.state


class EarlierSlices:
    """State of the earlier slices of a sequence.

    Args:
        past: State of each earlier slice, in order.

    Attributes:
        state: State of the new slice, set by `add`.
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


def causal_mask(before: int, length: int, device: torch.device) -> torch.Tensor | None:
    """Return the causal attention mask of `length` tokens that follow `before` others.

    Args:
        before: Number of earlier tokens.
        length: Number of new tokens.
        device: Device of the mask.

    Returns:
        True where a new token attends to a token, bool [length, before + length]; None for a whole sequence or a single
        token, for which attention needs no mask.
    """
    if before == 0 or length == 1:
        return None
    return torch.ones(length, before + length, dtype=torch.bool, device=device).tril(before)
