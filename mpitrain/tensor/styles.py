"""Parallel styles: the ways in which a plan divides a module over the tensor axis (after torch's `ParallelStyle`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mpitrain.errors import refusal
from mpitrain.layers.lora import LinearParts, LoraLinear, linear_parts
from mpitrain.tensor.axis import Axis, gather, scatter
from mpitrain.tensor.linear import (
    SEQUENCE,
    ColumnParallelLinear,
    ColumnParallelLora,
    RowParallelLinear,
    RowParallelLora,
    column_features,
    in_heads,
    sum_gradient,
)
from mpitrain.tensor.vocabulary import VocabularyParallelEmbedding


@dataclass(frozen=True)
class PlannedModule:
    """A module that a plan names.

    Attributes:
        name: Name of the module in the model.
        module: Module.
        parent: Module of which it is an attribute.
        axis: Ranks that it is divided over.
        sequence: If true, activations between the divided layers are divided along the sequence.
        scattered: If true, the plan marks the start of that division with "scatter".
    """

    name: str
    module: nn.Module
    parent: nn.Module
    axis: Axis
    sequence: bool
    scattered: bool


class ParallelStyle(ABC):
    """A way to divide one module. Users pass one of the styles below, or its string in `STYLES`.

    Attributes:
        needs_row: If true, the output stays divided, so a row layer must follow.
        takes_parts: If true, the input may be the divided output of a column layer.
        by_vocabulary: If true, the rows of a vocabulary are divided.
        begins_sequence: If true, activations may be divided along the sequence from this module's output on.
        replicated: If true, dropout of this module itself draws the same numbers on all ranks.
    """

    needs_row: bool = False
    takes_parts: bool = False
    by_vocabulary: bool = False
    begins_sequence: bool = False
    replicated: bool = False

    @abstractmethod
    def apply(self, planned: PlannedModule) -> nn.Module:
        """Return the module that replaces the planned one: a parallel module, or the planned one itself.

        Raises:
            InputError: The module cannot be divided in this style.
        """


@dataclass(frozen=True)
class Column(ParallelStyle):
    """Style that divides the outputs of an nn.Linear (or a Conv1D of transformers).

    Attributes:
        sections: Number of equal, consecutive parts of a fused layer, or the features of each part; None for 3 if the
            name contains qkv, else 1.
        heads: Number of heads in the first part; None to read it from the parent module.
        gather: If true, the output is gathered; if false, it must be the input of a row layer.
    """

    sections: int | tuple[int, ...] | None = None
    heads: int | None = None
    gather: bool = False

    @property
    def needs_row(self) -> bool:  # type: ignore[override]
        return not self.gather

    def apply(self, planned: PlannedModule) -> nn.Module:
        linear, axis = _linear(planned, "column"), planned.axis
        features = column_features(planned.name, linear, planned.parent, axis.size, self.sections, self.heads)
        if isinstance(planned.module, LoraLinear):
            return ColumnParallelLora(planned.module, axis, features, gather_output=self.gather)
        return ColumnParallelLinear(
            linear, axis, features, gather_output=self.gather, sequence=planned.sequence, paired=not self.gather
        )


@dataclass(frozen=True)
class Row(ParallelStyle):
    """Style that divides the inputs of an nn.Linear (or a Conv1D of transformers).

    Attributes:
        heads: Number of heads in the inputs; None to read it from the parent module.
        scatter: If true, the input is whole and each rank uses its part; if false, it is a column layer's divided
            output.
    """

    takes_parts = True

    heads: int | None = None
    scatter: bool = False

    def apply(self, planned: PlannedModule) -> nn.Module:
        linear, axis = _linear(planned, "row"), planned.axis
        features = in_heads(planned.name, [linear.in_features], planned.parent, axis.size, self.heads)
        if isinstance(planned.module, LoraLinear) and not self.scatter:
            return RowParallelLora(planned.module, axis, features)
        return RowParallelLinear(linear, axis, features, scatter_input=self.scatter, sequence=planned.sequence)


@dataclass(frozen=True)
class Vocabulary(ParallelStyle):
    """Style that divides an nn.Embedding by tokens, or an nn.Linear by classes, whose scores stay divided.

    Forward hooks of an embedding are kept: they see all tokens, and with `sequence` a part of the output.
    """

    by_vocabulary = True
    begins_sequence = True

    def apply(self, planned: PlannedModule) -> nn.Module:
        if isinstance(planned.module, nn.Linear):
            linear = _plain(planned, nn.Linear, "vocabulary")
            return ColumnParallelLinear(linear, planned.axis, sequence=planned.sequence)
        embedding = _plain(planned, nn.Embedding, "vocabulary", hooks=True)
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(embedding, option):
                raise refusal(f"{planned.name}: an embedding with {option} cannot be divided; turn {option} off")
        sequence = planned.sequence and not planned.scattered
        parallel = VocabularyParallelEmbedding(embedding, planned.axis, sequence=sequence)
        for hook in embedding._forward_hooks.values():
            parallel.register_forward_hook(hook)
        return parallel


@dataclass(frozen=True)
class Undivided(ParallelStyle):
    """Style of a module that is not divided: each rank has all of it.

    The attributes matter only if activations are divided along the sequence.

    Attributes:
        exchange: Function applied to the module's output: `scatter` divides it along the sequence, `gather`
            concatenates the parts of all ranks; None leaves it unchanged.
        sums: If true, sum the gradients of the module's own parameters over the ranks, because each rank applies the
            module to a part of the sequence.
        begins_sequence: See `ParallelStyle`.
        replicated: See `ParallelStyle`.
    """

    exchange: Callable[[torch.Tensor, Axis, int], torch.Tensor] | None = None
    sums: bool = False
    begins_sequence: bool = False
    replicated: bool = False

    def apply(self, planned: PlannedModule) -> nn.Module:
        module, exchange = planned.module, self.exchange
        if planned.sequence and exchange is not None:

            def exchanged(m: nn.Module, args: Any, out: Any) -> Any:  # out: a tensor, or a tuple that begins with it
                if isinstance(out, tuple):
                    return exchange(out[0], planned.axis, SEQUENCE), *out[1:]
                return exchange(out, planned.axis, SEQUENCE)

            module.register_forward_hook(exchanged)
        for parameter in module.parameters(recurse=False) if planned.sequence and self.sums else ():
            sum_gradient(parameter, planned.axis)
        return module


@dataclass(frozen=True)
class PerHead(ParallelStyle):
    """Style of a module between a column and a row layer that treats all heads alike, such as a norm of queries.

    Each rank has the whole module and uses it on its own heads, so the gradients of the module's own parameters are
    summed.
    """

    def apply(self, planned: PlannedModule) -> nn.Module:
        for parameter in planned.module.parameters(recurse=False):
            sum_gradient(parameter, planned.axis)
        return planned.module


STYLES: Mapping[str, ParallelStyle] = {
    "column": Column(),
    "row": Row(),
    "vocabulary": Vocabulary(),
    "heads": PerHead(),
    "scatter": Undivided(scatter, begins_sequence=True, replicated=True),
    "gather": Undivided(gather, sums=True),
    "split": Undivided(sums=True),
    "whole": Undivided(replicated=True),
}


def _linear(planned: PlannedModule, style: str) -> LinearParts:
    """Return the parts of a plain linear layer, with or without an adapter. Raises InputError for another module."""
    parts = linear_parts(planned.module)
    if parts is None:
        _plain(planned, nn.Linear, style)
    if isinstance(planned.module, LoraLinear) and planned.sequence:
        raise refusal(f"{planned.name} has an adapter, which parallel.sequence does not support; set that to false")
    _refuse_hooks(planned)
    assert parts is not None
    return parts


def _plain(planned: PlannedModule, kind: type[Any], style: str, *, hooks: bool = False) -> Any:
    """Return the module if its type can be divided. Raises InputError otherwise.

    Args:
        planned: Module of the plan.
        kind: Required type of the module.
        style: Name of the style, for messages.
        hooks: If true, the module may have plain forward hooks.
    """
    module = planned.module
    if type(module) is not kind:
        types = "nn.Embedding or nn.Linear" if style == "vocabulary" else f"nn.{kind.__name__}"
        raise refusal(
            f"{planned.name} is a {type(module).__name__}, which cannot be divided as {style!r}; only a plain {types} "
            "can"
        )
    _refuse_hooks(planned, allowed=hooks)
    return module


def _refuse_hooks(planned: PlannedModule, *, allowed: bool = False) -> None:
    """Raise InputError for a module with hooks; `allowed` permits plain forward hooks, which the caller moves."""
    module = planned.module
    with_more = module._forward_hooks_with_kwargs or module._forward_hooks_always_called
    forward = module._forward_hooks and (with_more or not allowed)
    if forward or module._forward_pre_hooks or module._backward_hooks:
        raise refusal(f"{planned.name} has hooks, which would be lost when it is divided; register them afterwards")
