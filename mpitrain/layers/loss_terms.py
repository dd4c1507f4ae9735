"""Terms of a loss: how microbatches are weighted in the main loss, and extra terms computed inside a model.

**The main loss** of a step is one mean over its global batch, however ranks and microbatches divide that batch. The
weight of a microbatch is therefore the number of targets counted in it, divided by the number counted in the batch:

    microbatch      targets (. is masked)    counted    mean    weight
    rank 0, first   3 1 4 1                  4          a       4/7
    rank 0, second  . . 5 9                  2          b       2/7
    rank 1, first   . 2 . .                  1          c       1/7
    rank 1, second  . . . .                  0          -       0          4/7 a + 2/7 b + 1/7 c

**Extra terms** are added where a model computes them, by a `LossTerm` that an activation passes through. The main loss
is computed elsewhere, on the last stage of a pipeline. Training needs only the gradient of an extra term, and this
gradient joins the backward pass when the gradient of the activation reaches the `LossTerm`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from mpitrain.comm import Communicator

UNCOUNTED = -100  # target that is not counted; the default of torch's ignore_index
Count = int | float | torch.Tensor  # divisor of a mean
Counts = Callable[[Any], Count]  # maps the targets of a microbatch to their count


def criterion_of(loss: Any) -> Any:
    """Return the object that computes a loss: the `criterion` of the model whose method `loss` is, or `loss` itself."""
    return getattr(getattr(loss, "__self__", None), "criterion", loss) if not hasattr(loss, "counted") else loss


def counts_samples(loss: Any) -> bool:
    """Return whether a loss declares, by `counted = len`, that it is a mean over samples."""
    return getattr(criterion_of(loss), "counted", None) is len


def counts_targets(loss: Any, y: Any) -> bool:
    """Return whether the divisor of a loss's mean depends on the values of the targets.

    Args:
        loss: Loss function of (output, y).
        y: Targets of a microbatch; only their type and dtype matter.
    """
    loss = criterion_of(loss)
    if getattr(loss, "counted", None) is not None:
        return not counts_samples(loss)
    whole_numbers = isinstance(y, torch.Tensor) and not y.is_floating_point() and y.dtype != torch.bool
    return whole_numbers and getattr(loss, "reduction", "mean") == "mean"


def counted(loss: Any, y: Any) -> Count:
    """Return the divisor of a loss's mean, a scalar.

    A loss can define it by an attribute: `counted(y)` returns the divisor; `counted = len` means the number of samples.
    Without this attribute, a loss of integer targets is assumed to be torch's cross-entropy: a mean over the targets
    other than `loss.ignore_index` (default -100), weighted by `loss.weight` if the loss has class weights. Every other
    loss is assumed to be a mean over samples.

    Args:
        loss: Loss function of (output, y).
        y: Targets of a microbatch.
    """
    loss = criterion_of(loss)
    divisor_of = getattr(loss, "counted", None)
    if divisor_of is not None:
        number: Count = divisor_of(y)
        return number
    if not counts_targets(loss, y):
        return len(y)
    counting = y != getattr(loss, "ignore_index", UNCOUNTED)
    weight = getattr(loss, "weight", None)
    if not isinstance(weight, torch.Tensor):
        return counting.sum()
    return (weight.to(y.device).double()[y.where(counting, 0)] * counting).sum()


def samples_in(x: Any) -> int:
    """Return the number of samples in an input, which is a tensor or a tuple, list or mapping of tensors."""
    while not isinstance(x, torch.Tensor):
        x = next(iter(x.values() if isinstance(x, Mapping) else x))
    return len(x)


def to_floats(counts: Iterable[Count]) -> list[float]:
    """Return counts as floats; those on a device are copied to the host together."""
    counts = list(counts)
    on_device = [c for c in counts if isinstance(c, torch.Tensor)]
    fetched = iter(torch.stack([c.detach().double() for c in on_device]).tolist() if on_device else ())
    return [next(fetched) if isinstance(c, torch.Tensor) else float(c) for c in counts]


def shares_of(counts: Sequence[float]) -> list[float]:
    """Return each count divided by the sum of all counts; zeros if the sum is 0."""
    total = sum(counts)
    return [count / total if total else 0.0 for count in counts]


def zero_loss(output: Any) -> torch.Tensor:
    """Return a loss of 0 whose gradient is 0 for every floating-point tensor of an output.

    It replaces the loss of a microbatch without counted targets, for which torch's mean is NaN. The backward pass
    cannot be skipped instead, because other ranks may take part in it.
    """
    tensors = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    return torch.stack([t.float().sum() for t in tensors]).sum() * 0.0


class LossTerm(nn.Module):
    """A named term that is added to the loss at the place where an activation passes through it.

        self.balance = LossTerm("balance", 0.01)
        ...
        y = self.balance(y, load_balance(router_scores))

    The model then trains on its loss + 0.01 times the mean of the term over the global batch, in which each microbatch
    is weighted by its number of samples. A term may be anywhere in the model, on any stage of a pipeline and in blocks
    that are recomputed. Terms of the same name are added up. In evaluation mode, or if gradients are disabled, the term
    does nothing.

    Args:
        name: Name of the term.
        weight: Factor of the term in the loss.

    Attributes:
        share: Number of samples in the current microbatch divided by that of the whole batch; set by an engine or a
            pipeline.
        scale: Factor of all losses, which an engine sets for fp16.
        total: Sum over microbatches of `share` times the term, float64; None before the first backward pass.
    """

    def __init__(self, name: str, weight: float = 1.0) -> None:
        super().__init__()
        self.name, self.weight = name, weight
        self.share, self.scale = 1.0, 1.0
        self.total: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return x, and let its backward pass include the gradient of the term.

        Args:
            x: Activation that the loss depends on, of any shape and dtype.
            value: Term of this microbatch, a scalar: a mean over samples, or over tokens if all of them are counted.
        """
        if not (self.training and torch.is_grad_enabled()):
            return x
        return _pass_through(x, value, self)

    def extra_repr(self) -> str:
        return f"{self.name!r}, {self.weight}"


