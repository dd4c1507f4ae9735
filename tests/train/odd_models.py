"""Models for `model.factory`: one whose blocks take unequally long, one that is not causal, one with buffers."""

from __future__ import annotations

import math
import time

import torch
from torch import nn
from torch.nn import functional


class Slow(nn.Module):
    """Takes some time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return self.linear(x)


class Mixes(nn.Module):
    """Every position gets something of all others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.mean(1, keepdim=True)

    def forward_slice(self, x: torch.Tensor, past: list) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        return self(x), (x,)


def nats(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, -2), y.flatten())


def slow_in_the_middle(description):
    quick = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(nn.Embedding(description.vocabulary, 8), Slow(), *quick, head(description)), nats


def looks_ahead(description):
    return nn.Sequential(nn.Embedding(description.vocabulary, 8), Mixes(), head(description)), nats


def head(description):
    return nn.Linear(8, description.vocabulary)


class Spoiled(nn.Linear):
    """Its output is NaN in the passes `first` to `last` of training, which it counts; or only its gradient."""

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
    """A classifier of vectors that normalizes over its samples."""
    parts = [nn.Linear(description.x_shape[0], 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, len(description.classes))]
    return nn.Sequential(*parts), functional.cross_entropy


class Scores(nn.Module):
    """A model of peft: tokens to scores."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.peft_config = model, model.peft_config

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=x).logits


def of_peft(description, family):
    """One of transformers with adapters of peft, which begin as the generator draws them."""
    import hugging_face
    import peft

    base = hugging_face.language_model(family)
    torch.manual_seed(3)
    return Scores(peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))), nats


class Sometimes(nn.Module):
    """Two layers, of which samples that begin with some tokens alone use the second, and one that nobody uses."""

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
