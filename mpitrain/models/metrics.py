"""Metrics of a model's quality on samples, other than its loss: accuracy, perplexity, R2, F1.

A metric is defined by a few sums over samples, which can be computed for any parts of them and added, and by a function
of the total. So each sample counts once, for any number of ranks:

    sums(output, y)      sums of one microbatch; added over microbatches and ranks
    value(sums)          the metric of all samples

Metrics of classes and tokens use a few numbers per target (`TargetResults`) instead of its scores. These numbers are
computed once for all metrics, and ranks that have parts of the scores exchange only them.

Precision, recall, F1 and AUROC are defined as in scikit-learn, and exact for any number of ranks. For a class c, tp
counts the samples of c that were classified as c, `guessed` all samples classified as c, and `actual` all samples of c.
The counts are added over the ranks:

    precision = tp / guessed     recall = tp / actual     F1 = 2 tp / (guessed + actual)

each 0 if its denominator is 0. A macro mean is over the classes that occur among targets or guesses. AUROC compares
samples with each other, so every rank gets the probabilities of all samples.
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
from mpitrain.models.losses import UNCOUNTED, widen

if TYPE_CHECKING:
    from mpitrain.data import Description

Gather = Callable[[torch.Tensor], list[torch.Tensor]]  # gathers a tensor from all ranks; sizes may differ
FIRST = 5  # number of best classes that top-k accuracy accepts


@dataclass(frozen=True)
class TargetResults:
    """Results of comparing the scores of each target with its class. All shapes are [targets].

    Attributes:
        nats: Cross-entropy, float32 or wider.
        guess: Class with the largest score.
        above: Number of other classes with a score not smaller than that of the right class; None if not computed.
        y: Right class.
        counted: True if the target counts.
    """

    nats: torch.Tensor
    guess: torch.Tensor
    above: torch.Tensor | None
    y: torch.Tensor
    counted: torch.Tensor


class Measure(ABC):
    """One or several figures about the samples that a model was evaluated on.

    Attributes:
        name: Name in metrics.jsonl, after "held_out_".
        higher: True if larger figures are better, False if smaller ones are, None if unknown.
    """

    name: str
    higher: bool | None = True

    @property
    def directions(self) -> dict[str, bool | None]:
        """Value of `higher` for each figure, by its name."""
        return {self.name: self.higher}


class SampleMetric(Measure):
    """A measure that needs more than sums over samples.

    An evaluation calls `begin`, then `update` for each output on the ranks of the last pipeline stage, then `figures`
    on these ranks.
    """

    @abstractmethod
    def begin(self) -> None:
        """Forget all earlier samples."""

    @abstractmethod
    def update(self, output: Any, y: torch.Tensor) -> None:
        """Add some samples: the whole output of the model, and the targets.

        Args:
            output: Output of the model.
            y: Targets.
        """

    @abstractmethod
    def figures(self, gather: Gather) -> dict[str, float]:
        """Return the figures of the samples of all ranks, by name. Collective over these ranks.

        Args:
            gather: Function that gathers a tensor from all these ranks; its sizes may differ.

        Returns:
            The figures; empty if there are no samples.
        """


class Metric(Measure):
    """A measure that is computed from sums over samples.

    Attributes:
        size: Number of sums.
        counts: True if the sums are integers, so that rounding does not depend on the order of the additions.
    """

    size: int = 2
    counts: bool = False

    @abstractmethod
    def sums(self, output: Any, y: torch.Tensor) -> torch.Tensor:
        """Return the sums over the samples of a microbatch, float64 [size], on the device of the output.

        Args:
            output: Output of the model for these samples.
            y: Targets of these samples.
        """

    @abstractmethod
    def value(self, sums: torch.Tensor) -> float:
        """Return the metric from the sums over all samples; NaN if no target counts."""

    def figures(self, sums: torch.Tensor) -> dict[str, float]:
        """Return the figures by name."""
        return {self.name: self.value(sums)}


class ScoreMetric(Metric):
    """A metric of classes. The output is scores [..., classes], and y is class numbers [...].

    Args:
        classes: Number of classes.
    """

    def __init__(self, classes: int) -> None:
        self.classes = classes

    top = False  # True if it needs more than the best class
    exact = False  # True if the output must not have more scores than there are classes

    def sums(self, output: Any, y: torch.Tensor) -> torch.Tensor:
        """Return the sums over the samples of a microbatch, float64 [size], on the device of the output.

        Args:
            output: Scores [..., classes], or `TargetResults`.
            y: Class numbers [...].
        """
        return self.target_sums(
            output if isinstance(output, TargetResults) else compare_targets(output, y, top=self.top)
        )

    def value(self, sums: torch.Tensor) -> float:
        part, count = sums.tolist()
        return part / count if count else math.nan

    @abstractmethod
    def target_sums(self, results: TargetResults) -> torch.Tensor:
        """Return the sums over some targets."""


class Accuracy(ScoreMetric):
    """Fraction of counted targets whose class has the largest score, 0 to 1."""

    def __init__(self, classes: int, name: str = "accuracy") -> None:
        super().__init__(classes)
        self.name = name

    def target_sums(self, results: TargetResults) -> torch.Tensor:
        return _part_and_count((results.guess == results.y) & results.counted, results.counted)


class TopAccuracy(ScoreMetric):
    """Fraction of counted targets whose class is among the `FIRST` largest scores, 0 to 1."""

    name, top = f"top{FIRST}_accuracy", True

    def target_sums(self, results: TargetResults) -> torch.Tensor:
        assert results.above is not None
        return _part_and_count((results.above < FIRST) & results.counted, results.counted)


class Perplexity(ScoreMetric):
    """Exponential of the mean cross-entropy of all counted tokens."""

    name, higher = "perplexity", False

    def target_sums(self, results: TargetResults) -> torch.Tensor:
        return _part_and_count(results.nats.where(results.counted, 0.0), results.counted)

    def value(self, sums: torch.Tensor) -> float:
        mean = super().value(sums)
        return math.exp(mean) if mean < 700 else math.inf if mean > 0 else math.nan


class Confusion(ScoreMetric):
    """Confusion matrix: the number of targets of each class that were classified as each class; see `matrix`."""

    name, counts, exact = "confusion", True, True

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.size = classes * classes

    def target_sums(self, results: TargetResults) -> torch.Tensor:
        return _tally(results.y.where(results.counted, 0) * self.classes + results.guess, results.counted, self.size)

    def figures(self, sums: torch.Tensor) -> dict[str, float]:
        return {}

    def matrix(self, sums: torch.Tensor) -> torch.Tensor:
        """Return the confusion matrix, int64 [right class, class with the largest score]."""
        return sums.round().long().view(self.classes, self.classes)


class R2(Metric):
    """Coefficient of determination: 1 for exact predictions, 0 for predicting the mean of the targets.

    For several numbers per sample it is the mean over them, as in scikit-learn's `r2_score`.

    Args:
        numbers: Numbers per sample.
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
        flat = spread <= squares * 1e-14  # all equal, except for rounding
        return float(torch.where(flat, (away == 0).double(), 1 - away / spread.where(~flat, 1.0)).mean())


