"""Sums over the ranks that have not been exchanged yet: the summands of gradients, which travel in one message.

The sums stay in the memory in which the ranks exchanged them, as long as the script reads them there. If it still has
earlier ones when the next are due, as between the steps of two optimizers, the later ones are copied.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from mpitrain.comm import Arena, Communicator

_MULTIPLE = 16  # elements to which the place of each summand is aligned
_FIRST_CAPACITY = 1 << 16  # bytes
_MOST_PLACES = 64


class SumSession(Protocol):
    """Session of a script, as far as sums need it; see `ScriptRun`."""

    world: Communicator
    sums: PendingSums
    crossings: int

    def meet(self, what: str, flag: bool = False) -> bool: ...

    def sum(self, x: torch.Tensor) -> torch.Tensor: ...


class Cell:
    """Summand of this rank, or later the sum.

    Attributes:
        local: Dense tensor.
        is_shared: True if somebody else may use its memory, which must then not be written.
        is_pending: True until the ranks have exchanged it.
    """

    __slots__ = ("__weakref__", "is_pending", "is_shared", "local")

    def __init__(self, session: SumSession, local: torch.Tensor, is_shared: bool = False) -> None:
        self.local, self.is_shared, self.is_pending = local, is_shared, True
        session.sums.add(self)


class PendingSums:
    """All cells of a run that are pending, and the memory in which they are exchanged.

    Args:
        session: Run of the script.
    """

    def __init__(self, session: SumSession) -> None:
        self._session = session
        self._cells: list[weakref.ref[Cell]] = []
        self._arenas: list[Arena] = []  # the last one is used; earlier ones may still be read by the script
        self._places: dict[Any, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        self._users = 0  # of the last arena's storage, if the script has none of it

    def add(self, cell: Cell) -> None:
        """Let a cell wait for the next exchange."""
        if len(self._cells) > 10_000:  # summands that nobody reads
            self._cells = [reference for reference in self._cells if reference() is not None]
        self._cells.append(weakref.ref(cell))

    def settle(self) -> None:
        """Exchange all pending sums, in one message for each dtype. Collective."""
        cells = [cell for reference in self._cells if (cell := reference()) is not None and cell.is_pending]
        self._cells.clear()
        by_dtype: dict[torch.dtype, list[Cell]] = {}
        for cell in cells:
            by_dtype.setdefault(cell.local.dtype, []).append(cell)
        for dtype, several in by_dtype.items():
            if len(by_dtype) > 1 or dtype.itemsize < 4:
                self._exchange_copies(several)
            else:
                self._exchange(several, dtype)
            for cell in several:
                cell.is_pending = cell.is_shared = False

    def _exchange(self, cells: list[Cell], dtype: torch.dtype) -> None:
        flat, places = self._place(cells, dtype)
        storage = self._arenas[-1].tensor.untyped_storage()
        is_read = torch._C._storage_Use_Count(storage._cdata) > self._users
        session = self._session
        if session.meet(f"the sum of {len(cells)} gradients, {flat.numel()} {dtype}", is_read):
            self._exchange_copies(cells)
            return
        session.crossings += 1
        torch._foreach_copy_(places, [cell.local for cell in cells])
        session.world.all_reduce(flat, reproducible=True)
        for cell, place in zip(cells, places, strict=True):
            cell.local = place.detach()

    def _exchange_copies(self, cells: list[Cell]) -> None:
        flat = self._session.sum(torch.cat([cell.local.reshape(-1) for cell in cells]))
        for cell, part in zip(cells, flat.split([cell.local.numel() for cell in cells]), strict=True):
            shape, strides = cell.local.shape, cell.local.stride()
            if cell.local.is_contiguous():
                cell.local = part.view(shape)
            else:
                cell.local = torch.empty_strided(shape, strides, dtype=part.dtype).copy_(part.view(shape))

    def _place(self, cells: list[Cell], dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the memory to exchange, and the place of each cell in it. Collective if memory is missing."""
        key = (dtype, tuple((cell.local.shape, cell.local.stride()) for cell in cells))
        known = self._places.get(key)
        if known is not None:
            return known
        offsets, end = [], 0
        for cell in cells:
            offsets.append(end)
            end += -(-cell.local.numel() // _MULTIPLE) * _MULTIPLE
        nbytes = max(end * dtype.itemsize, _FIRST_CAPACITY)
        if not self._arenas or self._arenas[-1].tensor.numel() < nbytes or len(self._places) >= _MOST_PLACES:
            self._places.clear()
            self._arenas.append(self._session.world.arena(1 << (nbytes - 1).bit_length(), torch.uint8))
            storage = self._arenas[-1].tensor.untyped_storage()
            self._users = torch._C._storage_Use_Count(storage._cdata)
        memory = self._arenas[-1].tensor
        flat = memory[: end * dtype.itemsize].view(dtype)
        places = [
            flat.as_strided(cell.local.shape, cell.local.stride(), flat.storage_offset() + offset)
            for cell, offset in zip(cells, offsets, strict=True)
        ]
        self._users += 1 + len(places)
        self._places[key] = flat, places
        return flat, places
