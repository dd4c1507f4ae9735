"""Unusual models for `model.factory`: with blocks of unequal cost, not causal, or with buffers."""

from __future__ import annotations

import math
import time

import torch
from torch import nn
from torch.nn import functional


class Slow(nn.Module):
    """A linear layer that sleeps before it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return self.linear(x)


class SlowHere(nn.Module):
    """Identity that sleeps for `seconds` for each sample, which a test may set apart on each rank."""

    seconds = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds * len(x))
        return x


class Mixes(nn.Module):
    """A layer that is not causal: it adds the mean over all positions to each."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.mean(1, keepdim=True)

    def forward_slice(self, x: torch.Tensor, past: list) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        return self(x), (x,)


def nats(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, -2), y.flatten())


def slow_in_the_middle(description):
    quick = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(nn.Embedding(description.vocabulary, 8), Slow(), *quick, head(description)), nats


def slow_here(description):
    layers = [nn.Linear(8, 8), nn.Tanh(), SlowHere(), nn.Linear(8, 8), nn.Tanh()]
    return nn.Sequential(nn.Embedding(description.vocabulary, 8), *layers, head(description)), nats


def looks_ahead(description):
    return nn.Sequential(nn.Embedding(description.vocabulary, 8), Mixes(), head(description)), nats


def head(description):
    return nn.Linear(8, description.vocabulary)


class Spoiled(nn.Linear):
    """A layer whose output, or only its gradient, is NaN in the training passes `first` to `last`."""

    def __init__(self, width: int, first: int, last: int, gradient: bool) -> None:
        super().__init__(width, width)
        self.range, self.gradient = (first, last), gradient
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.training:
            self.passes += 1
            if self.range[0] <= int(self.passes) <= self.range[1]:
                if not self.gradient:
                    return y * math.nan
                y.register_hook(lambda gradient: gradient * math.inf)
        return y


def spoiled(description, first, last=1_000_000, gradient=False):
    parts = [nn.Embedding(description.vocabulary, 8), Spoiled(8, first, last, gradient), nn.Linear(8, 8), nn.Tanh()]
    return nn.Sequential(*parts, head(description)), nats


def normalized(description):
    """Return a classifier of vectors with a batch norm."""
    parts = [nn.Linear(description.x_shape[0], 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, len(description.classes))]
    return nn.Sequential(*parts), functional.cross_entropy


class Scores(nn.Module):
    """A wrapper of a peft model that maps tokens to scores."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.peft_config = model, model.peft_config

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=x).logits


def of_peft(description, family):
    """Return a transformers model with peft adapters that are initialized from torch's random generator."""
    import hugging_face
    import peft

    base = hugging_face.language_model(family)
    torch.manual_seed(3)
    return Scores(peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))), nats


class Sometimes(nn.Module):
    """A model with a layer that only some samples use (by their first token), and a layer that none uses."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding, self.first = nn.Embedding(vocabulary, 8), nn.Linear(8, 8)
        self.second, self.never = nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(self.embedding(x)).tanh()
        return self.head(y + self.second(y) if int(x[0, 0]) % 4 == 0 else y)


def sometimes(description):
    return Sometimes(description.vocabulary), nats
