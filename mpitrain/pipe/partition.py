"""Partition of a model's blocks into pipeline stages (`parallel.cut`), and of sequences into slices.

A model is an `nn.Sequential`, or has a method `pipeline_blocks() -> [(name, module), ...]`. Applying the listed modules
in order must give the model's output. The names are the module names in the whole model.

A slice of a sequence (TeraPipe, Li et al. 2021) may depend only on earlier slices. A block that uses earlier positions
needs a method `forward_slice` for that (see `stage`). A model without it would train on wrong losses with no visible
sign. `check_slices` therefore compares each block's output for slices with its output for the whole sequence.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from mpitrain.comm.memory import device as devices
from mpitrain.errors import InputError, refusal
from mpitrain.layers.loss_terms import Counts, shares_of, to_floats
from mpitrain.layout.boxes import split
from mpitrain.pipe.wire import as_tuple, map_tensors, signature_of

if TYPE_CHECKING:
    from mpitrain.comm import Communicator

Cut = str | Sequence[float] | Sequence[Sequence[float]]
_TRIES = 3  # timings of a block; the fastest counts


def listed_blocks(
    model: nn.Module | Sequence[tuple[str, nn.Module]], names: Sequence[str] = ()
) -> list[tuple[str, nn.Module]]:
    """Return the model's blocks in order, as (name, module) pairs.

    Args:
        model: Model, or its blocks as a list, which is returned unchanged.
        names: Module names to use as blocks. If empty, the model's `pipeline_blocks()` or the children of an
            `nn.Sequential` are used.

    Raises:
        InputError: The model does not list its blocks, a name is unknown, or a parameter is in none of the blocks.
    """
    if not isinstance(model, nn.Module):
        return list(model)
    if names:
        modules = dict(model.named_modules(remove_duplicate=False))
        if strangers := [name for name in names if name not in modules]:
            raise refusal(
                f"{type(model).__name__} has no module {strangers[0]!r} to use as a block; name one of its modules"
            )
        blocks = [(name, modules[name]) for name in names]
    elif callable(listing := getattr(model, "pipeline_blocks", None)):
        blocks = list(listing())
    elif isinstance(model, nn.Sequential):
        blocks = list(model.named_children())
    else:
        raise refusal(
            getattr(model, "undivided", "")
            or f"{type(model).__name__} does not list the blocks at which it can be divided; make it an "
            "nn.Sequential, or add a method pipeline_blocks() that returns pairs (name, module) in order"
        )
    inside = {id(p) for _, block in blocks for p in block.parameters()}
    outside = [name for name, p in model.named_parameters() if id(p) not in inside]
    if outside:
        raise refusal(f"parameters {outside[:3]} of the model are in none of its blocks; put them into a block")
    return blocks


def partition(costs: Sequence[Sequence[float]]) -> list[int]:
    """Divide a list into contiguous, non-empty parts so that the largest sum of costs is as small as possible.

    The parts may be computed by ranks of different speed, whose order is fixed; a rank that is half as fast then gets
    about half the work. Among the best partitions, the one with the smallest sum of squares is returned, so that the
    other parts are balanced too. Dynamic programming over (blocks taken, parts made), as for equal ranks in Narayanan
    et al. 2019 (PipeDream, section 3.1) and for a chain of unequal ones in Pinar, Tabak and Aykanat 2008
    (One-dimensional partitioning for heterogeneous systems).

    Args:
        costs: Cost of each block in each part: costs[part][block].

    Returns:
        The bounds, one more than parts: part p has blocks bounds[p] to bounds[p + 1] - 1.
    """
    parts, n = len(costs), len(costs[0])
    best: list[tuple[float, float]] = [(float("inf"), 0.0)] * (n + 1)
    best[0] = 0.0, 0.0
    choices: list[list[int]] = []
    for part in range(parts):
        total = [0.0, *accumulate(costs[part])]
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
    blocks: Sequence[Any], stages: int, numbers: Sequence[int] = (), costs: Sequence[Sequence[float]] | None = None
) -> list[int]:
    """Return the bounds of the stages in the list of blocks.

    The stages have `numbers` of blocks if given. Otherwise they get balanced sums of `costs`, or equally many blocks if
    there are no costs.

    Args:
        blocks: Blocks of the model, in order.
        stages: Number of stages.
        numbers: Number of blocks of each stage; may be empty.
        costs: Cost of each block on each stage: costs[stage][block]; None if all blocks cost the same.

    Returns:
        The bounds, `stages + 1` numbers: stage s has blocks bounds[s] to bounds[s + 1] - 1.

    Raises:
        InputError: `numbers` does not have one entry for each stage, an entry is below 1, the entries do not add up to
            the number of blocks, or there are fewer blocks than stages.
    """
    label = f"parallel.cut {list(numbers)}"
    if numbers and len(numbers) != stages:
        raise refusal(
            f"{label} is for {len(numbers)} stages, but there are {stages} (pipeline ranks x chunks); give {stages} "
            "numbers of blocks"
        )
    if numbers and (min(numbers) < 1 or sum(numbers) != len(blocks)):
        raise refusal(
            f"{label} lists {sum(numbers)} blocks, but the model has {len(blocks)}, and each stage needs at "
            f"least one; make the numbers add up to {len(blocks)}"
        )
    if len(blocks) < stages:
        raise refusal(
            f"the model has {len(blocks)} blocks, but there are {stages} stages (pipeline ranks x chunks); use fewer "
            "stages or a deeper model"
        )
    if numbers:
        return [0, *accumulate(numbers)]
    return split(len(blocks), stages) if costs is None else partition(costs)


def parameter_costs(blocks: Sequence[tuple[str, nn.Module]]) -> list[float]:
    """Return the number of parameters of each block."""
    return [float(sum(p.numel() for p in block.parameters())) for _, block in blocks]


def time_costs(blocks: Sequence[tuple[str, nn.Module]], x: Any, device: torch.device | None = None) -> list[float]:
    """Return the measured seconds of one forward and backward pass of each block.

    The model's buffers and the random generators are restored afterwards.

    Args:
        blocks: Blocks of the model, in order.
        x: Input of the model.
        device: Device to measure on, where each block is copied in turn. Default: that of the input and the blocks.
    """
    costs = []
    here = next((t.device for t in as_tuple(x) if isinstance(t, torch.Tensor)), devices.CPU)
    elsewhere = device is not None and device != here
    device = device or here
    x = map_tensors(lambda t: t.to(device), x)
    with devices.preserve_generators(device), torch.enable_grad():
        for _, block in blocks:
            block = copy.deepcopy(block).to(device) if elsewhere else block
            buffers = [(b, b.clone()) for b in block.buffers()]
            seconds, x = min((_timed(block, x) for _ in range(_TRIES)), key=lambda pair: pair[0])
            costs.append(seconds)
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
    return costs


def _timed(block: nn.Module, x: Any) -> tuple[float, Any]:
    """Return the seconds of one forward and backward pass, and the block's output, detached."""
    tensors = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in as_tuple(x)]
    copies = [t.clone() for t in tensors]  # a block may overwrite these, but not leaves of a graph
    x = copies[0] if isinstance(x, torch.Tensor) else tuple(copies)
    device = next((t.device for t in tensors), devices.CPU)
    devices.synchronize(device)
    begin = time.perf_counter()
    y = block(x)
    outputs = [t for t in as_tuple(y) if t.requires_grad]
    leaves = [t for t in [*tensors, *block.parameters()] if t.requires_grad]
    if outputs and leaves:
        torch.autograd.grad(outputs, leaves, [torch.ones_like(t) for t in outputs], allow_unused=True)
    devices.synchronize(device)
    return time.perf_counter() - begin, map_tensors(torch.Tensor.detach, y)


