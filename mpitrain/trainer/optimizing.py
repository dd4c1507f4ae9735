"""Optimizers by name, including some that torch lacks, and schedules of the learning rate.

A schedule is one of mpitrain's curves and cycles, or a class of torch.optim.lr_scheduler. It is a function of the step,
so a run that resumes from a checkpoint needs only the step's number. ReduceLROnPlateau is the exception: it has a
state (see `PlateauSchedule`).
"""

from __future__ import annotations

import copy
import difflib
import inspect
import math
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau

from mpitrain.config.learning_rate import CYCLES, DECAYS, LearningRate, OneCycle, cycle_of
from mpitrain.config.named import find
from mpitrain.config.training import GROUP_KEYS, OptimSection, patterns_of
from mpitrain.errors import refusal
from mpitrain.shard.flat_parameters import init_states
from mpitrain.shard.optimizers import Lamb, Lars, Muon, check_betas
from mpitrain.shard.update import SCALE, optimizer_step
from mpitrain.storage.text import counted


class _Elementwise(torch.optim.Optimizer):
    """Base class of optimizers that update each element independently, so that their states can be sharded."""

    elementwise = True
    _update: Callable[..., None]  # updates one parameter; called with (value, gradient, group, state)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is not None:
                    self._update(value, value.grad, group, self.state[value])


class Lion(_Elementwise):
    """Lion optimizer: steps of equal size in the direction of a momentum's sign, with one state per element.

    Reference: Chen et al. 2023, "Symbolic discovery of optimization algorithms", algorithm 2.

    Args:
        params: Parameters or parameter groups, as for torch.optim.AdamW; so are the arguments not listed here.
        betas: Weight of the momentum in the direction, and decay of the momentum.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-4, betas: Sequence[float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": check_betas(betas), "weight_decay": weight_decay})

    def _update(self, value: Any, gradient: Any, group: Any, state: Any) -> None:
        first, second = group["betas"]
        if not state:
            state["exp_avg"] = torch.zeros_like(value)
        momentum = state["exp_avg"]
        direction = momentum.mul(first).add_(gradient, alpha=1 - first).sign_()
        value.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
        momentum.mul_(second).add_(gradient, alpha=1 - second)


class UncorrectedAdamW(_Elementwise):
    """AdamW without bias correction of its averages in the first steps, as BERT was trained (Devlin et al. 2019).

    Args:
        params: Parameters or parameter groups, as for torch.optim.AdamW; so are the arguments not listed here.
        decoupled: If true, weight decay is separate from the gradient; otherwise it is added to it, as in Adam.
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
        defaults = {"lr": lr, "betas": check_betas(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"decoupled": decoupled})

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


_Kind = type[torch.optim.Optimizer]
_SEPARATE_OPTIONS = ("params", "lr", "weight_decay")  # options with settings of their own
_OURS: dict[str, _Kind] = {kind.__name__.lower(): kind for kind in (Muon, Lion, Lamb, Lars, UncorrectedAdamW)}


