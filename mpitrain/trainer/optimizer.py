"""The optimizer a configuration names."""

from __future__ import annotations

import copy
import difflib
import inspect
import sys
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import nn

from mpitrain.config.named import find
from mpitrain.config.training import OptimSection
from mpitrain.errors import refusal

_NEED_A_CLOSURE = ("LBFGS",)
_SPARSE_ONLY = ("SparseAdam",)


def make_optimizer(
    section: OptimSection, named: Iterable[tuple[str, nn.Parameter]], *, decay_all: bool = False
) -> torch.optim.Optimizer:
    """The optimizer of `section` over the parameters, weight decay on those of two or more dimensions only.

    decay_all: weight decay on all parameters. Fused where torch has it for the class. Raises InputError for a name or
    an option torch.optim does not have.
    """
    _spare_the_compiler()
    kind = find("optim.name", section.name) if ":" in section.name else _class_of(section.name)
    trained = [p for _, p in named if p.requires_grad]
    accepted = inspect.signature(kind).parameters
    options = dict(section.options)
    if "fused" in accepted and not ({"foreach", "differentiable", "fused"} & set(options)):
        options["fused"] = True
    groups: list[dict[str, object]] = [{"params": trained}]
    if "weight_decay" in accepted:
        groups = [
            {"params": [p for p in trained if p.dim() >= 2 or decay_all], "weight_decay": section.weight_decay},
            {"params": [p for p in trained if p.dim() < 2 and not decay_all], "weight_decay": 0.0},
        ]
    groups = [group for group in groups if group["params"]]
    unknown = sorted(set(options) - set(accepted))
    if unknown:
        known = ", ".join(name for name in accepted if name not in ("params", "lr", "weight_decay"))
        raise refusal(f"optim.options: {kind.__name__} has no {', '.join(unknown)}; it has {known}")
    try:
        return kind(groups, **{"lr": section.lr, **options})
    except (TypeError, ValueError, RuntimeError) as error:
        raise refusal(f"optim: {kind.__name__} refuses its options: {error}") from None


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of state that the optimizer will keep for an element; 0 where a step of a copy of it does not tell."""
    tensor = torch.zeros(32, 32, requires_grad=True)
    tensor.grad = torch.ones(32, 32)
    try:
        trial = copy.copy(optimizer)
        trial.state = defaultdict(dict)
        trial.param_groups = [{**optimizer.param_groups[0], "params": [tensor]}]
        trial.step()
    except Exception:  # what an optimizer of somebody else's does with a copy is nowhere written
        return 0
    kept = [value for value in trial.state[tensor].values() if torch.is_tensor(value)]
    return sum(value.numel() * value.element_size() for value in kept) // tensor.numel()


def _class_of(name: str) -> type[torch.optim.Optimizer]:
    kinds = {
        kind.__name__.lower(): kind
        for kind in vars(torch.optim).values()
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    kind = kinds.get(name.lower())
    if kind is None:
        near = difflib.get_close_matches(name.lower(), kinds, n=1, cutoff=0.0)[0]
        raise refusal(f"optim.name {name!r} is not a class of torch.optim; did you mean {kinds[near].__name__!r}?")
    if kind.__name__ in _NEED_A_CLOSURE:
        raise refusal(f"optim.name {name!r} calls the model itself, which is not supported; use adamw")
    if kind.__name__ in _SPARSE_ONLY:
        raise refusal(f"optim.name {name!r} takes sparse gradients only, ours are dense; use adam")
    return kind


def _spare_the_compiler() -> None:
    """Let optimizers be made without importing torch._dynamo.

    Torch wraps their methods so as to keep the compiler out of them, and imports the compiler to do so: 1.5 s of
    CPU on every rank. Where it is not loaded there is nothing to keep out.
    """
    if "torch._dynamo" in sys.modules:
        return
    for method in vars(torch.optim.Optimizer).values():
        if inspect.isfunction(method) and method.__code__.co_filename.endswith("_compile.py"):
            wrapped = inspect.unwrap(method)
            wrapped.__dynamo_disable = wrapped
