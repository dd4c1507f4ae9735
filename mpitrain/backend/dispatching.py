"""Collectives as torch's dispatcher sees them, while somebody looks: CommDebugMode, the profiler, other modes.

A process group written in Python is called past the dispatcher, which is faster and leaves no trace. While a mode or
the profiler is active an operation is therefore issued as torch's own would be, as `c10d::allreduce_` and its kin; what
the dispatcher comes to in the end, below all modes, is a kernel that carries out ours.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

Call = Callable[[], dist.Work]

_KEY = "BackendSelect"  # the last thing that the dispatcher asks before it looks at the kind of tensor


class _Issued(threading.local):
    """The operation that this thread is taking through the dispatcher, and what came of it."""

    call: Call | None = None
    work: dist.Work | None = None


_issued = _Issued()


def watched() -> bool:
    """Whether anybody looks at what goes through the dispatcher."""
    return bool(torch._C._len_torch_dispatch_stack()) or torch.autograd._profiler_enabled()


def dispatch(name: str, values: Sequence[Any], group: dist.ProcessGroup, call: Call) -> dist.Work | None:
    """Issue a call as the operation c10d::name.

    Args:
        name: The operation's name.
        values: Those of its arguments, in order, but for the group, the limits and the reduction, of which Python can
            make
            none that the dispatcher takes but a sum.
        group: The process group.
        call: What carries it out.

    Returns:
        What the call does; None where a mode took its place, as those do that only want shapes.
    """
    operation = getattr(torch.ops.c10d, name).default
    _kernel_of(name)
    given: Any = iter(values)
    arguments: list[Any] = []
    for argument in operation._schema.arguments:
        if argument.name == "process_group":
            arguments.append(group.boxed())
        elif argument.name in ("async_op", "timeout"):
            break
        elif argument.name == "reduce_op":
            arguments.append(torch.classes.c10d.ReduceOp())
        else:
            arguments.append(next(given, None))  # None: what we have no use for
    _issued.call, _issued.work = call, None
    try:
        operation(*arguments)
        return _issued.work
    finally:
        _issued.call = _issued.work = None


@functools.cache
def _kernel_of(name: str) -> torch.library.Library:
    """Registers the kernel; kept as long as what is returned, which is for ever."""
    operation = getattr(torch.ops.c10d, name).default
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    results = len(operation._schema.returns)

    def kernel(keys: torch._C.DispatchKeySet, *arguments: Any) -> Any:
        call, _issued.call = _issued.call, None
        if call is None:  # of another backend
            return operation.redispatch(keys & below, *arguments)
        work = _issued.work = call()
        return (arguments[0], work.boxed()) if results > 1 else work.boxed()

    library = torch.library.Library("c10d", "IMPL")
    library.impl(name, kernel, _KEY, with_keyset=True)
    return library
