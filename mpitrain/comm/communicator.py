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

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, overload

import numpy as np
import torch

from mpitrain.comm.algorithms.shared import alternating_all_gather, node_copy
from mpitrain.comm.collectives.binding import Binder, Invocation, syncs
from mpitrain.comm.collectives.dispatch import Dispatcher, ProcessServices
from mpitrain.comm.collectives.moving import all_gather, all_to_all, broadcast, gather, scatter
from mpitrain.comm.collectives.reducing import ALL_REDUCE, Deferred, all_reduce, reduce, reduce_scatter
from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.job.topology import Topology, ranks_in
from mpitrain.comm.job.traffic import Moved, clock
from mpitrain.comm.mailbox import Mailbox
from mpitrain.comm.memory.arena import Arena
from mpitrain.comm.memory.buffers import tensor_at
from mpitrain.comm.point_to_point import ANY_SOURCE, PointToPoint
from mpitrain.comm.runtime.agreement import described
from mpitrain.comm.runtime.compiling import Plan
from mpitrain.comm.runtime.executor import Compiled, Layout
from mpitrain.comm.runtime.split_phase import SplitPhase
from mpitrain.comm.selection import Algorithm
from mpitrain.errors import InputError, MpitrainError

__all__ = ["ANY_SOURCE", "Communicator"]


