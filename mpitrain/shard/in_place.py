"""Weight gradients of linear layers, computed where they are to be reduced.

Autograd computes a gradient in memory of its own, from which it would have to be copied into flat memory: a pass over
all gradients in each step. Most of them are those of linear layers, gw = gy' x; here that product is written where it
belongs, and autograd keeps the tensor it is given as the parameter's `.grad`, without a copy. The bits are the same.
(Megatron-LM's gradient accumulation fusion has the same aim.)

Where it cannot be done (autocast, torch.compile, torch.func, a weight used twice, a gradient there already) the layer
computes as ever, and the gradient is copied.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional
from torch.utils.weak import WeakIdKeyDictionary

LEAST = 1 << 16  # elements of a weight; for less, Python in backward costs more than the copy


class Places(Protocol):
    def place(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Where its gradient is to be computed, in its shape; None where that is not free."""


_places = WeakIdKeyDictionary()  # by weight: a weak reference to its Places


class Linear(nn.Linear):
    """nn.Linear, whose class a layer gets by `InPlace`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if (
            torch.compiler.is_compiling()
            or weight not in _places
            or not (weight.requires_grad and torch.is_grad_enabled())
            or not (x.dtype == weight.dtype and x.dim() >= 2 and x.is_contiguous())
            or torch.is_autocast_enabled(x.device.type)
            or torch._C._are_functorch_transforms_active()
        ):
            return functional.linear(x, weight, self.bias)
        result: torch.Tensor = _Product.apply(x, weight, self.bias)
        return result


class _Product(torch.autograd.Function):
    """y = x W' + b for x [.., in], W [out, in], b [out]; in the operations that torch's own derivative uses."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: nn.Parameter, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter = weakref.ref(weight)
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        gy = gradients[0].reshape(-1, weight.shape[0])
        rows = x.reshape(-1, weight.shape[1])
        gx = gy.mm(weight).view(x.shape) if for_x else None
        gw = None
        if for_weight:
            place = None if torch.is_grad_enabled() else _free_place(ctx)  # enabled: to be derived once more
            gw = gy.t().mm(rows) if place is None else torch.mm(gy.t(), rows, out=place)
        return gx, gw, gy.sum(0) if for_bias else None


def _free_place(ctx: Any) -> torch.Tensor | None:
    parameter = ctx.parameter()
    found = _places.get(parameter) if parameter is not None else None
    places = found() if found is not None else None
    if places is None:
        return None
    try:
        accumulates = torch._C._will_engine_execute_node(ctx.next_functions[1][0])
    except RuntimeError:  # torch.autograd.grad, whose results are the caller's
        return None
    place: torch.Tensor | None = places.place(parameter) if accumulates else None
    return place


class InPlace:
    """Lets the linear layers of `module` compute the gradients of those parameters at their places, until `remove`.

    Layers of a subclass of nn.Linear, and weights of several layers, are left alone.
    """

    def __init__(self, module: nn.Module, parameters: Iterable[nn.Parameter], places: Places) -> None:
        large = {p for p in parameters if p.numel() >= LEAST}
        users: dict[nn.Parameter, list[nn.Module]] = {}
        for layer in module.modules():
            for parameter in layer.parameters(recurse=False):
                users.setdefault(parameter, []).append(layer)
        self._places = weakref.ref(places)
        self._layers = []
        for parameter, (layer, *others) in users.items():
            if parameter in large and not others and type(layer) in (nn.Linear, Linear) and layer.weight is parameter:
                layer.__class__ = Linear
                self._layers.append(layer)
                _places[parameter] = self._places

    def remove(self) -> None:
        for layer in self._layers:
            if _places.get(layer.weight) is self._places:  # nobody has taken the layer over
                layer.__class__ = nn.Linear
                del _places[layer.weight]
