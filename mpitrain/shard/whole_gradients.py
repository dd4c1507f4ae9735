"""Gradients that every rank keeps whole (stages 0 and 1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from mpitrain.comm import Arena, Work
from mpitrain.shard.flat import FlatGroup, adopt, numbered
from mpitrain.shard.protocols import Gradients
from mpitrain.shard.reduction import BucketReduction


class WholeGradients(Gradients):
    """All gradients in flat arenas; each parameter's `.grad` is a view of its place there. Collective to make.

    The first gradient of a step is copied to its place as soon as it is complete, while it is still in the cache;
    autograd adds later ones there. The arenas are never cleared: that would cost a pass over them, and adding to the
    zeros another.

    Args:
        groups: The parameters and where each lies.
        reduction: Over which ranks gradients are reduced, and how.
        sharded: Reduce this rank's shares alone, as an optimizer with sharded states needs.
        dtype: In which gradients are added up, where it is not the parameters' own; `.grad` is then empty after
            backward.
    """

    reduces_each_pass = False

    def __init__(
        self, groups: Sequence[FlatGroup], reduction: BucketReduction, *, sharded: bool, dtype: torch.dtype | None
    ) -> None:
        self.groups, self.reduction, self.sharded = groups, reduction, sharded
        self._arenas = self._allocate(dtype)
        for arena in self._arenas:
            arena.tensor.zero_()
        self._apart = [arena.tensor.dtype != g.dtype for arena, g in zip(self._arenas, groups, strict=True)]
        self._stale: set[nn.Parameter] = set()  # whose place in another dtype the next gradient overwrites
        self._given: set[nn.Parameter] = set()  # whose place holds a gradient that is not yet its `.grad`
        self._views: dict[nn.Parameter, tuple[torch.Tensor, bool]] = {}  # its place, and whether of another dtype
        for g, group in enumerate(groups):
            for parameter, view in zip(group.parameters, group.views(self._arenas[g].tensor), strict=True):
                self._views[parameter] = (view, self._apart[g])
        self._buckets = [b for g, group in enumerate(groups) for b in group.buckets(self._arenas[g].tensor)]
        self._compressed = [reduction.compressed(groups[g], b, (g, b)) for g, b in numbered(groups)]
        whole = not sharded and reduction.compression is None and not reduction.overlaps
        self.at_once = self.flat if whole else None

    def _allocate(self, dtype: torch.dtype | None) -> list[Arena]:
        """Memory for each group."""
        return [self.reduction.comm.arena(g.layout.numel, dtype or g.dtype, g.device) for g in self.groups]

    @property
    def flat(self) -> list[torch.Tensor]:
        return [arena.tensor for arena in self._arenas]

    def place(self, parameter: nn.Parameter) -> torch.Tensor | None:
        view, apart = self._views[parameter]
        if apart or parameter.grad is not None or parameter in self._given:
            return None
        self._given.add(parameter)
        return view.view_as(view)  # a tensor of its own: autograd keeps it only if nobody else does

    def arrived(self, parameter: nn.Parameter) -> None:
        view, apart = self._views[parameter]
        self._given.discard(parameter)
        if not apart:
            adopt(parameter, view)
        elif parameter.grad is not None:
            if parameter in self._stale:
                self._stale.remove(parameter)
                view.copy_(parameter.grad)
            else:
                view.add_(parameter.grad)
            parameter.grad = None

    def start(self, bucket: int, background: bool) -> Work | None:
        x, shapes = self._buckets[bucket], self._compressed[bucket]
        if self.sharded:
            return self.reduction.scatter(self.reduction.own(x), x, bucket, shapes, background=background, defer=False)
        return self.reduction.sum(x, bucket, shapes, background=background)

    def end(self, works: Sequence[Work | None]) -> None:
        for work in works:
            if work is not None:
                work.wait()
        if self.reduction.replicas is not None:
            for bucket in self._buckets:
                self.reduction.among_replicas(self.reduction.own(bucket))

    def zero(self) -> None:
        self._given.clear()
        for parameter, (_, apart) in self._views.items():
            parameter.grad = None
            if apart:
                self._stale.add(parameter)

    def settle(self) -> None:
        for parameter, (view, apart) in self._views.items():
            self.arrived(parameter)
            if apart and parameter in self._stale:
                self._stale.remove(parameter)
                view.zero_()

    def scale(self, factor: float) -> None:
        for flat in self.flat:
            flat.mul_(factor)

    def own(self, group: int, lo: int, hi: int) -> torch.Tensor:
        return self._arenas[group].tensor[lo:hi]

    def nbytes(self) -> tuple[int, int]:
        return sum(flat.numel() * flat.element_size() for flat in self.flat), 0

    def free(self) -> None:
        for parameter, (view, _) in self._views.items():
            if parameter.grad is not None and parameter.grad.data_ptr() == view.data_ptr():
                parameter.grad = None
        for arena in self._arenas:
            arena.free()
