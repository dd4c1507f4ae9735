"""Sums over the ranks that have not been exchanged yet: the summands of gradients, which travel in one message.

The sums stay in the memory in which the ranks exchanged them, as long as the script reads them there. If it still has
earlier ones when the next are due, as between the steps of two optimizers, a second memory is used; if it has sums in
both, the later ones are copied.

Where the ranks have spare cores, each bucket of summands is sent in the background while backward goes on, and whoever
first reads a sum waits for it. A summand that changes after it was sent, because another backward adds to the same
gradient, is sent again. From then on, such a bucket waits for its reader.

Where gradients are sharded, a sum goes only to the rank that owns the parameter. It is still pending: its summand on
the owner is the whole sum, and elsewhere zeros without memory. Whoever reads it gets it from the owner.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from mpitrain.comm import Communicator, Work

_MULTIPLE = 16  # elements to which the place of each summand is aligned
_FIRST_CAPACITY = 1 << 16  # bytes
_MOST_PLACES = 1024
BUCKET = 8 << 20  # bytes of summands that are worth a message of their own


class SumSession(Protocol):
    """Session of a script, as far as sums need it; see `ScriptRun`."""

    world: Communicator
    sums: PendingSums
    crossings: int

    def is_main(self) -> bool: ...

    def meet(self, what: str, flag: bool = False) -> bool: ...

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, x: torch.Tensor) -> torch.Tensor: ...


class Cell:
    """Summand of this rank, or later the sum.

    Attributes:
        local: Dense tensor.
        is_shared: True if somebody else may use its memory, which must then not be written.
        is_pending: True until the ranks have exchanged it.
        bucket: Bucket in which it is on its way; None if it is not, or has changed since.
        home: Rank that shall have the sum, if gradients are sharded and it is known; else None.
        owner: Rank that has the sum, while the others have zeros; None if it is not reduced, or has changed since.
        layout: Where there is an owner, a tensor without memory that has the shape and the strides of the sum.

    Args:
        session: Run of the script.
        local: Summand.
        is_shared: See above.
        home: See above.
    """

    __slots__ = ("__weakref__", "bucket", "home", "is_pending", "is_shared", "layout", "local", "owner")

    def __init__(
        self, session: SumSession, local: torch.Tensor, is_shared: bool = False, home: int | None = None
    ) -> None:
        self.local, self.is_shared, self.is_pending = local, is_shared, True
        self.bucket: _Bucket | None = None
        self.home = home
        self.owner: int | None = None
        self.layout: torch.Tensor | None = None
        session.sums.add(self)


Kind = tuple[torch.dtype, torch.device]  # of a summand
Places = tuple[torch.Tensor, list[torch.Tensor]]  # memory to exchange, and the place of each cell in it


class _Bucket(NamedTuple):
    """Summands on their way: their dtype and shapes, their cells, and the places of their sums."""

    key: Any
    cells: list[weakref.ref[Cell]]
    places: list[torch.Tensor]
    work: Work


class _Memory:
    """Memory in which the ranks exchange sums, and in which the script then reads them. Made on all ranks together.

    Args:
        world: Communicator over all ranks.
        nbytes: Least number of bytes.
        device: Device of the memory.
    """

    def __init__(self, world: Communicator, nbytes: int, device: torch.device) -> None:
        self._arena = world.arena(1 << (max(nbytes, _FIRST_CAPACITY) - 1).bit_length(), torch.uint8, device)
        self._storage = self._arena.tensor.untyped_storage()
        self._places: dict[Any, Places] = {}
        self._users = torch._C._storage_Use_Count(self._storage._cdata)  # if the script has none of it

    @property
    def is_read(self) -> bool:
        """True if the script has sums in it."""
        return torch._C._storage_Use_Count(self._storage._cdata) > self._users

    def free(self) -> None:
        """Release the memory. Collective."""
        self._places.clear()
        self._arena.free()

    def place(self, cells: Sequence[Cell], start: int) -> Places | None:
        """Return the memory to exchange, and the place of each cell in it; None if there is no room.

        Args:
            cells: Cells of one dtype and device.
            start: Offset in bytes.
        """
        key, dtype = (start, _key(cells)), cells[0].local.dtype
        if key in self._places:
            return self._places[key]
        offsets = [0, *accumulate(map(_room_of, cells))]
        stop = start + offsets[-1] * dtype.itemsize
        is_elsewhere = self._arena.tensor.device != cells[0].local.device
        if is_elsewhere or stop > self._arena.tensor.numel() or len(self._places) >= _MOST_PLACES:
            return None
        flat = self._arena.tensor[start:stop].view(dtype)
        places = [
            flat.as_strided(cell.local.shape, cell.local.stride(), flat.storage_offset() + offset)
            for cell, offset in zip(cells, offsets, strict=False)
        ]
        self._users += 1 + len(places)
        self._places[key] = flat, places
        return flat, places


class PendingSums:
    """All cells of a run that are pending, and the memory in which they are exchanged.

    Args:
        session: Run of the script.
    """

    def __init__(self, session: SumSession) -> None:
        self._session = session
        self._cells: list[weakref.ref[Cell]] = []
        self._nbytes = 0  # of the summands that were added since a bucket was sent
        self._memories: list[_Memory] = []  # at most two: the next sums are in the last one
        self._small: list[_Memory] = []  # earlier ones, in which the script may still read
        self._buckets: list[_Bucket] = []
        self._end = 0  # of the buckets, in bytes of the last memory
        self._stage: _Memory | None = None  # from which sums go to their owners
        self._changing: set[Any] = set()  # keys of buckets that changed on this rank after they were sent
        self._waiting: set[Any] = set()  # keys of buckets that wait for a reader, on all ranks
        self.before: Callable[[], None] = lambda: None  # called before all sums are exchanged

    def add(self, cell: Cell) -> None:
        """Let a cell wait for the next exchange, or send it if it completes a bucket, which is collective."""
        if len(self._cells) > 10_000:  # summands that nobody reads
            self._cells = [reference for reference in self._cells if reference() is not None]
        self._cells.append(weakref.ref(cell))
        if cell.home is not None:
            self._nbytes += cell.local.nbytes
            if self._nbytes >= BUCKET and self._session.is_main():
                self._cells = [weakref.ref(each) for each in self._reduce_homes(self._take())]
        elif self._session.world.overlaps:
            self._nbytes += cell.local.nbytes
            if self._nbytes >= BUCKET and self._session.is_main():
                self._send()

    def change(self, cell: Cell) -> None:
        """Note that a cell has another summand now."""
        if cell.bucket is not None or cell.owner is not None:
            cell.bucket = cell.owner = cell.layout = None
            self._cells.append(weakref.ref(cell))

    def _reduce_homes(self, cells: list[Cell]) -> list[Cell]:
        """Sum the summands of cells that have a home there, one bucket after another; return the others."""
        buckets: dict[Kind, list[tuple[Cell, int]]] = {}
        nbytes = Counter[Kind]()
        for cell in cells:
            kind = _kind(cell)
            if cell.home is not None and kind[0].itemsize >= 4:
                buckets.setdefault(kind, []).append((cell, cell.home))
                nbytes[kind] += cell.local.nbytes
                if nbytes[kind] >= BUCKET:
                    self._reduce(buckets.pop(kind))
                    nbytes[kind] = 0
        for bucket in buckets.values():
            self._reduce(bucket)
        return [cell for cell in cells if cell.owner is None]

    def _reduce(self, bucket: list[tuple[Cell, int]]) -> None:
        """Sum the summands of cells of one dtype and device on their owners. Collective."""
        bucket.sort(key=lambda x: x[1])
        cells, owners = zip(*bucket, strict=True)
        session, counts, (dtype, device) = self._session, [0] * self._session.size, _kind(cells[0])
        for cell, owner in zip(cells, owners, strict=True):
            counts[owner] += _room_of(cell)
        session.crossings += 1
        session.meet(f"the sum of {len(cells)} gradients on their owners, {sum(counts)} {dtype}")
        room = self._stage.place(cells, 0) if self._stage is not None else None
        if room is None:
            if self._stage is not None:
                self._stage.free()
            self._stage = _Memory(session.world, sum(counts) * dtype.itemsize, device)
            room = self._stage.place(cells, 0)
        assert room is not None
        flat, places = room
        torch._foreach_copy_(places, [cell.local for cell in cells])
        total, start = torch.empty(counts[session.rank], dtype=dtype, device=device), 0
        session.world.reduce_scatter(total, flat, counts=counts, reproducible=True)
        for cell, owner in zip(cells, owners, strict=True):
            shape, strides = cell.local.shape, cell.local.stride()
            cell.layout = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
            if owner == session.rank:
                cell.local, start = total.as_strided(shape, strides, start), start + _room_of(cell)
            else:
                cell.local = total.new_zeros(()).expand(shape)
            cell.is_shared, cell.owner = True, owner  # shared, so that all ranks take the same path

    def spread(self, cell: Cell) -> None:
        """Give all ranks a sum that one of them has. Collective."""
        owner = cell.owner
        assert owner is not None
        session = self._session
        session.crossings += 1
        session.meet(f"a gradient of {tuple(cell.local.shape)} from rank {owner}")
        n = cell.local.numel()
        flat = cell.local.reshape(-1) if owner == session.rank else cell.local.new_empty(n)
        session.world.broadcast(flat, owner)
        total = cell.local if owner == session.rank else _laid_out(flat, cell.layout)
        _store([(cell, total)])

    def settle(self) -> None:
        """Exchange all pending sums, in one message for each dtype and device. Collective."""
        self.before()
        by_kind: dict[Kind, list[Cell]] = {}
        for cell in self._reduce_homes(self._take()):
            by_kind.setdefault(_kind(cell), []).append(cell)
        for (dtype, _), cells in by_kind.items():
            is_alone = len(by_kind) == 1 and dtype.itemsize >= 4
            room = self._room("the sum of", cells) if is_alone else None
            if room is None:
                self._exchange_copies(cells)
                continue
            flat, places = room
            self._session.crossings += 1
            torch._foreach_copy_(places, [cell.local for cell in cells])
            self._session.world.all_reduce(flat, reproducible=True)
            _store(zip(cells, places, strict=True))
        self._receive()

    def _take(self) -> list[Cell]:
        """Return the cells that wait, which wait no longer."""
        cells = [cell for reference in self._cells if (cell := reference()) is not None and cell.is_pending]
        self._cells.clear()
        self._nbytes = 0
        return cells

    def _send(self) -> None:
        """Send the bucket of all cells that wait. Collective."""
        cells = self._take()
        kinds, key = {_kind(cell) for cell in cells}, _key(cells)
        if len(kinds) == 1 and kinds.pop()[0].itemsize >= 4 and key not in self._waiting:
            is_changing = self._session.meet(f"a bucket of {len(cells)} gradients", key in self._changing)
            room = None if is_changing else self._room("sending", cells)
            if room is not None:
                flat, places = room
                torch._foreach_copy_(places, [cell.local for cell in cells])
                work = self._session.world.all_reduce(flat, reproducible=True, async_op=True)
                assert work is not None
                bucket = _Bucket(key, [weakref.ref(cell) for cell in cells], places, work)
                self._buckets.append(bucket)
                self._end += flat.nbytes
                for cell in cells:
                    cell.bucket = bucket
                return
            self._waiting.add(key)
        self._cells = [weakref.ref(cell) for cell in cells]

    def _receive(self) -> None:
        """Wait for the sums that are on their way."""
        for bucket in self._buckets:
            bucket.work.wait()
            valid = list[tuple[Cell, torch.Tensor]]()
            for reference, place in zip(bucket.cells, bucket.places, strict=True):
                if (cell := reference()) is not None and cell.bucket is bucket:
                    valid.append((cell, place))
            if 2 * len(valid) < len(bucket.cells):
                self._changing.add(bucket.key)
            _store(valid)
        self._buckets.clear()
        self._end = 0

    def _exchange_copies(self, cells: list[Cell]) -> None:
        flat = self._session.sum(torch.cat([cell.local.reshape(-1) for cell in cells]))
        for cell, part in zip(cells, flat.split([cell.local.numel() for cell in cells]), strict=True):
            _store([(cell, _laid_out(part, cell.local))])

    def _room(self, what: str, cells: list[Cell]) -> Places | None:
        """Return the memory to exchange, and the place of each cell in it; None if there is none. Collective.

        Args:
            what: Operation, for messages.
            cells: Cells of one dtype and device.
        """
        device = cells[0].local.device
        nbytes = sum(cell.local.nbytes + _MULTIPLE * cell.local.itemsize for cell in cells)
        for _ in range(2):
            if not self._memories:
                self._memories.append(_Memory(self._session.world, nbytes, device))
            room = self._memories[-1].place(cells, self._end)
            if room is None:
                self._small.append(self._memories.pop())
                self._memories.append(_Memory(self._session.world, self._end + nbytes, device))
                self._end = 0  # buckets that are on their way are in the small one
                room = self._memories[-1].place(cells, 0)
            assert room is not None
            is_read = self._memories[-1].is_read and not self._buckets
            text = f"{what} {len(cells)} gradients, {room[0].numel()} {room[0].dtype}"
            if not self._session.meet(text, is_read):
                return room
            if len(self._memories) == 1:
                self._memories.append(_Memory(self._session.world, nbytes, device))
            else:
                self._memories.reverse()
        return None


def _laid_out(part: torch.Tensor, like: Any) -> torch.Tensor:
    """Return elements in the shape and with the strides of a tensor, in their own memory if that is possible."""
    total = part.view(like.shape)
    return (
        total
        if like.is_contiguous()
        else torch.empty_strided(total.shape, like.stride(), dtype=total.dtype, device=total.device).copy_(total)
    )


def _room_of(cell: Cell) -> int:
    return -(-cell.local.numel() // _MULTIPLE) * _MULTIPLE  # elements


def _kind(cell: Cell) -> Kind:
    return cell.local.dtype, cell.local.device


def _key(cells: Sequence[Cell]) -> Any:
    return tuple((cell.local.dtype, cell.local.shape, cell.local.stride()) for cell in cells)


def _store(sums: Iterable[tuple[Cell, torch.Tensor]]) -> None:
    for cell, total in sums:
        cell.local = total.detach()
        cell.is_pending = cell.is_shared = False
        cell.bucket = cell.owner = cell.layout = None
