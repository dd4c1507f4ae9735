"""How a model's blocks are partitioned into stages: bounds in the list of blocks (`parallel.cut` says by what).

A model lists its blocks as `pipeline_blocks() -> [(name, module), ...]`, such that feeding its input through them
in order gives its output, or is an nn.Sequential. Names are those of the modules in the whole model.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from mpitrain.comm.memory import device as devices
from mpitrain.errors import refusal
from mpitrain.layout import split
from mpitrain.pipe.wire import as_tuple

_TRIES = 3  # of a block's timing; the fastest counts


def listed_blocks(
    model: nn.Module | Sequence[tuple[str, nn.Module]], names: Sequence[str] = ()
) -> list[tuple[str, nn.Module]]:
    """(name, module) of a model's blocks, in order.

    names: Of the blocks, where the model is not to be asked. Raises InputError when nobody says what they are.
    """
    if not isinstance(model, nn.Module):
        return list(model)
    if names:
        modules = dict(model.named_modules(remove_duplicate=False))
        if strangers := [name for name in names if name not in modules]:
            raise refusal(f"{type(model).__name__} has no module {strangers[0]!r} to be a block; name one it has")
        blocks = [(name, modules[name]) for name in names]
    elif callable(listing := getattr(model, "pipeline_blocks", None)):
        blocks = list(listing())
    elif isinstance(model, nn.Sequential):
        blocks = list(model.named_children())
    else:
        raise refusal(
            getattr(model, "undivided", "")
            or f"{type(model).__name__} does not say where it may be cut; make it an nn.Sequential or give it a method "
            "pipeline_blocks() that lists (name, module) in order"
        )
    inside = {id(p) for _, block in blocks for p in block.parameters()}
    outside = [name for name, p in model.named_parameters() if id(p) not in inside]
    if outside:
        raise refusal(f"parameters {outside[:3]} of the model are in none of its blocks; put them into one")
    return blocks


def partition(costs: Sequence[float], parts: int) -> list[int]:
    """Divide a list into contiguous, non-empty parts whose largest sum of costs is as small as possible.

    Of several such partitions it is that with the smallest sum of squares, so that the other parts are even too.
    Dynamic programming over (blocks taken, parts made).

    Args:
        costs: Of each block.
        parts: How many.

    Returns:
        The bounds, one more than parts: part p has blocks bounds[p] to bounds[p + 1] - 1.
    """
    total = [0.0, *accumulate(costs)]
    n = len(costs)
    best: list[tuple[float, float]] = [(float("inf"), 0.0)] * (n + 1)
    best[0] = 0.0, 0.0
    choices: list[list[int]] = []
    for part in range(parts):
        following: list[tuple[float, float]] = [(float("inf"), 0.0)] * (n + 1)
        choice = [0] * (n + 1)
        for end in range(part + 1, n - (parts - part - 1) + 1):
            for begin in range(part, end):
                here = total[end] - total[begin]
                largest, squares = best[begin]
                score = max(largest, here), squares + here * here
                if score < following[end]:
                    following[end], choice[end] = score, begin
        best = following
        choices.append(choice)
    bounds = [n]
    for choice in reversed(choices):
        bounds.append(choice[bounds[-1]])
    return bounds[::-1]


def stage_bounds(
    blocks: Sequence[Any], stages: int, numbers: Sequence[int] = (), costs: Sequence[float] | None = None
) -> list[int]:
    """Bounds of the stages in the list of blocks: as many blocks as is said, by costs, or equally many.

    Args:
        blocks: Of the model.
        stages: How many.
        numbers: Blocks of each stage; none where nobody says.
        costs: Of each block.

    Raises:
        InputError: There are not as many numbers as stages, one is less than 1, or they are not all blocks together; or
            there are fewer blocks than stages.
    """
    told = f"parallel.cut {list(numbers)}"
    if numbers and len(numbers) != stages:
        raise refusal(
            f"{told} is for {len(numbers)} stages, but there are {stages} (pipeline ranks x chunks); give {stages} "
            "numbers of blocks"
        )
    if numbers and (min(numbers) < 1 or sum(numbers) != len(blocks)):
        raise refusal(
            f"{told} gives out {sum(numbers)} blocks, and the model has {len(blocks)}, of which each stage needs one; "
            f"make the numbers add up to {len(blocks)}"
        )
    if len(blocks) < stages:
        raise refusal(
            f"the model has {len(blocks)} blocks, but there are {stages} stages (pipeline ranks x chunks); use fewer "
            "stages or a deeper model"
        )
    if numbers:
        return [0, *accumulate(numbers)]
    return split(len(blocks), stages) if costs is None else partition(costs, stages)


def parameter_costs(blocks: Sequence[tuple[str, nn.Module]]) -> list[float]:
    """The number of parameters of each block."""
    return [float(sum(p.numel() for p in block.parameters())) for _, block in blocks]


def time_costs(blocks: Sequence[tuple[str, nn.Module]], x: Any) -> list[float]:
    """Seconds each block takes forward and backward for input x of the model. Leaves no trace in the model."""
    costs = []
    device = next((t.device for t in as_tuple(x) if isinstance(t, torch.Tensor)), devices.CPU)
    with devices.generators_kept(device), torch.enable_grad():
        for _, block in blocks:
            buffers = [(b, b.clone()) for b in block.buffers()]
            seconds, x = min((_timed(block, x) for _ in range(_TRIES)), key=lambda pair: pair[0])
            costs.append(seconds)
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
    return costs


def _timed(block: nn.Module, x: Any) -> tuple[float, Any]:
    """Seconds of forward and backward, and the block's output, detached."""
    tensors = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in as_tuple(x)]
    given = [t.clone() for t in tensors]  # the block may overwrite these, but not leaves of a graph
    x = given[0] if isinstance(x, torch.Tensor) else tuple(given)
    device = next((t.device for t in tensors), devices.CPU)
    devices.synchronize(device)
    begin = time.perf_counter()
    y = block(x)
    outputs = [t for t in as_tuple(y) if t.requires_grad]
    wanted = [t for t in [*tensors, *block.parameters()] if t.requires_grad]
    if outputs and wanted:
        torch.autograd.grad(outputs, wanted, [torch.ones_like(t) for t in outputs], allow_unused=True)
    devices.synchronize(device)
    seconds = time.perf_counter() - begin
    return seconds, y.detach() if isinstance(y, torch.Tensor) else tuple(t.detach() for t in y)
