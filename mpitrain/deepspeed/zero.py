"""Contexts in which ZeRO makes and gathers parameters: `Init` and `GatheredParameters`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from mpitrain.comm import init
from mpitrain.deepspeed.engine import ENGINES
from mpitrain.deepspeed.names import explain_missing
from mpitrain.errors import refusal


def __getattr__(name: str) -> Any:
    raise explain_missing(f"zero.{name}")


@contextmanager
def Init(*arguments: Any, **options: Any) -> Iterator[None]:
    """Make a model in the block. The model is whole until `initialize`, which keeps this rank's share of it.

    Args:
        arguments, options: Ignored: they say how DeepSpeed divides parameters before `initialize`.
    """
    yield


@contextmanager
def GatheredParameters(
    params: torch.Tensor | Iterable[torch.Tensor],
    modifier_rank: int | None = None,
    fwd_module: Any = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Make parameters whole in the block. Collective.

    Args:
        params: A parameter, or several.
        modifier_rank: Rank whose changes of the parameters in the block all ranks take; None: they are only read.
        fwd_module: Ignored.
        enabled: If false, nothing happens.
    """
    parameters = [params] if isinstance(params, torch.Tensor) else list(params)
    if not enabled or not parameters:
        yield
        return
    numbers = {id(p) for p in parameters}
    engines = [engine for engine in ENGINES if any(id(p) in numbers for p in engine.module.parameters())]
    if len(engines) > 1:
        raise refusal("GatheredParameters got parameters of several engines; gather those of one engine at a time")
    with ExitStack() as stack:
        if engines:
            stack.enter_context(engines[0]._engine.gathered(parameters, modifier_rank))
        yield
        if not engines and modifier_rank is not None:
            for parameter in parameters:
                init().broadcast(parameter.data, modifier_rank)
