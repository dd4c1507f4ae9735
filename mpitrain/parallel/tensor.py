"""The tensor axis: its ranks have parts of the same layers and compute the same samples."""

from __future__ import annotations

from mpitrain.layout.mesh import LAYERS, MeshAxis


class TensorAxis(MeshAxis):
    """Tensor parallel."""

    name = "tensor"
    divides = LAYERS
    near = 20
