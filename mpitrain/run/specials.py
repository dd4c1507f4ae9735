"""Operations that a plan cannot express: random numbers, batch statistics, and losses that are weighted means.

Each function gets the session and the arguments, runs on this rank's rows, and returns results as `OnRows`, `Summand`,
or whole tensors. It raises `NoRule` to have the operation run on the gathered batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mpitrain.run.layouts import Rows
from mpitrain.run.rules import REDUCTIONS, RowLayout, layout_of, names_of, need, operations_named

if TYPE_CHECKING:
    from mpitrain.run.session import ScriptRun


@dataclass(frozen=True)
class OnRows:
    """Result of which this rank has rows along `at`."""

    local: torch.Tensor
    at: int
    rows: Rows


@dataclass(frozen=True)
class Summand:
    """Result that is the sum over the ranks."""

    local: torch.Tensor


Special = Callable[["ScriptRun", Any, tuple[Any, ...], dict[str, Any]], Any]
SPECIALS: dict[Any, Special] = {}


def _special(names: str) -> Callable[[Special], Special]:
    def enter(function: Special) -> Special:
        SPECIALS.update(dict.fromkeys(operations_named(names), function))
        return function

    return enter


def _rows_of(x: Any, rows: Rows) -> torch.Tensor:
    """Return this rank's rows of a tensor, which may be a batch that is divided in the same way."""
    if layout_of(x) is None:
        return rows.cut(x, 0)
    need(x.division.at == 0 and x.division.rows is rows)
    local: torch.Tensor = x.local
    return local


def _whole_like(x: Any) -> torch.Tensor:
    layout: RowLayout = x.division
    return torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device=x.local.device)


