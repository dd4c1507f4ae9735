"""Tensors that are whole to a script while ranks hold parts of them, and the dispatch of operations on them.

    class             this rank holds                       read as a whole by
    BatchTensor       its rows                              gathering the rows
    PendingSum        its summand of a parameter gradient   one sum of all that are pending
    BatchView         nothing: a view across ranks' rows    gathering the batch that it is a view of
    ShardedParameter  nothing, unless it is the owner       getting it from its owner (`parameters.py`)

A `BatchView` arises where a script indexes the rows, as in x[0]. It is gathered again if the batch was written in the
meantime, and what is written to it goes to the rows of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from mpitrain.run.checks import have_same_bits
from mpitrain.run.layouts import BatchMemory, RowLayout
from mpitrain.run.pending import Cell
from mpitrain.run.rules import (
    AS_IS,
    GATHER,
    LOCAL,
    SUMMAND,
    Constant,
    NoRule,
    OperationPlan,
    RowsOutcome,
    RowsPart,
    aliases,
    aten,
    plan,
)
from mpitrain.run.session import ScriptRun
from mpitrain.run.specials import SPECIALS, OnRows, Summand

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_MOST_PLANS = 20_000
_NUMBER_WIDTH = 7  # len("tensor("), by which torch indents


class WholeTensor(torch.Tensor):
    """Base class of tensors of which a rank holds a part.

    Attributes:
        session: Run that the tensor belongs to.
        local: Part of this rank.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    session: ScriptRun
    local: torch.Tensor

    def whole(self) -> torch.Tensor:
        """Return the whole tensor, to be read only. Collective. Derived classes define it."""
        raise NotImplementedError

    def aliased(self, func: Any, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the views that an operation takes of this tensor, or None if it takes them of the whole tensor.

        Args:
            func: Operation of aten that returns views of its first argument.
            rest: Other positional arguments.
            kwargs: Keyword arguments.
        """
        return None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return dispatch(func, args, kwargs or {})

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if isinstance(self, BatchView):
            raise RuntimeError("mpitrain.run: x.data = y for a view across rows of a batch is lost; use x.copy_(y)")
        self.detach().copy_(value)

    def numpy(self, **options: Any) -> np.ndarray:  # a copy that cannot be written, as writes would be lost
        array = self.whole().clone().numpy(**options)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        return self.whole().tolist()

    def __dlpack__(self, **options: Any) -> Any:
        return self.whole().clone().__dlpack__(**options)

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the memory of a copy; `storage()` reads it."""
        return self.whole().clone().untyped_storage()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.numpy(force=True), dtype, copy=copy)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        text = repr(self.whole().detach())
        suffix = f"grad_fn=<{type(self.grad_fn).__name__}>" if self.grad_fn is not None else ""
        suffix = suffix or ("requires_grad=True" if self.requires_grad else "")
        if not suffix:
            return text
        last = len(text) - text.rfind("\n") - 1
        is_wide = last + len(suffix) + 2 > torch._tensor_str.PRINT_OPTS.linewidth
        separator = ",\n" + " " * _NUMBER_WIDTH if is_wide else ", "
        return f"{text[:-1]}{separator}{suffix})"

    def __format__(self, spec: str) -> str:
        if self.dim() == 0:
            return format(self.whole().item(), spec)
        return repr(self) if not spec else format(self.whole(), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole().clone().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.clone()

    def apply_(self, function: Callable[[float], float]) -> torch.Tensor:
        return self.copy_(self.whole().clone().apply_(function))

    def data_ptr(self) -> int:
        raise RuntimeError("mpitrain.run: a batch lies on several ranks and has no address; copy it with numpy()")


class BatchTensor(WholeTensor):
    """Batch that is whole to the script, and of which this rank holds rows.

    Attributes:
        division: Whole shape, and the dimension that is divided.
        memory: BatchMemory that views of the batch share.
    """

    division: RowLayout
    memory: BatchMemory
    _copy: torch.Tensor | None

    def __new__(
        cls, session: ScriptRun, local: torch.Tensor, layout: RowLayout, memory: BatchMemory | None = None
    ) -> BatchTensor:
        self = torch.Tensor._make_wrapper_subclass(
            cls, layout.shape, strides=layout.strides, dtype=layout.dtype, device=local.device
        )
        self.session, self.local, self.division, self.memory = session, local, layout, memory or BatchMemory()
        self._copy, self._copied_at = None, -1
        if session.results is not None:
            session.results.append(self)
        return self

    @WholeTensor.data.setter  # type: ignore[attr-defined]
    def data(self, value: torch.Tensor) -> None:
        """Replace the content, which torch does for memory alone. Views keep the one that they were taken of."""
        if type(value) is not BatchTensor:
            whole = value.whole() if isinstance(value, WholeTensor) else value
            at, rows, shape = self.division.at, self.division.rows, tuple(whole.shape)
            if shape[at : at + 1] != (rows.total,):
                raise RuntimeError(f"mpitrain.run: x.data = y for a batch needs a y of {rows.total} rows, not {shape}")
            local = rows.cut(whole.detach(), at).clone()
            value = BatchTensor(self.session, local, self.session.layouts.of(local, at, rows))
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.local, self.division, self.memory, self._copy = value.local, value.division, value.memory, None

    def whole(self) -> torch.Tensor:
        """Return the gathered batch, to be read only. Collective."""
        if self.memory.arrays:
            self.read_arrays()
        if self._copy is not None and self._copied_at == self.memory.version:
            return self._copy
        gathered = self.session.gather(self.local.detach(), self.division.at, self.division.rows)
        if gathered.stride() == self.division.strides:
            return gathered
        shaped = gathered.new_empty_strided(self.division.shape, self.division.strides)
        distinct = tuple(slice(0, 1) if n == 0 else slice(None) for n in self.division.strides)  # of an expanded batch
        shaped[distinct].copy_(gathered[distinct])
        return shaped

    def numpy(self, **options: Any) -> np.ndarray:  # each follows writes to the other. Collective
        return self.followed().numpy(**options)

    def followed(self) -> torch.Tensor:
        """Return the gathered batch as the memory of an array, which the script may write. Collective."""
        copy = self.viewed()
        if not any(each is copy for _, _, each, _ in self.memory.arrays):
            self.memory.arrays.append((self.local.detach(), self.division, copy, copy.clone()))
        return copy

    def read_arrays(self) -> None:
        """Take what the script has written to arrays of the batch, on all ranks alike. Collective if it has."""
        for local, layout, array, before in self.memory.arrays:
            if not have_same_bits(array, before):
                local.copy_(layout.rows.cut(array, layout.at))
                self.record_write()

    def viewed(self) -> torch.Tensor:
        """Return the gathered batch, and keep it for views of it. Collective."""
        copy = self._copy = self.whole()
        self._copied_at = self.memory.version
        return copy

    def store(self, whole: torch.Tensor) -> None:
        """Take this rank's rows from a whole tensor that was written."""
        self.local.copy_(self.division.rows.cut(whole, self.division.at))
        self.record_write()
        if whole is self._copy:
            self._copied_at = self.memory.version

    def record_write(self) -> None:
        """Record that this rank's rows were written, and let arrays follow. Collective if there are any."""
        self.memory.write()
        for local, layout, array, before in self.memory.arrays:
            before.copy_(array.copy_(self.session.gather(local, layout.at, layout.rows)))
        if self.memory.origin is not None:
            raise RuntimeError("mpitrain.run: the model writes into its input; pass it a copy (x.clone())")


class PendingSum(WholeTensor):
    """Sum over the ranks that is exchanged when somebody reads it, in one message with all others that are pending."""

    cell: Cell
    views: tuple[tuple[Any, tuple[Any, ...]], ...]

    def __new__(cls, session: ScriptRun, cell: Cell, views: tuple[tuple[Any, tuple[Any, ...]], ...] = ()) -> PendingSum:
        like = _view(cell.local if cell.layout is None else cell.layout, views)
        self = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=cell.local.device
        )
        self.session, self.cell, self.views = session, cell, views
        return self

    @property
    def local(self) -> torch.Tensor:  # type: ignore[override]
        return _view(self.cell.local, self.views)

    def whole(self) -> torch.Tensor:
        """Return the sum. Collective if it is pending."""
        if self.cell.is_pending and self.cell.owner is None:
            self.session.sums.settle()
        if self.cell.owner is not None:
            self.session.sums.spread(self.cell)
        return self.local


