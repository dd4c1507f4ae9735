"""How good scores are that are divided over the ranks of the tensor axis, without putting them together.

Of every token the ranks exchange four numbers, as for the loss (see `vocabulary`), and once more one, where it is asked
how many classes are above the right one.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from mpitrain.tensor.axis import Axis


@torch.no_grad()
def judge(
    scores: torch.Tensor, y: torch.Tensor, axis: Axis, classes: int, *, top: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """What divided scores of targets come to. Collective over the axis.

    Args:
        scores: [..., part], this rank's part of the scores.
        y: [...], int64, the right classes; what is none of them has no meaning in the results.
        axis: The ranks.
        classes: Of all ranks together.
        top: Whether it is asked how many classes are above the right one.

    Returns:
        Of each target, [targets] and the same on all ranks: the cross-entropy in nats, the class with the largest
        score, and how many other classes have a score that is not smaller than the right one's (None if not asked).
    """
    bounds = axis.bounds(classes)
    start, stop = bounds[axis.rank], bounds[axis.rank + 1]
    y = y.reshape(-1)
    wide = scores.reshape(len(y), stop - start).to(torch.promote_types(scores.dtype, torch.float32))
    here = (y >= start) & (y < stop)

    # of each target: the largest score here, whose it is, the sum of exponentials of the scores less it, y's score
    numbers = wide.new_zeros(4, len(y), dtype=torch.float64)
    numbers[0].fill_(float("-inf"))
    if stop > start:
        largest, at = wide.max(-1)
        numbers[0], numbers[1] = largest, at + start
        numbers[2] = (wide - largest.unsqueeze(-1)).exp_().sum(-1)
        column = (y - start).clamp(0, stop - start - 1).unsqueeze(-1)
        numbers[3] = wide.gather(-1, column).squeeze(-1).masked_fill_(~here, 0)
    told = axis.all_gather(numbers, 0, lengths=[4] * axis.size)[0].view(axis.size, 4, len(y))
    most, whose = told[:, 0].max(0)
    right = told[:, 3].sum(0)
    logarithm = ((told[:, 0] - most).exp_() * told[:, 2]).sum(0).log_() + most
    guess = told[:, 1].gather(0, whose.unsqueeze(0)).squeeze(0).long()
    if not top:
        return logarithm - right, guess, None
    above = (~(wide.double() < right.unsqueeze(-1))).sum(-1).double().unsqueeze(0)
    total = axis.all_gather(above, 0, lengths=[1] * axis.size)[0].view(axis.size, len(y)).sum(0)
    return logarithm - right, guess, total.long() - 1


@torch.no_grad()
def whole(scores: torch.Tensor, axis: Axis, classes: int) -> torch.Tensor:
    """The scores [..., classes] of which each rank has a part [..., part]. Collective over the axis."""
    lengths = [hi - lo for lo, hi in pairwise(axis.bounds(classes))]
    return axis.all_gather(scores, scores.dim() - 1, lengths=lengths)[0]
