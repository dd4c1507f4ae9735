"""Models that are not built in, for tests of the planner."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mpitrain.models.gpt import GPT


class Unlisted(nn.Module):
    """A model that lists no blocks; with `reads_values`, its computation depends on the values of its data."""

    def __init__(self, reads_values):
        super().__init__()
        self.first, self.last, self.reads_values = nn.Linear(64, 32), nn.Linear(32, 10), reads_values

    def forward(self, x):
        x = torch.relu(self.first(x.flatten(1)))
        if self.reads_values and float(x.detach().sum()) > 1e9:
            x = x * 2
        return self.last(x)

    def loss(self, output, y):
        return cross_entropy(output, y)


def unlisted(description, reads_values=False):
    return Unlisted(reads_values)


def sequential(description):
    layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10))
    return layers, nn.CrossEntropyLoss()


def counts_positions(description):
    """Return a GPT that, like models of transformers, counts positions along the dimension of sequence parallelism."""
    model = GPT(layers=2, width=16, heads=4, vocabulary=description.vocabulary, max_positions=32)
    model.counts_positions = True
    return model, model.criterion
