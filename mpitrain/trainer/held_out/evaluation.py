"""The loss and the metrics of a trained model on samples that it was not trained on."""

from __future__ import annotations

import torch

from mpitrain.comm.memory.device import CPU
from mpitrain.config.settings import Config
from mpitrain.data import Dataset, evaluation_batches
from mpitrain.data.on_device import on_device
from mpitrain.trainer.data import microbatches
from mpitrain.trainer.engine import Engine
from mpitrain.trainer.held_out.by_part import LossOfParts
from mpitrain.trainer.held_out.measuring import LOSS, Meter
from mpitrain.trainer.modes.strategy import GroupPlaces


def evaluated(
    config: Config,
    places: GroupPlaces,
    engine: Engine,
    samples: Dataset,
    meter: Meter,
    *,
    most: int = 0,
    spare: tuple[torch.Tensor, torch.Tensor] | tuple[()] = (),
) -> dict[str, float]:
    """The mean loss, and the metrics, of samples that are each counted once. Collective.

    The host waits for the device once, at the end.

    Args:
        samples: Of which so many are taken, spread evenly.
        meter: Of the metrics.
        most: How many samples are taken at most; 0: train.evaluate_samples.
        spare: (x, y) that a rank without samples computes with, where others need it to; empty: samples that it was
            trained on.

    Returns:
        "loss", each metric, and of a mix "loss of NAME" of each data set, by name, the same on all ranks.
    """
    workers = places.evaluating
    chosen = min(most or config.train.evaluate_samples, len(samples))
    pipeline = places.mesh.pipeline.size > 1  # it cuts batches itself, and tells the host the loss of each
    microbatch = 0 if pipeline else config.train.microbatch
    losses = torch.zeros(len(workers.own), 1, dtype=torch.float64, device=CPU if pipeline else engine.device)
    meter.begin(losses)
    parts = LossOfParts(samples.parts(chosen), losses)
    batches = evaluation_batches(samples, samples=chosen, batch=config.train.batch, share=workers.share)
    for batch in on_device(batches, engine.device):
        size = min(config.train.batch, chosen - batch.position)
        done = 0
        for worker, (lo, hi) in enumerate(workers.within(size)):
            meter.worker, place = worker, batch.position + batch.first + lo
            for x, y in microbatches(batch.x[lo:hi], batch.y[lo:hi], microbatch):
                loss = engine.evaluate(x, y, meter.see)
                losses[worker] += loss.double() * len(x)
                parts.add(worker, place, x, y, loss)
                place, done = place + len(x), done + 1
        for _ in range(done, workers.rounds(size, microbatch)):
            engine.evaluate(*spare)
        parts.end_batch(engine, batch.position, size, spare)
    sums = meter.gathered(places, engine)
    total, *totals = workers.totals(places.everyone, torch.cat([losses, sums, parts.sums], 1))
    measured = sums.shape[1]
    return {LOSS: total / chosen} | meter.values(totals[:measured]) | parts.values(totals[measured:])
