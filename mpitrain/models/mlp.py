"""A multilayer perceptron on flattened samples, for classification or regression.

Weights are drawn from torch's default generator: after the same `torch.manual_seed` they are equal on every rank.
"""

from __future__ import annotations

import torch
from torch import nn

from mpitrain.models.task import BlockModel, Criterion


class MLP(BlockModel):
    """A multilayer perceptron: hidden layers of linear, ReLU and dropout, then a linear head.

    Args:
        inputs: Numbers per sample.
        outputs: Numbers in an output.
        layers: Number of hidden layers.
        width: Features of a hidden layer.
        criterion: Loss function of (output, y).
        dropout: Probability of dropout after each hidden layer.

    Shape:
        Input [batch, ...] of any real dtype, output [batch, outputs].
    """

    def __init__(
        self, inputs: int, outputs: int, layers: int, width: int, criterion: Criterion, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.flatten = Flatten()
        self.hidden = nn.ModuleList(HiddenLayer(width if index else inputs, width, dropout) for index in range(layers))
        self.head = nn.Linear(width if layers else inputs, outputs)
        self.criterion = criterion

    def pipeline_blocks(self) -> list[tuple[str, nn.Module]]:
        """Return (name, module) in order; applying them to x one after the other equals `model(x)`."""
        hidden = [(f"hidden.{index}", layer) for index, layer in enumerate(self.hidden)]
        return [("flatten", self.flatten), *hidden, ("head", self.head)]

    def tensor_plan(self) -> dict[str, str]:
        """Return how each layer may be divided over tensor ranks: in pairs, with one sum over ranks after each pair.

        With an even number of hidden layers, the head is not divided.
        """
        linear = [f"hidden.{index}.0" for index in range(len(self.hidden))] + ["head"]
        pairs = zip(linear[::2], linear[1::2], strict=False)
        return {name: style for pair in pairs for name, style in zip(pair, ("column", "row"), strict=True)}


class HiddenLayer(nn.Sequential):
    """A hidden layer: linear, ReLU, dropout. It is a block, which is recomputed and gathered as a whole.

    Args:
        inputs: Features of the input.
        width: Features of the output.
        dropout: Probability of dropout.

    Shape:
        Input [batch, inputs], output [batch, width].
    """

    def __init__(self, inputs: int, width: int, dropout: float) -> None:
        linear = nn.Linear(inputs, width)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        nn.init.zeros_(linear.bias)
        super().__init__(linear, nn.ReLU(), nn.Dropout(dropout))


class Flatten(nn.Module):
    """Flattening of [batch, ...] of any real dtype to [batch, numbers] in floating point."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x if x.is_floating_point() else x.float()).flatten(1)
