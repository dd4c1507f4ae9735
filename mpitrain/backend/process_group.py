"""The torch.distributed process group over a communicator: re-use of communicators, barriers and memory.

`MPIProcessGroup` is a subclass of ProcessGroup, not of Backend, because C++ calls methods written in Python only on a
ProcessGroup. torch's own ProcessGroup looks up registered backends; the methods here and in `base` replace those
look-ups.

Freeing an MPI communicator is collective, but destroying a torch process group is not: some ranks may leave without it.
Therefore the communicator of a destroyed group is kept until its ranks make a group together again, the same or a
larger one. They agree on its fate by messages, because some of them may still use the group:

    each member -> first member     communicators that it has left, if all of their ranks are in the new group
    first member -> each member     the one to re-use, if any; those to free, if too many are kept; those to abandon

Each rank also sends the number of messages that it has sent minus received in each communicator. If these do not sum to
zero, some message was never received and could be received later by mistake, so the communicator is abandoned.
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

from mpitrain.backend.arguments import Destination, as_list, as_source, by_inner_tensors
from mpitrain.backend.base import GroupError, NoStore, translate_error
from mpitrain.backend.collectives import GroupCollectives, is_observed
from mpitrain.backend.work import FinishedWork, MessageWork, Queue, poll_until, seconds_of
from mpitrain.comm import ANY_SOURCE, Communicator, init
from mpitrain.comm.runtime.work import Messages
from mpitrain.errors import MpitrainError

_MAX_REUSABLE = 16  # communicators that may be kept for re-use
_TAGS = 1 << 14

Key = tuple[int, ...]  # the ranks of a group
Name = tuple[Key, int]  # of a communicator: its ranks, and the number of earlier ones with the same ranks
Decision = tuple[int, list[Name], list[Name]]  # see `_decide`


def _decide(key: Key, offers: Iterable[tuple[Name, int]]) -> Decision:
    """Decide which communicators are re-used, freed or abandoned, among those that all of their ranks have left.

    Args:
        key: Ranks of the new group.
        offers: For all ranks, each communicator that the rank has left, and its number of messages sent minus received.

    Returns:
        (number of the communicator to re-use, -1 for none; names of those to free, because too many are kept; names of
        those to abandon).
    """
    left: dict[Name, list[int]] = {}
    for name, surplus in offers:
        left.setdefault(name, []).append(surplus)
    by_all = sorted(name for name, surpluses in left.items() if len(surpluses) == len(name[0]))
    clean = [name for name in by_all if sum(left[name]) == 0]
    use = next((name for name in clean if name[0] == key), None)
    spare = [name for name in clean if name != use]
    forget = [name for name in by_all if name not in clean]
    return use[1] if use is not None else -1, spare[: max(0, len(spare) - _MAX_REUSABLE)], forget


@dataclass
class GroupRegistry:
    """State shared by all process groups of this process.

    Attributes:
        control: Communicator over all ranks, by which members of a group agree.
        store: Store passed to torch. torch does not keep its Python part alive, so it is kept here.
        communicators: Communicators by their ranks, in order of creation; None for those that were freed.
        surpluses: Number of messages that this rank sent minus received, by communicator of a destroyed group.
    """

    control: Communicator
    store: NoStore = field(default_factory=NoStore)
    communicators: dict[Key, list[Communicator | None]] = field(default_factory=dict)
    surpluses: dict[Name, int] = field(default_factory=dict)

    def acquire(self, ranks: Sequence[int]) -> Communicator:
        """Return a communicator over these ranks of the world, in this order. Collective over them."""
        key = tuple(ranks)
        use, free, forget = self._agree(key)
        for name in (*free, *forget):
            if self.surpluses.pop(name, None) is not None:
                comm, self.communicators[name[0]][name[1]] = self.communicators[name[0]][name[1]], None
                if comm is not None and name in free:
                    comm.free()
        communicators = self.communicators.setdefault(key, [])
        if use >= 0:
            del self.surpluses[key, use]
            comm = communicators[use]
        else:
            comm = self.control.subgroup(key, label=f"group {len(communicators)} of ranks {_format_ranks(key)}")
            communicators.append(comm)
        assert comm is not None  # this rank is one of them
        return comm

    def release(self, comm: Communicator, surplus: int) -> None:
        """Note that a group is destroyed and that none of its operations is under way on this rank.

        Args:
            comm: Communicator of the group.
            surplus: Number of messages that this rank has sent in it, minus those it has received.
        """
        name = next((key, comms.index(comm)) for key, comms in self.communicators.items() if comm in comms)
        self.surpluses[name] = surplus

    def _agree(self, key: Key) -> Decision:
        control, first = self.control, key[0]
        tag = zlib.crc32(repr(key).encode()) % _TAGS
        offer = [(name, surplus) for name, surplus in self.surpluses.items() if set(name[0]) <= set(key)]
        if control.rank != first:
            _send_json(control, offer, first, tag)
            use, *names = _recv_json(control, first, tag)
            free, forget = ([(tuple(ranks), number) for ranks, number in listed] for listed in names)
            return use, free, forget
        everyone = list(offer)
        for rank in key[1:]:
            offers = _recv_json(control, rank, tag)
            everyone += [((tuple(ranks), number), surplus) for (ranks, number), surplus in offers]
        decision = _decide(key, everyone)
        for rank in key[1:]:
            _send_json(control, decision, rank, tag)
        return decision


def _send_json(control: Communicator, value: Any, rank: int, tag: int) -> None:
    text = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8).copy()
    control.send(np.array([text.size], dtype=np.int64), rank, tag)
    control.send(text, rank, tag)


def _recv_json(control: Communicator, rank: int, tag: int) -> Any:
    length = np.empty(1, dtype=np.int64)
    control.recv(length, rank, tag)
    text = np.empty(int(length[0]), dtype=np.uint8)
    control.recv(text, rank, tag)
    return json.loads(text.tobytes())


@functools.cache
def get_registry() -> GroupRegistry:
    """Return the registry of this process. Collective over all ranks the first time."""
    world = init(abort_on_error=False)
    return GroupRegistry(world.split(0, world.rank, label="torch.distributed"))


def _format_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > 8 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}..{ranks[-1]}"
    return str(list(ranks))


_STEPS = 8  # block sizes between one power of two and the next, so at most 1/8 of a block is unused
_MIN_BLOCK = 4096  # bytes


class TensorMemory:
    """Memory for tensors that are communicated, kept by a process group and re-used.

    Any thread may drop a tensor.

    FSDP2 allocates new buffers to gather into and reduce from for every layer of every step. The operating system must
    then find, clear and map pages each time, which takes as long as the communication. After

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_allocate_memory_from_process_group_for_comm(True)

    FSDP2 allocates from the process group instead (`allocate_tensor`), and gets the memory of an earlier tensor of the
    same size.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, list[np.ndarray]] = defaultdict(list)

    def tensor(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat uninitialized tensor in host memory. Its block is free again when its last view is deleted.

        Args:
            numel: Number of elements.
            dtype: Element type.
        """
        nbytes = numel * dtype.itemsize
        free = self._free[_block_size(nbytes)]
        try:
            block = free.pop()
        except IndexError:
            block = np.empty(_block_size(nbytes), dtype=np.uint8)
        lent = block[:nbytes]  # torch keeps this object alive as long as it uses the memory
        weakref.finalize(lent, free.append, block).atexit = False
        return torch.from_numpy(lent).view(dtype)

    def clear(self) -> None:
        """Return the free blocks to the operating system."""
        self._free.clear()


def _block_size(nbytes: int) -> int:
    """Return the size of the block for a tensor of `nbytes` bytes."""
    unit = max(_MIN_BLOCK, (1 << max(nbytes - 1, 1).bit_length()) // (2 * _STEPS))
    return -(-nbytes // unit) * unit


_BARRIER_TAGS = range(31000, 31700)  # tags of successive barriers; MPI guarantees tags up to 32767
_MONITORED_TAGS = range(32000, 32700)


class Barriers:
    """Barriers with a time limit, by messages: MPI's own barrier cannot be left before all ranks have arrived.

    `wait` is the dissemination barrier: in round k, rank r sends to rank r + 2^k and receives from rank r - 2^k, for
    ceil(log2(size)) rounds. In `wait_monitored`, each rank sends to rank 0, and then rank 0 sends to each rank.

    Reference: Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization" (1988).

    Attributes:
        abandoned: Messages whose wait timed out. MPI may still write to their memory.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._count = 0
        self.abandoned: list[Messages] = []

    def _next_tag(self, tags: range) -> int:
        self._count += 1
        return tags[self._count % len(tags)]

    def wait(self, seconds: float) -> None:
        """Wait until every rank has called this.

        Args:
            seconds: Time limit.

        Raises:
            GroupError: Some rank has not arrived in that time.
        """
        comm, tag = self._comm, self._next_tag(_BARRIER_TAGS)
        deadline = time.monotonic() + seconds
        distance = 1
        while distance < comm.size:
            before = (comm.rank - distance) % comm.size
            arriving = comm.irecv(np.empty(1, dtype=np.int64), before, tag)
            leaving = comm.isend(np.zeros(1, dtype=np.int64), (comm.rank + distance) % comm.size, tag)
            if not self._complete_by(arriving, deadline):
                raise GroupError(
                    f"barrier of {comm.label}: Timed out waiting {1e3 * seconds:.0f}ms on rank {comm.rank} for a "
                    f"message from rank {before}; that rank, or one that it waits for, did not call the barrier"
                )
            self._complete_by(leaving, deadline)
            distance *= 2

    def wait_monitored(self, seconds: float, wait_all_ranks: bool) -> None:
        """Return when every rank has called this; otherwise rank 0 names ranks that did not.

        Args:
            seconds: Time limit.
            wait_all_ranks: If true, rank 0 names all missing ranks, else the first.

        Raises:
            GroupError: Some rank has not arrived in that time. The message is worded as gloo's.
        """
        comm, tag = self._comm, self._next_tag(_MONITORED_TAGS)
        deadline = time.monotonic() + seconds
        word = np.zeros(1, dtype=np.int64)
        if comm.rank:
            self._complete_by(comm.isend(word, 0, tag), deadline)
            if not self._complete_by(comm.irecv(word, 0, tag), deadline):
                raise GroupError(
                    f"Rank {comm.rank} successfully reached monitoredBarrier, but received errors while waiting for "
                    f"send/recv from rank 0: no message in {1e3 * seconds:.0f} ms ({comm.label}); see rank 0's "
                    "error for the missing ranks"
                )
            return
        arriving = {rank: comm.irecv(np.empty(1, dtype=np.int64), rank, tag) for rank in range(1, comm.size)}
        missing = []
        for rank, work in arriving.items():
            if not self._complete_by(work, deadline):
                missing.append(rank)
                if not wait_all_ranks:
                    break
        if missing:
            self.abandoned += arriving.values()
            if seconds <= 0:
                raise GroupError(
                    f"Rank 0 timed out in monitoredBarrier after {1e3 * seconds:.0f} ms; pass a longer timeout"
                )
            names = ", ".join(map(str, missing))
            raise GroupError(
                f"Rank{'s' if len(missing) > 1 else ''} {names} failed to pass monitoredBarrier in "
                f"{1e3 * seconds:.0f} ms ({comm.label}); check what they are doing"
            )
        for rank in arriving:
            self._complete_by(comm.isend(word, rank, tag), deadline)

    def _complete_by(self, work: Messages, deadline: float) -> bool:
        if work.done():
            return True
        with work.limited_wait():
            done = poll_until(work.done, deadline)
        if not done:
            self.abandoned.append(work)
        return done


# seconds: after a timeout up to this, the group raises; after a longer one, the watchdog ends the job
_SHORT_TIMEOUT = 300.0


def _unsupported_error(name: str, advice: str) -> GroupError:
    return GroupError(f'the backend "mpitrain" does not support {name}; {advice}', agreed=True)


def _unsupported(name: str, advice: str) -> Callable[..., Any]:
    """Return a method that raises an error, for a feature that this backend lacks."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise _unsupported_error(name, advice)

    return refuse


class MPIProcessGroup(GroupCollectives):
    """A process group over a communicator. Ranks are ranks of the group; options are torch's."""

    def __init__(self, comm: Communicator, name: str, store: dist.Store, timeout: timedelta) -> None:
        super().__init__(comm.rank, comm.size)
        self.comm = comm
        self.timeout = timeout.total_seconds()
        self._name, self._store = name, store
        self._queue = Queue(comm, self.timeout if self.timeout <= _SHORT_TIMEOUT else None)
        self._barriers = Barriers(comm)
        self._compare_count = itertools.count(1) if dist.get_debug_level() == dist.DebugLevel.DETAIL else None
        self._memory = TensorMemory()
        self._coalesced: list[dist.Work] | None = None
        self._in_flight: set[MessageWork] = set()
        self._surplus = 0  # messages sent minus messages received
        self._closed = False

    def __repr__(self) -> str:
        return f"MPIProcessGroup({self.group_name!r}, rank {self.comm.rank} of {self.comm.size})"

    # -- point to point ----------------------------------------------------------------------------------

    @by_inner_tensors
    def send(self, tensors: Any, dst: int, tag: int = 0) -> dist.Work:
        """Begin to send a tensor to a rank of the group.

        Args:
            tensors: Tensor, or list of one tensor.
            dst: Rank that receives it.
            tag: Number that the receiver passes as well.
        """
        [tensor] = as_list(tensors)

        def begin() -> Messages:
            return self.comm.isend(as_source(tensor), dst, tag)

        issue = partial(self._begin, f"send to rank {dst}", begin, tensor)
        return self._dispatch(("send", [tensor], dst, tag), [tensor], issue)

    @by_inner_tensors
    def recv(self, tensors: Any, src: int, tag: int = 0) -> dist.Work:
        """Begin to receive into a tensor from a rank of the group.

        Args:
            tensors: Tensor, or list of one tensor.
            src: Rank that sends.
            tag: Number that the sender passes as well.
        """
        [tensor] = as_list(tensors)
        into = Destination(tensor)
        source = "any rank" if src == ANY_SOURCE else f"rank {src}"
        op_args = ("recv_any_source_", [tensor], tag) if src == ANY_SOURCE else ("recv_", [tensor], src, tag)
        begin = partial(self.comm.irecv, into.buffer, src, tag)
        issue = partial(self._begin, f"receive from {source}", begin, tensor, into.copy_back)
        return self._dispatch(op_args, [tensor], issue)

    def _begin(
        self,
        name: str,
        begin: Callable[[], Messages],
        tensor: torch.Tensor,
        copy_back: Callable[[], None] | None = None,
    ) -> dist.Work:
        try:
            work = begin()
        except MpitrainError as error:
            raise translate_error(error) from error
        self._surplus += 1 if copy_back is None else -1
        name = f"{name} of {self.group_name}"
        return self._record(MessageWork(name, work, [tensor], self.timeout, self._in_flight, copy_back))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        """Begin to receive into a tensor from any rank of the group.

        Args:
            tensors: Tensor, or list of one tensor.
            tag: Number that the sender passes as well.
        """
        return self.recv(tensors, ANY_SOURCE, tag)

    # -- synchronisation ---------------------------------------------------------------------------------

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Synchronize all ranks of the group.

        Args:
            opts: torch's options, or a timeout.
            timeout: Time limit, if the options contain none; None for the group's.

        Raises:
            GroupError: Some rank has not arrived within the time limit.
        """
        limit = opts if isinstance(opts, timedelta) else getattr(opts, "timeout", timeout)
        seconds = seconds_of(limit, self.timeout)
        if getattr(opts, "asyncOp", True) or self._coalesced is not None or is_observed():
            op_args: Any = ("barrier", torch.empty(0), [])
            return self._run("barrier", lambda: self._barriers.wait(seconds), [], opts, op_args=op_args)
        self._compare("barrier", [])
        self._queue.perform(lambda: self._barriers.wait(seconds))  # it raises by itself after its own limit
        return FinishedWork([])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Synchronize all ranks of the group; rank 0 names ranks that do not arrive in time.

        Args:
            timeout: Time limit; None for the group's.
            wait_all_ranks: If true, rank 0 names all missing ranks, else the first.
        """
        seconds = timeout.total_seconds() if timeout is not None else self.timeout
        self._queue.perform(lambda: self._barriers.wait_monitored(seconds, wait_all_ranks))

    # -- memory ------------------------------------------------------------------------------------------

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return True if `allocate_tensor` supports the device."""
        return torch.device(device).type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a flat tensor in re-used memory; see `TensorMemory`.

        Args:
            size: Number of elements.
            dtype: Element type.
            device: Device, which must be the CPU.

        Raises:
            GroupError: The device is not the CPU.
        """
        if not self.supports_tensor_alloc(device):
            raise _unsupported_error(f"allocate_tensor on {device}", "allocate with torch.empty")
        return self._memory.tensor(size, dtype)

    # -- life --------------------------------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the time limit of the group's operations."""
        self.timeout = timeout.total_seconds()

    def shutdown(self) -> None:
        """Complete the operations under way, and return the communicator to the `GroupRegistry`.

        The registry reuses or frees it when all of its ranks make the next group.
        """
        if not self._closed:
            self._closed = True
            self._queue.close()
            self._memory.clear()
            if stuck := self._queue.stuck:
                text = f"mpitrain: rank {self.comm.world_ranks[self.comm.rank]}: exited before {stuck} was complete"
                atexit.register(self.comm.process.faults.end_job, text)  # MPI cannot finalize with a thread inside it
            elif not self._barriers.abandoned:
                with suppress(MpitrainError):
                    if all(message.is_completed() for message in list(self._in_flight)):
                        get_registry().release(self.comm, self._surplus)

    abort = shutdown

    # -- not supported ------------------------------------------------------------------------------------

    split_group = _unsupported("ProcessGroup.split_group", "call torch.distributed.split_group or new_group")
    merge_remote_group = _unsupported(
        "merge_remote_group", "start all ranks with one mpirun, and make groups of them with new_group"
    )
    _register_on_completion_hook = _unsupported("_register_on_completion_hook", "use work.get_future().then(callback)")
    _enable_collectives_timing = _unsupported("_enable_collectives_timing", "use torch.profiler")
    _start_time_estimate = _unsupported("time estimates", "use python -m benchmarks backend")
