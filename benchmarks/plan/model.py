"""A model of one's own for the benchmark `plan`: gated feed-forward blocks that see earlier tokens by shifts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from mpitrain.models.losses import cross_entropy

if TYPE_CHECKING:
    from mpitrain.data import Description


class Shifted(nn.Module):
    """[batch, sequence, width] -> the same: a gated mixture of each position and one `distance` before it, added."""

    def __init__(self, width: int, inner: int, distance: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up = nn.Linear(width, inner), nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.distance = distance

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        earlier = functional.pad(y, (0, 0, self.distance, 0))[:, : y.shape[1]]
        return x + self.down(functional.silu(self.gate(earlier)) * self.up(y))


class ShiftModel(nn.Sequential):
    """tokens [batch, sequence] -> scores [batch, sequence, vocabulary]; the head has weights of its own."""

    def __init__(self, vocabulary: int, layers: int, width: int, inner: int) -> None:
        blocks = [Shifted(width, inner, 1 << number % 6) for number in range(layers)]
        super().__init__(nn.Embedding(vocabulary, width), *blocks, nn.LayerNorm(width), nn.Linear(width, vocabulary))
        self.criterion = cross_entropy

    def tensor_plan(self) -> dict[str, str]:
        """The feed-forward layers are divided."""
        return {"*.gate": "column", "*.up": "column", "*.down": "row"}

    def loss(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy in nats a token."""
        return self.criterion(output, y)


def make(description: Description, layers: int = 6, width: int = 192, inner: int = 768) -> nn.Module:
    """For `model.factory`."""
    assert description.vocabulary is not None
    return ShiftModel(description.vocabulary, layers, width, inner)
