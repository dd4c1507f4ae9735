"""Predictions of a model for samples, and the files that they are written to.

The data that the model was trained on determine the prediction:

    classes    the likeliest class, and the probability of each class
    numbers    the numbers of the model's output
    tokens     the log-probability of a sample's tokens, each given the tokens before it, and the number of tokens
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


class PredictionFormat(ABC):
    """Format of the predictions for one kind of data.

    Attributes:
        columns: Names of a prediction's cells in a table.
        width: Count of numbers computed for each sample.
    """

    columns: tuple[str, ...]
    width: int

    @abstractmethod
    def rows(self, output: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        """Return the predictions of a batch.

        Args:
            output: Output of the model for the batch.
            y: Targets [samples, sequence] if the samples are tokens, else unused.

        Returns:
            Numbers, fp64 [samples, width].

        Raises:
            InputError: The output has the wrong shape.
        """

    @abstractmethod
    def line(self, row: Array) -> dict[str, Any]:
        """Return a sample's prediction as a JSON object."""

    def cells(self, row: Array) -> list[Any]:
        """Return a sample's prediction as the cells of a table with `columns`."""
        return list(row.tolist())

    @abstractmethod
    def arrays(self, rows: Array) -> dict[str, Array]:
        """Return the predictions of all samples as named arrays."""


class ClassProbabilities(PredictionFormat):
    """Format of class predictions: the likeliest class, and the probability of each class."""

    def __init__(self, classes: Sequence[str]) -> None:
        self._classes = tuple(classes)
        self.columns, self.width = ("class", *self._classes), len(self._classes)

    def rows(self, output: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        _require_shape(output, [len(output), len(self._classes)], "a score of each class")
        return torch.softmax(output.double(), 1)

    def line(self, row: Array) -> dict[str, Any]:
        probabilities = dict(zip(self._classes, row.tolist(), strict=True))
        return {"class": self._classes[int(row.argmax())], "probabilities": probabilities}

    def cells(self, row: Array) -> list[Any]:
        return [self._classes[int(row.argmax())], *row.tolist()]

    def arrays(self, rows: Array) -> dict[str, Array]:
        return {"class": rows.argmax(1), "probabilities": rows, "classes": np.array(self._classes)}


class Numbers(PredictionFormat):
    """Format of numeric predictions: the numbers of the model's output.

    Args:
        shape: Shape of one sample's y.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape, self.width = shape, math.prod(shape)
        self.columns = ("y",) if self.width == 1 else tuple(f"y{number}" for number in range(self.width))

    def rows(self, output: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        numbers = output.flatten(1) if output.dim() > 1 else output[:, None]
        _require_shape(numbers, [len(output), self.width], "numbers like y")
        return numbers.double()

    def line(self, row: Array) -> dict[str, Any]:
        return {"y": row.reshape(self._shape).tolist()}

    def arrays(self, rows: Array) -> dict[str, Array]:
        return {"y": rows.reshape(len(rows), *self._shape)}


class LogProbability(PredictionFormat):
    """Format of predictions for tokens: a sample's log-probability in nats, and the number of counted tokens."""

    columns, width = ("log_probability", "tokens"), 2

    def rows(self, output: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        assert y is not None
        _require_shape(output[..., :1], [*y.shape, 1], "scores [batch, sequence, vocabulary]")
        scores = output.double().transpose(1, 2)
        counted = functional.cross_entropy(scores, y, ignore_index=UNCOUNTED, reduction="none")
        return torch.stack([-counted.sum(1), (y != UNCOUNTED).sum(1).double()], 1)

    def line(self, row: Array) -> dict[str, Any]:
        return {"log_probability": float(row[0]), "tokens": int(row[1])}

    def cells(self, row: Array) -> list[Any]:
        return list(self.line(row).values())

    def arrays(self, rows: Array) -> dict[str, Array]:
        return {"log_probability": rows[:, 0], "tokens": rows[:, 1].astype(np.int64)}


def format_of(description: Description) -> PredictionFormat:
    """Return the format of the predictions for samples of this data."""
    if description.kind == "tokens":
        return LogProbability()
    return ClassProbabilities(description.classes) if description.classes else Numbers(description.y_shape)


def _require_shape(output: torch.Tensor, shape: list[int], what: str) -> None:
    """Raise InputError unless the output has this shape."""
    if list(output.shape) != shape:
        raise InputError(
            f"the model returns {list(output.shape)} for {shape[0]} samples; predict needs {what}, {shape}"
        )


# -- files

Write = Callable[[Sequence[int], Array], None]  # called with the numbers of samples, and their rows


@contextmanager
def new_file(
    path: Path, table_format: PredictionFormat, names: Sequence[str] | None, extra_columns: Mapping[str, Sequence[Any]]
) -> Iterator[Write]:
    """Write predictions to a new file, which appears under its name once it is complete.

    Args:
        path: File to create; its suffix (.csv, .jsonl or .npz) selects the format.
        table_format: Format of the predictions.
        names: Names of the samples; None to use their numbers.
        extra_columns: Further columns by name, with a value for each sample.

    Yields:
        A function of (numbers of samples, their rows) that writes them.

    Raises:
        InputError: A further column has the name of a prediction's column, or the file cannot be written.
    """
    if taken := {"sample", "probabilities", "classes", *table_format.columns} & set(extra_columns):
        raise InputError(f"--keep {min(taken)}: the predictions have a column of that name; rename it in the table")

    def names_of(numbers: Sequence[int]) -> list[Any]:
        return list(numbers) if names is None else [names[number] for number in numbers]

    with ExitStack() as stack:
        aside = stack.enter_context(whole_file(path))
        if path.suffix == ".npz":
            parts, order = [np.empty((0, table_format.width))], list[int]()

            def keep(numbers: Sequence[int], rows: Array) -> None:
                parts.append(rows)
                order.extend(numbers)

            yield keep
            arrays: dict[str, Any] = table_format.arrays(np.concatenate(parts))
            if names is not None:
                arrays["sample"] = np.array(names_of(order))
            arrays |= {name: _array([values[number] for number in order]) for name, values in extra_columns.items()}
            np.savez(aside, **arrays)
            return
        file = stack.enter_context(open(aside, "x", encoding="utf-8", newline=""))
        if path.suffix == ".csv":
            table = csv.writer(file)
            table.writerow(["sample", *extra_columns, *table_format.columns])
            yield lambda numbers, rows: table.writerows(
                [name, *(values[number] for values in extra_columns.values()), *table_format.cells(row)]
                for number, name, row in zip(numbers, names_of(numbers), rows, strict=True)
            )
            return
        yield lambda numbers, rows: file.writelines(
            json.dumps(
                {"sample": name}
                | {key: _plain(values[n]) for key, values in extra_columns.items()}
                | table_format.line(row)
            )
            + "\n"
            for n, name, row in zip(numbers, names_of(numbers), rows, strict=True)
        )


def _plain(value: Any) -> Any:
    """Return a cell of a table as a JSON value."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _array(values: Sequence[Any]) -> Array:
    """Return cells of a table as an array of numbers, or of strings if some are not numbers."""
    if all(value is None or isinstance(value, int | float) for value in values):
        return np.array([math.nan if value is None else value for value in values])
    return np.array(["" if value is None else str(value) for value in values])


def require_file(path: Path) -> None:
    """Raise InputError if a file cannot be created at this path, or its suffix is not .csv, .jsonl or .npz."""
    if path.suffix not in (".csv", ".jsonl", ".npz"):
        raise InputError(f"--out {path}: the ending selects the kind of file; use .csv, .jsonl or .npz")
    require_new(path)
