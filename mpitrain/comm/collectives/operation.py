"""Collective operations: what is the same in all calls of one, and a call of it whose arguments have been checked."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from mpitrain.comm.collectives.binding import Binder
from mpitrain.comm.runtime.executor import Compiled
from mpitrain.comm.runtime.kernels import Call

Tensors = Sequence["torch.Tensor | None"]
Bind = Callable[..., Call]


class Invocation(NamedTuple):
    """One call of an operation, whose arguments have been checked.

    Attributes:
        name: The operation's name in messages.
        bind: Makes what performs it on a rank's memory, of a binder and the tensors.
        tensors: What it works on; the first has the operation's size.
        written: Which of them it changes.
        key: Under which `bind` has the binder keep what it makes; None where nothing is kept.
        alike: What must be the same on all ranks besides the type, and, unless uneven, the size.
        uneven: Whether the sizes of ranks may differ.
        operation, given: The operation, and what it is given besides tensors; None where bind is all there is.
        on_device: Whether bind takes tensors on a device as they are.
        counts: Whether the journal counts it; else whoever makes it enters it.
        algorithm: By which it is to be known in the journal, where what it is made of does not tell.
        placed: The tensor that neighbours find in an arena by its offset.
    """

    name: str
    bind: Bind
    tensors: Tensors = ()
    written: Sequence[bool] = ()
    key: Hashable = None
    alike: object = None
    uneven: bool = False
    placed: torch.Tensor | None = None
    operation: CollectiveOperation | None = None
    given: Sequence[Any] = ()
    on_device: bool = False
    counts: bool = True
    algorithm: str = ""

    @property
    def first(self) -> torch.Tensor | None:
        """The tensor that has the operation's size, if it is on any."""
        return self.tensors[0] if self.tensors else None


@dataclass(frozen=True)
class CollectiveOperation:
    """What is alike in all calls of an operation.

    It is given one tensor or two, of which the first has its size, and then what else must be the same on all ranks.

    Attributes:
        name: Its name in messages.
        tensors: How many of what it is given are tensors.
        bind: Makes what performs it on a rank's memory, of a binder and what is given.
        said: Tells in words what must be the same on the ranks of a node, of a binder and what is given.
        together: Whether its ranks wait for each other where there are any elements, of what is given.
        parameters: The names of what it is given besides tensors.
        by_rank: For each tensor, whether it is one block a rank; else it is one block. Empty where it may not be cut.
        in_place: Whether a tensor that it changes is read as well.
        placed: The tensor that neighbours find in an arena by its offset, of the rank and what is given.
    """

    name: str
    tensors: int
    bind: Callable[..., Compiled]
    said: Callable[..., str]
    together: Callable[..., bool]
    parameters: tuple[str, ...] = ()
    by_rank: tuple[bool, ...] = ()
    in_place: bool = False
    placed: Callable[..., torch.Tensor | None] | None = None

    def key(self, *given: Any) -> tuple[Hashable, ...]:
        """Under which what performs it is kept; the operation's function looks for the same in `ready`."""
        first, rest = given[0], given[self.tensors :]
        others = (None if x is None else (x.data_ptr(), x.numel(), x.dtype) for x in given[1 : self.tensors])
        return (self.name, first.data_ptr(), first.numel(), first.dtype, *others, *rest)

    def bound(self, binder: Binder, *given: Any) -> Compiled:
        """The operation on a rank's memory, as it was bound before or is now."""
        bind, said = partial(self.bind, binder, *given), partial(self.said, binder, *given)
        together = self.together(*given)
        return binder.bound(self.key(*given), bind, *given[: self.tensors], said=said, together=together)

    def on(self, tensors: Tensors, written: Sequence[bool], *arguments: Any, **more: Any) -> Invocation:
        """One call of it.

        Args:
            tensors: The tensors that it is given, in their order.
            written: Which of them it changes.
            arguments: What else it is given.
            more: Further fields of the invocation.
        """

        def bind(binder: Binder, *tensors: torch.Tensor) -> Compiled:
            return self.bound(binder, *tensors, *arguments)

        fields = {"key": self.key(*tensors, *arguments), "alike": arguments, **more}
        return Invocation(self.name, bind, tensors, written, operation=self, given=arguments, **fields)

    def replaced(self, given: Sequence[Any], **values: Any) -> tuple[Any, ...]:
        """What it is given besides tensors, with other values for some of the parameters that it has."""
        return tuple(values.get(name, value) for name, value in zip(self.parameters, given, strict=True))

    def value(self, given: Sequence[Any], name: str, otherwise: Any = None) -> Any:
        """What it is given for a parameter; `otherwise` if it has none of that name."""
        return given[self.parameters.index(name)] if name in self.parameters else otherwise
