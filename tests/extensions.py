"""User extensions outside of the package; each is complete as it stands."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

import mpitrain as mt
from mpitrain.data.format import FieldSpec
from mpitrain.data.prepare import Kind
from mpitrain.data.writer import Source
from mpitrain.layout.mesh import MeshAxis
from mpitrain.pipe.schedule import Backward, Forward, Schedule


# a pipeline schedule: one microbatch after the other through all stages
def one_by_one(ranks: int, microbatches: int, chunks: int) -> Schedule:
    each = tuple(step(rank, m) for rank in [0] for m in range(microbatches) for step in (Forward, Backward))
    steps = tuple(tuple(type(step)(rank, step.microbatch) for step in each) for rank in range(ranks))
    return Schedule("one by one", ranks, microbatches, tuple(range(ranks)), steps)


# a kind of input: lines of numbers, the last of which is a class
def lines_of_numbers() -> Kind:
    def source(files, options) -> Source:
        rows = np.loadtxt([line for file in files for line in file.path.read_text().splitlines()])
        x, y = rows[:, :-1].astype(np.float32), rows[:, -1].astype(np.uint8)
        fields = (
            FieldSpec(name="x", dtype="float32", shape=x.shape[1:], given="float"),
            FieldSpec(name="y", dtype="uint8", shape=(), given="integer"),
        )

        def blocks(held_out):
            train_rows = round(len(x) * (1 - held_out))
            yield "train", (x[:train_rows], y[:train_rows])
            if train_rows < len(x):
                yield "held_out", (x[train_rows:], y[train_rows:])

        return Source("arrays", fields, blocks, files=len(files))

    return Kind("lines of numbers", lambda path: path.suffix == ".numbers", source, None)


# an optimizer: the sign of the gradient alone
class SignDescent(torch.optim.Optimizer):
    elementwise = True  # an element's update needs nothing of other elements: it may be sharded

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


# a callback: remembers the best held-out loss, also over a restart
class Best(mt.Callback):
    best = float("inf")

    def on_restore(self, trainer, values) -> None:
        self.best = values.get("best", self.best)

    def on_evaluate(self, trainer, loss) -> None:
        self.best = min(self.best, loss)

    def state(self, trainer) -> dict:
        return {"best": self.best}


def write_numbers(path: Path, rows: int = 64) -> None:
    """Write points on either side of a line."""
    points = np.random.default_rng(1).normal(size=(rows, 3))
    path.write_text("".join(f"{a:.4f} {b:.4f} {c:.4f} {int(a + b > c)}\n" for a, b, c in points))


# an axis of the mesh: its ranks read different samples, and average
class Replica(MeshAxis):
    name = "replica"
