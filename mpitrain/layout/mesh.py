"""The mesh: the place of each rank along an ordered list of axes, and the groups of ranks that follow from it.

An axis says what its ranks divide (`MeshAxis.divides`); the axes of the package are declared in `mpitrain.parallel`.
Ranks along the last axis of the list are neighbours. With 2 pipeline stages and 2 tensor ranks

    rank = (data * 2 + pipeline) * 2 + tensor

             pipeline 0   pipeline 1
    data 0          0 1          2 3
    data 1          4 5          6 7        tensor ranks are neighbours: inside a node, where messages are fast

The groups that work together follow from what the axes divide:

    group       axes                 its ranks
    readers     SAMPLES              read different samples of a batch
    parts       PARTS                have parts of the same samples
    replicas    SAMPLES and PARTS    have the same part of the model: they sum gradients, total losses, share batch
                                     statistics, shard states (ZeRO) and write a checkpoint together
    stages      BLOCKS               have the blocks of one replica
    layers      LAYERS               have parts of the same layers, and compute the same samples
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mpitrain.config.named import find
from mpitrain.config.parallel import ParallelSection
from mpitrain.errors import refusal

if TYPE_CHECKING:
    from mpitrain.comm import Communicator

SAMPLES, PARTS, BLOCKS, LAYERS = "samples", "parts", "blocks", "layers"


class MeshAxis:
    """A way to spread training over ranks, declared by a subclass.

    Attributes:
        name: Name of the axis: a key of `Mesh.shape`, and the label of its messages in the account of sent bytes.
        divides: Things that its ranks have parts of: SAMPLES (of a batch), PARTS (of each sample, such as a sequence or
            an image), BLOCKS (of the model) or LAYERS.
        near: Closeness of its ranks, larger for closer ranks: data 0, pipeline 10, tensor 20.
        idle: Keys of [parallel] that have no effect if the axis has one rank.
    """

    name: str
    divides: str = SAMPLES
    near: int = 5
    idle: tuple[str, ...] = ()

    def take(self, x: Any, y: Any, number: int, ranks: int) -> tuple[Any, Any]:
        """Return a rank's part of samples and of their targets if the axis divides PARTS, else both unchanged.

        Args:
            x: Samples [samples, ...].
            y: Targets [samples, ...], or None.
            number: Number of the rank along the axis.
            ranks: Number of ranks along the axis.
        """
        return x, y

    # The methods below are called for every axis of a mesh; by default they change nothing.

    def refuse(self, combination: Any) -> str:
        """Return why this axis conflicts with other settings, and how to fix it; empty if there is no conflict.

        Args:
            combination: A `parallel.rules.Combination`.
        """
        return ""

    def divide(self, part: Any, group: Any) -> None:
        """Change a model into this rank's part of it along this axis. Collective.

        Args:
            part: A `parallel.dividing.ModelPart`, whose module is the model after division along the earlier axes.
            group: Communicator of the ranks along this axis; a stand-in for it in the planner.
        """

    def sizes(self, model: Any, ranks: int, asked: int | str) -> Iterable[int]:
        """Return the numbers of ranks along this axis that a planner tries.

        Args:
            model: A `parallel.costs.ModelProfile`.
            ranks: Ranks that the axes further inside leave.
            asked: Number of ranks in the configuration, or "auto".
        """
        return [ranks if asked == "auto" else int(asked)]

    def options(self, layout: Any, model: Any, places: Any) -> Iterable[Mapping[str, Any]]:
        """Return the changes of a layout that a planner tries because of this axis.

        Args:
            layout: A `parallel.layouts.ParallelLayout` with its ranks, and defaults for the rest.
            model: A `parallel.costs.ModelProfile`.
            places: Nodes of the job, a `parallel.places.Nodes`.
        """
        return [{}]

    def exchange_seconds(self, exchange: Any, group: Any, step: Any) -> float:
        """Return the predicted seconds of an exchange along this axis within a forward or backward pass.

        Args:
            exchange: A `parallel.costs.AxisExchange`.
            group: Ranks that take part, a `parallel.places.Group`.
            step: The `planner.predictor.StepSimulation`.
        """
        return float(
            step.seconds(exchange.operation, float(exchange.nbytes), group, "private")
            + step.core_sharing_seconds(group)
        )

    def buffers(self, sizes: Iterable[int]) -> float:
        """Return the bytes of a rank's buffers for exchanges along this axis.

        Args:
            sizes: Bytes of each exchange of a step.
        """
        return 0.0

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))


Sizes = Sequence[tuple[MeshAxis, "int | str"]]  # ranks along each axis, or "auto"


def axes_of(parallel: ParallelSection) -> Sizes:
    """Return the axes that settings ask for, outermost first, with the ranks along each ("auto": the remaining ranks).

    Raises:
        InputError: An entry of parallel.axes is not an axis, or two axes have the same name.
    """
    axes: list[tuple[MeshAxis, int | str]] = []
    for path, ranks in parallel.requested_sizes.items():
        axis = find("parallel.axes", path)()
        if not isinstance(axis, MeshAxis):
            raise refusal(f"parallel.axes {path} is not a subclass of mpitrain.layout.mesh.MeshAxis; use one")
        if any(axis.name == other.name for other, _ in axes):
            raise refusal(
                f"parallel.axes {path} has the same name {axis.name!r} as another axis; give it a different name"
            )
        axes.append((axis, ranks))
    return sorted(axes, key=lambda entry: entry[0].near)


@dataclass(frozen=True)
class Mesh:
    """All ranks, and this rank's place along the axes (similar to torch's DeviceMesh).

    `mesh.NAME` is the communicator of the ranks that differ from this rank only along the axis NAME: data, pipeline or
    tensor.

    Attributes:
        world: Communicator of all ranks.
        axes: Axes from the outermost to the one whose ranks are neighbours.
        shape: Ranks along each axis, by its name, in the same order.
        coordinates: This rank's number along each axis.
    """

    world: Communicator
    axes: tuple[MeshAxis, ...]
    shape: Mapping[str, int]
    coordinates: Mapping[str, int]
    _groups: dict[tuple[str, ...], Communicator] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def make(
        world: Communicator,
        data: int | str = "auto",
        pipeline: int = 1,
        tensor: int = 1,
        axes: Mapping[str, int] = MappingProxyType({}),
    ) -> Mesh:
        """Return the mesh of all ranks. Collective.

        Args:
            world: Communicator of all ranks.
            data: Ranks along the data axis; "auto": the ranks that the other axes leave.
            pipeline: Ranks along the pipeline axis.
            tensor: Ranks along the tensor axis.
            axes: Ranks along further axes, in the form of parallel.axes.

        Raises:
            InputError: On all ranks, if the shape does not fit the number of ranks.
        """
        requested: dict[str, Any] = {"data": data, "pipeline": pipeline, "tensor": tensor, "axes": axes}
        return Mesh.of(world, axes_of(ParallelSection.model_construct(**requested)))

    @staticmethod
    def of(world: Communicator, axes: Sizes, *, itself: bool = False) -> Mesh:
        """Return the mesh of all ranks along the given axes. Collective.

        Args:
            world: Communicator of all ranks.
            axes: Axes, outermost first, with the ranks along each.
            itself: If true, a group of all ranks is `world` itself, else a new communicator.

        Raises:
            InputError: On all ranks, if the shape does not fit the number of ranks.
        """
        shape = shape_of(axes, world.size)
        group_size = count_near(axes)
        if world.rank == 0 and _crosses_nodes(world.nodes, group_size):
            names = " x ".join(f"parallel.{axis.name}" for axis, _ in axes if axis.divides == LAYERS)
            warnings.warn(
                f"a tensor group of {group_size} ranks spans several nodes, so that each layer waits for the network; "
                f"make {names} a divisor of the ranks on a node",
                stacklevel=2,
            )
        place = dict(zip(shape, _place(world.rank, list(shape.values())), strict=True))
        mesh = Mesh(world, tuple(axis for axis, _ in axes), MappingProxyType(shape), MappingProxyType(place))
        if itself:
            mesh._groups[tuple(name for name, ranks in shape.items() if ranks > 1)] = world
        for kinds in ((SAMPLES, PARTS), (BLOCKS,), (LAYERS,), (SAMPLES,), (PARTS,)):
            mesh._dividing(*kinds)  # collective, so in the same order on all ranks
        return mesh

    def over(self, *names: str) -> Communicator:
        """Return the ranks that differ from this rank only along the named axes.

        The first call for a set of axes is collective; the communicator is kept for later calls.
        """
        chosen = tuple(name for name, ranks in self.shape.items() if name in names and ranks > 1)
        if chosen not in self._groups:
            places = [coordinates(rank, self.shape) for rank in range(self.world.size)]
            same = {name: number for name, number in self.coordinates.items() if name not in chosen}
            ranks = [rank for rank, place in enumerate(places) if same.items() <= place.items()]
            group = self.world.subgroup(ranks, label="+".join(chosen) or "alone")
            assert group is not None  # this rank is in it
            self._groups[chosen] = group
        return self._groups[chosen]

    def __getattr__(self, name: str) -> Communicator:
        if name.startswith("_") or name not in self.shape:
            raise AttributeError(f"the mesh has no axis {name!r}; its axes are {', '.join(self.shape)}")
        return self.over(name)

    @cached_property
    def readers(self) -> Communicator:
        """Ranks that read different samples of a batch, with the same part of the model and of each sample."""
        return self._dividing(SAMPLES)

    @cached_property
    def parts(self) -> Communicator:
        """Ranks that have parts of the same samples, with the same part of the model."""
        return self._dividing(PARTS)

    @cached_property
    def replicas(self) -> Communicator:
        """Ranks that have the same part of the model."""
        return self._dividing(SAMPLES, PARTS)

    @cached_property
    def stages(self) -> Communicator:
        """Ranks that have the blocks of one replica of the model."""
        return self._dividing(BLOCKS)

    @cached_property
    def layers(self) -> Communicator:
        """Ranks that have parts of the same layers, and compute the same samples."""
        return self._dividing(LAYERS)

    @property
    def divided(self) -> bool:
        """True if a replica of the model is divided over several ranks."""
        return self.replicas.size < self.world.size

    def number(self, *names: str) -> int:
        """Return this rank's number among the ranks that differ only along the named axes."""
        number = 0
        for name in self.shape:
            if name in names:
                number = number * self.shape[name] + self.coordinates[name]
        return number

    @property
    def sizes(self) -> Sizes:
        """Axes of the mesh, each with its ranks."""
        return list(zip(self.axes, self.shape.values(), strict=True))

    def dividing(self, *kinds: str) -> list[str]:
        """Return the names of the axes that divide one of `kinds` (SAMPLES, PARTS, BLOCKS, LAYERS)."""
        return [axis.name for axis in self.axes if axis.divides in kinds]

    def take(self, x: Any, y: Any = None) -> tuple[Any, Any]:
        """Return this rank's part of samples and their targets, divided by all axes (see `MeshAxis.take`).

        Args:
            x: Samples [samples, ...].
            y: Targets [samples, ...], or None.
        """
        for axis in self.axes:
            x, y = axis.take(x, y, self.coordinates[axis.name], self.shape[axis.name])
        return x, y

    def free(self) -> None:
        """Release the communicators of the mesh, which cannot be used afterwards. Collective."""
        for group in reversed(self._groups.values()):
            if group is not self.world:
                group.free()
        self._groups.clear()

    def _dividing(self, *kinds: str) -> Communicator:
        return self.over(*self.dividing(*kinds))


