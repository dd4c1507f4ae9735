"""The communicators of process groups: made, kept, used again, and freed.

Freeing an MPI communicator is collective, destroying a torch process group is not: ranks may leave without it. So
the communicator of a destroyed group waits until its ranks make a group together again, the same one or a larger.
They then agree by messages, because one of them may have destroyed a group that another still has:

    each member -> first member     the communicators it has left, all of whose ranks are among these
    first member -> each member     which of them to use, if any; which to free, where too many wait; which to forget

Each rank also tells how many messages it has sent in a communicator more than it has received there. Where they do
not cancel out, some message was never received, and would turn up in a communicator that comes after: it is left alone.
"""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpitrain.backend.failures import NoStore
from mpitrain.comm import Communicator, init
from mpitrain.errors import InputError

_KEPT = 16  # communicators that may wait to be used again
_TAGS = 1 << 14

Key = tuple[int, ...]  # the ranks of a group
Name = tuple[Key, int]  # of a communicator: its ranks, and how many of the same ranks were made before it


@dataclass(frozen=True)
class Verdict:
    """What becomes of communicators that all of their ranks have left.

    Attributes:
        use: The number of the one to use again; -1 for none.
        free: Those to free, where too many wait.
        forget: Those to leave alone.
    """

    use: int
    free: tuple[Name, ...]
    forget: tuple[Name, ...]


def judge(key: Key, offers: Iterable[tuple[Name, int]]) -> Verdict:
    """What becomes of communicators that all of their ranks have left.

    Args:
        key: The ranks of the new group.
        offers: Of all of them, the names of communicators that each has left, and its messages sent too many.
    """
    left: dict[Name, list[int]] = {}
    for name, surplus in offers:
        left.setdefault(name, []).append(surplus)
    by_all = sorted(name for name, surpluses in left.items() if len(surpluses) == len(name[0]))
    clean = [name for name in by_all if sum(left[name]) == 0]
    use = next((name for name in clean if name[0] == key), None)
    spare = [name for name in clean if name != use]
    forget = tuple(name for name in by_all if name not in clean)
    return Verdict(use[1] if use is not None else -1, tuple(spare[: max(0, len(spare) - _KEPT)]), forget)


@dataclass
class GroupRegistry:
    """What the process groups of a process share.

    Attributes:
        control: A communicator over all ranks, for agreements between the members of groups.
        store: What torch is given as the store; it does not keep the Python part of it itself.
        made: The communicators of the same ranks, in order; None for those that were freed.
        left: The communicators of destroyed groups, and their messages sent more than received.
    """

    control: Communicator
    store: NoStore = field(default_factory=NoStore)
    made: dict[Key, list[Communicator | None]] = field(default_factory=dict)
    left: dict[Name, int] = field(default_factory=dict)

    def take(self, ranks: Sequence[int]) -> Communicator:
        """A communicator over these ranks of the world, in this order. Collective over them."""
        key = tuple(ranks)
        verdict = self._agree(key)
        for name in (*verdict.free, *verdict.forget):
            if self.left.pop(name, None) is not None:
                comm, self.made[name[0]][name[1]] = self.made[name[0]][name[1]], None
                if comm is not None and name in verdict.free:
                    comm.free()
        made = self.made.setdefault(key, [])
        if verdict.use >= 0:
            del self.left[key, verdict.use]
            comm = made[verdict.use]
        else:
            comm = self.control.subgroup(key, label=f"group {len(made)} of ranks {_short(key)}")
            made.append(comm)
        if comm is None:
            raise InputError(f"rank {self.control.rank} is not among the ranks {_short(key)} of the group it makes")
        return comm

    def give_back(self, comm: Communicator, surplus: int) -> None:
        """Note that a group is destroyed, and that nothing of it is under way here.

        Args:
            comm: Its communicator.
            surplus: Messages that this rank has sent in it more than received.
        """
        name = next((key, made.index(comm)) for key, made in self.made.items() if comm in made)
        self.left[name] = surplus

    def _agree(self, key: Key) -> Verdict:
        control, first = self.control, key[0]
        tag = zlib.crc32(repr(key).encode()) % _TAGS
        offer = [(name, surplus) for name, surplus in self.left.items() if set(name[0]) <= set(key)]
        if control.rank != first:
            _tell(control, offer, first, tag)
            use, free, forget = _hear(control, first, tag)
            return Verdict(use, _names(free), _names(forget))
        everyone = list(offer)
        for rank in key[1:]:
            everyone += [((tuple(ranks), number), surplus) for (ranks, number), surplus in _hear(control, rank, tag)]
        verdict = judge(key, everyone)
        for rank in key[1:]:
            _tell(control, [verdict.use, verdict.free, verdict.forget], rank, tag)
        return verdict


def _names(listed: Iterable[tuple[list[int], int]]) -> tuple[Name, ...]:
    return tuple((tuple(ranks), number) for ranks, number in listed)


def _tell(control: Communicator, value: Any, rank: int, tag: int) -> None:
    text = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8).copy()
    control.send(np.array([text.size], dtype=np.int64), rank, tag)
    control.send(text, rank, tag)


def _hear(control: Communicator, rank: int, tag: int) -> Any:
    length = np.empty(1, dtype=np.int64)
    control.recv(length, rank, tag)
    text = np.empty(int(length[0]), dtype=np.uint8)
    control.recv(text, rank, tag)
    return json.loads(text.tobytes())


@functools.cache
def place() -> GroupRegistry:
    """This process's one. Collective over all ranks the first time."""
    world = init(abort_on_error=False)
    control = world.subgroup(range(world.size), label="torch.distributed")
    assert control is not None
    return GroupRegistry(control)


def _short(ranks: Sequence[int]) -> str:
    if len(ranks) > 8 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}..{ranks[-1]}"
    return str(list(ranks))
