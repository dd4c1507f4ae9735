"""What parameters and gradients offer, wherever they are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from mpitrain.comm import Work
from mpitrain.shard.flat import FlatGroup


class Parameters(Protocol):
    """Parameters of several groups in flat memory."""

    def own(self, group: int, lo: int, hi: int) -> torch.Tensor:
        """Elements [lo, hi) of a group, within one of this rank's shares; to be updated in place."""

    def publish(self) -> None:
        """Show every rank what each wrote into its shares. Collective."""

    def nbytes(self) -> float:
        """Bytes of memory that this rank answers for."""

    def free(self) -> None:
        """Give each parameter memory of its own again. Collective."""


class Gradients(Protocol):
    """Buckets are numbered through all groups."""

    groups: Sequence[FlatGroup]

    def place(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Where its next gradient can be computed at once, if nothing is there; given away at most once a pass."""

    def arrived(self, parameter: nn.Parameter) -> None:
        """Its gradient of this backward pass is complete."""

    def start(self, bucket: int, background: bool) -> Work | None: ...

    def end(self, works: Sequence[Work | None]) -> None:
        """Complete the reductions started since the last `end`."""

    def zero(self) -> None:
        """Forget all gradients."""

    def settle(self) -> None:
        """Take over what the parameters' gradients are now."""

    def scale(self, factor: float) -> None: ...

    def own(self, group: int, lo: int, hi: int) -> torch.Tensor:
        """The reduced gradients [lo, hi) of a group, within one of this rank's shares."""

    def nbytes(self) -> tuple[int, int]:
        """Bytes of gradients, and of communication buffers."""

    def free(self) -> None: ...