def costs_by_rank(world: Communicator, stages: Communicator, measure: Callable[[], list[float]]) -> list[list[float]]:
    """Return the cost of each block on each rank of a pipeline: costs[rank][block]. Collective.

    All ranks measure at the same time, as they compute in training. Where several ranks have the same stages, those of
    other pipelines for example, the slowest counts.

    Args:
        world: Ranks of all pipelines.
        stages: Ranks of this rank's pipeline.
        measure: Function that returns the cost of each block on this rank, for example `time_costs`.
    """
    seconds, error = list[float](), None
    try:
        seconds = measure()
    except Exception as caught:  # agree() raises it on all ranks
        error = caught
    world.agree(error)
    costs = np.array(stages.all_gather_object(seconds))
    world.all_reduce(costs, "max")
    return [list(each) for each in costs.tolist()]


_SEQUENCE = 1  # the sequence's dimension in [samples, sequence, ...]


def slice_sequences(
    microbatches: Sequence[tuple[Any, Any]], weights: Sequence[float], slices: int, counts: Counts | None = None
) -> tuple[list[tuple[Any, Any]], list[float]]:
    """Slice each microbatch along its sequence, and give each slice its share of the microbatch's weight.

    The share is proportional to the slice's length, or to its number of counted targets if `counts` is given.

    Args:
        microbatches: Pairs (x, y), both [samples, sequence, ...].
        weights: Weight of each microbatch in the loss.
        slices: Number of slices of each microbatch.
        counts: Function that counts the targets that the mean loss is over; None to count positions.

    Returns:
        The slices (x, y) of all microbatches in order, and the weight of each slice.

    Raises:
        InputError: A microbatch is not a pair of tensors [samples, sequence, ...], or has fewer positions than slices.
    """
    sliced: list[tuple[Any, Any]] = []
    shares: list[float] = []
    for (x, y), weight in zip(microbatches, weights, strict=True):
        length = x.shape[_SEQUENCE] if isinstance(x, torch.Tensor) and x.dim() > 1 else 0
        if length < slices or not isinstance(y, torch.Tensor) or y.shape[:2] != x.shape[:2]:
            raise refusal(
                f"a microbatch of x {signature_of(x)} and y {signature_of(y)} cannot be divided into {slices} "
                "slices of the sequence; pass x and y as one tensor each, [samples, sequence, ...], or use "
                "fewer slices"
            )
        for lo, hi in pairwise(split(length, slices)):
            sliced.append((x[:, lo:hi], y[:, lo:hi]))
            shares.append(weight * (hi - lo) / length)
    if counts is None:
        return sliced, shares
    each = to_floats(counts(y) for _, y in sliced)
    parts = [each[first : first + slices] for first in range(0, len(each), slices)]
    weighted = [(weight, part) for weight, of_one in zip(weights, parts, strict=True) for part in shares_of(of_one)]
    return sliced, [weight * part for weight, part in weighted]


