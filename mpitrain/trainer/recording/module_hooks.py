"""The times at which modules of a model compute, forward and backward, while a timeline is recorded.

Forward is what lies between the hooks before and after a module's call. Backward of that call begins when the gradient
of its output is there, and ends when that of its input is, or when that of another call's output is, whatever comes
first: hooks on these tensors look on, and neither the graph nor what is computed changes. (A full backward hook of the
module would put functions of its own into the graph, after which tensors cannot be changed in place.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

Tell = Callable[[str, str, float, float], None]  # name, "forward" or "backward", begin, end
CALL_COST = 35e-6  # seconds that a call with its backward takes longer at most
_TRANSPARENT = (nn.ModuleList, nn.ModuleDict)  # they are not called themselves
_OTHERWISE = (
    nn.TransformerEncoderLayer,
    nn.MultiheadAttention,
)  # compute otherwise, in evaluation, where there are hooks


class _Call:
    """A call of a module, in the call of the module around it."""

    __slots__ = ("begin", "name", "parent")

    def __init__(self, name: str, parent: _Call | None, begin: float) -> None:
        self.name, self.parent, self.begin = name, parent, begin

    def inside(self, other: _Call) -> bool:
        """Return whether this call is in the other one."""
        at = self.parent
        while at is not None and at is not other:
            at = at.parent
        return at is not None


class ModuleHooks:
    """Hooks on some modules.

    Args:
        modules: Their names, and they.
        tell: Is told of each call and each backward pass.
    """

    def __init__(self, modules: Sequence[tuple[str, nn.Module]], tell: Tell) -> None:
        self._tell, self._on = tell, True
        self._forward: list[_Call] = []  # calls under way
        self._backward: list[tuple[_Call, float]] = []  # whose backward is under way, and since when
        self._handles: list[Any] = []
        self._compiled: list[tuple[nn.Module, Any]] = []
        for name, module in modules:
            compiled = getattr(module, "_compiled_call_impl", None)
            if compiled is not None:  # hooks would be compiled with it
                self._compiled.append((module, compiled))
                module._compiled_call_impl = partial(self._around, name, compiled)
                continue
            before = partial(self._before, name)
            self._handles.append(module.register_forward_pre_hook(before, prepend=True))
            self._handles.append(module.register_forward_hook(self._after, always_call=True))

    def remove(self) -> None:
        """Take all hooks away."""
        self._on = False
        for handle in self._handles:
            handle.remove()
        for module, compiled in self._compiled:
            module._compiled_call_impl = compiled
        self._handles, self._compiled = [], []

    def end_of_backward(self, end: float) -> None:
        """A backward pass is over, and so is that of all modules."""
        self._end_down_to(0, end)

    def _before(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        call = _Call(name, self._forward[-1] if self._forward else None, time.perf_counter())
        self._forward.append(call)
        if torch.is_grad_enabled():
            x: Any = args[0] if args and isinstance(args[0], torch.Tensor) else next(_tensors(args), None)
            if x is not None and x.requires_grad and not self._tells(x, call):
                x.register_hook(partial(self._input_ready, call))
                x._watched = (self, call, False)

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self._forward:
            return
        call = self._forward.pop()
        self._tell(call.name, "forward", call.begin, time.perf_counter())
        if torch.is_grad_enabled():
            y: Any = output if isinstance(output, torch.Tensor) else next(_tensors(output), None)
            if y is not None and y.grad_fn is not None:
                y.register_hook(partial(self._output_ready, call))
                y._watched = (self, call, True)

    def _tells(self, x: Any, call: _Call) -> bool:
        """Return whether a hook is there that ends this call's backward when the gradient of its input comes.

        It is that of the call whose output the input is, or of a call around this one with the same input. A hook more
        takes microseconds, which adds up over all modules.
        """
        by, other, output = getattr(x, "_watched", (None, call, False))
        return by is self and (output or call.inside(other))

    def _around(self, name: str, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call of a compiled module."""
        self._before(name, _NONE, args)
        output = None
        try:
            output = compiled(*args, **kwargs)
        finally:
            self._after(_NONE, args, output)
        return output

    def _output_ready(self, call: _Call, gradient: torch.Tensor) -> None:
        """Backward of a call begins."""
        if not self._on:
            return
        now, under_way = time.perf_counter(), self._backward
        kept = len(under_way)
        while kept and not (call.inside(under_way[kept - 1][0]) or under_way[kept - 1][0].inside(call)):
            kept -= 1
        self._end_down_to(kept, now)
        begin = now
        while kept and under_way[kept - 1][0].inside(
            call
        ):  # the last of its modules has the same output, and told it first
            kept -= 1
            begin = under_way[kept][1]
        under_way.insert(kept, (call, begin))

    def _input_ready(self, call: _Call, gradient: torch.Tensor) -> None:
        """Backward of a call is over."""
        for number, (other, _) in enumerate(self._backward):
            if other is call:
                self._end_down_to(number, time.perf_counter())
                return

    def _end_down_to(self, kept: int, end: float) -> None:
        while len(self._backward) > kept:
            call, begin = self._backward.pop()
            if self._on:
                self._tell(call.name, "backward", begin, end)


_NONE = nn.Module()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in what a module takes or gives."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)


def levels_of(module: nn.Module) -> list[list[tuple[str, nn.Module]]]:
    """The modules of a model by how deep they lie in it, the outermost first.

    A module that is a part of a compiled one is left out, and so is one that computes otherwise where there are hooks.
    """
    levels: list[list[tuple[str, nn.Module]]] = []
    seen: set[nn.Module] = set()

    def visit(name: str, at: nn.Module, depth: int) -> None:
        for key, child in at.named_children():
            if isinstance(child, _OTHERWISE) or child in seen:
                continue
            seen.add(child)
            full = f"{name}.{key}" if name else key
            if isinstance(child, _TRANSPARENT):
                visit(full, child, depth)
                continue
            if len(levels) == depth:
                levels.append([])
            levels[depth].append((full, child))
            if getattr(child, "_compiled_call_impl", None) is None:
                visit(full, child, depth + 1)

    visit("", module, 0)
    return levels


def affordable(levels: Sequence[Sequence[object]], calls: int, seconds: float) -> int:
    """Return how many levels can be watched for so many seconds a step; at least the first one.

    Args:
        levels: As of `levels_of`.
        calls: Of each module in a step.
        seconds: What the hooks may cost in a step.
    """
    number, count = 0, 0
    for level in levels:
        count += len(level)
        if number and count * calls * CALL_COST > seconds:
            break
        number += 1
    return number
