"""State that decides which path a module takes: arguments, attributes, hooks, and the variables that its code reads.

arguments     shapes, dtypes, divisions and requires_grad of tensors; values of the others
modules       numbers, strings and flags among attributes, and those in a configuration that is an attribute
parameters    identity, dtype and requires_grad
code          global variables and those of enclosing functions, with the same kinds of values

Objects are compared by numbers that are equal on all ranks (`_number_of`), not by their addresses: a new tensor can get
the address of one that is gone on one rank, and another address on the next.
"""

from __future__ import annotations

import dis
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from mpitrain.run.tensors import BatchTensor

_SCALARS = {int, float, bool, str, type(None), torch.dtype}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _HOOKS)
_OWN_NAMES = {"training"}.union(vars(nn.Module()))  # attributes of every module, of which `training` is the only value
_MOST_ENTRIES = 256  # of a configuration that is compared
_MOST_NUMBERS = 100_000  # of objects, until those that are gone are forgotten
_numbers: dict[int, tuple[weakref.ref[Any], int]] = {}  # of objects, by address
_count = 0  # of the numbers that were given


def call_key(leaves: list[Any], spec: Any) -> Any:
    """Return the arguments that decide on the path of a call, or None if there is no batch, or something unknown.

    Args:
        leaves: Leaves of the arguments.
        spec: Structure of the arguments.
    """
    out: list[Any] = [spec]
    has_batch = False
    for x in leaves:
        kind = type(x)
        if kind is BatchTensor:
            has_batch = True
            out.append((x.division, x.requires_grad))
        elif kind in _SCALARS:
            out.append((kind, x))
        elif kind is torch.Tensor or kind is nn.Parameter:
            out.append((x.shape, x.dtype, x.requires_grad))
        else:
            return None
    return tuple(out) if has_batch else None


def module_state(module: nn.Module) -> Any:
    """Return the state of a module and its submodules, or None if any of them has a hook.

    Args:
        module: The module.
    """
    if any(getattr(torch_module, name) for name in _GLOBAL_HOOKS):
        return None
    out: list[Any] = []
    modules, seen = [module], set[int]()
    while modules:
        each = modules.pop()
        values = each.__dict__
        for name in _HOOKS:
            if values.get(name):
                return None
        kind = type(each)
        out += (_number_of(each), kind, _number_of(kind.forward))
        for name, value in values.items():
            if type(value) in _SCALARS:
                out.append(value)
            elif name not in _OWN_NAMES:
                _add_values(out, value, seen)
        for p in values["_parameters"].values():
            if p is not None:
                out += (_number_of(p), p.requires_grad, p.dtype)
        for b in values["_buffers"].values():
            if b is not None:
                out += (_number_of(b), b.dtype)
        modules += [m for m in values["_modules"].values() if m is not None]
        for read in _variables(kind):  # type: ignore[arg-type]
            _add_values(out, read(), seen)
    return tuple(out)


def _number_of(x: Any) -> int:
    """Return the number of an object: they are numbered as they come, so equally on ranks that run the same script."""
    global _count
    known = _numbers.get(id(x))
    if known is not None and known[0]() is x:
        return known[1]
    if len(_numbers) > _MOST_NUMBERS:
        for address in [address for address, (reference, _) in _numbers.items() if reference() is None]:
            del _numbers[address]
    _count += 1
    _numbers[id(x)] = weakref.ref(x), _count
    return _count


def forget_numbers() -> None:
    """Have no weak references to objects any more, which get new numbers."""
    _numbers.clear()


def _add_values(out: list[Any], value: Any, seen: set[int]) -> None:
    """Add a value, or the values in a configuration (a list, a dictionary or an object with attributes)."""
    kind = type(value)
    if kind in _SCALARS:
        out.append(value)
        return
    if kind is FunctionType or isinstance(value, torch.Tensor):
        out.append(_number_of(value))
        return
    if isinstance(value, (nn.Module, ModuleType, type)) or callable(value) or id(value) in seen:
        return
    seen.add(id(value))
    entries: Iterable[Any] = ()
    if kind is dict:
        entries = value.values()
    elif kind in (list, tuple, set):
        entries = value
    elif hasattr(value, "__dict__"):
        entries = vars(value).values()
    else:
        return
    if len(entries) <= _MOST_ENTRIES:  # type: ignore[arg-type]
        out += [x for x in entries if type(x) in _SCALARS]
        out.append(kind)


@lru_cache(maxsize=1024)
def _variables(kind: Any) -> tuple[Callable[[], Any], ...]:
    """Return functions that read the variables that the methods of a class of the user's read."""
    out: list[Callable[[], Any]] = []
    for each in type.mro(kind):
        if not each.__module__.startswith("torch."):
            for function in vars(each).values():
                if isinstance(function, FunctionType):
                    out += _variables_of(function)
    return tuple(out)


def _variables_of(function: FunctionType) -> list[Callable[[], Any]]:
    values = function.__globals__
    out: list[Callable[[], Any]] = []
    for name in _globals_of(function.__code__):
        value = values.get(name)
        if not isinstance(value, (ModuleType, type)):
            out.append(lambda name=name: values.get(name))  # type: ignore[misc]
        if isinstance(value, FunctionType) and value.__globals__ is values and value is not function:
            for inner in _globals_of(value.__code__):  # one function further, such as a helper in the same file
                if not isinstance(values.get(inner), (ModuleType, type)):
                    out.append(lambda inner=inner: values.get(inner))  # type: ignore[misc]
    out += [lambda cell=cell: cell.cell_contents for cell in function.__closure__ or ()]  # type: ignore[misc]
    return out


def _globals_of(code: CodeType) -> Iterator[str]:
    """Yield the names of the global variables that code reads, also in functions and generators inside it."""
    yield from dict.fromkeys(x.argval for x in dis.get_instructions(code) if x.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals_of(constant)
