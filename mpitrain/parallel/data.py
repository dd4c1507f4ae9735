"""The data axis: its ranks have the same part of the model and read different samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mpitrain.layout.mesh import SAMPLES, MeshAxis
from mpitrain.parallel.costs import ModelProfile
from mpitrain.parallel.layouts import ParallelLayout
from mpitrain.parallel.places import Nodes


class DataAxis(MeshAxis):
    """The axis of data parallelism and of ZeRO.

    Collectives of its ranks include all ranks with the same part of the model: see `Mesh.replicas`.
    """

    name = "data"
    divides = SAMPLES
    near = 0

    def sizes(self, model: ModelProfile, ranks: int, asked: int | str) -> Iterable[int]:
        """Return the ranks that the other axes leave, if each of them gets a sample (see `MeshAxis.sizes`)."""
        return [ranks][: ranks <= model.batch]

    def options(self, layout: ParallelLayout, model: ModelProfile, places: Nodes) -> Iterable[Mapping[str, Any]]:
        """Return the ways to place parameters, gradients and states over replicas (see `MeshAxis.options`)."""
        options: list[dict[str, Any]] = [{}]
        if layout.replicas > 1:
            options += [{"zero": zero} for zero in (1, 2, 3)]
            third = {"zero": 3, "share_node": places.on_device}
            options += ([] if places.on_device else [third]) + [third | {"reshard": False}]
        ranks_per_replica = layout.ranks // layout.replicas  # ranks with different parts of the model
        if places.count > 1 and places.evenly(layout) and places.each > ranks_per_replica:
            options += [each | {"shard_within": "node"} for each in options if each.get("zero")]
        if places.on_device:
            options += [each | {"offload": "host"} for each in options]
        return options
