"""Task: the module and the loss that the trainer trains.

Built-in models and the user's own models have the same form, so the code that trains them does not distinguish them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mpitrain.layers.lora import BaseWeights

Criterion = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # maps (output, y) to the loss


class BlockModel(nn.Module):
    """A model whose forward pass runs its blocks in order and whose loss is `criterion(output, y)`."""

    criterion: Criterion

    def pipeline_blocks(self) -> list[tuple[str, nn.Module]]:
        """Return the (name, module) pair of each block, in forward order. Every model defines it."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _, block in self.pipeline_blocks():
            x = block(x)
        return x

    def loss(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over the samples of the batch; for tokens, in nats per token.

        Args:
            output: Output of the model.
            y: Targets of the batch.
        """
        return self.criterion(output, y)


@dataclass(frozen=True)
class TrainedBase:
    """Pretrained weights for a model that gets adapters.

    Attributes:
        checkpoint: Folder that the weights are read from.
        fill: Function that loads the weights into a newly built model.
    """

    checkpoint: str
    fill: Callable[[nn.Module], None]


@dataclass(frozen=True)
class Task:
    """A module and its loss function.

    Attributes:
        module: Module to train.
        loss: Function of (output, y) that returns a scalar: the mean over the samples of the batch, or over the number
            that `loss_terms.counted` returns.
        base: Frozen weights under adapters; checkpoints then contain only the adapters. None if the whole model is
            saved.
    """

    module: nn.Module
    loss: Callable[[Any, Any], torch.Tensor]
    base: BaseWeights | None = None
