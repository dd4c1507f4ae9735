"""How a batch comes together: batch = microbatch x accumulation steps x data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence

from mpitrain.errors import refusal


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
