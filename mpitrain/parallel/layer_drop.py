"""Stochastic depth: in each step of training, some blocks are left out at random (the setting model.layer_drop).

Block l of L is left out of a step with probability p l / L, where p is the setting. If it is computed, what it adds to
its input is divided by 1 - p l / L, so that the expected output is that of the whole model, and evaluation computes all
blocks unchanged.

All ranks draw the same blocks for all samples of a step. Gradients of a block that is left out are zero on every rank,
and a bucket of such gradients is not sent.

References:
    Huang et al. 2016, Deep Networks with Stochastic Depth.
    Li et al. 2020, PyTorch Distributed, section 6.2.2 (layer dropping).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from mpitrain.errors import refusal
from mpitrain.parallel.rules import without_blocks
from mpitrain.shard.flat import members


class LayerDrop:
    """The blocks of a model that steps may leave out; replaces the blocks' `forward`.

    A block returns its input plus what it computes, in the form of the input: a tensor, or a tuple that begins with
    one. A block whose output has another form has a method `skip`, which returns the output of a block that adds
    nothing.

    Args:
        module: The model, or a pipeline rank's part of it.
        blocks: Blocks of the whole model.
        probability: Probability with which the last block is left out.

    Raises:
        InputError: The model has no blocks.
    """

    def __init__(self, module: nn.Module, blocks: Sequence[nn.Module], probability: float) -> None:
        if not blocks:
            raise refusal(without_blocks("model.layer_drop"))
        self._rates = [probability * (number + 1) / len(blocks) for number in range(len(blocks))]
        self._dropped = [False] * len(blocks)
        here = set(module.modules())
        local_blocks = [(number, block) for number, block in enumerate(blocks) if block in here]
        unit_parameters = members(module, [block for _, block in local_blocks])
        self._parameters = {number: of for (number, _), of in zip(local_blocks, unit_parameters, strict=False)}
        for number, block in local_blocks:
            block.forward = partial(self._call, number, block, block.forward)

    def draw(self, seed: int, step: int) -> set[nn.Parameter]:
        """Choose the blocks that a step leaves out, and return those of their parameters that no other block uses.

        Args:
            seed: Seed of the run.
            step: Steps done.
        """
        chance = random.Random(f"layer_drop {seed} {step}")
        self._dropped = [chance.random() < rate for rate in self._rates]
        return {p for number, of in self._parameters.items() if self._dropped[number] for p in of}

    def _call(
        self, number: int, block: nn.Module, function: Callable[..., Any], x: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Compute a block, or leave it out."""
        if not block.training:
            return function(x, *args, **kwargs)
        if self._dropped[number]:
            output = getattr(block, "skip", lambda x: x)(x)
            stream = _first(output)
            return _with_first(output, stream.view_as(stream))
        output = function(x, *args, **kwargs)
        before, after = _first(x), _first(output)
        if not torch.is_tensor(after) or after.shape != before.shape:
            raise refusal(
                f"model.layer_drop: the output of {type(block).__name__} does not have the form of its input, so the "
                "block cannot be left out; set model.layer_drop to 0"
            )
        return _with_first(output, torch.lerp(before, after.to(before.dtype), 1 / (1 - self._rates[number])))


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value


def _with_first(value: Any, first: torch.Tensor) -> Any:
    return (first, *value[1:]) if isinstance(value, tuple) else first
