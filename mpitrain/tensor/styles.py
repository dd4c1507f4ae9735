"""Parallel styles: how a plan divides a module over the ranks of the tensor axis (after torch's `ParallelStyle`)."""

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
        name: Of the module in the model.
        module: The module.
        parent: The module that it is an attribute of.
        axis: The ranks it is divided over.
        sequence: Whether activations between the divided layers are divided along the sequence.
        scattered: Whether the plan says by "scatter" where that division begins.
    """

    name: str
    module: nn.Module
    parent: nn.Module
    axis: Axis
    sequence: bool
    scattered: bool


class ParallelStyle(ABC):
    """How one module is divided. A user may pass one of the styles below, or the string it has in `STYLES`.

    Attributes:
        needs_row: Whether the output stays divided, so that a row layer must take it.
        takes_parts: Whether the input may be the divided output of a column layer.
        by_vocabulary: Whether rows of a vocabulary are divided.
        begins_sequence: Whether activations may be divided along the sequence from this module's output on.
        replicated: Whether dropout of this very module draws the same numbers on all ranks.
    """

    needs_row: bool = False
    takes_parts: bool = False
    by_vocabulary: bool = False
    begins_sequence: bool = False
    replicated: bool = False

    @abstractmethod
    def apply(self, planned: PlannedModule) -> nn.Module:
        """The module to put in the planned one's place: a parallel one, or itself.

        Raises:
            InputError: The module is none that can be divided in this style.
        """


@dataclass(frozen=True)
class Column(ParallelStyle):
    """Outputs of an nn.Linear (or a Conv1D of transformers) divided.

    Attributes:
        sections: Of a fused layer, how many equal parts lie one after the other, or the features of each; None: 3
            for names with qkv, else 1.
        heads: Of the first part; None: as the module around it says.
        gather: The output is put together again; else it must go to a row layer.
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
    """Inputs of an nn.Linear (or a Conv1D of transformers) divided.

    Attributes:
        heads: Of the inputs, as of `Column`.
        scatter: The input is whole, and each rank takes its part; else it is a column layer's divided output.
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
    """An nn.Embedding divided by tokens, or an nn.Linear by classes, whose scores stay divided.

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
                raise refusal(f"{planned.name}: an embedding with {option} cannot be divided; do without")
        sequence = planned.sequence and not planned.scattered
        parallel = VocabularyParallelEmbedding(embedding, planned.axis, sequence=sequence)
        for hook in embedding._forward_hooks.values():
            parallel.register_forward_hook(hook)
        return parallel


@dataclass(frozen=True)
class Undivided(ParallelStyle):
    """A module that each rank has whole. With sequence=True it says where the sequence is divided.

    Attributes:
        exchange: What becomes of the module's output: `scatter` divides it along the sequence from here on, `gather`
            puts it together.
        sums: Whether the module works on its part of the sequence: the gradients of its own parameters are summed.
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
class OfHeads(ParallelStyle):
    """A module between a column and a row layer that works on each head alike, as a norm of queries does.

    Each rank has it whole and uses it on its own heads: the gradients of its own parameters are summed.
    """

    def apply(self, planned: PlannedModule) -> nn.Module:
        for parameter in planned.module.parameters(recurse=False):
            sum_gradient(parameter, planned.axis)
        return planned.module


STYLES: Mapping[str, ParallelStyle] = {
    "column": Column(),
    "row": Row(),
    "vocabulary": Vocabulary(),
    "heads": OfHeads(),
    "scatter": Undivided(scatter, begins_sequence=True, replicated=True),
    "gather": Undivided(gather, sums=True),
    "split": Undivided(sums=True),
    "whole": Undivided(replicated=True),
}


def _linear(planned: PlannedModule, style: str) -> LinearParts:
    """The parts of a plain linear layer, with or without an adapter; else InputError."""
    parts = linear_parts(planned.module)
    if parts is None:
        _plain(planned, nn.Linear, style)
    if isinstance(planned.module, LoraLinear) and planned.sequence:
        raise refusal(f"{planned.name} has an adapter, which does not go with parallel.sequence; set that to false")
    _refuse_hooks(planned)
    assert parts is not None
    return parts


def _plain(planned: PlannedModule, kind: type[Any], style: str, *, hooks: bool = False) -> Any:
    """The module, if it is what can be divided; else InputError. hooks: it may have plain forward hooks."""
    module = planned.module
    if type(module) is not kind:
        wanted = "nn.Embedding or nn.Linear" if style == "vocabulary" else f"nn.{kind.__name__}"
        raise refusal(
            f"{planned.name} is a {type(module).__name__}, which cannot be divided as {style!r}; only a plain {wanted} "
            "can"
        )
    _refuse_hooks(planned, allowed=hooks)
    return module


def _refuse_hooks(planned: PlannedModule, *, allowed: bool = False) -> None:
    """Raise InputError for a module with hooks. allowed: plain forward hooks are moved along."""
    module = planned.module
    with_more = module._forward_hooks_with_kwargs or module._forward_hooks_always_called
    forward = module._forward_hooks and (with_more or not allowed)
    if forward or module._forward_pre_hooks or module._backward_hooks:
        raise refusal(f"{planned.name} has hooks, which dividing it would lose; register them afterwards")
