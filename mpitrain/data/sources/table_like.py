"""Tables that are prepared like another one, whose data set says what becomes of each column and of the labels."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mpitrain.data.format import DatasetManifest, read_manifest
from mpitrain.data.sources.table_files import is_number
from mpitrain.errors import InputError

OF_LIKE = "the data set of --like has"


def manifest_of_table(folder: Path, options: Any) -> DatasetManifest:
    """The manifest of the data set that tables are to be like.

    Args:
        folder: The data set.
        options: A `TableOptions`, which must not say what becomes of columns.

    Raises:
        InputError: There is none, it was not made of a table, or other options say otherwise.
    """
    told = [name for name in ("columns", "drop", "categories", "scale") if getattr(options, name) is not None]
    told += ["missing"] if options.missing not in (None, "drop") else []
    if told:
        raise InputError(f"--like {folder} says what becomes of the columns; leave --{told[0]} out")
    manifest = read_manifest(folder)
    if manifest.columns is None:
        raise InputError(f"--like {folder}: that data set was not made of a table; give one that was")
    return manifest


def labels_like(
    manifest: DatasetManifest, found: Iterable[str], path: Path
) -> tuple[dict[str, int], tuple[str, ...] | None]:
    """The number of each class, and their names; ({}, None) where the labels are numbers to predict.

    Args:
        manifest: Of the other data set.
        found: The labels that there are.
        path: The file that they are in.

    Raises:
        InputError: There is a label of another kind, or a class that the other data set has not.
    """
    if manifest.classes is None:
        for name in found:
            if not is_number(name):
                raise InputError(f"{path}: label {name!r:.100} is not a number, which those of --like are; mend it")
        return {}, None
    numbers = {name: i for i, name in enumerate(manifest.classes)}
    for name in found:
        if name not in numbers:
            known = ", ".join(map(repr, manifest.classes[:8]))
            raise InputError(f"{path}: label {name!r:.100} is none of the classes of --like ({known}); mend it")
    return numbers, tuple(manifest.classes)
