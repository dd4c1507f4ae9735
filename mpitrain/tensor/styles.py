"""The ways in which a plan may divide a module, each of which makes the parallel module of a plain one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from mpitrain.errors import InputError
from mpitrain.tensor.axis import Axis
from mpitrain.tensor.functions import gather, scatter
from mpitrain.tensor.heads import column_features, row_features
from mpitrain.tensor.linear import SEQUENCE, ColumnParallelLinear, RowParallelLinear, sum_gradient
from mpitrain.tensor.vocabulary import VocabularyParallelEmbedding


@dataclass(frozen=True)
class Place:
    """A module in a model: its name, itself, the module it is in, and how the model is to be made parallel."""

    name: str
    module: nn.Module
    parent: nn.Module
    axis: Axis
    sequence: bool
    scattered: bool  # the plan says where the division along the sequence begins


@dataclass(frozen=True)
class Column:
    """Outputs of an nn.Linear divided.

    sections: of a fused layer, how many equal parts lie one after the other, or the features of each; None: 3 for
    names with qkv, else 1. heads: of the first part; None: as the module around it says. gather: the output is put
    together again; else it must go to a row layer.
    """

    sections: int | tuple[int, ...] | None = None
    heads: int | None = None
    gather: bool = False

    def apply(self, place: Place) -> nn.Module:
        linear, axis = _plain(place, nn.Linear, "column"), place.axis
        features = column_features(place.name, linear, place.parent, axis.size, self.sections, self.heads)
        return ColumnParallelLinear(
            linear, axis, features, gather_output=self.gather, sequence=place.sequence, paired=not self.gather
        )


@dataclass(frozen=True)
class Row:
    """Inputs of an nn.Linear divided. heads: as of `Column`. scatter: the input is whole, and each takes its part."""

    heads: int | None = None
    scatter: bool = False

    def apply(self, place: Place) -> nn.Module:
        linear, axis = _plain(place, nn.Linear, "row"), place.axis
        features = row_features(place.name, linear, place.parent, axis.size, self.heads)
        return RowParallelLinear(linear, axis, features, scatter_input=self.scatter, sequence=place.sequence)


@dataclass(frozen=True)
class Vocabulary:
    """An nn.Embedding divided by tokens, or an nn.Linear by classes, whose scores stay divided."""

    def apply(self, place: Place) -> nn.Module:
        if isinstance(place.module, nn.Linear):
            linear = _plain(place, nn.Linear, "vocabulary")
            return ColumnParallelLinear(linear, place.axis, sequence=place.sequence)
        embedding = _plain(place, nn.Embedding, "vocabulary")
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(embedding, option):
                raise InputError(f"{place.name}: an embedding with {option} cannot be divided; do without", agreed=True)
        return VocabularyParallelEmbedding(embedding, place.axis, sequence=place.sequence and not place.scattered)


@dataclass(frozen=True)
class Scatter:
    """The module's output is divided along the sequence from here on. Only with sequence=True."""

    def apply(self, place: Place) -> nn.Module:
        if place.sequence:
            place.module.register_forward_hook(lambda m, args, out: scatter(out, place.axis, SEQUENCE))
        return place.module


@dataclass(frozen=True)
class Gather:
    """The module's output is put together along the sequence. Only with sequence=True."""

    def apply(self, place: Place) -> nn.Module:
        if place.sequence:
            place.module.register_forward_hook(lambda m, args, out: gather(out, place.axis, SEQUENCE))
            _sum_gradients(place)
        return place.module


@dataclass(frozen=True)
class Split:
    """The module works on its part of the sequence: the gradients of its own parameters are summed."""

    def apply(self, place: Place) -> nn.Module:
        if place.sequence:
            _sum_gradients(place)
        return place.module


@dataclass(frozen=True)
class Whole:
    """The module works on what all ranks have alike: nothing is to be done."""

    def apply(self, place: Place) -> nn.Module:
        return place.module


Way = Column | Row | Vocabulary | Scatter | Gather | Split | Whole
WAYS: Mapping[str, Way] = {
    "column": Column(),
    "row": Row(),
    "vocabulary": Vocabulary(),
    "scatter": Scatter(),
    "gather": Gather(),
    "split": Split(),
    "whole": Whole(),
}


def _plain(place: Place, kind: type[Any], way: str) -> Any:
    """The module, if it is what can be divided; else InputError."""
    module = place.module
    if type(module) is not kind:
        wanted = "nn.Embedding or nn.Linear" if way == "vocabulary" else f"nn.{kind.__name__}"
        raise InputError(
            f"{place.name} is a {type(module).__name__}, which cannot be divided as {way!r}; only a plain {wanted} can",
            agreed=True,
        )
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        raise InputError(f"{place.name} has hooks, which dividing it would lose; register them afterwards", agreed=True)
    return module


def _sum_gradients(place: Place) -> None:
    for parameter in place.module.parameters(recurse=False):
        sum_gradient(parameter, place.axis)
