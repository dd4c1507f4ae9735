"""Plans of operations: which part of each argument a rank takes, and what its results are of the whole ones.

A planner is a pure function of an operation and the shapes and layouts of its arguments. It raises `NoRule` where an
operation mixes rows in a way that it does not know; the operation then runs on the gathered batch. Whether it does so
depends on shapes alone, so all ranks decide alike.

| result | example | outcome |
|---|---|---|
| has rows | `x @ w` | `RowsOutcome`: this rank's rows of it |
| reduces the rows | `x.sum(0)`, `grad_output.T @ x` | `SUMMAND`: its sum over the ranks |
| neither | `x.new_zeros(3)` | `WHOLE`: equal on every rank |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from mpitrain.run.layouts import RowLayout, Rows

aten = torch.ops.aten
LOCAL, AS_IS = "local", None  # parts of arguments; others are `RowsPart` and `Constant`
SUMMAND, WHOLE = "summand", None  # outcomes; the other one is `RowsOutcome`
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


class NoRule(Exception):
    """Absence of a rule for an operation with these arguments."""


@dataclass(frozen=True)
class RowsPart:
    """Part of a whole argument: this rank's rows along `dim`."""

    dim: int
    rows: Rows


@dataclass(frozen=True)
class Constant:
    """Value that replaces an argument, such as a shape."""

    value: Any


@dataclass(frozen=True)
class RowsOutcome:
    """Result of which this rank has rows along `at`."""

    at: int
    rows: Rows


@dataclass(frozen=True)
class OperationPlan:
    """Way in which a rank performs an operation on its rows.

    Attributes:
        function: Function to call with the parts of the arguments; None: run the operation on the gathered batch.
        parts: Part of each positional argument to take; a list for an argument that is a list.
        named_parts: Part of each keyword argument to take.
        outcomes: Outcome of each result, in order.
        in_place: True if the operation writes into its first argument and returns it.
        shares: True if the result is a view of the first argument.
        cuts: True if it takes this rank's rows of whole arguments.
    """

    function: Callable[..., Any] | None
    parts: Sequence[Any] = ()
    named_parts: dict[str, Any] | None = None
    outcomes: Sequence[RowsOutcome | str | None] = ()
    in_place: bool = False
    shares: bool = False
    cuts: bool = field(init=False)

    def __post_init__(self) -> None:
        parts = tree_flatten([self.parts, self.named_parts])[0]
        object.__setattr__(self, "cuts", any(isinstance(part, RowsPart) for part in parts))


Planner = Callable[[Any, tuple[Any, ...], dict[str, Any]], OperationPlan]
PLANNERS: dict[Any, Planner] = {}
GATHER = OperationPlan(None)


def operations_named(names: str) -> Iterator[Any]:
    """Yield the operations of ATen with these names, in all overloads of a name that gives none.

    Args:
        names: Names separated by spaces.
    """
    for name in names.split():
        packet, _, overload = name.partition(".")
        overloads = getattr(aten, packet)
        yield from (getattr(overloads, each) for each in ([overload] if overload else overloads.overloads()))


def rule(names: str) -> Callable[[Planner], Planner]:
    """Return a decorator that enters a planner for operations of aten.

    Args:
        names: Names separated by spaces; a name without an overload stands for all of them.
    """

    def enter(planner: Planner) -> Planner:
        PLANNERS.update(dict.fromkeys(operations_named(names), planner))
        return planner

    return enter


def plan(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OperationPlan:
    """Return the plan of an operation; `GATHER` if there is no rule.

    Args:
        func: Operation.
        args: Positional arguments, of which some tensors have a `division`.
        kwargs: Keyword arguments.
    """
    planner = PLANNERS.get(func)
    if planner is None and torch.Tag.nondeterministic_seeded in func.tags:
        return GATHER  # every rank draws for the whole batch
    if planner is None and torch.Tag.pointwise in func.tags and func is not aten.equal.default:
        planner = _pointwise
    try:
        return planner(func, args, kwargs) if planner is not None else GATHER
    except NoRule:
        return GATHER


# -- parts of arguments


def need(condition: bool) -> None:
    """Raise NoRule unless a condition of the rule holds."""
    if not condition:
        raise NoRule


def layout_of(x: Any) -> RowLayout | None:
    """Return the layout of a tensor that is divided by rows, or None."""
    return getattr(x, "division", None) if isinstance(x, torch.Tensor) and type(x) is not torch.Tensor else None


def lead_of(values: Iterable[Any]) -> Any:
    """Return the first tensor that is divided by rows."""
    return next(x for x in values if layout_of(x) is not None)


def part_along(x: Any, dim: int, rows: Rows) -> Any:
    """Return the part of a tensor to take: a divided one must be divided along `dim` by the same rows.

    Args:
        x: Tensor.
        dim: Dimension that is divided.
        rows: Division of that dimension.
    """
    layout = layout_of(x)
    if layout is None:
        need(x.shape[dim] == rows.total)
        return RowsPart(dim, rows)
    need(layout.at == dim and layout.rows is rows)
    return LOCAL


def names_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operation by their names in its schema.

    Args:
        func: Operation.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """
    return dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs


def aliases(func: Any) -> bool:
    """Return whether an operation returns views of an argument."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def _apply(part: Any, x: Any) -> Any:
    """Return the meta tensor of this rank's part of an argument."""
    if isinstance(part, list):
        return [_apply(p, y) for p, y in zip(part, x, strict=True)]
    if isinstance(part, Constant):
        return part.value
    if isinstance(part, RowsPart):
        return part.rows.cut(_meta(x), part.dim)
    if part == LOCAL:
        local = x.local
        return torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device="meta")
    return tree_map(_meta, x)