class Communicator(PointToPoint):
    """A group of ranks. Made by `mpitrain.init()`, `split` and `subgroup`, never directly.

    Its messages are in mpitrain.comm.point_to_point, its numbers (rank, size and so on) in mpitrain.comm.job.topology.
    """

    probe = ALL_REDUCE

    def __init__(self, comm: MPI.Intracomm, topology: Topology, process: ProcessServices, label: str) -> None:
        super().__init__(comm, topology, process, label)
        self._deferred = Deferred(self)

    # -- collectives, see mpitrain.comm.collectives

    all_reduce = all_reduce
    reduce = reduce
    reduce_scatter = reduce_scatter
    broadcast = broadcast
    all_gather = all_gather
    gather = gather
    scatter = scatter
    all_to_all = all_to_all

    def deferred_reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, op: str = "sum") -> SplitPhase | None:
        """Begin a reduce_scatter of size blocks of out's length that needs no thread. Collective; so is `wait`.

        x stays as it is until the `release` of what is returned. See `mpitrain.comm.runtime.split_phase`.

        Returns:
            A handle, to be waited for in the order of beginning; None, on all ranks, where they do not share x's
            memory: it has to be in an arena, and all of them on one node.
        """
        return self._deferred.reduce_scatter(self, out, x, op)

    # -- small values, which are what JSON can hold: nothing that arrives is ever executed

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """The root's value, on every rank. Collective.

        Args:
            value: What JSON can hold; of the other ranks it does not matter.
            root: The rank whose value all get.
        """
        data = _encode(value) if self.rank == root else np.empty(0, dtype=np.uint8)
        length = np.array([data.size], dtype=np.int64)
        self.broadcast(length, root)
        if self.rank != root:
            data = np.empty(int(length[0]), dtype=np.uint8)
        self.broadcast(data, root)
        return json.loads(data.tobytes())

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, in order of rank. Collective.

        Args:
            value: What JSON can hold.
        """
        data, lengths = self._encoded(value)
        everything = np.empty(int(lengths.sum()), dtype=np.uint8)
        self.all_gather(everything, data, counts=[int(n) for n in lengths])
        ends = np.cumsum(lengths)
        return [json.loads(everything[end - n : end].tobytes()) for n, end in zip(lengths, ends, strict=True)]

    def gather_objects(self, value: Any, root: int = 0) -> list[Any]:
        """Every rank's value, in order of rank, on the root; an empty list elsewhere. Collective.

        Args:
            value: What JSON can hold.
            root: The rank that gets the values.
        """
        data, lengths = self._encoded(value)
        width = int(lengths.max())
        padded = np.zeros(width, dtype=np.uint8)
        padded[: data.size] = data
        everything = np.empty((self.size, width), dtype=np.uint8) if self.rank == root else None
        self.gather(everything, padded, root)
        if everything is None:
            return []
        return [json.loads(row[:n].tobytes()) for row, n in zip(everything, lengths, strict=True)]

    def agree(self, error: BaseException | None) -> None:
        """Raise on every rank if any rank has an error: the first such rank's, named. Collective.

        This is how ranks that can fail alone (files, memory) stay together.

        Args:
            error: This rank's; None where all went well here.

        Raises:
            MpitrainError: Of the kind of the first rank's error, or of this kind itself where that is not one of ours.
        """
        failed = np.array([self.rank if error is not None else self.size], dtype=np.int64)
        self.all_reduce(failed, "min")
        first = int(failed[0])
        if first == self.size:
            return
        told = None
        if self.rank == first and error is not None:
            where = f"rank {first}: " if self.size > 1 and not getattr(error, "agreed", False) else ""
            told = [type(error).__name__, where + (str(error) or type(error).__name__)]
        kind, text = self.broadcast_object(told, first)
        known = {k.__name__: k for k in _all_errors(MpitrainError)}
        if kind in known:
            raise known[kind](text, agreed=True) from error
        raise MpitrainError(f"{text} ({kind})" if kind not in text else text, agreed=True) from error

    def on_root(self, function: Callable[[], Any], root: int = 0) -> Any:
        """Call a function on one rank; every rank returns its value or raises its error. Collective.

        Args:
            function: What is called; its value is what JSON can hold.
            root: The rank that calls it.
        """
        value, error = None, None
        if self.rank == root:
            try:
                value = function()
            except Exception as caught:  # told to all ranks by agree()
                error = caught
        self.agree(error)
        return self.broadcast_object(value, root)

    def _encoded(self, value: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return this rank's value as bytes, and the numbers of bytes of all ranks' values. Collective."""
        data, lengths = _encode(value), np.empty(self.size, dtype=np.int64)
        self.all_gather(lengths, np.array([data.size], dtype=np.int64))
        return data, lengths

    # -- letters, between threads that know nothing of each other's calls

    def mailbox(self, name: str) -> Mailbox:
        """A box at each rank to which all ranks post. Collective. See `mpitrain.comm.mailbox`.

        Args:
            name: Of what it is for, in messages.
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
        nobody refers to it any more (see `mpitrain.comm.collectives.dispatch`). Where ranks died there is nothing to be
        done together, and only what is this process's own is released.
        """
        if not self._freed:
            self._deferred.free(together=self.process.may_release(self._comm))
            self._free()
            self.process.watchdog.forget(self._message_record)

    # -- memory

    def arena(self, numel: int, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> Arena:
        """Flat storage of numel elements per rank, shared inside each node where possible. Collective.

        Collectives on tensors inside it copy nothing. See `mpitrain.comm.memory.arena`.
        """
        if numel < 0:
            raise InputError(f"an arena of {numel} elements is not possible; give 0 or more")
        self.require_same(described(f"arena on {torch.device(device).type}", numel, dtype))
        return self.binder.allocate(numel, dtype, torch.device(device))

    def alternating(self, capacity: int) -> Alternating | None:
        """Two slots of `capacity` bytes a rank, filled in turns and read by all ranks where they are. Collective.

        None, on all ranks, where they lie on several nodes or cannot share memory. See
        `mpitrain.comm.communicator`.
        """
        if self.num_nodes > 1:
            return None
        arena = self.arena(2 * capacity, torch.uint8)
        return Alternating(self, arena, capacity) if arena.kind == "shared" else None

    def node_copy(self, numel: int, dtype: torch.dtype = torch.float32) -> NodeCopy | None:
        """Flat storage of numel elements that all ranks of a node see, host memory. Collective.

        None, on all ranks, where memory cannot be shared. See `mpitrain.comm.communicator`.
        """
        self.require_same(described("node_copy", numel, dtype))
        # the memory is the first rank's; to that one alone it would look like an arena
        mine = numel if self.binder.node.rank == 0 else 0
        arena = self.binder.allocate(mine, dtype, for_tensors=False)
        return NodeCopy(arena, self, numel) if arena.kind == "shared" else None


def _encode(value: Any) -> np.ndarray:
    try:
        text = json.dumps(value)
    except TypeError as error:
        raise InputError(f"{error}; only what JSON can hold travels between ranks: send arrays as arrays") from None
    data: np.ndarray = np.frombuffer(text.encode(), dtype=np.uint8).copy()
    return data


def _all_errors(kind: type[MpitrainError]) -> list[type[MpitrainError]]:
    return [kind, *(error for child in kind.__subclasses__() for error in _all_errors(child))]


# -- Memory that a node shares and that callers fill and read by themselves: slots used in turns, and one copy for all.

_ALTERNATING = Algorithm(lambda setting: alternating_all_gather(setting.size), one_node=True, reach=True)


class Alternating:
    """Two slots a rank in memory that a node shares, used in turns: each rank fills its own, they meet, all read all.

        slot 0  | rank 0's bytes | rank 1's | ...        fill the own one, meet, read them where they are
        slot 1  | rank 0's bytes | rank 1's | ...        the next time

    For data that come at ever new addresses, or that several ranks need a part of each: nothing is sent, and there is
    one fence a turn (`alternating_all_gather`). The communicator lies on one node.

    Attributes:
        slots: By turn and rank: flat uint8 tensors of the capacity's bytes.
        turn: Which slot, 0 or 1, is to be filled now.
    """

    def __init__(self, comm: Dispatcher, arena: Arena, capacity: int) -> None:
        """arena: a shared one of 2 * capacity bytes."""
        memories = [arena.peer(world_rank) for world_rank in comm.world_ranks]
        self.slots = [[m[turn * capacity : (turn + 1) * capacity] for m in memories] for turn in (0, 1)]
        self.turn = 0
        self._comm, self._arena, self._key = comm, arena, ("alternating", arena.name)
        self._meeting = Invocation("alternating all_gather", self._bind, key=self._key, alike=capacity, counts=False)

    def meet(self, taken: int = 0) -> None:
        """Return when every rank has filled its slot of this turn; the next turn begins. Collective.

        All ranks' slots of the turn that ends may be read until this rank's next meeting. Its own slot of the other
        turn may be filled meanwhile.

        Args:
            taken: Bytes that this rank takes out of the other ranks' slots afterwards, for the journal.
        """
        begin = clock() if self._comm.journal.on else 0.0
        ready = self._comm.ready.get(self._key)
        if ready is not None:
            ready(None)
        else:
            self._comm.dispatch(self._meeting)
        self.turn ^= 1
        if begin:
            self._comm.entered(self._meeting.name, Moved("alternating", taken), begin)

    def free(self) -> None:
        """Release the memory. Collective; tensors over it must not be used afterwards."""
        self.slots = []
        self._arena.free()

    def _bind(self, binder: Binder) -> Compiled:
        program, start = binder.program(_ALTERNATING, binder.setting(self._arena.tensor)), self._arena.start
        nothing_moves = Layout(torch.uint8, [0] * (program.chunks + 1), start, start)  # the callers fill and read
        bind = partial(binder.compile, program, nothing_moves, arena=self._arena)
        return binder.bound(self._key, bind, self._arena.tensor)


class NodeCopy:
    """One copy of flat storage for all ranks of a node, in memory they share.

    Unlike an arena, where each rank has storage of its own that the others can reach, all ranks of a node see the same
    elements here. Who writes which of them is the caller's business; `publish` makes what was written visible. Before
    anything is written again, the caller has all ranks of the node meet (the program `node_copy`).

    Attributes:
        tensor: The node's elements, flat, zeros at first.
    """

    def __init__(self, arena: Arena, comm: Dispatcher, numel: int) -> None:
        """arena: all of whose memory is the segment of the node's first rank. comm: whose ranks they are."""
        binder, self._comm, self._published = comm.binder, comm, 0  # the last for the journal
        self._arena, node = arena, binder.node
        first = next(iter(arena.segments.values()))
        self.tensor = tensor_at(first, numel, arena.tensor.dtype)
        program = node_copy(node.size)
        if binder.proofs is not None:
            binder.proofs.require(program)
        nothing_moves = Layout(arena.tensor.dtype, [0] * (program.chunks + 1), 0, 0)  # the callers write and read
        plan = Plan(program, node, nothing_moves, None, node.Barrier, syncs(arena))
        self._publish = plan.bind(nothing_moves)

    def publish(self) -> None:
        """Return when all ranks of the node have come here; then each sees what the others wrote. Collective."""
        begin = clock() if self._comm.journal.on else 0.0
        self._publish()
        if begin:
            self._published += 1
            self._comm.entered("node copy", Moved("node"), begin, f"node copy {self._arena.name}", self._published)

    def free(self) -> None:
        """Release the memory. Collective; tensors over it must not be used afterwards."""
        self.tensor = torch.empty(0, dtype=self.tensor.dtype)
        self._arena.free()
