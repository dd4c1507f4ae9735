"""Parameters of which one rank, the owner, has the content; others get it when they read it (`--parallel.zero 3`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mpitrain.errors import InputError
from mpitrain.run.session import ScriptRun
from mpitrain.run.tensors import WholeTensor


class Content:
    """Content of a parameter.

    Attributes:
        owner: Rank that has it.
        layout: Tensor without memory that has the shape, the strides and the dtype of the parameter.
        device: Device of the parameter.
        tensor: The content, on its owner; None elsewhere.

    Args:
        session: Run of the script.
        owner: See above.
        p: The parameter, still whole.
    """

    def __init__(self, session: ScriptRun, owner: int, p: torch.Tensor) -> None:
        self._session, self.owner = session, owner
        self.layout = torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta")
        self.device = p.device
        self.tensor: torch.Tensor | None = None

    def read(self) -> torch.Tensor:
        """Return the content: on its owner itself, elsewhere a copy, in which writes are lost. Collective."""
        session, layout, whole = self._session, self.layout, self.tensor
        session.meet(f"a parameter of {tuple(layout.shape)} from rank {self.owner}")
        if whole is None:
            whole = torch.empty_strided(layout.shape, layout.stride(), dtype=layout.dtype, device=self.device)
        session.world.broadcast(whole.as_strided((whole.numel(),), (1,)), self.owner)
        return whole


class ShardedParameter(WholeTensor):
    """Parameter that is whole to the script, or a view of it, whose content lies on one rank.

    Every operation reads the content, and drops it afterwards. So what autograd keeps for backward has no memory, and
    an operation that writes the parameter, which all ranks perform, writes the content on its owner.

    Attributes:
        content: Content of the parameter.
        views: Operations that take this view of the parameter, in order.

    Args:
        session: Run of the script.
        content: See above.
        views: See above.
        requires_grad: True if autograd shall record operations on it.
    """

    content: Content
    views: tuple[Any, ...]

    def __new__(
        cls, session: ScriptRun, content: Content, views: tuple[Any, ...] = (), requires_grad: bool = False
    ) -> ShardedParameter:
        like = _view(content.layout, views)
        self = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=content.device, requires_grad=requires_grad
        )
        self.session, self.content, self.views = session, content, views
        return self

    def whole(self) -> torch.Tensor:
        """Return the parameter, or the view of it, to be read only. Collective."""
        return _view(self.content.read(), self.views)

    def aliased(self, func: Any, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the views that an operation takes of the parameter."""
        out = func(_view(self.content.layout, self.views), *rest, **kwargs)
        step = func, rest, kwargs
        if isinstance(out, torch.Tensor):
            return ShardedParameter(self.session, self.content, (*self.views, (*step, None)))
        return [ShardedParameter(self.session, self.content, (*self.views, (*step, i))) for i in range(len(out))]

    def _set_data(self, value: torch.Tensor) -> None:
        if value is self:
            return
        if value.shape != self.shape or value.dtype != self.dtype:
            raise InputError(
                "--parallel.zero 3 cannot give a parameter another shape or dtype after its optimizer was made; "
                "convert the model before that", agreed=True,
            )  # fmt: skip
        with torch.no_grad():
            self.copy_(value)

    data = property(lambda self: self.detach(), _set_data)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        memo[id(self)] = copy = self._copy()
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._copy().__reduce_ex__(protocol)

    def _copy(self) -> torch.Tensor:
        copy = self.whole().clone()
        return nn.Parameter(copy, self.requires_grad) if isinstance(self, nn.Parameter) else copy


def shard(session: ScriptRun, p: torch.Tensor, owner: int) -> bool:
    """Leave the content of a parameter on its owner alone; return whether that was possible.

    Args:
        session: Run of the script.
        p: Leaf, equal on all ranks, which becomes a `ShardedParameter`.
        owner: Rank of the owner.
    """
    is_dense = p.is_contiguous() or p.is_contiguous(memory_format=torch.channels_last)
    is_used = p._use_count() > 1  # type: ignore[attr-defined]  # by a graph
    if type(p) is not nn.Parameter or not is_dense or is_used or p.grad is not None:
        return False
    content = Content(session, owner, p)
    other = ShardedParameter(session, content, requires_grad=p.requires_grad)
    other._is_param = True
    attributes = dict(vars(p))
    try:
        torch.utils.swap_tensors(p, other)
    except RuntimeError:  # somebody has a weak reference to it
        return False
    vars(p).update(attributes)
    if owner == session.rank:
        content.tensor = other.detach()
    return True


def _view(x: torch.Tensor, views: tuple[Any, ...]) -> torch.Tensor:
    for func, rest, kwargs, number in views:
        x = func(x, *rest, **kwargs)
        x = x if number is None else x[number]
    return x
