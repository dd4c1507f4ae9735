"""Division of the whole model into one rank's part: each mesh axis changes the model in turn (`MeshAxis.divide`).

task -> tensor parallel layers -> pipeline stages -> data parallel or ZeRO
        over mesh.layers          over mesh.stages    over mesh.replicas

Axes that divide layers or samples come before those that divide the model into blocks, because after the latter only
a part of the model is left.

Reference:
    Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost (`recompute_blocks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mpitrain.comm.memory.device import CPU
from mpitrain.errors import refusal
from mpitrain.layout.mesh import BLOCKS, LAYERS, PARTS, SAMPLES, Mesh, MeshAxis
from mpitrain.layout.ownership import Division, owners_of
from mpitrain.parallel.rules import without_blocks
from mpitrain.shard.flat import blocks_of
from mpitrain.tensor.styles import ParallelStyle

if TYPE_CHECKING:
    from mpitrain.pipe.pipeline import Pipeline

Cut = str | Sequence[float]
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
        cut: Quantity that the stages have equal shares of, or the cost of each block; unused if parallel.cut lists the
            blocks of each stage.
        device: Device that this rank computes on.
        recompute: If true, activations are recomputed in backward.
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
    recompute: bool = False
    plan: Plan | None = None
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
    pipeline, module = part.pipeline, part.module
    if pipeline is None and part.recompute:
        recompute_blocks(module)
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


def recompute_blocks(module: nn.Module) -> int:
    """Let every block of a model keep only its input and be recomputed in backward. Changes the module.

    Dropout draws the same numbers again.

    Args:
        module: The model, with blocks as defined by `mpitrain.shard.flat.blocks_of`.

    Returns:
        The number of blocks.

    Raises:
        InputError: The model has no blocks.
    """
    blocks = blocks_of(module)
    if not blocks:
        raise refusal(without_blocks("train.recompute"))
    for block in blocks:
        block.forward = partial(_recomputed, block, block.forward)
    return len(blocks)


def _recomputed(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a block's forward, with checkpointing in training mode so that only its input is kept."""
    if not block.training:
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
