"""Model and optimizer as named logical tensors for checkpoints, with the same names at every ZeRO stage.

    model/<parameter or buffer>            as PyTorch names it
    master/<parameter>                     the optimizer's fp32 copy, in 16-bit training
    average/<parameter or buffer>          average over several steps, with train.average
    previous/<parameter>                   values before the last step, with parallel.schedule 2bw
    optimizer/<state>/<parameter>          exp_avg, exp_avg_sq, momentum_buffer, step, ...
    compression/<rank>/<buffer>            error that compression has not yet sent, on each rank

Optimizer states that are not tensors are stored as JSON values. A `Holding` describes the part of a tensor that a rank
has. If all data-parallel ranks have the same part, each of them writes a share of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from mpitrain.checkpoint import MASTER, MODEL, Manifest, Part, TensorSpec
from mpitrain.checkpoint.manifest import AVERAGE, PREVIOUS, source_of
from mpitrain.comm.compression import Compression
from mpitrain.errors import CheckpointError
from mpitrain.layers.lora import require_whole
from mpitrain.layout.boxes import Piece, Slice, shares
from mpitrain.layout.ownership import Division
from mpitrain.parallel.dividing import tied_names
from mpitrain.shard.flat_parameters import FlatParameter, init_states, is_elementwise
from mpitrain.shard.sharding import Sharding

OPTIMIZER, COMPRESSION = "optimizer/", "compression/"
_ELEMENTWISE = "one number per element"  # placeholder for such a state


@dataclass(frozen=True)
class Holding:
    """Part of one logical tensor that a rank has.

    Attributes:
        name: Name of the logical tensor.
        slice: Slice of the logical tensor that the rank's tensor is.
        first: Index of the part's first element in the rank's tensor.
        last: One more than the index of its last element.
        data: These elements, in any shape.
        written: True if this rank writes them; false if a rank along another axis does.
    """

    name: str
    slice: Slice
    first: int
    last: int
    data: torch.Tensor
    written: bool

    @property
    def spec(self) -> TensorSpec:
        """The logical tensor, as the manifest lists it."""
        return TensorSpec(self.name, self.slice.shape, str(self.data.dtype).removeprefix("torch."))

    def parts(self, flat: torch.Tensor, lo: int, hi: int) -> Iterator[Part]:
        """Yield elements [lo, hi) as parts of a checkpoint.

        Args:
            flat: `data`, flattened.
            lo: Index of the first element, counted from the holding's first one.
            hi: One more than the index of the last element.
        """
        for offset, piece in self.slice.pieces(self.name, self.first + lo, self.first + hi):
            yield Part(self.spec, piece, flat[lo + offset : lo + offset + piece.numel])


class EngineState:
    """A rank's tensors of a checkpoint, for writing and reading.

    Args:
        sharding: The module and its optimizer.
        division: Division of the model over ranks, which says which parameters this rank writes.
    """

    def __init__(self, sharding: Sharding, division: Division) -> None:
        self._sharding, self._division = sharding, division
        self._owners, self._staged, self._base = sharding.owners, division.pipeline is not None, division.base
        self._aliases = dict(division.aliases) if division.aliases is not None else tied_names(sharding.module)
        self._names = {p: self._aliases.get(name, name) for name, p in sharding.module.named_parameters()}
        self._versions = division.pipeline.versions if division.pipeline is not None else None
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._states: list[tuple[FlatParameter, dict[str, torch.Tensor], list[dict[str, Any]]]] = []
        rank = sharding.comm.world_ranks[sharding.comm.rank]
        self._errors = CompressionErrors(f"{COMPRESSION}{rank}/", sharding.compression)

    # -- tensors of this rank

    def _replicated(self) -> list[Holding]:
        """Return the tensors that every data-parallel rank has.

        These are buffers and their averages, frozen parameters, and at stage 0 all parameters.
        """
        saved_names = set(self._sharding.module.state_dict())
        unsaved = self._base.names if self._base is not None else frozenset()
        parameters = [p for p, n in self._names.items() if not self._owners[p].shared and n not in unsaved]
        holdings = [self.holding(MODEL, p, 0, p.numel(), p.detach()) for p in parameters]
        for name, buffer in self._sharding.module.named_buffers():
            if name in saved_names:
                owner = self._division.owner(name, buffer)
                values = {MODEL: buffer, AVERAGE: self._sharding.buffer_averages.get(name)}
                holdings += [
                    Holding(prefix + name, owner.slice, 0, value.numel(), value, owner.is_owner)
                    for prefix, value in values.items()
                    if value is not None
                ]
        return holdings

    def _shares(self) -> list[Holding]:
        """Return the parameters in this rank's shares."""
        sharding = self._sharding
        if not sharding.stage.states or sharding.share is None:
            return []
        holdings = []
        for g, group in enumerate(sharding.groups):
            for b in range(group.layout.buckets):
                for n, first, last, at in group.layout.within(*group.layout.share(b, sharding.share)):
                    data = sharding.parameters.local_view(g, at, at + last - first)
                    holdings.append(self.holding(MODEL, group.parameters[n], first, last, data))
        return holdings

    def _of_optimizer(self, prefix: str, tensor_of: Callable[[FlatParameter], torch.Tensor | None]) -> list[Holding]:
        """Return the tensors that have one element per parameter element.

        Args:
            prefix: Prefix of the logical tensors' names.
            tensor_of: Function that returns the tensor of a flat parameter; None if it has none.
        """
        holdings = []
        for flat_parameter in self._sharding.flat_parameters:
            tensor = tensor_of(flat_parameter)
            if tensor is None:
                continue
            for p, first, last, at in flat_parameter.contents:
                data = tensor if tensor.numel() == last - first else tensor.view(-1)[at : at + last - first]
                holdings.append(self.holding(prefix, p, first, last, data))
        return holdings

    def _masters(self, *, wider: bool) -> list[Holding]:
        """Return the optimizer's copies of parameters; if `wider`, only those more precise than the parameters."""

        def master(flat: FlatParameter) -> torch.Tensor | None:
            included = flat.stored is not None and not (wider and flat.stored.dtype == flat.value.dtype)
            return flat.value.detach() if included else None

        return self._of_optimizer(MASTER, master)

    def _averages(self) -> list[Holding]:
        """Return the averages of the optimizer's parameters; empty without train.average."""
        return self._of_optimizer(AVERAGE, lambda flat: flat.average)

    def _previous(self) -> list[Holding]:
        """Return the parameters before the last step, for a schedule that keeps them; otherwise nothing."""
        others = self._versions.others if self._versions is not None else {}
        return [self.holding(PREVIOUS, p, 0, p.numel(), value) for p, value in others.items()]

    def _elementwise(self, key: str, flat_parameter: FlatParameter) -> torch.Tensor | None:
        """Return an optimizer state if it has one number per element, and None otherwise."""
        value = self._sharding.optimizer.state.get(flat_parameter.value, {}).get(key)
        return value if is_elementwise(value, flat_parameter.value) else None

    def trained_elements(self) -> int:
        """Return the number of elements of trained parameters that the data-parallel ranks write altogether."""
        groups = self._sharding.groups
        return sum(
            self._owners[p].slice.numel for group in groups for p in group.parameters if self._owners[p].is_owner
        )

    def holding(self, prefix: str, parameter: nn.Parameter, first: int, last: int, data: torch.Tensor) -> Holding:
        """Return elements [first, last) of this rank's part of a parameter, or of a tensor with the same layout.

        Args:
            prefix: Prefix of the logical tensor's name.
            parameter: The parameter.
            first: Index of the first element in this rank's part.
            last: One more than the index of the last element.
            data: These elements.
        """
        owner = self._owners[parameter]
        return Holding(prefix + self._names[parameter], owner.slice, first, last, data, owner.is_owner)

    # -- writing

    def parts(self, *, alone: bool = False) -> tuple[list[Part], dict[str, Any]]:
        """Return the parts that this rank writes into a checkpoint, and the values stored with them.

        Args:
            alone: If true, also write everything that other data-parallel ranks have too, instead of a share of it.
        """
        sharding = self._sharding
        rank, size = (0, 1) if alone else (sharding.comm.rank, sharding.comm.size)
        keys = sorted({key for state in sharding.optimizer.state.values() for key in state})
        states = [h for key in keys for h in self._of_optimizer(f"{OPTIMIZER}{key}/", partial(self._elementwise, key))]
        small, values = self._other_states()
        common, sharded = self._replicated(), self._shares()
        (sharded if sharding.stage.states else common).extend(
            [*self._masters(wider=True), *self._averages(), *self._previous(), *states, *small]
        )
        first = sharding.replicas is None or sharding.replicas.rank == 0
        common = [h for h in common if h.written and sharding.writes_copies]
        ranges = shares([h.last - h.first for h in common], size, rank)  # this rank's share of tensors that all have
        parts = [part for n, lo, hi in ranges for part in common[n].parts(_flat(common[n].data), lo, hi)]
        parts += [p for h in sharded if first and h.written for p in h.parts(_flat(h.data), 0, h.last - h.first)]
        if rank == 0 and sharding.writes_copies:  # tensors without elements are in no share
            empty = [self.holding(MODEL, p, 0, 0, p.detach()) for p in self._names if not p.numel()]
            parts += [Part(h.spec, Piece.whole(h.name, 0), h.data.reshape(-1)) for h in empty if h.written]
        parts += self._errors.parts()
        manifest_values = {"optimizer": values, "data_ranks": sharding.comm.size, "tied": self._aliases}
        if self._base is not None:  # adapters are saved without their base model
            names = self._base.names
            tied = {alias: name for alias, name in self._aliases.items() if name not in names}
            manifest_values |= {"tied": tied, "left_out": sorted(names), "base": self._base.values()}
        return parts, manifest_values

    def _other_states(self) -> tuple[list[Holding], dict[str, dict[str, Any]]]:
        """Return optimizer states without one number per element: small tensors, and values.

        The rank with the first element of a parameter returns its states.
        """
        tensors: list[Holding] = []
        values: dict[str, dict[str, Any]] = {}
        for flat_parameter in self._sharding.flat_parameters:
            for key, value in self._sharding.optimizer.state.get(flat_parameter.value, {}).items():
                for p, first, _, _ in flat_parameter.contents:
                    name = self._names[p]
                    if torch.is_tensor(value):
                        if self._elementwise(key, flat_parameter) is None and first == 0:
                            part, written = Slice.whole(value.shape), self._owners[p].is_leader
                            tensors.append(Holding(f"{OPTIMIZER}{key}/{name}", part, 0, part.numel, value, written))
                    elif value is None or isinstance(value, (bool, int, float, str)):
                        values.setdefault(name, {})[key] = value
                    else:
                        raise CheckpointError(
                            f"optimizer state {key!r} of {name} is a {type(value).__name__}, which cannot be saved; "
                            "use an optimizer whose state is tensors and numbers",
                            agreed=True,
                        )
        return tensors, values

    # -- reading

    def parts_to_load(self, manifest: Manifest) -> list[Part]:
        """Return the parts that this rank reads from a checkpoint of any layout.

        `finish_load` then puts them in place.
        """
        if self._base is not None:
            self._base.require(manifest.values.get("base"))
        else:
            require_whole(manifest.values.get("base"))
        self._pending = []
        parts: list[Part] = []
        parameters = [*self._replicated(), *self._shares(), *self._masters(wider=False), *self._averages()]
        for holding in [*parameters, *self._previous(), *self._empty_states(manifest)]:
            source, dtype = _source(manifest, holding)
            data = holding.data
            direct = data.is_contiguous() and data.dtype == dtype
            flat = data.view(-1) if direct else torch.empty(data.numel(), dtype=dtype, device=data.device)
            if not direct:
                self._pending.append((holding.data, flat))
            parts += replace(holding, name=source, data=flat).parts(flat, 0, holding.last - holding.first)
        same_ranks = manifest.values.get("data_ranks") == self._sharding.comm.size
        return parts + self._errors.parts_to_load(manifest, self._sharding.groups[0].device, same_ranks=same_ranks)

    def _empty_states(self, manifest: Manifest) -> list[Holding]:
        """Return optimizer states to be filled from the checkpoint, for the parameters of each flat parameter."""
        keys: dict[str, list[tuple[str, TensorSpec]]] = {}
        for name, spec in manifest.tensors.items():
            if name.startswith(OPTIMIZER):
                key, _, parameter = name.removeprefix(OPTIMIZER).partition("/")
                keys.setdefault(parameter, []).append((key, spec))
        values = manifest.value("optimizer")
        holdings: list[Holding] = []
        self._states = []
        for flat_parameter in self._sharding.flat_parameters:
            state: dict[str, torch.Tensor] = {}
            odd: list[dict[str, Any]] = []  # for each parameter: states that are not elementwise, and placeholders
            for p, first, last, at in flat_parameter.contents:
                name, states = self._names[p], dict[str, Any]()
                for key, spec in keys.get(name, ()):
                    if tuple(spec.shape) == self._owners[p].slice.shape and spec.shape:
                        if key not in state:
                            kind, like = getattr(torch, spec.dtype), flat_parameter.value
                            state[key] = torch.zeros(like.shape, dtype=kind, device=like.device)
                        data, states[key] = state[key].view(-1)[at : at + last - first], _ELEMENTWISE
                        holdings.append(self.holding(f"{OPTIMIZER}{key}/", p, first, last, data))
                    else:
                        device = self._device_of(flat_parameter, spec)
                        states[key] = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
                        part = Slice.whole(spec.shape)
                        holdings.append(Holding(f"{OPTIMIZER}{key}/{name}", part, 0, part.numel, states[key], True))
                odd.append(states | values.get(name, {}))
            self._states.append((flat_parameter, state, odd))
        unknown = sorted(set(keys) - set(self._names.values()))
        if unknown and not self._staged:
            raise CheckpointError(f"the checkpoint has optimizer states of {unknown[0]}, which this model lacks")
        return holdings

    def _device_of(self, flat_parameter: FlatParameter, spec: TensorSpec) -> torch.device:
        """Return the device of a state that is not elementwise.

        As in torch, scalars are on the host, unless the optimizer is fused or capturable.
        """
        settings = self._sharding.optimizer.param_groups[flat_parameter.settings]
        one_kernel = settings.get("fused") or settings.get("capturable")
        return flat_parameter.value.device if spec.shape or one_kernel else torch.device("cpu")

    @torch.no_grad()
    def finish_load(self) -> None:
        """Put the parts that were read in place. Collective."""
        for tensor, filled in self._pending:
            tensor.copy_(filled.view(tensor.shape))
        self._pending = []
        self._sharding.parameters.publish()
        optimizer = self._sharding.optimizer
        optimizer.state.clear()
        for flat_parameter, state, odd in self._states:
            optimizer.state[flat_parameter.value] = dict(state)
            keys = [{k: v.tolist() if torch.is_tensor(v) else v for k, v in states.items()} for states in odd]
            owners = iter(odd)
            for piece in self._sharding.divide(flat_parameter, keys):  # separates parameters with different states
                states, *_ = [next(owners) for _ in piece.contents]
                before = optimizer.state.pop(piece.value, {})
                if states:
                    optimizer.state[piece.value] = {
                        key: before[key] if value is _ELEMENTWISE else value for key, value in states.items()
                    }
        init_states(optimizer)
        self._states = []
        self._errors.finish_load()


