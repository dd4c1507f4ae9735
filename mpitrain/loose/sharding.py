"""A module and its optimizer, placed over workers and servers: whole on workers, in shares on servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from mpitrain.comm import Arena, Communicator, Work
from mpitrain.comm.memory.device import is_accelerator
from mpitrain.loose.memory import OwnShares, Roles, SharedFlats
from mpitrain.loose.update import ShareUpdate
from mpitrain.shard.flat import FlatGroup, flat_groups, in_backward_order, members, units_of
from mpitrain.shard.flat_parameters import FlatParameter, refuse_unless_elementwise, sharded_flat_parameters
from mpitrain.shard.gradients import BucketReduction, Gradients, WholeGradients
from mpitrain.shard.parameters import Parameters, move_into, move_out
from mpitrain.shard.sharding import Options, Sharding

Buckets = Sequence[int]


class PulledParameters(Parameters):
    """A worker's flat copy, which servers fill; each unit of the module waits for what it computes with.

    Args:
        module: Whose forward passes wait.
        groups: Its parameters, and where each lies.
        flats: The host memory that servers fill.
        published: The server's own shares of this rank; None on one that only works. They get the module's values.

    Attributes:
        need: Returns when the parameters of these buckets have come; to be set once there is somebody to ask.
    """

    def __init__(
        self, module: nn.Module, groups: Sequence[FlatGroup], flats: SharedFlats, published: OwnShares | None
    ) -> None:
        self._groups, self._flats, self._published = groups, flats, published
        self._far = [
            torch.zeros(g.layout.numel, dtype=g.dtype, device=g.device) if is_accelerator(g.device) else None
            for g in groups
        ]
        for group, arena, far in zip(groups, flats.parameters, self._far, strict=True):
            move_into(group, arena.tensor if far is None else far, fill=True)
        if published is not None:
            for number, (g, _) in enumerate(flats.buckets):
                lo, hi = flats.share_bounds(number, published.share)
                far = self._far[g]
                published.bucket(number).copy_((flats.parameters[g].tensor if far is None else far)[lo:hi])
        self.need: Callable[[Buckets], object] = lambda buckets: None
        self._hooks = [
            unit.register_forward_pre_hook(partial(self._wait, buckets))
            for unit, buckets in _buckets_of_units(module, groups, flats.buckets)
        ]

    def _wait(self, buckets: Buckets, *_: object) -> None:
        self.need(buckets)

    def came(self, bucket: int) -> None:
        """A bucket's parameters are in host memory: take them to where the module has them."""
        g, b = self._flats.buckets[bucket]
        far = self._far[g]
        if far is not None:
            bounds = slice(*self._groups[g].layout.bounds[b : b + 2])
            far[bounds].copy_(self._flats.parameters[g].tensor[bounds])

    def own(self, group: int, lo: int, hi: int) -> torch.Tensor:
        assert self._published is not None
        return self._published.between(group, lo, hi)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """All parameters can be read inside: those that this worker pulled last."""
        self.need(range(len(self._flats.buckets)))
        yield

    def publish(self) -> None:
        """Nothing is to be done: workers pull before they compute."""

    def nbytes(self) -> float:
        flats = sum(g.layout.numel * g.dtype.itemsize for g in self._groups)
        return flats + (self._published.nbytes() if self._published is not None else 0)

    def free(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for group in self._groups:
            move_out(group)
        self._flats.free()


class PushedGradients(WholeGradients):
    """Gradients that a worker keeps whole, and lets servers have bucket by bucket.

    Args:
        groups: The parameters and where each lies.
        flats: The host memory that servers read.
        world: All ranks.

    Attributes:
        push: Lets the servers have a bucket; to be set once there is somebody to tell.
    """

    def __init__(self, groups: Sequence[FlatGroup], flats: SharedFlats, world: Communicator) -> None:
        self._flats = flats
        self.push: Callable[[int], object] = lambda bucket: None
        super().__init__(groups, _AsTheyCome([world], "sum"), sharded=True, dtype=None)

    def _allocate(self, dtype: torch.dtype | None) -> list[Arena]:
        return [
            Arena("device", torch.zeros(g.layout.numel, dtype=g.dtype, device=g.device))
            if is_accelerator(g.device)
            else near
            for g, near in zip(self.groups, self._flats.gradients, strict=True)
        ]

    def start(self, bucket: int, background: bool) -> Work | None:
        g, b = self._flats.buckets[bucket]
        near, here = self._flats.gradients[g].tensor, self._arenas[g].tensor
        if here is not near:
            bounds = slice(*self.groups[g].layout.bounds[b : b + 2])
            near[bounds].copy_(here[bounds])
        self.push(bucket)
        return None

    def free(self) -> None:
        super().free()
        for arena in self._flats.gradients:  # host memory, where those freed are a device's; else nothing more
            arena.free()


class _AsTheyCome(BucketReduction):
    """Every bucket is let go as soon as backward has finished it."""

    @property
    def overlaps(self) -> bool:
        return True


class ServedSharding(Sharding):
    """Parameters and gradients whole on each worker, and optimizer states in shares on the servers.

    Args:
        module: Whose parameters are trained; they must be the same on all ranks.
        optimizer: Of those parameters; it is handed this server's shares instead.
        alone: A communicator of this rank alone.
        options: Only the size of buckets counts.
        world: All ranks.
        roles: Who works and who serves.

    Attributes:
        flats: The workers' memory.
        pulled, pushed: The parameters and the gradients.
        published, sums: A server's shares of the parameters and of the gradients added up; None on other ranks.
        update: Of these; None likewise.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        alone: Communicator,
        options: Options,
        world: Communicator,
        roles: Roles,
    ) -> None:
        self.world, self.roles = world, roles
        self.published: OwnShares | None = None
        self.sums: OwnShares | None = None
        super().__init__(module, optimizer, alone, replace(options, zero=1))  # states in shares
        self.update: ShareUpdate | None = None
        if self.published is not None and self.sums is not None:
            self.update = ShareUpdate(self, self.sums, self.published, len(self.flats.buckets))

    def _share_number(self) -> int | None:
        rank, servers = self.world.rank, self.roles.servers
        return servers.index(rank) if rank in servers else None

    def _place_parameters(self, named: list[tuple[str, nn.Parameter]]) -> tuple[list[FlatGroup], Parameters]:
        parts = len(self.roles.servers)
        groups = flat_groups(in_backward_order(named), self.options.bucket_mb, parts)
        self.flats = SharedFlats(groups, self.world)
        if self.share is not None:
            kinds = [g.dtype for g in groups]
            self.published = OwnShares(groups, self.share, kinds, self._in_place(self.flats.parameters, kinds))
        self.pulled = PulledParameters(self.module, groups, self.flats, self.published)
        return groups, self.pulled

    def _place_gradients(self) -> Gradients:
        self.pushed = PushedGradients(self.groups, self.flats, self.world)
        return self.pushed

    def _flat_parameters(self, gradients: Gradients, counted: Callable[[nn.Parameter], bool]) -> list[FlatParameter]:
        refuse_unless_elementwise(self.optimizer)  # on all ranks
        if self.share is None:
            return []
        kinds = [g.dtype if g.dtype.itemsize >= 4 else torch.float32 for g in self.groups]
        self.sums = OwnShares(self.groups, self.share, kinds, self._in_place(self.flats.gradients, kinds))
        own, gradient = self.parameters.own, self.sums.between
        return sharded_flat_parameters(self.optimizer, self.groups, self.share, own, gradient, counted)

    def _in_place(self, arenas: Sequence[Arena], kinds: Sequence[torch.dtype]) -> list[torch.Tensor | None]:
        """This rank's memory of whole groups where it only serves: it has no other use for it there."""
        serves = self.world.rank not in self.roles.workers
        return [a.tensor if serves and a.tensor.dtype == kind else None for a, kind in zip(arenas, kinds, strict=True)]


def _buckets_of_units(
    module: nn.Module, groups: Sequence[FlatGroup], buckets: Sequence[tuple[int, int]]
) -> list[tuple[nn.Module, list[int]]]:
    """The buckets that each unit's parameters lie in, in the order in which they come; the module itself is the last.

    What belongs to no unit or to several is needed from the beginning of the module's forward pass.
    """
    numbers = {bucket: number for number, bucket in enumerate(buckets)}
    where = {
        parameter: numbers[g, place.bucket]
        for g, group in enumerate(groups)
        for parameter, place in zip(group.parameters, group.layout.places, strict=True)
    }
    units = units_of(module)
    of = [sorted({where[p] for p in unit}, reverse=True) for unit in members(module, units)]
    return list(zip([*units, module], of, strict=True))
