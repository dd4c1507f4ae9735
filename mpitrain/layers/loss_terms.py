"""Terms of a loss: what the mean of the main one is over, and further ones from inside of a model.

**The main loss** of a step is one mean over its global batch, however ranks and microbatches divide that. So each
microbatch weighs as much as was counted in it, out of all that was counted:

    microbatch      targets (. is masked)    counted    mean    weight
    rank 0, first   3 1 4 1                  4          a       4/7
    rank 0, second  . . 5 9                  2          b       2/7
    rank 1, first   . 2 . .                  1          c       1/7
    rank 1, second  . . . .                  0          -       0          4/7 a + 2/7 b + 1/7 c

**Further terms** are added where a model computes them, by a `LossTerm` that an activation passes through. The loss is
computed elsewhere, on the last stage of a pipeline; but all that training needs of a term is its gradient, which joins
the backward pass when the activation's gradient comes by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from mpitrain.comm import Communicator

UNCOUNTED = -100  # a target that does not count, as torch has it
Count = int | float | torch.Tensor  # what a mean is over
Counts = Callable[[Any], Count]  # of the targets of a microbatch


def criterion_of(loss: Any) -> Any:
    """Return what a loss is computed by: the `criterion` of a model whose method it is, or itself."""
    return getattr(getattr(loss, "__self__", None), "criterion", loss) if not hasattr(loss, "counted") else loss


def counts_samples(loss: Any) -> bool:
    """Return whether a loss says that it is a mean over samples."""
    return getattr(criterion_of(loss), "counted", None) is len


def counts_targets(loss: Any, y: Any) -> bool:
    """Return whether what the mean of a loss is over depends on the values of targets like y."""
    loss = criterion_of(loss)
    if getattr(loss, "counted", None) is not None:
        return not counts_samples(loss)
    whole_numbers = isinstance(y, torch.Tensor) and not y.is_floating_point() and y.dtype != torch.bool
    return whole_numbers and getattr(loss, "reduction", "mean") == "mean"


def counted(loss: Any, y: Any) -> Count:
    """Return what the mean of a loss is over, a scalar.

    A loss may say so by an attribute: `counted(y)`, a number; `counted = len` for samples. Others of whole numbers are
    taken for the mean over targets other than `loss.ignore_index` (-100 without one), weighted by `loss.weight` if it
    has weights of classes, as torch's cross-entropy is; and all the rest for a mean over samples.

    Args:
        loss: Of an output and y.
        y: Targets of a microbatch.
    """
    loss = criterion_of(loss)
    own = getattr(loss, "counted", None)
    if own is not None:
        number: Count = own(y)
        return number
    if not counts_targets(loss, y):
        return len(y)
    counting = y != getattr(loss, "ignore_index", UNCOUNTED)
    weight = getattr(loss, "weight", None)
    if not isinstance(weight, torch.Tensor):
        return counting.sum()
    return (weight.to(y.device).double()[y.where(counting, 0)] * counting).sum()


def samples_in(x: Any) -> int:
    """Return how many samples an input has: a tensor, or a tuple, list or mapping of tensors."""
    while not isinstance(x, torch.Tensor):
        x = next(iter(x.values() if isinstance(x, Mapping) else x))
    return len(x)


def numbers(counts: Iterable[Count]) -> list[float]:
    """Return counts as numbers; those on a device are fetched together."""
    counts = list(counts)
    on_device = [c for c in counts if isinstance(c, torch.Tensor)]
    fetched = iter(torch.stack([c.detach().double() for c in on_device]).tolist() if on_device else ())
    return [next(fetched) if isinstance(c, torch.Tensor) else float(c) for c in counts]


def shares_of(counts: Sequence[float]) -> list[float]:
    """Return counts over their sum; of nothing, no share is more than 0."""
    total = sum(counts)
    return [count / total if total else 0.0 for count in counts]


def nothing(output: Any) -> torch.Tensor:
    """Return the loss of an output in which nothing is counted: 0, with gradients of 0 for all of it.

    torch's mean over no targets is NaN, and no pass may be left out: other ranks may take part in it.
    """
    tensors = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    return torch.stack([t.float().sum() for t in tensors]).sum() * 0.0


class LossTerm(nn.Module):
    """A named term that is added to the loss where an activation passes.

        self.balance = LossTerm("balance", 0.01)
        ...
        y = self.balance(y, load_balance(router_scores))

    The model then trains on its loss + 0.01 times the mean of the term over the global batch, each microbatch weighted
    by its samples. It may be anywhere in the model, on any stage of a pipeline and in blocks that are recomputed.
    Several of one name are added up. In evaluation, and without gradients, it does nothing.

    Args:
        name: Of the term.
        weight: Factor of the term in the loss.

    Attributes:
        share: Samples of the microbatch that is computed over those of the whole batch; set by an engine or a pipeline.
        scale: Factor of all losses, which an engine sets for fp16.
        total: Sum of share times the term over microbatches, float64; None before the first backward pass.
    """

    def __init__(self, name: str, weight: float = 1.0) -> None:
        super().__init__()
        self.name, self.weight = name, weight
        self.share, self.scale = 1.0, 1.0
        self.total: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return x, whose gradient brings that of the term along.

        Args:
            x: An activation that the loss depends on, of any shape and dtype.
            value: The term of this microbatch, a scalar: a mean over samples, or over tokens where all count.
        """
        if not (self.training and torch.is_grad_enabled()):
            return x
        return _passing(x, value, self)

    def extra_repr(self) -> str:
        return f"{self.name!r}, {self.weight}"


