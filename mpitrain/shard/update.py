"""The optimizer's update of this rank's flat parameters: norm, clipping, unscaling, rounding into 16 bits."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from mpitrain.comm import Communicator
from mpitrain.comm.memory.device import is_accelerator
from mpitrain.errors import refusal
from mpitrain.layout.boxes import split
from mpitrain.shard.flat_parameters import FlatParameter
from mpitrain.shard.norm import rank_parts, sum_squares, wide_dtype
from mpitrain.shard.optimizers import MatrixGather, Muon, SquaresSum, TrustRatios
from mpitrain.shard.placement import SCRATCH
from mpitrain.shard.sharding import EXACT_BLOCK, Sharding

SCALE = "lr_scale"  # key of a parameter group: its learning rate divided by that of the step


class Updater:
    """The optimizer's update of one rank's flat parameters at the end of a step.

    Args:
        sharding: Sharding whose flat parameters are updated.
        axes: Communicators of the axes that divide the model; the norm is also summed over these.
        dividing: The axes among `axes` that divide parameters.
    """

    def __init__(
        self, sharding: Sharding, axes: Sequence[Communicator] = (), dividing: Sequence[Communicator] = ()
    ) -> None:
        self._sharding, self._axes = sharding, list(axes)
        self._one_round = _set_gathers(sharding, dividing)  # such an optimizer needs equally many steps on every rank
        # true if this rank counts every parameter of its groups, so that the norm is over all gradients
        owned = {p for s in sharding.flat_parameters if s.is_owner for p, *_ in s.contents}
        self._owns_all = owned == {p for group in sharding.groups for p in group.parameters}
        self._unused: set[nn.Parameter] = set()  # parameters that no rank used in this step
        whole = not sharding.stage.states and sharding.shard.size > 1 and self._owns_all
        self._parts = rank_parts(sharding.gradients, sharding.shard) if whole else []
        self._squares = torch.zeros(1, dtype=torch.float64, device=sharding.groups[0].device)
        # true if the optimizer reads the reduced gradients from the `.grad` of the model's own parameters
        self._direct = sharding.reduce_dtype is None and sharding.host is None and sharding.files is None
        self._direct &= all(s.value is s.contents[0][0] for s in sharding.flat_parameters)
        self._on_device = all(is_accelerator(s.value.device) for s in sharding.flat_parameters)

    @property
    def can_skip(self) -> bool:
        """If true, the device can divide gradients or skip the update by scalars that the host does not know yet.

        Fused Adam and AdamW can do so if their parameters are on the device. (Fused SGD cannot: if its first update is
        skipped, it starts its momentum from uninitialized memory.)
        """
        optimizer = self._sharding.optimizer
        fused = isinstance(optimizer, torch.optim.Adam) and getattr(optimizer, "_step_supports_amp_scaling", False)
        return fused and self._on_device and not self._sharding.config.run.reproducible

    def squares(self) -> torch.Tensor:
        """Return the sum of the squares of all gradients over all axes, the same on every rank. Collective.

        Gradients are used as they are, before clipping and unscaling.

        Returns:
            Tensor, float64 [1], on the device of the gradients; not finite if a gradient is not finite.
        """
        sharding = self._sharding
        self._unused = sharding.reducer.take_unused(sharding.comm)
        sharding.separate_unused(self._unused)
        if sharding.host is not None:
            sharding.host.begin()
        if sharding.config.run.reproducible:
            return torch.tensor([self._exact_squares()], dtype=torch.float64)
        gradients = self._parts or [
            g for s in sharding.flat_parameters if s.is_owner and (g := s.gradient()) is not None
        ]
        total = sum_squares(gradients, self._squares)
        if self._parts or sharding.stage.states:  # the other ranks of the shard have summed other gradients
            sharding.shard.all_reduce(total)
        for axis in self._axes:
            axis.all_reduce(total)
        return total

    def _exact_squares(self) -> float:
        """Return the sum of all squares, with the same bits for any number of ranks. Collective.

        Squares are summed within blocks of EXACT_BLOCK elements, which never cross the boundary of a share, and the
        sums of the blocks are then added exactly.
        """
        sharding = self._sharding
        mine = torch.cat([_squares_of_rows(g.view(-1, EXACT_BLOCK)) for g in sharding.reduced_gradients()]).cpu()
        if sharding.stage.states and sharding.shard.size > 1:
            everyone = torch.empty(mine.numel() * sharding.shard.size, dtype=torch.float64)
            sharding.shard.all_gather(everyone, mine)
            mine = everyone
        values = mine.tolist()
        return math.fsum(values) if all(map(math.isfinite, values)) else math.nan

    @torch.no_grad()
    def apply_unless(self, found_inf: torch.Tensor, divisor: torch.Tensor) -> None:
        """Update with the gradients divided by `divisor`, unless `found_inf` is 1; the device decides. Collective.

        Args:
            found_inf: float32 scalar on the device, which must support this (see `can_skip`).
            divisor: float32 scalar on the device.
        """
        optimizer: Any = self._sharding.optimizer
        optimizer.found_inf, optimizer.grad_scale = found_inf, divisor
        try:
            self.apply(1.0)
        finally:
            del optimizer.found_inf, optimizer.grad_scale

    @torch.no_grad()
    def apply(self, factor: float) -> None:
        """Update with the gradients times `factor`, and make the result visible to every rank. Collective."""
        if self._direct:
            if factor != 1.0:
                self._sharding.gradients.scale(factor)
            optimizer_step(self._sharding.optimizer)
        else:
            self._apply_to_shares(factor)
        self._sharding.parameters.publish()

    def _apply_to_shares(self, factor: float) -> None:
        """Update flat parameters that are not parameters of the model, or whose update needs copies."""
        optimizer, host = self._sharding.optimizer, self._sharding.host
        if host is not None:
            host.before_update()
        every = self._sharding.flat_parameters
        for chosen in [every] if self._one_round else _rounds(every, self._sharding.files is not None):
            for flat_parameter in chosen:
                flat_parameter.value.grad = self._gradient(flat_parameter, factor)
            optimizer_step(optimizer)
            for flat_parameter in chosen:
                if flat_parameter.stored is not None or self._sharding.stage.states:
                    flat_parameter.value.grad = None
                flat_parameter.store() if host is None else host.store(flat_parameter)
                if self._sharding.files is not None:
                    self._sharding.files.move_states(flat_parameter, optimizer.state[flat_parameter.value])
        if host is not None:
            host.end()

    def _gradient(self, flat_parameter: FlatParameter, factor: float) -> torch.Tensor | None:
        """Return the flat parameter's gradient times `factor`, in the dtype and on the device of its value.

        The result is None if there is no gradient or no rank used the parameters.
        """
        host = self._sharding.host
        gradient = flat_parameter.gradient() if host is None else host.gradient(flat_parameter)
        if gradient is None or flat_parameter.is_unused(self._unused):
            return None
        gradient = gradient.to(flat_parameter.value)
        return gradient.mul_(factor) if factor != 1.0 else gradient


def _set_gathers(sharding: Sharding, dividing: Sequence[Communicator]) -> bool:
    """Set `gather` of the optimizers that need whole parameters, and return whether there are any. Collective.

    Args:
        sharding: Sharding of the parameters, whose optimizer may consist of several.
        dividing: Axes that divide parameters.
    """
    optimizers = [
        p for p in getattr(sharding.optimizer, "parts", [sharding.optimizer]) if isinstance(p, Muon | TrustRatios)
    ]
    if optimizers and len(dividing) > 1:
        raise refusal(f"{type(optimizers[0]).__name__} needs whole parameters, but several axes divide them; use adamw")
    axis = dividing[0] if dividing else None
    for part in optimizers:
        values = {value for group in part.param_groups for value in group["params"]}
        chosen = [flat for flat in sharding.flat_parameters if flat.value in values]
        part.gather = (MatrixGather if isinstance(part, Muon) else SquaresSum)(sharding, chosen, axis)
    return bool(optimizers)


def _squares_of_rows(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of each row, float64, with bits that do not depend on the number of rows.

    The order in which a device adds up a row in one kernel may depend on that number. Adding halves element by element
    has a fixed order. The length of a row is a power of two.
    """
    if not is_accelerator(x.device):
        return torch.linalg.vector_norm(x, dim=1, dtype=wide_dtype(x)).double().square_()
    x = x.double().square_()
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return x[:, 0]


