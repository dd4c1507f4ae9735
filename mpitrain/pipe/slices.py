"""Slices of sequences (TeraPipe, Li et al. 2021): the microbatches, and whether a model can take them slice by slice.

A slice may depend on earlier ones alone, and a block that looks at earlier positions must say how: `forward_slice`
(see `stage`). Any other model would train on wrong losses without a sign of it, so every model is tried before its
sequences are sliced.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from mpitrain.comm.memory.device import generators_kept
from mpitrain.errors import InputError, refusal
from mpitrain.layout import split
from mpitrain.pipe.wire import as_tuple, look

_SEQUENCE = 1  # the dimension of it everywhere: [samples, sequence, ...]


def slice_sequences(
    microbatches: Sequence[tuple[Any, Any]], weights: Sequence[float], slices: int
) -> tuple[list[tuple[Any, Any]], list[float]]:
    """Slice each microbatch along its sequence, and weight the slices by their lengths.

    Args:
        microbatches: (x, y), both [samples, sequence, ...].
        weights: Of each microbatch in the loss.
        slices: Of each microbatch.

    Raises:
        InputError: A microbatch does not give so many slices.
    """
    sliced: list[tuple[Any, Any]] = []
    shares: list[float] = []
    for (x, y), weight in zip(microbatches, weights, strict=True):
        length = x.shape[_SEQUENCE] if isinstance(x, torch.Tensor) and x.dim() > 1 else 0
        if length < slices or not isinstance(y, torch.Tensor) or y.shape[:2] != x.shape[:2]:
            raise refusal(
                f"a microbatch of x {look(x)} and y {look(y)} does not give {slices} slices of the sequence; both must "
                "be one tensor [samples, sequence, ...]; use fewer slices"
            )
        for lo, hi in pairwise(split(length, slices)):
            sliced.append((x[:, lo:hi], y[:, lo:hi]))
            shares.append(weight * (hi - lo) / length)
    return sliced, shares


def require_look_back(model: Any, blocks: Sequence[tuple[str, nn.Module]], slices: int) -> None:
    """Raise InputError for a model whose sequence is to be sliced, and none of whose blocks has `forward_slice`."""
    if slices > 1 and not any(hasattr(block, "forward_slice") for _, block in blocks):
        name = f"{type(model).__name__} has" if isinstance(model, nn.Module) else "the blocks have"
        raise refusal(
            f"{slices} slices of the sequence: blocks that look at earlier positions need a method "
            f"forward_slice(x, past), but {name} none; set parallel.slices to 1"
        )


def check_slices(blocks: Sequence[tuple[str, nn.Module]], x: torch.Tensor, y: torch.Tensor, slices: int) -> None:
    """Raise InputError naming the block that gives something else for slices of the sequence than for the whole.

    Leaves no trace in the model.

    Args:
        blocks: Of the model, in order.
        x: Samples with different values at different positions, [samples, sequence, ...].
        y: Their targets.
        slices: Of the sequence.
    """
    slice_sequences([(x, y)], [1.0], slices)
    modes = [(module, module.training) for _, block in blocks for module in block.modules()]
    empty = [p for _, block in blocks for p in block.parameters() if not p.any()]  # what starts as 0 would hide much
    bounds = split(x.shape[_SEQUENCE], slices)
    try:
        for module, _ in modes:
            module.training = False  # without dropout
        with generators_kept(x.device), torch.no_grad():
            for parameter in empty:
                parameter.normal_(std=0.1)
            for name, block in blocks:
                if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in block.modules()):
                    raise _refused(name, block, slices, "it normalises over all positions of a batch")
                whole = block(x)
                _compare(name, block, x, whole, bounds)
                x = whole
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for parameter in empty:
                parameter.zero_()


def _compare(name: str, block: nn.Module, x: Any, whole: Any, bounds: Sequence[int]) -> None:
    """Raise InputError unless the block makes of the slices of x the slices of `whole`."""
    slices = len(bounds) - 1
    look_back = getattr(block, "forward_slice", None)
    past: list[Any] = []
    parts: list[Any] = []
    try:
        for lo, hi in pairwise(bounds):
            part = _part(x, lo, hi)
            if look_back is None:
                parts.append(block(part))
            else:
                out, state = look_back(part, list(past))
                parts.append(out)
                past.append(state)
        alike = all(
            torch.allclose(a, b, rtol=1e-3, atol=1e-5)
            for part, (lo, hi) in zip(parts, pairwise(bounds), strict=True)
            for a, b in zip(as_tuple(part), as_tuple(_part(whole, lo, hi)), strict=True)
        )
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise _refused(name, block, slices, f"it fails: {' '.join(str(error).split())}") from error
    if not alike:
        raise _refused(name, block, slices, "it gives something else")


def _refused(name: str, block: nn.Module, slices: int, what: str) -> InputError:
    """The error that names a block and why it cannot take slices."""
    return refusal(
        f"{slices} slices of the sequence: block {name} ({type(block).__name__}) does not do for them what it does for "
        f"the whole: {what}; it must be causal and say by forward_slice how it looks back, or set parallel.slices to 1"
    )


def _part(value: Any, lo: int, hi: int) -> Any:
    """Positions [lo, hi) of a tensor, or of each of a tuple."""
    if isinstance(value, torch.Tensor):
        return value[:, lo:hi]
    return tuple(_part(v, lo, hi) for v in value)
