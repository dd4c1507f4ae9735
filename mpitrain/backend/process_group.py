"""The torch.distributed process group over a communicator.

A subclass of ProcessGroup, not of Backend, because C++ calls the methods of the former only when they are written in
Python; what C++ would look up in registered backends is answered here and in `versions`.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from mpitrain.backend import versions
from mpitrain.backend.arguments import listed
from mpitrain.backend.barrier import Barriers
from mpitrain.backend.collectives import GroupCollectives
from mpitrain.backend.debug import Comparison
from mpitrain.backend.dispatching import watched
from mpitrain.backend.failures import GroupError, translation
from mpitrain.backend.groups import place
from mpitrain.backend.memory import TensorMemory
from mpitrain.backend.tensors import Written, to_read
from mpitrain.backend.work import FinishedWork, MessageWork, Queue, seconds_of
from mpitrain.backend.wrapped import by_inner_tensors
from mpitrain.comm import ANY_SOURCE, Communicator
from mpitrain.comm.runtime.work import Messages
from mpitrain.errors import MpitrainError

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
        self._described(name, store)
        self._queue = Queue(comm, self.timeout if self.timeout <= _SHORT else None)
        self._barriers = Barriers(comm)
        self._comparison = Comparison(comm) if dist.get_debug_level() == dist.DebugLevel.DETAIL else None
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
        if versions.asynchronous(opts) or self._coalesced is not None or watched():
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
        """A flat tensor of `size` elements in memory that is used again; see `mpitrain.backend.memory`."""
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
                atexit.register(self._leave, stuck)
            elif not self._barriers.abandoned and self._quiet():
                place().give_back(self.comm, self._surplus)

    def _quiet(self) -> bool:
        """Whether no message of this rank is under way."""
        try:
            return all(message.is_completed() for message in list(self._in_flight))
        except MpitrainError:
            return False

    def _leave(self, stuck: str) -> None:
        """MPI cannot be finalized while a thread is inside it."""
        text = f"mpitrain: rank {self.comm.world_ranks[self.comm.rank]}: left with {stuck} not complete"
        self.comm.process.faults.end_job(text)

    abort = shutdown

    # -- what we lack ------------------------------------------------------------------------------------

    split_group = _refusing("ProcessGroup.split_group", "call torch.distributed.split_group or new_group")
    merge_remote_group = _refusing(
        "merge_remote_group", "start all ranks with one mpirun, and make groups of them with new_group"
    )
    _register_on_completion_hook = _refusing("_register_on_completion_hook", "use work.get_future().then(callback)")
    _enable_collectives_timing = _refusing("_enable_collectives_timing", "use torch.profiler")
    _start_time_estimate = _refusing("time estimates", "use python -m benchmarks backend")