def _view(x: torch.Tensor, views: tuple[tuple[Any, tuple[Any, ...]], ...]) -> torch.Tensor:
    for func, args in views:
        x = func(x, *args)
    return x


class BatchView(WholeTensor):
    """View of a batch that does not follow rows.

    Args:
        base: Batch, or another view of it.
        value: View of the gathered base.
        take: Function that takes the view of a gathered base.
    """

    base: Any
    root: BatchTensor
    memory: BatchMemory
    source: torch.Tensor
    value: torch.Tensor
    take: Callable[..., torch.Tensor]

    def __new__(
        cls, base: BatchTensor | BatchView, value: torch.Tensor, take: Callable[..., torch.Tensor]
    ) -> BatchView:
        self = torch.Tensor._make_wrapper_subclass(
            cls, value.shape, strides=value.stride(), dtype=value.dtype, device=value.device
        )
        self.session, self.base, self.take = base.session, base, take
        self.source, self.value = base.viewed(), value
        self.root = base.root if isinstance(base, BatchView) else base
        self.memory = self.root.memory
        return self

    @property
    def local(self) -> torch.Tensor:  # type: ignore[override]
        return self.whole()

    def whole(self) -> torch.Tensor:
        """Return the view of the batch as it is now. Collective if the batch was written."""
        if self.root.memory is not self.memory:
            return self.value  # the batch got another content, x.data = ...
        source = self.base.viewed()
        if source is not self.source:
            if source.shape != self.source.shape:
                raise RuntimeError("mpitrain.run: a batch changed its shape in place, so this view of it is lost")
            self.source, self.value = source, self.take(source)
        return self.value

    def numpy(self, **options: Any) -> np.ndarray:
        """Return an array of the view, see `BatchTensor.numpy`. Collective if the batch was written."""
        value = self.whole()
        if self.root.memory is self.memory:
            self.root.followed()
        return value.numpy(**options)

    viewed = whole  # for views of it

    def aliased(self, func: Any, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return views of this view."""
        return _view_of(self, func, (self, *rest), kwargs)

    def store(self) -> None:
        """Take the rows of the batch from the gathered copy, after a write to this view."""
        if self.root.memory is self.memory:
            self.root.store(self.root.viewed())


# -- dispatch


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Perform an operation of which some arguments are `WholeTensor`.

    Args:
        func: Operation of aten.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """
    key: list[Any] = [func]
    batch: BatchTensor | None = None
    for x in (*args, *kwargs, *kwargs.values()):
        kind = type(x)
        if kind is BatchTensor:
            if x.memory.arrays:
                x.read_arrays()
            key.append(x.division)
            batch = x
        elif kind in _PLAIN:
            key.append((x.dtype, x.shape))
        elif kind is float:
            key.append(float)
        elif kind is list or kind is tuple:
            for y in x:
                if type(y) is BatchTensor:
                    y.read_arrays()
                    batch = y
                elif isinstance(y, WholeTensor):
                    return _dispatch_others(func, args, kwargs)
            key.append(tuple(_key_of(y) for y in x))
        elif isinstance(x, WholeTensor):
            return _dispatch_others(func, args, kwargs)
        else:
            key.append(x if not isinstance(x, torch.Tensor) else (x.dtype, x.shape))
    assert batch is not None
    session = batch.session
    if func in SPECIALS:
        try:
            return _wrap_results(session, SPECIALS[func](session, func, args, kwargs))
        except NoRule:
            return _run_gathered(session, func, args, kwargs)
    known = tuple(key)
    prepared = session.plans.get(known)
    if prepared is None:
        if len(session.plans) > _MOST_PLANS:
            session.plans.clear()
        prepared = session.plans[known] = plan(func, args, kwargs)
    if prepared is GATHER:
        if torch.Tag.inplace_view in func.tags:
            return _reshape_in_place(batch, func, args, kwargs)
        if func._can_decompose():
            return func.decompose(*args, **kwargs)
        if func is aten.addmm.default and not kwargs:
            return aten.add.Tensor(aten.mm.default(args[1], args[2]), args[0])
        return _run_gathered(session, func, args, kwargs)
    return _run(session, prepared, args, kwargs)


def _key_of(x: Any) -> Any:
    if type(x) is BatchTensor:
        return x.division
    return (x.dtype, x.shape) if isinstance(x, torch.Tensor) else x


def _run(session: ScriptRun, prepared: OperationPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Perform an operation on this rank's rows."""
    session.crossings += prepared.cuts
    parts = [_take(part, x) for part, x in zip(prepared.parts, args, strict=True)]
    named = prepared.named_parts or {}
    out = prepared.function(  # type: ignore[misc]
        *parts, **{name: _take(named.get(name), x) for name, x in kwargs.items()}
    )
    if prepared.in_place:
        args[0].record_write()
        return args[0]
    memory = args[0].memory if prepared.shares else None
    if isinstance(out, torch.Tensor):
        return _wrap(session, out, prepared.outcomes[0], memory)
    outcomes = iter(prepared.outcomes)
    results = [_wrap(session, y, next(outcomes), memory) if y is not None else (next(outcomes), None)[1] for y in out]
    return type(out)(results) if type(out) in (list, tuple) else tuple(results)


def _take(part: Any, x: Any) -> Any:
    if part is AS_IS:
        return x
    if part is LOCAL:
        return x.local
    kind = type(part)
    if kind is RowsPart:
        return x.narrow(part.dim, part.rows.start, part.rows.length)
    if kind is Constant:
        return part.value
    return [_take(p, y) for p, y in zip(part, x, strict=True)]


def _wrap(session: ScriptRun, y: Any, outcome: Any, memory: BatchMemory | None) -> Any:
    if type(outcome) is RowsOutcome:
        return BatchTensor(session, y, session.layouts.of(y, outcome.at, outcome.rows), memory)
    return _summand(session, y) if outcome is SUMMAND else y


def _summand(session: ScriptRun, x: torch.Tensor) -> torch.Tensor:
    """Return the sum over the ranks. In a backward pass it is pending until somebody reads it."""
    if torch._C._current_graph_task_id() == -1 or not x.is_floating_point():
        return session.sum(x)
    return PendingSum(session, Cell(session, x.clone() if x._base is not None else x.contiguous()))


def _wrap_results(session: ScriptRun, results: Any) -> Any:
    if isinstance(results, tuple):
        return tuple(_wrap_results(session, y) for y in results)
    if isinstance(results, OnRows):
        return BatchTensor(session, results.local, session.layouts.of(results.local, results.at, results.rows))
    return _summand(session, results.local) if isinstance(results, Summand) else results


def _dispatch_others(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Perform an operation on pending sums, or on views across rows."""
    if (keep := _KEEPS_PENDING.get(func)) is not None and (out := keep(func, *args, **kwargs)) is not None:
        return out
    flat, spec = tree_flatten((args, kwargs))
    first = flat[0]
    if isinstance(first, WholeTensor) and aliases(func) and (out := first.aliased(func, args[1:], kwargs)) is not None:
        return out
    if torch.Tag.inplace_view in func.tags:
        raise RuntimeError(f"mpitrain.run: {func} would change the shape of a tensor that lies on several ranks")
    values = [x.whole() if isinstance(x, WholeTensor) and not isinstance(x, BatchTensor) else x for x in flat]
    originals = {id(v): x for v, x in zip(values, flat, strict=True) if v is not x}
    arguments, named = tree_unflatten(values, spec)
    has_batch = any(isinstance(x, BatchTensor) for x in values)
    out = dispatch(func, arguments, named) if has_batch else func(*arguments, **named)
    if func._schema.is_mutable:
        for view in {id(x): x for x in _written(func, args, kwargs) if isinstance(x, BatchView)}.values():
            view.store()
    return tree_map(lambda y: originals.get(id(y), y), out)


def _reshape_in_place(batch: BatchTensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BatchTensor:
    """Change the shape of a batch as its view has it, as in x.unsqueeze_(1)."""
    name = func._schema.name.removeprefix("aten::")
    function = getattr(aten, name.removesuffix("_"), None)
    out = function(*args, **kwargs) if function is not None else None
    if type(out) is not BatchTensor or out.memory is not batch.memory:
        raise RuntimeError(f"mpitrain.run: {name} cannot change a batch in place; use a copy of it (x.clone())")
    with torch.utils._mode_utils.no_dispatch():
        func(batch, *args[1:], **kwargs)
    batch.local, batch.division, batch._copy = out.local, out.division, None
    batch.memory.write()
    return batch


def _run_gathered(session: ScriptRun, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Perform an operation on the gathered batch, on every rank."""
    session.crossings += 1
    session.gathered[f"{func._schema.name.removeprefix('aten::')}{session.place()}"] += 1
    if aliases(func) and isinstance(args[0], BatchTensor):
        return _view_of(args[0], func, args, kwargs)
    flat, spec = tree_flatten((args, kwargs))
    written = {id(x) for x in _written(func, args, kwargs) if isinstance(x, BatchTensor)}
    values = [x.whole() if isinstance(x, BatchTensor) else x for x in flat]
    values = [v.clone() if id(x) in written else v for v, x in zip(values, flat, strict=True)]
    arguments, named = tree_unflatten(values, spec)
    out = func(*arguments, **named)
    originals = {}
    for value, x in zip(values, flat, strict=True):
        if value is not x:
            originals[id(value)] = x
            if id(x) in written:
                x.store(value)
    return tree_map(lambda y: originals.get(id(y), y), out)


def _view_of(base: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the views that an operation takes of a batch across its rows."""
    rest = tree_map(lambda x: x.whole() if isinstance(x, WholeTensor) else x, args[1:])

    def take(source: torch.Tensor, number: int | None = None) -> Any:
        out = func(source, *rest, **kwargs)
        return out if number is None else out[number]

    out = take(base.viewed())
    if isinstance(out, torch.Tensor):
        return BatchView(base, out, take)
    return [BatchView(base, y, lambda source, i=i: take(source, i)) for i, y in enumerate(out)]


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the tensors that an operation writes to."""
    if not func._schema.is_mutable:
        return []
    names = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    values = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    return tree_flatten([x for name, x in values.items() if name in names])[0]


# -- operations after which a sum is still pending


def _pending(*tensors: Any) -> bool:
    return all(isinstance(x, PendingSum) and x.cell.is_pending for x in tensors)


def _keep_view(func: Any, x: Any, *args: Any) -> PendingSum | None:
    return PendingSum(x.session, x.cell, (*x.views, (func, args))) if _pending(x) else None


def _keep_copy(func: Any, x: Any, **_: Any) -> PendingSum | None:
    return PendingSum(x.session, Cell(x.session, x.local.clone())) if _pending(x) else None


def _keep_sum(func: Any, a: Any, b: Any, **options: Any) -> PendingSum | None:
    if options or not _pending(a, b) or a.shape != b.shape or a.dtype != b.dtype:
        return None
    if a.cell.owner is not None and a.cell.owner == b.cell.owner and func is aten.add_.Tensor:
        if a.cell.owner == a.session.rank:
            a.local.add_(b.local)
        return a
    if func is aten.add.Tensor:
        return PendingSum(a.session, Cell(a.session, a.local + b.local))
    if not a.cell.is_shared:
        a.local.add_(b.local)
    elif a.views:
        return None
    else:
        a.cell.local, a.cell.is_shared = a.local + b.local, False
    a.session.sums.change(a.cell)
    return a


def _keep_on_owner(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Perform an operation that writes a sum, or reduces it to a number, on the rank that has it."""
    if not _pending(x) or x.cell.owner is None or any(isinstance(y, torch.Tensor) and y.dim() for y in args):
        return None
    is_owner = x.cell.owner == x.session.rank
    if func._schema.is_mutable:
        if is_owner:
            func(x.local, *args, **kwargs)
        return x
    out = func(x.local, *args, **kwargs)
    return x.session.sum(out if is_owner else torch.zeros_like(out))


def _keep_linear(func: Any, *args: Any, **kwargs: Any) -> PendingSum | None:
    """Perform an operation that is linear in each argument on the summand of the only one that is pending."""
    pending = [x for x in args if isinstance(x, WholeTensor)]
    if len(pending) != 1 or not _pending(*pending) or any(isinstance(x, WholeTensor) for x in kwargs.values()):
        return None
    session = pending[0].session
    local = func(*(x.local if isinstance(x, WholeTensor) else x for x in args), **kwargs)
    return PendingSum(session, Cell(session, local.contiguous(), is_shared=True))


_KEEPS_PENDING: dict[Any, Callable[..., Any]] = dict.fromkeys(
    (
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.view.default,
        aten.detach.default,
        aten.alias.default,
    ),
    _keep_view,
)
_KEEPS_PENDING |= dict.fromkeys(
    (
        aten.mul.Tensor,
        aten.neg.default,
        aten.sum.dim_IntList,
        aten.mm.default,
        aten.embedding_dense_backward.default,
        aten.slice_backward.default,
        aten.select_backward.default,
    ),
    _keep_linear,
)
_KEEPS_PENDING |= dict.fromkeys(
    (aten.mul_.Tensor, aten.div_.Tensor, aten.clamp_.default, aten.linalg_vector_norm.default), _keep_on_owner
)
_KEEPS_PENDING |= {aten.add.Tensor: _keep_sum, aten.add_.Tensor: _keep_sum, aten.clone.default: _keep_copy}
