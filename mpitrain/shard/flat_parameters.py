"""Flat parameters: the tensors that this rank's optimizer updates in place of the model's parameters.

With replicated optimizer states, a flat parameter is a parameter of the model. With sharded states, it is a contiguous
interval of this rank's share of a bucket, in which all parameters have the same optimizer settings (Zhao et al. 2023,
PyTorch FSDP, section 3.2.1). The gaps between parameters in it are zeros and remain zeros. In 16-bit training the
optimizer works on an fp32 copy (the master weights of Micikevicius et al. 2018), which is rounded into the parameters
after each update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from mpitrain.comm.memory.device import empty_pinned, is_accelerator
from mpitrain.errors import InputError, refusal
from mpitrain.shard.flat import FlatGroup, bucket_indices

# optimizers whose update of an element depends only on that element, so that each share can be updated alone
_NAMES = "ASGD Adadelta Adagrad Adam Adamax AdamW NAdam RAdam RMSprop Rprop SGD"
GradientOf = Callable[[nn.Parameter], "torch.Tensor | None"]  # returns a parameter's reduced gradient, or None
ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = tuple(getattr(torch.optim, name) for name in _NAMES.split())


@dataclass
class FlatParameter:
    """A tensor that the optimizer updates as if it were one parameter.

    Attributes:
        value: Tensor that the optimizer updates, fp32 (fp64 if the parameter is fp64).
        stored: Parameter, or interval of flat memory, that `value` is a copy of; None if `value` is that memory itself.
        gradient: Function that returns the reduced gradient in the gradients' dtype, or None if there is no gradient.
        contents: Tuple (parameter, first, last, offset) for every parameter: elements [first, last) of the parameter
            begin at `offset` of the flat parameter.
        settings: Number of the optimizer's parameter group.
        is_owner: True if this rank owns the contents: it adds the gradient to its part of the norm.
        bucket: Number of the bucket that contains the interval, counted through all groups; -1 if the flat parameter is
            a parameter of the model.
        average: Average of the values over several steps, of `value`'s shape and dtype; None without one.
    """

    value: torch.Tensor
    stored: torch.Tensor | None
    gradient: Callable[[], torch.Tensor | None]
    contents: tuple[tuple[nn.Parameter, int, int, int], ...]
    settings: int
    is_owner: bool
    bucket: int = -1
    average: torch.Tensor | None = None

    def store(self) -> None:
        """Round the updated value into the parameter."""
        if self.stored is not None:
            self.stored.copy_(self.value)

    def is_unused(self, parameters: Set[nn.Parameter]) -> bool:
        """Return True if its parameters are among the given ones, which must include all or none of them."""
        return self.contents[0][0] in parameters

    def pieces(self, keys: Sequence[object]) -> list[tuple[FlatParameter, slice]]:
        """Divide the flat parameter between neighbouring parameters whose keys differ.

        Args:
            keys: One key per parameter, in the order of `contents`.

        Returns:
            Pairs of a new flat parameter, a view of the same memory, and the slice of elements that it covers.
        """
        begins = [n for n, key in enumerate(keys) if n == 0 or key != keys[n - 1]]
        bounds = [0, *(self.contents[n][3] for n in begins[1:]), self.value.numel()]
        value, gradient = self.value.detach(), self.gradient()
        pieces = []
        for (n, end), (lo, hi) in zip(pairwise([*begins, len(keys)]), pairwise(bounds), strict=True):
            assert gradient is not None
            piece = replace(
                self,
                value=nn.Parameter(value[lo:hi]),
                stored=self.stored[lo:hi] if self.stored is not None else None,
                average=self.average[lo:hi] if self.average is not None else None,
                gradient=_constant(gradient[lo:hi]),
                contents=tuple((p, first, last, at - lo) for p, first, last, at in self.contents[n:end]),
            )
            pieces.append((piece, slice(lo, hi)))
        return pieces


def replicated_flat_parameters(
    optimizer: torch.optim.Optimizer, gradient: GradientOf, is_owner: Callable[[nn.Parameter], bool], *, on_host: bool
) -> list[FlatParameter]:
    """Return one flat parameter for each parameter that the optimizer trains.

    Args:
        optimizer: Optimizer of the parameters.
        gradient: Function that returns a parameter's reduced gradient.
        is_owner: Function that returns whether this rank adds a parameter's gradient to its part of the norm.
        on_host: If true, the optimizer works on copies in host memory of parameters that are on a device.
    """
    return [
        _make_flat_parameter(p, partial(gradient, p), ((p, 0, p.numel(), 0),), number, is_owner(p), on_host=on_host)
        for number, settings in enumerate(optimizer.param_groups)
        for p in settings["params"]
        if p.requires_grad
    ]


def sharded_flat_parameters(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[FlatGroup],
    share: int,
    parameter_view: Callable[[int, int, int], torch.Tensor],
    gradient: Callable[[int, int, int], torch.Tensor],
    is_owner: Callable[[nn.Parameter], bool],
    *,
    on_host: bool = False,
    gathered: bool = False,
) -> list[FlatParameter]:
    """Return the flat parameters of one share of every bucket.

    Args:
        optimizer: Optimizer of the parameters.
        groups: Parameters and their places in flat memory.
        share: Number of the share, the same in each bucket.
        parameter_view: Function `parameter_view(group, lo, hi)` that returns elements [lo, hi) of a group's parameters
            as a view.
        gradient: Function `gradient(group, lo, hi)` that returns elements [lo, hi) of a group's reduced gradients as a
            view.
        is_owner: Function that returns whether this rank adds a parameter's gradient to its part of the norm.
        on_host: If true, the optimizer works on copies in host memory of parameters that are on a device.
        gathered: If true, an optimizer that needs whole parameters is accepted, because ranks gather them.

    Raises:
        InputError: The optimizer is not known to update each element independently of the others.
    """
    check_elementwise(optimizer, gathered=gathered)
    settings_of = {p: number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    flat_parameters = []
    for bucket, (g, b) in enumerate(bucket_indices(groups)):
        first, last = groups[g].layout.share(b, share)
        for lo, hi, number, owned, contents in _intervals(groups[g], first, last, settings_of, is_owner):
            if number < 0:  # the optimizer does not have these parameters
                continue
            gradient_view = _constant(gradient(g, lo, hi))
            flat_parameters.append(
                _make_flat_parameter(
                    parameter_view(g, lo, hi), gradient_view, contents, number, owned, bucket, on_host=on_host
                )
            )
    return flat_parameters


def _constant(view: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: view


def _make_flat_parameter(
    stored: torch.Tensor, gradient: Callable[[], torch.Tensor | None], *rest: Any, on_host: bool
) -> FlatParameter:
    """Return a flat parameter of a parameter or interval of flat memory, with a copy for the optimizer if needed."""
    dtype = stored.dtype if stored.element_size() >= 4 else torch.float32
    if on_host and is_accelerator(stored.device):
        values = empty_pinned(stored.shape, dtype, stored.device).copy_(stored.detach())
        return FlatParameter(nn.Parameter(values), stored.detach(), gradient, *rest)
    if dtype != stored.dtype:
        return FlatParameter(nn.Parameter(stored.detach().to(dtype)), stored.detach(), gradient, *rest)
    value = stored if isinstance(stored, nn.Parameter) else nn.Parameter(stored)
    return FlatParameter(value, None, gradient, *rest)


def _intervals(
    group: FlatGroup,
    lo: int,
    hi: int,
    settings_of: Mapping[nn.Parameter, int],
    is_owner: Callable[[nn.Parameter], bool],
) -> list[tuple[int, int, int, bool, tuple[tuple[nn.Parameter, int, int, int], ...]]]:
    """Divide [lo, hi) where the settings change; return (first, last, settings, owned, contents) of each part."""
    intervals: list[tuple[int, int, int, bool, tuple[tuple[nn.Parameter, int, int, int], ...]]] = []
    pieces = group.layout.within(lo, hi)
    for at, (n, first, last, offset) in enumerate(pieces):
        parameter = group.parameters[n]
        end = pieces[at + 1][3] if at + 1 < len(pieces) else hi
        key = (settings_of.get(parameter, -1), is_owner(parameter))
        if intervals and intervals[-1][2:4] == key:
            begin, _, _, _, contents = intervals.pop()
        else:
            begin, contents = (lo if at == 0 else offset), ()
        intervals.append((begin, end, *key, (*contents, (parameter, first, last, offset - begin))))
    return intervals


def is_shardable(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if ranks can divide the optimizer's states: it is element-wise and has made no step."""
    try:
        check_elementwise(optimizer, gathered=True)
    except InputError:
        return False
    return not has_stepped(optimizer)


