"""Figures of how good a model is on samples, beside its loss: accuracy, perplexity, R2.

A metric is a few sums over samples, which can be added in any cut of them, and what these come to. So each sample
counts once, whatever the number of ranks:

    sums(output, y)      of one microbatch; added over microbatches and ranks
    value(sums)          the figure of all of them together

Metrics of classes and tokens are made of a few numbers of each target (`Judged`), not of its scores: these are taken
once for all metrics, and ranks that have parts of the scores exchange no more than that.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mpitrain.models.losses import widened

if TYPE_CHECKING:
    pass

Gather = Callable[[torch.Tensor], list[torch.Tensor]]  # a tensor of each rank, whose sizes may differ: those of all
IGNORED = -100  # the target that does not count, as in torch
FIRST = 5  # of the best classes, of which the right one is to be one


@dataclass(frozen=True)
class Judged:
    """What the scores of each target come to. All shapes are [targets].

    Attributes:
        nats: The cross-entropy, float32 or wider.
        guess: The class with the largest score.
        above: How many other classes have a score that is not smaller than the right one's; None: not counted.
        y: The right class.
        counted: Whether the target counts.
    """

    nats: torch.Tensor
    guess: torch.Tensor
    above: torch.Tensor | None
    y: torch.Tensor
    counted: torch.Tensor


class Measure(ABC):
    """One figure, or several, of the samples that a model was evaluated on.

    Attributes:
        name: In metrics.jsonl, after "held_out_".
        higher: Whether a larger figure is a better one; None: not known.
    """

    name: str
    higher: bool | None = True

    @property
    def directions(self) -> dict[str, bool | None]:
        """By the name of each figure, `higher` of it."""
        return {self.name: self.higher}


class Collected(Measure):
    """A measure that needs more of the samples than sums.

    It is told that an evaluation begins, sees outputs on the ranks where the model ends, and makes its figures there.
    """

    @abstractmethod
    def begin(self) -> None:
        """Forget what was seen."""

    @abstractmethod
    def see(self, output: Any, y: torch.Tensor) -> None:
        """Take the whole output of the model for some samples, and their targets."""

    @abstractmethod
    def figures(self, gather: Gather) -> dict[str, float]:
        """Return the figures of what all ranks have seen; none where nothing was. Collective over these ranks."""


class Metric(Measure):
    """A measure that is made of sums over samples.

    Attributes:
        size: How many sums it is made of.
        counts: Whether the sums are whole numbers, which have no rounding to depend on their order.
    """

    size: int = 2
    counts: bool = False

    @abstractmethod
    def sums(self, output: Any, y: torch.Tensor) -> torch.Tensor:
        """The sums over the samples of a microbatch, float64 [size], on the device of the output.

        Args:
            output: Of the model for these samples.
            y: Their targets.
        """

    @abstractmethod
    def value(self, sums: torch.Tensor) -> float:
        """What the sums over all samples come to; NaN where nothing was counted."""

    def figures(self, sums: torch.Tensor) -> dict[str, float]:
        """Return the figures by name."""
        return {self.name: self.value(sums)}


class OfScores(Metric):
    """A metric of classes, whose output are scores [..., classes] and whose y are class numbers [...].

    Args:
        classes: How many there are.
    """

    def __init__(self, classes: int) -> None:
        self.classes = classes

    top = False  # whether it looks at more than the best class
    exact = False  # whether the output may have no more scores than there are classes

    def sums(self, output: Any, y: torch.Tensor) -> torch.Tensor:
        """As of `Metric`; the output may be `Judged` already."""
        return self.of(output if isinstance(output, Judged) else judged(output, y, top=self.top))

    @abstractmethod
    def of(self, told: Judged) -> torch.Tensor:
        """The sums of targets that were judged."""


class Accuracy(OfScores):
    """How many of the targets that count have the largest score, from 0 to 1."""

    def __init__(self, classes: int, name: str = "accuracy") -> None:
        super().__init__(classes)
        self.name = name

    def of(self, told: Judged) -> torch.Tensor:
        return _shares((told.guess == told.y) & told.counted, told.counted)

    def value(self, sums: torch.Tensor) -> float:
        return _mean(sums)


class TopAccuracy(OfScores):
    """How many of the targets that count are among the `FIRST` largest scores, from 0 to 1."""

    name, top = f"top{FIRST}_accuracy", True

    def of(self, told: Judged) -> torch.Tensor:
        assert told.above is not None
        return _shares((told.above < FIRST) & told.counted, told.counted)

    def value(self, sums: torch.Tensor) -> float:
        return _mean(sums)


class Perplexity(OfScores):
    """The exponential of the mean cross-entropy of all tokens that count."""

    name, higher = "perplexity", False

    def of(self, told: Judged) -> torch.Tensor:
        return _shares(told.nats.where(told.counted, 0.0), told.counted)

    def value(self, sums: torch.Tensor) -> float:
        mean = _mean(sums)
        return math.exp(mean) if mean < 700 else math.inf if mean > 0 else math.nan


class Confusion(OfScores):
    """How often each class was taken for each: `matrix`. Its value is the share of those taken for themselves."""

    name, counts, exact = "confusion", True, True

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.size = classes * classes

    def of(self, told: Judged) -> torch.Tensor:
        at = told.y.where(told.counted, 0) * self.classes + told.guess
        found = torch.zeros(self.size, dtype=torch.float64, device=at.device)
        return found.index_add_(0, at, told.counted.double())

    def value(self, sums: torch.Tensor) -> float:
        return float(self.matrix(sums).trace() / sums.sum())

    def figures(self, sums: torch.Tensor) -> dict[str, float]:
        return {}

    def matrix(self, sums: torch.Tensor) -> torch.Tensor:
        """int64 [right class, class with the largest score]."""
        return sums.round().long().view(self.classes, self.classes)


class RMSE(Metric):
    """The root of the mean squared error; of several numbers a sample the mean of their roots, as in scikit-learn.

    Args:
        numbers: Numbers of a sample.
    """

    name, higher = "rmse", False

    def __init__(self, numbers: int) -> None:
        self.numbers = numbers
        self.size = numbers + 1

    def sums(self, output: Any, y: torch.Tensor) -> torch.Tensor:
        y = y.reshape(-1, self.numbers).double()
        away = (output.reshape(y.shape).double() - y).square().sum(0)
        return torch.cat([away, y.new_tensor([len(y)])])

    def value(self, sums: torch.Tensor) -> float:
        count = float(sums[-1])
        return float((sums[:-1] / count).sqrt().mean()) if count else math.nan


class R2(Metric):
    """The coefficient of determination: 1 for exact numbers, 0 for those of who knows no more than their mean.

    Of several numbers a sample it is the mean over them, as scikit-learn's `r2_score`.

    Args:
        numbers: Of a sample.
    """

    name = "r2"

    def __init__(self, numbers: int) -> None:
        self.numbers = numbers
        self.size = 3 * numbers + 1

    def sums(self, output: Any, y: torch.Tensor) -> torch.Tensor:
        y = y.reshape(-1, self.numbers).double()
        away = (output.reshape(y.shape).double() - y).square().sum(0)
        return torch.cat([away, y.sum(0), y.square().sum(0), y.new_tensor([len(y)])])

    def value(self, sums: torch.Tensor) -> float:
        count = float(sums[-1])
        if not count:
            return math.nan
        away, total, squares = sums[:-1].view(3, self.numbers)
        spread = squares - total * total / count
        flat = spread <= squares * 1e-14  # all alike, but for rounding
        exact = (away == 0).double()
        return float(torch.where(flat, exact, 1 - away / spread.where(~flat, 1.0)).mean())


def judged(scores: torch.Tensor, y: torch.Tensor, *, top: bool = False) -> Judged:
    """What whole scores [..., classes] of targets y [...] come to. top: also how many classes are above the right."""
    scores, y = widened(scores).reshape(-1, scores.shape[-1]), y.reshape(-1)
    counted = y != IGNORED
    right = scores.gather(-1, y.where(counted, 0).unsqueeze(-1))
    nats = scores.logsumexp(-1) - right.squeeze(-1)
    above = (~(scores < right)).sum(-1) - 1 if top else None  # where some are NaN, these are above
    return Judged(nats, scores.argmax(-1), above, y, counted)


def fits(metric: Metric, output: Any, y: Any) -> bool:
    """Whether a model's output is what a metric is made of; a model of one's own may return something else."""
    if not (isinstance(output, torch.Tensor) and isinstance(y, torch.Tensor) and output.is_floating_point()):
        return False
    if isinstance(metric, OfScores):
        more = output.shape[-1] - metric.classes  # a head may have more scores than there are classes
        return are_scores(output, y) and (more == 0 or (more > 0 and not metric.exact))
    return output.numel() == y.numel()


def are_scores(output: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether an output can be scores of classes, of which y are the numbers."""
    return output.shape[:-1] == y.shape and output.dim() > y.dim() and not y.is_floating_point()


def _shares(part: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    return torch.stack([part.sum(dtype=torch.float64), counted.sum(dtype=torch.float64)])


def _mean(sums: torch.Tensor) -> float:
    part, count = sums.tolist()
    return part / count if count else math.nan
