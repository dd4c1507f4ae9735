"""Communicator: a group of ranks and every operation between them.

Tensors are torch (CPU, CUDA), NumPy or CuPy arrays; results are written into memory the caller gives. All
ranks of the communicator call the same operations in the same order with the same sizes and types. Every
collective takes `async_op=True` and then returns a `Work`; otherwise it returns None when it is complete.

All operations raise InputError for arguments that cannot be communicated, and CommunicationError when MPI
fails underneath, and where ranks of one node call different operations, or one with different sizes, types,
reductions or roots: on all of them before they touch each other's memory, on those that come later where MPI
carries the data. Between nodes, and of messages (`send`, `recv`), only the debug mode and the library find that
out; Open MPI then writes a message that is too long behind the memory it was for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from mpi4py import MPI

from mpitrain.comm.collectives.arguments import block_sizes, check_rank
from mpitrain.comm.collectives.binding import syncs
from mpitrain.comm.collectives.operations import Operations
from mpitrain.comm.compression.base import Bucket, Compression
from mpitrain.comm.compression.channel import Channel
from mpitrain.comm.memory import board
from mpitrain.comm.memory.arena import Arena, allocate
from mpitrain.comm.memory.buffers import LARGEST_COUNT, as_tensor
from mpitrain.comm.memory.device import synchronize, through_host
from mpitrain.comm.memory.node_copy import NodeCopy, allocate_node_copy
from mpitrain.comm.point_to_point import ANY_SOURCE, PointToPoint
from mpitrain.comm.process.held import Held
from mpitrain.comm.process.topology import Topology, ranks_in
from mpitrain.comm.runtime.debug import Checks, place_of
from mpitrain.comm.runtime.ordering import Call
from mpitrain.comm.runtime.split_phase import Lagging, Meeting
from mpitrain.comm.runtime.watchdog import Record
from mpitrain.comm.runtime.work import Work, Worker
from mpitrain.comm.values import Values
from mpitrain.errors import CommunicationError, InputError

if TYPE_CHECKING:
    from mpitrain.comm.world import Process

__all__ = ["ANY_SOURCE", "Communicator"]


class Communicator(PointToPoint, Values):
    """A group of ranks. Made by `mpitrain.init()`, `split` and `subgroup`, never directly.

    rank, size: this rank's number and the number of ranks. node, num_nodes: likewise for nodes.
    local_rank, local_size: this rank's number among the communicator's ranks on its node, and theirs.
    world_ranks: the number in the world of each rank.
    """

    def __init__(self, comm: MPI.Intracomm, topology: Topology, process: Process, label: str) -> None:
        self._held = Held(process)
        comm = self._held.keep(comm)
        self._comm, self._topology, self.process, self.label = comm, topology, process, label
        self._messages = self._held.duplicate(comm)  # the caller's tags must not meet those of programs
        self._operations = self._make_operations(comm)
        self._worker: Worker | None = None
        self._background: Operations | None = None
        if process.spare_cores > 0 and topology.size > 1:  # made now, because making them is collective
            self._background = self._make_operations(self._held.duplicate(comm))
        compared = process.debug and topology.size > 1
        self._checks = Checks(self._held.duplicate(comm), topology.nodes) if compared else None
        self._record = process.watchdog.record(label, topology.world_ranks)
        self._background_record = process.watchdog.record(f"{label} (async)", topology.world_ranks)
        self._message_record = process.watchdog.record(f"{label} (messages)")
        self._lagging_record = process.watchdog.record(f"{label} (lagging)", topology.world_ranks)
        self._meetings: tuple[Meeting, Meeting] | None = None
        self._freed = False

    def _make_operations(self, comm: MPI.Intracomm) -> Operations:
        process = self.process
        node = self._held.keep(comm.Split(self._topology.nodes[comm.rank], comm.rank))
        return Operations(comm, node, self._topology, process.arenas, process.tuning, process.spare_cores < 0)

    # -- groups ------------------------------------------------------------------------------------------

    def split(self, color: int | None, key: int = 0, label: str = "") -> Communicator | None:
        """The communicator of the ranks that give the same color, in order of (key, rank). Collective.

        None for a rank whose color is None.
        """
        with self._record.during("split"):
            comm = MPI.Intracomm(self._comm.Split(MPI.UNDEFINED if color is None else color, key))
        if comm == MPI.COMM_NULL:
            return None
        ranks = ranks_in(comm, self._comm)
        return Communicator(comm, self._topology.of(ranks, comm.rank), self.process, label or f"{self.label}/{color}")

    def subgroup(self, ranks: Sequence[int], label: str = "") -> Communicator | None:
        """The communicator of the given ranks of this one, in that order. Collective over those ranks alone.

        None for a rank that is not among them, which need not call it.
        """
        ranks = list(ranks)
        if len(set(ranks)) != len(ranks) or not all(0 <= r < self.size for r in ranks):
            raise InputError(f"subgroup({ranks}): ranks must be different and between 0 and {self.size - 1}")
        if self.rank not in ranks:
            return None
        everyone = self._comm.Get_group()
        group = everyone.Incl(ranks)
        with self._message_record.during(f"subgroup of ranks {ranks}"):
            comm = self._comm.Create_group(group, tag=ranks[0])
        for made in (group, everyone):
            made.Free()
        topology = self._topology.of(ranks, comm.rank)
        return Communicator(comm, topology, self.process, label or f"{self.label}{ranks}")

    def free(self) -> None:
        """Release the communicator, all of it. Collective; nothing of it may be used afterwards. Twice is fine.

        Its arenas stay valid until they are freed themselves. What is not freed goes when the job ends, also where
        nobody refers to it any more (see `mpitrain.comm.process.held`). Where ranks died there is nothing to be done
        together, and only what is this process's own is released.
        """
        if self._freed:
            return
        self._freed = True
        if self._worker is not None:
            self._worker.close()
        if self.process.may_release(self._comm):
            for operations in (self._operations, self._background):
                if operations is not None:
                    operations.free()
            for meeting in self._meetings or ():
                meeting.free()
            self._held.free()
        for record in (self._record, self._background_record, self._message_record, self._lagging_record):
            self.process.watchdog.forget(record)

    def arena(self, numel: int, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> Arena:
        """Flat storage of numel elements per rank, shared inside each node where possible. Collective.

        Collectives on tensors inside it copy nothing. See `mpitrain.comm.memory.arena`.
        """
        if numel < 0:
            raise InputError(f"an arena of {numel} elements is not possible; give 0 or more")
        board.compare(self._comm, board.described(f"arena on {torch.device(device).type}", numel, dtype))
        neighbours = [self.world_ranks[r] for r in self._topology.neighbours]
        operations = self._operations
        return allocate(
            self._comm, operations.node, neighbours, numel, dtype, torch.device(device), self.process.arenas
        )

    def node_copy(self, numel: int, dtype: torch.dtype = torch.float32) -> NodeCopy | None:
        """Flat storage of numel elements that all ranks of a node see, host memory. Collective.

        None, on all ranks, where memory cannot be shared. See `mpitrain.comm.memory.node_copy`.
        """
        board.compare(self._comm, board.described("node_copy", numel, dtype))
        neighbours = [self.world_ranks[r] for r in self._topology.neighbours]
        return allocate_node_copy(self._comm, self._operations.node, neighbours, numel, dtype, self.process.arenas)

    # -- reductions --------------------------------------------------------------------------------------

    def all_reduce(
        self,
        x: Any,
        op: str = "sum",
        algorithm: str = "auto",
        async_op: bool = False,
        *,
        compression: Compression | Bucket | None = None,
        reproducible: bool = False,
    ) -> Work | None:
        """Every rank's x becomes the reduction of all; in place.

        op: sum, product, min, max or avg. algorithm: auto, mpi, ring, tree, halving, shared or two_level.
        reproducible: reduce in the order of a fixed binary tree over the ranks, so that the bits depend
        neither on the algorithm nor on where the ranks are.
        compression: fewer bytes for about the sum or avg, see `mpitrain.comm.compression`; alike on all ranks.
        """
        if compression is not None:
            return self._compressed_all_reduce(x, op, algorithm, async_op, compression, reproducible)
        if type(x) is torch.Tensor and not x.is_cuda and not async_op and self._checks is None and self._worker is None:
            compiled = self._operations.bound_all_reduce(x, op, algorithm, reproducible)
            if compiled is not None:  # the shortest way for what a training loop repeats
                self._record.begin("all_reduce", x.shape, x.dtype)
                try:
                    compiled()
                except MPI.Exception as error:
                    raise CommunicationError(f"{self._record.text()} failed in MPI: {error}") from error
                finally:
                    self._record.end()
                return None
        tensor = as_tensor(x)

        def bind(o: Operations, x: torch.Tensor) -> Call:
            return o.all_reduce(x, op, algorithm, reproducible)

        alike, placed = (op, algorithm, reproducible), _placed(tensor, algorithm)
        return self._run("all_reduce", bind, async_op, (tensor,), (True,), alike, placed=placed)

    def _compressed_all_reduce(
        self, x: Any, op: str, algorithm: str, async_op: bool, compression: Compression | Bucket, reproducible: bool
    ) -> Work | None:
        """One operation of several collectives, all in the thread that carries it out."""
        tensor = as_tensor(x)
        compression.check(tensor.dtype, op)
        if reproducible:
            raise InputError("a compressed sum depends on the number of ranks; leave out reproducible or compression")

        def bind(o: Operations, x: torch.Tensor) -> Call:
            return partial(compression.all_reduce, Channel(self.size, partial(self._carry_out, o)), x, op, algorithm)

        alike = (op, algorithm, str(compression))
        return self._run("all_reduce", bind, async_op, (tensor,), (True,), alike, staged=False)

    def reduce(
        self, x: Any, root: int, op: str = "sum", algorithm: str = "auto", async_op: bool = False
    ) -> Work | None:
        """The root's x becomes the reduction of all; the others' stay as they were."""
        tensor = as_tensor(x, written=self.rank == root)
        check_rank(self, root)

        def bind(o: Operations, x: torch.Tensor) -> Call:
            return o.reduce(x, root, op, algorithm)

        alike, placed = (op, root, algorithm), _placed(tensor, algorithm)
        return self._run("reduce", bind, async_op, (tensor,), (self.rank == root,), alike, placed=placed)

    def reduce_scatter(
        self,
        out: Any,
        x: Any,
        op: str = "sum",
        algorithm: str = "auto",
        async_op: bool = False,
        *,
        counts: Sequence[int] | None = None,
        reproducible: bool = False,
    ) -> Work | None:
        """out becomes this rank's block of the reduction of all x.

        x: size blocks of out's length one after the other, or, with counts, of counts[r] elements for rank r.
        algorithm: auto, mpi, ring, halving, pairwise or shared.
        """
        into, of = as_tensor(out), as_tensor(x, written=False)
        blocks = block_sizes(self, "reduce_scatter", into, of, counts, "out x")

        def bind(o: Operations, of: torch.Tensor, into: torch.Tensor) -> Call:
            return o.reduce_scatter(into, of, blocks, op, algorithm, reproducible)

        alike, placed = (op, blocks, algorithm, reproducible), _placed(of, algorithm)
        return self._run("reduce_scatter", bind, async_op, (of, into), (False, True), alike, placed=placed)

    def lagging_reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, op: str = "sum") -> Lagging | None:
        """Begin a reduce_scatter of size blocks of out's length that needs no thread.

        See `mpitrain.comm.runtime.split_phase`.

        x stays as it is until the `release` of what is returned. None, on all ranks, where they do not share x's
        memory: it has to be in an arena, and all of them on one node. Collective; so is `wait`, in the same order.
        """
        blocks = block_sizes(self, "reduce_scatter", out, x, None, "out x")
        body = self._operations.body_of_reduce_scatter(out, x, op)
        if body is None:
            return None
        self._compare("reduce_scatter", (x, out), (op, blocks, "lagging", False), placed=x)
        if self._meetings is None:
            node = self._operations.node
            complete, read = (Meeting(self._held.duplicate(node)) for _ in range(2))
            self._meetings = complete, read
        sync = syncs(self._operations.arena_of(x))
        said = self._operations.said_of_reduce_scatter(x, blocks, op)
        return Lagging("lagging reduce_scatter", out, x, body, said, *self._meetings, sync, self._lagging_record)

    # -- movements ---------------------------------------------------------------------------------------

    def broadcast(self, x: Any, root: int, algorithm: str = "auto", async_op: bool = False) -> Work | None:
        """Every rank's x becomes the root's. algorithm: auto, mpi, tree or shared."""
        tensor = as_tensor(x, written=self.rank != root)
        check_rank(self, root)

        def bind(o: Operations, x: torch.Tensor) -> Call:
            return o.broadcast(x, root, algorithm)

        alike, placed = (root, algorithm), _placed(tensor, algorithm)
        return self._run("broadcast", bind, async_op, (tensor,), (self.rank != root,), alike, placed=placed)

    def all_gather(
        self,
        out: Any,
        x: Any,
        algorithm: str = "auto",
        async_op: bool = False,
        *,
        counts: Sequence[int] | None = None,
    ) -> Work | None:
        """out becomes every rank's x one after the other, in order of rank; counts[r]: elements of rank r's.

        algorithm: auto, mpi, ring, halving or shared.
        """
        into, of = as_tensor(out), as_tensor(x, written=False)
        blocks = block_sizes(self, "all_gather", of, into, counts, "x out")

        def bind(o: Operations, into: torch.Tensor, of: torch.Tensor) -> Call:
            return o.all_gather(into, of, blocks, algorithm)

        in_place = of.data_ptr() == into.data_ptr() + sum(blocks[: self.rank]) * of.element_size()
        placed = _placed(into if in_place else of, algorithm)
        return self._run("all_gather", bind, async_op, (into, of), (True, False), (blocks, algorithm), placed=placed)

    def gather(self, out: Any, x: Any, root: int, async_op: bool = False) -> Work | None:
        """The root's out becomes every rank's x one after the other. out is None on the other ranks."""
        of = as_tensor(x, written=False)
        check_rank(self, root)
        into = as_tensor(out) if self.rank == root else None
        if into is not None:
            block_sizes(self, "gather", of, into, None, "x out")

        def bind(o: Operations, of: torch.Tensor, into: torch.Tensor | None) -> Call:
            return o.gather(into, of, root)

        return self._run("gather", bind, async_op, (of, into), (False, True), root)

    def scatter(self, out: Any, x: Any, root: int, async_op: bool = False) -> Work | None:
        """out becomes this rank's block of the root's x. x is None on the other ranks."""
        into = as_tensor(out)
        check_rank(self, root)
        of = as_tensor(x, written=False) if self.rank == root else None
        if of is not None:
            block_sizes(self, "scatter", into, of, None, "out x")

        def bind(o: Operations, into: torch.Tensor, of: torch.Tensor | None) -> Call:
            return o.scatter(into, of, root)

        return self._run("scatter", bind, async_op, (into, of), (True, False), root)

    def all_to_all(
        self,
        out: Any,
        x: Any,
        async_op: bool = False,
        *,
        out_counts: Sequence[int] | None = None,
        in_counts: Sequence[int] | None = None,
    ) -> Work | None:
        """Block r of x goes to rank r; block s of out comes from rank s.

        in_counts, out_counts: elements of the blocks of x and of out; without them all blocks are equal.
        """
        into, of = as_tensor(out), as_tensor(x, written=False)
        received = block_sizes(self, "all_to_all", None, into, out_counts, "x out")
        sent = block_sizes(self, "all_to_all", None, of, in_counts, "out x")
        if into.dtype != of.dtype:
            raise InputError(f"all_to_all: x is {of.dtype}, out is {into.dtype}; make them the same")
        even = in_counts is None and out_counts is None

        def bind(o: Operations, of: torch.Tensor, into: torch.Tensor) -> Call:
            largest = torch.tensor([max(into.numel(), of.numel())])
            if not even:  # the ranks' sizes may differ, but they must choose alike
                o.all_reduce(largest, "max", "mpi", False)()
            by_library = int(largest) * of.element_size() <= LARGEST_COUNT
            return o.all_to_all(into, of, received, sent, by_library, even)

        return self._run("all_to_all", bind, async_op, (of, into), (False, True), even, uneven=not even)

    def barrier(self, async_op: bool = False) -> Work | None:
        """Return when every rank has come here."""
        return self._run("barrier", lambda o: o.comm.Barrier, async_op, (), ())

    # -- inside ------------------------------------------------------------------------------------------

    def _run(
        self,
        name: str,
        bind: Callable[..., Call],
        async_op: bool,
        tensors: Sequence[torch.Tensor | None],
        written: Sequence[bool],
        alike: object = None,
        uneven: bool = False,
        staged: bool = True,
        placed: torch.Tensor | None = None,
    ) -> Work | None:
        """Perform an operation, now or in the background.

        bind(operations, *tensors): makes the operation's call. tensors: the first has the operation's size.
        written: which of them it changes. alike: what must be the same on all ranks besides the type, and, unless
        uneven, the size. staged: whether tensors on a device are to be staged; else bind takes them as they are.
        placed: the tensor that neighbours find in an arena by its offset.
        """
        self._compare(name, tensors, alike, uneven, placed)
        if not async_op:
            if self._worker is not None and self._background is None:
                self._worker.drain()  # what waits to be run here comes first
            self._perform(name, bind, self._operations, self._record, tensors, written, staged)
            return None
        operations = self._background or self._operations
        if self._worker is None:
            self._worker = Worker(threaded=self._background is not None)
        numel = tensors[0].numel() if tensors and tensors[0] is not None else 0
        perform = partial(self._perform, name, bind, operations, self._background_record, tensors, written, staged)
        return self._worker.submit(f"{name} of {numel} elements on {self.label}", perform)

    def _compare(
        self,
        name: str,
        tensors: Sequence[torch.Tensor | None],
        alike: object,
        uneven: bool = False,
        placed: torch.Tensor | None = None,
    ) -> None:
        """That there is a communicator; when debugging also that all ranks are about to do the same."""
        if self._freed:
            raise InputError(f"{name}: {self.label} was freed; make another communicator with split or subgroup")
        if self._checks is None:
            return
        first = tensors[0] if tensors else None
        place = "" if placed is None else place_of(placed, self._operations.arena_of(placed))
        shape, dtype = ((), None) if first is None else (first.shape, first.dtype)
        with self._record.comparing(name, shape, dtype):
            self._checks.compare(name, first, alike, None if uneven else first, self._record.sequence, place)

    def _perform(
        self,
        name: str,
        bind: Callable[..., Call],
        operations: Operations,
        record: Record,
        tensors: Sequence[torch.Tensor | None],
        written: Sequence[bool],
        staged: bool,
    ) -> None:
        first = tensors[0] if tensors else None
        if first is None:
            record.begin(name, (), None)
        else:
            record.begin(name, first.shape, first.dtype)
        try:
            if staged:
                self._carry_out(operations, bind, tensors, written)
            else:
                bind(operations, *tensors)()
        except MPI.Exception as error:
            raise CommunicationError(f"{record.text()} failed in MPI: {error}") from error
        finally:
            record.end()

    def _carry_out(
        self,
        operations: Operations,
        bind: Callable[..., Call],
        tensors: Sequence[torch.Tensor | None],
        written: Sequence[bool],
    ) -> None:
        if not tensors or tensors[0] is None or not tensors[0].is_cuda:
            bind(operations, *tensors)()
        elif self.process.cuda_aware:
            call = bind(operations, *tensors)
            for tensor in tensors:
                if tensor is not None:
                    synchronize(tensor)
            call()
        else:
            through_host(partial(bind, operations), tensors, written)


def _placed(x: torch.Tensor, algorithm: str) -> torch.Tensor | None:
    """x where the algorithm may touch neighbours' memory, and so depends on where x lies."""
    return x if algorithm in ("auto", "shared", "two_level") else None
