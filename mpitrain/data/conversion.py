"""Conversion of stored numbers of HDF5, NetCDF and Zarr variables into the numbers that a model gets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mpitrain.data.format import FieldSpec, VariableSpec


def parts_of(
    variables: Sequence[VariableSpec], spec: FieldSpec, rows: npt.NDArray[Any]
) -> Iterator[tuple[VariableSpec, npt.NDArray[Any]]]:
    """Yield each variable of a field with its part of the rows, a view.

    Args:
        variables: Variables of all fields.
        spec: The field.
        rows: Rows of the field, [n, *shape].
    """
    channel = 0
    for variable in variables:
        if variable.field == spec.name:
            part = rows[:, channel : channel + variable.channels] if variable.channels else rows
            channel += variable.channels
            yield variable, part


def in_units(variable: VariableSpec, stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return numbers in the units of a variable, with NaN for missing ones.

    Args:
        variable: The variable.
        stored: Stored numbers, any shape.

    Returns:
        Numbers of the same shape, float32; float64 if the stored numbers need it.
    """
    values = stored.astype(np.result_type(stored.dtype, np.float32))  # a copy
    missing = [stored == np.asarray(mark, stored.dtype) for mark in variable.missing]
    if (variable.factor, variable.offset) != (1.0, 0.0):
        values *= variable.factor
        values += variable.offset
    for marked in missing:
        values[marked] = np.nan
    return values


def convert(spec: FieldSpec, variables: Sequence[VariableSpec], stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the numbers of a field as a model gets them.

    Args:
        spec: The field.
        variables: Variables of all fields; none if stored numbers need no conversion but that of their dtype.
        stored: Rows of the field, [n, *shape] of its stored dtype.

    Returns:
        Rows [n, *shape], int64 or float32.
    """
    if spec.given == "float" and any(v.field == spec.name and (v.converts or v.missing) for v in variables):
        out = np.empty(stored.shape, spec.handed)
        for (variable, part), (_, into) in zip(
            parts_of(variables, spec, stored), parts_of(variables, spec, out), strict=True
        ):
            values = in_units(variable, part)
            if variable.fill is not None:
                values[np.isnan(values)] = variable.fill
            into[...] = (values - variable.shift) / variable.scale
        return out
    values = stored.astype(spec.handed, copy=False)
    if spec.given == "unit":
        values *= np.float32(1 / 255)
    return values
