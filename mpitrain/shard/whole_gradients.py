"""Gradients that every rank keeps whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from mpitrain.comm import Work
from mpitrain.shard.flat import FlatGroup, adopt, numbered
from mpitrain.shard.reduction import Reduction


class WholeGradients:
    """Every rank keeps all gradients, in arenas; each parameter's `.grad` is its place there.

    The first gradient of a step is copied there when it is complete, and still in the cache; later ones are added
    there by autograd. Arenas are never cleared: that would cost a pass over them, and autograd another.

    sharded: reduce only this rank's shares. dtype: None for the parameters' own; else gradients are added up in
    that type and `.grad` is empty after backward. Collective to make.
    """

    def __init__(
        self, groups: Sequence[FlatGroup], reduction: Reduction, *, sharded: bool, dtype: torch.dtype | None = None
    ) -> None:
        self.groups, self.reduction, self.sharded = groups, reduction, sharded
        self._arenas = [reduction.comm.arena(g.layout.numel, dtype or g.dtype, g.device) for g in groups]
        for arena in self._arenas:
            arena.tensor.zero_()
        self._apart = [arena.tensor.dtype != g.dtype for arena, g in zip(self._arenas, groups, strict=True)]
        self._stale: set[nn.Parameter] = set()  # whose place in another dtype the next gradient replaces
        self._given: set[nn.Parameter] = set()  # whose place is where a gradient on its way lies
        self._views: dict[nn.Parameter, tuple[torch.Tensor, bool]] = {}
        for g, group in enumerate(groups):
            for parameter, view in zip(group.parameters, group.views(self._arenas[g].tensor), strict=True):
                self._views[parameter] = (view, self._apart[g])
        self.buckets = [b for g, group in enumerate(groups) for b in group.buckets(self._arenas[g].tensor)]
        self._compressed = [reduction.compressed(groups[g], b, (g, b)) for g, b in numbered(groups)]
        whole = not sharded and reduction.compression is None and not reduction.overlaps
        self.at_once = [arena.tensor for arena in self._arenas] if whole else None

    def place(self, parameter: nn.Parameter) -> torch.Tensor | None:
        view, apart = self._views[parameter]
        if apart or parameter.grad is not None or parameter in self._given:
            return None
        self._given.add(parameter)
        return view.view_as(view)

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
        x, shapes = self.buckets[bucket], self._compressed[bucket]
        if self.sharded:
            return self.reduction.scatter(self.reduction.own(x), x, bucket, shapes, background=background, lag=False)
        return self.reduction.sum(x, bucket, shapes, background=background)

    def end(self, works: Sequence[Work | None]) -> None:
        for work in works:
            if work is not None:
                work.wait()
        if self.reduction.replicas is not None:
            for bucket in self.buckets:
                self.reduction.among_replicas(self.reduction.own(bucket))

    def zero(self) -> None:
        self._given.clear()
        for parameter, (_, apart) in self._views.items():
            parameter.grad = None
            if apart:
                self._stale.add(parameter)

    def settle(self) -> None:
        """Where no gradient came there are zeros afterwards."""
        for parameter, (view, apart) in self._views.items():
            self.arrived(parameter)
            if apart and parameter in self._stale:
                self._stale.remove(parameter)
                view.zero_()

    @property
    def flat(self) -> list[torch.Tensor]:
        """All gradients, one flat tensor a group."""
        return [arena.tensor for arena in self._arenas]

    def own(self, group: int, lo: int, hi: int) -> torch.Tensor:
        return self._arenas[group].tensor[lo:hi]

    def nbytes(self) -> tuple[int, int]:
        return sum(a.tensor.numel() * a.tensor.element_size() for a in self._arenas), 0

    def scale(self, factor: float) -> None:
        for arena in self._arenas:
            arena.tensor.mul_(factor)

    def free(self) -> None:
        for parameter, (view, _) in self._views.items():
            if parameter.grad is not None and parameter.grad.data_ptr() == view.data_ptr():
                parameter.grad = None
        for arena in self._arenas:
            arena.free()
