"""Sizes of batches: the global batch of each step, and the microbatches that each rank divides its part into.

The first steps use the batch sizes in train.batch_warmup, all later steps train.batch:

    train.batch_warmup [[2, 8], [1, 16]], train.batch 32

    steps done                  0   1   2   3   4
    samples of the next step    8   8  16  32  32
    samples of all steps done   0   8  16  32  64

Both rows follow from the number of steps alone, so a run can resume in the middle of the warm-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpitrain.errors import refusal

Stages = tuple[tuple[int, int], ...]  # (steps, samples of each one's global batch)

_EXAMPLE = "[[100, 8], [100, 16]] for 100 steps of 8 samples, then 100 of 16"


@dataclass(frozen=True)
class BatchSizes:
    """Global batch size of each step of a run.

    Attributes:
        warmup: Pairs (number of steps, samples per step) for the first steps, in order; may be empty.
        batch: Samples of each step after the warm-up.
    """

    warmup: Stages
    batch: int

    def size(self, step: int) -> int:
        """Return the samples in the global batch of step `step`, counted from 0."""
        return self.after(step)[0]

    def before(self, step: int) -> int:
        """Return the total number of samples in the first `step` steps."""
        total = 0
        for steps, size in self.warmup:
            total += min(steps, step) * size
            step -= min(steps, step)
        return total + step * self.batch

    def steps(self, samples: int) -> int:
        """Return the number of complete steps within the first `samples` samples; the inverse of `before`."""
        done = 0
        for steps, size in self.warmup:
            here = min(steps, samples // size)
            done, samples = done + here, samples - here * size
            if here < steps:
                return done
        return done + samples // self.batch

    def warmup_after(self, step: int) -> Stages:
        """Return the part of the warm-up that remains after `step` steps."""
        left = []
        for steps, size in self.warmup:
            if steps > step:
                left.append((steps - step, size))
            step = max(0, step - steps)
        return tuple(left)

    def after(self, step: int) -> list[int]:
        """Return the distinct batch sizes of the steps from `step` on, in order of first use."""
        return list(dict.fromkeys([*(size for _, size in self.warmup_after(step)), self.batch]))

    def key(self, size: int) -> str:
        """Return the name of the setting that defines batch size `size`, for error messages."""
        return "train.batch" if size == self.batch else "train.batch_warmup"

    def describe(self) -> str:
        """Return the warm-up as readable text, such as "100 steps of 8 samples"; empty if there is no warm-up."""
        stages = [f"{steps:,} steps of {size:,}" for steps, size in self.warmup]
        return f"{', '.join(stages)} samples" if stages else ""


def check_warmup(warmup: Any) -> Any:
    """Return the value of train.batch_warmup unchanged if it is a list of [steps, samples] pairs.

    Raises:
        ValueError: `warmup` is not a list of such pairs of integers of at least 1; the message names the wrong entry.
    """
    if not isinstance(warmup, (list, tuple)):
        raise ValueError(
            f"train.batch_warmup = {warmup!r:.200} is not a list of [steps, samples] pairs; write {_EXAMPLE}"
        )
    for number, entry in enumerate(warmup):
        fine = isinstance(entry, (list, tuple)) and len(entry) == 2
        if not fine or not all(type(value) is int and 1 <= value < 1 << 62 for value in entry):
            raise ValueError(
                f"train.batch_warmup, entry {number + 1}: {entry!r:.200} is not [steps, samples], two numbers of at "
                f"least 1; write {_EXAMPLE}"
            )
    return warmup


def require_multiples(sizes: BatchSizes, groups: int) -> None:
    """Raise InputError if a batch of the warm-up cannot be divided equally among the groups of parallel.mode local.

    Args:
        sizes: Batch sizes of the run; nothing is checked if there is no warm-up.
        groups: Number of groups of ranks that train independently between averages.

    Raises:
        InputError: Some batch size is not a multiple of `groups`.
    """
    uneven = next((size for size in sizes.after(0) if size % groups), None)
    if sizes.warmup and uneven is not None:
        raise refusal(
            f"parallel.mode local needs batches that are multiples of its {groups} groups, but "
            f"{sizes.key(uneven)} has {uneven} samples; use a multiple of {groups}, or remove "
            "train.batch_warmup"
        )


def accumulation(
    batch: int | None, microbatch: int | None, steps: int | None, *, ranks: int, names: Sequence[str]
) -> tuple[int, int]:
    """Compute the microbatch size and the accumulation steps from the numbers that the configuration sets.

    batch = microbatch x steps x ranks must hold.

    Args:
        batch: Samples per update, over all ranks; None if not set.
        microbatch: Samples of one rank in one backward pass; None if not set.
        steps: Backward passes per update; None if not set.
        ranks: Number of data-parallel ranks.
        names: Names of batch, microbatch and steps in the configuration, for the error message.

    Returns:
        (microbatch, steps); microbatch is 0 if neither `batch` nor `microbatch` is set.

    Raises:
        InputError: The numbers contradict each other, or `batch` cannot be divided in this way.
    """
    if batch is None:
        return microbatch or 0, steps or 1
    if microbatch is None:
        microbatch = batch // ((steps or 1) * ranks)
    if steps is None:
        steps = batch // (microbatch * ranks) if microbatch else 0
    if microbatch * steps * ranks != batch or not batch:
        product = f"{microbatch} x {steps} x {ranks} ranks" if microbatch and steps else f"{ranks} ranks"
        raise refusal(f"{names[0]} {batch} is not {product}; set it to microbatch x accumulation x ranks")
    return microbatch, steps