@_special("bernoulli_ normal_ uniform_ random_ exponential_ log_normal_ cauchy_ geometric_")
def _draw_in_place(session: ScriptRun, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw for the whole batch, as one process does, and keep this rank's rows."""
    x = args[0]
    need(layout_of(x) is not None and all(layout_of(y) is None for y in args[1:]))
    session.crossings += 1
    whole = func(_whole_like(x), *args[1:], **kwargs)
    x.local.copy_(x.division.rows.cut(whole, x.division.at))
    x.record_write()
    return x


@_special("rand_like randn_like randint_like")
def _draw_like(session: ScriptRun, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw for the whole batch, and return this rank's rows."""
    layout: RowLayout = args[0].division
    session.crossings += 1
    whole = func(_whole_like(args[0]), *args[1:], **kwargs)
    return OnRows(layout.rows.cut(whole, layout.at).clone(), layout.at, layout.rows)


@_special("native_dropout.default")
def _dropout(session: ScriptRun, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw the mask for the whole batch, as one process does, and apply this rank's rows of it."""
    x, *options = args
    layout: RowLayout = x.division
    session.crossings += 1
    scaled, mask = (layout.rows.cut(y, layout.at) for y in func(_whole_like(x).fill_(1), *options, **kwargs))
    return OnRows(x.local * scaled, layout.at, layout.rows), OnRows(mask.clone(), layout.at, layout.rows)


@_special("nll_loss_forward.default nll_loss2d_forward.default")
def _nll_loss(session: ScriptRun, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the loss and the total weight of the whole batch, in one message."""
    values = names_of(func, args, kwargs)
    x, target, weight, ignored = (values[n] for n in ("self", "target", "weight", "ignore_index"))
    need(layout_of(x) is not None and x.division.at == 0 and layout_of(weight) is None)
    rows: Rows = x.division.rows
    target = _rows_of(target, rows)
    if values["reduction"] == REDUCTIONS["none"]:
        loss, total = func(x.local, target, weight, 0, ignored)
        return OnRows(loss, 0, rows), total
    loss, total = session.sum(torch.stack(func(x.local, target, weight, REDUCTIONS["sum"], ignored))).unbind()
    return (loss / total if values["reduction"] == REDUCTIONS["mean"] else loss.clone()), total.clone()


@_special("native_batch_norm.default")
def _batch_norm(session: ScriptRun, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Normalize with the means and variances of the whole batch, which travel in one message.

    The moments of the ranks are combined as by Chan, Golub and LeVeque (1979), which does not lose digits.
    """
    values = names_of(func, args, kwargs)
    x, weight, bias, eps = (values[n] for n in ("input", "weight", "bias", "eps"))
    need(layout_of(x) is not None and x.division.at == 0 and x.dim() > 1)
    need(all(layout_of(y) is None for y in (weight, bias)))
    rows: Rows = x.division.rows
    need(min(rows.counts) > 0)
    if not values["training"]:
        out = func(x.local, weight, bias, values["running_mean"], values["running_var"], False, values["momentum"], eps)
        return OnRows(out[0], 0, rows), out[1], out[2]
    wide = torch.promote_types(x.dtype, torch.float32)
    local = x.local.to(wide)
    dims, channels = [d for d in range(x.dim()) if d != 1], x.shape[1]
    total = x.numel() // channels
    mean = local.mean(dims)
    spread = local.sub(_broadcast(mean, x.dim())).square_().sum(dims)
    parts = session.gather(torch.stack([mean, spread]).unsqueeze(0), 0, session.layouts.rows((1,) * session.size))
    numbers = torch.tensor(rows.counts, dtype=wide, device=x.device).unsqueeze(1) * (total // rows.total)
    mean = (parts[:, 0] * numbers).sum(0) / total
    spread = (parts[:, 1] + numbers * (parts[:, 0] - mean).square()).sum(0)
    variance = spread / total
    momentum = values["momentum"]
    for running, new in ((values["running_mean"], mean), (values["running_var"], spread / max(total - 1, 1))):
        if running is not None:
            running.mul_(1 - momentum).add_(new.to(running.dtype), alpha=momentum)
    kind = weight.dtype if weight is not None else x.dtype
    out = func(x.local, weight, bias, mean.to(kind), variance.to(kind), False, 0.0, eps)[0]
    return OnRows(out, 0, rows), mean, (variance + eps).rsqrt()


@_special("native_batch_norm_backward.default")
def _batch_norm_backward(session: ScriptRun, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the gradients of a batch norm over the whole batch; two sums travel in one message."""
    values = names_of(func, args, kwargs)
    x, grad, weight = values["input"], values["grad_out"], values["weight"]
    need(layout_of(x) is not None and x.division.at == 0)
    rows: Rows = x.division.rows
    need(min(rows.counts) > 0)  # torch divides by zero where a rank has no rows
    g = _rows_of(grad, rows)
    if not values["train"]:
        names = ("running_mean", "running_var", "save_mean", "save_invstd", "train", "eps", "output_mask")
        out = func(g, x.local, weight, *(values[n] for n in names))
        return OnRows(out[0], 0, rows), *(y if y is None or not y.numel() else Summand(y) for y in out[1:])
    total, wide = x.numel() // x.shape[1], torch.promote_types(x.dtype, torch.float32)
    mean, inverse = values["save_mean"].to(wide), values["save_invstd"].to(wide)
    local, g = x.local.to(wide), g.to(wide)
    # the sums of g and of g * (x - mean): the gradients of a norm with this mean and the variance 1
    sums = func(g, local, None, mean, torch.ones_like(mean), None, None, False, 0.0, [False, True, True])[1:]
    of_weight, of_bias = session.sum(torch.stack(sums)).unbind()
    of_weight = of_weight * inverse
    scale = inverse if weight is None else inverse * weight.to(wide)
    out = local.sub(_broadcast(mean, x.dim()))  # all in one memory, because new memory costs more than the arithmetic
    out.mul_(_broadcast(of_weight * inverse / -total, x.dim())).add_(g)
    out.sub_(_broadcast(of_bias / total, x.dim())).mul_(_broadcast(scale, x.dim()))
    kind = weight.dtype if weight is not None else x.dtype
    return OnRows(out.to(x.dtype), 0, rows), of_weight.to(kind, copy=True), of_bias.to(kind, copy=True)


def _broadcast(x: torch.Tensor, dims: int) -> torch.Tensor:
    """Return values of channels in the shape in which they broadcast to a batch of `dims` dimensions."""
    return x.view([1, -1] + [1] * (dims - 2))
