"""Gradients of parameters, which are summed over the ranks when the script first reads one."""

from __future__ import annotations

from typing import Any

import torch

from mpitrain.run.tensors import PendingSum

_STORED: Any = torch._C.TensorBase.grad


def stored_sum(p: torch.Tensor) -> PendingSum | None:
    """Return the gradient of a parameter if it is a sum that is pending, else None."""
    out = _STORED.__get__(p)
    return out if type(out) is PendingSum and out.cell.is_pending else None


def install(kind: type[torch.Tensor]) -> None:
    """Let `p.grad` return the sum over the ranks, as a plain tensor. The first read sums all that are pending.

    A sum that one rank has is returned as it is; whoever computes with it gets it from there.

    Args:
        kind: Class whose attribute `grad` is replaced.
    """

    def read(self: torch.Tensor) -> torch.Tensor | None:
        gradient = _STORED.__get__(self)
        if type(gradient) is PendingSum and not gradient.requires_grad:
            if gradient.cell.is_pending and gradient.cell.owner is None:
                gradient.session.sums.settle()
            if gradient.cell.owner is None:
                gradient = gradient.local
                _STORED.__set__(self, gradient)
        return gradient

    kind.grad = property(read, _STORED.__set__, _STORED.__delete__)  # type: ignore[assignment]
