"""The loss of a trained model on samples that it was not trained on."""

from __future__ import annotations

import torch

from mpitrain.comm.memory.device import CPU
from mpitrain.config.settings import Config
from mpitrain.data import Dataset, evaluation_batches
from mpitrain.data.on_device import on_device
from mpitrain.trainer.data import microbatches
from mpitrain.trainer.engine import Engine
from mpitrain.trainer.strategy import GroupPlaces


def mean_loss(config: Config, places: GroupPlaces, engine: Engine, held_out: Dataset) -> float:
    """The mean loss of train.evaluate_samples samples, each counted once. Collective.

    The host waits for the device once, at the end.
    """
    workers = places.evaluating
    chosen = min(config.train.evaluate_samples, len(held_out))
    pipeline = places.mesh.pipeline.size > 1  # it cuts batches itself, and tells the host the loss of each
    microbatch = 0 if pipeline else config.train.microbatch
    sums = torch.zeros(len(workers.own), dtype=torch.float64, device=CPU if pipeline else engine.device)
    batches = evaluation_batches(held_out, samples=chosen, batch=config.train.batch, share=workers.share)
    for batch in on_device(batches, engine.device):
        size = min(config.train.batch, chosen - batch.position)
        done = 0
        for worker, (lo, hi) in enumerate(workers.within(size)):
            for x, y in microbatches(batch.x[lo:hi], batch.y[lo:hi], microbatch):
                sums[worker] += engine.evaluate(x, y).double() * len(x)
                done += 1
        for _ in range(done, workers.rounds(size, microbatch)):
            engine.evaluate()
    return workers.total(places.everyone, sums) / chosen
