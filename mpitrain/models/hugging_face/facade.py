"""A module that is called in the place of another: the same children, parameters and names, another forward."""

from __future__ import annotations

from typing import Any

from torch import nn

_SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class Facade(nn.Module):
    """Shares the tables of another module's children, parameters and buffers.

    What is put in the place of a child of either is the child of both. So a state has the names that transformers
    gives it, and what divides or replaces layers by their names does so in the module that computes.

    Args:
        module: In whose place it stands. Its own hooks are called as well.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for table in _SHARED:
            self.__dict__[table] = module.__dict__[table]
        self.__dict__["_inner"] = module  # as no child, or every name would begin with it
        self.training = module.training

    @property
    def inner(self) -> Any:
        """The module that computes, in the mode of this one."""
        inner = self.__dict__["_inner"]
        inner.training = self.training
        return inner

    def extra_repr(self) -> str:
        return f"in place of {type(self.__dict__['_inner']).__name__}"
