"""Models that the planner is asked about and that are none of the built-in ones."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy


class Whole(nn.Module):
    """Lists no blocks, and computes on what its data say."""

    def __init__(self, asks):
        super().__init__()
        self.first, self.last, self.asks = nn.Linear(64, 32), nn.Linear(32, 10), asks

    def forward(self, x):
        x = torch.relu(self.first(x.flatten(1)))
        if self.asks and float(x.detach().sum()) > 1e9:
            x = x * 2
        return self.last(x)

    def loss(self, output, y):
        return cross_entropy(output, y)


def whole(description, asks=False):
    return Whole(asks)


def sequential(description):
    layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10))
    return layers, nn.CrossEntropyLoss()
