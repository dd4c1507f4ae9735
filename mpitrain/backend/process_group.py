"""The torch.distributed process group over a communicator.

Each method checks, converts and calls the communicator. A subclass of ProcessGroup, not of Backend, because C++
calls the methods of the former only when they are written in Python; what C++ would look up in registered backends
is answered here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from mpitrain.backend import versions
from mpitrain.backend.barrier import Barriers
from mpitrain.backend.debug import Comparison
from mpitrain.backend.failures import ArgumentError, GroupError, translation
from mpitrain.backend.groups import place
from mpitrain.backend.queues import Queue
from mpitrain.backend.reductions import Reducing, all_reduce_sparse
from mpitrain.backend.tensors import Blocks, Written, on_stream, row_counts, to_read
from mpitrain.backend.work import Finished, Message, Operation, Several
from mpitrain.comm import ANY_SOURCE, Communicator
from mpitrain.comm.work import Messages
from mpitrain.errors import MpitrainError

Tensors = Sequence[torch.Tensor]


class MPIProcessGroup(versions.Base):
    """A process group over a communicator. Ranks here are those of the group; options are torch's."""

    def __init__(self, comm: Communicator, name: str, store: dist.Store, timeout: timedelta) -> None:
        super().__init__(comm.rank, comm.size)
        self.comm = comm
        self.timeout = timeout.total_seconds()
        self._described(name, store)
        self._waiting = place().waiting
        self._queue = Queue(comm.overlaps, self._waiting)
        self._barriers = Barriers(comm, self._waiting)
        self._comparison = Comparison(comm) if dist.get_debug_level() == dist.DebugLevel.DETAIL else None
        self._coalesced: list[dist.Work] | None = None
        self._in_flight: set[Message] = set()
        self._sent_messages = False
        self._closed = False

    def __repr__(self) -> str:
        return f"MPIProcessGroup({self.group_name!r}, rank {self.comm.rank} of {self.comm.size})"

    # -- how an operation is carried out -----------------------------------------------------------------

    def _run(self, name: str, call: Callable[[], None], outputs: Tensors, options: Any, *alike: object) -> dist.Work:
        """Carry an operation out now, or put it into the queue. alike: what must be the same on all ranks."""
        if self._comparison is not None:
            comparison = self._comparison
            self._queue.perform(lambda: comparison.compare(name, alike))
        if versions.asynchronous(options) or self._coalesced is not None:
            title = f"{name} of {self.group_name}"
            work = self._queue.submit(Operation(title, on_stream(outputs, call), outputs, self._queue))
            return self._remember(work)
        self._queue.perform(call)
        return Finished(outputs)

    def _remember(self, work: dist.Work) -> dist.Work:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device | None = None) -> dist.Work:
        works, self._coalesced = self._coalesced or [], None
        return Several(works)

    # -- reductions --------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        tensors, opts = _listed(tensors), _options(opts, dist.AllreduceOptions)
        reducings = [Reducing(opts.reduceOp, t.dtype, self.comm) for t in tensors]

        def call() -> None:
            for tensor, reducing in zip(tensors, reducings, strict=True):
                if tensor.is_sparse:
                    all_reduce_sparse(tensor, reducing)
                else:
                    reducing.all_reduce(tensor)

        return self._run("all_reduce", call, tensors, opts, tensors, opts.reduceOp.op)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any = None, *others: Any) -> dist.Work:
        tensors = _listed(tensors)
        if isinstance(opts, int):
            opts = _rooted(dist.ReduceOptions(), opts, *others)
        reducings = [Reducing(opts.reduceOp, t.dtype, self.comm) for t in tensors]

        def call() -> None:
            for tensor, reducing in zip(tensors, reducings, strict=True):
                reducing.reduce(tensor, opts.rootRank)

        return self._run("reduce", call, tensors, opts, tensors, opts.reduceOp.op, "to", opts.rootRank)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Each output becomes this rank's block of the reduction of a list of blocks, one for each rank."""
        outputs, opts = _listed(outputs), _options(opts, dist.ReduceScatterOptions)
        lists = [inputs] if isinstance(inputs[0], torch.Tensor) else list(inputs)
        self._check_length("reduce_scatter", "input", lists)
        reducings = [Reducing(opts.reduceOp, t.dtype, self.comm) for t in outputs]

        def call() -> None:
            for out, blocks, reducing in zip(outputs, lists, reducings, strict=True):
                joined = Blocks(blocks)
                joined.collect()
                reducing.reduce_scatter(out, joined.whole, None if joined.even else joined.sizes)

        return self._run("reduce_scatter", call, outputs, opts, lists[0], opts.reduceOp.op)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        opts = _options(opts, dist.ReduceScatterOptions)
        outputs, inputs = list(outputs), list(inputs)
        reducings = [Reducing(opts.reduceOp, t.dtype, self.comm) for t in outputs]

        def call() -> None:
            for out, x, reducing in zip(outputs, inputs, reducings, strict=True):
                reducing.reduce_scatter(out, x)

        return self._run("reduce_scatter", call, outputs, opts, outputs, inputs, opts.reduceOp.op)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- movements ---------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        tensors = _listed(tensors)
        if isinstance(opts, int):
            opts = _rooted(dist.BroadcastOptions(), opts)
        root = opts.rootRank

        def call() -> None:
            for tensor in tensors:
                if self.comm.rank == root:
                    self.comm.broadcast(to_read(tensor), root)
                else:
                    into = Written(tensor)
                    self.comm.broadcast(into.buffer, root)
                    into.land()

        return self._run("broadcast", call, tensors, opts, tensors, "from", root)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Each list of outputs becomes every rank's input; the sizes may differ between ranks."""
        inputs, opts = _listed(inputs), _options(opts, c10d.AllgatherOptions)
        lists = [outputs] if isinstance(outputs[0], torch.Tensor) else list(outputs)
        self._check_length("all_gather", "output", lists)

        def call() -> None:
            for outs, x in zip(lists, inputs, strict=True):
                blocks = Blocks(outs)
                self.comm.all_gather(blocks.buffer, to_read(x), counts=None if blocks.even else blocks.sizes)
                blocks.spread()

        return self._run("all_gather", call, _joined(lists), opts, lists[0])

    def allgather_coalesced(self, output_lists: Any, inputs: Tensors, opts: Any = None) -> dist.Work:
        """output_lists[r][i] becomes rank r's input i."""
        return self.allgather([list(outs) for outs in zip(*output_lists, strict=True)], inputs, opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        opts = _options(opts, c10d.AllgatherOptions)
        outputs, inputs = list(outputs), list(inputs)

        def call() -> None:
            for out, x in zip(outputs, inputs, strict=True):
                into = Written(out)
                self.comm.all_gather(into.buffer, to_read(x))
                into.land()

        return self._run("all_gather", call, outputs, opts, outputs, inputs)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """The root's list of outputs becomes every rank's input."""
        [x] = _listed(inputs)
        if isinstance(opts, int):
            opts = _rooted(dist.GatherOptions(), opts)
        root, outs = opts.rootRank, _flat_list(outputs)
        if self.comm.rank == root:
            self._check_length("gather", "output", [outs])

        def call() -> None:
            if self.comm.rank != root:
                self.comm.gather(None, to_read(x), root)
                return
            blocks = Blocks(outs)
            self.comm.gather(blocks.buffer, to_read(x), root)
            blocks.spread()

        return self._run("gather", call, outs, opts, [x], "to", root)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """The output becomes this rank's entry of the root's list of inputs."""
        [out] = _listed(outputs)
        if isinstance(opts, int):
            opts = _rooted(dist.ScatterOptions(), opts)
        root, blocks = opts.rootRank, _flat_list(inputs)
        if self.comm.rank == root:
            self._check_length("scatter", "input", [blocks])

        def call() -> None:
            into = Written(out)
            if self.comm.rank == root:
                joined = Blocks(blocks)
                joined.collect()
                self.comm.scatter(into.buffer, joined.buffer, root)
            else:
                self.comm.scatter(into.buffer, None, root)
            into.land()

        return self._run("scatter", call, [out], opts, [out], "from", root)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> dist.Work:
        """Rows of dimension 0 go to the ranks in order; the split sizes are rows for each rank, none: equal."""
        into_rows, from_rows = output_split_sizes or [], input_split_sizes or []
        self._check_splits("output", output, into_rows)
        self._check_splits("input", input, from_rows)
        opts = _options(opts, dist.AllToAllOptions)

        def call() -> None:
            into = Written(output)
            self.comm.all_to_all(
                into.buffer,
                to_read(input),
                out_counts=row_counts(output, into_rows),
                in_counts=row_counts(input, from_rows),
            )
            into.land()

        return self._run("all_to_all", call, [output], opts, input.dtype)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Input r goes to rank r; output s comes from rank s."""
        outputs, inputs, opts = list(outputs), list(inputs), _options(opts, dist.AllToAllOptions)
        self._check_length("all_to_all", "output", [outputs])
        self._check_length("all_to_all", "input", [inputs])

        def call() -> None:
            into, of = Blocks(outputs), Blocks(inputs)
            of.collect()
            self.comm.all_to_all(into.buffer, of.buffer, out_counts=into.sizes, in_counts=of.sizes)
            into.spread()

        return self._run("all_to_all", call, outputs, opts, inputs[0].dtype)

    # -- point to point ----------------------------------------------------------------------------------

    def send(self, tensors: Any, dst: int, tag: int = 0) -> dist.Work:
        [tensor] = _listed(tensors)
        return self._message(f"send to rank {dst}", lambda: self.comm.isend(to_read(tensor), dst, tag), tensor)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> dist.Work:
        [tensor] = _listed(tensors)
        into = Written(tensor)
        source = "any rank" if src == ANY_SOURCE else f"rank {src}"
        return self._message(
            f"receive from {source}", lambda: self.comm.irecv(into.buffer, src, tag), tensor, into.land
        )

    def _message(
        self,
        name: str,
        begin: Callable[[], Messages],
        tensor: torch.Tensor,
        land: Callable[[], None] | None = None,
    ) -> dist.Work:
        self._sent_messages = True
        try:
            work = begin()
        except MpitrainError as error:
            raise translation(error) from error
        name = f"{name} of {self.group_name}"
        return self._remember(Message(name, work, [tensor], self.timeout, self._waiting, self._in_flight, land))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        return self.recv(tensors, ANY_SOURCE, tag)

    # -- synchronisation ---------------------------------------------------------------------------------

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Raises CommunicationError when not every rank has come in time: the call's limit, or the group's."""
        limit = opts if isinstance(opts, timedelta) else getattr(opts, "timeout", timeout)
        seconds = limit.total_seconds() if limit is not None and limit > timedelta(0) else self.timeout
        return self._run("barrier", lambda: self._barriers.wait(seconds), [], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier after which rank 0 knows, and says, which ranks did not come in time."""
        seconds = timeout.total_seconds() if timeout is not None else self.timeout
        self._queue.perform(lambda: self._barriers.monitored(seconds, wait_all_ranks))

    # -- life --------------------------------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout.total_seconds()

    def shutdown(self) -> None:
        """Complete what is under way.

        The communicator is kept for the next group of the same ranks, unless messages may lie about in it.
        """
        if not self._closed:
            self._closed = True
            self._queue.close()
            if not self._sent_messages and not self._barriers.abandoned:
                place().give_back(self.comm)

    def abort(self) -> None:
        self.shutdown()

    # -- what we lack ------------------------------------------------------------------------------------

    def split_group(self, *_: Any, **__: Any) -> Any:
        raise _lacking("ProcessGroup.split_group", "call torch.distributed.split_group or new_group")

    def merge_remote_group(self, *_: Any, **__: Any) -> Any:
        raise _lacking("merge_remote_group", "start all ranks with one mpirun, and make groups of them with new_group")

    def _register_on_completion_hook(self, *_: Any) -> None:
        raise _lacking("_register_on_completion_hook", "use work.get_future().then(callback)")

    def _enable_collectives_timing(self) -> None:
        raise _lacking("_enable_collectives_timing", "use torch.profiler")

    def _start_time_estimate(self) -> None:
        raise _lacking("time estimates", "use python -m mpitrain.bench backend")

    # -- checks ------------------------------------------------------------------------------------------

    def _check_length(self, name: str, which: str, lists: Sequence[Tensors]) -> None:
        for tensors in lists:
            if len(tensors) != self.comm.size:
                raise ArgumentError(
                    f"{name}: {len(tensors)} {which} tensors for {self.comm.size} ranks; give one for each"
                )
            if len({t.dtype for t in tensors}) > 1:
                raise ArgumentError(f"{name}: the {which} tensors are of several types; make them the same")

    def _check_splits(self, which: str, tensor: torch.Tensor, rows: Sequence[int]) -> None:
        length = tensor.shape[0] if tensor.dim() else 1
        if rows and (len(rows) != self.comm.size or sum(rows) != length):
            raise ArgumentError(
                f"all_to_all_single: {which} splits {list(rows)} must be {self.comm.size} numbers that sum to the "
                f"{length} rows of the {which} tensor"
            )
        if not rows and length % self.comm.size:
            raise ArgumentError(
                f"all_to_all_single: the {which} tensor has {length} rows, not a multiple of {self.comm.size} ranks; "
                "pad it or give split sizes"
            )


def _lacking(name: str, instead: str) -> GroupError:
    return GroupError(f'the backend "mpitrain" has no {name}; {instead}', agreed=True)


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _flat_list(lists: Any) -> list[torch.Tensor]:
    """A list of tensors, given as such or inside another list, which may be empty."""
    if lists and not isinstance(lists[0], torch.Tensor):
        lists = lists[0]
    return list(lists or [])


def _joined(lists: Sequence[Tensors]) -> list[torch.Tensor]:
    return [tensor for tensors in lists for tensor in tensors]


def _options(options: Any, kind: Callable[[], Any]) -> Any:
    """The options, which may be given as a reduction operation alone, or not at all."""
    if options is None:
        return kind()
    if hasattr(options, "timeout"):
        return options
    made = kind()
    made.reduceOp = options
    return made


def _rooted(options: Any, root: int, op: Any = None, *_: Any) -> Any:
    options.rootRank = root
    if op is not None:
        options.reduceOp = op
    return options