class _PassThrough(torch.autograd.Function):
    """The identity of x, whose backward pass also starts the gradient of a term."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, value: torch.Tensor, term: LossTerm) -> torch.Tensor:
        ctx.term, ctx.share, ctx.value = term, term.share, value.detach()
        ctx.factor = term.weight * term.share * term.scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        if ctx.value is not None:  # backward in two halves runs this twice; a forward pass only for recomputing never
            term, added = ctx.term, ctx.value.double() * ctx.share
            term.total = added if term.total is None else term.total + added
            ctx.like, ctx.value = ctx.value, None
        return grad, torch.full_like(ctx.like, ctx.factor), None


@torch._disable_dynamo  # the compiler would compile again for each new value of the share
def _pass_through(x: torch.Tensor, value: torch.Tensor, term: LossTerm) -> torch.Tensor:
    passed: torch.Tensor = _PassThrough.apply(x, value, term)
    return passed


def terms_in(modules: Iterable[nn.Module]) -> list[LossTerm]:
    """Return the distinct loss terms of some modules, in the order of the modules."""
    return list(dict.fromkeys(m for module in modules for m in module.modules() if isinstance(m, LossTerm)))


class LossTerms:
    """Loss terms of a model, or of this rank's part of it.

    The constructor is collective over the ranks that have the parts.

    Args:
        module: Model, or this rank's part of it.
        comm: Ranks that have the parts; None if the model is whole.

    Attributes:
        names: Names of the terms of all parts, sorted.
    """

    def __init__(self, module: nn.Module, comm: Communicator | None) -> None:
        self._terms, self._comm = terms_in([module]), comm
        names = [term.name for term in self._terms]
        if comm is not None:
            names = [name for part in comm.all_gather_object(names) for name in part]
        self.names = sorted(set(names))

    def weigh(self, share: float, scale: float) -> None:
        """Set the share and the scale of all terms for the next forward pass.

        Args:
            share: Number of samples in the microbatch divided by that of the whole batch.
            scale: Factor of all losses, for fp16.
        """
        for term in self._terms:
            term.share, term.scale = share, scale

    def take(self, device: torch.device) -> torch.Tensor:
        """Return the sums of all terms since the last call, and reset them. Collective over the ranks that have the
        parts.

        Returns:
            Tensor, float64 [1 + terms], the same on each of these ranks: the sum of all terms as added to the loss,
            then the mean of each term without its weight, in the order of `names`.
        """
        sums = torch.zeros(1 + len(self.names), dtype=torch.float64, device=device)
        for term in self._terms:
            if term.total is not None:
                sums[0] += term.weight * term.total
                sums[1 + self.names.index(term.name)] += term.total
                term.total = None
        if self._comm is not None and self.names:
            self._comm.all_reduce(sums)
        return sums
