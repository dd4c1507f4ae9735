"""Boundaries between tensors that are whole to a script and this rank's parts of them, for autograd in both directions.

    forward   tensors                    backward        gradients
    enter     batch -> this rank's rows  leave           this rank's rows -> batch
    leave     this rank's rows -> batch  enter           batch -> this rank's rows
    share     parameter -> parameter     total           this rank's summands -> sum over the ranks
    replicate parameter -> parameter     one summand     whole gradient -> summand of rank 0, zeros elsewhere

Each is linear, and the backward of one is the forward of another, so a script can differentiate any number of times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Function

from mpitrain.run.layouts import Rows
from mpitrain.run.pending import Cell
from mpitrain.run.tensors import BatchTensor, PendingSum, WholeTensor

if TYPE_CHECKING:
    from mpitrain.run.session import ScriptRun

Place = tuple[int, Rows]  # dimension that is divided, and its division


def _tracks(tensors: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def enter(session: ScriptRun, places: Sequence[Place], tensors: Sequence[Any]) -> Sequence[Any]:
    """Return this rank's rows of whole tensors, as plain tensors.

    Args:
        session: Run of the script.
        places: Place of each tensor.
        tensors: Whole tensors; None stays None.
    """
    if _tracks(tensors):
        return Enter.apply(session, places, *tensors)
    return [_rows(place, x) for place, x in zip(places, tensors, strict=True)]


def leave(session: ScriptRun, places: Sequence[Place], tensors: Sequence[Any]) -> Sequence[Any]:
    """Return batches of which this rank has these rows.

    Args:
        session: Run of the script.
        places: Place of each tensor.
        tensors: This rank's rows; None stays None.
    """
    if _tracks(tensors):
        return Leave.apply(session, places, *tensors)
    return [_batch(session, place, x) for place, x in zip(places, tensors, strict=True)]


def _rows(place: Place, x: Any) -> Any:
    if x is None:
        return None
    at, rows = place
    if type(x) is BatchTensor and x.memory.arrays:
        x.read_arrays()
    if type(x) is BatchTensor and x.division.at == at and x.division.rows is rows:
        return x.local.detach()
    return rows.cut(x.whole() if isinstance(x, WholeTensor) else x, at).clone()


def _batch(session: ScriptRun, place: Place, x: Any) -> Any:
    if x is None:
        return None
    return BatchTensor(session, x.detach(), session.layouts.of(x, *place))


class _Boundary(Function):
    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Pass gradients through the opposite boundary."""
        return None, None, *ctx.opposite(ctx.session, ctx.places, gradients)


class Enter(_Boundary):
    """Rows of whole tensors, see `enter`."""

    @staticmethod
    def forward(ctx: Any, session: ScriptRun, places: Sequence[Place], *tensors: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.session, ctx.places, ctx.opposite = session, places, leave
        return tuple(_rows(place, x) for place, x in zip(places, tensors, strict=True))


class Leave(_Boundary):
    """Batches of rows, see `leave`."""

    @staticmethod
    def forward(ctx: Any, session: ScriptRun, places: Sequence[Place], *tensors: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.session, ctx.places, ctx.opposite = session, places, enter
        return tuple(_batch(session, place, x) for place, x in zip(places, tensors, strict=True))


class SharedUse(Function):
    """Parameters for use on this rank's rows, of which each rank computes a summand of the gradient."""

    @staticmethod
    def forward(ctx: Any, session: ScriptRun, *parameters: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.session, ctx.homes = session, [session.home(p) for p in parameters]
        return tuple(p.detach() for p in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if _tracks(gradients):
            return None, *Total.apply(ctx.session, *gradients)
        return None, *_sums(ctx.session, gradients, ctx.homes)


class Total(Function):
    """Sums over the ranks, which are pending."""

    @staticmethod
    def forward(ctx: Any, session: ScriptRun, *summands: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.session = session
        return tuple(_sums(session, summands, [None] * len(summands)))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        present = [g.whole() if isinstance(g, PendingSum) and not g.requires_grad else g for g in gradients]
        chosen = [g for g in present if g is not None]
        shares = iter(SharedUse.apply(ctx.session, *chosen) if _tracks(chosen) else chosen)
        return None, *(None if g is None else next(shares) for g in present)


def _sums(session: ScriptRun, summands: Sequence[Any], homes: Sequence[int | None]) -> list[Any]:
    return [
        None if g is None else PendingSum(session, Cell(session, g.contiguous(), is_shared=True, home=home))
        for g, home in zip(summands, homes, strict=True)
    ]


class Replicate(Function):
    """Parameter that was shared, for an operation on whole tensors among others on rows."""

    @staticmethod
    def forward(ctx: Any, session: ScriptRun, parameter: torch.Tensor) -> torch.Tensor:
        ctx.session = session
        return parameter.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, (
            FirstSummand.apply(ctx.session, gradient) if _tracks([gradient]) else _first(ctx.session, gradient)
        )


class FirstSummand(Function):
    """Summand of this rank, where the sum is known: all of it on rank 0, and zero elsewhere."""

    @staticmethod
    def forward(ctx: Any, session: ScriptRun, gradient: torch.Tensor) -> torch.Tensor:
        return _first(session, gradient)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, gradient


def _first(session: ScriptRun, gradient: torch.Tensor) -> torch.Tensor:
    if isinstance(gradient, PendingSum) and gradient.cell.is_pending:
        return gradient.local.clone()
    whole = gradient.whole() if isinstance(gradient, WholeTensor) else gradient
    return whole.clone() if session.rank == 0 else torch.zeros_like(whole)


BOUNDARIES = (Enter, Leave, SharedUse, Total, Replicate, FirstSummand)
