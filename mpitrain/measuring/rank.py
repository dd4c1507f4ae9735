"""What a rank takes beside its model: seconds of a step that are none of the model's, and the run folder's speed."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpitrain.comm import Communicator
from mpitrain.models.gpt import GPT
from mpitrain.trainer.callback import Callback, Step
from mpitrain.trainer.trainer import Trainer

_WIDTH, _TOKENS, _VOCABULARY = 8, 8, 256
_WARM = 10  # steps that do not count
_PIECE = 8 << 20  # bytes of one write, as checkpoints do
_ROOM = 4  # times as many bytes must be free


# -- a step


def overhead(world: Communicator, quick: bool) -> float:
    """Processor seconds of a step of the trainer, on one rank, beyond those of a nearly empty model. Collective.

    Each rank trains by itself; the median over the ranks counts. What the model itself takes, its gradients and its
    update, is measured as plain torch and subtracted.
    """
    alone = world.subgroup([world.rank])
    assert alone is not None
    steps, stamps = _WARM + (20 if quick else 100), _Stamps()
    with tempfile.TemporaryDirectory(prefix="mpitrain-machine-") as folder:
        settings: dict[str, Any] = {
            "run": {"dir": f"{folder}/run", "device": "cpu"},
            "model": {"name": "gpt", "layers": 1, "width": _WIDTH, "heads": 1, "sequence": _TOKENS},
            "train": {"batch": 1, "microbatch": 1, "steps": steps, "evaluate_samples": 1},
            "checkpoint": {"every": 0},
        }
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            trainer = Trainer(settings, [stamps], world=alone)
            trainer.print = lambda text: None
            trainer.fit()
    taken = float(np.median(np.diff(stamps.seen)[_WARM:])) - _plain_step(steps)
    return float(np.median(world.all_gather_object(max(taken, 1e-6))))


class _Stamps(Callback):
    """Processor seconds of this process after each step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_end(self, trainer: Trainer, step: Step) -> None:
        self.seen.append(time.process_time())


def _plain_step(steps: int) -> float:
    """Processor seconds of a step of the same model in plain torch."""
    model = GPT(_VOCABULARY, 1, _WIDTH, 1, 0.0)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x, y = torch.zeros(2, 1, _TOKENS, dtype=torch.long)
    taken = []
    for _ in range(steps):
        began = time.process_time()
        optimizer.zero_grad()
        model.loss(model(x), y).backward()
        optimizer.step()
        taken.append(time.process_time() - began)
    return float(np.median(taken[_WARM:]))


# -- the run folder


def folder_speeds(world: Communicator, folder: Path, quick: bool) -> dict[str, float]:
    """Bytes per second into a folder until they are on its disk (fsync). Collective.

    Args:
        world: The ranks.
        folder: Where to write; it is there on all nodes.
        quick: Whether to write little.

    Returns:
        rank_write_rate: of rank 0 alone. write_rate: of all ranks of its node at once. write_limit: of all ranks at
        once, where there are several nodes. Nothing where the folder has not the room.
    """
    nbytes, repeats = (4 << 20, 1) if quick else (128 << 20, 3)
    free = world.on_root(lambda: shutil.disk_usage(folder).free)
    if free < _ROOM * nbytes * world.size:
        return {}
    first = min(rank for rank in range(world.size) if world.nodes[rank] == world.nodes[0])
    writers = {
        "rank_write_rate": [first],
        "write_rate": [r for r in range(world.size) if world.nodes[r] == world.nodes[0]],
    }
    if world.num_nodes > 1:
        writers["write_limit"] = list(range(world.size))
    data = np.random.default_rng(world.rank).bytes(min(_PIECE, nbytes))
    found = {}
    for name, ranks in writers.items():
        rates = [_together(world, folder, data, nbytes, ranks) for _ in range(repeats)]
        found[name] = float(np.median(rates))
    return found


def _together(world: Communicator, folder: Path, data: bytes, nbytes: int, ranks: list[int]) -> float:
    """Bytes per second of these ranks, each with a file of its own. Collective."""
    world.barrier()
    began = time.perf_counter()
    if world.rank in ranks:
        _write(folder / f"{world.rank}", data, nbytes)
    lasted = np.array([time.perf_counter() - began if world.rank in ranks else 0.0])
    world.all_reduce(lasted, "max")
    return nbytes * len(ranks) / float(lasted[0])


def _write(path: Path, data: bytes, nbytes: int) -> None:
    with path.open("wb", buffering=0) as file:
        for _ in range(nbytes // len(data)):
            file.write(data)
        os.fsync(file.fileno())
    path.unlink()
