"""Sizes of batches: the global batch of each step, and the microbatches of a rank that it is made of.

The batches of train.batch_warmup come first, then those of train.batch:

    train.batch_warmup [[2, 8], [1, 16]], train.batch 32

    steps done               0   1   2   3   4
    the next one's samples   8   8  16  32  32
    samples before it        0   8  16  32  64

Both follow from the number of steps alone, so that a run goes on in the middle of the warm-up by its step and position.
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
    """The sizes of a run's global batches.

    Attributes:
        warmup: Those of the first steps.
        batch: Of all steps after these.
    """

    warmup: Stages
    batch: int

    def size(self, step: int) -> int:
        """Samples of the next step's batch, when `step` steps are done."""
        return self.after(step)[0]

    def before(self, step: int) -> int:
        """Samples that the first `step` steps take together."""
        total = 0
        for steps, size in self.warmup:
            total += min(steps, step) * size
            step -= min(steps, step)
        return total + step * self.batch

    def steps(self, samples: int) -> int:
        """The steps that take the first `samples` samples, as many as `before` told."""
        done = 0
        for steps, size in self.warmup:
            here = min(steps, samples // size)
            done, samples = done + here, samples - here * size
            if here < steps:
                return done
        return done + samples // self.batch

    def warmup_after(self, step: int) -> Stages:
        """Return the rest of the warm-up, when `step` steps are done."""
        left = []
        for steps, size in self.warmup:
            if steps > step:
                left.append((steps - step, size))
            step = max(0, step - steps)
        return tuple(left)

    def after(self, step: int) -> list[int]:
        """The sizes that batches still have when `step` steps are done, in order."""
        return list(dict.fromkeys([*(size for _, size in self.warmup_after(step)), self.batch]))

    def key(self, size: int) -> str:
        """The setting that a size comes from."""
        return "train.batch" if size == self.batch else "train.batch_warmup"

    def describe(self) -> str:
        """The warm-up, for people; empty where there is none."""
        told = [f"{steps:,} steps of {size:,}" for steps, size in self.warmup]
        return f"{', '.join(told)} samples" if told else ""


def checked_warmup(given: Any) -> Any:
    """The entries of train.batch_warmup as they were given. Raises ValueError with a line where they are no pairs."""
    if not isinstance(given, (list, tuple)):
        raise ValueError(f"train.batch_warmup = {given!r:.200} is no list of [steps, samples]; write {_EXAMPLE}")
    for number, entry in enumerate(given):
        fine = isinstance(entry, (list, tuple)) and len(entry) == 2
        if not fine or not all(type(value) is int and 1 <= value < 1 << 62 for value in entry):
            raise ValueError(
                f"train.batch_warmup, entry {number + 1}: {entry!r:.200} is not [steps, samples], two numbers of at "
                f"least 1; write {_EXAMPLE}"
            )
    return given


def require_multiples(sizes: BatchSizes, groups: int) -> None:
    """Raise InputError where groups of ranks would not have the same part of each of several batches."""
    uneven = next((size for size in sizes.after(0) if size % groups), None)
    if sizes.warmup and uneven is not None:
        raise refusal(
            f"train.batch_warmup in parallel.mode local needs batches that are multiples of the {groups} groups, and "
            f"{sizes.key(uneven)} has {uneven} samples; change it, or leave the warm-up out"
        )


def accumulation(
    batch: int | None, microbatch: int | None, steps: int | None, *, ranks: int, names: Sequence[str]
) -> tuple[int, int]:
    """Complete the three numbers of a batch from those that are given.

    Args:
        batch: Samples of an update, over all ranks; None where nothing was said.
        microbatch: Samples of one rank in one backward pass; None where nothing was said.
        steps: Backward passes of an update; None where nothing was said.
        ranks: Data-parallel ranks.
        names: What the three numbers are called in the configuration, for the error.

    Returns:
        (microbatch, steps); microbatch is 0 where neither it nor a batch was given.

    Raises:
        InputError: The numbers do not fit each other.
    """
    if batch is None:
        return microbatch or 0, steps or 1
    if microbatch is None:
        microbatch = batch // ((steps or 1) * ranks)
    if steps is None:
        steps = batch // (microbatch * ranks) if microbatch else 0
    if microbatch * steps * ranks != batch or not batch:
        told = f"{microbatch} x {steps} x {ranks} ranks" if microbatch and steps else f"{ranks} ranks"
        raise refusal(f"{names[0]} {batch} is not {told}; make it microbatch x accumulation x ranks")
    return microbatch, steps
