"""Placement of a module and its optimizer over workers and servers: whole on workers, in shares on servers.

All trained parameters have one flat layout, in buckets of equal shares, one share for each server. A worker has all of
them in an arena. Servers of its node map that arena, read gradients there and write parameters there, so each element
is copied once and no message carries it. A server on another node exchanges the same shares as messages.

    worker   | bucket 0: share 0 | share 1 | bucket 1: share 0 | share 1 |      parameters; gradients too
    server 0 | share 0 of bucket 0 | share 0 of bucket 1 |
    server 1 | share 1 of bucket 0 | share 1 of bucket 1 |
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import nn

from mpitrain.comm import Arena, Communicator, Work
from mpitrain.comm.memory.device import is_accelerator
from mpitrain.config.settings import Config
from mpitrain.shard.bucket_reduction import BucketReduction
from mpitrain.shard.flat import FlatGroup, bucket_indices, flat_groups, members, move_into, move_out, units_of
from mpitrain.shard.flat_parameters import FlatParameter, check_elementwise, sharded_flat_parameters
from mpitrain.shard.gradients import Gradients, WholeGradients
from mpitrain.shard.parameters import Parameters
from mpitrain.shard.placement import STAGES
from mpitrain.shard.sharding import Sharding
from mpitrain.shard.update import optimizer_step, set_rate

Buckets = Sequence[int]


@dataclass(frozen=True)
class Roles:
    """Ranks of the workers and of the servers. A rank that does both is in both.

    Attributes:
        workers: Ranks of the workers, in order.
        servers: Ranks of the servers, in the order of their shares.
    """

    workers: tuple[int, ...]
    servers: tuple[int, ...]

    @staticmethod
    def of(ranks: int, servers: int) -> Roles:
        """Return the roles of the ranks.

        Args:
            ranks: Number of ranks.
            servers: Number of ranks that only serve, which are the last ones; 0 makes every rank both a worker and a
                server.
        """
        everyone = tuple(range(ranks))
        return Roles(everyone[: ranks - servers], everyone[ranks - servers :] if servers else everyone)


class SharedFlats:
    """Flat parameters and gradients of all workers in host memory, as this rank sees them. Collective to make.

    Args:
        groups: Parameters and their places in the flat layout, with one share for each server.
        world: Communicator of all ranks.

    Attributes:
        buckets: Pairs (number of the group, bucket in the group) of every bucket, in the order in which backward
            finishes them.
        parameters, gradients: Arenas of this rank, one for each group.
    """

    def __init__(self, groups: Sequence[FlatGroup], world: Communicator) -> None:
        self.groups, self._world = groups, world
        self.buckets = bucket_indices(groups)
        self.parameters, self.gradients = ([world.arena(g.layout.numel, g.dtype) for g in groups] for _ in range(2))

    def can_access(self, rank: int) -> bool:
        """Return True if this rank can access the memory of `rank`, which may be this rank itself."""
        other = self._world.world_ranks[rank]
        return rank == self._world.rank or all(other in arena.segments for arena in (*self.parameters, *self.gradients))

    def parameter_share(self, rank: int, bucket: int, share: int) -> torch.Tensor:
        """Return a view of one share of a bucket of a rank's parameters.

        Args:
            rank: Rank of the worker, whose memory this rank must share.
            bucket: Number of the bucket.
            share: Number of the share.
        """
        return self._share(self.parameters, rank, bucket, share)

    def gradient_share(self, rank: int, bucket: int, share: int) -> torch.Tensor:
        """Return a view of one share of a bucket of a rank's gradients.

        Args:
            rank: Rank of the worker, whose memory this rank must share.
            bucket: Number of the bucket.
            share: Number of the share.
        """
        return self._share(self.gradients, rank, bucket, share)

    def share_bounds(self, bucket: int, share: int) -> tuple[int, int]:
        """Return the bounds [lo, hi) of a share of a bucket in its group's layout.

        Args:
            bucket: Number of the bucket.
            share: Number of the share.
        """
        g, b = self.buckets[bucket]
        return self.groups[g].layout.share(b, share)

    def _share(self, arenas: Sequence[Arena], rank: int, bucket: int, share: int) -> torch.Tensor:
        lo, hi = self.share_bounds(bucket, share)
        arena = arenas[self.buckets[bucket][0]]
        flat = arena.tensor if rank == self._world.rank else arena.peer(self._world.world_ranks[rank])
        return flat[lo:hi]

    def free(self) -> None:
        """Release the memory of the parameters; the owner of the gradients releases theirs. Collective."""
        for arena in self.parameters:
            arena.free()


class ServerShares:
    """One server's shares of a flat vector with the layout of the parameters.

    The shares are concatenated in private memory. On a rank that only serves, they can instead be in place in memory
    for the whole vector, of which the rank uses no other part.

    Args:
        groups: Parameters and their places in the flat layout.
        share: Number of the share in each bucket.
        dtypes: Data type of each group.
        whole: For each group, memory for all of its elements, in which its shares are placed; None for private memory.

    Attributes:
        share: Number of the share in each bucket.
    """

    def __init__(
        self,
        groups: Sequence[FlatGroup],
        share: int,
        dtypes: Sequence[torch.dtype],
        whole: Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        self._groups, self.share = groups, share
        self._whole = [None] * len(groups) if whole is None else whole
        lengths = [
            group.layout.numel // group.layout.parts if of is None else 0
            for group, of in zip(groups, self._whole, strict=True)
        ]
        self._flats = [torch.zeros(n, dtype=dtype) for n, dtype in zip(lengths, dtypes, strict=True)]
        self._buckets = bucket_indices(groups)

    def between(self, group: int, lo: int, hi: int) -> torch.Tensor:
        """Return a view of elements [lo, hi) of a group's layout, which must be in one of the shares.

        Args:
            group: Number of the group.
            lo: First element in the group's layout.
            hi: Element after the last one.
        """
        whole = self._whole[group]
        if whole is not None:
            return whole[lo:hi]
        at = self._groups[group].in_shares(lo, self.share) if hi > lo else 0
        return self._flats[group][at : at + hi - lo]

    def bucket(self, number: int) -> torch.Tensor:
        """Return a view of the share of a bucket."""
        g, b = self._buckets[number]
        return self.between(g, *self._groups[g].layout.share(b, self.share))

    def nbytes(self) -> int:
        """Return the bytes of private memory."""
        return sum(flat.nbytes for flat in self._flats)


class PulledParameters(Parameters):
    """A worker's flat copy of the parameters, which servers fill. Each unit of the module waits for its own parameters.

    Args:
        module: Module whose forward passes wait.
        groups: Its parameters and their places in the flat layout.
        flats: Host memory that servers fill.
        published: This rank's shares as a server, which get the module's values; None on a rank that only works.

    Attributes:
        wait_for: Function that returns when the parameters of the given buckets have arrived. The caller sets it once
            the servers run.
    """

    def __init__(
        self, module: nn.Module, groups: Sequence[FlatGroup], flats: SharedFlats, published: ServerShares | None
    ) -> None:
        self._groups, self._flats, self._published = groups, flats, published
        self._device_copies = [
            torch.zeros(g.layout.numel, dtype=g.dtype, device=g.device) if is_accelerator(g.device) else None
            for g in groups
        ]
        for group, arena, far in zip(groups, flats.parameters, self._device_copies, strict=True):
            move_into(group, arena.tensor if far is None else far, fill=True)
        if published is not None:
            for number, (g, _) in enumerate(flats.buckets):
                lo, hi = flats.share_bounds(number, published.share)
                far = self._device_copies[g]
                published.bucket(number).copy_((flats.parameters[g].tensor if far is None else far)[lo:hi])
        self.wait_for: Callable[[Buckets], object] = lambda buckets: None
        self._hooks = [
            unit.register_forward_pre_hook(lambda *_, buckets=buckets: self.wait_for(buckets))
            for unit, buckets in _buckets_of_units(module, groups, flats.buckets)
        ]

    def copy_to_device(self, bucket: int) -> None:
        """Copy a bucket's parameters, which have arrived in host memory, to the module's device."""
        g, b = self._flats.buckets[bucket]
        far = self._device_copies[g]
        if far is not None:
            bounds = slice(*self._groups[g].layout.bounds[b : b + 2])
            far[bounds].copy_(self._flats.parameters[g].tensor[bounds])

    def local_view(self, group: int, lo: int, hi: int) -> torch.Tensor:
        assert self._published is not None
        return self._published.between(group, lo, hi)

    @contextmanager
    def unshard_all(self) -> Iterator[None]:
        """Make all parameters readable inside the context: the values that this worker pulled last."""
        self.wait_for(range(len(self._flats.buckets)))
        yield

    def publish(self) -> None:
        """Do nothing, because workers pull before they compute."""

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
    """Gradients that a worker keeps whole and passes to the servers bucket by bucket.

    Args:
        groups: Parameters and their places in the flat layout.
        flats: Host memory that servers read.
        world: Communicator of all ranks.

    Attributes:
        push: Function that passes a bucket to the servers. The caller sets it once the servers run.
    """

    def __init__(self, groups: Sequence[FlatGroup], flats: SharedFlats, world: Communicator) -> None:
        self._flats = flats
        self.push: Callable[[int], object] = lambda bucket: None
        reduction = BucketReduction([world], "sum")
        reduction.overlaps = True  # every bucket is pushed as soon as backward has finished it
        super().__init__(groups, reduction, sharded=True, dtype=None)

    def _allocate(self, dtype: torch.dtype | None) -> list[Arena]:
        return [
            Arena("device", torch.zeros(g.layout.numel, dtype=g.dtype, device=g.device))
            if is_accelerator(g.device)
            else near
            for g, near in zip(self.groups, self._flats.gradients, strict=True)
        ]

    def agree(self, numbers: Sequence[int]) -> list[int]:
        return list(numbers)  # servers take each worker's buckets in any order

    def start(self, bucket: int, background: bool) -> Work | None:
        g, b = self._flats.buckets[bucket]
        near, here = self._flats.gradients[g].tensor, self._arenas[g].tensor
        if here is not near:
            bounds = slice(*self.groups[g].layout.bounds[b : b + 2])
            near[bounds].copy_(here[bounds])
        self.push(bucket)
        return None

    def skip(self, bucket: int) -> None:
        super().skip(bucket)
        self.start(bucket, background=False)  # servers wait for every bucket

    def free(self) -> None:
        super().free()
        for arena in self._flats.gradients:  # host memory; already freed unless the gradients are on a device
            arena.free()


class ServedSharding(Sharding):
    """Parameters and gradients whole on each worker, and optimizer states in shares on the servers.

    Args:
        module: Module whose parameters are trained; they must be equal on all ranks.
        optimizer: Optimizer of those parameters. On a server, its parameters are replaced by the server's shares.
        alone: Communicator of this rank alone.
        config: Settings, of which comm.bucket_mb is used.
        world: Communicator of all ranks.
        roles: Ranks of the workers and of the servers.

    Attributes:
        flats: Memory of the workers.
        published, sums: A server's shares of the parameters and of the summed gradients; None on other ranks.
        update: Optimizer of these shares; None on other ranks.
    """

    stage = STAGES[1]  # optimizer states in shares
    parameters: PulledParameters
    gradients: PushedGradients

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        alone: Communicator,
        config: Config,
        world: Communicator,
        roles: Roles,
    ) -> None:
        self.world, self.roles, self.writes_copies = world, roles, world.rank == roles.workers[0]
        self.published: ServerShares | None = None
        self.sums: ServerShares | None = None
        super().__init__(module, optimizer, alone, config)
        self.update: ShareUpdate | None = None
        if self.published is not None and self.sums is not None:
            self.update = ShareUpdate(self, self.sums, self.published, len(self.flats.buckets))

    def _place_parameters(self, trained: list[nn.Parameter]) -> tuple[list[FlatGroup], Parameters]:
        rank, servers = self.world.rank, self.roles.servers
        self.share = servers.index(rank) if rank in servers else None
        groups = flat_groups(trained, self.config.comm.bucket_mb, len(servers))
        self.flats = SharedFlats(groups, self.world)
        if self.share is not None:
            kinds = [g.dtype for g in groups]
            self.published = ServerShares(groups, self.share, kinds, self._in_place(self.flats.parameters, kinds))
        return groups, PulledParameters(self.module, groups, self.flats, self.published)

    def _place_gradients(self) -> Gradients:
        return PushedGradients(self.groups, self.flats, self.world)

    def _flat_parameters(self, is_owner: Callable[[nn.Parameter], bool]) -> list[FlatParameter]:
        check_elementwise(self.optimizer)  # on all ranks
        if self.share is None:
            return []
        kinds = [g.dtype if g.dtype.itemsize >= 4 else torch.float32 for g in self.groups]
        self.sums = ServerShares(self.groups, self.share, kinds, self._in_place(self.flats.gradients, kinds))
        share_of, gradient = self.parameters.local_view, self.sums.between
        return sharded_flat_parameters(self.optimizer, self.groups, self.share, share_of, gradient, is_owner)

    def _in_place(self, arenas: Sequence[Arena], kinds: Sequence[torch.dtype]) -> list[torch.Tensor | None]:
        """Return this rank's memory of whole groups if it only serves and thus has no other use for that memory."""
        serves = self.world.rank not in self.roles.workers
        return [a.tensor if serves and a.tensor.dtype == kind else None for a, kind in zip(arenas, kinds, strict=True)]


