"""all_to_all: block r of every rank goes to rank r.

rank 0   a0 b0 c0        a0 a1 a2
rank 1   a1 b1 c1   ->   b0 b1 b2
rank 2   a2 b2 c2        c0 c1 c2
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpitrain.comm.algorithms.pairwise import direct_all_to_all
from mpitrain.comm.collectives import all_reduce, arguments
from mpitrain.comm.collectives.arguments import block_sizes
from mpitrain.comm.collectives.binding import Binder, CollectiveOperation, Invocation, offsets
from mpitrain.comm.collectives.dispatch import NOT_READY, Dispatcher
from mpitrain.comm.memory.board import described
from mpitrain.comm.memory.elements import LARGEST_COUNT
from mpitrain.comm.runtime.executor import Compiled, Layout
from mpitrain.comm.runtime.kernels import Call
from mpitrain.comm.runtime.work import Work
from mpitrain.comm.selection import Algorithm, always
from mpitrain.errors import InputError

_DIRECT = Algorithm(lambda s: direct_all_to_all(s.size, s.nodes))


def all_to_all(
    comm: Dispatcher,
    out: Any,
    x: Any,
    async_op: bool = False,
    *,
    out_counts: Sequence[int] | None = None,
    in_counts: Sequence[int] | None = None,
) -> Work | None:
    """Send block r of x to rank r; block s of out comes from rank s. Collective.

    Args:
        out: Where the blocks go: a contiguous tensor or array.
        x: The blocks that leave: a contiguous tensor or array of out's type.
        async_op: Return at once with a `Work`; neither tensor may be touched before that is complete.
        out_counts: Elements of the blocks of out; without it all are equal.
        in_counts: Elements of the blocks of x; without it all are equal.

    Raises:
        InputError: The tensors cannot be communicated or do not fit together.
        CommunicationError: MPI fails, or ranks of a node call different operations.
    """
    try:
        whole = out.data_ptr(), out.numel(), out.dtype
        ready = comm.ready["all_to_all", x.data_ptr(), x.numel(), x.dtype, whole]
    except NOT_READY:
        pass
    else:
        even = in_counts is None and out_counts is None
        if even and not async_op and x.is_contiguous() and out.is_contiguous():
            ready(x)
            return None
    return comm.begin(partial(_checked, comm, in_counts, out_counts), async_op, (x, out), (False, True))


def _checked(
    comm: Dispatcher, in_counts: Sequence[int] | None, out_counts: Sequence[int] | None, x: Tensor, out: Tensor
) -> Invocation:
    received = block_sizes(comm, "all_to_all", None, out, out_counts, "x", "out")
    sent = block_sizes(comm, "all_to_all", None, x, in_counts, "out", "x")
    if out.dtype != x.dtype:
        raise InputError(f"all_to_all: x is {x.dtype}, out is {out.dtype}; make them the same")
    if in_counts is None and out_counts is None:
        if out.numel() != x.numel():
            problem = f"x has {x.numel()} elements, out {out.numel()}; make them equal or give counts"
            raise InputError(f"all_to_all: {problem}")
        return OPERATION.on((x, out), (False, True), alike=True)
    bind = partial(_uneven, received=received, sent=sent)
    return Invocation("all_to_all", bind, (x, out), (False, True), alike=False, uneven=True)


def _bind(binder: Binder, x: Tensor, out: Tensor) -> Compiled:
    comm, item, size = binder.comm, x.element_size(), binder.topology.size
    count = x.numel() // size
    if x.numel() * item > LARGEST_COUNT:
        return _directly(binder, x, out, [count] * size, [count] * size)
    send, receive = (arguments.even_blocks(y.data_ptr(), count, size, item) for y in (x, out))
    moved = arguments.moved_by_library(binder.topology, "all_to_all", [count * item] * size)
    return Compiled([partial(comm.Alltoall, send, receive)], moved=moved)


OPERATION = CollectiveOperation(
    "all_to_all",
    2,
    _bind,
    lambda binder, x, out: described("all_to_all", x.numel(), x.dtype),
    always,
    by_rank=(True, True),
)


def _uneven(binder: Binder, x: Tensor, out: Tensor, received: Sequence[int], sent: Sequence[int]) -> Call:
    """The ranks' sizes may differ, but they must choose alike, at each call anew."""
    item, largest = x.element_size(), torch.tensor([max(out.numel(), x.numel())])
    binder.run(all_reduce.OPERATION.bound(binder, largest, "max", "mpi", False))
    if int(largest) * item > LARGEST_COUNT:
        compiled = _directly(binder, x, out, received, sent)
    else:
        send = arguments.uneven_blocks(x.data_ptr(), sent, item)
        receive = arguments.uneven_blocks(out.data_ptr(), received, item)
        moved = arguments.moved_by_library(binder.topology, "all_to_all", [count * item for count in sent])
        compiled = Compiled([partial(binder.comm.Alltoallv, send, receive)], moved=moved)
    return binder.signed(f"uneven all_to_all of {x.dtype}", compiled, together=False)


def _directly(binder: Binder, x: Tensor, out: Tensor, received: Sequence[int], sent: Sequence[int]) -> Compiled:
    source, into = x.data_ptr(), out.data_ptr()
    layout = Layout(x.dtype, offsets(sent), source, source, inbox=into, inbox_bounds=offsets(received))
    return binder.compile(binder.program(_DIRECT, binder.setting(x)), layout)
