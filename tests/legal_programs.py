"""Random programs of messages and collectives that cannot deadlock, in whatever order their ranks wait.

All events of a program are in one order. Every rank posts its part of them in that order, and waits for what it has
begun at a random later place:

    event      0: message 0 -> 1     1: all_reduce, later      2: barrier
    rank 0     isend(0)              begin(1)                  barrier   wait(1) wait(0)
    rank 1     irecv(0)              begin(1)   wait(1)        barrier   wait(0)

Of the ranks that are blocked, the one that is at the earliest place waits for an event that all its ranks have posted,
so this event completes, and no program deadlocks where events that were posted make progress.

The reference for the results is a formula and not a run over gloo: there `is_completed()` of a message stays False
until `wait()`, so a program that polls a message never ends.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

DTYPES = (torch.float32, torch.float64, torch.int32, torch.uint8)
COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "reduce", "barrier")
WAITS = ("wait", "wait", "limit", "poll")
LONGEST = 1 << 24  # bytes
LIMIT = 50.0  # seconds


@dataclass(frozen=True)
class Event:
    """Message or collective.

    Attributes:
        number: Position in the order of the program.
        kind: "message", or the name of a collective.
        group: Number of the group.
        ranks: World ranks that take part; for a message, source and destination.
        numel, dtype: Elements of a message, or of one rank's block.
        root: Rank in the group, of a collective that has one.
        any_source: True if the destination does not name the source.
        later: Ranks that begin it and wait later; for a collective, all or none.
    """

    number: int
    kind: str
    group: int
    ranks: tuple[int, ...]
    numel: int
    dtype: torch.dtype
    root: int
    any_source: bool
    later: frozenset[int]


@dataclass(frozen=True)
class Step:
    """Action of a rank: to post an event, or to wait ("wait", "limit" or "poll") for one that it has posted."""

    act: str
    event: Event


@dataclass(frozen=True)
class Program:
    """Groups, as world ranks, and the steps of each rank."""

    groups: tuple[tuple[int, ...], ...]
    steps: tuple[tuple[Step, ...], ...]


def generate(seed: int, size: int, events: int = 40) -> Program:
    """Return the program of a seed for a world of `size` ranks."""
    chance = random.Random(f"{seed} of {size}")
    everyone = tuple(range(size))
    subsets = [tuple(sorted(chance.sample(everyone, chance.randint(2, size)))) for _ in range(2)]
    groups = (everyone, everyone, *subsets)
    order = [_event(chance, number, groups) for number in range(events)]
    return Program(groups, tuple(_steps(chance, rank, order) for rank in everyone))


def _event(chance: random.Random, number: int, groups: Sequence[tuple[int, ...]]) -> Event:
    group = chance.randrange(len(groups))
    ranks, kind = groups[group], "message" if chance.random() < 0.6 else chance.choice(COLLECTIVES)
    dtype = chance.choice(DTYPES)
    longest = LONGEST if chance.random() < 0.03 else LONGEST >> 5
    numel = max(1, int(longest ** chance.random()) // dtype.itemsize // (1 if kind == "message" else len(ranks)))
    root, any_source = chance.randrange(len(ranks)), chance.random() < 0.2
    if kind == "message":
        ranks = tuple(chance.sample(ranks, 2))
        later = frozenset(rank for rank in ranks if chance.random() < 0.7)
    else:
        later = frozenset(ranks if chance.random() < 0.5 else ())
    return Event(number, kind, group, ranks, numel, dtype, root, any_source, later)


def _steps(chance: random.Random, rank: int, order: Sequence[Event]) -> tuple[Step, ...]:
    steps: list[Step] = []
    begun: list[Event] = []
    for event in order:
        while begun and chance.random() < 0.3:
            earlier = begun.pop(chance.randrange(len(begun)))
            steps.append(Step(chance.choice(WAITS), earlier))
        if rank in event.ranks:
            steps.append(Step("post", event))
            if rank in event.later:
                begun.append(event)
    chance.shuffle(begun)
    return (*steps, *(Step("wait", event) for event in begun))


# -- values of the tensors before and after


def values(event: Event, rank: int, blocks: int = 1) -> torch.Tensor:
    """Return a rank's contribution to the event: small numbers, so that sums are exact in every type."""
    places = torch.arange(event.numel * blocks, dtype=torch.int64)
    return ((7 * places + 5 * rank + 13 * event.number) % 11).to(event.dtype)


def expected_result(event: Event, rank: int) -> torch.Tensor | None:
    """Return a rank's result of the event, or None if it has none."""
    ranks, n = event.ranks, event.numel
    if event.kind == "message":
        return values(event, ranks[0]) if rank == ranks[1] else None
    if event.kind in ("all_reduce", "reduce"):
        total = torch.stack([values(event, other) for other in ranks]).sum(0).to(event.dtype)
        return total if event.kind == "all_reduce" or rank == ranks[event.root] else None
    if event.kind == "broadcast":
        return values(event, ranks[event.root])
    if event.kind == "all_gather":
        return torch.cat([values(event, other) for other in ranks])
    mine = slice(n * ranks.index(rank), n * (ranks.index(rank) + 1))
    parts = [values(event, other, len(ranks))[mine] for other in ranks]
    if event.kind == "reduce_scatter":
        return torch.stack(parts).sum(0).to(event.dtype)
    return torch.cat(parts) if event.kind == "all_to_all" else None


