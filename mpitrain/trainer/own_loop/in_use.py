"""Which models have an engine, and what is left of an engine that was closed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from mpitrain.comm import Communicator
from mpitrain.errors import InputError, refusal

_IN_USE: WeakSet[nn.Module] = WeakSet()  # modules with parameters of their own


class GivenModel:
    """The model that an engine was made of.

    Attributes:
        names: Of its whole state, in order.

    Raises:
        InputError: Another engine, which was not closed, has some of it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.names: Sequence[str] = list(model.state_dict())
        self._modules = [m for m in model.modules() if any(True for _ in m.parameters(recurse=False))]
        if any(m in _IN_USE for m in self._modules):
            raise refusal(
                f"{type(model).__name__} has an engine already; call that one's close() before mt.initialize makes "
                "another, or give it a model of its own"
            )
        self._frozen: list[tuple[str, nn.Parameter]] = []

    def take(self, module: nn.Module) -> None:
        """An engine has it now. module: This rank's part of it."""
        _IN_USE.update(self._modules)
        self._frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]

    def release(self) -> None:
        """The engine was closed."""
        _IN_USE.difference_update(self._modules)

    def require_frozen(self) -> None:
        """Raise InputError for a parameter that is trained only since the engine was made."""
        if switched := next((name for name, p in self._frozen if p.requires_grad), None):
            raise InputError(
                f"{switched} requires gradients, and did not when the engine was made, so that its gradients are "
                "not reduced; save, close the engine, and make another with mt.initialize"
            )


class ClosedEngine:
    """What stands for the parts of an engine that was closed: all that is asked of it is an error."""

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, comm: Communicator
    ) -> None:
        self.module, self.optimizer, self.device, self.comm = module, optimizer, device, comm

    def __getattr__(self, name: str) -> Any:
        raise InputError("the engine was closed; make another with mt.initialize, and load a checkpoint")
