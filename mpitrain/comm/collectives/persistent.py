"""Persistent operations, whose arguments are checked once, like MPI's persistent collectives (MPI-4.1, section 6.13).

call = world.all_reduce_init(x)
for _ in range(steps):
    fill(x)
    call()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mpitrain.comm.collectives.binding import CollectiveOperation, Invocation, Ready
from mpitrain.comm.collectives.dispatch import Dispatcher
from mpitrain.comm.memory.buffers import is_wrapper
from mpitrain.comm.runtime.agreement import SIGNED_CALLS
from mpitrain.errors import InputError


class PersistentCall:
    """A collective operation on fixed tensors. Calling it performs the operation on their present contents.

    Ranks make and call it in the same order as other operations of the communicator. The tensors exist as long as it
    does, and must not be resized. Where the MPI library performs the operation, ranks of a node compare what they call
    at the first call and then at every sixteenth operation, not at each.
    """

    __slots__ = ("__weakref__", "_comm", "_first", "_invocation", "_perform")

    def __init__(self, comm: Dispatcher, invocation: Invocation) -> None:
        self._comm, self._invocation, self._first = comm, invocation, invocation.first
        self._perform: Ready | None = None

    def __call__(self) -> None:
        """Perform the operation. Collective.

        Raises:
            InputError: The communicator was freed.
            CommunicationError: MPI fails, or ranks of a node call different operations.
        """
        perform = self._perform
        if perform is None:
            comm, invocation = self._comm, self._invocation
            comm.dispatch(invocation)
            compiled = comm.binder.cache.follow(invocation.key, self)
            if compiled is not None:
                signed = SIGNED_CALLS if compiled.volume.algorithm == "mpi" else 1
                self._perform = comm.make_repeat(invocation, compiled, signed)
        else:
            perform(self._first)

    def forget(self) -> None:
        """Check the arguments again at the next call, because the memory or the traffic counters have changed."""
        self._perform = None


class _Recorder:
    """Stand-in for a communicator that records the call of an operation instead of performing it."""

    def __init__(self, comm: Dispatcher) -> None:
        self._comm, self.ready = comm, dict[Any, Any]()
        self.invocation: Invocation | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def call(
        self,
        operation: CollectiveOperation,
        async_op: bool,
        tensors: Sequence[Any],
        written: Sequence[bool],
        *arguments: Any,
    ) -> None:
        """Record the call of an operation; the arguments are those of `Dispatcher.call`."""
        self.begin(partial(self._comm.check_call, operation, written, arguments), async_op, tensors, written)

    def begin(
        self,
        make_invocation: Callable[..., Invocation],
        async_op: bool,
        tensors: Sequence[Any],
        written: Sequence[bool],
    ) -> None:
        """Record a call; the arguments are those of `Dispatcher.begin`."""
        if async_op:
            raise InputError("a persistent call is not asynchronous; leave async_op out, or use the operation itself")
        if any(map(is_wrapper, tensors)):
            raise InputError("a persistent call needs plain tensors; pass the inner tensors of a wrapper one by one")
        self.invocation = self._comm.prepare(make_invocation, tensors, written)


def persistent(operation: Callable[..., Any]) -> Callable[..., PersistentCall]:
    """Return the method that makes persistent calls of an operation, for `Communicator`."""
    name = operation.__name__

    def init(comm: Dispatcher, *args: Any, **kwargs: Any) -> PersistentCall:
        recorder = _Recorder(comm)
        operation(recorder, *args, **kwargs)
        assert recorder.invocation is not None
        return PersistentCall(comm, recorder.invocation)

    init.__name__ = init.__qualname__ = f"{name}_init"
    init.__doc__ = f"""Return a `PersistentCall` of `{name}`, which is repeated with little overhead. Collective.

    Args:
        *args: Arguments of `{name}`. Results are written into the same tensors each time.
        **kwargs: Keyword arguments of `{name}`, without async_op.

    Raises:
        InputError: As `{name}` does, or the call is asynchronous.
    """
    return init
