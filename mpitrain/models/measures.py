"""Which measures a task has: those that its data ask for, and those that settings name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args

from mpitrain.choices import OfClasses
from mpitrain.errors import refusal
from mpitrain.models.class_metrics import of_classes
from mpitrain.models.metrics import FIRST, R2, RMSE, Accuracy, Confusion, Measure, Perplexity, TopAccuracy

if TYPE_CHECKING:
    from mpitrain.data import Description

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
