"""Small models, and training in one process to compare sharded training with."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from support import config_of
from torch import nn

from mpitrain.models.gpt import GPT
from mpitrain.models.resnet import ResNet
from mpitrain.shard.virtual_workers import VirtualWorkers
from mpitrain.trainer.engine import Engine

VOCABULARY, SEQUENCE, BATCH, STEPS = 17, 6, 10, 10

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=3e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1, fused=True),
}


def gpt() -> GPT:
    """Return a GPT with tied embeddings and odd sizes."""
    torch.manual_seed(3)
    return GPT(vocabulary=VOCABULARY, layers=2, width=12, heads=2)


def resnet() -> nn.Module:
    torch.manual_seed(3)
    return ResNet(18, 4, 1, 3, nn.functional.cross_entropy, small=True, channels_last=False)


def tokens(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator)
    return x, (x * 3 + 1) % VOCABULARY


def on_device(device: torch.device, data: Callable[[int], tuple[torch.Tensor, torch.Tensor]]):
    """Return a function that gives the same data on a device."""

    def moved(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = data(step)
        return x.to(device), y.to(device)

    return moved


def images(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(24, 1, 8, 8, generator=generator), torch.randint(3, (24,), generator=generator)


def train_alone(model, loss, optimizer, data, *, steps=STEPS, clip=0.5) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train with plain torch in one process; return losses and parameters."""
    losses = []
    for step in range(steps):
        x, y = data(step)
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(float(value.detach()))
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def train_steps(
    engine: Engine, comm, data, *, first=0, steps=STEPS, microbatches=1, workers=0, delay=lambda: None
) -> list[float]:
    """Train with an engine, each step's global batch divided among the ranks; return the losses."""
    division = VirtualWorkers.of(comm.size, bool(workers), workers, comm.rank)
    losses = []
    for step in range(first, first + steps):
        x, y = data(step)
        start, stop = division.share(len(x))
        mine = x[start:stop], y[start:stop]
        size = -(-max(hi - lo for lo, hi in pairwise(division.bounds(len(x)))) // microbatches)
        passes = [[(mine[0][lo:hi], mine[1][lo:hi]) for lo, hi in each] for each in division.microbatches(len(x), size)]
        delay()
        parts = engine.forward_backward(passes, len(x), rounds=division.rounds(len(x), size))
        delay()
        engine.step()
        losses.append(division.begin_totals(comm, parts[:, None])()[0])
    return losses


def engine_of(model, comm, optimizer="adamw", *, clip=0.5, reduce_dtype=None, **settings) -> Engine:
    torch_optimizer = OPTIMIZERS[optimizer](model.parameters())
    return Engine(model, model.loss, torch_optimizer, comm, config_of(clip=clip, **settings), reduce_dtype=reduce_dtype)
