"""Sharded parameters (stage 3): every rank keeps its shares; a unit's parameters are whole only while it computes.

    forward    unshard 0 | compute 0, reshard | compute 1, reshard | ...      each while the one before computes,
    backward               ... | unshard 1, compute 1, reshard | unshard 0 ...  where a core is free for it

What autograd would save of the gathered memory is saved as its place in it, so freed memory can serve another unit
in between (Rajbhandari et al. 2020 section 5.3; Zhao et al. 2023, PyTorch FSDP, section 3).
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
from mpitrain.comm.memory.device import current_stream, is_accelerator, pinned, recorded
from mpitrain.shard.flat import FlatGroup
from mpitrain.shard.offload import HOST, MappedFiles
from mpitrain.shard.protocols import Gathered, Parameters


class _Unit:
    """A unit and where it stands between two reshards. bucket: the number of its bucket in every group."""

    def __init__(self, module: nn.Module, bucket: int, root: bool, groups: Sequence[FlatGroup]) -> None:
        self.module, self.bucket, self.root = module, bucket, root
        # (group number, parameter, offset in the unit's bucket of that group)
        self.members = [(g, p, offset) for g, group in enumerate(groups) for p, offset in group.members(bucket)]
        self.buffers: dict[int, torch.Tensor] = {}  # by group, the gathered bucket; empty while resharded
        self.works: list[Work] = []  # all-gathers under way
        self.saving: saved_tensors_hooks | None = None  # entered during its forward pass
        self.ready = False  # the parameters are views of the buffers


class ShardedParameters(Parameters):
    """This rank's shares of every unit, and the whole of the units that compute now. Collective to make.

    Args:
        module: The model; its parameters become views of the memory that units are gathered into.
        units: Of `units_of`.
        groups: Of `unit_groups`, whose buckets are the units.
        shard: The ranks that the shares are divided over.
        reshard_after_forward: Drop a unit's whole parameters after its forward pass, and gather them again for
            backward; else keep them until backward has gone through the unit.
        offload: Where this rank's shares are: "host" for host memory, or a folder for files mapped into it, from which
            they are copied to the device on each gather; empty for the device.
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
    ) -> None:
        self._groups, self._shard, self._reshard = groups, shard, reshard_after_forward
        self._arenas: list[Arena] = []
        self._shares = self._hosted(offload) if offload else self._in_arenas()
        # by group, buffers that are free, and after what on the device
        self._pool: dict[int, list[tuple[torch.Tensor, torch.Event | None]]] = {}
        self._nothing = [torch.full((), torch.nan, dtype=g.dtype, device=g.device) for g in groups]
        self._pool_bytes = 0
        count = len(units)
        self._units = [_Unit(u, count - 1 - number, False, groups) for number, u in enumerate(units)]
        self._units.append(_Unit(module, count, True, groups))
        self._longest = [max((hi - lo for lo, hi in pairwise(g.layout.bounds[: count + 1])), default=0) for g in groups]
        self._order: list[_Unit] = []  # of the units in the forward pass
        self._taken: dict[int, int] = {}  # buckets whose gradients were taken, by how many groups
        self._saved: Callable[[torch.Tensor], object] | None = None  # called with what autograd keeps (`watch_saved`)
        self._hooks: list[Any] = []
        for unit in self._units:
            self._take_shares(unit)
            self._drop_values(unit)
            self._hooks.append(unit.module.register_forward_pre_hook(lambda m, a, u=unit: self._before(u)))
            self._hooks.append(
                unit.module.register_forward_hook(lambda m, a, out, u=unit: self._after(u, out), always_call=True)
            )

    # -- memory

    def _in_arenas(self) -> list[torch.Tensor]:
        """Memory for this rank's shares of each group, where the group computes."""
        shard = self._shard
        self._arenas = [shard.arena(g.layout.numel // g.layout.parts, g.dtype, g.device) for g in self._groups]
        return [arena.tensor for arena in self._arenas]

    def _hosted(self, offload: str) -> list[torch.Tensor]:
        """The same in host memory, or in files (Rajbhandari et al. 2021, ZeRO-Infinity, section 5.1)."""
        found = [pinned((g.layout.numel // g.layout.parts,), g.dtype, g.device) for g in self._groups]
        if offload == HOST:
            return found
        files = MappedFiles(Path(offload))
        return [files.move(share) for share in found]

    def _buckets(self, unit: _Unit) -> Iterator[tuple[int, FlatGroup, int, int]]:
        """The unit's buckets that hold anything: (group number, group, lo, hi) in the group's layout."""
        for g, group in enumerate(self._groups):
            lo, hi = group.layout.bounds[unit.bucket : unit.bucket + 2]
            if lo < hi:
                yield g, group, lo, hi

    def _share(self, g: int, lo: int, hi: int) -> torch.Tensor:
        """This rank's share of the bucket [lo, hi) of a group, a view."""
        parts = self._groups[g].layout.parts
        return self._shares[g][lo // parts : hi // parts]

    def _take_shares(self, unit: _Unit) -> None:
        """Copy this rank's shares of the values that a unit's parameters have now into its arenas."""
        for g, group, lo, hi in self._buckets(unit):
            full = torch.zeros(hi - lo, dtype=group.dtype, device=group.device)
            for parameter, offset in group.members(unit.bucket):
                full[offset : offset + parameter.numel()].copy_(parameter.data.reshape(-1))
            length = (hi - lo) // group.layout.parts
            self._share(g, lo, hi).copy_(full[self._shard.rank * length : (self._shard.rank + 1) * length])

    def _drop_values(self, unit: _Unit) -> None:
        """Leave the parameters their shapes without memory behind them: whoever reads them now gets NaN."""
        for g, parameter, _ in unit.members:
            parameter.data = self._nothing[g].expand(parameter.shape)

    def _buffer(self, g: int, length: int, root: bool) -> torch.Tensor:
        """Memory for at least `length` elements of a group: from the pool, or new.

        On a device the current stream waits until whoever had it is done with it: autograd's threads may use others.
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
        self._pool_bytes += buffer.numel() * buffer.element_size()
        return buffer

    def _begin_unshard(self, unit: _Unit) -> None:
        """Start the all-gathers of a unit's buckets, if they have not been. Collective."""
        if unit.buffers:
            return
        background = self._shard.overlaps
        for g, _, lo, hi in self._buckets(unit):
            buffer = unit.buffers[g] = self._buffer(g, hi - lo, unit.root)
            share = self._share(g, lo, hi)
            if share.device != buffer.device:
                length, rank = len(share), self._shard.rank
                share = buffer[rank * length : (rank + 1) * length].copy_(share, non_blocking=True)
            work = self._shard.all_gather(buffer[: hi - lo], share, async_op=background)
            if work is not None:
                unit.works.append(work)

    def unshard(self, unit: _Unit) -> None:
        """Gather a unit's buckets, and make its parameters views of them. Collective."""
        if unit.ready:
            return
        self._begin_unshard(unit)
        for work in unit.works:
            work.wait()
        unit.works.clear()
        for g, parameter, offset in unit.members:
            parameter.data = unit.buffers[g][offset : offset + parameter.numel()].view(parameter.shape)
        unit.ready = True

    def reshard(self, unit: _Unit) -> None:
        """Give back the memory of a unit's whole parameters; this rank's shares stay."""
        for work in unit.works:
            work.wait()
        unit.works.clear()
        if unit.ready:
            self._drop_values(unit)
            unit.ready = False
        for g, buffer in unit.buffers.items():
            self._pool[g].append((buffer, recorded(buffer.device) if is_accelerator(buffer.device) else None))
        unit.buffers = {}

    # -- the passes

    def _before(self, unit: _Unit) -> None:
        """Hook before a unit's forward pass."""
        self.unshard(unit)
        if unit not in self._order and not unit.root:
            self._order.append(unit)
        self._prefetch(unit, 1)
        if torch.is_grad_enabled() and not unit.root:
            unit.saving = saved_tensors_hooks(self._pack(unit), self._unpack)
            unit.saving.__enter__()

    def _after(self, unit: _Unit, output: Any) -> None:
        """Hook after a unit's forward pass. What its output's gradient arrives at unshards it for backward."""
        if unit.saving is not None:
            unit.saving.__exit__(None, None, None)
            unit.saving = None
        waiting = [t for t in tree_leaves(output) if torch.is_tensor(t) and t.requires_grad]
        for tensor in waiting if not unit.root else ():
            tensor.register_hook(lambda grad, u=unit: self._before_backward(u))
        if not waiting or (self._reshard and not unit.root):
            self.reshard(unit)

    def _before_backward(self, unit: _Unit) -> None:
        """Hook on the gradients of a unit's output: autograd is about to enter it."""
        self.unshard(unit)
        self._prefetch(unit, -1)

    def _prefetch(self, unit: _Unit, step: int) -> None:
        """Start to gather the unit that comes `step` units after this one in the forward pass's order."""
        if not self._shard.overlaps or unit.root:
            return
        at = self._order.index(unit) + step
        if 0 <= at < len(self._order):
            self._begin_unshard(self._order[at])

    def _pack(self, unit: _Unit) -> Any:
        """The function that autograd saves tensors of a unit by: views of gathered memory by their place in it."""
        places = {buffer.untyped_storage().data_ptr(): g for g, buffer in unit.buffers.items()}

        def pack(tensor: torch.Tensor) -> Any:
            g = places.get(tensor.untyped_storage().data_ptr())
            if g is None:
                if self._saved is not None:
                    self._saved(tensor)
                return tensor
            return unit, g, tensor.storage_offset(), tensor.shape, tensor.stride()

        return pack

    @staticmethod  # the buffers are those of the unit's backward pass, into which it has been gathered again
    def _unpack(packed: Any) -> torch.Tensor:
        """What `_pack` saved, as the tensor it stands for."""
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

    def gradients_taken(self, bucket: int) -> None:
        """Reshard a unit once the gradients of its bucket have been taken in every group."""
        self._taken[bucket] = self._taken.get(bucket, 0) + 1
        if self._taken[bucket] == len(self._groups) and bucket < len(self._units) - 1:
            self.reshard(self._units[len(self._units) - 2 - bucket])

    def end_of_backward(self) -> None:
        self._taken.clear()
        for unit in self._units:
            self.reshard(unit)

    # -- what others need

    def own(self, group: int, lo: int, hi: int) -> torch.Tensor:
        begin = self._groups[group].in_shares(lo, self._shard.rank)
        return self._shares[group][begin : begin + hi - lo]

    def publish(self) -> None:
        """The next gather shows what was written."""

    def nbytes(self) -> float:
        return sum(share.nbytes for share in self._shares)

    def gathered(self, microbatches: int) -> list[Gathered]:
        ranks, found = self._shard.size, []
        for unit in self._units:
            nbytes = sum((hi - lo) * group.dtype.itemsize for _, group, lo, hi in self._buckets(unit))
            again = self._reshard and not unit.root  # for backward
            found.append(Gathered(nbytes, ranks, microbatches * (1 + again)))
        return found

    def buffer_bytes(self) -> int:
        return self._pool_bytes

    @contextmanager
    def whole(self) -> Iterator[None]:
        for unit in self._units:
            self.unshard(unit)
        try:
            yield
        finally:
            for unit in self._units:
                self.reshard(unit)

    def free(self) -> None:
        for unit in self._units:
            self.unshard(unit)
            for _, parameter, _ in unit.members:
                parameter.data = parameter.data.clone()
        for hook in self._hooks:
            hook.remove()
        for arena in self._arenas:
            arena.free()
