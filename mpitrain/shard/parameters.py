"""Parameters: where a rank keeps them, and when they are whole.

    parameters             a rank keeps                  whole                  a forward pass is collective
    ReplicatedParameters   the module's own tensors      always                 no
    PrivateParameters      all, in flat private memory   always                 no
    NodeParameters         one copy per node, shared     always                 no
    ShardedParameters      its shares                    while a unit computes  yes: `gathers`

Every rank updates all replicated parameters. The shares of private parameters are gathered after an update. A node's
copy is updated in place, and a barrier within the node makes the update visible. Sharded parameters are gathered unit
by unit (see `sharded_parameters`).

`mpitrain.shard.sharding` lists which stage of ZeRO uses which class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from mpitrain.comm import Communicator
from mpitrain.comm.communicator import NodeCopy
from mpitrain.comm.compression import Compression
from mpitrain.shard.exact_shares import ExactShares, bucket_lengths, bytes_gathered
from mpitrain.shard.flat import FlatGroup, move_into, move_out


class ParameterGather(NamedTuple):
    """Parameters that are gathered in a training step.

    Attributes:
        nbytes: Bytes of the whole parameters.
        ranks: Number of ranks that gather them from each other.
        times: Number of times per step.
    """

    nbytes: float
    ranks: int
    times: int


class Parameters(ABC):
    """The trained parameters of a module, in groups of one dtype and device.

    The methods that are not abstract are correct for parameters that are always whole.

    Attributes:
        gathers: If true, forward and backward passes gather parameters, so every rank must take part in each pass.
    """

    gathers: bool = False

    @abstractmethod
    def local_view(self, group: int, lo: int, hi: int) -> torch.Tensor:
        """Return elements [lo, hi) of a group's layout as a view, through which they are updated.

        Args:
            group: Number of the group.
            lo, hi: Range of elements in the layout; it lies in one share of this rank.
        """

    def publish(self) -> None:
        """Make the updated shares of all ranks visible to every rank. Collective."""
        return

    @abstractmethod
    def nbytes(self) -> float:
        """Return the bytes of parameters on this rank; for memory that the ranks of a node share, this rank's part."""

    @abstractmethod
    def free(self) -> None:
        """Give each parameter its own memory again, and release the rest. Collective."""

    def list_gathers(self, microbatches: int) -> list[ParameterGather]:
        """Return the parameters that are gathered in a step with this number of microbatches."""
        return []

    def buffer_bytes(self) -> int:
        """Return the bytes of the buffers that parameters are gathered into."""
        return 0

    def unshard_all(self) -> AbstractContextManager[None]:
        """Return a context in which all parameters can be read. Collective if the parameters are sharded."""
        return nullcontext()

    def take_values(self) -> None:
        """Keep values that all ranks have written into the parameters, which are whole (see `unshard_all`)."""
        return

    def gathered_bytes(self) -> int:
        """Return how many of the buffers' bytes hold parameters at this time."""
        return 0

    def watch_saved(self, saved: Callable[[torch.Tensor], Any]) -> AbstractContextManager[None]:
        """Return a context that calls `saved` with each tensor that only this class saves for backward.

        These are the tensors that autograd saves and that saved-tensor hooks outside of this class do not see.

        Args:
            saved: Function of each of these tensors. It returns the object to keep: the tensor, or an object that
                returns the tensor when it is called.
        """
        return nullcontext()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return True if the tensor is a view of shares or gathered parameters, whose memory is counted as such."""
        return False

    def mark_copied(self, bucket: int) -> None:
        """Record that the gradients of a bucket of one group have been copied from its parameters.

        The gradients call it once for each group.
        """
        return

    def finish_backward(self) -> None:
        """Take note that a backward pass is over: the parameters are not used until the next forward pass."""
        return


class ReplicatedParameters(Parameters):
    """The module's own tensors, unchanged: every rank updates all of them, and nothing is communicated.

    Args:
        groups: Parameters; the layouts apply only to their gradients.
    """

    def __init__(self, groups: Sequence[FlatGroup]) -> None:
        self._groups = groups

    def local_view(self, group: int, lo: int, hi: int) -> torch.Tensor:
        """Return elements [lo, hi) of a group's layout as a view.

        Args:
            group: Number of the group.
            lo, hi: Range of elements in the layout; it lies in one parameter, which must be contiguous.
        """
        ((number, first, last, _),) = self._groups[group].layout.within(lo, hi)
        return self._groups[group].parameters[number].data.view(-1)[first:last]

    def nbytes(self) -> float:
        return sum(p.nbytes for group in self._groups for p in group.parameters)

    def free(self) -> None:
        """Do nothing: the module's tensors were never moved."""


class _GatheredParameters(Parameters):
    """Parameters that are gathered after an update; if compressed, with the exact shares of this rank beside them."""

    _shares: ExactShares | None = None
    _compression: Compression | None = None

    @abstractmethod
    def _gather(self, compression: Compression | None) -> None:
        """Gather the shares of all ranks. Collective."""

    def publish(self) -> None:
        self._gather(self._compression)

    @contextmanager
    def unshard_all(self) -> Iterator[None]:
        if self._shares is not None:
            self._gather(None)
        yield
        if self._shares is not None:
            self.publish()


