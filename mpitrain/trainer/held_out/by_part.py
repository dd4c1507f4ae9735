"""The held-out loss of each data set of a mix, beside that of all of them together.

Held-out samples come one data set after the other, so that few microbatches have samples of several. The loss of every
other one counts for its data set as it is; those few are computed once more in pieces, after the batch:

    places      0  1  2  3 | 4  5  6  7 | 8  9 10 11      microbatches of 4
    data set    a  a  a  a | a  a  b  b | b  b  b  b      in pieces: 4 5, 6 7
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import torch

from mpitrain.trainer.engine import Engine
from mpitrain.trainer.held_out.measuring import LOSS

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
