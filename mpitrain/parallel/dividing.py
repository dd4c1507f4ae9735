"""From a whole model to this rank's part of it: every axis of the mesh changes the model in turn (`MeshAxis.divide`).

task -> tensor parallel layers -> pipeline stages -> data parallel or ZeRO
        over mesh.layers          over mesh.stages    over mesh.replicas

Axes that divide layers or samples come before those that cut the model into blocks: what is left then is a part.

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
    """A model on its way from the whole to this rank's part; `MeshAxis.divide` changes it.

    Attributes:
        module: The whole model, the same on all ranks; then, as the axes so far have left it, with the same names.
        parallel: The settings [parallel].
        criterion: Gives the loss of an output and a target, once layers are divided; None: nobody needs it.
        cut: What stages have equally much of, where it is not numbers of blocks.
        device: What this rank computes on.
        recompute: Whether activations are computed again in backward.
        plan: How layers are divided (see `mpitrain.tensor.plan`); None: as the model says.
        names: Names of the modules that one after the other are the model; empty: as the model says.
        pipeline: What the module is a stage of; None: it is the whole.
        blocks: Of the whole model, as `mpitrain.shard.flat.blocks_of` finds them before it is divided.
        division: How the model is divided over the mesh, once it is.
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
    """Divide a model along all axes of a mesh, in place, and move this rank's part to its device. Collective."""
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
    """Return axes in the order in which they change a model; blocks: whether those that divide it into blocks too."""
    return sorted((axis for axis in axes if blocks or axis.divides != BLOCKS), key=lambda axis: axis.divides == BLOCKS)


def tied_names(module: nn.Module) -> dict[str, str]:
    """Return further names of parameters that have several: name -> the name they are saved under."""
    first = {id(p): name for name, p in module.named_parameters()}
    every: Iterable[tuple[str, nn.Parameter]] = module.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in every if first[id(p)] != name}


def move(module: nn.Module, to: torch.device) -> None:
    """Move a module to a device, in place; parameters stay the same objects, so that tied ones stay tied.

    Raises:
        InputError: PyTorch cannot keep the objects for this kind of device.
    """
    if all(t.device == to for t in (*module.parameters(), *module.buffers())):
        return
    before = list(module.parameters())
    module.to(to)
    if any(one is not other for one, other in zip(before, module.parameters(), strict=True)):
        raise refusal(
            f"PyTorch makes new parameters when a module is moved to {to.type}, which unties tied ones and leaves the "
            "optimizer's behind; move the model before the optimizer is made"
        )


def recompute_blocks(module: nn.Module) -> int:
    """Let every block of a model keep its input alone, and be computed again in backward. Changes the module.

    Dropout draws the same numbers again.

    Args:
        module: The model; `mpitrain.shard.flat.blocks_of` says what its blocks are.

    Returns:
        The number of blocks.

    Raises:
        InputError: The model has none.
    """
    blocks = blocks_of(module)
    if not blocks:
        raise refusal(without_blocks("train.recompute"))
    for block in blocks:
        block.forward = partial(_recomputed, block, block.forward)
    return len(blocks)


def _recomputed(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The block's forward in training, which keeps its input alone."""
    if not block.training:
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
