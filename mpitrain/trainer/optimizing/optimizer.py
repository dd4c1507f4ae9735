"""The optimizer a configuration names, and those that torch lacks and that update each element by itself."""

from __future__ import annotations

import copy
import difflib
import inspect
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from mpitrain.config.named import find
from mpitrain.config.training import OWN, OptimSection, patterns_of
from mpitrain.errors import refusal
from mpitrain.shard.flat_parameters import begin_states
from mpitrain.shard.optimizers import Lamb, Lars, Muon
from mpitrain.shard.update import SCALE, optimizer_step
from mpitrain.storage.text import counted


class _Elementwise(torch.optim.Optimizer):
    """An optimizer that updates each element by itself, so that it can be sharded."""

    elementwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update."""
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is not None:
                    self._update(value, value.grad, group, self.state[value])

    def _update(self, value: Any, gradient: Any, group: Any, state: Any) -> None:
        """Update one parameter, with the options of its group and its own state."""
        raise NotImplementedError


class Lion(_Elementwise):
    """Steps of one size in the direction of a momentum's sign (Chen et al. 2023, "Symbolic discovery of optimization
    algorithms", algorithm 2); one state an element.

    Args:
        params: As of torch.optim.AdamW, as all the rest.
        betas: How much of the momentum is in the direction, and how much of it stays.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: Sequence[float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": _checked(betas), "weight_decay": weight_decay})

    def _update(self, value: Any, gradient: Any, group: Any, state: Any) -> None:
        first, second = group["betas"]
        if not state:
            state["exp_avg"] = torch.zeros_like(value)
        momentum = state["exp_avg"]
        direction = momentum.mul(first).add_(gradient, alpha=1 - first).sign_()
        value.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
        momentum.mul_(second).add_(gradient, alpha=1 - second)


class UncorrectedAdamW(_Elementwise):
    """AdamW without the division of its averages by what they lack in the first steps, as BERT was trained (Devlin et
    al. 2019).

    Args:
        params: As of torch.optim.AdamW, as all the rest.
        decoupled: Whether weight decay is apart from the gradient; else it is added to that, as in Adam.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled: bool = True,
    ) -> None:
        given = {"lr": lr, "betas": _checked(betas), "eps": eps, "weight_decay": weight_decay, "decoupled": decoupled}
        super().__init__(params, given)

    def _update(self, value: Any, gradient: Any, group: Any, state: Any) -> None:
        first, second = group["betas"]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(value), torch.zeros_like(value)
        if group["decoupled"]:
            value.mul_(1 - group["lr"] * group["weight_decay"])
        elif group["weight_decay"]:
            gradient = gradient.add(value, alpha=group["weight_decay"])
        state["exp_avg"].lerp_(gradient, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        value.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(group["eps"]), value=-group["lr"])


def _checked(betas: Sequence[float]) -> tuple[float, float]:
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"betas {list(betas)} are not two numbers from 0 to below 1")
    return betas[0], betas[1]


_Kind = type[torch.optim.Optimizer]
_NEED_A_CLOSURE = ("LBFGS",)
_SPARSE_ONLY = ("SparseAdam",)
_SET_APART = ("params", "lr", "weight_decay")  # options that keys of their own set
_OURS: dict[str, _Kind] = {
    "muon": Muon,
    "lion": Lion,
    "lamb": Lamb,
    "lars": Lars,
    "uncorrectedadamw": UncorrectedAdamW,
}


@dataclass(frozen=True)
class ParameterRoles:
    """Roles of parameters, by every name that they have in the whole model.

    They are found before the model is cut: a stage of a pipeline has other modules and not all names, and a copy of a
    tied parameter on another stage must have the role of the first.

    Attributes:
        groups: The number of the entry of optim.groups that each of them matches; missing for none.
        embeddings: Those of nn.Embedding.
        hidden: Matrices that are neither of an embedding nor of the last layer (what Jordan et al. 2024 give to Muon).
    """

    groups: Mapping[str, int] = field(default_factory=dict)
    embeddings: frozenset[str] = frozenset()
    hidden: frozenset[str] = frozenset()

    @staticmethod
    def of(section: OptimSection, module: nn.Module) -> ParameterRoles:
        """The roles in a whole model.

        Raises:
            InputError: A pattern matches no parameter that is trained.
        """
        every = list(module.named_parameters(remove_duplicate=False))
        first = {p: name for name, p in module.named_parameters()}
        trained = [name for p, name in first.items() if p.requires_grad]
        matched = {name: number for name in trained if (number := _first_match(section, name)) is not None}
        _refuse_unmatched(section, trained)
        tables = {p for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
        matrices = [p for _, p in every if p.dim() == 2]
        hidden = set(matrices[:-1]) - tables - {matrices[-1]} if matrices else set()
        return ParameterRoles(
            {name: matched[first[p]] for name, p in every if first[p] in matched},
            frozenset(name for name, p in every if p in tables),
            frozenset(name for name, p in every if p in hidden),
        )


def _first_match(section: OptimSection, name: str) -> int | None:
    for number, group in enumerate(section.groups):
        if any(fnmatchcase(name, pattern) for pattern in patterns_of(group)):
            return number
    return None


def _refuse_unmatched(section: OptimSection, names: list[str]) -> None:
    """Raise InputError for a pattern that matches none of the names."""
    for group in section.groups:
        for pattern in patterns_of(group):
            if not any(fnmatchcase(name, pattern) for name in names):
                near = difflib.get_close_matches(pattern.replace("*", ""), names, n=3, cutoff=0.0)
                raise refusal(
                    f"optim.groups: match = {pattern!r} is the name of no parameter that is trained; there are "
                    f"{', '.join(near)} and others; * stands for any letters"
                )


def make_optimizer(
    section: OptimSection,
    named: Iterable[tuple[str, nn.Parameter]],
    roles: ParameterRoles | None = None,
) -> torch.optim.Optimizer:
    """The optimizer of `section` over the parameters; fused where torch has it for the class.

    Args:
        section: What is wanted.
        named: The parameters, by their names in the whole model.
        roles: Of these; None: no parameter has a role of its own.

    Raises:
        InputError: There is no such optimizer, or it has no such option.
    """
    _spare_the_compiler()
    roles = roles or ParameterRoles()
    trained = [(name, p) for name, p in named if p.requires_grad]
    chosen: dict[tuple[_Kind, int | None, bool], list[nn.Parameter]] = {}
    for name, parameter in trained:
        number = roles.groups.get(name)
        kind = _kind_for(section, name, parameter, number, roles)
        decays = not _excepted(section, name, parameter, roles)
        chosen.setdefault((kind, number, decays), []).append(parameter)
    groups: dict[_Kind, list[dict[str, Any]]] = {}
    first_decaying = sorted(chosen, key=lambda key: (not key[2], -1 if key[1] is None else key[1]))
    for kind, number, decays in first_decaying:
        own = section.groups[number] if number is not None else {}
        group: dict[str, Any] = {"params": chosen[kind, number, decays], **_rate(section, own)}
        options = {key: value for key, value in own.items() if key not in OWN}
        refuse_unknown(f"optim.groups, match = {own.get('match')!r}", kind, options, _SET_APART)
        if "weight_decay" in inspect.signature(kind).parameters:
            group["weight_decay"] = section.weight_decay if decays else 0.0
        groups.setdefault(kind, []).append(group | options)
    parts = [_made(kind, section, found) for kind, found in groups.items()]
    return parts[0] if len(parts) == 1 else CombinedOptimizer(parts)


def _kind_for(
    section: OptimSection, name: str, parameter: nn.Parameter, number: int | None, roles: ParameterRoles
) -> _Kind:
    """The class that updates a parameter: of its group, or of the whole section."""
    given = section.groups[number].get("optimizer") if number is not None else None
    kind = optimizer_class("optim.groups, optimizer", given) if given else optimizer_class("optim.name", section.name)
    if not issubclass(kind, Muon):
        return kind
    if parameter.dim() != 2 and given:
        raise refusal(
            f"optim.groups: muon is for matrices, and {name} has {counted(parameter.dim(), 'dimension')}; match fewer"
        )
    return kind if given or name in roles.hidden else torch.optim.AdamW


def _excepted(section: OptimSection, name: str, parameter: nn.Parameter, roles: ParameterRoles) -> bool:
    """Return whether optim.no_decay leaves a parameter out."""
    if section.no_decay == "nothing":
        return False
    return parameter.dim() < 2 or (section.no_decay == "embeddings" and name in roles.embeddings)


def _rate(section: OptimSection, own: Mapping[str, Any]) -> dict[str, float]:
    """A group's learning rate at the peak; and, where it is not that of the section, its ratio to that."""
    scale = own["lr"] / section.lr if "lr" in own else float(own.get("lr_scale", 1.0))
    return {"lr": section.lr} if scale == 1.0 else {"lr": section.lr * scale, SCALE: scale}


def _made(kind: _Kind, section: OptimSection, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """An optimizer of the class, with those options of the section that are meant for it."""
    accepted = inspect.signature(kind).parameters
    options = dict(section.options)
    main = optimizer_class("optim.name", section.name)
    if issubclass(main, Muon):  # and AdamW for the rest: what both have is Muon's
        adamw = inspect.signature(torch.optim.AdamW).parameters
        of_muon = inspect.signature(Muon).parameters
        refuse_unknown("optim.options", Muon, set(options) - set(adamw), _SET_APART)
        theirs = set(of_muon) if kind is main else set(adamw) - set(of_muon)
        options = {key: value for key, value in options.items() if key in theirs and key in accepted}
    elif kind is main:
        refuse_unknown("optim.options", kind, options, _SET_APART)
    else:
        options = {}
    if "fused" in accepted and not ({"foreach", "differentiable", "fused"} & set(options)):
        options["fused"] = True
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    groups = [{k: tuple(v) if isinstance(v, list) and k != "params" else v for k, v in g.items()} for g in groups]
    try:
        return kind(groups, **{"lr": section.lr, **options})
    except (TypeError, ValueError, RuntimeError) as error:
        raise refusal(f"optim: {kind.__name__} refuses its options: {error}") from None


def refuse_unknown(where: str, kind: type, options: Iterable[str], unnamed: Sequence[str]) -> None:
    """Raise InputError for options that a class of torch.optim lacks. unnamed: options that the message leaves out."""
    accepted = inspect.signature(kind).parameters
    if unknown := sorted(set(options) - set(accepted)):
        known = ", ".join(name for name in accepted if name not in unnamed)
        raise refusal(f"{where}: {kind.__name__} has no {', '.join(unknown)}; it has {known}")


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of state that the optimizer will keep for an element; 0 where a step of a copy of it does not tell.

    Of several optimizers in one, those of the one that keeps most.
    """
    if isinstance(optimizer, CombinedOptimizer):
        return max(map(state_bytes, optimizer.parts))
    kept = states_after_step(optimizer, optimizer.param_groups[0], (32, 32)) or {}
    return sum(value.numel() * value.element_size() for value in kept.values()) // 32**2


def states_after_step(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], shape: tuple[int, ...]
) -> dict[str, torch.Tensor] | None:
    """Return the tensors that a copy of the optimizer keeps of a parameter after a step; None where it does not tell.

    Args:
        optimizer: Stays as it is.
        group: Options of the step.
        shape: Of the parameter.
    """
    if hasattr(optimizer, "parts"):  # several in one, whose copy would step the originals
        return None
    tensor = torch.zeros(shape, requires_grad=True)
    tensor.grad = torch.ones(shape)
    try:
        trial: Any = copy.copy(optimizer)
        trial.state, trial.param_groups = defaultdict(dict), [{**group, "params": [tensor]}]
        trial._optimizer_step_pre_hooks = trial._optimizer_step_post_hooks = OrderedDict()
        trial.gather = None  # of Muon
        begin_states(trial)
        type(optimizer).step(trial)  # a scheduler replaces the object's own, by one that steps the original
        return {key: value for key, value in trial.state[tensor].items() if torch.is_tensor(value)}
    except Exception:  # what an optimizer of somebody else's does with a copy is nowhere written
        return None


def optimizer_class(key: str, name: str) -> _Kind:
    """The class that a setting names. Raises InputError where there is none."""
    if name.lower() in _OURS:
        return _OURS[name.lower()]
    kind: Any = find(key, name) if ":" in name else _class_of(key, name)
    return kind


def _class_of(key: str, name: str) -> _Kind:
    kinds = {
        kind.__name__.lower(): kind
        for kind in vars(torch.optim).values()
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    kind = kinds.get(name.lower())
    if kind is None:
        near = difflib.get_close_matches(name.lower(), kinds, n=1, cutoff=0.0)[0]
        raise refusal(f"{key} {name!r} is not a class of torch.optim; did you mean {kinds[near].__name__!r}?")
    if kind.__name__ in _NEED_A_CLOSURE:
        raise refusal(f"{key} {name!r} calls the model itself, which is not supported; use adamw")
    if kind.__name__ in _SPARSE_ONLY:
        raise refusal(f"{key} {name!r} takes sparse gradients only, ours are dense; use adam")
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


# -- Several optimizers as one: each updates parameters of its own


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers as one: with the parameter groups and the states of all, and a step by each.

    Args:
        parts: The optimizers, that have made no step yet.

    Attributes:
        parts: The same.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = list(parts)
        groups = [group for part in parts for group in part.param_groups]
        super().__init__([{"params": list(group["params"])} for group in groups], {})
        self.param_groups = groups  # theirs: what is changed in them here is changed there
        for part in parts:
            self.state.update(part.state)
            part.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update by each. Collective where one of them is."""
        for part in self.parts:
            optimizer_step(part)
