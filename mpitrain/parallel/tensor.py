"""The tensor axis: its ranks hold parts of the same layers and compute the same samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from mpitrain.layout.mesh import BLOCKS, LAYERS, MeshAxis
from mpitrain.parallel.costs import AxisExchange, Divided, ModelProfile
from mpitrain.parallel.dividing import ModelPart
from mpitrain.parallel.layouts import ParallelLayout, divisors
from mpitrain.parallel.places import Group
from mpitrain.parallel.rules import Combination
from mpitrain.tensor.axis import sums_directly
from mpitrain.tensor.plan import parallelize, plan_for


class TensorAxis(MeshAxis):
    """The axis of tensor parallelism."""

    name = "tensor"
    divides = LAYERS
    near = 20
    idle = ("sequence",)

    def refuse(self, combination: Combination) -> str:
        """Refuse settings for divided layers without tensor ranks, and settings that exclude a divided sequence."""
        parallel, several = combination.parallel, combination.size(self.name) > 1
        if parallel.whole and not several:
            return (
                "parallel.whole is for layers that tensor ranks would divide, but parallel.tensor is 1; raise "
                "parallel.tensor, or remove parallel.whole"
            )
        if parallel.whole and parallel.sequence:
            return (
                "parallel.whole cannot be combined with parallel.sequence, which divides the sequence between "
                "the layers; set parallel.sequence to false, or remove parallel.whole"
            )
        sliced = parallel.slices > 1 and combination.count(BLOCKS) > 1
        return bool(parallel.sequence and sliced and several) * (
            "parallel.sequence cannot be combined with parallel.slices, because a rank cannot determine the "
            "length of a slice from its part; set parallel.sequence to false, or parallel.slices to 1"
        )

    def divide(self, part: ModelPart, group: Any) -> None:
        """Divide the layers that the model's plan names. Collective.

        Args:
            part: The model, divided along the earlier axes. Layers of its module are replaced.
            group: Communicator of the tensor ranks, or its stand-in in the planner.
        """
        if group.size > 1:
            parallel, part.tensor = part.parallel, group
            plan = plan_for(part.module, part.plan, sequence=parallel.sequence)
            parallelize(part.module, group, plan, sequence=parallel.sequence, whole=parallel.whole)

    def sizes(self, model: ModelProfile, ranks: int, asked: int | str) -> Iterable[int]:
        """Return the numbers of tensor ranks that a planner tries: divisors of `ranks` that can divide the layers.

        Args:
            model: Profile of the model.
            ranks: Ranks that the axes further inside leave.
            asked: Ignored.
        """
        return [n for n in divisors(ranks) if n == 1 or (model.divisible and model.takes(Divided(n)))]

    def options(self, layout: ParallelLayout, model: ModelProfile, places: Any) -> Iterable[Mapping[str, Any]]:
        """Return the values of parallel.sequence that a planner tries: false, and true if the model allows it.

        Args:
            layout: Layout with its ranks, and defaults for the rest.
            model: Profile of the model.
            places: Ignored.

        Returns:
            Changes of the layout, with the key sequence.
        """
        divided = replace(Divided(layout.tensor), sequence=True)
        return [{"sequence": each} for each in (False, True)[: 1 + (layout.tensor > 1 and model.takes(divided))]]

    def exchange_seconds(self, exchange: AxisExchange, group: Group, step: Any) -> float:
        """Return the predicted seconds of an exchange, which uses shared memory of the node (see `tensor.axis`).

        Each rank copies its part in, and sums or copies what it needs out. With two ranks, or few bytes, each rank sums
        all parts.

        Args:
            exchange: The collective.
            group: Ranks that take part.
            step: The `planner.predictor.StepSimulation`.
        """
        links, nbytes = step.machine.links, float(exchange.nbytes)
        seconds = float(step.seconds(exchange.operation, nbytes, group, "arena") + step.core_sharing_seconds(group))
        if group.spans > 1 or step.places.on_device or group.size == 1:
            return seconds
        copied, added = nbytes / links.copy_rate * step.turns, nbytes / links.reduce_rate * step.turns
        meets = step.predictor.collectives.barrier(group) + step.core_sharing_seconds(group)
        if exchange.operation == "all_gather":
            return float(meets + copied / group.size + copied)
        if exchange.operation == "reduce_scatter":
            return float(meets + copied + added * (group.size - 1) / group.size)
        if sums_directly(group.size, exchange.nbytes):
            return float(meets + copied + added * (group.size - 1))
        return float(seconds + 2 * copied)

    def buffers(self, sizes: Iterable[int]) -> float:
        """Return the bytes of two buffers for the largest exchange, in memory that the node shares."""
        return 2.0 * max(sizes, default=0)