def check_elementwise(
    optimizer: torch.optim.Optimizer, *, gathered: bool = False, otherwise: str = "parallel.zero 0"
) -> None:
    """Raise InputError if an optimizer is not known to update each element independently of the others.

    Args:
        optimizer: Optimizer to check.
        gathered: If true, an optimizer that needs whole parameters is accepted, because ranks gather them.
        otherwise: Setting that works with any optimizer, for the message.
    """
    for part in getattr(optimizer, "parts", [optimizer]):
        kind, needs_whole = type(part), getattr(part, "needs_whole", False)
        if needs_whole and not gathered:
            raise refusal(
                f"{kind.__name__} needs whole parameters, but servers have slices of them; use another optim.name, "
                "or another parallel.mode"
            )
        if not (needs_whole or kind in ELEMENTWISE or getattr(part, "elementwise", False)):
            raise refusal(
                f"{kind.__name__} cannot be sharded: it is not known to update each element independently; use "
                f"adamw or another element-wise optimizer, or {otherwise}, or set `optimizer.elementwise = True`"
            )


def replace_parameters(optimizer: torch.optim.Optimizer, flat_parameters: Sequence[FlatParameter]) -> None:
    """Let the optimizer update the flat parameters in place of the parameters that it was constructed with.

    Args:
        optimizer: Optimizer, whose parameter groups are changed in place.
        flat_parameters: Flat parameters that replace its parameters.

    Raises:
        InputError: The optimizer has already made a step and has states of its parameters.
    """
    if has_stepped(optimizer):
        raise refusal(
            "the optimizer already has state from a step; pass it before its first step, and load a checkpoint later"
        )
    for number, settings in enumerate(optimizer.param_groups):
        settings["params"] = [s.value for s in flat_parameters if s.settings == number]
    init_states(optimizer)


