"""What the trainer gets to train: a module and its loss.

Built-in models and the user's own are handed over in the same form, so nothing after this room knows which
one it has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn


class DataDescription(Protocol):
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
    """loss(module(x), y) is a scalar: the mean over the samples of the batch."""

    module: nn.Module
    loss: Callable[[Any, Any], torch.Tensor]
