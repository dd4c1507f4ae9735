"""Gradients of parameters, which are summed over the ranks when the script first reads one."""

from __future__ import annotations

from typing import Any

import torch

from mpitrain.run.tensors import PendingSum


def install(kind: type[torch.Tensor]) -> None:
    """Let `p.grad` return the sum over the ranks, as a plain tensor. The first read sums all that are pending.

    Args:
        kind: Class whose attribute `grad` is replaced.
    """
    stored: Any = torch._C.TensorBase.grad

    def read(self: torch.Tensor) -> torch.Tensor | None:
        gradient = stored.__get__(self)
        if type(gradient) is PendingSum and not gradient.requires_grad:
            gradient = gradient.whole()
            stored.__set__(self, gradient)
        return gradient

    kind.grad = property(read, stored.__set__, stored.__delete__)  # type: ignore[assignment]
