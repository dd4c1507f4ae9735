"""The mesh: every rank's place along three axes, and one Communicator per axis.

rank = (data * P + pipeline) * T + tensor          P = 2 pipeline stages, T = 2 tensor ranks

             pipeline 0   pipeline 1
data 0          0 1          2 3
data 1          4 5          6 7        tensor ranks are neighbours: inside a node, where messages are fast
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpitrain.errors import refusal

if TYPE_CHECKING:
    from mpitrain.comm import Communicator


@dataclass(frozen=True)
class Mesh:
    """All ranks and this rank's three axes (torch's DeviceMesh has the same idea).

    The sizes of the axes are the mesh's shape, and this rank's numbers in them are its coordinates.

    Attributes:
        world: All ranks.
        data: The ranks that differ from this one along the data axis alone: they have the same part of the model.
        pipeline: The ranks that differ along the pipeline axis alone.
        tensor: The ranks that differ along the tensor axis alone.
    """

    world: Communicator
    data: Communicator
    pipeline: Communicator
    tensor: Communicator

    @staticmethod
    def make(world: Communicator, data: int | str = "auto", pipeline: int = 1, tensor: int = 1) -> Mesh:
        """Put all ranks into a mesh. Collective.

        Args:
            world: All ranks.
            data: Ranks along the data axis, or "auto" for what is left by the others.
            pipeline: Ranks along the pipeline axis.
            tensor: Ranks along the tensor axis.

        Raises:
            InputError: On all ranks alike, when the shape does not fit the number of ranks.
        """
        shape = mesh_shape(world.size, data, pipeline, tensor)
        _, p, t = shape
        if world.rank == 0 and _crosses_nodes(world.nodes, t):
            warnings.warn(
                f"a tensor group of {t} ranks spans several nodes, so that each layer waits for the network; make "
                "parallel.tensor a divisor of the ranks on a node",
                stacklevel=2,
            )
        d_rank, p_rank, t_rank = coordinates(world.rank, shape)
        data_axis = world.split(p_rank * t + t_rank, d_rank, label="data")
        pipeline_axis = world.split(d_rank * t + t_rank, p_rank, label="pipeline")
        tensor_axis = world.split(d_rank * p + p_rank, t_rank, label="tensor")
        return Mesh(world, data_axis, pipeline_axis, tensor_axis)

    def free(self) -> None:
        """Release the communicators of the axes. Collective; the mesh is of no use afterwards."""
        for axis in (self.tensor, self.pipeline, self.data):
            axis.free()

    @property
    def shape(self) -> tuple[int, int, int]:
        """Ranks along data, pipeline and tensor."""
        return self.data.size, self.pipeline.size, self.tensor.size

    @property
    def coordinates(self) -> tuple[int, int, int]:
        """This rank's number along data, pipeline and tensor."""
        return self.data.rank, self.pipeline.rank, self.tensor.rank


def coordinates(rank: int, shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """A rank's number along data, pipeline and tensor in a mesh of this shape."""
    _, p, t = shape
    return rank // (p * t), rank // t % p, rank % t


def mesh_shape(ranks: int, data: int | str, pipeline: int, tensor: int) -> tuple[int, int, int]:
    """The shape (data, pipeline, tensor) of a mesh of so many ranks, with "auto" filled in.

    Raises:
        InputError: The product is not the number of ranks; names shapes that would fit.
    """
    if pipeline < 1 or tensor < 1 or (data != "auto" and int(data) < 1):
        raise refusal(
            f"parallel.data {data}, parallel.pipeline {pipeline}, parallel.tensor {tensor}: each must be at least 1"
        )
    each = pipeline * tensor
    if data == "auto" and ranks % each == 0:
        return ranks // each, pipeline, tensor
    if data != "auto" and int(data) * each == ranks:
        return int(data), pipeline, tensor
    shapes = [
        (ranks // (p * t), p, t) for p in range(1, ranks + 1) for t in range(1, ranks // p + 1) if ranks % (p * t) == 0
    ]
    shapes.sort(key=lambda s: (abs(s[1] - pipeline) + abs(s[2] - tensor), s))
    nearest = ", ".join("x".join(map(str, shape)) for shape in shapes[:4])
    raise refusal(
        f"parallel.data {data} x parallel.pipeline {pipeline} x parallel.tensor {tensor} does not make {ranks} ranks; "
        f"data x pipeline x tensor may be {nearest}"
    )


def conflict(parallel: Any, *, compiled: bool = False, reproducible: bool = False) -> str:
    """Return why ways to divide a model do not go together, and what to change; empty where they do.

    Args:
        parallel: The settings [parallel], or a layout of the planner, whose fields have the same names.
        compiled: model.compile.
        reproducible: run.reproducible.
    """
    if compiled and (parallel.slices > 1 or reproducible):
        why = "run.reproducible needs sums whose order is known"
        why = "with parallel.slices blocks are called piece by piece, as they are" if parallel.slices > 1 else why
        return f"model.compile: {why}; set one of them to its default"
    if reproducible and (parallel.pipeline > 1 or parallel.tensor > 1):
        return (
            "run.reproducible is for data parallel runs: a cut model sums in another order; set parallel.pipeline and "
            "parallel.tensor to 1, or run.reproducible to false"
        )
    if parallel.sequence and parallel.slices > 1 and parallel.tensor > 1 and parallel.pipeline > 1:
        return (
            "parallel.sequence does not go with parallel.slices: a slice cannot tell its length from a part of it; set "
            "parallel.sequence to false, or parallel.slices to 1"
        )
    if parallel.pipeline == 1 and parallel.cut and not isinstance(parallel.cut, str):
        return (
            f"parallel.cut {list(parallel.cut)} says how many blocks each stage of a pipeline has, and "
            "parallel.pipeline is 1; raise that, or leave parallel.cut out"
        )
    return ""


def uncompiled(gathers: bool, synchronous: bool) -> str:
    """Return why a model cannot be compiled; empty where it can.

    Args:
        gathers: Whether ranks gather blocks when they need them.
        synchronous: Whether they compute batch norms together.
    """
    if gathers:
        return (
            "model.compile cannot see through the gathering of blocks at parallel.zero 3; use parallel.zero 2, or set "
            "model.compile to false"
        )
    return synchronous * (
        "model.compile cannot see through batch norms, which the ranks compute together; set model.compile to false"
    )


def tensor_groups_first(nodes: Sequence[int], tensor: int) -> list[int]:
    """An order of ranks in which groups of `tensor` neighbours lie inside a node as far as that can be.

    The ranks that are left over on their nodes come last.

    Args:
        nodes: The node of each rank.
        tensor: Ranks of a tensor group.
    """
    groups: list[int] = []
    over: list[int] = []
    for node in dict.fromkeys(nodes):
        ranks = [rank for rank, of in enumerate(nodes) if of == node]
        whole = len(ranks) - len(ranks) % tensor
        groups += ranks[:whole]
        over += ranks[whole:]
    return groups + over


def _crosses_nodes(nodes: tuple[int, ...], tensor: int) -> bool:
    """Whether some group of `tensor` neighbouring ranks has ranks on several nodes."""
    return any(len(set(nodes[lo : lo + tensor])) > 1 for lo in range(0, len(nodes), tensor))
