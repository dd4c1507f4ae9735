"""Weight gradients of linear layers and embeddings, computed directly in the memory where they are reduced.

Autograd computes a gradient in memory of its own, from which it would have to be copied into flat memory: one pass over
all gradients in each step. Most gradients are those of linear layers, gw = gy' x. Here this product is written directly
to flat memory, and autograd keeps the tensor as the parameter's `.grad` without a copy. The rows of an embedding's
gradient are added up there too. The bits are the same. (Megatron-LM's gradient accumulation fusion has the same aim.)

In some cases this is impossible: autocast, torch.compile, torch.func, a weight that is used twice, a `.grad` that
already exists. The layer then computes as usual, and the gradient is copied.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from mpitrain.shard.gradients import Gradients

MIN_ELEMENTS = (
    1 << 19
)  # elements of a weight; copying fewer costs less than the Python code per pass (2 MiB: 0.2 ms for both)


def accumulator_of(parameter: nn.Parameter) -> Any:
    """Return the node of autograd that adds to the parameter's `.grad`; it exists as long as it is referenced."""
    with torch.enable_grad():
        above: Any = parameter.view_as(parameter).grad_fn
    return above.next_functions[0][0]


def will_accumulate(accumulator: Any) -> bool:
    """Return whether the backward pass that runs now adds to the `.grad` of the parameter of an accumulator."""
    try:
        return torch._C._will_engine_execute_node(accumulator)
    except RuntimeError:  # torch.autograd.grad, which returns its results to the caller
        return False


class WeightPlace:
    """A layer's access to the memory for its weight's gradient.

    A copy of the layer gets None instead, because the copy's weight has no such memory.

    Args:
        weight: Weight of the layer.
        places: Weak reference to the gradients that contain the memory.
    """

    def __init__(self, weight: nn.Parameter, places: weakref.ref[Gradients]) -> None:
        self.weight, self.places, self._accumulator = weight, places, accumulator_of(weight)

    def free_place(self) -> torch.Tensor | None:
        """Return memory for the gradient during backward; None unless the result will become the weight's `.grad`."""
        places = self.places()
        return places.place(self.weight) if places is not None and will_accumulate(self._accumulator) else None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _is_usable(entry: WeightPlace | None, weight: torch.Tensor) -> TypeGuard[WeightPlace]:
    """Return whether a layer whose access is `entry` may compute the gradient of its weight in flat memory."""
    return (
        entry is not None
        and entry.weight is weight
        and not torch.compiler.is_compiling()
        and torch.is_grad_enabled()
        and weight.requires_grad
        and not torch._C._are_functorch_transforms_active()
    )


class Linear(nn.Linear):
    """A linear layer whose weight gradient is computed in flat memory; `InPlace` gives plain layers this class."""

    entry: WeightPlace | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, entry = self.weight, self.entry
        if (
            not _is_usable(entry, weight)
            or x.dtype != weight.dtype
            or x.dim() < 2
            or not x.is_contiguous()
            or torch.is_autocast_enabled(x.device.type)
        ):
            return functional.linear(x, weight, self.bias)
        result: torch.Tensor = _Product.apply(x, weight, self.bias, entry)
        return result


class _Product(torch.autograd.Function):
    """The product y = x W' + b with the operations of torch's own derivative.

    Shape:
        x [.., in], W [out, in], b [out].
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: nn.Parameter, bias: torch.Tensor | None, entry: WeightPlace) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.entry = entry
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias, _ = ctx.needs_input_grad
        height, width = weight.shape
        gy = gradients[0].reshape(-1, height)
        gx = gy.mm(weight).view(x.shape) if for_x else None
        gw = None
        if for_weight:
            rows = x.reshape(-1, width)
            place = None if torch.is_grad_enabled() else ctx.entry.free_place()  # enabled: second derivative
            gw = gy.t().mm(rows) if place is None else torch.mm(gy.t(), rows, out=place)
        return gx, gw, gy.sum(0) if for_bias else None, None


_ADDED_IN_ORDER = (torch.float32, torch.float64)  # torch adds 16-bit rows with other intermediate roundings


class Embedding(nn.Embedding):
    """An embedding on the CPU whose gradient is computed in flat memory; `InPlace` gives plain ones this class."""

    entry: WeightPlace | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, entry = self.weight, self.entry
        if (
            not _is_usable(entry, weight)
            or weight.device.type != "cpu"
            or weight.dtype not in _ADDED_IN_ORDER
            or self.sparse
            or self.scale_grad_by_freq
            or self.max_norm is not None
        ):
            return super().forward(input)
        result: torch.Tensor = _Rows.apply(input, weight, -1 if self.padding_idx is None else self.padding_idx, entry)
        return result


class _Rows(torch.autograd.Function):
    """The rows of a weight, with torch's own derivative: gradients are added to their rows in the order of the input.

    Shape:
        rows [..], weight [rows, width].
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: nn.Parameter, padding: int, entry: WeightPlace) -> Any:
        ctx.save_for_backward(rows)
        ctx.entry, ctx.padding, ctx.count = entry, padding, len(weight)
        return functional.embedding(rows, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (rows,), (gy,) = ctx.saved_tensors, gradients
        place = None if torch.is_grad_enabled() else ctx.entry.free_place()  # enabled: second derivative
        if place is None:
            return None, torch.ops.aten.embedding_dense_backward(gy, rows, ctx.count, ctx.padding, False), None, None
        rows, gy = rows.reshape(-1), gy.reshape(-1, gy.shape[-1])
        if ctx.padding >= 0:
            used = rows != ctx.padding
            rows, gy = rows[used], gy[used]
        return None, place.zero_().index_add_(0, rows, gy), None, None


_CLASSES: dict[type[nn.Module], type[Linear | Embedding]] = {
    nn.Linear: Linear,
    Linear: Linear,
    nn.Embedding: Embedding,
    Embedding: Embedding,
}


class InPlace:
    """Makes layers compute their weights' gradients in flat memory, until `remove` is called.

    Layers of subclasses of nn.Linear and nn.Embedding, and weights that several layers share, are not changed.

    Args:
        module: Module whose layers are changed.
        parameters: Parameters with places in flat memory; they must require gradients. Small ones are skipped (see
            MIN_ELEMENTS).
        places: Gradients that return the places; only a weak reference is kept.
    """

    def __init__(self, module: nn.Module, parameters: Iterable[nn.Parameter], places: Gradients) -> None:
        large = {p for p in parameters if p.numel() >= MIN_ELEMENTS}
        users: dict[nn.Parameter, list[nn.Module]] = {}
        for layer in module.modules():
            for parameter in layer.parameters(recurse=False):
                users.setdefault(parameter, []).append(layer)
        self._entries: list[tuple[Linear | Embedding, WeightPlace]] = []
        for parameter, (layer, *others) in users.items():
            kind = _CLASSES.get(type(layer))
            if parameter in large and not others and kind is not None and layer.weight is parameter:
                layer.__class__ = kind
                assert isinstance(layer, Linear | Embedding)
                layer.entry = WeightPlace(parameter, weakref.ref(places))
                self._entries.append((layer, layer.entry))

    def remove(self) -> None:
        """Turn the layers into plain layers of torch again."""
        for layer, entry in self._entries:
            if layer.entry is entry:  # no other `InPlace` has taken the layer over
                del layer.entry
                layer.__class__ = type(layer).__base__  # type: ignore[assignment]
