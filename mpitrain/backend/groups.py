"""The communicators of process groups: made, kept and used again.

Freeing an MPI communicator is collective, destroying a torch process group is not: ranks may leave without it. So
the communicator of a destroyed group is kept for the next group of the same ranks. The members agree on which, by
messages, because one of them may have destroyed a group that another still has:

    each member -> first member     the numbers of its free communicators of these ranks
    first member -> each member     the smallest number that all have, or -1: make a new one
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mpitrain.backend.queues import Waiting
from mpitrain.backend.store import NoStore
from mpitrain.comm import Communicator, init
from mpitrain.errors import InputError

_KEPT = 32  # free communicators of the same ranks that are offered
_TAGS = 1 << 14


@dataclass
class Place:
    """What the process groups of a process share.

    control: a communicator over all ranks, for agreements between the members of groups. store: what torch is given
    as the store; it does not keep the Python part of it itself.
    """

    control: Communicator
    store: NoStore = field(default_factory=NoStore)
    waiting: Waiting = field(default_factory=Waiting)
    made: dict[tuple[int, ...], list[Communicator]] = field(default_factory=dict)
    free: dict[tuple[int, ...], set[int]] = field(default_factory=dict)

    def take(self, ranks: Sequence[int]) -> Communicator:
        """A communicator over these ranks of the world, in this order. Collective over them."""
        key = tuple(ranks)
        made, free = self.made.setdefault(key, []), self.free.setdefault(key, set())
        number = self._common(key, free)
        if number >= 0:
            free.remove(number)
            return made[number]
        comm = self.control.subgroup(key, label=f"group {len(made)} of ranks {_short(key)}")
        if comm is None:
            raise InputError(f"rank {self.control.rank} is not among the ranks {_short(key)} of the group it makes")
        made.append(comm)
        return comm

    def give_back(self, comm: Communicator) -> None:
        """The group is destroyed: the communicator may serve another one of the same ranks."""
        key = next(key for key, made in self.made.items() if comm in made)
        self.free[key].add(self.made[key].index(comm))

    def _common(self, key: tuple[int, ...], free: set[int]) -> int:
        """The smallest free number that all members have, else -1."""
        control, first = self.control, key[0]
        tag = zlib.crc32(repr(key).encode()) % _TAGS
        offer = np.full(_KEPT, -1, dtype=np.int64)
        numbers = sorted(free)[:_KEPT]
        offer[: len(numbers)] = numbers
        answer = np.empty(1, dtype=np.int64)
        if control.rank != first:
            control.send(offer, first, tag)
            control.recv(answer, first, tag)
            return int(answer[0])
        common = set(numbers)
        theirs = np.empty(_KEPT, dtype=np.int64)
        for rank in key[1:]:
            control.recv(theirs, rank, tag)
            common &= {int(n) for n in theirs}
        answer[0] = min(common, default=-1)
        for rank in key[1:]:
            control.send(answer, rank, tag)
        return int(answer[0])


@functools.cache
def place() -> Place:
    """This process's one. Collective over all ranks the first time."""
    world = init(abort_on_error=False)
    control = world.subgroup(range(world.size), label="torch.distributed")
    assert control is not None
    return Place(control)


def _short(ranks: Sequence[int]) -> str:
    if len(ranks) > 8 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}..{ranks[-1]}"
    return str(list(ranks))
