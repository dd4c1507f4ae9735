"""Division of the whole model into one rank's part: each mesh axis changes the model in turn (`MeshAxis.divide`).

task -> tensor parallel layers -> pipeline stages -> data parallel or ZeRO
        over mesh.layers          over mesh.stages    over mesh.replicas

Axes that divide layers or samples come before those that divide the model into blocks, because after the latter only
a part of the model is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mpitrain.comm.memory.device import CPU
from mpitrain.config.training import TrainSection, recomputes_stages
from mpitrain.errors import refusal
from mpitrain.layout.mesh import BLOCKS, LAYERS, PARTS, SAMPLES, Mesh, MeshAxis
from mpitrain.layout.ownership import Division, owners_of
from mpitrain.parallel.recompute import recompute_blocks
from mpitrain.pipe.partition import Cut
from mpitrain.shard.flat import blocks_of
from mpitrain.tensor.styles import ParallelStyle

if TYPE_CHECKING:
    from mpitrain.comm import Communicator
    from mpitrain.pipe.pipeline import Pipeline

Plan = Mapping[str, str | ParallelStyle]
Criterion = Callable[[Any, Any], torch.Tensor]


@dataclass
class ModelPart:
    """A model that is being divided into this rank's part; `MeshAxis.divide` changes it.

    Attributes:
        module: At first the whole model, equal on all ranks; then what the axes so far have left of it, with the same
            names.
        parallel: The settings [parallel].
        criterion: Function that returns the loss function (output, target), called after layers are divided; None if no
            loss is needed.
        cut: Quantity that the stages have equal shares of, or the cost of each block, on each rank of the pipeline if
            they differ; unused if parallel.cut lists the blocks of each stage.
        device: Device that this rank computes on.
        train: The settings [train]; only those about activations are used.
        tensor: Ranks that divide the layers, set by `divide`; None if there is only one.
        plan: Division of the layers (see `mpitrain.tensor.plan`). Default: the model's own plan.
        names: Names of the modules that make up the model when called one after the other. Default: the model's own
            list.
        pipeline: Pipeline of which the module is a stage; None if the module is the whole model.
        blocks: Blocks of the whole model, found by `mpitrain.shard.flat.blocks_of` before it is divided.
        division: Division of the model over the mesh, set at the end.
    """

    module: nn.Module
    parallel: Any
    criterion: Callable[[], Criterion] | None = None
    cut: Cut = "uniform"
    device: torch.device = CPU
    train: TrainSection = field(default_factory=TrainSection)
    plan: Plan | None = None
    tensor: Communicator | None = None
    names: Sequence[str] = ()
    pipeline: Pipeline | None = None
    blocks: Sequence[nn.Module] = ()
    division: Division = field(default_factory=Division)


def divide(part: ModelPart, mesh: Mesh) -> ModelPart:
    """Divide a model along all axes of a mesh, in place, and move this rank's part to its device. Collective.

    Args:
        part: The whole model with its settings; it is changed and returned.
        mesh: The mesh of all ranks.
    """
    aliases = tied_names(part.module)
    part.blocks = blocks_of(part.module)
    for axis in in_order(mesh.axes):
        axis.divide(part, mesh.over(axis.name))
    pipeline, module, train = part.pipeline, part.module, part.train
    if train.partition_activations and (part.tensor is None or not train.recompute or part.parallel.sequence):
        raise refusal(
            "train.partition_activations divides inputs that recomputed blocks keep on every tensor rank, so it needs "
            "parallel.tensor above 1, train.recompute, and parallel.sequence false; set these, or remove it"
        )
    if train.recompute and (pipeline is None or not recomputes_stages(train)):
        tensor = part.tensor if train.partition_activations else None
        recompute_blocks(module, train.recompute, part.blocks, tensor)
    move(module, part.device)
    copied = pipeline.counted_elsewhere() if pipeline is not None else set[str]()
    owners = owners_of(module, {name: mesh.coordinates[name] for name in mesh.dividing(LAYERS)}, copied)
    others, replicas = ({n: mesh.over(n) for n in mesh.dividing(*of)} for of in ((BLOCKS, LAYERS), (SAMPLES, PARTS)))
    part.division = Division(others, replicas, owners, pipeline, aliases)
    return part


def in_order(axes: Iterable[MeshAxis], *, blocks: bool = True) -> list[MeshAxis]:
    """Return axes in the order in which they change a model.

    Args:
        axes: Axes of a mesh.
        blocks: If false, axes that divide the model into blocks are left out.
    """
    return sorted((axis for axis in axes if blocks or axis.divides != BLOCKS), key=lambda axis: axis.divides == BLOCKS)


def tied_names(module: nn.Module) -> dict[str, str]:
    """Return the further names of tied parameters: name -> the name under which the parameter is saved."""
    first = {id(p): name for name, p in module.named_parameters()}
    every: Iterable[tuple[str, nn.Parameter]] = module.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in every if first[id(p)] != name}


def move(module: nn.Module, to: torch.device) -> None:
    """Move a module to a device, in place. Parameters stay the same objects, so that tied ones stay tied.

    Args:
        module: Module to move.
        to: Target device.

    Raises:
        InputError: PyTorch cannot keep the parameter objects for this kind of device.
    """
    if all(t.device == to for t in (*module.parameters(), *module.buffers())):
        return
    before = list(module.parameters())
    module.to(to)
    if any(one is not other for one, other in zip(before, module.parameters(), strict=True)):
        raise refusal(
            f"PyTorch creates new parameters when a module is moved to {to.type}, so tied parameters are "
            "untied and the optimizer keeps the old ones; move the model before you create the optimizer"
        )
