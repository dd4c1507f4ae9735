"""Operations of a process group on tensors that wrap others: one for each inner tensor, issued as one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from mpitrain.backend.failures import ArgumentError, translation
from mpitrain.backend.work import Several
from mpitrain.comm.memory.elements import inner_tensors
from mpitrain.errors import InputError


def by_inner_tensors(method: Callable[..., dist.Work]) -> Callable[..., Any]:
    """Have a method of a process group called once for each inner tensor of the tensors that it is given.

    Args:
        method: Takes tensors, and lists of them of any depth.
    """

    @functools.wraps(method)
    def call(group: Any, *arguments: Any, **options: Any) -> dist.Work:
        tensors = list(_tensors(arguments))
        if all(type(tensor) is torch.Tensor for tensor in tensors):
            return method(group, *arguments, **options)
        try:
            numbers = {len(inner_tensors(tensor)) for tensor in tensors}
        except InputError as error:
            raise translation(error) from None
        if len(numbers) != 1:
            made = ", ".join(sorted({f"{type(x).__name__} ({len(inner_tensors(x))})" for x in tensors}))
            raise ArgumentError(f"{method.__name__}: the tensors must be made of equally many tensors, not {made}")
        works = [method(group, *(_part(value, i) for value in arguments), **options) for i in range(numbers.pop())]
        return works[0] if len(works) == 1 else Several(works)

    return call


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def _part(value: Any, number: int) -> Any:
    """Return a value with inner tensor `number` in place of each tensor."""
    if isinstance(value, torch.Tensor):
        return inner_tensors(value)[number]
    return [_part(one, number) for one in value] if isinstance(value, list | tuple) else value
