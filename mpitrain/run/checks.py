"""Comparison of parameters between the ranks, which must be equal bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mpitrain.run.session import ScriptRun

CHECK_EVERY = 20  # steps of optimizers between two comparisons of parameters
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Checks:
    """Comparison of the steps of all optimizers, and now and then of their parameters.

    Args:
        session: Run of the script.
    """

    def __init__(self, session: ScriptRun) -> None:
        self._session = session
        self._steps = 0
        self._last: list[torch.optim.Optimizer] = []

    def install(self) -> None:
        """Compare before every step of an optimizer."""
        register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._last = [optimizer]
        what = f"step {self._steps} of an optimizer"
        if self._steps % CHECK_EVERY == 0:
            what += f", parameters with checksum {checksum([optimizer]):016x}"
        self._steps += 1
        self._session.meet(what)

    def finish(self) -> None:
        """Compare that all ranks end, with equal parameters of the optimizer that took the last step. Collective."""
        self._session.meet(f"the end of the script, parameters with checksum {checksum(self._last):016x}")


def checksum(optimizers: list[Any]) -> int:
    """Return a number of 64 bits that depends on the bits of all parameters of optimizers, and on their order.

    Args:
        optimizers: Optimizers whose parameters are summed.
    """
    total, number = 0, 1
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if type(p) in (torch.Tensor, torch.nn.Parameter) and p.numel():
                    total += number * sum_of_bits(p)
                    number += 2
    return total % (1 << 64)


def sum_of_bits(x: torch.Tensor) -> int:
    """Return the sum of the elements of a tensor, read as integers; the host waits for it.

    Args:
        x: Dense tensor with at least one element.
    """
    return int(_bits(x.contiguous()).sum(dtype=torch.int64))


def have_same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors of one shape and dtype have the same bits; numbers that are not finite have some."""
    return torch.equal(_bits(a), _bits(b))


def _bits(x: torch.Tensor) -> torch.Tensor:
    data = torch.view_as_real(x.detach()) if x.is_complex() else x.detach()
    return data.view(_INTEGERS[data.element_size()])
