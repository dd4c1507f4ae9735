"""Precision, recall, F1 and AUROC of classes: the figures of scikit-learn, exact over any number of ranks.

A class c has tp samples that are its own and were taken for it, `guessed` that were taken for it and `actual` that are
its own. These are counted, and added over the ranks:

    precision = tp / guessed     recall = tp / actual     F1 = 2 tp / (guessed + actual)

each 0 where nothing was counted below the line. A macro mean is over the classes that occur among targets or guesses.
AUROC compares samples with each other, so every rank gets the probabilities of all samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpitrain.choices import OfClasses
from mpitrain.models.losses import widened
from mpitrain.models.metrics import IGNORED, Collected, Gather, Judged, OfScores, are_scores

Counts = torch.Tensor  # float64 [3, classes]: tp, guessed, actual


def _share(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    return torch.where(whole > 0, part / whole.clamp(min=1), 0.0)


def precision(counts: Counts) -> torch.Tensor:
    """Of each class the share of its guesses that are right, float64 [classes]."""
    return _share(counts[0], counts[1])


def recall(counts: Counts) -> torch.Tensor:
    """Of each class the share of its samples that were found, float64 [classes]."""
    return _share(counts[0], counts[2])


def f1(counts: Counts) -> torch.Tensor:
    """Of each class the harmonic mean of precision and recall, float64 [classes]."""
    return _share(2 * counts[0], counts[1] + counts[2])


def _macro(values: torch.Tensor, counts: Counts) -> float:
    return float(values[counts[1:].sum(0) > 0].mean())


MEANS: dict[str, Callable[[Counts], float]] = {
    "f1": lambda counts: _macro(f1(counts), counts),
    "f1_macro": lambda counts: _macro(f1(counts), counts),
    "f1_micro": lambda counts: float(f1(counts.sum(1, keepdim=True))),
    "precision": lambda counts: _macro(precision(counts), counts),
    "recall": lambda counts: _macro(recall(counts), counts),
}
EACH = {"precision": precision, "recall": recall, "f1": f1}


class OfCounts(OfScores):
    """A figure of all classes together, by its name in `MEANS`.

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
        found = torch.zeros(3, self.classes, dtype=torch.float64, device=told.y.device)
        y = told.y.where(told.counted, 0)
        for row, (at, counted) in enumerate(((y, right), (told.guess, told.counted), (y, told.counted))):
            found[row].index_add_(0, at, counted.double())
        return found.view(-1)

    def value(self, sums: torch.Tensor) -> float:
        return MEANS[self.name](sums.view(3, -1))


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
        self._rows.append(torch.cat([chances, right.double()], 1)[(right != IGNORED)[:, 0]].cpu())

    def figures(self, gather: Gather) -> dict[str, float]:
        own = torch.cat([torch.empty(0, len(self.names) + 1, dtype=torch.float64), *self._rows])
        rows = torch.cat(gather(own))
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
    above = torch.zeros(len(values), dtype=torch.float64).index_add_(0, place, positive.double())
    below = torch.zeros(len(values), dtype=torch.float64).index_add_(0, place, (~positive).double())
    smaller = below.cumsum(0) - below / 2
    return float((above * smaller).sum() / (above.sum() * below.sum()))


def of_classes(name: OfClasses, classes: Sequence[str], *, each: bool) -> OfCounts | AUROC:
    """Return the measure that has this name. each: whether AUROC is wanted of each class, too."""
    if name == "auroc":
        return AUROC(classes, each=each)
    return PerClass(classes) if name == "per_class" else OfCounts(classes, name)
