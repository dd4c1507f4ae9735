"""Replicas: pieces of a checkpoint that several ranks hold are written by one of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpitrain.checkpoint.files import Part
from mpitrain.layout import Piece

if TYPE_CHECKING:
    from mpitrain.comm import Communicator


class Replicas:
    """Which of the pieces that this rank holds it is to write; remembered until some rank holds other pieces."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._digest = np.zeros(2, dtype=np.int64)  # of this rank's pieces
        self._everyone: np.ndarray | None = None  # all ranks' digests when `_mine` was found
        self._mine: list[int] = []

    def written_here(self, comm: Communicator, parts: Sequence[Part]) -> list[Part]:
        """The parts that this rank writes: those whose pieces no rank before it holds, each piece once. Collective."""
        pieces = [part.piece for part in parts]
        if pieces != self._pieces or self._everyone is None:
            self._pieces, self._digest = pieces, _digest(repr(pieces))
        everyone = np.empty(2 * comm.size, dtype=np.int64)
        comm.all_gather(everyone, self._digest)
        if self._everyone is None or not np.array_equal(everyone, self._everyone):
            self._everyone, self._mine = everyone, _first_holders(comm, pieces)
        return [parts[number] for number in self._mine]


def _first_holders(comm: Communicator, pieces: Sequence[Piece]) -> list[int]:
    """The numbers of the pieces that this rank is the first to hold."""
    keys = np.array([_digest(repr(piece)) for piece in pieces], dtype=np.int64).reshape(-1)
    counts = np.empty(comm.size, dtype=np.int64)
    comm.all_gather(counts, np.array([keys.size]))
    everyone = np.empty(int(counts.sum()), dtype=np.int64)
    comm.all_gather(everyone, keys, counts=[int(n) for n in counts])
    begin = int(counts[: comm.rank].sum()) // 2
    _, first = np.unique(everyone.reshape(-1, 2), axis=0, return_index=True)
    mine = set(first.tolist())
    return [number for number in range(len(pieces)) if begin + number in mine]


def _digest(text: str) -> np.ndarray:
    return np.frombuffer(hashlib.blake2b(text.encode(), digest_size=16).digest(), dtype=np.int64)
