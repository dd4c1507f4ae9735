"""The losses of the built-in models. All are means over samples, so that the mean over equal shares of
a batch is the mean over the batch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from mpitrain.layers.loss_terms import UNCOUNTED


def cross_entropy(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Nats. output: [..., classes] scores, any float dtype; y: [...] class indices, int64.

    Taken in at least fp32, whatever the scores are. As all samples have the same number of tokens, the mean over
    tokens is the mean over samples.
    """
    return functional.cross_entropy(widened(output).flatten(0, -2), y.flatten())


class MaskedCrossEntropy(nn.Module):
    """Cross-entropy of targets of which some, -100, do not count.

    A sample's loss is the mean over its targets that count (0 where none does), and the whole is the mean over samples:
    a mean over all that count would depend on how samples are divided over microbatches and ranks.

    Shape:
        output [batch, ..., classes], any float dtype; y [batch, ...], int64.
    """

    by_sample = True  # so that the cross-entropy of divided scores is taken alike
    counted = staticmethod(len)  # samples

    def forward(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        each = functional.cross_entropy(
            widened(output).flatten(0, -2), y.flatten(), ignore_index=UNCOUNTED, reduction="none"
        )
        counted = (y != UNCOUNTED).flatten(1).sum(1).clamp(min=1)
        return (each.view(len(y), -1).sum(1) / counted).mean()


class WeightedCrossEntropy:
    """Cross-entropy in which each class has a weight, of a part of a batch; without gradients the plain one.

    Evaluation then measures what it measures without weights, so that losses can be compared.

    Args:
        weights: Weight of each class, float32 [classes].

    Attributes:
        scale: The targets of the whole batch over the sum of their weights; set before each step.

    Shape:
        output [..., classes], any float dtype; y [...], int64.
    """

    counted = staticmethod(len)  # samples, as it is part of a mean over the whole batch

    def __init__(self, weights: torch.Tensor) -> None:
        self.weights, self.scale = weights, torch.ones(())

    def __call__(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return cross_entropy(output, y)
        self.weights, self.scale = self.weights.to(output.device), self.scale.to(output.device)
        scores = widened(output).flatten(0, -2)
        total = functional.cross_entropy(scores, y.flatten(), weight=self.weights.to(scores.dtype), reduction="sum")
        return total * self.scale / y.numel()


def squared_error(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean over samples and numbers. output: [batch, numbers]; y: as many numbers per sample, in any shape.

    y is brought to output's shape first: [batch] against [batch, 1] would broadcast to a wrong mean.
    """
    output = widened(output)
    return functional.mse_loss(output, y.reshape(output.shape).to(output.dtype))


squared_error.counted = len  # type: ignore[attr-defined]  # samples, also where y are whole numbers


def widened(x: torch.Tensor) -> torch.Tensor:
    """At least fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
