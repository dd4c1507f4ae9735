"""Metrics, and models with metrics of their own, as users write them."""

from __future__ import annotations

import math

import torch
from torch import nn


def margin(output, y):
    """Return for each sample the distance of the best score from the mean score."""
    return (output.amax(-1) - output.mean(-1)).reshape(len(y), -1).mean(1)


def mean_margin(output, y):
    return margin(output, y).mean().item()


margin.higher_is_better = True
mean_margin.higher_is_better = False


def without_direction(output, y):
    return 0.0


def accuracy(output, y):
    return 0.0


def broken(output, y):
    raise ValueError("no such thing")


def wrong_shape(output, y):
    return torch.zeros(len(y) + 1)


class WithMetrics(nn.Sequential):
    higher_is_better = {"off": False}  # noqa: RUF012

    def loss(self, output, y):
        return nn.functional.cross_entropy(output, y)

    def metrics(self, output, y):
        return {"off": (output.argmax(1) != y).float(), "largest": output.amax(1).mean()}


def with_metrics(description, width=8):
    """Return a `WithMetrics` model; it is an `nn.Sequential`, so a pipeline can cut it."""
    numbers = math.prod(description.x_shape)
    return WithMetrics(nn.Flatten(), nn.Linear(numbers, width), nn.ReLU(), nn.Linear(width, len(description.classes)))