class RMSE(R2):
    """Root of the mean squared error; for several numbers per sample, the mean of their roots, as in scikit-learn."""

    name, higher = "rmse", False

    def value(self, sums: torch.Tensor) -> float:
        count = float(sums[-1])
        return float((sums[: self.numbers] / count).sqrt().mean()) if count else math.nan


def compare_targets(scores: torch.Tensor, y: torch.Tensor, *, top: bool = False) -> TargetResults:
    """Compare scores with the classes of their targets.

    Args:
        scores: Scores of all classes, [..., classes].
        y: Class numbers [...].
        top: If true, also count the classes with scores not below that of the right class (`above`).
    """
    scores, y = widen(scores).reshape(-1, scores.shape[-1]), y.reshape(-1)
    counted = y != UNCOUNTED
    right = scores.gather(-1, y.where(counted, 0).unsqueeze(-1))
    nats = scores.logsumexp(-1) - right.squeeze(-1)
    above = (~(scores < right)).sum(-1) - 1 if top else None  # NaN scores count as above
    return TargetResults(nats, scores.argmax(-1), above, y, counted)


def fits(metric: Metric, output: Any, y: Any) -> bool:
    """Return True if a metric can be computed from an output; a user's model may return something else.

    Args:
        metric: Metric to compute.
        output: Output of the model.
        y: Targets.
    """
    if not (isinstance(output, torch.Tensor) and isinstance(y, torch.Tensor) and output.is_floating_point()):
        return False
    if isinstance(metric, ScoreMetric):
        more = output.shape[-1] - metric.classes  # the head may have unused scores
        return are_scores(output, y) and (more == 0 or (more > 0 and not metric.exact))
    return output.numel() == y.numel()


