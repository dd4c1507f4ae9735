"""Meetings of ranks, which show one another what they are about to do, and the values of a small exchange.

On one node, each rank has a slot in memory that all of them share:

    checksum, flag | values, up to `capacity` bytes

All meetings are the same operation on the same memory, with values or without. So ranks that are about to do different
things still meet, and see it before any of them reads values. Between nodes, a meeting is one small all_reduce without
values, since gathering a slot of each of many ranks would take longer.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from mpitrain.comm import Communicator

_HEADER = struct.Struct("=QQ")
_VALUES = 64  # first byte of the values
_LARGEST = 1 << 14  # bytes of values; a larger sum is faster if each rank adds a part of it
_LARGEST_TOGETHER = 1 << 16  # bytes of values of all ranks, which each rank reads
_MOST_VIEWS = 1024


class Meetings:
    """Meetings of all ranks.

    Attributes:
        capacity: Bytes of values in a slot; 0 between nodes.

    Args:
        world: Communicator over all ranks.
    """

    def __init__(self, world: Communicator) -> None:
        self.capacity = min(_LARGEST, _LARGEST_TOGETHER // world.size) // _VALUES * _VALUES
        self._rank, self._turn = world.rank, 0
        alternating = world.alternating(_VALUES + self.capacity)
        self._slots: Sequence[Sequence[torch.Tensor]]
        self._exchange: Callable[[], object]
        if alternating is not None:
            self._slots, self._exchange = alternating.slots, alternating.meet
            self._headers = [[slot[: _HEADER.size].numpy().data for slot in slots] for slots in self._slots]
        else:
            self.capacity, self._headers = 0, []
            self._slots = [[torch.zeros(_VALUES, dtype=torch.uint8)] * world.size] * 2
            codes = torch.zeros(3, dtype=torch.int64)
            self._codes = codes.numpy()
            self._exchange = world.all_reduce_init(codes, "max")
        self._views: dict[tuple[int, int, torch.dtype], list[torch.Tensor]] = {}

    def values(self, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return flat views of the values of all ranks at the next meeting, before which this rank fills its own.

        They may be read until the meeting after it.

        Args:
            numel: Number of elements.
            dtype: Element type.
        """
        key = (self._turn, numel, dtype)
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            stop = _VALUES + numel * dtype.itemsize
            views = self._views[key] = [slot[_VALUES:stop].view(dtype) for slot in self._slots[self._turn]]
        return views

    def meet(self, code: int, flag: bool) -> bool | None:
        """Wait until all ranks meet, and compare their codes. Collective.

        Args:
            code: Checksum of what this rank is about to do.
            flag: Flag of this rank.

        Returns:
            True if the flag of any rank is true; None, on all ranks, if their codes differ.
        """
        if not self._headers:
            self._codes[:] = code, -code, flag
            self._exchange()
            return bool(self._codes[2]) if self._codes[0] == -self._codes[1] else None
        headers, mine = self._headers[self._turn], _HEADER.pack(code, flag)
        headers[self._rank][:] = mine
        self._exchange()
        self._turn ^= 1
        if all(header == mine for header in headers):
            return flag
        pairs = [_HEADER.unpack(header) for header in headers]
        return any(flag for _, flag in pairs) if len({code for code, _ in pairs}) == 1 else None
