"""The two losses of the built-in models. Both are means over samples, so that the mean over equal shares of
a batch is the mean over the batch."""

from __future__ import annotations

import torch
from torch.nn import functional


def cross_entropy(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Nats. output: [..., classes] scores, any float dtype; y: [...] class indices, int64.

    Taken in at least fp32, whatever the scores are. As all samples have the same number of tokens, the mean over
    tokens is the mean over samples.
    """
    return functional.cross_entropy(widened(output).flatten(0, -2), y.flatten())


def squared_error(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean over samples and numbers. output: [batch, numbers]; y: as many numbers per sample, in any shape.

    y is brought to output's shape first: [batch] against [batch, 1] would broadcast to a wrong mean.
    """
    output = widened(output)
    return functional.mse_loss(output, y.reshape(output.shape).to(output.dtype))


def widened(x: torch.Tensor) -> torch.Tensor:
    """At least fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
