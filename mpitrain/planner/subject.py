"""What is profiled: a task as the configuration makes it, its blocks, and samples of the right shapes.

A cut is a copy of the model as one rank of a layout has it. Its tensors are either real or fake: fake ones (PyTorch's
FakeTensorMode) have shapes, dtypes and lifetimes, and take neither memory nor time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm

from mpitrain.choices import Precision
from mpitrain.config.settings import Config
from mpitrain.data import Description
from mpitrain.errors import InputError
from mpitrain.layers.precision import DTYPES, convert
from mpitrain.models import Task, build_model
from mpitrain.pipe.partition import listed_blocks, require_look_back, slice_sequences
from mpitrain.planner.alike import Double, alike
from mpitrain.planner.dividing import DataStandIn, StandIn, divide, synchronize
from mpitrain.planner.model import AxisExchange, Divided
from mpitrain.tensor.plan import plan_for


@dataclass
class Cut:
    """A copy of the model as one rank has it.

    Attributes:
        module: The model.
        blocks: (name, module) in order; a model that lists none is one block without a name.
        loss: Of the last block's output and the target.
        axis: Of the tensor ranks; None for one rank.
        data: Of the data-parallel ranks, as far as batch norms need them.
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
    axis: StandIn | None
    data: DataStandIn
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
        for axis in (self.axis, self.data):
            if axis is not None:
                found += axis.noted
                axis.noted = []
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
        listed: Whether the model lists its blocks.
        divisible: Whether it says how its layers are divided.
        synchronous: Whether it has batch norms.
        shapes: Of a sample's x and y, with dtypes.
    """

    def __init__(self, config: Config, description: Description, *, real: bool) -> None:
        self.config, self._description = config, description
        self._fake: FakeTensorMode | None = None
        self._task = self._build(real)
        module = self._task.module
        self.listed = callable(getattr(module, "pipeline_blocks", None)) or isinstance(module, nn.Sequential)
        self.divisible = callable(getattr(module, "tensor_plan", None))
        self.synchronous = any(isinstance(layer, _BatchNorm) for layer in module.modules())
        x_shape, y_shape = description.x_shape, description.y_shape
        if description.kind == "tokens":
            x_shape = y_shape = (config.model.sequence,)
        self.shapes = [
            (tuple(x_shape), getattr(torch, description.x_dtype.name)),
            (tuple(y_shape), getattr(torch, description.y_dtype.name)),
        ]

    @property
    def module(self) -> nn.Module:
        """The whole model."""
        return self._task.module

    @property
    def sample_bytes(self) -> int:
        """Of a sample's x and y."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self.shapes)

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
            like = self._alike(divided) if fake else []
            task = self._copied(mode, like)
            module, data = task.module, DataStandIn()
            if divided.synchronized:
                module = synchronize(module, data)
            axis = divide(module, divided, times=device is not None)
            precision = self.config.train.precision
            convert(module, precision)
            if device is not None and device.type != "cpu":
                module.to(device)
            blocks = listed_blocks(module) if self.listed else [("", module)]
            like = like or list(range(len(blocks)))
            blocks = [(name, blocks[first][1]) for (name, _), first in zip(blocks, like, strict=True)]
            self._check_slices(blocks, divided.slices)
            on = device or torch.device("cpu")
            samples = _Samples(self.shapes, divided.slices, precision, self._values(), on)
        module.train()
        return Cut(module, blocks, task.loss, axis, data, mode, divided.slices, samples, precision, like)

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

    def _alike(self, divided: Divided) -> list[int]:
        """See `Cut.like`."""
        if not self.listed:
            return []
        plan = plan_for(self.module) if divided.tensor > 1 else {}
        return alike(self.module, listed_blocks(self.module), [*plan, *divided.whole])

    def _copied(self, mode: FakeTensorMode | None, like: Sequence[int]) -> Task:
        """A copy of the task, with a `Double` in the place of each block that is like an earlier one."""
        memo: dict[int, Any] = {}
        if mode is None and self._fake is not None:
            return self._built()
        blocks = listed_blocks(self.module) if like else []
        doubles = [blocks[number][1] for number, first in enumerate(like) if first != number]
        memo.update((id(block), Double()) for block in doubles)
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

    def _values(self) -> tuple[int, int]:
        tokens = self._description.vocabulary or 1
        return tokens, len(self._description.classes or ()) or tokens

    def _check_slices(self, blocks: list[tuple[str, nn.Module]], slices: int) -> None:
        if slices > 1:
            x, y = (torch.empty(1, *shape, device="meta") for shape, _ in self.shapes)
            slice_sequences([(x, y)], [1.0], slices)
        require_look_back(self.module, blocks, slices)


@dataclass(frozen=True)
class _Samples:
    """Makes samples: floats are normally distributed, integers spread over what there is."""

    shapes: list[tuple[tuple[int, ...], torch.dtype]]
    slices: int
    precision: Precision
    values: tuple[int, int]  # how many there are of x and y, where they are integers
    device: torch.device

    def __call__(self, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = (self._made(samples, *each, values) for each, values in zip(self.shapes, self.values, strict=True))
        return x.to(DTYPES[self.precision]) if x.is_floating_point() else x, y

    def _made(self, samples: int, shape: tuple[int, ...], dtype: torch.dtype, values: int) -> torch.Tensor:
        if self.slices > 1:
            shape = (-(-shape[0] // self.slices), *shape[1:])
        if dtype.is_floating_point:
            return torch.randn(samples, *shape, device=self.device)
        return torch.randint(values, (samples, *shape), dtype=dtype, device=self.device)
