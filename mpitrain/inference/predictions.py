"""What a model says of samples, and the files that it is written to.

classes    the likeliest class, and the probability of each
numbers    the numbers
tokens     the logarithm of the probability of a sample's tokens, each after those before it, and how many they are
"""

from __future__ import annotations

import csv
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from mpitrain.data import Description
from mpitrain.errors import InputError
from mpitrain.inference.commands import require_new, whole_file
from mpitrain.inference.inputs import Array
from mpitrain.models.losses import UNCOUNTED


class Foretold(ABC):
    """The numbers written for each sample: their count (`width`), and their names in a table (`columns`)."""

    columns: tuple[str, ...]
    width: int

    @abstractmethod
    def rows(self, output: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        """fp64 [samples, width], of a model's output."""

    @abstractmethod
    def line(self, row: Array) -> dict[str, Any]:
        """What is told of a sample, as JSON has it."""

    def cells(self, row: Array) -> list[Any]:
        """The same as cells of a table with `columns`."""
        return list(row.tolist())

    @abstractmethod
    def arrays(self, rows: Array) -> dict[str, Array]:
        """What is told of all samples, as arrays."""


class ClassProbabilities(Foretold):
    """The probability of each class."""

    def __init__(self, classes: Sequence[str]) -> None:
        self._classes = tuple(classes)
        self.columns, self.width = ("class", *self._classes), len(self._classes)

    def rows(self, output: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        _require(output, [len(output), len(self._classes)], "a score of each class")
        return torch.softmax(output.double(), 1)

    def line(self, row: Array) -> dict[str, Any]:
        probabilities = dict(zip(self._classes, row.tolist(), strict=True))
        return {"class": self._classes[int(row.argmax())], "probabilities": probabilities}

    def cells(self, row: Array) -> list[Any]:
        return [self._classes[int(row.argmax())], *row.tolist()]

    def arrays(self, rows: Array) -> dict[str, Array]:
        return {"class": rows.argmax(1), "probabilities": rows, "classes": np.array(self._classes)}


class Numbers(Foretold):
    """The numbers that the model gives. shape: of a sample's y."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape, self.width = shape, math.prod(shape)
        self.columns = ("y",) if self.width == 1 else tuple(f"y{number}" for number in range(self.width))

    def rows(self, output: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        numbers = output.flatten(1) if output.dim() > 1 else output[:, None]
        _require(numbers, [len(output), self.width], "numbers like y")
        return numbers.double()

    def line(self, row: Array) -> dict[str, Any]:
        return {"y": row.reshape(self._shape).tolist()}

    def arrays(self, rows: Array) -> dict[str, Array]:
        return {"y": rows.reshape(len(rows), *self._shape)}


class LogProbability(Foretold):
    """The logarithm of the probability of a sample's tokens, in nats, and how many are counted."""

    columns, width = ("log_probability", "tokens"), 2

    def rows(self, output: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        assert y is not None
        _require(output[..., :1], [*y.shape, 1], "scores [batch, sequence, vocabulary]")
        scores = output.double().transpose(1, 2)
        counted = functional.cross_entropy(scores, y, ignore_index=UNCOUNTED, reduction="none")
        return torch.stack([-counted.sum(1), (y != UNCOUNTED).sum(1).double()], 1)

    def line(self, row: Array) -> dict[str, Any]:
        return {"log_probability": float(row[0]), "tokens": int(row[1])}

    def cells(self, row: Array) -> list[Any]:
        return list(self.line(row).values())

    def arrays(self, rows: Array) -> dict[str, Array]:
        return {"log_probability": rows[:, 0], "tokens": rows[:, 1].astype(np.int64)}


def told_of(description: Description) -> Foretold:
    """What is told of samples of such data."""
    if description.kind == "tokens":
        return LogProbability()
    return ClassProbabilities(description.classes) if description.classes else Numbers(description.y_shape)


def _require(output: torch.Tensor, shape: list[int], what: str) -> None:
    if list(output.shape) != shape:
        raise InputError(f"the model gives {list(output.shape)} for {shape[0]} samples; predict needs {what}, {shape}")


# -- files

Write = Callable[[Sequence[int], Array], None]  # the numbers of samples, and their rows


@contextmanager
def new_file(
    path: Path, told: Foretold, names: Sequence[str] | None, kept: Mapping[str, Sequence[Any]]
) -> Iterator[Write]:
    """Write what is told of samples into a new file, which is there when all of it is.

    Args:
        path: Its name; the ending says what it is.
        told: What the rows are.
        names: Of the samples; None: their numbers.
        kept: Further columns, a value for each sample.
    """
    if taken := {"sample", "probabilities", "classes", *told.columns} & set(kept):
        raise InputError(f"--keep {min(taken)}: the predictions have a column of that name; rename it in the table")

    def named(numbers: Sequence[int]) -> list[Any]:
        return list(numbers) if names is None else [names[number] for number in numbers]

    with ExitStack() as stack:
        aside = stack.enter_context(whole_file(path))
        if path.suffix == ".npz":
            parts, order = [np.empty((0, told.width))], list[int]()

            def keep(numbers: Sequence[int], rows: Array) -> None:
                parts.append(rows)
                order.extend(numbers)

            yield keep
            arrays: dict[str, Any] = told.arrays(np.concatenate(parts))
            if names is not None:
                arrays["sample"] = np.array(named(order))
            arrays |= {name: _array([values[number] for number in order]) for name, values in kept.items()}
            np.savez(aside, **arrays)
            return
        file = stack.enter_context(open(aside, "x", encoding="utf-8", newline=""))
        if path.suffix == ".csv":
            table = csv.writer(file)
            table.writerow(["sample", *kept, *told.columns])
            yield lambda numbers, rows: table.writerows(
                [name, *(values[number] for values in kept.values()), *told.cells(row)]
                for number, name, row in zip(numbers, named(numbers), rows, strict=True)
            )
            return
        yield lambda numbers, rows: file.writelines(
            json.dumps({"sample": name} | {key: _plain(values[n]) for key, values in kept.items()} | told.line(row))
            + "\n"
            for n, name, row in zip(numbers, named(numbers), rows, strict=True)
        )


def _plain(value: Any) -> Any:
    """Return a cell of a table as JSON has it."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _array(values: Sequence[Any]) -> Array:
    """Return cells of a table as an array of numbers, or else of texts."""
    if all(value is None or isinstance(value, int | float) for value in values):
        return np.array([math.nan if value is None else value for value in values])
    return np.array(["" if value is None else str(value) for value in values])


def require_file(path: Path) -> None:
    """Raise InputError for a file that cannot be made, or is of no kind that is written."""
    if path.suffix not in (".csv", ".jsonl", ".npz"):
        raise InputError(f"--out {path}: the kind of file is told by its ending; use .csv, .jsonl or .npz")
    require_new(path)
