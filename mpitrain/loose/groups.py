"""Groups of ranks that train by themselves between two averages: who is in which, and on which samples.

    data-parallel ranks   0 1 | 2 3 | 4 5          parallel.local_group = 2: three groups, each one replica
    a global batch of 7   0-2 | 3-4 | 5-6          contiguous parts, nearly equal; together those of parallel.mode sync

A data-parallel rank is as many ranks as a replica has pipeline stages times tensor ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpitrain.comm import Communicator
from mpitrain.config.parallel import ParallelSection
from mpitrain.errors import refusal
from mpitrain.layout import split
from mpitrain.mesh import mesh_shape


@dataclass(frozen=True)
class Grouping:
    """This rank's group, one of several that are equally large.

    Attributes:
        count: Groups.
        number: This rank's.
        each: Data-parallel ranks in a group.
        batch: Samples of a global batch.
    """

    count: int
    number: int
    each: int
    batch: int

    @staticmethod
    def of(world: Communicator, parallel: ParallelSection, batch: int) -> Grouping:
        """The group of this rank, by parallel.local_group.

        Args:
            world: All ranks.
            parallel: The settings.
            batch: Samples of a global batch.

        Raises:
            InputError: On all ranks, where the ranks cannot be divided so, or there is no sample for some group.
        """
        data, pipeline, tensor = mesh_shape(world.size, parallel.data, parallel.pipeline, parallel.tensor)
        model = pipeline * tensor
        if parallel.local_group == "node":
            each, number = _of_node(world, model), list(dict.fromkeys(world.nodes)).index(world.node)
        else:
            each, number = parallel.local_group, world.rank // (parallel.local_group * model)
        if data % each:
            raise refusal(
                f"parallel.local_group {each} does not divide the {data} data-parallel ranks; give a divisor of {data}"
            )
        count = data // each
        if count == 1:
            raise refusal(
                f"parallel.mode local with parallel.local_group {parallel.local_group} makes one group of all {data} "
                "data-parallel ranks, which is the same as parallel.mode sync; use that, or smaller groups"
            )
        if batch < count:
            raise refusal(
                f"train.batch {batch} has no sample for some of the {count} groups of parallel.mode local; make it "
                f"at least {count}"
            )
        return Grouping(count, number, each, batch)

    def part(self, size: int) -> tuple[int, int]:
        """This group's samples [first, last) of a global batch of `size` samples."""
        bounds = split(size, self.count)
        return bounds[self.number], bounds[self.number + 1]

    @property
    def weight(self) -> float:
        """This group's part of a global batch: what it counts in averages."""
        first, last = self.part(self.batch)
        return (last - first) / self.batch


def _of_node(world: Communicator, model: int) -> int:
    """Data-parallel ranks on each node. Raises InputError where nodes differ, or cut a replica's parts."""
    counts = {world.nodes.count(node) for node in world.nodes}
    if len(counts) > 1 or max(counts) % model:
        shown = ", ".join(map(str, sorted(counts)))
        raise refusal(
            f"parallel.local_group node needs as many ranks on each node, a multiple of the {model} that the model is "
            f"cut over, but there are {shown}; start them so, or give parallel.local_group a number"
        )
    return max(counts) // model
