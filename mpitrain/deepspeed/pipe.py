"""`PipelineModule`, a model as a list of layers that pipeline stages divide, and the layers' specifications."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from mpitrain.comm import init
from mpitrain.deepspeed.checkpointing import checkpoint
from mpitrain.errors import refusal
from mpitrain.pipe.partition import partition


class LayerSpec:
    """A layer that is made when its `PipelineModule` is.

    Args:
        typename: Class of the layer.
        module_args, module_kwargs: Arguments of the class.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise refusal(
                f"LayerSpec needs a class of torch.nn.Module, but got {typename!r:.80}; pass a function itself"
            )
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def build(self) -> nn.Module:
        """Return a new layer."""
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that shares its module with all others of the same key.

    Args:
        key: Name of the module.
        typename: Class of the module, which the first layer with this key makes.
        forward_fn: Function (module, inputs) that computes the layer; None to call the module.
        tied_weight_attr: Ignored: all parameters of the module are shared.
        module_args, module_kwargs: Arguments of the class.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: Any = "weight",
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn


class _Layer(nn.Module):
    """A layer that calls a function, with a module of its own or without one."""

    def __init__(self, function: Callable[..., Any], module: nn.Module | None = None) -> None:
        super().__init__()
        self.function, self.module = function, module

    def forward(self, x: Any) -> Any:
        return self.function(x) if self.module is None else self.function(self.module, x)


class PipelineModule(nn.Module):
    """A model that applies its layers one after the other. Every rank makes all layers, and keeps those of its stage.

    Args:
        layers: Modules, functions and `LayerSpec`s; an nn.Sequential is one.
        num_stages: Number of pipeline stages.
        topology: Refused; pass `num_stages`.
        loss_fn: Function called as loss_fn(outputs, targets).
        seed_layers: If true, each layer is made with the seed `base_seed` plus its number.
        seed_fn: Function that sets the seed; None for torch.manual_seed.
        base_seed: Seed of layer 0.
        partition_method: Quantity that stages have equal shares of: "parameters", "uniform" (layers), or "type:REGEX"
            (layers whose class matches).
        activation_checkpoint_interval: Layers between kept inputs, 0 to keep all activations. With several stages, any
            other number keeps the input of each stage only.
        ignored: Further arguments of DeepSpeed, which do not change results.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        *ignored: Any,
        **ignored_too: Any,
    ) -> None:
        super().__init__()
        if topology is not None or num_stages is None:
            raise refusal("PipelineModule needs num_stages, and has no topology; pass num_stages=")
        init()  # as DeepSpeed does, so that ranks meet before they make layers
        self.num_stages, self.loss_fn, self._method = num_stages, loss_fn, partition_method
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self._layers: list[str] = []
        tied: dict[str, nn.Module] = {}
        for number, layer in enumerate(layers):
            if seed_layers:
                (seed_fn or torch.manual_seed)(base_seed + number)
            self.add_module(str(number), _build(layer, tied))
            self._layers.append(str(number))

    def pipeline_blocks(self) -> list[tuple[str, nn.Module]]:
        """Return the layers with their names."""
        return [(name, self.get_submodule(name)) for name in self._layers]

    def forward(self, x: Any) -> Any:
        """Apply all layers, in a model of one stage."""
        layers, interval = [layer for _, layer in self.pipeline_blocks()], self.activation_checkpoint_interval

        def run(begin: int, end: int, x: Any) -> Any:
            for layer in layers[begin:end]:
                x = layer(x)
            return x

        if not interval or not torch.is_grad_enabled():
            return run(0, len(layers), x)
        for begin in range(0, len(layers), interval):
            x = checkpoint(run, begin, begin + interval, x)
        return x

    def make_loss(self) -> Callable[[Any, Any], torch.Tensor]:
        """Return the loss function, in which all microbatches count the same, whatever targets they mask."""
        if self.loss_fn is None:
            raise refusal("PipelineModule has no loss; pass loss_fn=")
        loss_fn = self.loss_fn

        def criterion(outputs: Any, targets: Any) -> torch.Tensor:
            return loss_fn(outputs, targets)

        criterion.counted = len  # type: ignore[attr-defined]
        return criterion

    def cut(self) -> str | Sequence[int]:
        """Return `partition_method` as the setting parallel.cut."""
        method = self._method.lower()
        if method in ("uniform", "parameters") or self.num_stages == 1:
            return method if method == "parameters" else "uniform"
        if not method.startswith("type:"):
            raise refusal(f"partition_method {self._method!r} is unknown; use parameters, uniform or type:REGEX")
        pattern = re.compile(self._method[len("type:") :], re.IGNORECASE)
        costs = [float(bool(pattern.search(_class_of(layer)))) for _, layer in self.pipeline_blocks()]
        bounds = partition([costs] * self.num_stages)
        return [end - begin for begin, end in pairwise(bounds)]


def _build(layer: Any, tied: dict[str, nn.Module]) -> nn.Module:
    """Return the module of an entry of `layers`. tied: shared modules by key, to which new ones are added."""
    if isinstance(layer, TiedLayerSpec):
        module = tied[layer.key] if layer.key in tied else tied.setdefault(layer.key, layer.build())
        return module if layer.forward_fn is None else _Layer(layer.forward_fn, module)
    if isinstance(layer, LayerSpec):
        return layer.build()
    if isinstance(layer, nn.Module):
        return layer
    if callable(layer):
        return _Layer(layer)
    raise refusal(f"layers of a PipelineModule has a {type(layer).__name__}; give modules, functions and LayerSpecs")


def _class_of(layer: nn.Module) -> str:
    """Return the name of a layer's class, or of its function."""
    if not isinstance(layer, _Layer):
        return type(layer).__name__
    return type(layer.module).__name__ if layer.module is not None else getattr(layer.function, "__name__", "")