class CommunicatorExecutor:
    """Steps performed with mpitrain's communicators."""

    def __init__(self, world, groups):
        self.rank = world.rank
        self.comms = [world.subgroup(ranks) for ranks in groups]

    def post(self, event: Event, later: bool):
        """Post the event; return its handle, None if it is complete, and the tensor that holds the result."""
        comm, kind, ranks = self.comms[event.group], event.kind, event.ranks
        if kind == "message":
            return self._message(comm, event, later)
        x = values(event, self.rank, len(ranks) if kind in ("reduce_scatter", "all_to_all") else 1)
        out = torch.empty(event.numel * (1 if kind == "reduce_scatter" else len(ranks)), dtype=event.dtype)
        if kind == "barrier":
            return comm.barrier(async_op=later), x
        if kind == "all_reduce":
            return comm.all_reduce(x, async_op=later), x
        if kind in ("broadcast", "reduce"):
            return getattr(comm, kind)(x, event.root, async_op=later), x
        return getattr(comm, kind)(out, x, async_op=later), out

    def _message(self, comm, event: Event, later: bool):
        tag = event.number if event.any_source else 0
        source, dest = (self._rank_of(event, rank) for rank in event.ranks)
        x = values(event, event.ranks[0])
        if self.rank == event.ranks[0]:
            return (comm.isend if later else comm.send)(x, dest, tag), x
        from mpitrain.comm import ANY_SOURCE

        x.fill_(0)
        return (comm.irecv if later else comm.recv)(x, ANY_SOURCE if event.any_source else source, tag), x

    def _rank_of(self, event: Event, rank: int) -> int:
        return list(self.comms[event.group].world_ranks).index(rank)

    def wait(self, work, how: str) -> None:
        """Wait until the event is complete."""
        if how == "poll":
            deadline = time.monotonic() + LIMIT
            while not work.done():
                assert time.monotonic() < deadline, "the event did not complete while polling"
                time.sleep(0)
        else:
            work.wait(LIMIT if how == "limit" else None)

    def free(self) -> None:
        """Free the groups, in one order on all ranks."""
        for comm in self.comms:
            if comm is not None:
                comm.free()


class TorchExecutor:
    """Steps performed with torch.distributed and any of its backends."""

    def __init__(self, groups):
        self.rank = dist.get_rank()
        self.groups = [dist.new_group(list(ranks)) for ranks in groups]

    def post(self, event: Event, later: bool):
        """Post the event; return its handle, None if it is complete, and the tensor that holds the result."""
        group, kind, ranks = self.groups[event.group], event.kind, event.ranks
        if kind == "message":
            return self._message(group, event, later)
        x = values(event, self.rank, len(ranks) if kind in ("reduce_scatter", "all_to_all") else 1)
        out = torch.empty(event.numel * (1 if kind == "reduce_scatter" else len(ranks)), dtype=event.dtype)
        how = {"group": group, "async_op": later}
        if kind == "barrier":
            return dist.barrier(**how), x
        if kind == "all_reduce":
            return dist.all_reduce(x, **how), x
        if kind in ("broadcast", "reduce"):
            return getattr(dist, kind)(x, ranks[event.root], **how), x
        names = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}
        return getattr(dist, names.get(kind, "all_to_all_single"))(out, x, **how), out

    def _message(self, group, event: Event, later: bool):
        source, dest = event.ranks
        how = {"group": group, "tag": event.number if event.any_source else 0}
        x = values(event, source)
        if self.rank == source:
            return (dist.isend if later else dist.send)(x, dest, **how), x
        x.fill_(0)
        return (dist.irecv if later else dist.recv)(x, None if event.any_source else source, **how), x

    def wait(self, work, how: str) -> None:
        """Wait until the event is complete."""
        if how == "poll":
            deadline = time.monotonic() + LIMIT
            while not work.is_completed():
                assert time.monotonic() < deadline, "the event did not complete while polling"
                time.sleep(0)
        work.wait(timedelta(seconds=LIMIT)) if how == "limit" else work.wait()


def perform(program: Program, executor) -> None:
    """Perform this rank's steps, and compare the result of every event."""
    pending = {}
    for step in program.steps[executor.rank]:
        event = step.event
        if step.act == "post":
            work, result = executor.post(event, later=executor.rank in event.later)
            if executor.rank in event.later:
                pending[event.number] = work, result
                continue
        else:
            work, result = pending.pop(event.number)
            executor.wait(work, step.act)
        expected = expected_result(event, executor.rank)
        assert expected is None or torch.equal(result, expected), event
