"""Blocks to the stages of a pipeline: the contiguous partition with the least time bound, by dynamic programming.

    seconds = sum of the stages / chunks + (microbatches x chunks - 1) x the slowest stage         (1)

A stage's seconds are those of its blocks, forward and backward, and of the messages to the stage after it. With one
stage a rank this is the latency of a pipeline in Zheng et al. 2022 (Alpa, section 5.1), which 1F1B and GPipe reach
where stages are equal; with more chunks a rank, the idle share shrinks as in Narayanan et al. 2021 (section 2.2). It
ranks cuts; the seconds of the chosen one are simulated.

As Alpa does, the slowest stage is fixed and the least sum with no stage slower is found by dynamic programming over
(stages, blocks), for one value after the other until no better sum could make up for a slower stage. What differs: the
shape of the mesh is given by the layout and the same for all stages, so that neither submeshes nor their assignment
are searched, and the dimension of devices in Alpa's recurrence goes away; a stage's memory limit depends on its
position, because the first stage holds more microbatches than the last. The result is exact: Alpa's step width between
values (its epsilon) is zero here. Where all messages are equally long, as in a transformer, one value is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mpitrain.planner.model import BlockCost

_Array = npt.NDArray[np.float64]
_EVEN = 1e-9  # share of a stage's seconds that decides between cuts that are equally good otherwise


@dataclass(frozen=True)
class Limits:
    """What a stage may take.

    Attributes:
        room: Bytes for activations, parameters, gradients and states of a stage.
        held: Microbatches that each stage holds at most.
        per_element: Bytes of a parameter with its gradient and states on one rank.
        recompute: Whether a block keeps its input alone.
    """

    room: float
    held: Sequence[int]
    per_element: float
    recompute: bool = False


def held_at_most(pipeline: int, chunks: int, microbatches: int, schedule: str) -> list[int]:
    """Microbatches that each stage of a pipeline holds at most, in the order of the stages (see `pipe.schedules`).

    With several stages a rank it is their mean.
    """
    if schedule == "1f1b":
        return [min(pipeline - rank, microbatches) for rank in range(pipeline)]
    most = {"gpipe": microbatches, "interleaved": pipeline + -(-(pipeline - 1) // chunks)}.get(schedule, pipeline)
    return [min(most, microbatches)] * (pipeline * chunks)


def best_cut(
    blocks: Sequence[BlockCost],
    stages: int,
    microbatches: int,
    chunks: int = 1,
    message: Callable[[int], float] = lambda nbytes: 0.0,
    limits: Limits | None = None,
) -> list[int] | None:
    """Bounds of the stages in the list of blocks, of which (1) is least.

    Args:
        blocks: Of the model, in order.
        stages: How many; each gets a block at least.
        microbatches: Of a step.
        chunks: Stages of a rank.
        message: Seconds of a message of so many bytes from a stage to the next; gradients come back in the same.
        limits: What each stage may take; None: anything.

    Returns:
        One bound more than stages: stage s has blocks bounds[s] to bounds[s + 1] - 1; of several best cuts that with
        the most even stages. None where no cut is possible.
    """
    if not 1 <= stages <= len(blocks):
        return None
    seconds = stage_seconds(blocks, message, limits is not None and limits.recompute)
    allowed = [np.isfinite(seconds)] * stages if limits is None else stage_fits(blocks, limits)
    of_sum, of_slowest = 1 / chunks, microbatches * chunks - 1
    slowest = _least(seconds, allowed, np.maximum)[0]
    if not np.isfinite(slowest):
        return None
    least_sum = _least(seconds, allowed, np.add)[0]
    best, found = np.inf, None
    for limit in np.unique(seconds[(seconds >= slowest) & np.isfinite(seconds)]):
        if of_sum * least_sum + of_slowest * limit >= best:
            break
        uneven = seconds * (1 + _EVEN * seconds / limit) if limit else seconds
        total, bounds = _least(uneven, [possible & (seconds <= limit) for possible in allowed], np.add)
        if of_sum * total + of_slowest * limit < best:
            best, found = of_sum * total + of_slowest * limit, bounds
    return found


def stage_seconds(blocks: Sequence[BlockCost], message: Callable[[int], float], recompute: bool = False) -> _Array:
    """Seconds [begin, end] of a stage of blocks begin to end - 1; infinite where there is none."""
    forward = np.array([block.forward for block in blocks])
    each = forward * (2 if recompute else 1) + np.array([block.input + block.weight for block in blocks])
    sums = np.concatenate([[0.0], np.cumsum(each)])
    seconds: _Array = sums[None, :] - sums[:, None]
    seconds[:, 1:-1] += 2 * np.array([message(block.given) for block in blocks[:-1]])[None, :]
    seconds[np.tril_indices(len(sums))] = np.inf
    return seconds


def stage_fits(blocks: Sequence[BlockCost], limits: Limits) -> list[npt.NDArray[np.bool_]]:
    """Of each stage, whether blocks [begin, end) fit on its rank.

    Tied parameters count in every block that has them.
    """
    kept = np.array([block.taken if limits.recompute else block.kept for block in blocks], dtype=float)
    weights = np.array([sum(weight.numel for weight in block.weights) for block in blocks], dtype=float)
    fits = []
    for held in limits.held:
        sums = np.concatenate([[0.0], np.cumsum(kept * held + weights * limits.per_element)])
        fits.append(sums[None, :] - sums[:, None] <= limits.room)
    return fits


def _least(
    seconds: _Array, allowed: Sequence[npt.NDArray[np.bool_]], combine: Callable[[_Array, _Array], _Array]
) -> tuple[float, list[int]]:
    """The least combination (sum, maximum) of the seconds of stages that are allowed, and their bounds."""
    places = len(seconds)
    best = np.full(places, np.inf)
    best[0] = 0.0
    choices = []
    for possible in allowed:
        options = combine(best[:, None], np.where(possible, seconds, np.inf))
        choice = np.argmin(options, axis=0)
        best = options[choice, np.arange(places)]
        choices.append(choice)
    bounds = [places - 1]
    for choice in reversed(choices):
        bounds.append(int(choice[bounds[-1]]))
    return float(best[-1]), bounds[::-1]
