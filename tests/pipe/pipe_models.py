"""Small models for pipelines, and training in one process to compare with."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from mpitrain.comm import Communicator
from mpitrain.models.gpt import GPT
from mpitrain.pipe.pipeline import Pipeline

Microbatches = Sequence[tuple[torch.Tensor, torch.Tensor]]

SCHEDULES = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "interleaved": {"schedule": "interleaved", "chunks": 2},
    "zb-h1": {"schedule": "zero-bubble"},
    "zb-v": {"schedule": "zero-bubble", "chunks": 2},
    "terapipe": {"schedule": "terapipe", "slices": 3},
    "1f1b-slices": {"schedule": "1f1b", "slices": 3},
    "interleaved-slices": {"schedule": "interleaved", "chunks": 2, "slices": 2},
}
WHOLE = [kind for kind, options in SCHEDULES.items() if "slices" not in options]  # for models without sequences


def gpt(layers: int = 5) -> GPT:
    """Return a GPT with a tied embedding: layers + 4 blocks."""
    torch.manual_seed(0)
    return GPT(30, layers, 8, 2)


def tokens(count: int, samples: int = 2, sequence: int = 6) -> Microbatches:
    draw = torch.Generator().manual_seed(count)
    return [
        (
            torch.randint(30, (samples, sequence), generator=draw),
            torch.randint(30, (samples, sequence), generator=draw),
        )
        for _ in range(count)
    ]


def layers(count: int = 8) -> nn.Sequential:
    """Return a model without tied parameters."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(count)))


def numbers(count: int, samples: int = 3) -> Microbatches:
    draw = torch.Generator().manual_seed(count)
    return [(torch.randn(samples, 5, generator=draw), torch.randn(samples, 5, generator=draw)) for _ in range(count)]


def mean_square(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(output, y)


def even(count: int) -> list[float]:
    return [1.0 / count] * count


def step_alone(model: nn.Module, loss, microbatches: Microbatches, weights: Sequence[float]) -> float:
    """Compute loss and gradients in one process, without a pipeline."""
    model.zero_grad()
    total = 0.0
    for (x, y), weight in zip(microbatches, weights, strict=True):
        part = loss(model(x), y) * weight
        part.backward()
        total += float(part.detach())
    return total


def descend(module: nn.Module, rate: float = 0.3) -> None:
    with torch.no_grad():
        for p in module.parameters():
            p -= rate * p.grad


def largest_error(pipeline: Pipeline, alone: nn.Module) -> float:
    """Return the largest gradient error against one process, relative to each parameter's largest gradient."""
    parameters = dict(alone.named_parameters(remove_duplicate=False))
    errors = [0.0]
    for name, p in pipeline.module.named_parameters():
        expected = parameters[name].grad
        errors.append(float((p.grad.cpu() - expected).abs().max() / expected.abs().max().clamp_min(1e-12)))
    return max(errors)


def train_both(
    world: Communicator, model_of, loss_of, options: dict, batches: Sequence[Microbatches], device=None
) -> tuple[Pipeline, nn.Module, list[tuple[float, float, float]]]:
    """Take a step on each batch; return for each (pipeline loss, one process's loss, largest gradient error)."""
    alone, divided = model_of(), model_of()
    pipeline = Pipeline(divided, loss_of(divided), world, microbatches=max(map(len, batches)), device=device, **options)
    results = []
    for microbatches in batches:
        weights = even(len(microbatches))
        expected = step_alone(alone, loss_of(alone), microbatches, weights)
        pipeline.module.zero_grad()
        loss = pipeline.forward_backward([(x.to(device), y.to(device)) for x, y in microbatches], weights)
        pipeline.synchronize_tied()
        results.append((loss, expected, largest_error(pipeline, alone)))
        descend(alone)
        descend(pipeline.module)
    return pipeline, alone, results


class Laborious(nn.Module):
    """Layer that keeps the processor busy for some seconds of its forward pass, beside its linear layer."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(5, 5), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        end = time.thread_time() + self.seconds
        while time.thread_time() < end:
            pass
        return self.linear(x)


class Late(torch.autograd.Function):
    """Identity that sleeps for some time in forward and backward."""

    @staticmethod
    def forward(ctx, x, delay):
        ctx.delay = delay
        time.sleep(delay())
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.delay())
        return gradient, None


class Delay(nn.Module):
    """Layer that delays forward and backward by `delay()` seconds, drawn anew at each call."""

    def __init__(self, delay) -> None:
        super().__init__()
        self.delay = delay

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Late.apply(x, self.delay)
