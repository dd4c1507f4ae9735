"""Losses of the built-in models.

Each loss is a mean over samples, so the mean over equal shares of a batch is the mean over the batch.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from mpitrain.layers.loss_terms import UNCOUNTED


def cross_entropy(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy in nats, computed in at least fp32.

    Because all samples have the same number of tokens, the mean over tokens is also the mean over samples.

    Args:
        output: Scores [..., classes], any float dtype.
        y: Class indices [...], int64.
    """
    return functional.cross_entropy(widen(output).flatten(0, -2), y.flatten())


class MaskedCrossEntropy(nn.Module):
    """Cross-entropy in which targets of -100 are masked.

    A sample's loss is the mean over its unmasked targets, or 0 if it has none. The result is the mean over samples. A
    mean over all unmasked targets would depend on how the samples are divided over microbatches and ranks.

    Shape:
        output [batch, ..., classes], any float dtype; y [batch, ...], int64.
    """

    by_sample = True  # so that the cross-entropy of divided scores takes the same mean
    counted = staticmethod(len)  # samples

    def forward(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        each = functional.cross_entropy(
            widen(output).flatten(0, -2), y.flatten(), ignore_index=UNCOUNTED, reduction="none"
        )
        counted = (y != UNCOUNTED).flatten(1).sum(1).clamp(min=1)
        return (each.view(len(y), -1).sum(1) / counted).mean()


class WeightedCrossEntropy:
    """Cross-entropy with class weights, for one part of a batch.

    Where gradients are disabled, as in evaluation, all classes have weight 1, so that losses can be compared with those
    of unweighted training.

    Args:
        weights: Weight of each class, float32 [classes].

    Attributes:
        scale: Number of targets in the whole batch divided by the sum of their weights, a scalar tensor; set before
            each step.

    Shape:
        output [..., classes], any float dtype; y [...], int64.
    """

    counted = staticmethod(len)  # samples, because the result is part of a mean over the whole batch

    def __init__(self, weights: torch.Tensor) -> None:
        self.weights, self.scale = weights, torch.ones(())

    def __call__(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return cross_entropy(output, y)
        self.weights, self.scale = self.weights.to(output.device), self.scale.to(output.device)
        scores = widen(output).flatten(0, -2)
        total = functional.cross_entropy(scores, y.flatten(), weight=self.weights.to(scores.dtype), reduction="sum")
        return total * self.scale / y.numel()


def squared_error(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error over samples and values.

    `y` is first reshaped to the shape of `output`, because [batch] against [batch, 1] would broadcast to a wrong mean.

    Args:
        output: Predictions [batch, values], any float dtype.
        y: Targets, in any shape with the same number of values per sample.
    """
    output = widen(output)
    return functional.mse_loss(output, y.reshape(output.shape).to(output.dtype))


squared_error.counted = len  # type: ignore[attr-defined]  # samples, even if y has an integer dtype


def widen(x: torch.Tensor) -> torch.Tensor:
    """Return x in at least fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
