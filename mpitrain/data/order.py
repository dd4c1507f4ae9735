"""Order of the samples: a function of (seed, epoch) alone, computed where it is needed and never stored.

    running position   0 1 2 ... n-1 | n ... 2n-1 | ...      n samples
    epoch              0             | 1          | ...
    sample             p0(0) ...     | p1(0) ...  | ...      pe: a permutation of 0 ... n-1 keyed by (seed, e)

The position is the whole state of a data stream: one integer, the same for any number of ranks. Nothing here depends
on batch, ranks, threads or time. The order for given (samples, seed) must never change between versions, because
checkpoints store only the position.

Sources: the permutation is the generalised Feistel network with cycle walking of J. Black and P. Rogaway,
"Ciphers with Arbitrary Finite Domains", CT-RSA 2002 (sections 3 and 5); the mixing function is the 64-bit
finaliser of SplitMix64 (G. Steele, D. Lea, C. Flood, "Fast Splittable Pseudorandom Number Generators",
OOPSLA 2014).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply a bijection on 64-bit words in which every input bit flips about half of the output bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class Ordering(ABC):
    """An endless order of samples: the sample id at each running position."""

    @abstractmethod
    def at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the sample ids at running positions.

        One call for many positions is much faster than many calls.

        Args:
            positions: Running positions in ascending order, int64 [n].

        Returns:
            Sample ids, int64 [n].
        """

    def ids(self, position: int, count: int) -> npt.NDArray[np.int64]:
        """Return the sample ids at consecutive running positions, which may span several epochs.

        Time and memory depend on `count` alone.

        Args:
            position: First running position.
            count: Number of positions.

        Returns:
            Sample ids, int64 [count].
        """
        return self.at(np.arange(position, position + count, dtype=np.int64))


@dataclass(frozen=True)
class SampleOrder(Ordering):
    """Endless shuffled sequence of the ids 0 to samples - 1, each of which occurs once per epoch.

    Attributes:
        samples: Number of samples in an epoch, 1 to 2^62.
        seed: Seed of the permutations, 0 to 2^63 - 1.
    """

    samples: int
    seed: int

    def __post_init__(self) -> None:
        if not 1 <= self.samples <= 2**62:
            raise ValueError(f"samples is {self.samples}; it must be from 1 to 2^62")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; it must be from 0 to 2^63-1")

    def at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        epochs = positions // self.samples
        ids = np.empty(len(positions), np.int64)
        for epoch in set(epochs.tolist()):
            here = epochs == epoch
            ids[here] = self._permute(epoch, (positions[here] - epoch * self.samples).astype(np.uint64))
        return ids

    def _permute(self, epoch: int, index: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        key = mix64(mix64(np.array([self.seed], np.uint64) + _GOLDEN) + np.array([epoch], np.uint64))
        keys = mix64(key + _GOLDEN * np.arange(1, ROUNDS + 1, dtype=np.uint64))
        radix = np.uint64(math.isqrt(self.samples - 1) + 1)  # the smallest with radix * radix >= samples
        index = _feistel(index, radix, keys)
        # The network permutes radix * radix values, a few more than there are samples. An index outside is mapped
        # again, along its cycle, until it is inside; this keeps the map one-to-one.
        while (outside := index >= np.uint64(self.samples)).any():
            index[outside] = _feistel(index[outside], radix, keys)
        return index


def _feistel(index: npt.NDArray[np.uint64], radix: np.uint64, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    left, right = index // radix, index % radix
    for key in keys:
        left, right = right, (left + mix64(right + key) % radix) % radix
    return left * radix + right
