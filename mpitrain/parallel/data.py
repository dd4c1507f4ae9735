"""The data axis: its ranks have the same part of the model and read different samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mpitrain.layout.mesh import BLOCKS, SAMPLES, MeshAxis
from mpitrain.parallel.costs import ModelProfile
from mpitrain.parallel.layouts import ParallelLayout
from mpitrain.parallel.places import Nodes
from mpitrain.parallel.rules import Combination


class DataAxis(MeshAxis):
    """The axis of data parallelism and of ZeRO.

    Collectives of its ranks include all ranks with the same part of the model: see `Mesh.replicas`.
    """

    name = "data"
    divides = SAMPLES
    near = 0
    idle = ("shares",)

    def refuse(self, combination: Combination) -> str:
        """Refuse shares by time where ranks compute stages instead of the whole model, and where results would vary."""
        if combination.parallel.shares == "equal" or combination.size(self.name) == 1:
            return ""
        if combination.count(BLOCKS) > 1:
            return (
                "parallel.shares time measures ranks that compute the whole model, but parallel.pipeline gives each a "
                "part of it; use parallel.cut time instead, or set parallel.pipeline to 1"
            )
        return bool(combination.reproducible) * (
            "parallel.shares time gives the ranks parts that depend on measured times, but run.reproducible needs "
            "the same parts in every run; set one of them to its default"
        )

    def sizes(self, model: ModelProfile, ranks: int, asked: int | str) -> Iterable[int]:
        """Return the one size that a planner tries: all ranks that the other axes leave, if each gets a sample.

        Args:
            model: Profile of the model, which has the size of the global batch.
            ranks: Ranks that the other axes leave.
            asked: Ignored.
        """
        return [ranks][: ranks <= model.batch]

    def options(self, layout: ParallelLayout, model: ModelProfile, places: Nodes) -> Iterable[Mapping[str, Any]]:
        """Return the ways to store parameters, gradients and optimizer states that a planner tries.

        Args:
            layout: Layout with its ranks, and defaults for the rest.
            model: Ignored.
            places: Nodes of the job.

        Returns:
            Changes of the layout, each with some of the keys zero, share_node, reshard, shard_within and offload.
        """
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