def is_elementwise(state: Any, value: torch.Tensor) -> bool:
    """Return whether an optimizer state is a tensor with one number for each element of a value.

    Args:
        state: State of the optimizer, of any type.
        value: Tensor that the optimizer updates.
    """
    return torch.is_tensor(state) and state.shape == value.shape and state.dim() > 0


def has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has states from steps, rather than only states that its constructor made."""
    return any(float(state.get("step", 1)) > 0 for state in optimizer.state.values() if state)


def init_states(optimizer: torch.optim.Optimizer) -> None:
    """Create the missing initial states of an optimizer whose constructor creates them (torch's Adagrad).

    States of parameters that are not in the optimizer's groups are dropped.
    """
    in_groups = {value for settings in optimizer.param_groups for value in settings["params"]}
    for stranger in [value for value in optimizer.state if value not in in_groups]:
        del optimizer.state[stranger]
    for part in getattr(optimizer, "parts", [optimizer]):
        if isinstance(part, torch.optim.Adagrad):
            for settings in part.param_groups:
                lacking = [value for value in settings["params"] if not optimizer.state.get(value)]
                if lacking:
                    begun = part.defaults["initial_accumulator_value"]  # torch ignores the group's value
                    fresh = torch.optim.Adagrad([{**settings, "params": lacking}], initial_accumulator_value=begun)
                    optimizer.state.update(fresh.state)
