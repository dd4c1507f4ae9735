"""Activation recompute: a block keeps its input alone, and computes its activations again in backward.

Dropout draws the same numbers again.

Reference:
    Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from mpitrain.errors import refusal
from mpitrain.shard.flat import blocks_of


def recompute_blocks(module: nn.Module) -> int:
    """Let every block of a model be recomputed in backward; the module is changed in place.

    Args:
        module: The model; `mpitrain.shard.flat.blocks_of` says what its blocks are.

    Returns:
        The number of blocks.

    Raises:
        InputError: The model has none.
    """
    blocks = blocks_of(module)
    if not blocks:
        raise refusal(
            "train.recompute finds no blocks in the model: put its layers into a ModuleList or Sequential, or set it "
            "to false"
        )
    for block in blocks:
        block.forward = partial(_recomputed, block, block.forward)
    return len(blocks)


def _recomputed(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The block's forward in training, which keeps its input alone."""
    if not block.training:
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
