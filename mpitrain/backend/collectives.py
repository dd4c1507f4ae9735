"""The collectives of a process group: each method checks, converts and calls the communicator.

Ranks are those of the group; options are torch's.

A process group written in Python is called past torch's dispatcher, which is faster and leaves no trace. While a mode
(such as CommDebugMode) or the profiler is active an operation is therefore issued as torch's own would be, as
`c10d::allreduce_` and its kin; what the dispatcher comes to in the end, below all modes, is a kernel that carries out
ours.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from mpitrain.backend import versions
from mpitrain.backend.arguments import (
    Blocks,
    Tensors,
    Written,
    by_inner_tensors,
    check_length,
    check_splits,
    flat_list,
    joined,
    listed,
    options,
    rooted,
    row_counts,
    to_read,
)
from mpitrain.backend.reductions import Reducing
from mpitrain.backend.work import FinishedWork, Operation, Queue, Several, order_of

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


class GroupCollectives(versions.Base):
    """The collectives, under old and new names: torch's releases and its C++ code differ in which they call.

    Options are torch's; several tensors stand for several operations that are issued as one.
    """

    _queue: Queue
    _compared: Iterator[int] | None  # numbers of the collectives that ranks compare; TORCH_DISTRIBUTED_DEBUG=DETAIL
    _coalesced: list[dist.Work] | None  # operations that are being issued as one

    # -- reductions --------------------------------------------------------------------------------------

    @by_inner_tensors
    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Each tensor becomes the reduction of all ranks'."""
        return self._all_reduce(listed(tensors), options(opts, dist.AllreduceOptions), "allreduce_")

    @by_inner_tensors
    def allreduce_coalesced(self, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Each tensor becomes the reduction of all ranks', as one operation to whoever looks on."""
        return self._all_reduce(listed(tensors), options(opts, dist.AllreduceOptions), "allreduce_coalesced_")

    def _all_reduce(self, tensors: list[torch.Tensor], opts: Any, shown: str) -> dist.Work:
        alike = tensors, opts.reduceOp.op
        return self._reduce("all_reduce", Reducing.all_reduce, opts, tensors, alike=alike, shown=(shown, tensors))

    def _reduce(
        self,
        name: str,
        act: Callable[..., None],
        opts: Any,
        outputs: list[torch.Tensor],
        *others: Sequence[Any],
        alike: Sequence[object],
        shown: tuple[Any, ...],
    ) -> dist.Work:
        """Call act with the reduction of each output's type, the output, and what goes with it. The rest as `_run`."""
        reducings = [Reducing(opts.reduceOp, t.dtype, self.comm) for t in outputs]

        def call() -> None:
            for of_each in zip(reducings, outputs, *others, strict=True):
                act(*of_each)

        return self._run(name, call, outputs, opts, *alike, shown=shown)

    @by_inner_tensors
    def reduce(self, tensors: Any, opts: Any = None, *others: Any) -> dist.Work:
        """The root's tensor becomes the reduction of all ranks'; the others' stay as they were."""
        tensors, opts = listed(tensors), rooted(opts, dist.ReduceOptions, *others)
        root = opts.rootRank
        alike, shown = (tensors, opts.reduceOp.op, "to", root), ("reduce_", tensors, root, 0)
        return self._reduce("reduce", partial(Reducing.reduce, root=root), opts, tensors, alike=alike, shown=shown)

    @by_inner_tensors
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Each output becomes this rank's block of the reduction of a list of blocks, one for each rank."""
        outputs, opts = listed(outputs), options(opts, dist.ReduceScatterOptions)
        lists = [inputs] if isinstance(inputs[0], torch.Tensor) else list(inputs)
        check_length(self.comm, "reduce_scatter", "input", lists)

        def act(reducing: Reducing, out: torch.Tensor, blocks: Tensors) -> None:
            joined = Blocks(blocks)
            joined.collect()
            reducing.reduce_scatter(out, joined.whole, None if joined.even else joined.sizes)

        alike, shown = (lists[0], opts.reduceOp.op), ("reduce_scatter_", outputs, lists)
        return self._reduce("reduce_scatter", act, opts, outputs, lists, alike=alike, shown=shown)

    @by_inner_tensors
    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        """The output becomes this rank's block of the reduction of the inputs."""
        return self._reduce_scatter_singles([output], [input], opts, "_reduce_scatter_base_", output, input)

    @by_inner_tensors
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Each output becomes this rank's block of the reduction of its inputs."""
        shown = "reduce_scatter_tensor_coalesced_", list(outputs), list(inputs)
        return self._reduce_scatter_singles(outputs, inputs, opts, *shown)

    def _reduce_scatter_singles(self, outputs: Tensors, inputs: Tensors, opts: Any, *shown: Any) -> dist.Work:
        opts = options(opts, dist.ReduceScatterOptions)
        outputs, inputs = list(outputs), list(inputs)
        alike, act = (outputs, inputs, opts.reduceOp.op), Reducing.reduce_scatter
        return self._reduce("reduce_scatter", act, opts, outputs, inputs, alike=alike, shown=shown)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- movements ---------------------------------------------------------------------------------------

    @by_inner_tensors
    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Each tensor becomes the root's."""
        tensors, opts = listed(tensors), rooted(opts, dist.BroadcastOptions)
        root = opts.rootRank

        def call() -> None:
            for tensor in tensors:
                if self.comm.rank == root:
                    self.comm.broadcast(to_read(tensor), root)
                else:
                    into = Written(tensor)
                    self.comm.broadcast(into.buffer, root)
                    into.land()

        shown = "broadcast_", tensors, root, 0
        return self._run("broadcast", call, tensors, opts, tensors, "from", root, shown=shown)

    @by_inner_tensors
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Each list of outputs becomes every rank's input; the sizes may differ between ranks."""
        inputs, opts = listed(inputs), options(opts, c10d.AllgatherOptions)
        lists = [outputs] if isinstance(outputs[0], torch.Tensor) else list(outputs)
        check_length(self.comm, "all_gather", "output", lists)

        def call() -> None:
            for outs, x in zip(lists, inputs, strict=True):
                blocks = Blocks(outs)
                self.comm.all_gather(blocks.buffer, to_read(x), counts=None if blocks.even else blocks.sizes)
                blocks.spread()

        return self._run("all_gather", call, joined(lists), opts, lists[0], shown=("allgather_", lists, inputs))

    @by_inner_tensors
    def allgather_coalesced(self, output_lists: Any, inputs: Tensors, opts: Any = None) -> dist.Work:
        """output_lists[r][i] becomes rank r's input i."""
        return self.allgather([list(outs) for outs in zip(*output_lists, strict=True)], inputs, opts)

    @by_inner_tensors
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        """The output becomes the inputs of all ranks, one after the other."""
        return self._all_gather_singles([output], [input], opts, "_allgather_base_", output, input)

    @by_inner_tensors
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Each output becomes its inputs of all ranks, one after the other."""
        shown = "allgather_into_tensor_coalesced_", list(outputs), list(inputs)
        return self._all_gather_singles(outputs, inputs, opts, *shown)

    def _all_gather_singles(self, outputs: Tensors, inputs: Tensors, opts: Any, *shown: Any) -> dist.Work:
        opts = options(opts, c10d.AllgatherOptions)
        outputs, inputs = list(outputs), list(inputs)

        def call() -> None:
            for out, x in zip(outputs, inputs, strict=True):
                into = Written(out)
                self.comm.all_gather(into.buffer, to_read(x))
                into.land()

        return self._run("all_gather", call, outputs, opts, outputs, inputs, shown=shown)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @by_inner_tensors
    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """The root's list of outputs becomes every rank's input."""
        [x] = listed(inputs)
        opts = rooted(opts, dist.GatherOptions)
        root, outs = opts.rootRank, flat_list(outputs)
        if self.comm.rank == root:
            check_length(self.comm, "gather", "output", [outs])

        def call() -> None:
            if self.comm.rank != root:
                self.comm.gather(None, to_read(x), root)
                return
            blocks = Blocks(outs)
            self.comm.gather(blocks.buffer, to_read(x), root)
            blocks.spread()

        shown = "gather_", [outs] if outs else [], [x], root
        return self._run("gather", call, outs, opts, [x], "to", root, shown=shown)

    @by_inner_tensors
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """The output becomes this rank's entry of the root's list of inputs."""
        [out] = listed(outputs)
        opts = rooted(opts, dist.ScatterOptions)
        root, blocks = opts.rootRank, flat_list(inputs)
        if self.comm.rank == root:
            check_length(self.comm, "scatter", "input", [blocks])

        def call() -> None:
            into = Written(out)
            if self.comm.rank == root:
                joined = Blocks(blocks)
                joined.collect()
                self.comm.scatter(into.buffer, joined.buffer, root)
            else:
                self.comm.scatter(into.buffer, None, root)
            into.land()

        shown = "scatter_", [out], [blocks] if blocks else [], root
        return self._run("scatter", call, [out], opts, [out], "from", root, shown=shown)

    @by_inner_tensors
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> dist.Work:
        """Rows of dimension 0 go to the ranks in order.

        Args:
            output: What arrives.
            input: What leaves.
            output_split_sizes: The rows that come from each rank; without them all are equal.
            input_split_sizes: The rows that go to each rank; without them all are equal.
            opts: The options.
        """
        into_rows, from_rows = output_split_sizes or [], input_split_sizes or []
        check_splits(self.comm, "output", output, into_rows)
        check_splits(self.comm, "input", input, from_rows)
        opts = options(opts, dist.AllToAllOptions)

        def call() -> None:
            into = Written(output)
            out_counts, in_counts = row_counts(output, into_rows), row_counts(input, from_rows)
            self.comm.all_to_all(into.buffer, to_read(input), out_counts=out_counts, in_counts=in_counts)
            into.land()

        shown = "alltoall_base_", output, input, list(into_rows), list(from_rows)
        return self._run("all_to_all", call, [output], opts, input.dtype, shown=shown)

    alltoall_base = all_to_all_single

    @by_inner_tensors
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Input r goes to rank r; output s comes from rank s."""
        outputs, inputs, opts = list(outputs), list(inputs), options(opts, dist.AllToAllOptions)
        check_length(self.comm, "all_to_all", "output", [outputs])
        check_length(self.comm, "all_to_all", "input", [inputs])

        def call() -> None:
            into, of = Blocks(outputs), Blocks(inputs)
            of.collect()
            self.comm.all_to_all(into.buffer, of.buffer, out_counts=into.sizes, in_counts=of.sizes)
            into.spread()

        return self._run("all_to_all", call, outputs, opts, inputs[0].dtype, shown=("alltoall_", outputs, inputs))

    # -- how one is carried out: now or in the group's queue, alone or as one of several ---------------------

    def _run(
        self,
        name: str,
        call: Callable[[], None],
        outputs: Tensors,
        options: Any,
        *alike: object,
        shown: tuple[Any, ...],
    ) -> dist.Work:
        """Carry an operation out now, or put it into the queue. alike: what must be the same on all ranks.

        shown: as what torch's dispatcher is to see it: the name, and the arguments.
        """
        return self._seen(shown, outputs, partial(self._issue, name, call, outputs, options, alike, shown))

    def _seen(self, shown: tuple[Any, ...], outputs: Tensors, issue: Callable[[], dist.Work]) -> dist.Work:
        """Issue an operation, by way of torch's dispatcher where somebody looks. shown: as `_run` has it."""
        if watched():
            return dispatch(shown[0], shown[1:], self, issue) or FinishedWork(outputs)
        return issue()

    def _issue(
        self,
        name: str,
        call: Callable[[], None],
        outputs: Tensors,
        options: Any,
        alike: Sequence[object],
        arguments: Sequence[Any],
    ) -> dist.Work:
        self._compare(name, alike)
        at_once = not versions.asynchronous(options) and self._coalesced is None
        if at_once and self._queue.limit is None:
            self._queue.perform(call)
            return FinishedWork(outputs)
        title = f"{name} of {self.comm.label}"
        order = order_of(arguments, self._queue.streams)
        work = Operation(title, call, outputs, self._queue, order)
        if at_once:  # by a thread, because nobody can be called back from inside MPI
            work.wait()
        return self._remember(work)

    def _compare(self, name: str, alike: Sequence[object]) -> None:
        """Where debugging, make sure that all ranks are about to do the same: lists of tensors, reductions, ranks."""
        if self._compared is not None:
            said = " ".join(_shapes(part) if isinstance(part, list) else str(part) for part in alike)
            said = f"{name} #{next(self._compared)} {said}"
            self._queue.perform(lambda: self.comm.require_same(said))

    def _remember(self, work: dist.Work) -> dist.Work:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device | None = None) -> dist.Work:
        works, self._coalesced = self._coalesced or [], None
        return Several(works)


def _shapes(tensors: Tensors) -> str:
    return " ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors)