@dataclass(frozen=True)
class ParameterRoles:
    """Roles of parameters, by each of their names in the whole model.

    They are determined before the model is divided. A pipeline stage has only some of the modules and names, and a copy
    of a tied parameter on another stage must have the same role as the original.

    Attributes:
        groups: Index of the first entry of optim.groups that matches a parameter; parameters without a match are
            missing.
        embeddings: Parameters of nn.Embedding.
        hidden: Matrices that belong neither to an embedding nor to the last layer, which Jordan et al. 2024 give to
            Muon.
    """

    groups: Mapping[str, int] = field(default_factory=dict)
    embeddings: frozenset[str] = frozenset()
    hidden: frozenset[str] = frozenset()

    @staticmethod
    def of(section: OptimSection, module: nn.Module) -> ParameterRoles:
        """Return the roles of a whole model's parameters.

        Args:
            section: Settings of the optimizer.
            module: The whole model.

        Raises:
            InputError: If a pattern matches no trained parameter.
        """
        every = list(module.named_parameters(remove_duplicate=False))
        first = {p: name for name, p in module.named_parameters()}
        trained = [name for p, name in first.items() if p.requires_grad]
        _refuse_unmatched(section, trained)
        matched: dict[str, int] = {}
        for number, group in reversed(list(enumerate(section.groups))):  # reversed, so that the first match wins
            names = [name for name in trained if any(fnmatchcase(name, pattern) for pattern in patterns_of(group))]
            matched |= dict.fromkeys(names, number)
        tables = {p for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
        matrices = [p for _, p in every if p.dim() == 2]
        hidden = set(matrices[:-1]) - tables - {matrices[-1]} if matrices else set()
        return ParameterRoles(
            {name: matched[first[p]] for name, p in every if first[p] in matched},
            frozenset(name for name, p in every if p in tables),
            frozenset(name for name, p in every if p in hidden),
        )


def _refuse_unmatched(section: OptimSection, names: list[str]) -> None:
    """Raise InputError for a pattern that matches none of the names."""
    for group in section.groups:
        for pattern in patterns_of(group):
            if not any(fnmatchcase(name, pattern) for name in names):
                near = difflib.get_close_matches(pattern.replace("*", ""), names, n=3, cutoff=0.0)
                raise refusal(
                    f"optim.groups: match = {pattern!r} matches no trained parameter; similar names are "
                    f"{', '.join(near)}; * matches any characters"
                )


def make_optimizer(
    section: OptimSection, named: Iterable[tuple[str, nn.Parameter]], roles: ParameterRoles | None = None
) -> torch.optim.Optimizer:
    """Return the optimizer that `section` describes, fused if torch supports that.

    Args:
        section: Settings of the optimizer.
        named: Parameters, by their names in the whole model.
        roles: Roles of the parameters; None if no parameter has one.

    Raises:
        InputError: If there is no such optimizer, or it lacks one of the options.
    """
    avoid_importing_compiler()
    roles = roles or ParameterRoles()
    trained = [(name, p) for name, p in named if p.requires_grad]
    chosen: dict[tuple[_Kind, int | None, bool], list[nn.Parameter]] = {}
    for name, parameter in trained:
        number = roles.groups.get(name)
        kind = _kind_for(section, name, parameter, number, roles)
        small = parameter.dim() < 2 or (section.no_decay == "embeddings" and name in roles.embeddings)
        decays = section.no_decay == "nothing" or not small
        chosen.setdefault((kind, number, decays), []).append(parameter)
    groups: dict[_Kind, list[dict[str, Any]]] = {}
    first_decaying = sorted(chosen, key=lambda key: (not key[2], -1 if key[1] is None else key[1]))
    for kind, number, decays in first_decaying:
        entry = section.groups[number] if number is not None else {}
        scale = entry["lr"] / section.lr if "lr" in entry else float(entry.get("lr_scale", 1.0))
        group: dict[str, Any] = {"params": chosen[kind, number, decays], "lr": section.lr}
        if scale != 1.0:
            group |= {"lr": section.lr * scale, SCALE: scale}
        options = {key: value for key, value in entry.items() if key not in GROUP_KEYS}
        refuse_unknown(f"optim.groups, match = {entry.get('match')!r}", kind, options, _SEPARATE_OPTIONS)
        if "weight_decay" in inspect.signature(kind).parameters:
            group["weight_decay"] = section.weight_decay if decays else 0.0
        groups.setdefault(kind, []).append(group | options)
    parts = [_build(kind, section, param_groups) for kind, param_groups in groups.items()]
    return parts[0] if len(parts) == 1 else CombinedOptimizer(parts)


def _kind_for(
    section: OptimSection, name: str, parameter: nn.Parameter, number: int | None, roles: ParameterRoles
) -> _Kind:
    """Return the optimizer class of a parameter: that of its group, or else of the section.

    If the section's class is Muon, AdamW updates the parameters that are not hidden matrices.
    """
    override = section.groups[number].get("optimizer") if number is not None else None
    kind = (
        optimizer_class("optim.groups, optimizer", override)
        if override
        else optimizer_class("optim.name", section.name)
    )
    if not issubclass(kind, Muon):
        return kind
    if parameter.dim() != 2 and override:
        raise refusal(
            f"optim.groups: muon updates only matrices, but {name} has {counted(parameter.dim(), 'dimension')}; match "
            "only matrices"
        )
    return kind if override or name in roles.hidden else torch.optim.AdamW


def _build(kind: _Kind, section: OptimSection, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return an optimizer of the class, with the section's options that are meant for it."""
    accepted = inspect.signature(kind).parameters
    options = dict(section.options)
    main = optimizer_class("optim.name", section.name)
    if issubclass(main, Muon):  # AdamW updates the rest; options that both have are Muon's
        adamw = inspect.signature(torch.optim.AdamW).parameters
        of_muon = inspect.signature(Muon).parameters
        refuse_unknown("optim.options", Muon, set(options) - set(adamw), _SEPARATE_OPTIONS)
        theirs = set(of_muon) if kind is main else set(adamw) - set(of_muon)
        options = {key: value for key, value in options.items() if key in theirs and key in accepted}
    elif kind is main:
        refuse_unknown("optim.options", kind, options, _SEPARATE_OPTIONS)
    else:
        options = {}
    if "fused" in accepted and not ({"foreach", "differentiable", "fused"} & set(options)):
        options["fused"] = True
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    groups = [{k: tuple(v) if isinstance(v, list) and k != "params" else v for k, v in g.items()} for g in groups]
    try:
        return kind(groups, **{"lr": section.lr, **options})
    except (TypeError, ValueError, RuntimeError) as error:
        raise refusal(f"optim: {kind.__name__} does not accept its options: {error}") from None


def refuse_unknown(where: str, kind: type, options: Iterable[str], unnamed: Sequence[str]) -> None:
    """Raise InputError for options that a class does not accept.

    Args:
        where: Setting that has the options, for the message.
        kind: The class.
        options: Names of the options.
        unnamed: Options of the class that the message does not list.
    """
    accepted = inspect.signature(kind).parameters
    if unknown := sorted(set(options) - set(accepted)):
        known = ", ".join(name for name in accepted if name not in unnamed)
        raise refusal(f"{where}: {kind.__name__} has no {', '.join(unknown)}; it has {known}")


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of state per element that the optimizer will have; 0 if a trial step fails.

    For several optimizers combined, return the largest number among them.
    """
    if isinstance(optimizer, CombinedOptimizer):
        return max(map(state_bytes, optimizer.parts))
    states = states_after_step(optimizer, optimizer.param_groups[0], (32, 32)) or {}
    return sum(value.numel() * value.element_size() for value in states.values()) // 32**2


def states_after_step(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], shape: tuple[int, ...]
) -> dict[str, torch.Tensor] | None:
    """Return the tensors that the optimizer stores for a parameter after a step, found by a trial on a copy.

    Args:
        optimizer: Optimizer; it is not changed.
        group: Options of the step.
        shape: Shape of the parameter.

    Returns:
        The states by name; None if the trial fails, or the optimizer consists of several.
    """
    if hasattr(optimizer, "parts"):  # several in one: a copy would step the originals
        return None
    tensor = torch.zeros(shape, requires_grad=True)
    tensor.grad = torch.ones(shape)
    try:
        trial: Any = copy.copy(optimizer)
        trial.state, trial.param_groups = defaultdict(dict), [{**group, "params": [tensor]}]
        trial._optimizer_step_pre_hooks = trial._optimizer_step_post_hooks = OrderedDict()
        trial.gather = None  # attribute of Muon
        init_states(trial)
        vars(trial).pop("step", None)  # a scheduler replaces the method of the object by one that steps the original
        optimizer_step(trial)
        return {key: value for key, value in trial.state[tensor].items() if torch.is_tensor(value)}
    except Exception:  # an optimizer of the user may fail in any way on a copy
        return None


def optimizer_class(key: str, name: str) -> _Kind:
    """Return the optimizer class that a setting names. Raises InputError if there is none.

    Args:
        key: Name of the setting, for messages.
        name: Name of a class of mpitrain or torch.optim, in any case, or package.module:class.
    """
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
    if kind is torch.optim.LBFGS:
        raise refusal(f"{key} {name!r} evaluates the model several times per step, which is not supported; use adamw")
    if kind is torch.optim.SparseAdam:
        raise refusal(f"{key} {name!r} needs sparse gradients, but the gradients are dense; use adam")
    return kind


def avoid_importing_compiler() -> None:
    """Let optimizers be made without importing torch._dynamo.

    Torch wraps their methods to exclude them from compilation, and imports the compiler for that, which takes 1.5 s of
    CPU time on every rank. If the compiler is not loaded, nothing has to be excluded.
    """
    if "torch._dynamo" in sys.modules:
        return
    for method in vars(torch.optim.Optimizer).values():
        if inspect.isfunction(method) and method.__code__.co_filename.endswith("_compile.py"):
            wrapped = inspect.unwrap(method)
            wrapped.__dynamo_disable = wrapped


# -- several optimizers as one, each with its own parameters


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers combined into one, with the parameter groups and states of all.

    Args:
        parts: Optimizers that have made no step yet.

    Attributes:
        parts: The optimizers.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = list(parts)
        groups = [group for part in parts for group in part.param_groups]
        super().__init__([{"params": list(group["params"])} for group in groups], {})
        self.param_groups = groups  # shared with the parts, so that changes apply to both
        for part in parts:
            self.state.update(part.state)
            part.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make one update with each optimizer. Collective if one of them is."""
        for part in self.parts:
            optimizer_step(part)


PLATEAU = ReduceLROnPlateau.__name__
_STATE = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")
_NOT_CONFIGURABLE = ("LRScheduler", "_LRScheduler", "SequentialLR", "ChainedScheduler")
_DEEPSPEED_NAMES = {"OneCycle": "one-cycle", "LRRangeTest": "range-test", "WarmupLR": "constant"}
_DEEPSPEED_NAMES |= {"WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
S = TypeVar("S", bound=lr_scheduler.LRScheduler)
SECOND_BETA = 0.99  # second of betas while a cycle changes the first, as in DeepSpeed


class RateSchedule(Protocol):
    """Schedule of the learning rate."""

    def rate(self, step: int) -> float:
        """Return the learning rate of step `step`, counted from 0."""


def schedule_of(section: OptimSection, steps: int, *, evaluates: bool = True) -> RateSchedule:
    """Return the schedule that a configuration names.

    Args:
        section: Settings of the optimizer.
        steps: Steps of the run.
        evaluates: If true, a schedule that follows the held-out loss will receive it.

    Raises:
        InputError: If a setting is invalid.
    """
    if section.schedule in DECAYS:
        return LearningRate.of(section, steps)
    if section.schedule in CYCLES:
        cycle = cycle_of(section, steps)
        kind = optimizer_class("optim.name", section.name)
        if isinstance(cycle, OneCycle) and cycle.cycle_momentum and "betas" not in inspect.signature(kind).parameters:
            raise refusal(
                f"optim.schedule_options: cycle_momentum changes the first of betas, which {kind.__name__} does not "
                "have; remove cycle_momentum, or use adamw"
            )
        return cycle
    if section.schedule != PLATEAU:
        return TorchSchedule(section, steps)
    if not evaluates:
        raise refusal(
            f"optim.schedule {PLATEAU} follows held-out losses, which only your own loop knows; remove it and step "
            f"torch's {PLATEAU} of engine.optimizer with the loss from engine.evaluate, or run mpitrain.train"
        )
    return PlateauSchedule(section)


def next_rate(schedule: RateSchedule, optimizer: torch.optim.Optimizer, step: int) -> float:
    """Return the learning rate of step `step`, and set the optimizer's momentum if the schedule has one.

    Args:
        schedule: The schedule.
        optimizer: Optimizer whose first beta is set; its learning rate is not changed.
        step: Number of the step, from 0.
    """
    momentum = schedule.momentum(step) if isinstance(schedule, OneCycle) else None
    if momentum is not None:
        for group in optimizer.param_groups:
            if "betas" in group:
                group["betas"] = (momentum, SECOND_BETA)
    return schedule.rate(step)


class TorchSchedule:
    """Learning rates of a class of torch.optim.lr_scheduler, applied to an optimizer with one parameter group.

    Arguments have these defaults: `total_steps` and `T_max` are the steps of the run, `max_lr` is optim.lr, and
    `base_lr` and `eta_min` are optim.lr_end.

    Args:
        section: Settings that name the class.
        steps: Steps of the run.

    Raises:
        InputError: If there is no such class, it refuses its arguments, or its rates depend on more than the step.
    """

    def __init__(self, section: OptimSection, steps: int) -> None:
        self._kind = kind = _scheduler_class("optim.schedule", section.schedule)
        accepted = inspect.signature(kind).parameters
        usual = {"total_steps": steps, "T_max": steps, "max_lr": section.lr, "base_lr": section.lr_end}
        options: dict[str, Any] = {key: value for key, value in usual.items() if key in accepted}
        options |= section.schedule_options
        refuse_unknown("optim.schedule_options", kind, options, ("optimizer", "last_epoch"))
        if options.get("cycle_momentum"):
            raise refusal(
                f"optim.schedule_options: {kind.__name__} does not support cycle_momentum; remove it, or use one-cycle"
            )
        if "cycle_momentum" in accepted:
            options["cycle_momentum"] = False
        self._optimizer, self._scheduler = _with_scheduler(kind, section.lr, options)
        self._rates = [self._current()]

    def _current(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])

    def rate(self, step: int) -> float:
        """Return the learning rate of step `step`, counted from 0."""
        while len(self._rates) <= step:
            self._optimizer.step()
            try:
                self._scheduler.step()
            except ValueError as error:
                raise refusal(f"optim.schedule: {self._kind.__name__} ends before train.steps: {error}") from None
            self._rates.append(self._current())
        return self._rates[step]


def _with_scheduler(kind: type[S], lr: float, options: Mapping[str, Any]) -> tuple[torch.optim.Optimizer, S]:
    """Return an optimizer of a single number, and a scheduler that sets its learning rate."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    make: Any = kind
    try:
        return optimizer, make(optimizer, **options)
    except (TypeError, ValueError) as error:
        raise refusal(f"optim.schedule: {kind.__name__} does not accept optim.schedule_options: {error}") from None


def make_scheduler(name: str, options: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    """Return a scheduler of an optimizer, from the class name in a DeepSpeed configuration.

    Args:
        name: Class of torch.optim.lr_scheduler.
        options: Arguments of the class.
        optimizer: The optimizer.

    Raises:
        InputError: If there is no such class, or it refuses the options.
    """
    try:
        return _scheduler_class("scheduler.type", name)(optimizer, **options)
    except (TypeError, ValueError) as error:
        raise refusal(f"scheduler.type {name} does not accept scheduler.params: {error}; fix them") from None


def _scheduler_class(key: str, name: str) -> type[lr_scheduler.LRScheduler]:
    kinds = {
        key: kind
        for key, kind in vars(lr_scheduler).items()
        if inspect.isclass(kind) and issubclass(kind, lr_scheduler.LRScheduler) and key not in _NOT_CONFIGURABLE
    }
    if name in ("LambdaLR", "MultiplicativeLR"):
        raise refusal(
            f"{key} {name} needs a Python function, which a configuration cannot contain; give mt.initialize a "
            "scheduler, or a function from an optimizer to a scheduler, or use polynomial, wsd or MultiStepLR"
        )
    if name in _DEEPSPEED_NAMES:
        raise refusal(f"{key} {name} of DeepSpeed is called {_DEEPSPEED_NAMES[name]!r} here; use that name")
    if name not in kinds:
        near = difflib.get_close_matches(name, kinds, n=1, cutoff=0.0)[0]
        reason = "is not in torch.optim.lr_scheduler"
        if name in _NOT_CONFIGURABLE:
            reason = "needs arguments that a configuration cannot contain"
        raise refusal(f"{key} {name!r} {reason}; did you mean {near!r}?")
    return kinds[name]


class PlateauSchedule:
    """Learning rate by torch's ReduceLROnPlateau, which follows the held-out loss of each evaluation.

    `min_lr` defaults to optim.lr_end. Unlike other schedules it has a state, which is stored in checkpoints.

    Args:
        section: Settings with its options and the initial learning rate.

    Raises:
        InputError: If an option is unknown or refused.
    """

    def __init__(self, section: OptimSection) -> None:
        options = {"min_lr": section.lr_end} | section.schedule_options
        if options.pop("mode", "min") != "min":
            raise refusal(
                f"optim.schedule_options: {PLATEAU} follows the held-out loss, for which lower is better; use mode min"
            )
        refuse_unknown("optim.schedule_options", ReduceLROnPlateau, options, ("optimizer", "mode"))
        self._optimizer, self._plateau = _with_scheduler(ReduceLROnPlateau, section.lr, options)

    def rate(self, step: int) -> float:
        """Return the learning rate of all steps until the next evaluation."""
        return float(self._optimizer.param_groups[0]["lr"])

    def observe(self, loss: float) -> None:
        """Update the learning rate after an evaluation with this loss."""
        self._plateau.step(loss)

    def state(self) -> dict[str, Any]:
        """Return the state for `load`; infinity becomes None, because JSON cannot represent it."""
        values = {name: getattr(self._plateau, name) for name in _STATE}
        return values | {"rate": self.rate(0), "best": values["best"] if math.isfinite(values["best"]) else None}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state` returned."""
        for name in _STATE:
            setattr(self._plateau, name, state[name])
        self._plateau.best = math.inf if state["best"] is None else state["best"]
        self._optimizer.param_groups[0]["lr"] = state["rate"]