def require_look_back(model: Any, blocks: Sequence[tuple[str, nn.Module]], slices: int) -> None:
    """Raise InputError if sequences are sliced and none of the model's blocks has `forward_slice`.

    Args:
        model: Model, named in the message.
        blocks: Blocks of the model.
        slices: Number of slices of a sequence; 1 means no slicing.
    """
    if slices > 1 and not any(hasattr(block, "forward_slice") for _, block in blocks):
        name = f"{type(model).__name__} has" if isinstance(model, nn.Module) else "the blocks have"
        raise refusal(
            f"{slices} slices of the sequence: blocks that look at earlier positions need a method "
            f"forward_slice(x, past), but {name} none; set parallel.slices to 1"
        )


def check_slices(blocks: Sequence[tuple[str, nn.Module]], x: torch.Tensor, y: torch.Tensor, slices: int) -> None:
    """Raise InputError naming a block whose output for slices of a sequence differs from its output for the whole.

    The model and the random generators are left unchanged.

    Args:
        blocks: Blocks of the model, in order.
        x: Samples with different values at different positions, [samples, sequence, ...].
        y: Targets of the samples, [samples, sequence, ...].
        slices: Number of slices of the sequence.
    """
    slice_sequences([(x, y)], [1.0], slices)
    modes = [(module, module.training) for _, block in blocks for module in block.modules()]
    empty = [p for _, block in blocks for p in block.parameters() if not p.any()]  # zeros would hide differences
    bounds = split(x.shape[_SEQUENCE], slices)
    try:
        for module, _ in modes:
            module.training = False  # without dropout
        with devices.preserve_generators(x.device), torch.no_grad():
            for parameter in empty:
                parameter.normal_(std=0.1)
            for name, block in blocks:
                if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in block.modules()):
                    raise _slices_error(name, block, slices, "it normalises over all positions of a batch")
                whole = block(x)
                _require_equal_slices(name, block, x, whole, bounds)
                x = whole
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for parameter in empty:
                parameter.zero_()


def _require_equal_slices(name: str, block: nn.Module, x: Any, whole: Any, bounds: Sequence[int]) -> None:
    """Raise InputError unless the block's outputs for the slices of x are the slices of `whole`."""
    slices = len(bounds) - 1
    look_back = getattr(block, "forward_slice", None)
    past: list[Any] = []
    parts: list[Any] = []

    def positions(value: Any, lo: int, hi: int) -> Any:
        return map_tensors(lambda t: t[:, lo:hi], value)

    try:
        for lo, hi in pairwise(bounds):
            part = positions(x, lo, hi)
            if look_back is None:
                parts.append(block(part))
            else:
                out, state = look_back(part, list(past))
                parts.append(out)
                past.append(state)
        equal = all(
            torch.allclose(a, b, rtol=1e-3, atol=1e-5)
            for part, (lo, hi) in zip(parts, pairwise(bounds), strict=True)
            for a, b in zip(as_tuple(part), as_tuple(positions(whole, lo, hi)), strict=True)
        )
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise _slices_error(name, block, slices, f"it fails: {' '.join(str(error).split())}") from error
    if not equal:
        raise _slices_error(name, block, slices, "its output differs")


def _slices_error(name: str, block: nn.Module, slices: int, what: str) -> InputError:
    """Return the error that names a block and the reason why it cannot take slices."""
    return refusal(
        f"{slices} slices of the sequence: block {name} ({type(block).__name__}) does not compute the same for "
        f"slices as for the whole sequence: {what}; make it causal and implement forward_slice, or set "
        "parallel.slices to 1"
    )