def _place(rank: int, sizes: Sequence[int]) -> Iterator[int]:
    for number in range(len(sizes)):
        yield rank // prod(sizes[number + 1 :]) % sizes[number]


def coordinates(rank: int, shape: Mapping[str, int]) -> dict[str, int]:
    """Return a rank's number along each axis of a mesh.

    Args:
        rank: The rank.
        shape: Ranks along each axis, outermost first.
    """
    return dict(zip(shape, _place(rank, list(shape.values())), strict=True))


def count_near(axes: Sizes) -> int:
    """Return the number of ranks in a group that should lie inside a node: those along axes that divide layers."""
    return count_along(axes, LAYERS)


def count_along(axes: Sizes, *kinds: str) -> int:
    """Return the number of ranks along all axes that divide one of `kinds`; "auto" counts as 1.

    Args:
        axes: Axes with the ranks along each.
        *kinds: SAMPLES, PARTS, BLOCKS or LAYERS.
    """
    return prod(int(ranks) for axis, ranks in axes if axis.divides in kinds and ranks != "auto")


def count_readers(axes: Sizes, ranks: int) -> int:
    """Return how many of all ranks read different samples.

    Args:
        axes: Axes with the ranks along each.
        ranks: Number of all ranks.
    """
    return ranks // count_along(axes, PARTS, BLOCKS, LAYERS)


