"""Common implementation of DDP and ZeRO: each stage combines placements of parameters, gradients and optimizer states.

    stage   parameters, if a node's ranks ... share memory / do not       gradients            optimizer states
    0       ReplicatedParameters     ReplicatedParameters                 WholeGradients       whole
    1       NodeParameters           PrivateParameters                    WholeGradients       shares
    2       NodeParameters           PrivateParameters                    ShardedGradients     shares
    3       NodeParameters           ShardedParameters                    ShardedGradients     shares

With NodeParameters a rank updates its share in place, and nothing has to be gathered within the node. Reproducible
training uses WholeGradients at every stage, because it sums the gradients of several virtual workers in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mpitrain.comm import Communicator
from mpitrain.comm.communicator import NodeCopy
from mpitrain.comm.compression import Compression, from_name
from mpitrain.comm.memory.device import is_accelerator
from mpitrain.config.settings import Config
from mpitrain.errors import refusal
from mpitrain.layout.ownership import Division
from mpitrain.shard.bucket_reduction import BucketReduction
from mpitrain.shard.flat import MULTIPLE, FlatGroup, flat_groups, in_backward_order, members, unit_groups, units_of
from mpitrain.shard.flat_parameters import (
    FlatParameter,
    GradientOf,
    has_stepped,
    init_states,
    is_elementwise,
    is_shardable,
    replace_parameters,
    replicated_flat_parameters,
    sharded_flat_parameters,
)
from mpitrain.shard.gradients import Gradients, ShardedGradients, WholeGradients
from mpitrain.shard.offload import HOST, HostUpdate, MappedFiles
from mpitrain.shard.parameters import (
    NodeParameters,
    Parameters,
    PrivateParameters,
    ReplicatedParameters,
    shard_order,
)
from mpitrain.shard.placement import (
    STAGES,
    ZeroStage,
    bucket_size,
    conflict,
    is_elsewhere,
    node_has_one_copy,
    stage_of,
)
from mpitrain.shard.reducer import Reducer
from mpitrain.shard.sharded_parameters import ShardedParameters

EXACT_BLOCK = 1024  # elements whose squares are summed together if sums must not depend on the number of ranks


class Sharding:
    """A module and its optimizer, placed over the data-parallel ranks. The constructor is collective.

    Args:
        module: Module whose parameters are trained; they must be the same on all ranks.
        optimizer: Optimizer of these parameters; with sharded states it gets this rank's flat parameters instead.
        comm: Data-parallel ranks.
        config: Configuration; run.reproducible, [parallel] and [comm] define the placement.
        division: Division of the model over the axes of a mesh; None if it is not divided.
        reduce_dtype: Dtype in which gradients are added up and reduced; None for the parameters' dtype.

    Attributes:
        compression: Compression of gradients during communication; None to send them uncompressed.
        zero: Stage of ZeRO.
        owners: Ownership record of each parameter of the module.
        shard: Ranks that shares are divided over.
        replicas: Ranks that have the same share as this one; None if there are no others.
        share: Number of this rank's share; None if it has none.
        groups: Trained parameters and their places in flat memory.
        parameters, gradients: Placements of parameters and gradients.
        flat_parameters: Flat parameters that this rank's optimizer updates.
        buffer_averages: Averages of the module's buffers over several steps, by name; empty without train.average.
        host: Copies between device and host if the host updates a device's parameters; otherwise None.
        files: Files of the optimizer states; None if they are in memory.
        writes_copies: If true, this rank takes part in saving state that every data-parallel rank has whole.

    Raises:
        InputError: Options that are incompatible with each other or with the optimizer.
    """

    writes_copies = True

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        comm: Communicator,
        config: Config,
        division: Division | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.module, self.optimizer, self.comm, division = module, optimizer, comm, division or Division()
        self.config, self.parallel, self.reduce_dtype = config, config.parallel, reduce_dtype
        self.zero = stage_of(config, comm.size, shardable=is_shardable(optimizer))
        self._gathers_as = _parameter_compression(config, self.zero)
        kind = config.comm.compression
        self.compression = None if kind == "none" else from_name(kind)
        self._staged = division.pipeline is not None  # gradients of pipeline stages are added up without backward hooks
        self._communicators: list[Communicator] = []
        folder = self.parallel.offload
        self.files = MappedFiles(Path(folder)) if folder not in ("", HOST) else None
        self.buffer_averages: dict[str, torch.Tensor] = {}
        self.shard, self.replicas = self._split_ranks()
        self.share: int | None = self.shard.rank
        names = {p: name for name, p in module.named_parameters()}
        trained = in_backward_order(module)
        if not trained:
            raise refusal("the model has no parameter to train; set requires_grad=True for some")
        self.owners = {p: division.owner(name, p) for p, name in names.items()}
        for p, owner in self.owners.items():
            if division.copies(owner, comm) != [comm]:
                raise refusal(
                    f"{names[p]} is divided over ranks that sum gradients, but each of these ranks needs all of it; "
                    "divide it along an axis that divides layers"
                )
        for p in trained if self.stage.states else ():
            self.owners[p] = replace(self.owners[p], shared=True)
        self.groups, self.parameters = self._place_parameters(trained)
        if any(p.requires_grad and p not in names for group in optimizer.param_groups for p in group["params"]):
            raise refusal("the optimizer has parameters that are not the model's; pass it only the model's")
        self.gradients = gradients = self._place_gradients()
        whose = None if self._staged else module  # split backward computes weight gradients later
        self.reducer = Reducer(gradients, names, whose, unused_allowed=True, forget_unused=not self.stage.states)
        self.flat_parameters = self._flat_parameters(lambda p: self.owners[p].is_owner)
        if self.stage.states or any(s.stored is not None for s in self.flat_parameters):
            replace_parameters(optimizer, self.flat_parameters)
        elif not has_stepped(optimizer):
            init_states(optimizer)  # for parameters that were divided after the optimizer was constructed
        device, parallel = self.groups[0].device, self.parallel
        self.host: HostUpdate | None = None
        if (parallel.offload or parallel.offload_parameters) and is_accelerator(device):
            self.host = HostUpdate(self.flat_parameters, device, lambda: self.reducer.last)
            gradients.on_reduced = self.host.copy_bucket

    @property
    def stage(self) -> ZeroStage:
        """Placements of the stage of ZeRO."""
        return STAGES[self.zero]

    def _split_ranks(self) -> tuple[Communicator, Communicator | None]:
        """Return the ranks that shares are divided over, and the ranks with the same share as this one. Collective."""
        comm = self.comm
        if not self.stage.states or comm.size == 1:
            return comm, None
        if self.parallel.shard_within == "node":
            node = self._subgroup(comm.neighbours, "shard")
            replicas = self._subgroup(comm.counterparts, "replicas")
            if shard_order(comm) is None:
                raise refusal(
                    "parallel.shard_within node needs the same number of ranks on each node; start the job that way"
                )
            return node, replicas if replicas.size > 1 else None
        order = shard_order(comm)
        if comm.num_nodes > 1 and order is not None and self.parallel.share_node:
            return self._subgroup(order, "shard"), None
        return comm, None

    def _subgroup(self, ranks: Sequence[int], name: str) -> Communicator:
        """Return a communicator of some ranks, this one included, freed by `close`. Collective over them."""
        communicator = self.comm.subgroup(ranks, label=f"{self.comm.label}/{name}")
        assert communicator is not None
        self._communicators.append(communicator)
        return communicator

    def _place_parameters(self, trained: list[nn.Parameter]) -> tuple[list[FlatGroup], Parameters]:
        """Lay the parameters out, and move them to their places for this stage. Collective."""
        parallel, shard, reproducible = self.parallel, self.shard, self.config.run.reproducible
        multiple = EXACT_BLOCK if reproducible else MULTIPLE
        parts = shard.size if self.stage.states else 1
        on_device = any(is_accelerator(p.device) for p in trained)
        sharded = self.stage.gradients and not reproducible
        bucket_mb = bucket_size(self.config.comm.bucket_mb, sharded, shard.overlaps, shard.num_nodes, on_device)
        groups = flat_groups(trained, bucket_mb, parts, multiple)
        asked = parallel.offload_parameters
        offload = asked if is_elsewhere(asked, on_device) else ""
        placed = self._share_on_node(groups) if self.stage.states and not offload else None
        one_copy, staged = placed is not None, self._staged
        if why := conflict(self.zero, shard.size, staged=staged, one_copy=one_copy, offload=asked, on_device=on_device):
            raise refusal(why)
        if not self.stage.states:
            return groups, ReplicatedParameters(groups)
        if placed is not None:
            return groups, placed
        if not self.stage.parameters or (shard.size == 1 and (parallel.share_node or self._staged) and not offload):
            return groups, PrivateParameters(groups, shard, self._gathers_as)
        units = units_of(self.module)
        groups = unit_groups(members(self.module, units), parts, multiple)
        if shard.size == 1 and not offload:
            return groups, PrivateParameters(groups, shard)
        return groups, ShardedParameters(
            self.module,
            units,
            groups,
            shard,
            reshard_after_forward=parallel.reshard,
            offload=offload,
            compression=self._gathers_as,
        )

    def _share_on_node(self, groups: list[FlatGroup]) -> NodeParameters | None:
        """Return one copy of the parameters per node; None if memory cannot or must not be shared. Collective."""
        comm = self.comm
        on_device, even = any(is_accelerator(g.device) for g in groups), shard_order(comm) is not None
        if not node_has_one_copy(self.stage, self.parallel.share_node, on_device, even):
            return None
        copies: list[NodeCopy] = []
        for group in groups:
            copy = comm.node_copy(group.layout.numel, group.dtype)
            if copy is None:
                for node_copy in copies:
                    node_copy.free()
                return None
            copies.append(copy)
        carried = comm.num_nodes > 1 and self.replicas is None
        cross_node = self._subgroup(comm.counterparts, "carriers") if carried else None
        return NodeParameters(groups, copies, comm, cross_node, self.shard.rank, self._gathers_as)

    def _place_gradients(self) -> Gradients:
        """Return the placement of the gradients for this stage, with its memory. Collective."""
        reproducible = self.config.run.reproducible
        rings = range(2, self.config.comm.rings + 1) if self.shard.overlaps else ()
        others = [self.shard.split(0, label=f"{self.shard.label}/ring {ring}") for ring in rings]
        self._communicators += others
        reduction = BucketReduction(
            [self.shard, *others],
            "sum",
            algorithm=self.config.comm.algorithm,
            compression=self.compression,
            replicas=self.replicas,
            # stages of a pipeline add in a fixed order too, so that copies of tied parameters stay equal to the bit
            reproducible=reproducible or self._staged,
        )
        if self.stage.gradients and not reproducible:
            on_copied = self.parameters.mark_copied if self.parameters.gathers else None
            return ShardedGradients(self.groups, reduction, dtype=self.reduce_dtype, on_copied=on_copied)
        return WholeGradients(self.groups, reduction, sharded=self.stage.states, dtype=self.reduce_dtype)

    def _flat_parameters(self, is_owner: Callable[[nn.Parameter], bool]) -> list[FlatParameter]:
        """Return the flat parameters that this rank's optimizer updates."""
        on_host = bool(self.parallel.offload)  # also on the way to files
        if self.stage.states:
            share_of, gradient = self.parameters.local_view, self.gradients.local_view
            return sharded_flat_parameters(
                self.optimizer,
                self.groups,
                self.shard.rank,
                share_of,
                gradient,
                is_owner,
                on_host=on_host,
                gathered=True,
            )
        gradient_of: GradientOf = attrgetter("grad")
        if self.reduce_dtype is not None:  # gradients in another dtype are not in `.grad`
            gradient_of = self.gradient_views().__getitem__
        return replicated_flat_parameters(self.optimizer, gradient_of, is_owner, on_host=on_host)

    def gradient_views(self) -> dict[nn.Parameter, torch.Tensor]:
        """Return the place of each parameter's gradient as a view. Every rank must keep all gradients."""
        pairs = zip(self.groups, self.gradients.flat, strict=True)
        return {p: view for group, flat in pairs for p, view in zip(group.parameters, group.views(flat), strict=True)}

    def reduced_gradients(self) -> Iterator[torch.Tensor]:
        """Yield the reduced gradients of this rank, bucket by bucket."""
        for g, group in enumerate(self.groups):
            for b in range(group.layout.buckets):
                lo, hi = group.layout.share(b, self.shard.rank if self.stage.states else 0)
                if lo < hi:
                    yield self.gradients.local_view(g, lo, hi)

    def separate_unused(self, unused: Set[nn.Parameter]) -> None:
        """Divide flat parameters so that none of them contains both unused and used parameters."""
        for flat in list(self.flat_parameters) if unused else ():
            self.divide(flat, [p in unused for p, *_ in flat.contents])

    def divide(self, flat: FlatParameter, keys: Sequence[object]) -> list[FlatParameter]:
        """Divide a flat parameter between neighbours whose keys differ; the optimizer updates the pieces separately.

        Args:
            flat: Flat parameter.
            keys: One key per parameter, in order.

        Returns:
            The flat parameters that replace it.
        """
        if all(key == keys[0] for key in keys):
            return [flat]
        optimizer = self.optimizer
        if self.files is not None:
            self.files.move_states(flat, optimizer.state[flat.value])
        pieces, state = flat.pieces(keys), optimizer.state.pop(flat.value, {})
        for piece, part in pieces if state else ():
            optimizer.state[piece.value] = {key: _part_of(of, flat.value, part) for key, of in state.items()}
        flat_pieces = [piece for piece, _ in pieces]
        values = optimizer.param_groups[flat.settings]["params"]
        at = next(n for n, value in enumerate(values) if value is flat.value)
        values[at : at + 1] = [piece.value for piece in flat_pieces]
        at = next(n for n, other in enumerate(self.flat_parameters) if other is flat)
        self.flat_parameters[at : at + 1] = flat_pieces
        if self.host is not None:
            self.host.set_flat_parameters(self.flat_parameters)
        for each in getattr(optimizer, "parts", [optimizer]):
            if getattr(each, "gather", None) is not None:
                in_groups = {value for group in each.param_groups for value in group["params"]}
                each.gather.set_flat_parameters([other for other in self.flat_parameters if other.value in in_groups])
        return flat_pieces

    def close(self) -> None:
        """Give every parameter its own memory, and release arenas and communicators. Collective."""
        self.reducer.close()
        self.parameters.free()
        self.gradients.free()
        while self._communicators:
            self._communicators.pop().free()


def _parameter_compression(config: Config, zero: int) -> Compression | None:
    """Return the compression of the parameters that ranks gather; None to gather them as they are."""
    kind = config.comm.parameter_compression
    if kind == "none":
        return None
    if not STAGES[zero].states:
        raise refusal(
            f"comm.parameter_compression {kind} is for parameters that ranks gather, but with parallel.zero {zero} "
            "every rank updates all of them; set parallel.zero to 1, 2 or 3"
        )
    if config.run.reproducible:
        raise refusal(
            f"comm.parameter_compression {kind} rounds parameters in blocks that depend on the number of ranks, which "
            "run.reproducible excludes; set comm.parameter_compression to none"
        )
    return from_name(kind)


def _part_of(state: Any, value: torch.Tensor, part: slice) -> Any:
    """Return a piece's part of one optimizer state of a flat parameter."""
    if is_elementwise(state, value):
        return state[part]
    return state.clone() if torch.is_tensor(state) else state
