"""A model and its optimizer as named logical tensors, for checkpoints.

    model/<parameter or buffer>            as PyTorch names it
    optimizer/<state>/<parameter>          exp_avg, exp_avg_sq, momentum_buffer, step, ...

Whatever of the optimizer is not a tensor is a value, kept as JSON.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mpitrain.checkpoint import Manifest, Part, TensorSpec
from mpitrain.errors import CheckpointError
from mpitrain.layout import Box, Piece, shares

MODEL, OPTIMIZER = "model/", "optimizer/"


def model_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters (tied ones once) and persistent buffers."""
    parameters = dict(module.named_parameters())
    kept = set(module.state_dict())
    buffers = {name: b for name, b in module.named_buffers() if name in kept}
    return {MODEL + name: tensor.detach() for name, tensor in (parameters | buffers).items()}


def tied_names(module: nn.Module) -> dict[str, str]:
    """Further names of parameters that have several: name -> the name they are saved under."""
    first = {id(p): name for name, p in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in every if first[id(p)] != name}


def optimizer_tensors(
    module: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
    """The state of each parameter: tensors, and other values by parameter and state name."""
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for name, parameter in module.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if torch.is_tensor(value):
                tensors[f"{OPTIMIZER}{key}/{name}"] = value
            elif value is None or isinstance(value, (bool, int, float, str)):
                values.setdefault(name, {})[key] = value
            else:
                raise CheckpointError(
                    f"optimizer state {key!r} of {name} is a {type(value).__name__}, which cannot be saved; "
                    "use an optimizer whose state is tensors and numbers",
                    agreed=True,
                )
    return tensors, values


def parts_to_write(tensors: dict[str, torch.Tensor], rank: int, size: int) -> list[Part]:
    """This rank's share of tensors that every rank has alike."""
    names = list(tensors)
    parts = []
    for number, lo, hi in shares([tensors[name].numel() for name in names], size, rank):
        tensor = tensors[names[number]]
        piece = Piece(names[number], Box.whole(tensor.numel()), lo, hi)
        parts.append(Part(_spec(names[number], tensor), piece, tensor.contiguous().view(-1)[lo:hi].cpu()))
    if rank == 0:  # tensors without elements belong to nobody's share
        parts += [Part(_spec(n, t), Piece.whole(n, 0), t.view(-1).cpu()) for n, t in tensors.items() if not t.numel()]
    return parts


def parts_to_read(tensors: dict[str, torch.Tensor]) -> tuple[list[Part], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Whole tensors to fill; and (tensor, its filled stand-in) where it is not flat host memory itself."""
    parts, copies = [], []
    for name, tensor in tensors.items():
        direct = tensor.is_contiguous() and tensor.device.type == "cpu"
        flat = tensor.view(-1) if direct else torch.empty(tensor.numel(), dtype=tensor.dtype)
        if not direct:
            copies.append((tensor, flat.view(tensor.shape)))
        parts.append(Part(_spec(name, tensor), Piece.whole(name, tensor.numel()), flat))
    return parts, copies


def empty_optimizer_state(
    module: nn.Module, manifest: Manifest, values: dict[str, dict[str, Any]]
) -> tuple[dict[str, torch.Tensor], dict[nn.Parameter, dict[str, Any]]]:
    """Tensors to fill, and the optimizer state made of them, as the checkpoint has it."""
    tensors: dict[str, torch.Tensor] = {}
    state: dict[nn.Parameter, dict[str, Any]] = {}
    parameters = dict(module.named_parameters())
    for name, spec in manifest.tensors.items():
        if not name.startswith(OPTIMIZER):
            continue
        key, _, parameter_name = name.removeprefix(OPTIMIZER).partition("/")
        parameter = parameters.get(parameter_name)
        if parameter is None:
            raise CheckpointError(f"the checkpoint has optimizer state of {parameter_name}, which this model lacks")
        device = parameter.device if spec.shape == tuple(parameter.shape) else torch.device("cpu")
        tensors[name] = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
        state.setdefault(parameter, {})[key] = tensors[name]
    for parameter_name, entries in values.items():
        if parameter_name in parameters:
            state.setdefault(parameters[parameter_name], {}).update(entries)
    return tensors, state


def _spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
