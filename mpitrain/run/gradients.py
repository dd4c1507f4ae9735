"""Gradients of parameters, which are summed over the ranks when the script first reads one."""

from __future__ import annotations

from typing import Any

import torch

from mpitrain.run.tensors import PendingSum, WholeTensor

_STORED: Any = torch._C.TensorBase.grad
_DATA: Any = torch._C.TensorBase.data


def stored_sum(p: torch.Tensor) -> PendingSum | None:
    """Return the gradient of a parameter if it is a sum that is pending, else None."""
    out = _STORED.__get__(p)
    return out if type(out) is PendingSum and out.cell.is_pending else None


def install(kind: type[torch.Tensor]) -> None:
    """Let `p.grad` return the sum over the ranks, as a plain tensor. The first read sums all that are pending.

    A sum that one rank has is returned as it is; whoever computes with it gets it from there. `p.data = x` takes the
    whole of a batch x, whose memory torch would look for in vain.

    Args:
        kind: Class whose attributes `grad` and `data` are replaced.
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

    def write_data(self: torch.Tensor, value: torch.Tensor) -> None:
        is_other = isinstance(value, WholeTensor) and not isinstance(self, WholeTensor)
        _DATA.__set__(self, value.whole().clone() if is_other else value)  # type: ignore[attr-defined]

    kind.data = property(_DATA.__get__, write_data)  # type: ignore[assignment]
    kind.grad = property(read, _STORED.__set__, _STORED.__delete__)  # type: ignore[assignment]