class _Passing(torch.autograd.Function):
    """The identity of x. In backward the gradient of a term joins that of x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, value: torch.Tensor, term: LossTerm) -> torch.Tensor:
        ctx.term, ctx.share, ctx.value = term, term.share, value.detach()
        ctx.factor = term.weight * term.share * term.scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        if ctx.value is not None:  # backward in halves comes twice, and a forward pass for recomputing never
            term, added = ctx.term, ctx.value.double() * ctx.share
            term.total = added if term.total is None else term.total + added
            ctx.like, ctx.value = ctx.value, None
        return grad, torch.full_like(ctx.like, ctx.factor), None


@torch._disable_dynamo  # the compiler would make anew what depends on a share, which is not the same twice
def _passing(x: torch.Tensor, value: torch.Tensor, term: LossTerm) -> torch.Tensor:
    passed: torch.Tensor = _Passing.apply(x, value, term)
    return passed


def terms_in(modules: Iterable[nn.Module]) -> list[LossTerm]:
    """The terms in modules, each once."""
    return list(dict.fromkeys(m for module in modules for m in module.modules() if isinstance(m, LossTerm)))


class LossTerms:
    """The terms of a model, or of this rank's part of it. Collective to make over the ranks that have the parts.

    Args:
        module: The model, or the part.
        comm: The ranks that have the parts; None where the model is whole.

    Attributes:
        names: Of all parts' terms, in order.
    """

    def __init__(self, module: nn.Module, comm: Communicator | None) -> None:
        self._own, self._comm = terms_in([module]), comm
        names = [term.name for term in self._own]
        if comm is not None:
            names = [name for part in comm.all_gather_object(names) for name in part]
        self.names = sorted(set(names))

    def weigh(self, share: float, scale: float) -> None:
        """Set what the terms of the next forward pass count for: see `LossTerm`."""
        for term in self._own:
            term.share, term.scale = share, scale

    def take(self, device: torch.device) -> torch.Tensor:
        """Return the sums since the last call, on every rank that has a part. Collective over these.

        Returns:
            float64 [1 + terms]: what the terms add to the loss, and the mean of each by itself.
        """
        sums = torch.zeros(1 + len(self.names), dtype=torch.float64, device=device)
        for term in self._own:
            if term.total is not None:
                sums[0] += term.weight * term.total
                sums[1 + self.names.index(term.name)] += term.total
                term.total = None
        if self._comm is not None and self.names:
            self._comm.all_reduce(sums)
        return sums
