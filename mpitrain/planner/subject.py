"""A model profile, what each block of a model costs one rank; what is profiled: a task, its blocks, and samples.

A cut is a copy of the model as one rank of a layout has it. Its tensors are either real or fake: fake ones (PyTorch's
FakeTensorMode) have shapes, dtypes and lifetimes, and take neither memory nor time. Of blocks that do the same, only
the first is copied, divided and observed.

The model is divided over tensor ranks by its own plan, and its batch norms over data-parallel ones, without the others:
one process plays rank 0 of an axis. What that rank would exchange with the others is noted and not done: a tensor of
the right shape comes back at once, whose numbers mean nothing.
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
    """Rank 0 of an axis that divides layers, all by itself.

    Args:
        size: Ranks of the axis.
        name: Of the axis.
        times: Whether passes are timed: results then cost no time, because they are not computed but shared.

    Attributes:
        noted: The exchanges since somebody last put another list here.
    """

    def __init__(self, size: int, name: str = "tensor", times: bool = False) -> None:
        self.rank, self.size, self.name = 0, size, name
        self.rng = RngTracker(0) if times else _NoStreams(0)
        self.column_input: object = None
        self.noted: list[AxisExchange] = []
        self._tags = 0
        self._slots = None
        self._pool: dict[tuple[Any, ...], torch.Tensor] | None = {} if times else None

    def all_reduce(self, x: torch.Tensor, tag: int = 0) -> torch.Tensor:
        """A tensor like x."""
        self.noted.append(AxisExchange("all_reduce", x.nbytes, self.name))
        return self._like(x, x.shape)

    def reduce_scatter(self, x: torch.Tensor, dim: int, lengths: Sequence[int] | None = None) -> torch.Tensor:
        """A tensor like rank 0's part of x."""
        self.noted.append(AxisExchange("reduce_scatter", x.nbytes, self.name))
        return self._like(x, _resized(x.shape, dim, lengths[0] if lengths else self.bounds(x.shape[dim])[1]))

    def all_gather(
        self, x: torch.Tensor, dim: int, tag: int = 0, lengths: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, list[int]]:
        """A tensor like all ranks' x; where nobody knows the others' lengths, they are taken to be that of x."""
        told = list(lengths) if lengths is not None else [x.shape[dim]] * self.size
        whole = self._like(x, _resized(x.shape, dim, sum(told)))
        self.noted.append(AxisExchange("all_gather", whole.nbytes, self.name))
        return whole, told

    def _like(self, x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        if self._pool is None:
            return x.new_empty(shape)
        key = (tuple(shape), x.dtype, x.device)
        kept = self._pool.get(key)
        if kept is None:
            kept = self._pool[key] = x.new_full(tuple(shape), 0.01)
        # no view for autograd, so that it may be written to in place
        return kept.new_empty(0).set_(kept.untyped_storage(), 0, kept.shape, kept.stride())


class _NoStreams(RngTracker):
    """Draws nothing: where tensors have no values, generators have no states."""

    def enter(self, opener: object, device: torch.device) -> None:
        """Do nothing."""

    def leave(self, opener: object = None) -> None:
        """Do nothing."""


class GroupStandIn:
    """Rank 0 of several ranks, as far as layers ask a communicator for sums and parts: its own are left as they are.

    Args:
        size: Ranks.
        name: Of the axis along which they are, or REPLICAS.

    Attributes:
        noted: The exchanges since somebody last put another list here.
    """

    def __init__(self, size: int, name: str) -> None:
        self.rank, self.size, self.name = 0, size, name
        self.noted: list[AxisExchange] = []

    def all_reduce(self, x: torch.Tensor) -> None:
        """Note it."""
        self.noted.append(AxisExchange("all_reduce", x.nbytes, self.name))

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Note it."""
        self.noted.append(AxisExchange("all_gather", out.nbytes, self.name))


def _resized(shape: Sequence[int], dim: int, length: int) -> tuple[int, ...]:
    changed = list(shape)
    changed[dim] = length
    return tuple(changed)


class Double(nn.Module):
    """Stands in a copied model in the place of a block that is like an earlier one."""


def alike(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], patterns: Iterable[str]) -> list[int]:
    """Of each block the number of the first block that it is like: its own where there is none before it.

    Blocks are alike where they do the same, share no parameters with others, and the same patterns match their layers.

    Args:
        model: The whole model.
        blocks: Its blocks in order, with their names.
        patterns: Of names of modules that are going to be treated differently.
    """
    owners = Counter(id(p) for _, block in blocks for p in block.parameters())
    names = {module: name for name, module in model.named_modules()}
    several = Counter(block for _, block in blocks)
    known: dict[Any, int] = {}
    found = []
    for number, (_, block) in enumerate(blocks):
        own = all(owners[id(p)] == 1 for p in block.parameters()) and several[block] == 1
        key: Any = number
        if own and block in names and any(True for _ in block.parameters()):
            inside = [(m, [p for p in patterns if fnmatchcase(names.get(m, ""), p)]) for m in block.modules()]
            key = signature(block), tuple(tuple(matching) for _, matching in inside)
        found.append(known.setdefault(key, number))
    return found


def signature(block: nn.Module) -> Any:
    """Equal for blocks that do the same: their structure, attributes, and parameters' shapes."""
    simple = (int, float, str, bool, tuple, type(None))
    told: list[Any] = []
    for name, module in block.named_modules():
        own = tuple((k, repr(v)) for k, v in vars(module).items() if isinstance(v, simple))
        hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
        told.append((name, type(module), own, hooks))
    return tuple(told), tuple((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in block.named_parameters())


@dataclass
class Cut:
    """A copy of the model as one rank has it.

    Attributes:
        module: The model.
        blocks: (name, module) in order; a model that lists none is one block without a name.
        loss: Of the last block's output and the target.
        among: What stands in for the ranks of each axis that changes layers, and at last for the replicas.
        fake: The mode in which its tensors are made and used; None where they are real.
        slices: Pieces of each sequence.
        samples: Makes (x, y) of so many samples, or of a slice of them.
        precision: Of its parameters.
        like: Of each block, the number of the first that it is like. Without values, one module stands for all of
            these in `blocks`, and the others' are not in the model.
    """

    module: nn.Module
    blocks: list[tuple[str, nn.Module]]
    loss: Callable[[Any, Any], torch.Tensor]
    among: Sequence[StandIn | GroupStandIn]
    fake: FakeTensorMode | None
    slices: int
    samples: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    precision: Precision
    like: list[int]

    def mode(self) -> AbstractContextManager[Any]:
        """In which its passes run."""
        return self.fake if self.fake is not None else nullcontext()

    def exchanged(self) -> tuple[AxisExchange, ...]:
        """What has been exchanged since this was last asked."""
        found: list[AxisExchange] = []
        for group in self.among:
            found += group.noted
            group.noted = []
        return tuple(found)

    def autocast(self, device: str = "cpu") -> AbstractContextManager[Any]:
        """As the engine computes."""
        return torch.autocast(device, DTYPES[self.precision]) if self.precision != "fp32" else nullcontext()

    def past(self, number: int, x: Any) -> list[Any]:
        """The states of half of the other slices, where a block that looks back is to be called with a slice."""
        look_back: Any = getattr(self.blocks[number][1], "forward_slice", None)
        if self.slices == 1 or look_back is None:
            return []
        with torch.no_grad():
            _, state = look_back(x, [])
        return [state] * (self.slices // 2)

    def call(self, number: int, x: Any, past: list[Any]) -> Any:
        """The output of a block. past: what `past` has made of the same input."""
        block: Any = self.blocks[number][1]
        return block.forward_slice(x, past)[0] if past else block(x)


class Subject:
    """A configuration's model, on the data that a description describes.

    Args:
        config: The configuration.
        description: Of the data.
        real: Whether the model is needed with values; else it is built without them where that can be done.

    Attributes:
        config: The configuration.
        module: The whole model.
        listed: Whether the model lists its blocks.
        divisible: Whether it says how its layers are divided.
        synchronous: Whether it has batch norms.
        shapes: Of a sample's x and y, with dtypes.
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
        """A copy of the model, divided.

        Args:
            divided: How.
            fake: Without values.
            device: Where it is to be timed; None where it is not.

        Raises:
            InputError: The model cannot be divided so.
        """
        mode = (self._fake or FakeTensorMode()) if fake else None
        with mode if mode is not None else nullcontext():
            like: list[int] = []
            if fake and self.listed:
                patterns = [*(plan_for(self.module) if divided.tensor > 1 else {}), *divided.whole]
                like = alike(self.module, listed_blocks(self.module), patterns)
            task = self._copied(mode, like)
            module, replicas = task.module, GroupStandIn(2, REPLICAS)
            if divided.synchronized:
                module = SyncBatchNorm.convert(module, cast("Communicator", replicas))
            sizes, part = dict(sizes_of(1, 1, divided.tensor, divided.axes)), ModelPart(module, divided)
            among: list[StandIn | GroupStandIn] = []
            for axis in in_order(sizes, blocks=False):
                ranks, layers = sizes[axis], axis.divides == LAYERS
                among.append(
                    StandIn(ranks, axis.name, device is not None) if layers else GroupStandIn(ranks, axis.name)
                )
                axis.divide(part, among[-1])
            module = part.module
            precision = self.config.train.precision
            convert(module, precision)
            if device is not None and device.type != "cpu":
                module.to(device)
            blocks = listed_blocks(module) if self.listed else [("", module)]
            like = like or list(range(len(blocks)))
            blocks = [(name, blocks[first][1]) for (name, _), first in zip(blocks, like, strict=True)]
            if divided.slices > 1:
                x, y = (torch.empty(1, *shape, device="meta") for shape, _ in self.shapes)
                slice_sequences([(x, y)], [1.0], divided.slices)
            require_look_back(self.module, blocks, divided.slices)
            samples = partial(self._samples, divided.slices, device or torch.device("cpu"), sizes)
        module.train()
        return Cut(module, blocks, task.loss, [*among, replicas], mode, divided.slices, samples, precision, like)

    def _build(self, real: bool) -> Task:
        """The task; `self._fake` is the mode of its tensors where they have no values."""
        if not real:
            mode = FakeTensorMode()
            try:
                with mode:
                    task = self._built()
                self._fake = mode
                return task
            except InputError as error:
                if error.__cause__ is None:
                    raise
            except Exception:  # code that is not ours may look at values, which there are none of
                pass
        return self._built()

    def _built(self) -> Task:
        return build_model(self.config.model, self._description)

    def _copied(self, mode: FakeTensorMode | None, like: Sequence[int]) -> Task:
        """A copy of the task, with a `Double` in the place of each block that is like an earlier one."""
        if mode is None and self._fake is not None:
            return self._built()
        blocks = listed_blocks(self.module) if like else []
        doubles = [blocks[number][1] for number, first in enumerate(like) if first != number]
        memo: dict[int, Any] = {id(block): Double() for block in doubles}
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
        """Make samples: floats are normally distributed, integers spread over what there is."""
        tokens, made = self._description.vocabulary or 1, list[torch.Tensor]()
        counts = tokens, len(self._description.classes or ()) or tokens
        for (shape, dtype), count in zip(self.shapes, counts, strict=True):
            size = (samples, *(shape if slices == 1 else (-(-shape[0] // slices), *shape[1:])))
            floating = dtype.is_floating_point
            made.append(
                torch.randn(size, device=device) if floating else torch.randint(count, size, dtype=dtype, device=device)
            )
        x, y = made
        for axis, ranks in sizes.items():
            x, y = axis.take(x, y, 0, ranks)
        return x.to(DTYPES[self.config.train.precision]) if x.is_floating_point() else x, y


def description_of(config: Config) -> Description:
    """What a configuration's data hold; embedded ones that are not there yet are made.

    Raises:
        InputError: They cannot be read, or are too few for a batch.
    """
    data = open_split(config, TRAIN)
    assert data is not None
    try:
        check_data(config, data)
    except InputError as error:
        raise refusal(str(error)) from None
    return data.description
