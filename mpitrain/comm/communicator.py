"""Communicator: a group of ranks and every operation between them.

Arrays are torch tensors (CPU, CUDA) or NumPy or CuPy arrays; results are written into memory that the caller passes.
All ranks of the communicator call the same operations in the same order with the same sizes and dtypes. Every
collective accepts `async_op=True` and then returns a `Work`; otherwise it returns None when it is complete.

All operations raise InputError for arguments that cannot be communicated, and CommunicationError if MPI fails.

CommunicationError is also raised if ranks of one node call different operations, or the same one with different sizes,
dtypes, reductions or roots. If ranks access each other's memory, all of them raise it before any access. If MPI carries
the data, only the ranks that arrive later raise it. Between nodes, and for messages (`send`, `recv`), only the debug
mode and the MPI library detect such errors; in Open MPI a message that is too long is then written beyond the end of
the receiver's memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, overload

import numpy as np
import torch

from mpitrain.comm.algorithms.shared import alternating_all_gather, node_copy
from mpitrain.comm.collectives.binding import Binder, Invocation, sync_calls
from mpitrain.comm.collectives.dispatch import Dispatcher, ProcessServices
from mpitrain.comm.collectives.moving import all_gather, all_to_all, broadcast, gather, scatter
from mpitrain.comm.collectives.persistent import persistent
from mpitrain.comm.collectives.reducing import (
    ALL_REDUCE,
    Channel,
    DeferredReductions,
    all_reduce,
    reduce,
    reduce_scatter,
)
from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.job.topology import Topology, ranks_in
from mpitrain.comm.job.traffic import Volume, clock
from mpitrain.comm.mailbox import Mailbox
from mpitrain.comm.memory.arena import Arena
from mpitrain.comm.memory.buffers import tensor_at
from mpitrain.comm.point_to_point import ANY_SOURCE, PointToPoint
from mpitrain.comm.runtime.agreement import describe_call
from mpitrain.comm.runtime.compiling import Plan
from mpitrain.comm.runtime.executor import Compiled, Layout
from mpitrain.comm.runtime.split_phase import SplitPhase
from mpitrain.comm.selection import Algorithm
from mpitrain.errors import InputError, MpitrainError

__all__ = ["ANY_SOURCE", "Communicator"]


class Communicator(PointToPoint):
    """A group of ranks. Made by `mpitrain.init()`, `split` and `subgroup`, never directly.

    `mpitrain.comm.point_to_point` has the messages, `mpitrain.comm.job.topology` the attributes (rank, size and so on).
    """

    probe, channel = ALL_REDUCE, Channel
    played = False  # true if the other ranks do not exist, see `mpitrain.comm.rehearsal`

    def __init__(self, comm: MPI.Intracomm, topology: Topology, process: ProcessServices, label: str) -> None:
        super().__init__(comm, topology, process, label)
        self._deferred = DeferredReductions(self)

    # -- collectives, see mpitrain.comm.collectives

    all_reduce = all_reduce
    reduce = reduce
    reduce_scatter = reduce_scatter
    broadcast = broadcast
    all_gather = all_gather
    gather = gather
    scatter = scatter
    all_to_all = all_to_all

    all_reduce_init = persistent(all_reduce)
    reduce_init = persistent(reduce)
    reduce_scatter_init = persistent(reduce_scatter)
    broadcast_init = persistent(broadcast)
    all_gather_init = persistent(all_gather)
    gather_init = persistent(gather)
    scatter_init = persistent(scatter)
    all_to_all_init = persistent(all_to_all)

    def deferred_reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, op: str = "sum") -> SplitPhase | None:
        """Begin a reduce_scatter that needs no thread. This call and `wait` of its handle are collective.

        x must not change until `release` of the handle is called. See `mpitrain.comm.runtime.split_phase`.

        Args:
            out: Tensor for this rank's block of the result.
            x: Tensor of size blocks of out's length. It must lie in an arena.
            op: Name of the reduction.

        Returns:
            Handle; handles are waited for in the order of their calls. None, on all ranks, if the ranks do not share
            x's memory, because it is not in an arena or the ranks are on several nodes.
        """
        return self._deferred.reduce_scatter(self, out, x, op)

    # -- small values, limited to what JSON can represent: received data are never executed

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return the root's value on every rank. Collective.

        Args:
            value: Value that JSON can represent; ignored on ranks other than the root.
            root: Rank whose value is returned.
        """
        data = _encode(value) if self.rank == root else np.empty(0, dtype=np.uint8)
        length = np.array([data.size], dtype=np.int64)
        self.broadcast(length, root)
        if self.rank != root:
            data = np.empty(int(length[0]), dtype=np.uint8)
        self.broadcast(data, root)
        return json.loads(data.tobytes())

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's value, in order of rank. Collective.

        Args:
            value: Value that JSON can represent.
        """
        data, lengths = self._encode_with_lengths(value)
        everything = np.empty(int(lengths.sum()), dtype=np.uint8)
        self.all_gather(everything, data, counts=[int(n) for n in lengths])
        ends = np.cumsum(lengths)
        return [json.loads(everything[end - n : end].tobytes()) for n, end in zip(lengths, ends, strict=True)]

    def gather_objects(self, value: Any, root: int = 0) -> list[Any]:
        """Return every rank's value, in order of rank, on the root, and an empty list elsewhere. Collective.

        Args:
            value: Value that JSON can represent.
            root: Rank that gets the values.
        """
        data, lengths = self._encode_with_lengths(value)
        width = int(lengths.max())
        padded = np.zeros(width, dtype=np.uint8)
        padded[: data.size] = data
        everything = np.empty((self.size, width), dtype=np.uint8) if self.rank == root else None
        self.gather(everything, padded, root)
        if everything is None:
            return []
        return [json.loads(row[:n].tobytes()) for row, n in zip(everything, lengths, strict=True)]

    def agree(self, error: BaseException | None) -> None:
        """Raise on every rank the error of the first rank that has one; return if no rank has one. Collective.

        The message names that rank. Ranks call this after work that can fail on one of them alone (files, memory), so
        that none waits for a failed rank.

        Args:
            error: Error of this rank; None if it had none.

        Raises:
            MpitrainError: Some rank has an error. The class is that of the first rank's error if it belongs to
                mpitrain, and MpitrainError otherwise.
        """
        failed = np.array([self.rank if error is not None else self.size], dtype=np.int64)
        self.all_reduce(failed, "min")
        first = int(failed[0])
        if first == self.size:
            return
        message = None
        if self.rank == first and error is not None:
            where = f"rank {first}: " if self.size > 1 and not getattr(error, "agreed", False) else ""
            message = [type(error).__name__, where + (str(error) or type(error).__name__)]
        kind, text = self.broadcast_object(message, first)
        classes = {k.__name__: k for k in _all_errors(MpitrainError)}
        if kind in classes:
            raise classes[kind](text, agreed=True) from error
        raise MpitrainError(f"{text} ({kind})" if kind not in text else text, agreed=True) from error

    def on_root(self, function: Callable[[], Any], root: int = 0) -> Any:
        """Call a function on one rank; every rank returns its value or raises its error. Collective.

        Args:
            function: Function to call; JSON must be able to represent its value.
            root: Rank that calls it.
        """
        value, error = None, None
        if self.rank == root:
            try:
                value = function()
            except Exception as caught:  # agree() raises it on all ranks
                error = caught
        self.agree(error)
        return self.broadcast_object(value, root)

    def _encode_with_lengths(self, value: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return this rank's value as bytes, and the length in bytes of each rank's value. Collective."""
        data, lengths = _encode(value), np.empty(self.size, dtype=np.int64)
        self.all_gather(lengths, np.array([data.size], dtype=np.int64))
        return data, lengths

    # -- letters, between threads whose calls are independent

    def mailbox(self, name: str) -> Mailbox:
        """Return a new mailbox, to which all ranks can post. Collective. See `mpitrain.comm.mailbox`.

        Args:
            name: Purpose of the mailbox, for messages.
        """
        with self._record.during(f"mailbox {name}"):
            comm = self._comm.Dup()
        return Mailbox(comm, self._topology, self.process, f"{self.label}: mailbox {name}", self.label)

    # -- groups

    @overload
    def split(self, color: int, key: int = 0, label: str = "") -> Communicator: ...

    @overload
    def split(self, color: int | None, key: int = 0, label: str = "") -> Communicator | None: ...

    def split(self, color: int | None, key: int = 0, label: str = "") -> Communicator | None:
        """Return the communicator of the ranks that pass the same color, as MPI_Comm_split does. Collective.

        Args:
            color: Group of this rank; None for a rank that joins no group.
            key: Ranks of the new communicator are ordered by (key, rank).
            label: Name of the new communicator in messages.

        Returns:
            The communicator; None if `color` is None.
        """
        with self._record.during("split"):
            comm = MPI.Intracomm(self._comm.Split(MPI.UNDEFINED if color is None else color, key))
        if comm == MPI.COMM_NULL:
            return None
        ranks = ranks_in(comm, self._comm)
        topology = self._topology.subgroup(ranks, comm.rank)
        return Communicator(comm, topology, self.process, label or f"{self.label}/{color}")

    def subgroup(self, ranks: Sequence[int], label: str = "") -> Communicator | None:
        """Return the communicator of some ranks of this one, in the given order. Collective over these ranks only.

        Args:
            ranks: Ranks of this communicator; the order gives their ranks in the new one.
            label: Name of the new communicator in messages.

        Returns:
            The communicator; None on a rank that is not in `ranks`, which need not make this call.

        Raises:
            InputError: `ranks` contains a rank twice or one that does not exist.
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
        for mpi_group in (group, everyone):
            mpi_group.Free()
        topology = self._topology.subgroup(ranks, comm.rank)
        return Communicator(comm, topology, self.process, label or f"{self.label}{ranks}")

    def free(self) -> None:
        """Free the communicator, which must not be used afterwards. May be called twice. Collective.

        Its arenas remain valid until they are freed themselves. A communicator that is never freed exists until the job
        ends, even if nothing refers to it any more (see `mpitrain.comm.collectives.dispatch`). After the death of ranks
        collective calls are impossible, and only this process's own resources are released.
        """
        if not self._freed:
            self._deferred.free(collective=self.process.may_release(self._comm))
            self._free()
            self.process.watchdog.forget(self._message_record)

    # -- memory

    def arena(self, numel: int, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> Arena:
        """Return flat storage of numel elements per rank, shared by the ranks of each node if possible. Collective.

        Collectives on tensors inside an arena work in place, without copies. See `mpitrain.comm.memory.arena`.

        Args:
            numel: Elements of each rank.
            dtype: Element type.
            device: Device of the storage.

        Raises:
            InputError: `numel` is negative or MPI cannot communicate the dtype.
        """
        if numel < 0:
            raise InputError(f"an arena cannot have {numel} elements; use 0 or more")
        self.require_same(describe_call(f"arena on {torch.device(device).type}", numel, dtype))
        return self.binder.allocate(numel, dtype, torch.device(device))

    def alternating(self, capacity: int) -> Alternating | None:
        """Return two slots of memory per rank, filled in turns and read in place by all ranks. Collective.

        See `Alternating`.

        Args:
            capacity: Bytes of each slot.

        Returns:
            The slots; None, on all ranks, if the ranks are on several nodes or cannot share memory.
        """
        if self.num_nodes > 1:
            return None
        arena = self.arena(2 * capacity, torch.uint8)
        return Alternating(self, arena, capacity) if arena.kind == "shared" else None

    def node_copy(self, numel: int, dtype: torch.dtype = torch.float32) -> NodeCopy | None:
        """Return flat host storage of which each node has one copy, shared by its ranks; see `NodeCopy`. Collective.

        Args:
            numel: Elements of each copy.
            dtype: Element type.

        Returns:
            The storage; None, on all ranks, if memory cannot be shared.
        """
        self.require_same(describe_call("node_copy", numel, dtype))
        # rank 0 of the node owns the memory; without for_tensors=False collectives on rank 0 alone would take it
        # for an arena
        mine = numel if self.binder.node.rank == 0 else 0
        arena = self.binder.allocate(mine, dtype, for_tensors=False)
        return NodeCopy(arena, self, numel) if arena.kind == "shared" else None


def _encode(value: Any) -> np.ndarray:
    try:
        text = json.dumps(value)
    except TypeError as error:
        raise InputError(
            f"{error}; objects travel between ranks as JSON: use broadcast or all_gather for arrays"
        ) from None
    data: np.ndarray = np.frombuffer(text.encode(), dtype=np.uint8).copy()
    return data


def _all_errors(kind: type[MpitrainError]) -> list[type[MpitrainError]]:
    return [kind, *(error for child in kind.__subclasses__() for error in _all_errors(child))]


# -- Shared memory of a node that callers fill and read by themselves: slots used in turns, and one copy for all ranks.

_ALTERNATING = Algorithm(lambda setting: alternating_all_gather(setting.size), one_node=True, reach=True)


class Alternating:
    """Two slots per rank in shared memory, used in turns: each rank fills its slot, all meet, each reads all slots.

        slot 0  | rank 0's bytes | rank 1's | ...        fill this rank's slot, meet, read all slots in place
        slot 1  | rank 0's bytes | rank 1's | ...        the next turn

    Use it for data whose addresses change often, or of which each rank needs only parts. Nothing is sent, and a turn
    costs one fence (`alternating_all_gather`). All ranks of the communicator are on one node.

    Attributes:
        slots: slots[turn][rank] is a flat uint8 tensor of `capacity` bytes.
        turn: Slot to fill now, 0 or 1.
    """

    def __init__(self, comm: Dispatcher, arena: Arena, capacity: int) -> None:
        """Divide a shared arena of 2 * capacity bytes per rank into slots.

        Args:
            comm: Communicator whose ranks use the slots.
            arena: Shared arena.
            capacity: Bytes of each slot.
        """
        memories = [arena.peer(world_rank) for world_rank in comm.world_ranks]
        self.slots = [[m[turn * capacity : (turn + 1) * capacity] for m in memories] for turn in (0, 1)]
        self.turn = 0
        self._comm, self._arena, self._key = comm, arena, ("alternating", arena.name)
        self._meeting = Invocation(
            "alternating all_gather", self._bind, key=self._key, compared_values=capacity, counts=False
        )

    def meet(self, nbytes_read: int = 0) -> None:
        """Wait until every rank has filled its slot of this turn, and begin the next turn. Collective.

        Until this rank's next call, the slots of the turn that has ended may be read, and its slot of the other turn
        may be filled.

        Args:
            nbytes_read: Bytes that this rank reads from other ranks' slots afterwards, for the traffic counters.
        """
        begin = clock() if self._comm.journal.on else 0.0
        ready = self._comm.ready.get(self._key)
        if ready is not None:
            ready()
        else:
            self._comm.dispatch(self._meeting)
        self.turn ^= 1
        if begin:
            self._comm.record_operation(self._meeting.name, Volume("alternating", nbytes_read), begin)

    def free(self) -> None:
        """Free the memory. Tensors over it must not be used afterwards. Collective."""
        self.slots = []
        self._arena.free()

    def _bind(self, binder: Binder) -> Compiled:
        program, start = binder.program(_ALTERNATING, binder.setting(self._arena.tensor)), self._arena.start
        nothing_moves = Layout(torch.uint8, [0] * (program.chunks + 1), start, start)  # callers fill and read slots
        bind = partial(binder.compile, program, nothing_moves, arena=self._arena)
        return binder.bind_cached(self._key, bind, self._arena.tensor)


class NodeCopy:
    """One copy of flat storage per node, in memory shared by the ranks of the node.

    In an arena each rank has separate elements, which the other ranks can access. Here all ranks of the node see the
    same elements. The caller decides which rank writes which of them, and calls `publish` to make them visible. Before
    elements are written again, the caller must synchronize the ranks of the node (see the program `node_copy`).

    Attributes:
        tensor: The node's elements, flat, initially zero.
    """

    def __init__(self, arena: Arena, comm: Dispatcher, numel: int) -> None:
        """Take the memory of an arena of which only the first rank of each node has elements.

        Args:
            arena: Shared arena with `numel` elements on the node's first rank and none on the others.
            comm: Communicator of the arena's ranks.
            numel: Elements of the copy.
        """
        binder, self._comm, self._publish_count = comm.binder, comm, 0
        self._arena, node = arena, binder.node
        first = next(iter(arena.segments.values()))
        self.tensor = tensor_at(first, numel, arena.tensor.dtype)
        program = node_copy(node.size)
        if binder.proofs is not None:
            binder.proofs.prove(program)
        nothing_moves = Layout(arena.tensor.dtype, [0] * (program.chunks + 1), 0, 0)  # callers write and read
        plan = Plan(program, node, nothing_moves, None, binder.meet, sync_calls(arena))
        self._publish = plan.bind(nothing_moves)

    def publish(self) -> None:
        """Wait for all ranks of the node; afterwards each rank sees the elements that the others wrote. Collective."""
        begin = clock() if self._comm.journal.on else 0.0
        self._publish()
        if begin:
            self._publish_count += 1
            self._comm.record_operation(
                "node copy", Volume("node"), begin, f"node copy {self._arena.name}", self._publish_count
            )

    def free(self) -> None:
        """Free the memory. Tensors over it must not be used afterwards. Collective."""
        self.tensor = torch.empty(0, dtype=self.tensor.dtype)
        self._arena.free()
