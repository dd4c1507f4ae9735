"""The collectives of a process group. Each method checks and converts its arguments and calls the communicator.

Ranks are ranks of the group; options are torch's. PREMUL_SUM is a sum of scaled values. Bitwise operations and sparse
sums gather the values of all ranks and combine them locally: use them for masks and embeddings, not large dense data.

torch calls a process group written in Python directly, which is fast but hides the operation from torch's dispatcher.
Therefore, while a dispatch mode (such as CommDebugMode) or the profiler is active, an operation is issued through the
dispatcher like torch's own, for instance as `c10d::allreduce_`. The dispatcher then calls a kernel of ours.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from mpitrain.backend.arguments import (
    Blocks,
    Destination,
    Tensors,
    as_list,
    as_movable,
    as_options,
    as_source,
    by_inner_tensors,
    check_length,
    check_splits,
    detach_resolved,
    flat_list,
    row_counts,
)
from mpitrain.backend.base import ArgumentError, Base, translate_error
from mpitrain.backend.work import CoalescedWork, FinishedWork, Operation, Queue
from mpitrain.comm import Communicator
from mpitrain.comm.memory.elements import DTYPES
from mpitrain.comm.runtime.executor import Reduction, make_scaling
from mpitrain.errors import InputError

_Ops: Any = dist.ReduceOp.RedOpType
_NAMES: dict[Any, str] = {_Ops.SUM: "sum", _Ops.PRODUCT: "product", _Ops.MIN: "min", _Ops.MAX: "max", _Ops.AVG: "avg"}
_BITWISE: dict[Any, Callable[..., torch.Tensor]] = {
    _Ops.BAND: torch.bitwise_and,
    _Ops.BOR: torch.bitwise_or,
    _Ops.BXOR: torch.bitwise_xor,
}


class GroupReducer:
    """One reduction operation for one dtype and communicator.

    Attributes:
        comm: Communicator.
        name: Name of the communicator's operation.
        factor: Factor by which each rank's values are multiplied first; None for no factor.
        bitwise: Function that combines two ranks' values, if the communicator has no such operation; else None.
    """

    def __init__(self, op: Any, dtype: torch.dtype, comm: Communicator) -> None:
        """Find the implementation of a reduction.

        Args:
            op: torch's reduction operation.
            dtype: Element type of the tensors.
            comm: Communicator.

        Raises:
            ArgumentError: The operation is not supported, or not defined for the dtype.
        """
        kind = getattr(op, "op", op)
        self.comm = comm
        self.factor: float | torch.Tensor | None = None
        self.bitwise = _BITWISE.get(kind)
        self.name = _NAMES.get(kind, "sum")
        if kind == _Ops.PREMUL_SUM:
            if not hasattr(op, "factor"):
                raise ArgumentError(
                    f"torch {torch.__version__} hides the factor of PREMUL_SUM; multiply the tensor by it and use SUM"
                )
            self.factor = op.factor
        elif self.bitwise is None and kind not in _NAMES:
            raise ArgumentError(f"reduction {kind} is not supported; use {', '.join(map(str, _NAMES))}")
        if self.bitwise is not None and (dtype.is_floating_point or dtype.is_complex):
            raise ArgumentError(f"{kind} is not defined for {dtype}; use an integer type, or .view() the bits as one")
        if self.bitwise is None and dtype not in DTYPES:
            raise ArgumentError(f"{dtype} can be sent but not reduced; convert to float32 or a signed integer first")
        if self.bitwise is None:
            try:
                Reduction.of(self.name, dtype, comm.size)
            except InputError as error:  # raise in the caller's thread, not later in the one that runs the operation
                raise translate_error(error) from None

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Reduce the tensors of all ranks in place."""
        if tensor.is_sparse:
            _all_reduce_sparse(tensor, self)
            return
        into = Destination(tensor, keep=True)
        if self.bitwise is not None:
            into.whole.copy_(self._gather_reduce(into.whole))
        else:
            self._scale(into.whole)
            self.comm.all_reduce(into.whole, self.name)
        into.copy_back()

    def reduce(self, tensor: torch.Tensor, root: int) -> None:
        """Reduce the tensors of all ranks into the root's tensor; the other tensors keep their values.

        Args:
            tensor: This rank's values; on the root, also the destination of the result.
            root: Rank that receives the result.
        """
        at_root, into = self.comm.rank == root, Destination(tensor, keep=True)
        if self.bitwise is not None:
            result = self._gather_reduce(into.whole)
            if at_root:
                into.whole.copy_(result)
        else:
            x = into.whole if at_root or self.factor is None else into.whole.clone()
            self._scale(x)
            self.comm.reduce(x, root, self.name)
        if at_root:
            into.copy_back()

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, counts: list[int] | None = None) -> None:
        """Write this rank's block of the reduction of all x to out.

        Args:
            out: Tensor for the block.
            x: Tensor of one block per rank, in order.
            counts: Number of elements of each rank's block; None if all blocks are equal.
        """
        target, source = Destination(out), detach_resolved(x).contiguous()
        if self.bitwise is not None:
            blocks = counts or [source.numel() // self.comm.size] * self.comm.size
            gathered = self._gather_reduce(source).reshape(-1)
            target.whole.copy_(torch.split(gathered, blocks)[self.comm.rank].view(target.whole.shape))
        else:
            if self.factor is not None:
                source = source.clone()
                self._scale(source)
            self.comm.reduce_scatter(target.whole, source, self.name, counts=counts)
        target.copy_back()

    def _scale(self, tensor: torch.Tensor) -> None:
        if self.factor is not None:
            tensor.mul_(self.factor)

    def _gather_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        everyone = torch.empty((self.comm.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        self.comm.all_gather(as_movable(everyone), as_movable(tensor))
        result = everyone[0].clone()
        assert self.bitwise is not None
        for other in everyone[1:]:
            self.bitwise(result, other, out=result)
        return result


def _all_reduce_sparse(tensor: torch.Tensor, reducer: GroupReducer) -> None:
    """Sum or average the COO tensors of all ranks in place. Their nonzero entries may differ."""
    comm = reducer.comm
    if reducer.name not in ("sum", "avg") or reducer.bitwise is not None:
        raise ArgumentError("sparse tensors can only be summed or averaged; call .to_dense() first")
    mine = tensor.detach().coalesce()
    indices, values = mine.indices().contiguous(), mine.values().contiguous()
    reducer._scale(values)
    entries = torch.empty(comm.size, dtype=torch.int64)
    comm.all_gather(entries, torch.tensor([values.shape[0]]))
    counts = [int(n) for n in entries]
    total, width = sum(counts), prod(values.shape[1:])
    # ranks' indices have mine.sparse_dim() rows of different lengths: gathered transposed
    every_index = torch.empty((total, mine.sparse_dim()), dtype=torch.int64, device=indices.device)
    every_value = torch.empty((total, *values.shape[1:]), dtype=values.dtype, device=values.device)
    rows = mine.sparse_dim()
    comm.all_gather(every_index, indices.t().contiguous(), counts=[n * rows for n in counts])
    comm.all_gather(every_value, values, counts=[n * width for n in counts])
    combined = torch.sparse_coo_tensor(every_index.t(), every_value, mine.shape).coalesce()
    if reducer.name == "avg":
        for call in make_scaling(combined.values(), Reduction.of("avg", combined.dtype, comm.size).scale):
            call()
    with torch.no_grad():  # a detached copy would not pass new entries on to the tensor
        tensor.copy_(combined)


Call = Callable[[], dist.Work]


class _PendingCall(threading.local):
    """The call that this thread is passing through the dispatcher, and the handle that it returned."""

    call: Call | None = None
    work: dist.Work | None = None


_pending = _PendingCall()


def is_observed() -> bool:
    """Return True if a dispatch mode or the profiler observes the dispatcher."""
    return bool(torch._C._len_torch_dispatch_stack()) or torch.autograd._profiler_enabled()


def dispatch(name: str, values: Sequence[Any], group: dist.ProcessGroup, call: Call) -> dist.Work | None:
    """Issue a call as the operation c10d::name of torch's dispatcher.

    Args:
        name: Name of the operation.
        values: Arguments of the operation in order, without process group, timeout and reduction. Python can construct
            only one reduction that the dispatcher accepts, a sum, so a sum is passed.
        group: Process group.
        call: Function that carries the operation out.

    Returns:
        Return value of `call`; None if a mode replaced the operation, for instance one that only computes shapes.
    """
    operation = getattr(torch.ops.c10d, name).default
    _register_kernel(name)
    remaining: Any = iter(values)
    arguments: list[Any] = []
    for argument in operation._schema.arguments:
        if argument.name == "process_group":
            arguments.append(group.boxed())
        elif argument.name in ("async_op", "timeout"):
            break
        elif argument.name == "reduce_op":
            arguments.append(torch.classes.c10d.ReduceOp())
        else:
            arguments.append(next(remaining, None))  # None: arguments that our operations do not use
    _pending.call, _pending.work = call, None
    try:
        operation(*arguments)
        return _pending.work
    finally:
        _pending.call = _pending.work = None


@functools.cache
def _register_kernel(name: str) -> torch.library.Library:
    """Register the kernel of an operation. It lasts as long as the returned library, which the cache keeps for ever."""
    operation = getattr(torch.ops.c10d, name).default
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    results = len(operation._schema.returns)

    def kernel(keys: torch._C.DispatchKeySet, *arguments: Any) -> Any:
        call, _pending.call = _pending.call, None
        if call is None:  # an operation of another backend
            return operation.redispatch(keys & below, *arguments)
        work = _pending.work = call()
        return (arguments[0], work.boxed()) if results > 1 else work.boxed()

    library = torch.library.Library("c10d", "IMPL")
    # the last dispatch key before those that depend on the kind of tensor
    library.impl(name, kernel, "BackendSelect", with_keyset=True)
    return library


class GroupCollectives(Base):
    """The collectives of a process group, under old and new names: torch's releases and C++ code call different ones.

    Arguments are torch's. `opts` are torch's options (root rank, reduction operation, timeout), None for the defaults.
    If a method takes several tensors, it runs one operation for each and returns one handle.
    """

    _queue: Queue
    _compare_count: Iterator[int] | None  # counts collectives if ranks compare them: TORCH_DISTRIBUTED_DEBUG=DETAIL
    _coalesced: list[dist.Work] | None  # operations that are being issued as one

    # -- reductions --------------------------------------------------------------------------------------

    @by_inner_tensors
    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None, *, name: str = "allreduce_") -> dist.Work:
        """Reduce each tensor over all ranks in place. `name`: name of the operation for the dispatcher."""
        tensors, opts = as_list(tensors), as_options(opts, dist.AllreduceOptions)
        signature, act = (tensors, opts.reduceOp.op), GroupReducer.all_reduce
        return self._reduce("all_reduce", act, opts, tensors, signature=signature, op_args=(name, tensors))

    def allreduce_coalesced(self, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Reduce each tensor over all ranks in place; the profiler sees one operation."""
        return self.allreduce(tensors, opts, name="allreduce_coalesced_")

    def _reduce(
        self,
        name: str,
        act: Callable[..., None],
        opts: Any,
        outputs: list[torch.Tensor],
        *others: Sequence[Any],
        signature: Sequence[object],
        op_args: tuple[Any, ...],
    ) -> dist.Work:
        """Reduce each output. See `_run` for the other arguments.

        Args:
            act: Function called for each output with its `GroupReducer`, the output, and its elements of `others`.
            outputs: Tensors that are written.
            others: Further lists, each with one element per output.
        """
        reducers = [GroupReducer(opts.reduceOp, t.dtype, self.comm) for t in outputs]

        def call() -> None:
            for of_each in zip(reducers, outputs, *others, strict=True):
                act(*of_each)

        return self._run(name, call, outputs, opts, *signature, op_args=op_args)

    @by_inner_tensors
    def reduce(self, tensors: Any, opts: Any = None, *others: Any) -> dist.Work:
        """Reduce each tensor over all ranks into the root's; the other ranks' tensors keep their values."""
        tensors, opts = as_list(tensors), as_options(opts, dist.ReduceOptions, *others)
        root, op = opts.rootRank, opts.reduceOp.op
        act, op_args = partial(GroupReducer.reduce, root=root), ("reduce_", tensors, root, 0)
        return self._reduce("reduce", act, opts, tensors, signature=(tensors, op, "to", root), op_args=op_args)

    @by_inner_tensors
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Write to each output this rank's block of the reduction of its input.

        Args:
            outputs: Tensor or list of tensors.
            inputs: For each output, a list with one block per rank; blocks may have different sizes.
        """
        outputs, opts = as_list(outputs), as_options(opts, dist.ReduceScatterOptions)
        lists = [inputs] if isinstance(inputs[0], torch.Tensor) else list(inputs)
        check_length(self.comm, "reduce_scatter", "input", lists)

        def act(reducer: GroupReducer, out: torch.Tensor, blocks: Tensors) -> None:
            joined = Blocks(blocks)
            joined.copy_in()
            reducer.reduce_scatter(out, joined.whole, None if joined.is_even else joined.sizes)

        signature, op_args = (lists[0], opts.reduceOp.op), ("reduce_scatter_", outputs, lists)
        return self._reduce("reduce_scatter", act, opts, outputs, lists, signature=signature, op_args=op_args)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        """Write to the output this rank's block of the reduction of all inputs."""
        return self.reduce_scatter_single_coalesced([output], [input], opts, "_reduce_scatter_base_", output, input)

    @by_inner_tensors
    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None, *op_args: Any
    ) -> dist.Work:
        """Write to each output this rank's block of the reduction of its inputs. `op_args`: see `_run`."""
        outputs, inputs, opts = list(outputs), list(inputs), as_options(opts, dist.ReduceScatterOptions)
        signature, act = (outputs, inputs, opts.reduceOp.op), GroupReducer.reduce_scatter
        op_args = op_args or ("reduce_scatter_tensor_coalesced_", outputs, inputs)
        return self._reduce("reduce_scatter", act, opts, outputs, inputs, signature=signature, op_args=op_args)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- movements ---------------------------------------------------------------------------------------

    @by_inner_tensors
    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Copy each tensor of the root to all ranks."""
        tensors, opts = as_list(tensors), as_options(opts, dist.BroadcastOptions)
        root = opts.rootRank

        def call() -> None:
            for tensor in tensors:
                if self.comm.rank == root:
                    self.comm.broadcast(as_source(tensor), root)
                else:
                    into = Destination(tensor)
                    self.comm.broadcast(into.buffer, root)
                    into.copy_back()

        op_args = "broadcast_", tensors, root, 0
        return self._run("broadcast", call, tensors, opts, tensors, "from", root, op_args=op_args)

    @by_inner_tensors
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Gather each input from all ranks into a list of outputs; sizes may differ between ranks.

        Args:
            outputs: For each input, a list with one tensor per rank.
            inputs: Tensor or list of tensors.
        """
        inputs, opts = as_list(inputs), as_options(opts, c10d.AllgatherOptions)
        lists = [outputs] if isinstance(outputs[0], torch.Tensor) else list(outputs)
        check_length(self.comm, "all_gather", "output", lists)

        def call() -> None:
            for outs, x in zip(lists, inputs, strict=True):
                blocks = Blocks(outs)
                self.comm.all_gather(blocks.buffer, as_source(x), counts=None if blocks.is_even else blocks.sizes)
                blocks.copy_out()

        every = [out for outs in lists for out in outs]
        return self._run("all_gather", call, every, opts, lists[0], op_args=("allgather_", lists, inputs))

    @by_inner_tensors
    def allgather_coalesced(self, output_lists: Any, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Gather all inputs from all ranks: output_lists[r][i] becomes input i of rank r."""
        return self.allgather([list(outs) for outs in zip(*output_lists, strict=True)], inputs, opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        """Gather the inputs of all ranks into the output, one after the other."""
        return self.all_gather_single_coalesced([output], [input], opts, "_allgather_base_", output, input)

    @by_inner_tensors
    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None, *op_args: Any
    ) -> dist.Work:
        """Gather each input from all ranks into its output, one after the other. `op_args`: see `_run`."""
        outputs, inputs, opts = list(outputs), list(inputs), as_options(opts, c10d.AllgatherOptions)
        op_args = op_args or ("allgather_into_tensor_coalesced_", outputs, inputs)

        def call() -> None:
            for out, x in zip(outputs, inputs, strict=True):
                into = Destination(out)
                self.comm.all_gather(into.buffer, as_source(x))
                into.copy_back()

        return self._run("all_gather", call, outputs, opts, outputs, inputs, op_args=op_args)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @by_inner_tensors
    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Gather the inputs of all ranks into the root's list of outputs.

        Args:
            outputs: On the root, a list with one tensor per rank, possibly in another list; empty on other ranks.
            inputs: This rank's tensor, possibly in a list.
        """
        [x] = as_list(inputs)
        opts = as_options(opts, dist.GatherOptions)
        root, outs = opts.rootRank, flat_list(outputs)
        if self.comm.rank == root:
            check_length(self.comm, "gather", "output", [outs])

        def call() -> None:
            if self.comm.rank != root:
                self.comm.gather(None, as_source(x), root)
                return
            blocks = Blocks(outs)
            self.comm.gather(blocks.buffer, as_source(x), root)
            blocks.copy_out()

        op_args = "gather_", [outs] if outs else [], [x], root
        return self._run("gather", call, outs, opts, [x], "to", root, op_args=op_args)

    @by_inner_tensors
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Send element r of the root's list of inputs to the output of rank r.

        Args:
            outputs: Tensor that receives this rank's element, possibly in a list.
            inputs: On the root, a list with one tensor per rank, possibly in another list; empty on other ranks.
        """
        [out] = as_list(outputs)
        opts = as_options(opts, dist.ScatterOptions)
        root, blocks = opts.rootRank, flat_list(inputs)
        if self.comm.rank == root:
            check_length(self.comm, "scatter", "input", [blocks])

        def call() -> None:
            into = Destination(out)
            if self.comm.rank == root:
                joined = Blocks(blocks)
                joined.copy_in()
                self.comm.scatter(into.buffer, joined.buffer, root)
            else:
                self.comm.scatter(into.buffer, None, root)
            into.copy_back()

        op_args = "scatter_", [out], [blocks] if blocks else [], root
        return self._run("scatter", call, [out], opts, [out], "from", root, op_args=op_args)

    @by_inner_tensors
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> dist.Work:
        """Send a block of the input's rows to each rank, and receive one from each. Rows are those of dimension 0.

        Args:
            output: Tensor for the received rows, in order of rank.
            input: Tensor of the rows to send, in order of rank.
            output_split_sizes: Rows to receive from each rank; None if all are equal.
            input_split_sizes: Rows to send to each rank; None if all are equal.
            opts: Options.
        """
        into_rows, from_rows = output_split_sizes or [], input_split_sizes or []
        check_splits(self.comm, "output", output, into_rows)
        check_splits(self.comm, "input", input, from_rows)
        opts = as_options(opts, dist.AllToAllOptions)

        def call() -> None:
            into = Destination(output)
            out_counts, in_counts = row_counts(output, into_rows), row_counts(input, from_rows)
            self.comm.all_to_all(into.buffer, as_source(input), out_counts=out_counts, in_counts=in_counts)
            into.copy_back()

        op_args = "alltoall_base_", output, input, list(into_rows), list(from_rows)
        return self._run("all_to_all", call, [output], opts, input.dtype, op_args=op_args)

    alltoall_base = all_to_all_single

    @by_inner_tensors
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Send input r to rank r and receive output s from rank s.

        Args:
            outputs, inputs: Lists with one tensor per rank; sizes may differ.
        """
        outputs, inputs, opts = list(outputs), list(inputs), as_options(opts, dist.AllToAllOptions)
        check_length(self.comm, "all_to_all", "output", [outputs])
        check_length(self.comm, "all_to_all", "input", [inputs])

        def call() -> None:
            targets, sources = Blocks(outputs), Blocks(inputs)
            sources.copy_in()
            self.comm.all_to_all(targets.buffer, sources.buffer, out_counts=targets.sizes, in_counts=sources.sizes)
            targets.copy_out()

        return self._run("all_to_all", call, outputs, opts, inputs[0].dtype, op_args=("alltoall_", outputs, inputs))

    # -- execution: now or in the group's queue, alone or as one of several ----------------------------------

    def _run(
        self,
        name: str,
        call: Callable[[], None],
        outputs: Tensors,
        options: Any,
        *signature: object,
        op_args: tuple[Any, ...],
    ) -> dist.Work:
        """Carry an operation out now, or queue it.

        Args:
            name: Name of the operation in messages.
            call: Function that carries it out.
            outputs: Tensors that it writes.
            options: torch's options.
            signature: Values that must be equal on all ranks.
            op_args: Name and arguments of the operation for torch's dispatcher.
        """
        return self._dispatch(op_args, outputs, partial(self._issue, name, call, outputs, options, signature, op_args))

    def _dispatch(self, op_args: tuple[Any, ...], outputs: Tensors, issue: Callable[[], dist.Work]) -> dist.Work:
        """Issue an operation, through torch's dispatcher if somebody observes it. `op_args`: see `_run`."""
        if is_observed():
            return dispatch(op_args[0], op_args[1:], self, issue) or FinishedWork(outputs)
        return issue()

    def _issue(
        self,
        name: str,
        call: Callable[[], None],
        outputs: Tensors,
        options: Any,
        signature: Sequence[object],
        arguments: Sequence[Any],
    ) -> dist.Work:
        self._compare(name, signature)
        at_once = not getattr(options, "asyncOp", True) and self._coalesced is None
        if at_once and self._queue.limit is None:
            self._queue.perform(call)
            return FinishedWork(outputs)
        work = Operation(f"{name} of {self.comm.label}", call, outputs, self._queue, arguments)
        if at_once:  # in a thread, because a caller inside MPI could not return after the timeout
            work.wait()
        return self._record(work)

    def _compare(self, name: str, signature: Sequence[object]) -> None:
        """Check in debug mode that all ranks issue the same operation with the same shapes, reduction and root."""
        if self._compare_count is not None:
            description = " ".join(_shapes(part) if isinstance(part, list) else str(part) for part in signature)
            description = f"{name} #{next(self._compare_count)} {description}"
            self._queue.perform(lambda: self.comm.require_same(description))

    def _record(self, work: dist.Work) -> dist.Work:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device | None = None) -> dist.Work:
        works, self._coalesced = self._coalesced or [], None
        return CoalescedWork(works)


def _shapes(tensors: Tensors) -> str:
    return " ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors)
