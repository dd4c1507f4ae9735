"""What the trainer gets to train: a module, its loss, and the blocks a pipeline may cut it at.

Built-in models and the user's own are handed over in the same form, so nothing after this room knows which
one it has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

Blocks: TypeAlias = "tuple[tuple[str, nn.Module], ...]"


class Description(Protocol):
    """The part of a data set's description that a model is shaped by (mpitrain.data.Description has it)."""

    @property
    def kind(self) -> str: ...  # "tokens" or "arrays"

    @property
    def x_shape(self) -> tuple[int, ...]: ...  # of one sample

    @property
    def y_shape(self) -> tuple[int, ...]: ...  # of one sample; () for a label or a single number

    @property
    def vocabulary(self) -> int | None: ...  # of tokens

    @property
    def classes(self) -> tuple[str, ...] | None: ...  # None: y is no class


@dataclass(frozen=True)
class Task:
    """loss(module(x), y) is a scalar: the mean over the samples of the batch.

    blocks: (qualified name, module) in order, such that feeding x through them equals module(x); empty when
    the module does not say how it may be cut.
    """

    module: nn.Module
    loss: Callable[[Any, Any], torch.Tensor]
    blocks: Blocks = ()


def blocks_of(module: nn.Module) -> Blocks:
    """The module's own `pipeline_blocks()`, the children of an nn.Sequential, or nothing."""
    if callable(listing := getattr(module, "pipeline_blocks", None)):
        return tuple(listing())
    if isinstance(module, nn.Sequential):
        return tuple(module.named_children())
    return ()
