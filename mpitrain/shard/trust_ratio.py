"""LAMB and LARS, whose rates follow norms over whole parameters, on parameters that several ranks hold together.

What a rank holds of a parameter may be a stretch of it (ZeRO), some of its rows or columns (tensor parallel), or a
stretch of those:

    squares, in shares        each rank sums those of its own elements, in float64
    sum over the shard        one small vector for all parameters
    sum over the tensor axis  of those parameters that its ranks divide between them
    update                    each rank its own share
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mpitrain.comm import Communicator
from mpitrain.errors import refusal
from mpitrain.layout import logical_of
from mpitrain.shard.flat_parameters import FlatParameter
from mpitrain.shard.sharding import Sharding

Parts = list[tuple[torch.Tensor, int, int, int]]  # (what the optimizer updates, first, last, number of the parameter)


class TrustRatios(torch.optim.Optimizer):
    """What gives each parameter a rate of its own, a ratio of norms; 1 where one of these is 0.

    Attributes:
        gather: Sums squares over the ranks; None where what is updated are whole parameters.
    """

    needs_whole = True
    gather: SquaresSum | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make one update. Collective over the ranks that hold the parameters."""
        listed = [(v, group) for group in self.param_groups for v in group["params"] if v.grad is not None]
        groups = dict(listed)
        measured = {value: self._measured(value, group) for value, group in listed}
        parts, squares = self._begin(measured)
        for column, tensors in enumerate(({v: v for v in measured}, measured)):
            views = [_stretch(tensors[value], first, last) for value, first, last, _ in parts]
            if views:
                norms = torch.stack(torch._foreach_norm(views, 2, dtype=torch.float64))
                squares[[number for *_, number in parts], column] = norms.square_()
        if self.gather is not None:
            self.gather.total()
        norms = squares.sqrt()
        updates = {value: self._update(value, measured[value], group) for value, group in listed}
        for value, first, last, number in parts:
            weight, other = norms[number].unbind()
            ratio = torch.where((weight > 0) & (other > 0), self._ratio(weight, other, groups[value]), 1.0)
            view = _stretch(updates[value], first, last)
            view.mul_(ratio.to(view.dtype))
        for value, group in listed:
            self._apply(value, updates[value], group)

    def _begin(self, measured: Mapping[torch.Tensor, torch.Tensor]) -> tuple[Parts, torch.Tensor]:
        """Return the parts of parameters that are updated, and zeros for the squares of all parameters."""
        if self.gather is not None:
            return [part for part in self.gather.parts if part[0] in measured], self.gather.squares.zero_()
        device = next((value.device for value in measured), torch.device("cpu"))
        parts = [(value, 0, value.numel(), number) for number, value in enumerate(measured)]
        return parts, torch.zeros(len(parts), 2, dtype=torch.float64, device=device)

    def _measured(self, value: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
        """Return that whose norm goes with the parameter's into the ratio."""
        raise NotImplementedError

    def _ratio(self, weight: torch.Tensor, other: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
        """Return the ratio, of the norm of the parameter and of what is measured."""
        raise NotImplementedError

    def _update(self, value: torch.Tensor, measured: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
        """Return what the ratio scales, a tensor that may be written."""
        raise NotImplementedError

    def _apply(self, value: torch.Tensor, update: torch.Tensor, group: Mapping[str, Any]) -> None:
        """Update the parameter with what is scaled."""
        raise NotImplementedError


class Lamb(TrustRatios):
    """Adam's steps, each parameter's as long as the rate times that parameter (You et al. 2020, "Large batch
    optimization for deep learning", algorithm 2, whose function of the norm is the norm itself).

    Args:
        params: As of torch.optim.AdamW, as all the rest.
        least, most: What the ratio of the norms is kept between, as other implementations do.
        correct: Whether the averages are divided by what they lack in the first steps.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        least: float = 0.0,
        most: float = math.inf,
        correct: bool = True,
    ) -> None:
        if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas {list(betas)} are not two numbers from 0 to below 1")
        if not 0.0 <= least <= most:
            raise ValueError(f"least {least} and most {most} are not from 0 on, the greater one last")
        given = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, given | {"least": least, "most": most, "correct": correct})

    def _measured(self, value: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
        gradient, state, (first, second) = value.grad, self.state[value], group["betas"]
        assert gradient is not None
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(value), torch.zeros_like(value)
        state["step"] += 1
        steps = float(state["step"]) if group["correct"] else math.inf
        state["exp_avg"].lerp_(gradient, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        divisor = (state["exp_avg_sq"] / (1 - second**steps)).sqrt_().add_(group["eps"])
        return (state["exp_avg"] / (1 - first**steps)).div_(divisor).add_(value, alpha=group["weight_decay"])

    def _ratio(self, weight: torch.Tensor, other: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
        return (weight / other).clamp(group["least"], group["most"])

    def _update(self, value: torch.Tensor, measured: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
        return measured

    def _apply(self, value: torch.Tensor, update: torch.Tensor, group: Mapping[str, Any]) -> None:
        value.add_(update, alpha=-group["lr"])


class Lars(TrustRatios):
    """SGD with momentum, each parameter's gradient scaled to that parameter (You et al. 2017, "Large batch training of
    convolutional networks", algorithm 1).

    Args:
        params: As of torch.optim.SGD, as all the rest.
        trust_coefficient: How long a step is, over the rate times the parameter.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
    ) -> None:
        if not 0.0 <= momentum < 1.0 or trust_coefficient <= 0.0:
            raise ValueError("momentum is from 0 to below 1, and trust_coefficient is above 0")
        given = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust_coefficient": trust_coefficient}
        super().__init__(params, given)

    def _measured(self, value: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
        assert value.grad is not None
        return value.grad

    def _ratio(self, weight: torch.Tensor, other: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
        return group["trust_coefficient"] * weight / (other + group["weight_decay"] * weight)

    def _update(self, value: torch.Tensor, measured: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
        return measured.add(value, alpha=group["weight_decay"])

    def _apply(self, value: torch.Tensor, update: torch.Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[value]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(value)
        value.sub_(state["momentum_buffer"].mul_(group["momentum"]).add_(update, alpha=group["lr"]))


def _stretch(tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Return elements of a flat tensor, a view; a tensor of any layout where those are all."""
    return tensor if last - first == tensor.numel() else tensor.view(-1)[first:last]


class SquaresSum:
    """Sums squares of every parameter over the ranks that hold it together. Collective to make.

    Args:
        sharding: What the parameters are shared by.
        chosen: The flat parameters whose norms are needed.
        tensor: The tensor axis; None where it has one rank.

    Attributes:
        parts: What this rank holds of the parameters.
        squares: Of each parameter, two numbers to be summed.

    Raises:
        InputError: The sums would depend on the number of ranks and must not, or tensor ranks are unlike.
    """

    def __init__(self, sharding: Sharding, chosen: Sequence[FlatParameter], tensor: Communicator | None) -> None:
        parameters = [p for group in sharding.groups for p in group.parameters]
        self._numbers = {p: number for number, p in enumerate(parameters)}
        self.follow(chosen)
        device = chosen[0].value.device if chosen else sharding.groups[0].device
        self.squares = torch.zeros(len(parameters), 2, dtype=torch.float64, device=device)
        self._shard = sharding.shard if sharding.stage.states and sharding.shard.size > 1 else None
        self._tensor, self._divided = tensor, torch.tensor(_divided(parameters, tensor), device=device)[:, None]
        if sharding.options.reproducible and (self._shard is not None or bool(self._divided.any())):
            raise refusal(
                "lamb and lars add up squares in an order that depends on the number of ranks, which reproducible "
                "training must not; use another optim.name, or parallel.zero 0 without parallel.tensor"
            )

    def follow(self, chosen: Sequence[FlatParameter]) -> None:
        """Take the parameters from these flat ones from now on."""
        self.parts: Parts = [
            (flat.value, at, at + last - first, self._numbers[p])
            for flat in chosen
            for p, first, last, at in flat.contents
        ]

    def total(self) -> None:
        """Sum `squares` over the ranks, in place. Collective."""
        if self._shard is not None:
            self._shard.all_reduce(self.squares)
        if self._tensor is not None:
            shared = torch.where(self._divided, self.squares, 0.0)
            self._tensor.all_reduce(shared)
            self.squares.copy_(torch.where(self._divided, shared, self.squares))


def _divided(parameters: Sequence[nn.Parameter], tensor: Communicator | None) -> list[bool]:
    """Return for each parameter whether the tensor ranks divide it between them. Collective over these."""
    whole = [math.prod(logical_of(p).shape) for p in parameters]
    mine = [p.numel() for p in parameters]
    divided = [numel < all_of_it for numel, all_of_it in zip(mine, whole, strict=True)]
    if tensor is None:
        return [False] * len(parameters)
    told = tensor.all_gather_object([whole, divided, mine])
    sums = [sum(numels) for numels in zip(*(numels for _, _, numels in told), strict=False)]
    if any(other[:2] != [whole, divided] for other in told) or any(
        cut and total != all_of_it for cut, total, all_of_it in zip(divided, sums, whole, strict=True)
    ):
        raise refusal(
            "lamb and lars need the tensor ranks to hold each element once, or all of a parameter each; set "
            "parallel.tensor to 1"
        )
    return divided