def are_scores(output: torch.Tensor, y: torch.Tensor) -> bool:
    """Return True if an output may be scores of classes and y their numbers.

    Args:
        output: Output of the model.
        y: Targets.
    """
    return output.shape[:-1] == y.shape and output.dim() > y.dim() and not y.is_floating_point()


def _part_and_count(part: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    return torch.stack([part.sum(dtype=torch.float64), counted.sum(dtype=torch.float64)])


def _tally(places: torch.Tensor, counted: torch.Tensor, size: int) -> torch.Tensor:
    """Count how often each of `size` places occurs among the counted targets, float64 [size]."""
    return torch.zeros(size, dtype=torch.float64, device=places.device).index_add_(0, places, counted.double())


Counts = torch.Tensor  # float64 [3, classes]: tp, guessed, actual


def _ratio(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    return torch.where(whole > 0, part / whole.clamp(min=1), 0.0)


EACH: dict[str, Callable[[Counts], torch.Tensor]] = {  # values of each class, float64 [classes]
    "precision": lambda counts: _ratio(counts[0], counts[1]),
    "recall": lambda counts: _ratio(counts[0], counts[2]),
    "f1": lambda counts: _ratio(2 * counts[0], counts[1] + counts[2]),
}


class CountMetric(ScoreMetric):
    """One figure of all classes: the macro mean of an entry of `EACH`, or "f1_micro".

    Args:
        classes: Names of the classes.
        name: Name of the figure.
    """

    counts, exact = True, True

    def __init__(self, classes: Sequence[str], name: str) -> None:
        super().__init__(len(classes))
        self.names, self.name, self.size = tuple(classes), name, 3 * len(classes)

    def target_sums(self, results: TargetResults) -> torch.Tensor:
        right = results.counted & (results.guess == results.y)
        y = results.y.where(results.counted, 0)
        counted = (y, right), (results.guess, results.counted), (y, results.counted)
        return torch.cat([_tally(at, some, self.classes) for at, some in counted])

    def value(self, sums: torch.Tensor) -> float:
        counts = sums.view(3, -1)
        if self.name == "f1_micro":
            return float(EACH["f1"](counts.sum(1, keepdim=True)))
        return float(EACH[self.name.removesuffix("_macro")](counts)[counts[1:].sum(0) > 0].mean())


class PerClass(CountMetric):
    """Precision, recall and F1 of each class."""

    def __init__(self, classes: Sequence[str]) -> None:
        super().__init__(classes, "per_class")

    @property
    def directions(self) -> dict[str, bool | None]:
        return {f"{figure} of {name}": True for figure in EACH for name in self.names}

    def figures(self, sums: torch.Tensor) -> dict[str, float]:
        result = dict[str, float]()
        for figure, compute in EACH.items():
            values = compute(sums.view(3, -1)).tolist()
            result |= {f"{figure} of {name}": value for name, value in zip(self.names, values, strict=True)}
        return result


class AUROC(SampleMetric):
    """Area under the receiver operating characteristic; for two classes, that of the second class.

    For more classes it is the mean over the classes, each against all others; classes that no sample or every sample
    has are left out. It needs memory on every rank: 8 bytes per sample and class.

    Args:
        classes: Names of the classes.
        each: If true, also return the area of each class.
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
        self._rows: list[torch.Tensor] = []  # float64 [samples, classes + 1]: probabilities, then the right class

    def update(self, output: Any, y: torch.Tensor) -> None:
        classes = len(self.names)
        if not isinstance(output, torch.Tensor) or not are_scores(output, y) or output.shape[-1] != classes:
            return
        chances = widen(output).reshape(-1, classes).double().softmax(1)
        right = y.reshape(-1, 1)
        self._rows.append(torch.cat([chances, right.double()], 1)[(right != UNCOUNTED)[:, 0]].cpu())

    def figures(self, gather: Gather) -> dict[str, float]:
        rows = torch.cat(gather(torch.cat([torch.empty(0, len(self.names) + 1, dtype=torch.float64), *self._rows])))
        self.begin()
        areas = {}
        for number in range(len(self.names)) if len(self.names) > 2 else [1]:
            positive = rows[:, -1] == number
            if 0 < int(positive.sum()) < len(rows):
                areas[self.names[number]] = area_under_curve(rows[:, number], positive)
        if not areas:
            return {}
        each = {f"auroc of {name}": value for name, value in areas.items()} if self.each else {}
        return {"auroc": sum(areas.values()) / len(areas)} | each


def area_under_curve(scores: torch.Tensor, positive: torch.Tensor) -> float:
    """Return the probability that a positive sample has a larger score than a negative one; equal scores count as half.

    Args:
        scores: Scores of the samples, float [samples].
        positive: True for positive samples, bool [samples]; there is at least one of each kind.
    """
    values, place = scores.unique(return_inverse=True)
    above, below = (_tally(place, some, len(values)) for some in (positive, ~positive))
    smaller = below.cumsum(0) - below / 2
    return float((above * smaller).sum() / (above.sum() * below.sum()))


def measure_of_classes(name: OfClasses, classes: Sequence[str], *, each: bool) -> CountMetric | AUROC:
    """Return the measure of a given name.

    Args:
        name: Name of the measure.
        classes: Names of the classes.
        each: If true, AUROC also returns the area of each class.
    """
    if name == "auroc":
        return AUROC(classes, each=each)
    return PerClass(classes) if name == "per_class" else CountMetric(classes, name)


FEW = 20  # largest number of classes for which `mpitrain.evaluate` reports each class by default
OF_CLASSES: tuple[OfClasses, ...] = get_args(OfClasses)


def measures_of(description: Description, *, more: bool = False) -> list[Measure]:
    """Return the measures that suit the data of a task.

    Args:
        description: Description of the data.
        more: If true, include measures that are slower or return many figures.

    Returns:
        Accuracy for classes; perplexity and token accuracy for tokens; R2 for numbers. With `more`, also top-5
        accuracy; RMSE for numbers; and for classes the macro means of F1, precision and recall, the confusion matrix,
        and, if there are few classes, AUROC and the figures of each class.
    """
    if description.kind == "tokens" and description.vocabulary is not None:
        size = description.vocabulary
        measures: list[Measure] = [Perplexity(size), Accuracy(size, "token_accuracy")]
    elif description.classes:
        size = len(description.classes)
        measures = [Accuracy(size)]
    else:
        numbers = math.prod(description.y_shape)
        return [R2(numbers), *([RMSE(numbers)] if more else [])]
    if more and size > FIRST:
        measures.append(TopAccuracy(size))
    if more and description.classes:
        names: list[OfClasses] = ["f1", "precision", "recall", *(["auroc", "per_class"] if size <= FEW else [])]  # type: ignore[list-item]
        measures += [measure_of_classes(name, description.classes, each=True) for name in names]
        measures.append(Confusion(size))
    return measures


def named_measures(names: Sequence[str], description: Description) -> list[Measure]:
    """Return the measures named by train.metrics, without those that the data has by default.

    Args:
        names: Names among `Measured` and `OfClasses`.
        description: Description of the data.

    Raises:
        InputError: A name does not suit the data. It is raised on every rank.
    """
    usual = {measure.name for measure in measures_of(description)}
    possible = {measure.name: measure for measure in measures_of(description, more=True)}
    measures: list[Measure] = []
    for name in dict.fromkeys(names):
        if name in OF_CLASSES and description.classes:
            measures.append(measure_of_classes(name, description.classes, each="per_class" in names))
        elif name in possible and name not in OF_CLASSES:
            measures += [possible[name]] if name not in usual else []
        else:
            kind = description.kind if description.kind == "tokens" else "classes" if description.classes else "numbers"
            choices = [n for n in possible if n not in OF_CLASSES and n != Confusion.name]
            choices += OF_CLASSES if description.classes else ()
            raise refusal(
                f"train.metrics {name} is not available for targets that are {kind}; choose {', '.join(choices)}"
            )
    return measures