class PrivateParameters(_GatheredParameters):
    """A flat copy of the parameters on each rank; the parameters are views of it. The constructor is collective.

    Args:
        groups: Parameters and their places in flat memory.
        shard: Ranks that the shares are divided over, in the order of the shares.
        compression: Compression of the gathered parameters; the rank keeps exact shares in memory of their own. None to
            gather them as they are.
    """

    def __init__(
        self, groups: Sequence[FlatGroup], shard: Communicator, compression: Compression | None = None
    ) -> None:
        self._groups, self._shard = groups, shard
        self._arenas = [shard.arena(g.layout.numel, g.dtype, g.device) for g in groups]
        for group, arena in zip(groups, self._arenas, strict=True):
            move_into(group, arena.tensor, fill=True)
        if compression is not None and shard.size > 1:
            self._compression = compression
            self._shares = ExactShares(groups, [arena.tensor for arena in self._arenas], shard.rank)
            self.publish()

    def local_view(self, group: int, lo: int, hi: int) -> torch.Tensor:
        return self._arenas[group].tensor[lo:hi] if self._shares is None else self._shares.view(group, lo, hi)

    def _gather(self, compression: Compression | None) -> None:
        for g, (group, arena) in enumerate(zip(self._groups, self._arenas, strict=True)):
            for b, bucket in enumerate(group.buckets(arena.tensor)):
                if bucket.numel():
                    share = self.local_view(g, *group.layout.share(b, self._shard.rank))
                    self._shard.all_gather(bucket, share, compression=compression)

    def nbytes(self) -> float:
        shares = self._shares.nbytes() if self._shares is not None else 0
        return sum(arena.tensor.nbytes for arena in self._arenas) + shares

    def free(self) -> None:
        if self._shares is not None:
            self._gather(None)
        for group, arena in zip(self._groups, self._arenas, strict=True):
            move_out(group)
            arena.free()

    def list_gathers(self, microbatches: int) -> list[ParameterGather]:
        ranks = self._shard.size
        return [ParameterGather(bytes_gathered(bucket_lengths(self._groups), ranks, self._compression), ranks, 1)]


class NodeParameters(_GatheredParameters):
    """One flat copy of the parameters for all ranks of a node; the parameters are views of it.

    The constructor is collective.

    Args:
        groups: Parameters and their places in flat memory.
        copies: Shared memory of the node, one copy for each group.
        comm: All ranks.
        cross_node: Ranks with this rank's local rank on all nodes, which exchange their shares between the nodes. Their
            shares are adjacent (see `shard_order`). None on one node.
        share: Number of this rank's share.
        compression: Compression of the parameters that nodes exchange; the rank then keeps an exact share in memory of
            its own. None to exchange them as they are.
    """

    def __init__(
        self,
        groups: Sequence[FlatGroup],
        copies: Sequence[NodeCopy],
        comm: Communicator,
        cross_node: Communicator | None,
        share: int,
        compression: Compression | None = None,
    ) -> None:
        self._groups, self._copies, self._comm, self._cross_node, self._share = groups, copies, comm, cross_node, share
        for group, copy in zip(groups, copies, strict=True):
            move_into(group, copy.tensor, fill=comm.local_rank == 0)
        self._node_barrier()
        if compression is not None and cross_node is not None:
            self._compression = compression
            self._shares = ExactShares(groups, [copy.tensor for copy in copies], share)
            self.publish()

    def local_view(self, group: int, lo: int, hi: int) -> torch.Tensor:
        return self._copies[group].tensor[lo:hi] if self._shares is None else self._shares.view(group, lo, hi)

    def _gather(self, compression: Compression | None) -> None:
        """Gather shares between the nodes, and make the updated copy visible to the ranks of the node."""
        if self._shares is not None:
            self._node_barrier()  # all have read the copy
        if self._cross_node is not None:
            nodes = self._cross_node.size
            first = self._share - self._cross_node.rank
            for g, (group, copy) in enumerate(zip(self._groups, self._copies, strict=True)):
                for b in range(group.layout.buckets):
                    lo, hi = group.layout.share(b, self._share)
                    begin, _ = group.layout.share(b, first)
                    if lo < hi:
                        everyone = copy.tensor[begin : begin + nodes * (hi - lo)]
                        self._cross_node.all_gather(everyone, self.local_view(g, lo, hi), compression=compression)
        self._node_barrier()

    def _node_barrier(self) -> None:
        """Wait until every rank of the node sees the earlier writes of the others."""
        for copy in self._copies:
            copy.publish()

    def nbytes(self) -> float:
        shares = self._shares.nbytes() if self._shares is not None else 0
        return sum(copy.tensor.nbytes for copy in self._copies) / self._comm.local_size + shares

    def list_gathers(self, microbatches: int) -> list[ParameterGather]:
        if self._cross_node is None:
            return []
        nodes, lengths = self._cross_node.size, bucket_lengths(self._groups, self._comm.local_size)
        return [ParameterGather(bytes_gathered(lengths, nodes, self._compression), nodes, 1)]

    def free(self) -> None:
        if self._shares is not None:
            self._gather(None)
        for group in self._groups:
            move_out(group)
        self._node_barrier()
        for copy in self._copies:
            copy.free()


def shard_order(comm: Communicator) -> list[int] | None:
    """Return the ranks in an order that alternates between the nodes; None if nodes differ in size.

        node A: 0 2 4      node B: 1 3 5

    With this order, the shares of ranks that have the same local rank on different nodes are adjacent, and one
    all-gather among those ranks moves one interval of memory.
    """
    nodes = comm.nodes
    if len({nodes.count(node) for node in set(nodes)}) > 1:
        return None
    return sorted(range(len(nodes)), key=lambda rank: (nodes[:rank].count(nodes[rank]), nodes[rank]))
