"""What the trainer gets to train: a module and its loss.

Built-in models and the user's own are handed over in the same form, so nothing after this room knows which
one it has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mpitrain.layers.lora import BaseWeights

Criterion = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of output and y: the loss


class BlockModel(nn.Module):
    """A model whose forward pass is its blocks in order, and whose loss is a criterion(output, y)."""

    criterion: Criterion

    def pipeline_blocks(self) -> list[tuple[str, nn.Module]]:
        """(name, module) of each block, in order: every model says which."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _, block in self.pipeline_blocks():
            x = block(x)
        return x

    def loss(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Mean over the samples of the batch; of tokens, in nats per token."""
        return self.criterion(output, y)


@dataclass(frozen=True)
class TrainedBase:
    """Trained weights for a model that gets adapters.

    checkpoint: The folder that they come from. fill: Puts them into the model that was just made.
    """

    checkpoint: str
    fill: Callable[[nn.Module], None]


@dataclass(frozen=True)
class Task:
    """loss(module(x), y) is a scalar: the mean over the samples of the batch, or what `loss_terms.counted` says.

    base: what is frozen under adapters, which checkpoints then hold alone; None where all of the model is saved.
    """

    module: nn.Module
    loss: Callable[[Any, Any], torch.Tensor]
    base: BaseWeights | None = None
