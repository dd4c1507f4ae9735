"""Optimizers that torch lacks and that update each element by itself, so that they can be sharded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Steps of one size in the direction of a momentum's sign (Chen et al. 2023, "Symbolic discovery of optimization
    algorithms", algorithm 2); one state an element.

    Args:
        params: As of torch.optim.AdamW, as all the rest.
        betas: How much of the momentum is in the direction, and how much of it stays.
    """

    elementwise = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: Sequence[float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": _checked(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update."""
        for group in self.param_groups:
            first, second = group["betas"]
            for value in group["params"]:
                if value.grad is None:
                    continue
                state = self.state[value]
                if not state:
                    state["exp_avg"] = torch.zeros_like(value)
                momentum = state["exp_avg"]
                direction = momentum.mul(first).add_(value.grad, alpha=1 - first).sign_()
                value.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
                momentum.mul_(second).add_(value.grad, alpha=1 - second)


class UncorrectedAdamW(torch.optim.Optimizer):
    """AdamW without the division of its averages by what they lack in the first steps, as BERT was trained (Devlin et
    al. 2019).

    Args:
        params: As of torch.optim.AdamW, as all the rest.
        decoupled: Whether weight decay is apart from the gradient; else it is added to that, as in Adam.
    """

    elementwise = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled: bool = True,
    ) -> None:
        given = {"lr": lr, "betas": _checked(betas), "eps": eps, "weight_decay": weight_decay, "decoupled": decoupled}
        super().__init__(params, given)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update."""
        for group in self.param_groups:
            first, second = group["betas"]
            for value in group["params"]:
                gradient = value.grad
                if gradient is None:
                    continue
                state = self.state[value]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(value), torch.zeros_like(value)
                if group["decoupled"]:
                    value.mul_(1 - group["lr"] * group["weight_decay"])
                elif group["weight_decay"]:
                    gradient = gradient.add(value, alpha=group["weight_decay"])
                state["exp_avg"].lerp_(gradient, 1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
                value.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(group["eps"]), value=-group["lr"])


def _checked(betas: Sequence[float]) -> tuple[float, float]:
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"betas {list(betas)} are not two numbers from 0 to below 1")
    return betas[0], betas[1]
