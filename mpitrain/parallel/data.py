"""The data axis: its ranks have the same part of the model and read different samples."""

from __future__ import annotations

from mpitrain.layout.mesh import SAMPLES, MeshAxis


class DataAxis(MeshAxis):
    """Data parallel and the stages of ZeRO."""

    name = "data"
    divides = SAMPLES
    near = 0
