"""Rows of a batch: which rank has which of them, the layout of a tensor that is divided by rows, and its memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, eq=False)
class Rows:
    """Division of one dimension over the ranks, in order of rank.

    Attributes:
        counts: Rows of each rank.
        total: Rows of all ranks.
        start: First row of this rank.
        length: Rows of this rank.
    """

    counts: tuple[int, ...]
    rank: int
    total: int = field(init=False)
    start: int = field(init=False)
    length: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", sum(self.counts))
        object.__setattr__(self, "start", sum(self.counts[: self.rank]))
        object.__setattr__(self, "length", self.counts[self.rank])

    def cut(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's rows of a whole tensor, as a view.

        Args:
            x: Tensor with `total` entries along `dim`.
            dim: Dimension that is divided.
        """
        return x.narrow(dim, self.start, self.length)


@dataclass(frozen=True, eq=False)
class RowLayout:
    """Shape of a whole tensor, and the dimension whose rows are divided. Equal layouts are one object.

    Attributes:
        shape: Sizes of the whole tensor.
        strides: Strides that one process would have.
        dtype: Element type.
        at: Dimension that is divided.
        rows: Division of that dimension.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    at: int
    rows: Rows


class BatchMemory:
    """Memory of a batch, which its views share.

    Attributes:
        version: Number of writes.
        origin: Tensor of the script whose rows were copied, which must follow writes; None for a batch of its own.
        arrays: For each NumPy array of the batch this rank's rows, their layout, the whole tensor that is the memory of
            the array, and a copy of it, which differs after the script has written to the array.
    """

    __slots__ = ("arrays", "origin", "version")

    def __init__(self, origin: torch.Tensor | None = None) -> None:
        self.version = 0
        self.origin = origin
        self.arrays: list[tuple[torch.Tensor, RowLayout, torch.Tensor, torch.Tensor]] = []

    def write(self) -> None:
        """Record a write."""
        self.version += 1


class Layouts:
    """Layouts and divisions of one run, each made once, so that they can be compared by identity.

    Args:
        rank: Number of this rank.
        size: Number of ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._rows: dict[tuple[int, ...], Rows] = {}
        self._layouts: dict[tuple[object, ...], RowLayout] = {}

    def share(self, n: int) -> Rows:
        """Return the even division of n rows; the first ranks have one more where it is uneven."""
        return self.rows(tuple(n // self._size + (r < n % self._size) for r in range(self._size)))

    def rows(self, counts: tuple[int, ...]) -> Rows:
        """Return the division with these rows of each rank."""
        if counts not in self._rows:
            self._rows[counts] = Rows(counts, self._rank)
        return self._rows[counts]

    def of(self, local: torch.Tensor, at: int, rows: Rows) -> RowLayout:
        """Return the layout of a tensor.

        Args:
            local: Rows of this rank.
            at: Dimension that is divided.
            rows: Division of that dimension.
        """
        key = (local.shape, local.stride(), local.dtype, at, rows)
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) > 20_000:
                self._layouts.clear()
            shape = list(local.shape)
            shape[at] = rows.total
            layout = RowLayout(tuple(shape), _strides(local, shape), local.dtype, at, rows)
            self._layouts[key] = layout
        return layout


def _strides(local: torch.Tensor, shape: list[int]) -> tuple[int, ...]:
    """Return the dense strides of the whole tensor, whose dimensions lie in memory in the order of the local ones."""
    strides, step = [0] * len(shape), 1
    for d in sorted(range(len(shape)), key=lambda d: (local.stride(d), -d)):
        if local.stride(d) or local.shape[d] <= 1:
            strides[d] = step
            step *= max(shape[d], 1)
    return tuple(strides)
