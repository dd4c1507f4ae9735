"""Parameters of which every rank keeps a share; they are whole while a unit of the model computes.

Sharded parameters are gathered unit by unit when they are needed ("unshard") and freed after use ("reshard"):

    forward    unshard 0 | compute 0, reshard | compute 1, reshard | ...      unit 1 is gathered while unit 0 computes
    backward               ... | unshard 1, compute 1, reshard | unshard 0 ...  if a core is free for it

Shares change only in an update. If all ranks are on one node, each therefore reads the others' shares in shared memory
when it needs them, without waiting for anybody. Only a parameter that is divided between shares is copied:

    shares of a unit    | rank 0: w0 w1.. | rank 1: ..w1 w2 |      w0 and w2 are used where they are

All ranks meet after an update, before shares are read again, and before it, when the norm of the gradients is summed.

Autograd saves its tensors that are views of gathered memory as offsets into that memory. The memory can therefore be
freed and serve another unit between forward and backward (Rajbhandari et al. 2020 section 5.3; Zhao et al. 2023,
PyTorch FSDP, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from mpitrain.comm import Arena, Communicator, Work
from mpitrain.comm.compression import Compression
from mpitrain.comm.job.traffic import Volume, clock
from mpitrain.comm.memory.device import current_stream, empty_pinned, is_accelerator, record_event
from mpitrain.shard.exact_shares import bytes_gathered
from mpitrain.shard.flat import FlatGroup
from mpitrain.shard.offload import HOST, MappedFiles
from mpitrain.shard.parameters import ParameterGather, Parameters


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
        self.segment = [self]  # units gathered for its backward, which recomputes them: it and earlier ones
        self.buffers: dict[int, torch.Tensor] = {}  # by group, the gathered bucket; empty while resharded
        self.views: dict[tuple[int, ...], list[torch.Tensor]] = {}  # of the members, by the addresses of the buffers
        self.undivided: list[torch.Tensor | None] = [None] * len(self.members)  # members that are read in a share
        self.pieces: dict[int, list[tuple[int, torch.Tensor]]] = {}  # by group, (offset, piece) of those to be copied
        self.nan_values: list[torch.Tensor] = []  # tensors of the members' shapes without memory
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
        readable = compression is None and not shard.overlaps and shard.num_nodes == 1
        readable = readable and all(a.kind == "shared" for a in self._arenas)
        # by group, the shares of every rank, if this rank can read them
        self._all_shares = [[a.peer(r) for r in shard.world_ranks] for a in self._arenas] if readable else []
        self._addresses = {share.untyped_storage().data_ptr() for shares in self._all_shares for share in shares}
        # by group, free buffers, each with the device event after which it may be written
        self._pool: dict[int, list[tuple[torch.Tensor, torch.Event | None]]] = {}
        self._nan_values = [torch.full((), torch.nan, dtype=g.dtype, device=g.device) for g in groups]
        self._pool_bytes = self._gathered_bytes = self._reads = 0
        count = len(units)
        self._units = [_Unit(u, count - 1 - number, False, groups) for number, u in enumerate(units)]
        self._units.append(_Unit(module, count, True, groups))
        at = {unit.module: unit for unit in self._units}
        for unit in self._units:
            modules = getattr(unit.module, "recomputed_with", (unit.module,))
            unit.segment = [at[module] for module in modules[: modules.index(unit.module) + 1] if module in at]
        self._longest = [max((hi - lo for lo, hi in pairwise(g.layout.bounds[: count + 1])), default=0) for g in groups]
        self._order: list[_Unit] = []  # units in the order of the forward pass
        self._copied: dict[int, int] = {}  # by bucket, number of groups whose gradients were taken
        self._saved: Callable[[torch.Tensor], Any] | None = None  # see `watch_saved`
        self._hooks: list[Any] = []
        for unit in self._units:
            self._copy_shares(unit)
            self._drop_values(unit)
            if self._all_shares:
                self._find_undivided(unit)
            self._hooks.append(unit.module.register_forward_pre_hook(lambda m, a, u=unit: self._pre_forward(u)))
            self._hooks.append(
                unit.module.register_forward_hook(
                    lambda m, a, out, u=unit: self._post_forward(u, out), always_call=True
                )
            )
        self.publish()

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

    def _find_undivided(self, unit: _Unit) -> None:
        """Find the parameters of a unit that lie in one share, and the pieces of the others."""
        for number, (g, parameter, offset) in enumerate(unit.members):
            lo, hi = self._groups[g].layout.bounds[unit.bucket : unit.bucket + 2]
            parts, end = self._groups[g].layout.parts, offset + parameter.numel()
            length, begin = (hi - lo) // parts, lo // parts
            pieces = []
            for share, first in zip(self._all_shares[g], range(0, hi - lo, length), strict=True):
                at, to = max(offset, first), min(end, first + length)
                if at < to:
                    pieces.append((at, share[begin + at - first : begin + to - first]))
            if len(pieces) == 1:
                unit.undivided[number] = pieces[0][1].view(parameter.shape)
            else:
                unit.pieces.setdefault(g, []).extend(pieces)

    def _drop_values(self, unit: _Unit) -> None:
        """Make the parameters NaN tensors of the same shape without memory, so that use before a gather gives NaN."""
        if not unit.nan_values:
            unit.nan_values = [self._nan_values[g].expand(p.shape) for g, p, _ in unit.members]
        for (_, parameter, _), nan in zip(unit.members, unit.nan_values, strict=True):
            parameter.data = nan

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
            self._gathered_bytes += buffer.nbytes
            if self._all_shares:
                self._read_all(unit, g, hi - lo)
                continue
            share = self._share(g, lo, hi)
            if share.device != buffer.device:
                length, rank = len(share), self._shard.rank
                share = buffer[rank * length : (rank + 1) * length].copy_(share, non_blocking=True)
            work = self._shard.all_gather(buffer[: hi - lo], share, async_op=background, compression=compression)
            if work is not None:
                unit.works.append(work)

    def _read_all(self, unit: _Unit, g: int, length: int) -> None:
        """Copy the divided parameters of a unit, whose bucket in the group has this length, into its buffer."""
        parts, shard, buffer = self._groups[g].layout.parts, self._shard, unit.buffers[g]
        begin = clock() if shard.journal.on else 0.0
        for offset, piece in unit.pieces.get(g, ()):
            buffer[offset : offset + len(piece)].copy_(piece)
        if begin:
            nbytes = length // parts * (parts - 1) * buffer.element_size()
            self._reads += 1
            key = f"shares of {shard.label}"
            shard.record_operation("all_gather", Volume("read", nbytes), begin, key, self._reads)

    def unshard(self, unit: _Unit, *, exact: bool = False) -> None:
        """Gather a unit's buckets, exactly or to compute, and make its parameters views of them. Collective."""
        if unit.ready:
            return
        self._begin_unshard(unit, None if exact else self._compression)
        for work in unit.works:
            work.wait()
        unit.works.clear()
        place = tuple(buffer.data_ptr() for buffer in unit.buffers.values())
        views = unit.views.get(place)
        if views is None:
            views = unit.views[place] = [
                unit.buffers[g][offset : offset + p.numel()].view(p.shape) if whole is None else whole
                for (g, p, offset), whole in zip(unit.members, unit.undivided, strict=True)
            ]
        for (_, parameter, _), view in zip(unit.members, views, strict=True):
            parameter.data = view
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
            self._gathered_bytes -= buffer.nbytes
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
        for each in unit.segment:
            self.unshard(each)
        self._prefetch(unit.segment[0], -1)

    def _prefetch(self, unit: _Unit, step: int) -> None:
        """Start to gather the unit that is `step` units after this one in the order of the forward pass."""
        if not self._shard.overlaps or unit.root:
            return
        at = self._order.index(unit) + step
        if 0 <= at < len(self._order):
            self._begin_unshard(self._order[at], self._compression)

    def _pack(self, unit: _Unit) -> Any:
        """Return the function by which autograd saves a unit's tensors.

        It replaces a view of gathered memory by its offset in that memory. Shares stay where they are until the update.
        """
        places = {buffer.untyped_storage().data_ptr(): g for g, buffer in unit.buffers.items()}

        def pack(tensor: torch.Tensor) -> Any:
            address = tensor.untyped_storage().data_ptr()
            g = places.get(address)
            if g is None:
                return tensor if self._saved is None or address in self._addresses else self._saved(tensor)
            return unit, g, tensor.storage_offset(), tensor.shape, tensor.stride()

        return pack

    @staticmethod  # the buffers are those into which the unit has been gathered again for backward
    def _unpack(packed: Any) -> torch.Tensor:
        """Return the tensor that was saved by `_pack`."""
        if not isinstance(packed, tuple):
            return packed() if callable(packed) else packed
        unit, g, offset, shape, stride = packed
        return unit.buffers[g].as_strided(shape, stride, offset)

    @contextmanager
    def watch_saved(self, saved: Callable[[torch.Tensor], Any]) -> Iterator[None]:
        self._saved = saved
        try:
            yield
        finally:
            self._saved = None

    def holds(self, tensor: torch.Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        gathered = (buffer for unit in self._units for buffer in unit.buffers.values())
        return address in self._addresses or any(address == b.untyped_storage().data_ptr() for b in gathered)

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

    def publish(self) -> None:
        if self._all_shares:
            self._shard.barrier()

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

    def gathered_bytes(self) -> int:
        return self._gathered_bytes

    @contextmanager
    def unshard_all(self) -> Iterator[None]:
        for unit in self._units:
            self.unshard(unit, exact=True)
        try:
            yield
        finally:
            for unit in self._units:
                self.reshard(unit)

    def take_values(self) -> None:
        for unit in self._units:
            self._copy_shares(unit)

    def free(self) -> None:
        for unit in self._units:
            self.unshard(unit, exact=True)
            for _, parameter, _ in unit.members:
                parameter.data = parameter.data.clone()
        for hook in self._hooks:
            hook.remove()
        for arena in self._arenas:
            arena.free()