def shape_of(axes: Sizes, ranks: int) -> dict[str, int]:
    """Return the ranks along each axis by its name, with "auto" replaced by the remaining ranks.

    Args:
        axes: Axes with the ranks along each.
        ranks: Number of all ranks.

    Raises:
        InputError: The product is not the number of ranks; the message suggests shapes that fit.
    """
    requested = {axis.name: size for axis, size in axes}
    fixed = {name: int(size) for name, size in requested.items() if size != "auto"}
    if min(fixed.values(), default=1) < 1:
        raise refusal(f"{', '.join(_format_settings(requested))}: each must be at least 1")
    each, left = prod(fixed.values()), [name for name in requested if name not in fixed]
    if (ranks % each == 0) if left else (ranks == each):
        return {name: fixed.get(name, ranks // each if name in left[:1] else 1) for name in requested}
    names = list(requested)

    def distance(shape: tuple[int, ...]) -> int:  # the first axis has what is left
        return sum(abs(size - fixed.get(name, size)) for name, size in list(zip(names, shape, strict=True))[1:])

    shapes = sorted(_factorizations(ranks, len(names)), key=lambda shape: (distance(shape), shape))
    nearest = ", ".join("x".join(map(str, shape)) for shape in shapes[:4])
    raise refusal(
        f"{' x '.join(_format_settings(requested))} does not give {ranks} ranks; {' x '.join(names)} can be {nearest}"
    )


def _format_settings(requested: Mapping[str, int | str]) -> Iterator[str]:
    for name, size in requested.items():
        yield f"parallel.{name} {size}" if name in ParallelSection.model_fields else f"parallel.axes {name} {size}"


def _factorizations(number: int, factors: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to write a number as a product of `factors` factors, in order."""
    if factors == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in _factorizations(number // first, factors - 1):
                yield (first, *rest)


def whole_groups_first(nodes: Sequence[int], size: int) -> list[int]:
    """Return an order of ranks in which as many groups of `size` neighbours as possible lie inside a node.

    Ranks left over on their nodes come last.

    Args:
        nodes: Node of each rank.
        size: Ranks of a group.
    """
    groups: list[int] = []
    over: list[int] = []
    for node in dict.fromkeys(nodes):
        ranks = [rank for rank, of in enumerate(nodes) if of == node]
        whole = len(ranks) - len(ranks) % size
        groups += ranks[:whole]
        over += ranks[whole:]
    return groups + over


def _crosses_nodes(nodes: tuple[int, ...], size: int) -> bool:
    """Return True if some group of `size` neighbouring ranks lies on several nodes."""
    return any(len(set(nodes[lo : lo + size])) > 1 for lo in range(0, len(nodes), size))
