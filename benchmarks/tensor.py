"""Tensor parallelism against torch's (DTensor over gloo): the same transformer blocks, forward and backward.

These contenders are timed for each shape (samples x tokens x width), with two GPT blocks that have 4 x width inner
features in the MLP and 64 features per head:

    mpitrain            `mpitrain.tensor.parallelize`; every rank has all activations outside the pairs of layers
    sequence            `parallelize` with sequence=True: these activations are divided along the sequence
    torch               torch.distributed.tensor.parallel.parallelize_module, ColwiseParallel and RowwiseParallel
    one process         the whole blocks on every rank, not divided

All contenders have the same weights and the same input. The first three must have the output and the gradient of the
input that one process has, or the benchmark fails. A measurement is one forward and one backward pass. When a
contender's turn comes, its weights and activations are in main memory, as far as the others have displaced them from
the caches.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from statistics import geometric_mean
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.runner.jobs import BenchmarkParser, run, summaries, timed
from benchmarks.runner.peers import gloo
from benchmarks.runner.report import Report, ReportTable, milliseconds, target_of
from mpitrain.comm import Communicator
from mpitrain.errors import CommunicationError, InputError
from mpitrain.layout.boxes import split
from mpitrain.speeds.timing import Contender
from mpitrain.tensor import Axis, Column, ParallelStyle, parallelize

Shape = tuple[int, int, int]  # samples, tokens per sample, width

SHAPES: tuple[Shape, ...] = ((1, 64, 256), (1, 128, 256), (4, 128, 256), (1, 128, 512), (4, 128, 512), (8, 256, 512))
QUICK_SHAPES: tuple[Shape, ...] = ((1, 64, 256), (4, 128, 256))
LAYERS = 2
HEAD = 64  # features
TARGET = 2.0  # target: times as fast as torch
CONTENDERS = ("mpitrain", "sequence", "torch", "one process")


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and return its exit code."""
    what = "Compare tensor-parallel transformer blocks with torch's DTensor over gloo."
    parser = BenchmarkParser("tensor", what, "2", repeats=31, seconds=60.0, of="one shape", quick=(5, 60.0))
    return run(parser, measure, report, arguments)


class DivisibleBlock(nn.Module):
    """A transformer block whose fused qkv layer is ordered [heads, 3, head_dim], so that torch can divide it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "out": nn.Linear(width, width)})
        self.mlp = nn.Sequential()
        self.mlp.add_module("up", nn.Linear(width, 4 * width))
        self.mlp.add_module("activation", nn.GELU(approximate="tanh"))
        self.mlp.add_module("down", nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the block, in the shape [samples, tokens, width] of x."""
        qkv = self.attention["qkv"](self.attention_norm(x)).unflatten(-1, (-1, 3, HEAD)).transpose(1, 2)
        q, k, v = qkv.unbind(3)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention["out"](mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


def measure(world: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """Time a forward and backward pass of each contender for each shape. Collective.

    Args:
        world: Communicator of all ranks.
        options: Options of the command.

    Returns:
        Median and best seconds, by shape and contender.
    """
    shapes = QUICK_SHAPES if options.quick else SHAPES
    if any(width // HEAD % world.size for _, _, width in shapes):
        raise InputError(
            f"blocks with 4 and 8 heads cannot be divided over {world.size} ranks; use 2 or 4 ranks", agreed=True
        )
    with gloo(world):
        return {"x".join(map(str, shape)): _measure(world, shape, options) for shape in shapes}


def _measure(world: Communicator, shape: Shape, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    torch.manual_seed(1)
    whole = nn.Sequential(*(DivisibleBlock(shape[2]) for _ in range(LAYERS)))
    x, weights = torch.randn(shape), torch.randn(shape)
    axis, along = Axis(world), Axis(world)
    qkv = Column(sections=1, heads=shape[2] // HEAD)
    plan: dict[str, str | ParallelStyle] = {"*.qkv": qkv, "*.out": "row", "*.up": "column", "*.down": "row"}
    mine = split(shape[1], world.size)
    part = slice(mine[world.rank], mine[world.rank + 1])
    steps = {
        "mpitrain": _step(parallelize(copy.deepcopy(whole), axis, plan), x, weights),
        "sequence": _step(
            parallelize(copy.deepcopy(whole), along, plan, sequence=True), x[:, part].clone(), weights[:, part].clone()
        ),
        "torch": _step(_of_torch(copy.deepcopy(whole), world), x, weights),
        "one process": _step(whole, x, weights),
    }
    expected = steps["one process"]()
    _compare("mpitrain", steps["mpitrain"](), expected)
    _compare("torch", steps["torch"](), expected)
    _compare("mpitrain, sequence=True", steps["sequence"](), [t[:, part] for t in expected])
    contenders = {name: Contender(step) for name, step in steps.items()}
    times = timed(world, " x ".join(map(str, shape)), contenders, options)
    axis.free()
    along.free()
    return summaries(times)


def _step(model: nn.Module, x: torch.Tensor, weights: torch.Tensor) -> Callable[[], Sequence[torch.Tensor]]:
    """Return a function that runs one forward and backward pass and returns its output and the gradient of `x`.

    Args:
        model: The blocks.
        x: Input.
        weights: Gradient of the output.
    """
    parameters = list(model.parameters())

    def step() -> Sequence[torch.Tensor]:
        for parameter in parameters:
            parameter.grad = None
        into = x.detach().requires_grad_()
        out = model(into)
        out.backward(weights)
        assert into.grad is not None
        return out.detach(), into.grad

    return step


def _of_torch(model: nn.Module, world: Communicator) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (world.size,))
    styles: dict[str, Any] = {name: ColwiseParallel() for name in ("*.attention.qkv", "*.mlp.up")}
    styles |= {name: RowwiseParallel() for name in ("*.attention.out", "*.mlp.down")}
    return parallelize_module(model, mesh, styles)


def _compare(name: str, result: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for a, b in zip(result, expected, strict=True):
        if not torch.allclose(a, b, rtol=1e-3, atol=1e-4):
            raise CommunicationError(f"{name} differs from one process by up to {(a - b).abs().max():.3g}")


# -- the report --------------------------------------------------------------------------------------------


def report(results: dict[int, Any], options: argparse.Namespace) -> Report:
    """Return the report with tables and targets.

    Args:
        results: Results of `measure`, by number of ranks.
        options: Options of the command.
    """
    tables, targets = [], []
    for ranks, result in results.items():
        rows = []
        for shape, times in result.items():
            ms = milliseconds(times)
            relative = (ms["torch"] / ms[name] for name in ("mpitrain", "sequence"))
            rows.append((shape.replace("x", " x "), *ms.values(), *relative))
        columns = ("samples x tokens x width", *CONTENDERS, "times torch", "sequence")
        note = f"Milliseconds of a forward and backward pass of {LAYERS} blocks, median; torch's time divided by ours."
        tables.append(ReportTable(f"{ranks} ranks", columns, rows, note))
        ratios = [row[5] for row in rows]
        what = f"{ranks} ranks: speed relative to torch"
        targets.append(target_of(f"{what}, geometric mean", geometric_mean(ratios), least=TARGET, where=" times"))
        targets.append(target_of(f"{what}, worst shape", min(ratios), least=1, where=" times"))
    return Report("Tensor parallelism", tables, targets)