class CompressionErrors:
    """Compression errors that this rank has not yet sent; they differ between ranks.

    Args:
        prefix: Prefix of the tensors' names in a checkpoint.
        compression: Compression that has the errors; None if gradients are not compressed.
    """

    def __init__(self, prefix: str, compression: Compression | None) -> None:
        self._prefix, self._compression = prefix, compression
        self._loading: dict[str, torch.Tensor] = {}

    def parts(self) -> list[Part]:
        """Return the parts to write into a checkpoint."""
        return self._parts(self._compression.state_dict() if self._compression is not None else {})

    def parts_to_load(self, manifest: Manifest, device: torch.device, *, same_ranks: bool) -> list[Part]:
        """Return the parts to read from a checkpoint.

        Args:
            manifest: Manifest of the checkpoint.
            device: Device of the tensors.
            same_ranks: If true, the same number of ranks wrote the checkpoint; otherwise no parts are read.
        """
        specs = {n: s for n, s in manifest.tensors.items() if n.startswith(self._prefix)}
        self._loading = {
            name.removeprefix(self._prefix): torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
            for name, spec in specs.items()
            if same_ranks and self._compression is not None
        }
        return self._parts(self._loading)

    def finish_load(self) -> None:
        """Continue with the errors that were read."""
        if self._compression is not None:
            self._compression.load_state_dict(self._loading)
        self._loading = {}

    def _parts(self, tensors: Mapping[str, torch.Tensor]) -> list[Part]:
        holdings = [Holding(self._prefix + n, Slice.whole(t.shape), 0, t.numel(), t, True) for n, t in tensors.items()]
        return [part for h in holdings for part in h.parts(_flat(h.data), 0, h.last)]


def _source(manifest: Manifest, holding: Holding) -> tuple[str, torch.dtype]:
    """Return the name of the tensor from which a holding is filled, and the dtype to read it in."""
    dtype = holding.data.dtype
    name = source_of(manifest, holding.name, dtype)
    spec = manifest.tensors.get(name)
    stored = getattr(torch, spec.dtype) if spec is not None else dtype
    return name, stored if stored.is_floating_point and dtype.is_floating_point else dtype


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as one contiguous dimension."""
    return tensor.detach().contiguous().view(-1)


def merge_states(states_of_ranks: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Merge the optimizer states that several ranks have, by name of the parameter."""
    combined: dict[str, dict[str, Any]] = {}
    for of_rank in states_of_ranks:
        for name, states in of_rank.items():
            combined.setdefault(name, {}).update(states)
    return combined
