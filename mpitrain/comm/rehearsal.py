"""Communicators of a world that is not there, in which this process plays one rank alone.

Their topology is that of the played rank, and every operation completes at once, with the result that it would have if
all ranks passed what this rank passes:

                 x of this rank     result here, of 3 ranks
    all_reduce        a             3a (sum)
    all_gather        a             a a a
    broadcast         a             a
    receive           .             0

Arguments are checked as in a real world. Memory that ranks of a node share is private and its peers are this rank's own
memory, so every tensor has the size that it has on the real rank, and its values mean nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from mpitrain.comm.collectives.binding import Invocation
from mpitrain.comm.collectives.dispatch import ProcessServices
from mpitrain.comm.communicator import Alternating, Communicator, NodeCopy
from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.job.topology import Share, Topology, spare_cores
from mpitrain.comm.memory.arena import Arena
from mpitrain.comm.memory.buffers import as_tensor
from mpitrain.comm.memory.device import is_accelerator
from mpitrain.comm.runtime.work import Work
from mpitrain.errors import refusal


def play_rank(world: Communicator, rank: int, ranks: int, ranks_per_node: int = 0) -> Communicator:
    """Return the communicator of one rank of a world that is not there.

    Args:
        world: World of this process, which must have one rank.
        rank: Rank to play.
        ranks: Number of ranks.
        ranks_per_node: Ranks of each node; 0 for one per core of this machine.

    Raises:
        InputError: There is no such rank, or this process is one of several.
    """
    if world.size > 1:
        raise refusal(f"--as-rank plays one rank in one process, but there are {world.size}; start it without mpirun")
    if not 0 <= rank < ranks:
        raise refusal(f"--as-rank {rank} does not exist: ranks are 0 to {ranks - 1}; change it, or raise --ranks")
    here = world.process.cores
    nodes = tuple(r // (ranks_per_node or here.cores) for r in range(ranks))
    share = Share(here.cores, nodes.count(nodes[rank]), here.threads)
    process = replace(world.process, cores=share, spare_cores=spare_cores(MPI.COMM_SELF, share))
    return PlayedCommunicator(Topology(rank, nodes, tuple(range(ranks))), process, "world")


class PlayedCommunicator(Communicator):
    """Communicator of ranks of which only this one exists; made by `play_rank` and `subgroup`."""

    played = True

    def __init__(self, topology: Topology, process: ProcessServices, label: str) -> None:
        super().__init__(MPI.COMM_SELF.Dup(), topology, process, label)

    def __deepcopy__(self, memo: object) -> PlayedCommunicator:
        return self

    # -- operations

    def begin(
        self,
        make_invocation: Callable[..., Invocation],
        async_op: bool,
        tensors: Sequence[Any],
        written: Sequence[bool],
    ) -> Work | None:
        if not any(isinstance(x, FakeTensor) for x in tensors):  # these have no values
            return super().begin(make_invocation, async_op, tensors, written)
        return Completed() if async_op else None

    def dispatch(self, call: Invocation, async_op: bool = False) -> Work | None:
        self.compare(call.name, call.tensors, None)
        self._fill(call)
        return Completed() if async_op else None

    def _fill(self, call: Invocation) -> None:
        """Write the result of an operation for which all ranks pass the tensors of this one."""
        into = next((x for x, changed in zip(call.tensors, call.written, strict=False) if changed), None)
        if into is None:
            return
        into = into.detach().view(-1)
        get = (lambda name: None) if call.operation is None else partial(call.operation.value, call.arguments)
        source = next((x for x, changed in zip(call.tensors, call.written, strict=False) if not changed), None)
        if source is not None:
            blocks = get("counts") or [into.numel()] * self.size
            _copy(into, source.detach().reshape(-1), sum(blocks[: self.rank]))
        elif call.name == "scatter":  # of another rank's blocks
            into.zero_()
        if get("op") == "sum":
            into.mul_(self.size)
        elif get("op") == "product":
            into.pow_(self.size)

    def deferred_reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, op: str = "sum") -> Any:
        self.reduce_scatter(out, x, op)
        return Completed()

    def isend(self, x: Any, dest: int, tag: int = 0, *, header: bool = True) -> Any:
        return Completed()

    def irecv(self, x: Any, source: int, tag: int = 0, *, header: bool = True) -> Any:
        as_tensor(x).detach().zero_()
        return Completed()

    # -- small values

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        return json.loads(json.dumps(value))

    def all_gather_object(self, value: Any) -> list[Any]:
        return [self.broadcast_object(value) for _ in range(self.size)]

    gather_objects = all_gather_object  # type: ignore[assignment]

    def on_root(self, function: Callable[[], Any], root: int = 0) -> Any:
        return self.broadcast_object(function())

    # -- groups

    def split(self, color: int | None, key: int = 0, label: str = "") -> Any:
        raise refusal(
            f"{self.label} is rehearsed by one rank, which cannot know the colors of the others; use subgroup"
        )

    def subgroup(self, ranks: Sequence[int], label: str = "") -> Communicator | None:
        if self.rank not in ranks:
            return None
        topology = self._topology.subgroup(ranks, list(ranks).index(self.rank))
        return PlayedCommunicator(topology, self.process, label or f"{self.label}{list(ranks)}")

    # -- memory

    def arena(self, numel: int, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> Arena:
        on, tensor = torch.device(device), torch.zeros(numel, dtype=dtype, device=device)
        if is_accelerator(on) or self.size == 1:
            return Arena("device" if is_accelerator(on) else "private", tensor)
        return Arena("shared", tensor, {self.world_ranks[r]: tensor.data_ptr() for r in self._topology.neighbours})

    def alternating(self, capacity: int) -> Alternating | None:
        return None  # exchanges go through the operations

    def node_copy(self, numel: int, dtype: torch.dtype = torch.float32) -> NodeCopy | None:
        return _PrivateCopy(numel, dtype)


def _copy(into: torch.Tensor, source: torch.Tensor, begin: int) -> None:
    """Copy a block into the blocks of all ranks, or this rank's block, which begins at `begin`, out of all blocks.

    Args:
        into: Flat tensor to be written.
        source: Flat tensor that it is written from; it may be a part of `into`.
        begin: First element of this rank's block.
    """
    if source.numel() >= into.numel():
        into.copy_(source[begin : begin + into.numel()] if source.numel() > into.numel() else source)
    elif source.numel():
        source, whole = source.clone(), into.numel() // source.numel() * source.numel()
        into[:whole].view(-1, len(source)).copy_(source)
        into[whole:].copy_(source[: into.numel() - whole])
    else:
        into.zero_()


class Completed(Work):
    """Handle of an operation that was complete at once."""

    def wait(self, timeout: float | None = None) -> None:
        """Return at once."""

    def done(self) -> bool:
        """Return True."""
        return True


class _PrivateCopy(NodeCopy):
    """Memory of this process that stands for its node's copy."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self.tensor = torch.zeros(numel, dtype=dtype)

    def publish(self) -> None:
        """Do nothing."""

    def free(self) -> None:
        """Drop the memory."""
        self.tensor = self.tensor.new_empty(0)
