"""What was bound for operations that are repeated, found again by the address, length and type of their tensors.

A training loop binds each of its operations once; plans are kept by length and type alone, so that tensors at new
addresses only have to be bound.

What was bound goes with the tensors' memory. If it stayed, its small objects would keep the C library from giving
the place between them out again (glibc's aligned allocations ask for more than they leave): a loop that allocates
its tensors anew each time would grow by one tensor at each operation.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TypeVar

import torch

from mpitrain.comm.memory.arena import ArenaIndex
from mpitrain.comm.programs.program import Program
from mpitrain.comm.runtime.compiling import Plan
from mpitrain.comm.runtime.executor import Compiled

T = TypeVar("T")

_KEPT = 512  # bound programs, and plans

Ready = Callable[[torch.Tensor | None], object]


class BoundCache:
    """The bound programs of one `Binder`, used from its thread.

    Attributes:
        ready: For the keys of some of them, functions that perform the whole operation, given its tensor.
        bound: The programs by their keys.
        plans: What they were bound from, by lengths and types.
    """

    def __init__(self, arenas: ArenaIndex) -> None:
        self.ready: dict[Hashable, Ready] = {}
        self.bound: OrderedDict[Hashable, Compiled] = OrderedDict()
        self.plans: OrderedDict[Hashable, tuple[Program, Plan]] = OrderedDict()
        self._ends: dict[Hashable, list[weakref.ref[torch.UntypedStorage]]] = {}  # for the keys of `bound`
        self._ended: list[Compiled] = []  # whose memory is gone, to be released by the binder's thread
        self._arenas = arenas
        self._generation = arenas.generation  # when the oldest entry was bound
        arenas.watch(self._arenas_changed)

    def find(self, key: Hashable) -> Compiled | None:
        """What was bound under the key, unless an address may mean other memory now than it did then."""
        if self._generation != self._arenas.generation:
            self.drop_all()
        while self._ended:
            self._ended.pop().free()
        return self.bound.get(key)

    def keep(self, key: Hashable, compiled: Compiled, tensors: Sequence[torch.Tensor]) -> None:
        """Keep what was bound as long as the tensors' memory; the oldest goes when there are too many."""
        self.bound[key] = compiled
        self._generation = self._arenas.generation  # binding may have made the staging arena
        self._watch(key, tensors)
        if len(self.bound) > _KEPT:
            oldest, dropped = self.bound.popitem(last=False)
            self.ready.pop(oldest, None)
            self._ends.pop(oldest, None)
            dropped.free()

    def drop_all(self) -> None:
        """Forget everything."""
        bound, self.bound = self.bound, OrderedDict()
        self.ready.clear()
        self._ends.clear()
        for compiled in (*bound.values(), *self._ended):
            compiled.free()
        self._ended.clear()
        self.plans.clear()
        self._generation = self._arenas.generation

    def _arenas_changed(self) -> None:
        """Called in whichever thread makes or frees an arena: what is ready would not look at it again."""
        self.ready.clear()

    def _watch(self, key: Hashable, tensors: Sequence[torch.Tensor]) -> None:
        """Drop what was bound when memory that torch has allocated ends."""
        storages = [tensor.untyped_storage() for tensor in tensors]
        ends = [weakref.ref(storage, partial(self._end, key)) for storage in storages if storage.resizable()]
        if ends:
            self._ends[key] = ends

    def _end(self, key: Hashable, _: object) -> None:
        """Called in whichever thread lets go of the memory, which no operation uses any more."""
        self._ends.pop(key, None)
        self.ready.pop(key, None)
        compiled = self.bound.pop(key, None)
        if compiled is not None and compiled.has_requests:
            self._ended.append(compiled)


def kept(among: OrderedDict[Hashable, T], key: Hashable, made: T) -> T:
    """Keep what was made under the key; the oldest is dropped when there are too many."""
    among[key] = made
    if len(among) > _KEPT:
        among.popitem(last=False)
    return made
