"""Outer optimizers: what becomes of the parameters that all groups share, given how far the groups went from them.

In the terms of Douillard et al. 2023 (DiLoCo), the parameters at which a period begins are theta, the groups end it at
theta_i, and the outer gradient is theta - mean(theta_i). What is handed in here is its negative, the mean difference.

    average    theta + mean difference, which is mean(theta_i): local SGD (Stich 2019)
    nesterov   one step of SGD with Nesterov momentum, as `torch.optim.SGD(nesterov=True)` computes it
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from mpitrain.choices import Outer


class OuterOptimizer(ABC):
    """Updates what all groups share. Its states are flat tensors of this rank's slice, alike in all groups.

    Attributes:
        momenta: Of each slice its momentum; empty where there is none.
    """

    def __init__(self) -> None:
        self.momenta: list[torch.Tensor] = []

    @abstractmethod
    def step(self, number: int, anchor: torch.Tensor, difference: torch.Tensor) -> None:
        """Update a slice in place.

        Args:
            number: Of the slice.
            anchor: The shared parameters in it.
            difference: Mean of the groups' parameters less those that they started from; lost.
        """


class OuterAverage(OuterOptimizer):
    """The mean of the groups' parameters."""

    def step(self, number: int, anchor: torch.Tensor, difference: torch.Tensor) -> None:
        anchor.add_(difference)


class OuterNesterov(OuterOptimizer):
    """SGD with Nesterov momentum.

    Args:
        slices: One tensor of each slice, for its length, dtype and device.
        lr: Learning rate.
        momentum: At least 0, below 1.
    """

    def __init__(self, slices: list[torch.Tensor], lr: float, momentum: float) -> None:
        super().__init__()
        self.momenta = [torch.zeros_like(s) for s in slices]
        self._lr, self._momentum = lr, momentum

    def step(self, number: int, anchor: torch.Tensor, difference: torch.Tensor) -> None:
        gradient, buffer = difference.neg_(), self.momenta[number]
        buffer.mul_(self._momentum).add_(gradient)
        anchor.add_(gradient.add_(buffer, alpha=self._momentum), alpha=-self._lr)


def make_outer(name: Outer, slices: list[torch.Tensor], lr: float, momentum: float) -> OuterOptimizer:
    """The outer optimizer that parallel.outer names; the rest as of `OuterNesterov`."""
    return OuterNesterov(slices, lr, momentum) if name == "nesterov" else OuterAverage()
