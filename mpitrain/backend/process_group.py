"""The torch.distributed process group over a communicator: its communicators, barriers and memory.

`MPIProcessGroup` is a subclass of ProcessGroup, not of Backend, because C++ calls the methods of the former only when
they are written in Python; what C++ would look up in registered backends is answered here and in `base`.

Freeing an MPI communicator is collective, destroying a torch process group is not: ranks may leave without it. So
the communicator of a destroyed group waits until its ranks make a group together again, the same one or a larger.
They then agree by messages, because one of them may have destroyed a group that another still has:

    each member -> first member     the communicators it has left, all of whose ranks are among these
    first member -> each member     which of them to use, if any; which to free, where too many wait; which to forget

Each rank also tells how many messages it has sent in a communicator more than it has received there. Where they do
not cancel out, some message was never received, and would turn up in a communicator that comes after: it is left alone.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import time
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mpitrain.backend.arguments import Written, by_inner_tensors, listed, to_read
from mpitrain.backend.base import GroupError, NoStore, translation
from mpitrain.backend.collectives import GroupCollectives, watched
from mpitrain.backend.work import FinishedWork, MessageWork, Queue, comes_true, seconds_of
from mpitrain.comm import ANY_SOURCE, Communicator, init
from mpitrain.comm.runtime.work import Messages
from mpitrain.errors import MpitrainError

_KEPT = 16  # communicators that may wait to be used again
_TAGS = 1 << 14

Key = tuple[int, ...]  # the ranks of a group
Name = tuple[Key, int]  # of a communicator: its ranks, and how many of the same ranks were made before it
Verdict = tuple[int, list[Name], list[Name]]  # see `_judge`


def _judge(key: Key, offers: Iterable[tuple[Name, int]]) -> Verdict:
    """Decide what becomes of communicators that all of their ranks have left.

    Args:
        key: The ranks of the new group.
        offers: Of all of them, the names of communicators that each has left, and its messages sent too many.

    Returns:
        (the number of the one to use again, -1 for none; those to free, where too many wait; those to leave alone).
    """
    left: dict[Name, list[int]] = {}
    for name, surplus in offers:
        left.setdefault(name, []).append(surplus)
    by_all = sorted(name for name, surpluses in left.items() if len(surpluses) == len(name[0]))
    clean = [name for name in by_all if sum(left[name]) == 0]
    use = next((name for name in clean if name[0] == key), None)
    spare = [name for name in clean if name != use]
    forget = [name for name in by_all if name not in clean]
    return use[1] if use is not None else -1, spare[: max(0, len(spare) - _KEPT)], forget


@dataclass
class GroupRegistry:
    """State that all process groups of a process share.

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
        use, free, forget = self._agree(key)
        for name in (*free, *forget):
            if self.left.pop(name, None) is not None:
                comm, self.made[name[0]][name[1]] = self.made[name[0]][name[1]], None
                if comm is not None and name in free:
                    comm.free()
        made = self.made.setdefault(key, [])
        if use >= 0:
            del self.left[key, use]
            comm = made[use]
        else:
            comm = self.control.subgroup(key, label=f"group {len(made)} of ranks {_short(key)}")
            made.append(comm)
        assert comm is not None  # this rank is one of them
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
            use, *names = _hear(control, first, tag)
            free, forget = ([(tuple(ranks), number) for ranks, number in listed] for listed in names)
            return use, free, forget
        everyone = list(offer)
        for rank in key[1:]:
            everyone += [((tuple(ranks), number), surplus) for (ranks, number), surplus in _hear(control, rank, tag)]
        verdict = _judge(key, everyone)
        for rank in key[1:]:
            _tell(control, verdict, rank, tag)
        return verdict


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
    return GroupRegistry(world.split(0, world.rank, label="torch.distributed"))


def _short(ranks: Sequence[int]) -> str:
    if len(ranks) > 8 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}..{ranks[-1]}"
    return str(list(ranks))


_STEPS = 8  # sizes between one power of two and the next: at most so much of a block is unused
_LEAST = 4096  # bytes


class TensorMemory:
    """Memory for tensors that are communicated, kept by a process group and given out again.

    Any thread may drop a tensor.

    FSDP2 allocates what it gathers into and reduces from anew for every layer of every step; the system then has to
    find, clear and map its pages each time, which takes as long as the communication. After

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_allocate_memory_from_process_group_for_comm(True)

    it asks the process group instead (`allocate_tensor`), and gets the memory that a tensor of the same size has left.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, list[np.ndarray]] = defaultdict(list)

    def tensor(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor of undefined values in host memory; the block is free again when its last view is gone."""
        nbytes = numel * dtype.itemsize
        free = self._free[_rounded(nbytes)]
        try:
            block = free.pop()
        except IndexError:
            block = np.empty(_rounded(nbytes), dtype=np.uint8)
        lent = block[:nbytes]  # torch keeps this object as long as it needs the memory
        weakref.finalize(lent, free.append, block).atexit = False
        return torch.from_numpy(lent).view(dtype)

    def clear(self) -> None:
        """Give the free blocks back to the system."""
        self._free.clear()


