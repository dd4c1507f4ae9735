"""The loss and the metrics of a trained model on samples that it was not trained on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import torch

from mpitrain.comm.memory.device import CPU
from mpitrain.config.settings import Config
from mpitrain.data import Dataset, evaluation_batches
from mpitrain.data.on_device import on_device
from mpitrain.trainer.data import microbatches
from mpitrain.trainer.engine import Engine
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


# -- The held-out loss of each data set of a mix, beside that of all of them together
# Held-out samples come one data set after the other, so that few microbatches have samples of several. The loss of
# every other one counts for its data set as it is; those few are computed once more in pieces, after the batch:
#
#     places      0  1  2  3 | 4  5  6  7 | 8  9 10 11      microbatches of 4
#     data set    a  a  a  a | a  a  b  b | b  b  b  b      in pieces: 4 5, 6 7


Spare = tuple[torch.Tensor, torch.Tensor] | tuple[()]


class LossOfParts:
    """Adds up losses by data set on one rank.

    Args:
        parts: By the name of a data set, how many of the samples are its own; in their order.
        like: float64 [workers, 1]; where the sums are to be.

    Attributes:
        sums: Of losses times samples, float64 [workers, data sets]; no columns for a single data set.
    """

    def __init__(self, parts: Mapping[str, int], like: torch.Tensor) -> None:
        self._parts = dict(parts) if len(parts) > 1 else {}
        self._bounds = list(accumulate(self._parts.values(), initial=0))
        self._mixed: list[tuple[int, int, torch.Tensor, torch.Tensor]] = []  # worker, place and samples
        self.sums = like.new_zeros(len(like), len(self._parts))

    def add(self, worker: int, place: int, x: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> None:
        """Take a microbatch whose mean loss was computed. place: of its first sample among all."""
        pieces = list(self._pieces(place, len(x)))
        if len(pieces) == 1:
            self.sums[worker, pieces[0][0]] += loss.double() * len(x)
        elif pieces:
            self._mixed.append((worker, place, x, y))

    def end_batch(self, engine: Engine, position: int, size: int, spare: Spare) -> None:
        """Compute what has samples of several data sets in pieces. Collective: every rank computes as often.

        Args:
            engine: Of the model.
            position: Of the global batch among the samples.
            size: How many it has.
            spare: What a rank without samples computes with.
        """
        done = 0
        for worker, place, x, y in self._mixed:
            for number, lo, hi in self._pieces(place, len(x)):
                self.sums[worker, number] += engine.evaluate(x[lo:hi], y[lo:hi]).double() * (hi - lo)
                done += 1
        self._mixed.clear()
        inside = {bound for bound in self._bounds if position < bound < position + size}
        for _ in range(done, 2 * len(inside)):  # so many pieces there are at most, each bound in another microbatch
            engine.evaluate(*spare)

    def values(self, totals: Sequence[float]) -> dict[str, float]:
        """The figures by name. totals: of `sums`, over all virtual workers."""
        named = zip(self._parts.items(), totals, strict=True)
        return {f"{LOSS} of {name}": total / count for (name, count), total in named if count}

    def _pieces(self, place: int, size: int) -> Iterator[tuple[int, int, int]]:
        """(data set, first, last) of the samples of each data set in a stretch of places, counted from its first."""
        for number, (begin, end) in enumerate(zip(self._bounds, self._bounds[1:], strict=False)):
            lo, hi = max(begin, place), min(end, place + size)
            if lo < hi:
                yield number, lo - place, hi - place