def _rounds(flat_parameters: Sequence[FlatParameter], files: bool) -> list[list[FlatParameter]]:
    """Return lists of flat parameters; each list is updated by one call of the optimizer.

    One list contains all of them, unless gradients or states temporarily need additional memory (fp32 copies, files).
    Each list then has about SCRATCH elements.
    """
    if not files and all(s.stored is None for s in flat_parameters):
        return [list(flat_parameters)]
    total = sum(s.value.numel() for s in flat_parameters)
    count = min(len(flat_parameters), max(1, -(-total // SCRATCH)))
    return [list(flat_parameters[lo:hi]) for lo, hi in pairwise(split(len(flat_parameters), count)) if lo < hi]


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every parameter group to that of the step times the group's own ratio.

    Args:
        optimizer: Optimizer, whose groups may have the ratio `lr_scale` (default 1).
        lr: Learning rate of the step.
    """
    for settings in optimizer.param_groups:
        settings["lr"] = lr * settings.get(SCALE, 1.0)


def optimizer_step(optimizer: torch.optim.Optimizer) -> None:
    """Call `optimizer.step()`, without torch's compiler if that is not loaded (see `trainer.optimizing`)."""
    kind = type(optimizer)
    plain = kind.__module__.startswith("torch.optim") and "step" not in vars(optimizer)
    hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    if "torch._dynamo" in sys.modules or not plain or hooked or optimizer.defaults.get("differentiable"):
        optimizer.step()
    else:
        with torch.no_grad():
            inspect.unwrap(kind.step)(optimizer)
