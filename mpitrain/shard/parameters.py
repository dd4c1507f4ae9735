"""Parameters: where a rank keeps them, and when they are whole.

    parameters             a rank keeps                  whole                  a forward pass is collective
    ReplicatedParameters   the module's own tensors      always                 no
    PrivateParameters      all, in flat private memory   always                 no
    NodeParameters         one copy per node, shared     always                 no
    ShardedParameters      its shares                    while a unit computes  yes: `gathers`

Every rank updates all replicated parameters. The shares of private parameters are gathered after an update. A node's
copy is updated in place, and a barrier within the node makes the update visible. Sharded parameters are gathered unit
by unit when they are needed ("unshard") and freed after use ("reshard"):

    forward    unshard 0 | compute 0, reshard | compute 1, reshard | ...      unit 1 is gathered while unit 0 computes
    backward               ... | unshard 1, compute 1, reshard | unshard 0 ...  if a core is free for it

Autograd saves its tensors that are views of gathered memory as offsets into that memory. The memory can therefore be
freed and serve another unit between forward and backward (Rajbhandari et al. 2020 section 5.3; Zhao et al. 2023,
PyTorch FSDP, section 3).

`mpitrain.shard.sharding` lists which stage of ZeRO uses which class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from mpitrain.comm import Arena, Communicator, Work
from mpitrain.comm.communicator import NodeCopy
from mpitrain.comm.compression import Compression
from mpitrain.comm.memory.device import current_stream, empty_pinned, is_accelerator, record_event
from mpitrain.shard.exact_shares import ExactShares, bucket_lengths, bytes_gathered
from mpitrain.shard.flat import FlatGroup, move_into, move_out
from mpitrain.shard.offload import HOST, MappedFiles


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

    def watch_saved(self, saved: Callable[[torch.Tensor], object]) -> AbstractContextManager[None]:
        """Return a context that calls `saved` with each tensor that only this class saves for backward.

        These are the tensors that autograd saves and that saved-tensor hooks outside of this class do not see.

        Args:
            saved: Callback with each of these tensors.
        """
        return nullcontext()

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


def shard_order(comm: Communicator) -> int | None:
    """Return this rank's number in an order that alternates between the nodes; None if nodes differ in size.

        node A: 0 2 4      node B: 1 3 5

    With this order, the shares of ranks that have the same local rank on different nodes are adjacent, and one
    all-gather among those ranks moves one interval of memory.
    """
    if len({comm.nodes.count(node) for node in comm.nodes}) > 1:
        return None
    return comm.local_rank * comm.num_nodes + comm.node


class _Unit:
    """A unit and its state between two reshards.

    Args:
        module: Module of the unit.
        bucket: Number of the unit's bucket, the same in every group.
        root: If true, this is the root unit.
        groups: Groups whose buckets are the units.
    """

    def __init__(self, module: nn.Module, bucket: int, root: bool, groups: Sequence[FlatGroup]) -> None:
        self.module, self.bucket, self.root = module, bucket, root
        # (group number, parameter, offset in the unit's bucket of that group) of each parameter
        self.members = [(g, p, offset) for g, group in enumerate(groups) for p, offset in group.members(bucket)]
        self.buffers: dict[int, torch.Tensor] = {}  # by group, the gathered bucket; empty while resharded
        self.works: list[Work] = []  # all-gathers that are not complete
        self.saving: saved_tensors_hooks | None = None  # active during the unit's forward pass
        self.ready = False  # the parameters are views of the buffers


class ShardedParameters(Parameters):
    """This rank's shares of every unit, and the whole parameters of the units that compute now.

    The constructor is collective.

    Args:
        module: Model; its parameters become views of the memory that units are gathered into.
        units: Units, as returned by `units_of`.
        groups: Groups, as returned by `unit_groups`, whose buckets are the units.
        shard: Ranks that the shares are divided over.
        reshard_after_forward: If true, free a unit's whole parameters after its forward pass, and gather them again for
            backward; if false, keep them until backward has passed through the unit.
        offload: Place of this rank's shares: "host" for host memory, or a folder for files mapped into it, from which
            they are copied to the device for each gather; empty for the device.
        compression: Compression of the parameters that are gathered to compute; None to gather them as they are.
    """

    gathers = True

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[nn.Module],
        groups: Sequence[FlatGroup],
        shard: Communicator,
        *,
        reshard_after_forward: bool = True,
        offload: str = "",
        compression: Compression | None = None,
    ) -> None:
        self._groups, self._shard, self._reshard, self._compression = groups, shard, reshard_after_forward, compression
        self._arenas: list[Arena] = []
        if offload:  # in host memory, or in files (Rajbhandari et al. 2021, ZeRO-Infinity, section 5.1)
            self._shares = [empty_pinned((g.layout.numel // g.layout.parts,), g.dtype, g.device) for g in groups]
            if offload != HOST:
                files = MappedFiles(Path(offload))
                self._shares = [files.move(share) for share in self._shares]
        else:
            self._arenas = [shard.arena(g.layout.numel // g.layout.parts, g.dtype, g.device) for g in groups]
            self._shares = [arena.tensor for arena in self._arenas]
        # by group, free buffers, each with the device event after which it may be written
        self._pool: dict[int, list[tuple[torch.Tensor, torch.Event | None]]] = {}
        self._nan_values = [torch.full((), torch.nan, dtype=g.dtype, device=g.device) for g in groups]
        self._pool_bytes = 0
        count = len(units)
        self._units = [_Unit(u, count - 1 - number, False, groups) for number, u in enumerate(units)]
        self._units.append(_Unit(module, count, True, groups))
        self._longest = [max((hi - lo for lo, hi in pairwise(g.layout.bounds[: count + 1])), default=0) for g in groups]
        self._order: list[_Unit] = []  # units in the order of the forward pass
        self._copied: dict[int, int] = {}  # by bucket, number of groups whose gradients were taken
        self._saved: Callable[[torch.Tensor], object] | None = None  # see `watch_saved`
        self._hooks: list[Any] = []
        for unit in self._units:
            self._copy_shares(unit)
            self._drop_values(unit)
            self._hooks.append(unit.module.register_forward_pre_hook(lambda m, a, u=unit: self._pre_forward(u)))
            self._hooks.append(
                unit.module.register_forward_hook(
                    lambda m, a, out, u=unit: self._post_forward(u, out), always_call=True
                )
            )

    # -- memory

    def _buckets(self, unit: _Unit) -> Iterator[tuple[int, FlatGroup, int, int]]:
        """Yield (group number, group, lo, hi) for each non-empty bucket [lo, hi) of a unit."""
        for g, group in enumerate(self._groups):
            lo, hi = group.layout.bounds[unit.bucket : unit.bucket + 2]
            if lo < hi:
                yield g, group, lo, hi

    def _share(self, g: int, lo: int, hi: int) -> torch.Tensor:
        """Return this rank's share of the bucket [lo, hi) of a group as a view."""
        parts = self._groups[g].layout.parts
        return self._shares[g][lo // parts : hi // parts]

    def _copy_shares(self, unit: _Unit) -> None:
        """Copy this rank's shares of a unit's current parameter values into the rank's memory for shares."""
        for g, group, lo, hi in self._buckets(unit):
            full = torch.zeros(hi - lo, dtype=group.dtype, device=group.device)
            for parameter, offset in group.members(unit.bucket):
                full[offset : offset + parameter.numel()].copy_(parameter.data.reshape(-1))
            length = (hi - lo) // group.layout.parts
            self._share(g, lo, hi).copy_(full[self._shard.rank * length : (self._shard.rank + 1) * length])

    def _drop_values(self, unit: _Unit) -> None:
        """Make the parameters NaN tensors of the same shape without memory, so that use before a gather gives NaN."""
        for g, parameter, _ in unit.members:
            parameter.data = self._nan_values[g].expand(parameter.shape)

    def _buffer(self, g: int, length: int, root: bool) -> torch.Tensor:
        """Return memory for at least `length` elements of a group, from the pool or newly allocated.

        On a device, the current stream waits until the previous user has finished with the memory, because autograd's
        threads may use other streams.
        """
        group = self._groups[g]
        free = self._pool.setdefault(g, [])
        for number, (buffer, read) in enumerate(free):
            if buffer.numel() >= length:
                del free[number]
                if read is not None:
                    current_stream(group.device).wait_event(read)
                return buffer
        buffer = torch.empty(length if root else self._longest[g], dtype=group.dtype, device=group.device)
        self._pool_bytes += buffer.nbytes
        return buffer

    def _begin_unshard(self, unit: _Unit, compression: Compression | None) -> None:
        """Start the all-gathers of a unit's buckets, unless they have already been started. Collective."""
        if unit.buffers:
            return
        background = self._shard.overlaps
        for g, _, lo, hi in self._buckets(unit):
            buffer = unit.buffers[g] = self._buffer(g, hi - lo, unit.root)
            share = self._share(g, lo, hi)
            if share.device != buffer.device:
                length, rank = len(share), self._shard.rank
                share = buffer[rank * length : (rank + 1) * length].copy_(share, non_blocking=True)
            work = self._shard.all_gather(buffer[: hi - lo], share, async_op=background, compression=compression)
            if work is not None:
                unit.works.append(work)

    def unshard(self, unit: _Unit, *, exact: bool = False) -> None:
        """Gather a unit's buckets, exactly or to compute, and make its parameters views of them. Collective."""
        if unit.ready:
            return
        self._begin_unshard(unit, None if exact else self._compression)
        for work in unit.works:
            work.wait()
        unit.works.clear()
        for g, parameter, offset in unit.members:
            parameter.data = unit.buffers[g][offset : offset + parameter.numel()].view(parameter.shape)
        unit.ready = True

    def reshard(self, unit: _Unit) -> None:
        """Return the memory of a unit's whole parameters to the pool; this rank's shares stay."""
        for work in unit.works:
            work.wait()
        unit.works.clear()
        if unit.ready:
            self._drop_values(unit)
            unit.ready = False
        for g, buffer in unit.buffers.items():
            self._pool[g].append((buffer, record_event(buffer.device) if is_accelerator(buffer.device) else None))
        unit.buffers = {}

    # -- the passes

    def _pre_forward(self, unit: _Unit) -> None:
        """Run before a unit's forward pass (hook): unshard the unit, and start to gather the next one."""
        self.unshard(unit)
        if unit not in self._order and not unit.root:
            self._order.append(unit)
        self._prefetch(unit, 1)
        if torch.is_grad_enabled() and not unit.root:
            unit.saving = saved_tensors_hooks(self._pack(unit), self._unpack)
            unit.saving.__enter__()

    def _post_forward(self, unit: _Unit, output: Any) -> None:
        """Run after a unit's forward pass (hook): reshard the unit, and hook its outputs, to unshard it in backward."""
        if unit.saving is not None:
            unit.saving.__exit__(None, None, None)
            unit.saving = None
        waiting = [t for t in tree_leaves(output) if torch.is_tensor(t) and t.requires_grad]
        for tensor in waiting if not unit.root else ():
            tensor.register_hook(lambda grad, u=unit: self._pre_backward(u))
        if not waiting or (self._reshard and not unit.root):
            self.reshard(unit)

    def _pre_backward(self, unit: _Unit) -> None:
        """Run before a unit's backward pass (hook on its outputs' gradients): unshard it, start to gather the next."""
        self.unshard(unit)
        self._prefetch(unit, -1)

    def _prefetch(self, unit: _Unit, step: int) -> None:
        """Start to gather the unit that is `step` units after this one in the order of the forward pass."""
        if not self._shard.overlaps or unit.root:
            return
        at = self._order.index(unit) + step
        if 0 <= at < len(self._order):
            self._begin_unshard(self._order[at], self._compression)

    def _pack(self, unit: _Unit) -> Any:
        """Return the function by which autograd saves a unit's tensors.

        It replaces a view of gathered memory by its offset in that memory.
        """
        places = {buffer.untyped_storage().data_ptr(): g for g, buffer in unit.buffers.items()}

        def pack(tensor: torch.Tensor) -> Any:
            g = places.get(tensor.untyped_storage().data_ptr())
            if g is None:
                if self._saved is not None:
                    self._saved(tensor)
                return tensor
            return unit, g, tensor.storage_offset(), tensor.shape, tensor.stride()

        return pack

    @staticmethod  # the buffers are those into which the unit has been gathered again for backward
    def _unpack(packed: Any) -> torch.Tensor:
        """Return the tensor that was saved by `_pack`."""
        if torch.is_tensor(packed):
            return packed
        unit, g, offset, shape, stride = packed
        return unit.buffers[g].as_strided(shape, stride, offset)

    @contextmanager
    def watch_saved(self, saved: Callable[[torch.Tensor], object]) -> Iterator[None]:
        self._saved = saved
        try:
            yield
        finally:
            self._saved = None

    def mark_copied(self, bucket: int) -> None:
        """Reshard a unit once the gradients of its bucket have been taken in every group."""
        self._copied[bucket] = self._copied.get(bucket, 0) + 1
        if self._copied[bucket] == len(self._groups) and bucket < len(self._units) - 1:
            self.reshard(self._units[len(self._units) - 2 - bucket])

    def finish_backward(self) -> None:
        self._copied.clear()
        for unit in self._units:
            self.reshard(unit)

    # -- interface of `Parameters`

    def local_view(self, group: int, lo: int, hi: int) -> torch.Tensor:
        begin = self._groups[group].in_shares(lo, self._shard.rank)
        return self._shares[group][begin : begin + hi - lo]

    def nbytes(self) -> float:
        return sum(share.nbytes for share in self._shares)

    def list_gathers(self, microbatches: int) -> list[ParameterGather]:
        ranks, gathers = self._shard.size, []
        for unit in self._units:
            lengths = ((group, hi - lo) for _, group, lo, hi in self._buckets(unit))
            nbytes = bytes_gathered(lengths, ranks, self._compression)
            again = self._reshard and not unit.root  # gathered once more for backward
            gathers.append(ParameterGather(nbytes, ranks, microbatches * (1 + again)))
        return gathers

    def buffer_bytes(self) -> int:
        return self._pool_bytes

    @contextmanager
    def unshard_all(self) -> Iterator[None]:
        for unit in self._units:
            self.unshard(unit, exact=True)
        try:
            yield
        finally:
            for unit in self._units:
                self.reshard(unit)

    def free(self) -> None:
        for unit in self._units:
            self.unshard(unit, exact=True)
            for _, parameter, _ in unit.members:
                parameter.data = parameter.data.clone()
        for hook in self._hooks:
            hook.remove()
        for arena in self._arenas:
            arena.free()
