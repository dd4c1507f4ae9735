"""A server's shares: summing what workers push, and the optimizer's update of the parameters."""

from __future__ import annotations

from collections.abc import Iterable, Set

import torch
from torch import nn

from mpitrain.loose.memory import OwnShares
from mpitrain.shard.flat_parameters import FlatParameter
from mpitrain.shard.sharding import Sharding
from mpitrain.shard.update import optimizer_step, set_rate


class ShareUpdate:
    """The optimizer of a server's shares.

    Args:
        sharding: Whose flat parameters are the server's shares, each a stretch of one bucket (`FlatParameter.bucket`).
        sums: Where gradients are added up; the flat parameters' gradients are views of it.
        published: The parameters as workers get them.
        buckets: How many there are.
    """

    def __init__(self, sharding: Sharding, sums: OwnShares, published: OwnShares, buckets: int) -> None:
        self._sharding, self.published = sharding, published
        self._sums = [sums.bucket(number) for number in range(buckets)]
        self._parameters = [p for group in sharding.groups for p in group.parameters]
        self._of: dict[int, list[FlatParameter]] = {}
        self._known = 0  # flat parameters in these

    @property
    def parameters(self) -> int:
        """Their number."""
        return len(self._parameters)

    def marked(self, flags: torch.Tensor) -> set[nn.Parameter]:
        """Return the parameters whose flag is set, of one for each."""
        return {p for p, flag in zip(self._parameters, flags.tolist(), strict=True) if flag}

    @torch.no_grad()
    def add(self, bucket: int, gradients: torch.Tensor, factor: float = 1.0, *, first: bool) -> None:
        """Add gradients to those of a bucket.

        Args:
            bucket: Its number.
            gradients: This server's share of them.
            factor: What they are multiplied by.
            first: Forget what was added before.
        """
        place = self._sums[bucket]
        if not first:
            place.add_(gradients, alpha=factor)
        elif factor == 1.0:
            place.copy_(gradients)
        elif gradients.dtype == place.dtype:
            torch.mul(gradients, factor, out=place)
        else:
            place.copy_(gradients).mul_(factor)

    @torch.no_grad()
    def squares(self) -> float:
        """The sum of the squares of all gradients added up; not finite where one of them is not."""
        return squares(self._sums)

    @torch.no_grad()
    def apply(self, buckets: Iterable[int], lr: float, factor: float, unused: Set[nn.Parameter] = frozenset()) -> None:
        """Update some buckets with the gradients added up times `factor`.

        Args:
            buckets: Their numbers.
            lr: The learning rate.
            factor: Of the gradients.
            unused: Parameters that are left as they are.
        """
        self._sharding.set_apart(unused)
        chosen = [s for number in buckets for s in self._in_bucket(number) if not s.unused(unused)]
        if not chosen:
            return
        optimizer = self._sharding.optimizer
        set_rate(optimizer, lr)
        for flat_parameter in chosen:
            gradient = flat_parameter.gradient()
            assert gradient is not None
            gradient = gradient.to(flat_parameter.value.dtype)
            flat_parameter.value.grad = gradient if factor == 1.0 else gradient.mul_(factor)
        optimizer_step(optimizer)
        for flat_parameter in chosen:
            flat_parameter.value.grad = None
            flat_parameter.store()

    def _in_bucket(self, number: int) -> list[FlatParameter]:
        """The flat parameters of a bucket."""
        every = self._sharding.flat_parameters
        if len(every) != self._known:  # some were divided
            self._known, self._of = len(every), {}
            for flat_parameter in every:
                self._of.setdefault(flat_parameter.bucket, []).append(flat_parameter)
        return self._of.get(number, [])


def squares(tensors: list[torch.Tensor]) -> float:
    """The sum of the squares of all elements; not finite where one of them is not."""
    return float(torch.stack(torch._foreach_norm(tensors, 2)).double().square_().sum()) if tensors else 0.0
