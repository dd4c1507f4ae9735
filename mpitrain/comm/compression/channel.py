"""The collectives a compression is made of, carried out by the operations of the thread it runs in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from mpitrain.comm.runtime.ordering import Call

if TYPE_CHECKING:
    from mpitrain.comm.collectives.operations import Operations

# (bind, tensors, which of them it writes): as in `Communicator._run`, but at once
CarryOut = Callable[["Callable[..., Call]", Sequence[torch.Tensor], Sequence[bool]], None]


class Channel:
    """Stands for a `Communicator` inside one of its operations, so that all of that stays one operation."""

    def __init__(self, size: int, carry_out: CarryOut) -> None:
        self.size = size
        self._carry_out = carry_out

    def all_reduce(
        self, x: torch.Tensor, op: str = "sum", algorithm: str = "auto", *, reproducible: bool = False
    ) -> None:
        def bind(o: Operations, x: torch.Tensor) -> Call:
            return o.all_reduce(x, op, algorithm, reproducible)

        self._carry_out(bind, (x,), (True,))

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        def bind(o: Operations, out: torch.Tensor, x: torch.Tensor) -> Call:
            return o.all_gather(out, x, [x.numel()] * self.size, "auto")

        self._carry_out(bind, (out, x), (True, False))
