"""The model that a profile measures: a task, its blocks, and samples, divided as one rank of a layout has it.

A `Cut` is a copy of the model as one rank has it. Its tensors are either real or fake: fake ones (PyTorch's
FakeTensorMode) have shapes, dtypes and lifetimes, and take neither memory nor time. Of equal blocks, only the first is
copied, divided and observed.

One process plays rank 0 of each axis, without the other ranks. The model's plan divides the layers over the tensor
ranks, and batch norms are synchronized over the data-parallel ranks. Exchanges with the other ranks are recorded but
not carried out: a tensor of the right shape is returned at once, whose values mean nothing.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm

from mpitrain.choices import Precision
from mpitrain.config.settings import Config
from mpitrain.data import Description
from mpitrain.data.format import TRAIN
from mpitrain.data.mix import check_data, open_split
from mpitrain.errors import InputError, refusal
from mpitrain.layers.precision import DTYPES, convert
from mpitrain.layers.sync_batchnorm import SyncBatchNorm
from mpitrain.layout.mesh import LAYERS, MeshAxis
from mpitrain.models import Task, build_model
from mpitrain.parallel.costs import REPLICAS, AxisExchange, Divided
from mpitrain.parallel.dividing import ModelPart, in_order
from mpitrain.parallel.layouts import sizes_of
from mpitrain.pipe.partition import listed_blocks, require_look_back, slice_sequences
from mpitrain.tensor.axis import Axis, RngTracker
from mpitrain.tensor.plan import plan_for

if TYPE_CHECKING:
    from mpitrain.comm import Communicator


# -- a model as the configuration makes it


class StandIn(Axis):
    """Stand-in for rank 0 of an axis that divides layers, in a process without the other ranks.

    Args:
        size: Ranks of the axis.
        name: Name of the axis.
        times: If true, passes are timed. Results then share memory and are not computed, so that they cost no time.

    Attributes:
        exchanges: Exchanges recorded since this list was last replaced.
    """

    def __init__(self, size: int, name: str = "tensor", times: bool = False) -> None:
        self.rank, self.size, self.name = 0, size, name
        self.rng = RngTracker(0) if times else _NoStreams(0)
        self.column_input: object = None
        self.exchanges: list[AxisExchange] = []
        self._tags = 0
        self._slots = None
        self._pool: dict[tuple[Any, ...], torch.Tensor] | None = {} if times else None

    def all_reduce(self, x: torch.Tensor, tag: int = 0) -> torch.Tensor:
        """Record the exchange, and return a tensor of the shape of x.

        Args:
            x: Tensor of any shape.
            tag: Ignored.
        """
        self.exchanges.append(AxisExchange("all_reduce", x.nbytes, self.name))
        return self._like(x, x.shape)

    def reduce_scatter(self, x: torch.Tensor, dim: int, lengths: Sequence[int] | None = None) -> torch.Tensor:
        """Record the exchange, and return a tensor of the shape of rank 0's part of x.

        Args:
            x: Tensor of any shape.
            dim: Dimension that is divided over the ranks.
            lengths: Length of each rank's part. Default: as even as possible.
        """
        self.exchanges.append(AxisExchange("reduce_scatter", x.nbytes, self.name))
        return self._like(x, _resized(x.shape, dim, lengths[0] if lengths else self.bounds(x.shape[dim])[1]))

    def all_gather(
        self, x: torch.Tensor, dim: int, tag: int = 0, lengths: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, list[int]]:
        """Record the exchange, and return a tensor of the shape of all ranks' x, and the length of each rank's x.

        Args:
            x: Tensor of any shape.
            dim: Dimension along which the ranks' tensors are joined.
            tag: Ignored.
            lengths: Length of each rank's x along `dim`. Default: that of this x.
        """
        all_lengths = list(lengths) if lengths is not None else [x.shape[dim]] * self.size
        whole = self._like(x, _resized(x.shape, dim, sum(all_lengths)))
        self.exchanges.append(AxisExchange("all_gather", whole.nbytes, self.name))
        return whole, all_lengths

    def _like(self, x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        if self._pool is None:
            return x.new_empty(shape)
        key = (tuple(shape), x.dtype, x.device)
        pooled = self._pool.get(key)
        if pooled is None:
            pooled = self._pool[key] = x.new_full(tuple(shape), 0.01)
        # not a view in autograd, so that it may be written to in place
        return pooled.new_empty(0).set_(pooled.untyped_storage(), 0, pooled.shape, pooled.stride())


class _NoStreams(RngTracker):
    """Random generators that do nothing, because there are no generator states for tensors without values."""

    def enter(self, opener: object, device: torch.device) -> None:
        """Do nothing."""

    def leave(self, opener: object = None) -> None:
        """Do nothing."""


class GroupStandIn:
    """Stand-in for a communicator of several ranks that leaves rank 0's tensors unchanged and records the exchanges.

    Args:
        size: Number of ranks.
        name: Name of the axis of these ranks, or REPLICAS.

    Attributes:
        exchanges: Exchanges recorded since this list was last replaced.
    """

    def __init__(self, size: int, name: str) -> None:
        self.rank, self.size, self.name = 0, size, name
        self.exchanges: list[AxisExchange] = []

    def all_reduce(self, x: torch.Tensor, op: str = "sum", algorithm: str = "auto") -> None:
        """Record the exchange; x does not change, and the other arguments make no difference."""
        self.exchanges.append(AxisExchange("all_reduce", x.nbytes, self.name))

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, algorithm: str = "auto") -> None:
        """Record the exchange, and write nothing.

        Args:
            out: Tensor for the x of all ranks; only its size is used.
            x: Ignored.
            algorithm: Ignored.
        """
        self.exchanges.append(AxisExchange("all_gather", out.nbytes, self.name))


def _resized(shape: Sequence[int], dim: int, length: int) -> tuple[int, ...]:
    changed = list(shape)
    changed[dim] = length
    return tuple(changed)


class EqualBlock(nn.Module):
    """Placeholder, in a copied model, for a block that is equal to an earlier one."""


def first_equal_blocks(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], patterns: Iterable[str]) -> list[int]:
    """Return for each block the number of the first block that is equal to it, which may be its own number.

    Blocks are equal if they do the same, share no parameters with other blocks, and the same patterns match their
    layers.

    Args:
        model: The whole model.
        blocks: Blocks of the model in order, with their names.
        patterns: Patterns of the names of modules that will be treated differently.
    """
    owners = Counter(id(p) for _, block in blocks for p in block.parameters())
    names = {module: name for name, module in model.named_modules()}
    several = Counter(block for _, block in blocks)
    known: dict[Any, int] = {}
    firsts = []
    for number, (_, block) in enumerate(blocks):
        independent = all(owners[id(p)] == 1 for p in block.parameters()) and several[block] == 1
        key: Any = number
        if independent and block in names and any(True for _ in block.parameters()):
            inside = [(m, [p for p in patterns if fnmatchcase(names.get(m, ""), p)]) for m in block.modules()]
            key = signature(block), tuple(tuple(matching) for _, matching in inside)
        firsts.append(known.setdefault(key, number))
    return firsts


def signature(block: nn.Module) -> Any:
    """Return a key that is equal for blocks that do the same: structure, attributes, and shapes of the parameters."""
    simple = (int, float, str, bool, tuple, type(None))
    structure: list[Any] = []
    for name, module in block.named_modules():
        attributes = tuple((k, repr(v)) for k, v in vars(module).items() if isinstance(v, simple))
        hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
        structure.append((name, type(module), attributes, hooks))
    return tuple(structure), tuple((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in block.named_parameters())


@dataclass
class Cut:
    """A copy of the model as one rank has it.

    Attributes:
        module: The model.
        blocks: (name, module) of each block in order; one block without a name if the model lists none.
        loss: Loss of the last block's output and the target.
        groups: Stand-ins for the ranks of each axis that changes layers, and the last one for the replicas.
        fake: Mode in which its tensors are made and used; None if the tensors are real.
        slices: Pieces of each sequence.
        samples: Function that makes (x, y) of a number of samples, or of a slice of them.
        precision: Precision of its parameters.
        first_equal: Number of the first block that is equal to each block. Without values, `blocks` has one module for
            all equal blocks, and the model does not contain the others.
    """

    module: nn.Module
    blocks: list[tuple[str, nn.Module]]
    loss: Callable[[Any, Any], torch.Tensor]
    groups: Sequence[StandIn | GroupStandIn]
    fake: FakeTensorMode | None
    slices: int
    samples: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    precision: Precision
    first_equal: list[int]

    def mode(self) -> AbstractContextManager[Any]:
        """Return the context manager in which passes through the model run."""
        return self.fake if self.fake is not None else nullcontext()

    def take_exchanges(self) -> tuple[AxisExchange, ...]:
        """Return the exchanges recorded since the last call."""
        exchanges: list[AxisExchange] = []
        for group in self.groups:
            exchanges += group.exchanges
            group.exchanges = []
        return tuple(exchanges)

    def autocast(self, device: str = "cpu") -> AbstractContextManager[Any]:
        """Return the context manager for mixed precision that the engine uses."""
        return torch.autocast(device, DTYPES[self.precision]) if self.precision != "fp32" else nullcontext()

    def past(self, number: int, x: Any) -> list[Any]:
        """Return the states of half of the other slices, if the block looks back at earlier slices; else an empty list.

        Args:
            number: Number of the block.
            x: Input of the block.
        """
        look_back: Any = getattr(self.blocks[number][1], "forward_slice", None)
        if self.slices == 1 or look_back is None:
            return []
        with torch.no_grad():
            _, state = look_back(x, [])
        return [state] * (self.slices // 2)

    def call(self, number: int, x: Any, past: list[Any]) -> Any:
        """Return the output of a block.

        Args:
            number: Number of the block.
            x: Input of the block.
            past: Result of `Cut.past` for the same input.
        """
        block: Any = self.blocks[number][1]
        return block.forward_slice(x, past)[0] if past else block(x)


class Subject:
    """Model of a configuration, for the data of a description.

    Args:
        config: The configuration.
        description: Description of the data.
        real: If true, the model has values; else it is built without values if possible.

    Attributes:
        config: The configuration.
        module: The whole model.
        listed: True if the model lists its blocks.
        divisible: True if the model has a plan that divides its layers.
        synchronous: True if the model has batch norms.
        shapes: (shape, dtype) of a sample's x and of its y.
    """

    def __init__(self, config: Config, description: Description, *, real: bool) -> None:
        self.config, self._description = config, description
        self._fake: FakeTensorMode | None = None
        self._task = self._build(real)
        module = self.module = self._task.module
        self.listed = callable(getattr(module, "pipeline_blocks", None)) or isinstance(module, nn.Sequential)
        self.divisible = callable(getattr(module, "tensor_plan", None))
        self.synchronous = any(isinstance(layer, _BatchNorm) for layer in module.modules())
        x_shape, y_shape = description.x_shape, description.y_shape
        if description.kind == "tokens":
            x_shape = y_shape = (config.model.sequence,)
        forms = (x_shape, description.x_dtype), (y_shape, description.y_dtype)
        self.shapes = [(tuple(shape), getattr(torch, dtype.name)) for shape, dtype in forms]

    def cut(self, divided: Divided, *, fake: bool, device: torch.device | None = None) -> Cut:
        """Return a copy of the model, divided as one rank has it.

        Args:
            divided: Division of the model.
            fake: If true, the copy has no values.
            device: Device on which the copy is timed; None if it is not timed.

        Raises:
            InputError: The model cannot be divided in this way.
        """
        mode = (self._fake or FakeTensorMode()) if fake else None
        with mode if mode is not None else nullcontext():
            first_equal: list[int] = []
            if fake and self.listed:
                patterns = [*(plan_for(self.module) if divided.tensor > 1 else {}), *divided.whole]
                first_equal = first_equal_blocks(self.module, listed_blocks(self.module), patterns)
            task = self._copy_task(mode, first_equal)
            module, replicas = task.module, GroupStandIn(2, REPLICAS)
            if divided.synchronized:
                module = SyncBatchNorm.convert(module, cast("Communicator", replicas))
            sizes, part = dict(sizes_of(1, 1, divided.tensor, divided.axes)), ModelPart(module, divided)
            groups: list[StandIn | GroupStandIn] = []
            for axis in in_order(sizes, blocks=False):
                ranks, layers = sizes[axis], axis.divides == LAYERS
                groups.append(
                    StandIn(ranks, axis.name, device is not None) if layers else GroupStandIn(ranks, axis.name)
                )
                axis.divide(part, groups[-1])
            module = part.module
            precision = self.config.train.precision
            convert(module, precision)
            if device is not None and device.type != "cpu":
                module.to(device)
            blocks = listed_blocks(module) if self.listed else [("", module)]
            first_equal = first_equal or list(range(len(blocks)))
            blocks = [(name, blocks[first][1]) for (name, _), first in zip(blocks, first_equal, strict=True)]
            if divided.slices > 1:
                x, y = (torch.empty(1, *shape, device="meta") for shape, _ in self.shapes)
                slice_sequences([(x, y)], [1.0], divided.slices)
            require_look_back(self.module, blocks, divided.slices)
            samples = partial(self._samples, divided.slices, device or torch.device("cpu"), sizes)
        module.train()
        return Cut(
            module, blocks, task.loss, [*groups, replicas], mode, divided.slices, samples, precision, first_equal
        )

    def _build(self, real: bool) -> Task:
        """Return the task. If it has no values, `self._fake` becomes the mode of its tensors."""
        if not real:
            mode = FakeTensorMode()
            try:
                with mode:
                    task = self._build_task()
                self._fake = mode
                return task
            except InputError as error:
                if error.__cause__ is None:
                    raise
            except Exception:  # the model's code may need values
                pass
        return self._build_task()

    def _build_task(self) -> Task:
        return build_model(self.config.model, self._description)

    def _copy_task(self, mode: FakeTensorMode | None, first_equal: Sequence[int]) -> Task:
        """Return a copy of the task, with an `EqualBlock` in place of each block that is equal to an earlier one."""
        if mode is None and self._fake is not None:
            return self._build_task()
        blocks = listed_blocks(self.module) if first_equal else []
        doubles = [blocks[number][1] for number, first in enumerate(first_equal) if first != number]
        memo: dict[int, Any] = {id(block): EqualBlock() for block in doubles}
        if mode is not None:
            left = {id(t) for block in doubles for t in (*block.parameters(), *block.buffers())}
            for tensor in (*self.module.parameters(), *self.module.buffers()):
                if id(tensor) in left:
                    continue
                fake: torch.Tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
                if isinstance(tensor, nn.Parameter):
                    fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
                memo[id(tensor)] = fake
        return Task(*copy.deepcopy((self._task.module, self._task.loss), memo))

    def _samples(
        self, slices: int, device: torch.device, sizes: Mapping[MeshAxis, int], samples: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return random samples (x, y): normally distributed floats, uniformly distributed valid integers."""
        tokens, tensors = self._description.vocabulary or 1, list[torch.Tensor]()
        counts = tokens, len(self._description.classes or ()) or tokens
        for (shape, dtype), count in zip(self.shapes, counts, strict=True):
            size = (samples, *(shape if slices == 1 else (-(-shape[0] // slices), *shape[1:])))
            floating = dtype.is_floating_point
            tensors.append(
                torch.randn(size, device=device) if floating else torch.randint(count, size, dtype=dtype, device=device)
            )
        x, y = tensors
        for axis, ranks in sizes.items():
            x, y = axis.take(x, y, 0, ranks)
        return x.to(DTYPES[self.config.train.precision]) if x.is_floating_point() else x, y


def description_of(config: Config) -> Description:
    """Return the description of a configuration's data. Built-in data sets that do not exist yet are created.

    Raises:
        InputError: The data cannot be read, or are too few for a batch.
    """
    data = open_split(config, TRAIN)
    assert data is not None
    try:
        check_data(config, data)
    except InputError as error:
        raise refusal(str(error)) from None
    return data.description
