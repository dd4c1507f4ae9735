"""The collectives a compression is made of, carried out in the thread it runs in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpitrain.comm.runtime.ordering import Call

Bind = Callable[..., Call]
# (bind, tensors, which of them it writes): as `Dispatcher.carry_out`, with a binder
CarryOut = Callable[[Bind, Sequence[torch.Tensor], Sequence[bool]], None]


class Channel:
    """Stands for a `Communicator` inside one of its operations, so that all of that stays one operation."""

    def __init__(self, size: int, carry_out: CarryOut, all_reduce: Bind, all_gather: Bind) -> None:
        """all_reduce, all_gather: bind these operations, given a binder and their arguments."""
        self.size = size
        self._carry_out, self._all_reduce, self._all_gather = carry_out, all_reduce, all_gather

    def all_reduce(
        self, x: torch.Tensor, op: str = "sum", algorithm: str = "auto", *, reproducible: bool = False
    ) -> None:
        def bind(binder: Any, x: torch.Tensor) -> Call:
            return self._all_reduce(binder, x, op, algorithm, reproducible)

        self._carry_out(bind, (x,), (True,))

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        def bind(binder: Any, out: torch.Tensor, x: torch.Tensor) -> Call:
            return self._all_gather(binder, out, x, "auto", None)

        self._carry_out(bind, (out, x), (True, False))