def _rounded(nbytes: int) -> int:
    """The size of the block for so many bytes."""
    unit = max(_LEAST, (1 << max(nbytes - 1, 1).bit_length()) // (2 * _STEPS))
    return -(-nbytes // unit) * unit


_BARRIER_TAGS = range(31000, 31700)  # of the barriers, one after the other; MPI promises tags up to 32767
_MONITORED_TAGS = range(32000, 32700)


class Barriers:
    """Barriers with a limit: over messages, because MPI's own cannot be left before everybody has come.

    `wait` is the dissemination barrier of Hensgen, Finkel and Manber (1988): in round k rank r sends to rank r + 2^k
    and receives from rank r - 2^k, ceil(log2(size)) rounds. `monitored`: everybody tells rank 0, rank 0 tells
    everybody.

    Attributes:
        abandoned: Messages that somebody has waited for in vain. MPI may still write into their memory.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._count = 0
        self.abandoned: list[Messages] = []

    def _next_of(self, tags: range) -> int:
        self._count += 1
        return tags[self._count % len(tags)]

    def wait(self, seconds: float) -> None:
        """Return when every rank has come.

        Args:
            seconds: How long to wait.

        Raises:
            GroupError: Some rank has not come in that time.
        """
        comm, tag = self._comm, self._next_of(_BARRIER_TAGS)
        deadline = time.monotonic() + seconds
        distance = 1
        while distance < comm.size:
            before = (comm.rank - distance) % comm.size
            arriving = comm.irecv(np.empty(1, dtype=np.int64), before, tag)
            leaving = comm.isend(np.zeros(1, dtype=np.int64), (comm.rank + distance) % comm.size, tag)
            if not self._done(arriving, deadline):
                raise GroupError(
                    f"barrier of {comm.label}: Timed out waiting {1e3 * seconds:.0f}ms on rank {comm.rank} for word "
                    f"from rank {before}; that rank, or one that it waits for, did not come"
                )
            self._done(leaving, deadline)
            distance *= 2

    def monitored(self, seconds: float, wait_all_ranks: bool) -> None:
        """Return when every rank has come, and tell rank 0 of those that do not.

        Args:
            seconds: How long to wait.
            wait_all_ranks: Whether rank 0 is to name all that did not come, instead of the first.

        Raises:
            GroupError: Some rank has not come in that time; in gloo's words.
        """
        comm, tag = self._comm, self._next_of(_MONITORED_TAGS)
        deadline = time.monotonic() + seconds
        word = np.zeros(1, dtype=np.int64)
        if comm.rank:
            self._done(comm.isend(word, 0, tag), deadline)
            if not self._done(comm.irecv(word, 0, tag), deadline):
                raise GroupError(
                    f"Rank {comm.rank} successfully reached monitoredBarrier, but received errors while waiting for "
                    f"send/recv from rank 0: nothing came in {1e3 * seconds:.0f} ms ({comm.label}); rank 0 tells who "
                    "did not come"
                )
            return
        arriving = {rank: comm.irecv(np.empty(1, dtype=np.int64), rank, tag) for rank in range(1, comm.size)}
        missing = []
        for rank, work in arriving.items():
            if not self._done(work, deadline):
                missing.append(rank)
                if not wait_all_ranks:
                    break
        if missing:
            self.abandoned += arriving.values()
            if seconds <= 0:
                raise GroupError(
                    f"Rank 0 timed out in monitoredBarrier after {1e3 * seconds:.0f} ms; give it some time"
                )
            names = ", ".join(map(str, missing))
            raise GroupError(
                f"Rank{'s' if len(missing) > 1 else ''} {names} failed to pass monitoredBarrier in "
                f"{1e3 * seconds:.0f} ms ({comm.label}); look at what they do instead"
            )
        for rank in arriving:
            self._done(comm.isend(word, rank, tag), deadline)

    def _done(self, work: Messages, deadline: float) -> bool:
        if work.done():
            return True
        with work.limited_wait():
            done = comes_true(work.done, deadline)
        if not done:
            self.abandoned.append(work)
        return done


_SHORT = 300.0  # seconds: groups with at most this timeout raise after it, the watchdog ends the job after others'


def _lacking(name: str, instead: str) -> GroupError:
    return GroupError(f'the backend "mpitrain" has no {name}; {instead}', agreed=True)


def _refusing(name: str, instead: str) -> Callable[..., Any]:
    """A method that we lack."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise _lacking(name, instead)

    return refuse


class MPIProcessGroup(GroupCollectives):
    """A process group over a communicator. Ranks here are those of the group; options are torch's."""

    def __init__(self, comm: Communicator, name: str, store: dist.Store, timeout: timedelta) -> None:
        super().__init__(comm.rank, comm.size)
        self.comm = comm
        self.timeout = timeout.total_seconds()
        self._name, self._store = name, store
        self._queue = Queue(comm, self.timeout if self.timeout <= _SHORT else None)
        self._barriers = Barriers(comm)
        self._compared = itertools.count(1) if dist.get_debug_level() == dist.DebugLevel.DETAIL else None
        self._memory = TensorMemory()
        self._coalesced: list[dist.Work] | None = None
        self._in_flight: set[MessageWork] = set()
        self._surplus = 0  # messages sent more than received
        self._closed = False

    def __repr__(self) -> str:
        return f"MPIProcessGroup({self.group_name!r}, rank {self.comm.rank} of {self.comm.size})"

    # -- point to point ----------------------------------------------------------------------------------

    @by_inner_tensors
    def send(self, tensors: Any, dst: int, tag: int = 0) -> dist.Work:
        """Begin to send a tensor to a rank of the group."""
        [tensor] = listed(tensors)
        issue = partial(self._begin, f"send to rank {dst}", lambda: self.comm.isend(to_read(tensor), dst, tag), tensor)
        return self._seen(("send", [tensor], dst, tag), [tensor], issue)

    @by_inner_tensors
    def recv(self, tensors: Any, src: int, tag: int = 0) -> dist.Work:
        """Begin to receive into a tensor from a rank of the group."""
        [tensor] = listed(tensors)
        into = Written(tensor)
        source = "any rank" if src == ANY_SOURCE else f"rank {src}"
        shown = ("recv_any_source_", [tensor], tag) if src == ANY_SOURCE else ("recv_", [tensor], src, tag)
        begin = partial(self.comm.irecv, into.buffer, src, tag)
        return self._seen(shown, [tensor], partial(self._begin, f"receive from {source}", begin, tensor, into.land))

    def _begin(
        self, name: str, begin: Callable[[], Messages], tensor: torch.Tensor, land: Callable[[], None] | None = None
    ) -> dist.Work:
        try:
            work = begin()
        except MpitrainError as error:
            raise translation(error) from error
        self._surplus += 1 if land is None else -1
        name = f"{name} of {self.group_name}"
        return self._remember(MessageWork(name, work, [tensor], self.timeout, self._in_flight, land))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        """Begin to receive into a tensor from whichever rank of the group sends first."""
        return self.recv(tensors, ANY_SOURCE, tag)

    # -- synchronisation ---------------------------------------------------------------------------------

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Return when every rank has come.

        Raises:
            GroupError: Not every rank has come in time: within the call's limit, or else the group's.
        """
        limit = opts if isinstance(opts, timedelta) else getattr(opts, "timeout", timeout)
        seconds = seconds_of(limit, self.timeout)
        if getattr(opts, "asyncOp", True) or self._coalesced is not None or watched():
            shown: Any = ("barrier", torch.empty(0), [])
            return self._run("barrier", lambda: self._barriers.wait(seconds), [], opts, shown=shown)
        self._compare("barrier", [])
        self._queue.perform(lambda: self._barriers.wait(seconds))  # which can be left after its own limit
        return FinishedWork([])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier after which rank 0 knows, and says, which ranks did not come in time."""
        seconds = timeout.total_seconds() if timeout is not None else self.timeout
        self._queue.perform(lambda: self._barriers.monitored(seconds, wait_all_ranks))

    # -- memory ------------------------------------------------------------------------------------------

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether `allocate_tensor` gives memory on a device."""
        return torch.device(device).type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor of `size` elements in memory that is used again; see `TensorMemory`."""
        if not self.supports_tensor_alloc(device):
            raise _lacking(f"memory of its own on {device}", "allocate with torch.empty")
        return self._memory.tensor(size, dtype)

    # -- life --------------------------------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the group's limit."""
        self.timeout = timeout.total_seconds()

    def shutdown(self) -> None:
        """Complete what is under way.

        The communicator waits for the next group that all of its ranks make, which uses or frees it (`groups`).
        """
        if not self._closed:
            self._closed = True
            self._queue.close()
            self._memory.clear()
            if stuck := self._queue.stuck:
                text = f"mpitrain: rank {self.comm.world_ranks[self.comm.rank]}: left with {stuck} not complete"
                atexit.register(self.comm.process.faults.end_job, text)  # MPI cannot end while a thread is inside it
            elif not self._barriers.abandoned:
                with suppress(MpitrainError):
                    if all(message.is_completed() for message in list(self._in_flight)):
                        place().give_back(self.comm, self._surplus)

    abort = shutdown

    # -- what we lack ------------------------------------------------------------------------------------

    split_group = _refusing("ProcessGroup.split_group", "call torch.distributed.split_group or new_group")
    merge_remote_group = _refusing(
        "merge_remote_group", "start all ranks with one mpirun, and make groups of them with new_group"
    )
    _register_on_completion_hook = _refusing("_register_on_completion_hook", "use work.get_future().then(callback)")
    _enable_collectives_timing = _refusing("_enable_collectives_timing", "use torch.profiler")
    _start_time_estimate = _refusing("time estimates", "use python -m benchmarks backend")
