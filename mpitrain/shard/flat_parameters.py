"""Flat parameters: what this rank's optimizer updates in place of the model's parameters.

Where optimizer states are replicated, a flat parameter is a parameter. Where they are sharded, it is a stretch of this
rank's share of a bucket, whose parameters have the same settings in the optimizer (Zhao et al. 2023, PyTorch FSDP,
section 3.2.1); the gaps between parameters in it are zeros that stay zeros. In 16-bit training the optimizer works on
an fp32 copy (the master weights of Micikevicius et al. 2018), which is rounded into the parameters after each update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from mpitrain.comm.memory.device import is_accelerator, pinned
from mpitrain.errors import refusal
from mpitrain.shard.flat import FlatGroup, numbered

# optimizers whose update of an element depends on that element alone, so that it can be done share by share
_NAMES = "ASGD Adadelta Adagrad Adam Adamax AdamW NAdam RAdam RMSprop Rprop SGD"
GradientOf = Callable[[nn.Parameter], "torch.Tensor | None"]  # reduced; None where there is none
ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = tuple(getattr(torch.optim, name) for name in _NAMES.split())


@dataclass
class FlatParameter:
    """What the optimizer updates as if it were one parameter.

    Attributes:
        value: What the optimizer updates, fp32 (fp64 where the parameter is).
        stored: The parameter, or the stretch of flat memory, that `value` is a copy of; None where it is that itself.
        gradient: Gives the reduced gradient in the gradients' dtype; None when there is none.
        contents: (parameter, first, last, offset) of every parameter in it: its elements [first, last) begin at
            `offset` of the flat parameter.
        settings: The number of the optimizer's parameter group.
        counted: Whether its gradient belongs to this rank's part of the norm.
        bucket: The number of the bucket that it is a stretch of, through all groups; -1 where it is a parameter.
    """

    value: torch.Tensor
    stored: torch.Tensor | None
    gradient: Callable[[], torch.Tensor | None]
    contents: tuple[tuple[nn.Parameter, int, int, int], ...]
    settings: int
    counted: bool
    bucket: int = -1

    def store(self) -> None:
        """Round the updated value into the parameter."""
        if self.stored is not None:
            self.stored.copy_(self.value)

    def unused(self, parameters: Set[nn.Parameter]) -> bool:
        """Return whether these parameters include its own; they include all of its own or none."""
        return self.contents[0][0] in parameters

    def pieces(self, keys: Sequence[object]) -> list[tuple[FlatParameter, slice]]:
        """Divide this where neighbours' keys differ; returns the pieces, in the same memory, and their elements.

        keys: Of its parameters, in the order of `contents`.
        """
        begins = [n for n, key in enumerate(keys) if n == 0 or key != keys[n - 1]]
        bounds = [0, *(self.contents[n][3] for n in begins[1:]), self.value.numel()]
        value, gradient = self.value.detach(), self.gradient()
        found = []
        for (n, end), (lo, hi) in zip(pairwise([*begins, len(keys)]), pairwise(bounds), strict=True):
            assert gradient is not None
            piece = replace(
                self,
                value=nn.Parameter(value[lo:hi]),
                stored=self.stored[lo:hi] if self.stored is not None else None,
                gradient=_giving(gradient[lo:hi]),
                contents=tuple((p, first, last, at - lo) for p, first, last, at in self.contents[n:end]),
            )
            found.append((piece, slice(lo, hi)))
        return found


def replicated_flat_parameters(
    optimizer: torch.optim.Optimizer, gradient: GradientOf, counted: Callable[[nn.Parameter], bool], *, on_host: bool
) -> list[FlatParameter]:
    """One flat parameter for each parameter that the optimizer trains.

    Args:
        optimizer: Whose parameters are meant.
        gradient: Gives a parameter's reduced gradient.
        counted: Whether a parameter's gradient belongs to this rank's part of the norm.
        on_host: The optimizer works on copies in host memory of what is on a device.
    """
    return [
        _made(p, partial(gradient, p), ((p, 0, p.numel(), 0),), number, counted(p), on_host=on_host)
        for number, settings in enumerate(optimizer.param_groups)
        for p in settings["params"]
        if p.requires_grad
    ]


def sharded_flat_parameters(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[FlatGroup],
    share: int,
    own: Callable[[int, int, int], torch.Tensor],
    gradient: Callable[[int, int, int], torch.Tensor],
    counted: Callable[[nn.Parameter], bool],
    *,
    on_host: bool = False,
    gathered: bool = False,
) -> list[FlatParameter]:
    """The flat parameters of one share of every bucket.

    Args:
        optimizer: Whose parameters are meant.
        groups: The parameters and where each lies.
        share: The number of the share, the same in each bucket.
        own: Gives elements [lo, hi) of a group's parameters, a view: own(group, lo, hi).
        gradient: Gives elements [lo, hi) of a group's reduced gradients, a view: gradient(group, lo, hi).
        counted: Whether a parameter's gradient belongs to this rank's part of the norm.
        on_host: The optimizer works on copies in host memory of what is on a device.
        gathered: Ranks communicate for an optimizer that needs whole parameters.

    Raises:
        InputError: The optimizer's update of an element may depend on others.
    """
    refuse_unless_elementwise(optimizer, gathered=gathered)
    settings_of = {p: number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    flat_parameters = []
    for bucket, (g, b) in enumerate(numbered(groups)):
        first, last = groups[g].layout.share(b, share)
        for lo, hi, number, count, contents in _stretches(groups[g], first, last, settings_of, counted):
            if number < 0:  # the optimizer does not have these parameters
                continue
            giving = _giving(gradient(g, lo, hi))
            flat_parameters.append(_made(own(g, lo, hi), giving, contents, number, count, bucket, on_host=on_host))
    return flat_parameters


def _giving(view: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: view


def _made(
    stored: torch.Tensor, gradient: Callable[[], torch.Tensor | None], *rest: Any, on_host: bool
) -> FlatParameter:
    """A flat parameter of a parameter or of a stretch of flat memory, where need be with a copy for the optimizer."""
    dtype = stored.dtype if stored.element_size() >= 4 else torch.float32
    if on_host and is_accelerator(stored.device):
        values = pinned(stored.shape, dtype, stored.device).copy_(stored.detach())
        return FlatParameter(nn.Parameter(values), stored.detach(), gradient, *rest)
    if dtype != stored.dtype:
        return FlatParameter(nn.Parameter(stored.detach().to(dtype)), stored.detach(), gradient, *rest)
    value = stored if isinstance(stored, nn.Parameter) else nn.Parameter(stored)
    return FlatParameter(value, None, gradient, *rest)


def _stretches(
    group: FlatGroup, lo: int, hi: int, settings_of: Mapping[nn.Parameter, int], counted: Callable[[nn.Parameter], bool]
) -> list[tuple[int, int, int, bool, tuple[tuple[nn.Parameter, int, int, int], ...]]]:
    """[lo, hi) divided where the settings change: (first, last, settings, counted, contents) of each stretch."""
    found: list[tuple[int, int, int, bool, tuple[tuple[nn.Parameter, int, int, int], ...]]] = []
    pieces = group.layout.within(lo, hi)
    for at, (n, first, last, offset) in enumerate(pieces):
        parameter = group.parameters[n]
        end = pieces[at + 1][3] if at + 1 < len(pieces) else hi
        key = (settings_of.get(parameter, -1), counted(parameter))
        if found and found[-1][2:4] == key:
            begin, _, _, _, contents = found.pop()
        else:
            begin, contents = (lo if at == 0 else offset), ()
        found.append((begin, end, *key, (*contents, (parameter, first, last, offset - begin))))
    return found


def refuse_unless_elementwise(
    optimizer: torch.optim.Optimizer, *, gathered: bool = False, otherwise: str = "parallel.zero 0"
) -> None:
    """Raise InputError for an optimizer that is not known to update each element by itself.

    gathered: Ranks communicate for one that needs whole parameters. otherwise: The setting with which any will do.
    """
    for part in getattr(optimizer, "parts", [optimizer]):
        kind, needs_whole = type(part), getattr(part, "needs_whole", False)
        if needs_whole and not gathered:
            raise refusal(
                f"{kind.__name__} needs whole parameters, and servers have stretches of them; use another optim.name, "
                "or another parallel.mode"
            )
        if not (needs_whole or kind in ELEMENTWISE or getattr(part, "elementwise", False)):
            raise refusal(
                f"{kind.__name__} cannot be sharded: it is not known to update each element by itself; use "
                f"adamw or another element-wise optimizer, {otherwise}, or say `optimizer.elementwise = True`"
            )


def hand_over(optimizer: torch.optim.Optimizer, flat_parameters: Sequence[FlatParameter]) -> None:
    """Let the optimizer update the flat parameters in place of the parameters it was made for.

    Raises:
        InputError: It has made steps already, so that it has states of those parameters.
    """
    if has_stepped(optimizer):
        raise refusal(
            "the optimizer has a state already; hand it over before its first step, and load a checkpoint after"
        )
    for number, settings in enumerate(optimizer.param_groups):
        settings["params"] = [s.value for s in flat_parameters if s.settings == number]
    begin_states(optimizer)


def is_elementwise(state: Any, value: torch.Tensor) -> bool:
    """Return whether an optimizer's state has one number for each element of a value."""
    return torch.is_tensor(state) and state.shape == value.shape and state.dim() > 0


def has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has a state of steps that it made, rather than one that its constructor made."""
    return any(float(state.get("step", 1)) > 0 for state in optimizer.state.values() if state)


def begin_states(optimizer: torch.optim.Optimizer) -> None:
    """Give parameters without a state the one that the optimizer's constructor makes, as torch's Adagrad does.

    States of parameters that the optimizer does not have are dropped.
    """
    held = {value for settings in optimizer.param_groups for value in settings["params"]}
    for stranger in [value for value in optimizer.state if value not in held]:
        del optimizer.state[stranger]
    for part in getattr(optimizer, "parts", [optimizer]):
        if isinstance(part, torch.optim.Adagrad):
            for settings in part.param_groups:
                lacking = [value for value in settings["params"] if not optimizer.state.get(value)]
                if lacking:
                    begun = part.defaults["initial_accumulator_value"]  # torch does not ask the group
                    fresh = torch.optim.Adagrad([{**settings, "params": lacking}], initial_accumulator_value=begun)
                    optimizer.state.update(fresh.state)
