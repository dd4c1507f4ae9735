"""The pipeline axis: its ranks have stages of the model, one after the other."""

from __future__ import annotations

from mpitrain.layout.mesh import BLOCKS, MeshAxis


class PipelineAxis(MeshAxis):
    """Pipeline parallel."""

    name = "pipeline"
    divides = BLOCKS
    near = 10