def _meta(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def by_shape(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    parts: Sequence[Any],
    named_parts: dict[str, Any] | None = None,
    function: Callable[..., Any] | None = None,
) -> OperationPlan:
    """Return a plan whose outcomes follow from shapes: a result that is smaller here has rows, another is a summand.

    Only for operations that treat rows alike or add over them.

    Args:
        func: Operation.
        args: Positional arguments.
        kwargs: Keyword arguments.
        parts: Part of each positional argument.
        named_parts: Part of each keyword argument.
        function: Function to call instead of the operation.
    """
    rows = layout_of(lead_of(tree_flatten((args, kwargs))[0])).rows  # type: ignore[union-attr]
    named_parts = named_parts or {}
    try:
        whole = func(*tree_map(_meta, args), **tree_map(_meta, kwargs))
        local = (function or func)(
            *[_apply(p, x) for p, x in zip(parts, args, strict=True)],
            **{name: _apply(named_parts.get(name), x) for name, x in kwargs.items()},
        )
    except (RuntimeError, NotImplementedError, TypeError, IndexError, ValueError):
        raise NoRule from None  # it then runs on whole tensors, where an error of the script is raised
    wholes, locals_ = tree_flatten(whole)[0], tree_flatten(local)[0]
    need(len(wholes) == len(locals_))
    return OperationPlan(
        function or func, parts, named_parts, [_outcome(w, y, rows) for w, y in zip(wholes, locals_, strict=True)],
        shares=aliases(func),
    )  # fmt: skip


def _outcome(whole: Any, local: Any, rows: Rows) -> RowsOutcome | str | None:
    if not isinstance(whole, torch.Tensor):
        return WHOLE
    need(whole.dim() == local.dim())
    smaller = [d for d in range(whole.dim()) if whole.shape[d] != local.shape[d]]
    if not smaller:
        return SUMMAND
    need(len(smaller) == 1 and whole.shape[smaller[0]] == rows.total)
    return RowsOutcome(smaller[0], rows)


# -- elements


@rule(
    "copy_ fill_ zero_ _to_copy masked_fill_ softplus softplus_backward leaky_relu_ leaky_relu_backward alias detach "
    "detach_ clone zeros_like ones_like empty_like full_like hardtanh_backward elu_backward lift_fresh relu_ gelu_ "
    "native_dropout_backward _pin_memory"
)
def _pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OperationPlan:
    """Plan an operation on single elements, with broadcasting."""
    in_place = func._schema.is_mutable
    need(not in_place or (bool(args) and layout_of(args[0]) is not None))
    lead = layout_of(lead_of((*args, *kwargs.values())))
    assert lead is not None
    end = lead.at - len(lead.shape)  # the divided dimension, counted from the last
    parts = [_element_part(x, end, lead.rows) for x in args]
    dims = max(x.dim() for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
    return OperationPlan(
        func,
        parts,
        {name: _element_part(x, end, lead.rows) for name, x in kwargs.items()},
        [RowsOutcome(dims + end, lead.rows)],
        in_place=in_place,
        shares=aliases(func),
    )


PLANNERS.update(dict.fromkeys(operations_named("_prelu_kernel"), _pointwise))  # without torch's tag


@rule("_prelu_kernel_backward")
def _prelu_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OperationPlan:
    """Plan the gradients of the input and, before it is summed, of the weight."""
    plan = _pointwise(func, args, kwargs)
    return replace(plan, outcomes=[*plan.outcomes, *plan.outcomes])


def _element_part(x: Any, end: int, rows: Rows) -> Any:
    """Return the part of an operand that broadcasts; `end` is the divided dimension, counted from the last."""
    if not isinstance(x, torch.Tensor):
        return AS_IS
    if layout_of(x) is not None:
        return part_along(x, x.dim() + end, rows)
    if x.dim() < -end or x.shape[end] == 1:
        return AS_IS
    return part_along(x, x.dim() + end, rows)


@rule("new_zeros new_ones new_full new_empty")
def _creation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OperationPlan:
    """Plan the creation of a whole tensor with the type of a divided one."""
    return OperationPlan(func, [LOCAL] + [AS_IS] * (len(args) - 1), {}, [WHOLE])


@rule(
    "mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits soft_margin_loss "
    "mse_loss_backward smooth_l1_loss_backward huber_loss_backward binary_cross_entropy_backward "
    "soft_margin_loss_backward"
)
def _element_loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OperationPlan:
    """Plan a loss that is a sum or a mean over elements, and its backward."""
    need(not kwargs and "out" not in str(func._overloadname) and "grad_input" not in str(func._overloadname))
    names = [a.name for a in func._schema.arguments]
    defaults = [a.default_value for a in func._schema.arguments]
    place = names.index("reduction")
    reduction = args[place] if len(args) > place else defaults[place]
    lead = layout_of(lead_of(args))
    assert lead is not None
    end, n = lead.at - len(lead.shape), math.prod(lead.shape)
    parts = [_element_part(x, end, lead.rows) for x in args]
    need(all(x.shape == lead.shape for x in args[:2] if isinstance(x, torch.Tensor) and x.dim()))
    backward = names[0] == "grad_output"
    if reduction == REDUCTIONS["none"]:
        return OperationPlan(func, parts, {}, [RowsOutcome(lead.at, lead.rows)])
    divisor = n if reduction == REDUCTIONS["mean"] else 1

    def total(*values: Any) -> Any:
        values = (*values, *defaults[len(values) :])
        values = (*values[:place], REDUCTIONS["sum"], *values[place + 1 :])
        if backward:
            return func(values[0] / divisor, *values[1:])
        return func(*values) / divisor

    return OperationPlan(total, parts, {}, [RowsOutcome(lead.at, lead.rows) if backward else SUMMAND])


# -- products


def _product(pattern: str) -> Planner:
    """Return a planner for a product such as "ij,jk": whatever has the letter of the divided dimension is cut."""
    inputs = pattern.split(",")

    def planner(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OperationPlan:
        number, lead = next((i, layout) for i, x in enumerate(args) if (layout := layout_of(x)) is not None)
        letter = inputs[number][lead.at]
        parts: list[Any] = []
        for x, letters in zip(args, inputs, strict=True):
            need(letter in letters or layout_of(x) is None)
            parts.append(part_along(x, letters.index(letter), lead.rows) if letter in letters else AS_IS)
        return by_shape(func, args, kwargs, parts)

    return planner


for _name, _pattern in {
    "mm.default": "ij,jk",
    "bmm.default": "bij,bjk",
    "mv.default": "ij,j",
    "dot.default": "i,i",
}.items():
    rule(_name)(_product(_pattern))


@rule("addmm.default baddbmm.default")
def _product_and_sum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OperationPlan:
    """Plan bias + a @ b where the rows are rows of the result."""
    bias, a, b = args
    lead = layout_of(lead_of((a, b)))
    assert lead is not None
    batched = func is aten.baddbmm.default
    need(layout_of(a) is lead and lead.at == 0 and (batched or layout_of(b) is None))
    end = -a.dim()
    parts = [_element_part(bias, end, lead.rows), LOCAL, part_along(b, 0, lead.rows) if batched else AS_IS]
    return by_shape(func, args, kwargs, parts)


# -- samples that do not see each other

_SAMPLES = {
    "self", "input", "grad_output", "grad_out", "grad", "mean", "rstd", "query", "key", "value", "out", "logsumexp",
    "indices", "target", "buffer",
}  # fmt: skip


@rule(
    "convolution convolution_backward native_layer_norm native_layer_norm_backward max_pool2d_with_indices "
    "max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d "
    "_adaptive_avg_pool2d_backward upsample_nearest2d upsample_nearest2d_backward upsample_bilinear2d "
    "upsample_bilinear2d_backward constant_pad_nd _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_flash_attention_for_cpu_backward embedding embedding_dense_backward nll_loss_backward "
    "nll_loss2d_backward native_group_norm native_group_norm_backward reflection_pad2d glu glu_backward "
    "log_sigmoid_forward log_sigmoid_backward avg_pool3d"
)
def _samples(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OperationPlan:
    """Plan an operation on samples that do not see each other; the first dimension is the batch."""
    layout = layout_of(lead_of(tree_flatten((args, kwargs))[0]))
    assert layout is not None
    name, rows = func._schema.name.removeprefix("aten::"), layout.rows

    def part(argument: str, x: Any) -> Any:
        if argument in ("N", "input_size", "input_sizes", "self_size"):
            return Constant(rows.length if argument == "N" else [rows.length, *x[1:]])
        if not isinstance(x, torch.Tensor) or (layout_of(x) is None and (not x.numel() or not x.dim())):
            return AS_IS
        divided = argument in _SAMPLES or (argument == "attn_mask" and x.dim() == 4 and x.shape[0] > 1)
        need(divided or layout_of(x) is None)
        return part_along(x, 0, rows) if divided else AS_IS

    shape = layout.shape
    if name == "embedding":
        values = names_of(func, args, kwargs)
        need(not values.get("scale_grad_by_freq") and not values.get("sparse"))  # these count, or list, the whole batch
    if name == "embedding_dense_backward":
        need(not names_of(func, args, kwargs)["scale_grad_by_freq"])
    if name == "constant_pad_nd":
        need(len(args[1]) < len(shape) * 2)
    if name.startswith("native_layer_norm"):
        need(len(names_of(func, args, kwargs)["normalized_shape"]) < len(shape))
    if name.startswith("glu"):
        need(names_of(func, args, kwargs).get("dim", -1) % len(shape) != 0)
    if name in ("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d", "reflection_pad2d"):
        need(len(shape) == 4)
    if name == "avg_pool3d":
        need(len(shape) == 5)
    names = [a.name for a in func._schema.arguments]
    parts = [part(argument, x) for argument, x in zip(names, args, strict=False)]
    return by_shape(func, args, kwargs, parts, {argument: part(argument, x) for argument, x in kwargs.items()})


# -- dimensions


@rule(
    "sum mean amax amin max.default min.default max.dim min.dim argmax argmin any all var.correction std.correction "
    "linalg_vector_norm prod logsumexp _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data "
    "_safe_softmax cumsum cumprod sort topk flip gather scatter_add index_select slice_backward select_backward cat "
    "stack scatter.src scatter.value"
)
def _along(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OperationPlan:
    """Plan an operation along dimensions: on the rows if the batch is none of them, else a sum or a mean over ranks."""
    name, values = func._schema.name.removeprefix("aten::"), names_of(func, args, kwargs)
    lead = lead_of(tree_flatten(args)[0])
    layout: RowLayout = lead.division
    n = len(values["input_sizes"]) if "input_sizes" in values else lead.dim() + (name == "stack")
    default = -1 if name in ("topk", "sort") else 0 if name in ("cat", "stack") else None
    dim = values.get("dim", values.get("dims", default))
    if dim is None or dim == [] or dim == ():
        dims = list(range(n))
    else:
        dims = [d % max(n, 1) for d in (dim if isinstance(dim, (list, tuple)) else [dim])]
    at = layout.at
    if name in ("select_backward", "stack") and at >= dims[0]:
        at += 1
    if at not in dims:
        parts = [_along_part(x, lead, layout) for x in args]
        if "input_sizes" in values:
            parts[1] = Constant([layout.rows.length if d == at else m for d, m in enumerate(args[1])])
        return by_shape(func, args, kwargs, parts)
    need(name in ("sum", "mean") and layout_of(args[0]) is not None)
    divisor = math.prod(layout.shape[d] for d in dims) if name == "mean" else 1

    def total(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        if name == "mean":
            kind = values.get("dtype") or x.dtype
            wide = torch.promote_types(kind, torch.float32)  # where the sum of a mean in half precision would overflow
            out = aten.sum.dim_IntList(x, dims, values.get("keepdim", False), dtype=wide) / divisor
            return out.to(kind)
        return aten.sum.dim_IntList(x, dims, values.get("keepdim", False), dtype=values.get("dtype"))

    return OperationPlan(total, [LOCAL] + [AS_IS] * (len(args) - 1), {}, [SUMMAND])


def _along_part(x: Any, lead: Any, layout: RowLayout) -> Any:
    if isinstance(x, (list, tuple)) and any(isinstance(y, torch.Tensor) for y in x):
        return [_along_part(y, lead, layout) for y in x]
    if not isinstance(x, torch.Tensor):
        return AS_IS
    if x.dim() == lead.dim():
        return part_along(x, layout.at, layout.rows)
    need(layout_of(x) is None)
    return AS_IS


@rule("index.Tensor")
def _index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OperationPlan:
    """Plan x[indices] where the rows of x are not indexed, or only the indices of a whole x are divided."""
    x, indices = args
    need(all(i is None or i.dtype not in (torch.bool, torch.uint8) for i in indices))
    layout = layout_of(x)
    if layout is not None:
        need(all(layout_of(i) is None for i in indices if i is not None))
        need(layout.at >= len(indices) or indices[layout.at] is None)
        return by_shape(func, args, kwargs, [LOCAL, AS_IS])
    tensors = [i for i in indices if i is not None]
    lead = layout_of(lead_of(tensors))
    assert lead is not None
    end = lead.at - max(i.dim() for i in tensors)
    parts = [None if i is None else _element_part(i, end, lead.rows) for i in indices]
    need(len(lead.shape) == max(i.dim() for i in tensors))
    return by_shape(func, args, kwargs, [AS_IS, parts])


# -- views


@rule("view.default _unsafe_view reshape _reshape_alias expand.default")
def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OperationPlan:
    """Plan another shape, if each rank's rows stay together in it."""
    x, shape = args[0], list(args[1])
    layout: RowLayout = x.division
    rows = layout.rows
    rest = [AS_IS] * (len(args) - 2)
    if func is aten.expand.default:
        at = layout.at + len(shape) - x.dim()
        need(shape[at] in (-1, rows.total))
        local = [rows.length if d == at else m for d, m in enumerate(shape)]
        return OperationPlan(func, [LOCAL, Constant(local), *rest], {}, [RowsOutcome(at, rows)], shares=True)
    if -1 in shape:
        shape[shape.index(-1)] = math.prod(layout.shape) // max(-math.prod(shape), 1)
    before, after = math.prod(layout.shape[: layout.at]), math.prod(layout.shape[layout.at + 1 :])
    for d in range(len(shape)):
        inner = math.prod(shape[d + 1 :])
        if math.prod(shape[:d]) == before and inner and all(n * after % inner == 0 for n in rows.counts):
            counts = tuple(n * after // inner for n in rows.counts)
            if sum(counts) == shape[d]:
                merged = x.session.layouts.rows(counts)
                local = [*shape[:d], merged.length, *shape[d + 1 :]]
                outcome = [RowsOutcome(d, merged)]
                # `view` fails where this rank's memory is not dense, and then a copy is what one process gets, too
                return OperationPlan(_reshape, [LOCAL, Constant(local), *rest], {}, outcome, shares=aliases(func))
    raise NoRule


@rule("repeat")
def _repeat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OperationPlan:
    """Plan copies along dimensions that are not divided."""
    x, repeats = args
    at = x.division.at + len(repeats) - x.dim()
    need(repeats[at] == 1)
    return OperationPlan(func, [LOCAL, Constant(list(repeats))], {}, [RowsOutcome(at, x.division.rows)])


def _reshape(x: torch.Tensor, shape: list[int], *_: Any) -> torch.Tensor:
    return x.reshape(shape)


@rule(
    "t transpose.int permute unsqueeze squeeze select.int slice.Tensor split.Tensor split_with_sizes "
    "unsafe_split.Tensor unbind.int"
)
def _moved(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OperationPlan:
    """Plan views that move, add or drop dimensions other than the rows."""
    x, name = args[0], func._schema.name.removeprefix("aten::")
    layout: RowLayout = x.division
    values = names_of(func, args, kwargs)
    dim = values.get("dim", 0)
    if name in ("select", "slice", "split", "split_with_sizes", "unsafe_split", "unbind"):
        start, end, step = values.get("start") or 0, values.get("end"), values.get("step", 1)
        everything = name == "slice" and start == 0 and step == 1 and (end is None or end >= layout.rows.total)
        need(dim % x.dim() != layout.at or everything)
    if name == "squeeze":
        dims = range(x.dim()) if len(args) < 2 else args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
        dims = [d % x.dim() for d in dims if layout.shape[d] == 1]
        need(layout.at not in dims)
        args = (x, dims)
        plan_ = by_shape(aten.squeeze.dims, args, {}, [LOCAL, Constant(dims)])
        return OperationPlan(
            lambda y, *_: aten.squeeze.dims(y, dims), [LOCAL] + [AS_IS] * (len(names_of(func, args, kwargs)) - 1),
            {}, plan_.outcomes, shares=True,
        )  # fmt: skip
    return by_shape(func, args, kwargs, [LOCAL] + [AS_IS] * (len(args) - 1))


__all__ = ["GATHER", "NoRule", "OperationPlan", "plan", "tree_unflatten"]