def _buckets_of_units(
    module: nn.Module, groups: Sequence[FlatGroup], buckets: Sequence[tuple[int, int]]
) -> list[tuple[nn.Module, list[int]]]:
    """Return the buckets of each unit's parameters, in the order in which they arrive; the module itself comes last.

    Parameters in no unit or in several belong to the module, so they are needed from the start of its forward pass.
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


class ShareUpdate:
    """Optimizer of a server's shares.

    Args:
        sharding: Sharding whose flat parameters are the server's shares, each an interval of one bucket
            (`FlatParameter.bucket`).
        sums: Sums of the gradients; the flat parameters' gradients are views of them.
        published: Parameters that workers pull.
        buckets: Number of buckets.

    Attributes:
        parameters: All trained parameters, in the order of the layout.
        sums: Sums of the gradients, bucket by bucket.
        published: Parameters that workers pull.
    """

    def __init__(self, sharding: Sharding, sums: ServerShares, published: ServerShares, buckets: int) -> None:
        self._sharding, self.published = sharding, published
        self.sums = [sums.bucket(number) for number in range(buckets)]
        self.parameters = [p for group in sharding.groups for p in group.parameters]

    @torch.no_grad()
    def add(self, bucket: int, gradients: torch.Tensor, factor: float = 1.0, *, first: bool) -> None:
        """Add gradients to the sum of a bucket.

        Args:
            bucket: Number of the bucket.
            gradients: This server's share of the bucket's gradients.
            factor: Factor for the gradients; default 1.
            first: If true, overwrite the sum instead of adding to it.
        """
        place = self.sums[bucket]
        if not first:
            place.add_(gradients, alpha=factor)
        elif factor == 1.0:
            place.copy_(gradients)
        elif gradients.dtype == place.dtype:
            torch.mul(gradients, factor, out=place)
        else:
            place.copy_(gradients).mul_(factor)

    @torch.no_grad()
    def apply(self, buckets: Iterable[int], lr: float, factor: float, unused: Set[nn.Parameter] = frozenset()) -> None:
        """Update some buckets with the summed gradients times `factor`.

        Args:
            buckets: Numbers of the buckets.
            lr: Learning rate.
            factor: Factor for the summed gradients.
            unused: Parameters that stay unchanged; default none.
        """
        self._sharding.separate_unused(unused)
        every, bucket_of = self._sharding.flat_parameters, attrgetter("bucket")  # they are in the order of the buckets
        bounds = [(bisect_left(every, n, key=bucket_of), bisect_right(every, n, key=bucket_of)) for n in buckets]
        chosen = [s for lo, hi in bounds for s in every[lo:hi] if not s.is_unused(unused)]
        if not chosen:
            return
        optimizer = self._sharding.optimizer
        set_rate(optimizer, lr)
        for flat_parameter in chosen:
            gradient = flat_parameter.gradient()
            assert gradient is not None
            gradient = gradient.to(flat_parameter.value.dtype)
            flat_parameter.value.grad = gradient if factor == 1.0 else gradient.mul_(factor)
        optimizer_step(optimizer)
        for flat_parameter in chosen:
            flat_parameter.value.grad = None
            flat_parameter.store()


def squares(tensors: list[torch.Tensor]) -> float:
    """Return the sum of the squares of all elements; it is not finite if an element is not."""
    return float(torch.stack(torch._foreach_norm(tensors, 2)).double().square_().sum()) if tensors else 0.0
