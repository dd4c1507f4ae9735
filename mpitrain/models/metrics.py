"""Figures of how good a model is on samples, beside its loss: accuracy, perplexity, R2, F1.

A metric is a few sums over samples, which can be added in any cut of them, and what these come to. So each sample
counts once, whatever the number of ranks:

    sums(output, y)      of one microbatch; added over microbatches and ranks
    value(sums)          the figure of all of them together

Metrics of classes and tokens are made of a few numbers of each target (`Judged`), not of its scores: these are taken
once for all metrics, and ranks that have parts of the scores exchange no more than that.

Precision, recall, F1 and AUROC are the figures of scikit-learn, exact over any number of ranks. A class c has tp
samples that are its own and were taken for it, `guessed` that were taken for it and `actual` that are its own. These
are counted, and added over the ranks:

    precision = tp / guessed     recall = tp / actual     F1 = 2 tp / (guessed + actual)

each 0 where nothing was counted below the line. A macro mean is over the classes that occur among targets or guesses.
AUROC compares samples with each other, so every rank gets the probabilities of all samples.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import torch

from mpitrain.choices import OfClasses
from mpitrain.errors import refusal
from mpitrain.models.losses import UNCOUNTED, widened

if TYPE_CHECKING:
    from mpitrain.data import Description

Gather = Callable[[torch.Tensor], list[torch.Tensor]]  # a tensor of each rank, whose sizes may differ: those of all
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

    def value(self, sums: torch.Tensor) -> float:
        part, count = sums.tolist()
        return part / count if count else math.nan

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


class TopAccuracy(OfScores):
    """How many of the targets that count are among the `FIRST` largest scores, from 0 to 1."""

    name, top = f"top{FIRST}_accuracy", True

    def of(self, told: Judged) -> torch.Tensor:
        assert told.above is not None
        return _shares((told.above < FIRST) & told.counted, told.counted)


class Perplexity(OfScores):
    """The exponential of the mean cross-entropy of all tokens that count."""

    name, higher = "perplexity", False

    def of(self, told: Judged) -> torch.Tensor:
        return _shares(told.nats.where(told.counted, 0.0), told.counted)

    def value(self, sums: torch.Tensor) -> float:
        mean = super().value(sums)
        return math.exp(mean) if mean < 700 else math.inf if mean > 0 else math.nan


class Confusion(OfScores):
    """How often each class was taken for each: `matrix`."""

    name, counts, exact = "confusion", True, True

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.size = classes * classes

    def of(self, told: Judged) -> torch.Tensor:
        return _tally(told.y.where(told.counted, 0) * self.classes + told.guess, told.counted, self.size)

    def figures(self, sums: torch.Tensor) -> dict[str, float]:
        return {}

    def matrix(self, sums: torch.Tensor) -> torch.Tensor:
        """int64 [right class, class with the largest score]."""
        return sums.round().long().view(self.classes, self.classes)


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
        return float(torch.where(flat, (away == 0).double(), 1 - away / spread.where(~flat, 1.0)).mean())


class RMSE(R2):
    """The root of the mean squared error; of several numbers a sample the mean of their roots, as in scikit-learn."""

    name, higher = "rmse", False

    def value(self, sums: torch.Tensor) -> float:
        count = float(sums[-1])
        return float((sums[: self.numbers] / count).sqrt().mean()) if count else math.nan


def judged(scores: torch.Tensor, y: torch.Tensor, *, top: bool = False) -> Judged:
    """What whole scores [..., classes] of targets y [...] come to. top: also how many classes are above the right."""
    scores, y = widened(scores).reshape(-1, scores.shape[-1]), y.reshape(-1)
    counted = y != UNCOUNTED
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


def _tally(places: torch.Tensor, counted: torch.Tensor, size: int) -> torch.Tensor:
    """How often each of `size` places is there among those that count, float64 [size]."""
    return torch.zeros(size, dtype=torch.float64, device=places.device).index_add_(0, places, counted.double())


Counts = torch.Tensor  # float64 [3, classes]: tp, guessed, actual


def _share(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    return torch.where(whole > 0, part / whole.clamp(min=1), 0.0)


EACH: dict[str, Callable[[Counts], torch.Tensor]] = {  # of each class, float64 [classes]
    "precision": lambda counts: _share(counts[0], counts[1]),
    "recall": lambda counts: _share(counts[0], counts[2]),
    "f1": lambda counts: _share(2 * counts[0], counts[1] + counts[2]),
}


class OfCounts(OfScores):
    """A figure of all classes together: the macro mean of one of `EACH`, or "f1_micro".

    Args:
        classes: Names of the classes.
        name: Name of the figure.
    """

    counts, exact = True, True

    def __init__(self, classes: Sequence[str], name: str) -> None:
        super().__init__(len(classes))
        self.names, self.name, self.size = tuple(classes), name, 3 * len(classes)

    def of(self, told: Judged) -> torch.Tensor:
        right = told.counted & (told.guess == told.y)
        y = told.y.where(told.counted, 0)
        counted = (y, right), (told.guess, told.counted), (y, told.counted)
        return torch.cat([_tally(at, some, self.classes) for at, some in counted])

    def value(self, sums: torch.Tensor) -> float:
        counts = sums.view(3, -1)
        if self.name == "f1_micro":
            return float(EACH["f1"](counts.sum(1, keepdim=True)))
        return float(EACH[self.name.removesuffix("_macro")](counts)[counts[1:].sum(0) > 0].mean())


class PerClass(OfCounts):
    """Precision, recall and F1 of each class."""

    def __init__(self, classes: Sequence[str]) -> None:
        super().__init__(classes, "per_class")

    @property
    def directions(self) -> dict[str, bool | None]:
        return {f"{figure} of {name}": True for figure in EACH for name in self.names}

    def figures(self, sums: torch.Tensor) -> dict[str, float]:
        found = dict[str, float]()
        for figure, of in EACH.items():
            values = of(sums.view(3, -1)).tolist()
            found |= {f"{figure} of {name}": value for name, value in zip(self.names, values, strict=True)}
        return found


class AUROC(Collected):
    """The area under the receiver operating characteristic: of two classes that of the second one.

    Of more classes it is the mean over them, each against the rest; classes that all or none of the samples have are
    left out. Every rank holds a probability of each class of each sample for it, 8 bytes.

    Args:
        classes: Names of the classes.
        each: Whether the figure of each class is wanted, too.
    """

    name = "auroc"

    def __init__(self, classes: Sequence[str], *, each: bool = False) -> None:
        self.names, self.each = tuple(classes), each and len(classes) > 2
        self.begin()

    @property
    def directions(self) -> dict[str, bool | None]:
        each = [f"auroc of {name}" for name in self.names if self.each]
        return dict.fromkeys(["auroc", *each], self.higher)

    def begin(self) -> None:
        self._rows: list[torch.Tensor] = []  # float64 [samples, classes + 1]: probabilities, and the right class

    def see(self, output: Any, y: torch.Tensor) -> None:
        classes = len(self.names)
        if not isinstance(output, torch.Tensor) or not are_scores(output, y) or output.shape[-1] != classes:
            return
        chances = widened(output).reshape(-1, classes).double().softmax(1)
        right = y.reshape(-1, 1)
        self._rows.append(torch.cat([chances, right.double()], 1)[(right != UNCOUNTED)[:, 0]].cpu())

    def figures(self, gather: Gather) -> dict[str, float]:
        rows = torch.cat(gather(torch.cat([torch.empty(0, len(self.names) + 1, dtype=torch.float64), *self._rows])))
        self.begin()
        found = {}
        for number in range(len(self.names)) if len(self.names) > 2 else [1]:
            positive = rows[:, -1] == number
            if 0 < int(positive.sum()) < len(rows):
                found[self.names[number]] = area(rows[:, number], positive)
        if not found:
            return {}
        each = {f"auroc of {name}": value for name, value in found.items()} if self.each else {}
        return {"auroc": sum(found.values()) / len(found)} | each


def area(scores: torch.Tensor, positive: torch.Tensor) -> float:
    """Return the probability that a positive sample has a larger score than another; equal ones count as a half.

    Args:
        scores: float [samples].
        positive: bool [samples]; some and not all of them are.
    """
    values, place = scores.unique(return_inverse=True)
    above, below = (_tally(place, some, len(values)) for some in (positive, ~positive))
    smaller = below.cumsum(0) - below / 2
    return float((above * smaller).sum() / (above.sum() * below.sum()))


def of_classes(name: OfClasses, classes: Sequence[str], *, each: bool) -> OfCounts | AUROC:
    """Return the measure that has this name. each: whether AUROC is wanted of each class, too."""
    if name == "auroc":
        return AUROC(classes, each=each)
    return PerClass(classes) if name == "per_class" else OfCounts(classes, name)


FEW = 20  # classes of which each is measured by `mpitrain.evaluate` without being asked to
OF_CLASSES: tuple[OfClasses, ...] = get_args(OfClasses)


def measures_of(description: Description, *, more: bool = False) -> list[Measure]:
    """Return the measures of a task, by what its data are.

    Args:
        description: Of the data.
        more: Whether those are wanted, too, that cost more or are longer.

    Returns:
        Of classes accuracy, of tokens perplexity and token accuracy, of numbers R2. With `more` also top-5 accuracy, of
        numbers RMSE, and of classes macro means of F1, precision and recall, the confusion matrix, and, of few classes,
        AUROC and figures of each class.
    """
    if description.kind == "tokens" and description.vocabulary is not None:
        size = description.vocabulary
        found: list[Measure] = [Perplexity(size), Accuracy(size, "token_accuracy")]
    elif description.classes:
        size = len(description.classes)
        found = [Accuracy(size)]
    else:
        numbers = math.prod(description.y_shape)
        return [R2(numbers), *([RMSE(numbers)] if more else [])]
    if more and size > FIRST:
        found.append(TopAccuracy(size))
    if more and description.classes:
        names: list[OfClasses] = ["f1", "precision", "recall", *(["auroc", "per_class"] if size <= FEW else [])]  # type: ignore[list-item]
        found += [of_classes(name, description.classes, each=True) for name in names]
        found.append(Confusion(size))
    return found


def named_measures(names: Sequence[str], description: Description) -> list[Measure]:
    """Return the measures that train.metrics names, but for those that the data have in any case.

    Args:
        names: Names among `Measured` and `OfClasses`.
        description: Of the data.

    Raises:
        InputError: On all ranks, where one is of other data.
    """
    usual = {measure.name for measure in measures_of(description)}
    possible = {measure.name: measure for measure in measures_of(description, more=True)}
    found: list[Measure] = []
    for name in dict.fromkeys(names):
        if name in OF_CLASSES and description.classes:
            found.append(of_classes(name, description.classes, each="per_class" in names))
        elif name in possible and name not in OF_CLASSES:
            found += [possible[name]] if name not in usual else []
        else:
            kind = description.kind if description.kind == "tokens" else "classes" if description.classes else "numbers"
            known = [n for n in possible if n not in OF_CLASSES and n != Confusion.name]
            known += OF_CLASSES if description.classes else ()
            raise refusal(f"train.metrics {name} is not of {kind}, which the targets are; choose {', '.join(known)}")
    return found
