"""The engine of a rank that a parameter server trains with: its steps push gradients instead of updating."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from mpitrain.checkpoint import Part
from mpitrain.comm import Communicator
from mpitrain.loose.memory import OwnShares, Roles
from mpitrain.loose.sharding import ServedSharding
from mpitrain.loose.update import squares
from mpitrain.loose.worker import ServedWorker
from mpitrain.ownership import Axes
from mpitrain.shard.ddp import broadcast_state, broadcast_tensors
from mpitrain.trainer.engine import Engine, StepResult
from mpitrain.trainer.memory import MemoryAccount
from mpitrain.trainer.optimizing.optimizer import state_bytes
from mpitrain.trainer.state import EngineState, merged


class ServedEngine(Engine):
    """A module and its loss on a worker, and shares of its optimizer on a server. Collective over `world` to make.

    Args:
        world: All ranks.
        roles: Who works and who serves.
        bulk: Whether the servers find the norm of a whole batch's gradients, and clip these.
        *args, **kwargs: As of `Engine`; `comm` is of this rank alone.
    """

    sharding: ServedSharding
    inbox: Mapping[int, OwnShares]  # of a server: where the gradients of workers arrive that share no memory with it

    def __init__(self, *args: Any, world: Communicator, roles: Roles, bulk: bool, **kwargs: Any) -> None:
        self._world, self._roles, self._bulk, self.inbox = world, roles, bulk, {}
        broadcast_state(args[0], world)
        super().__init__(*args, **kwargs)
        self._axes = [world]

    def _place(self, axes: Axes) -> ServedSharding:
        return ServedSharding(self.module, self.optimizer, self.comm, self.options, self._world, self._roles)

    def _make_state(self, axes: Axes) -> EngineState:
        return EngineState(self.sharding, axes, writes_copies=self._world.rank == self._roles.workers[0])

    def serve_with(self, worker: ServedWorker) -> None:
        """Pull and push through a worker from now on."""
        pulled, pushed = self.sharding.pulled, self.sharding.pushed
        pulled.need, worker.came, pushed.push = worker.need, pulled.came, worker.push

    def memory(self) -> MemoryAccount:
        """Count the bytes; a rank that works and serves has its shares of parameters and gradients besides."""
        account, sharding, servers = super().memory(), self.sharding, len(self._roles.servers)
        if sharding.published is None or sharding.sums is None:
            return replace(account, expected=account.expected | {"states": 0})
        published, sums = sharding.published.nbytes(), sharding.sums.nbytes()
        expected = {
            "parameters": account.expected["parameters"] + published,
            "gradients": account.expected["gradients"] + sums,
            "states": account.expected["states"] // servers,
        }
        buffers = account.buffers + sum(shares.nbytes() for shares in self.inbox.values())
        return replace(account, gradients=account.gradients + sums, buffers=buffers, expected=expected)

    def share_buffers(self) -> None:
        """Give all ranks the first worker's buffers, which are saved: what is evaluated is what is saved. Collective.

        Statistics of batches, for instance: each worker has those of its own samples.
        """
        broadcast_tensors(self.module.buffers(), self._world, self._roles.workers[0])

    @torch.no_grad()
    def take_over(self, earlier: ServedEngine) -> None:
        """Take over the shares and optimizer states, and the module's buffers, of an engine of the same servers."""
        pieces = earlier.sharding.flat_parameters
        numbers = iter([number for number, piece in enumerate(pieces) for _ in piece.contents])
        for own in list(self.sharding.flat_parameters):  # those of the earlier one may have been divided
            self.sharding.divide(own, [next(numbers) for _ in own.contents])
        for own, before in zip(self.sharding.flat_parameters, pieces, strict=True):
            own.value.copy_(before.value)
            own.store()
            if before.value in earlier.optimizer.state:
                self.optimizer.state[own.value] = earlier.optimizer.state[before.value]
        for buffer, before_it in zip(self.module.buffers(), earlier.module.buffers(), strict=True):
            buffer.copy_(before_it)

    def step(self, lr: float | None = None) -> StepResult:
        """Say how long the gradients are: that of the mean over this worker's samples. The servers update.

        Where they find the norm of the whole batch's, 0.
        """
        if self._bulk:
            return StepResult(0.0, False)
        found = squares(self.sharding.gradients.flat)
        norm = math.sqrt(found) if math.isfinite(found) else math.nan
        return StepResult(norm, not math.isfinite(norm))

    def take_unused(self) -> torch.Tensor:
        """Return which parameters no backward pass since the last call used: uint8, in the order of the layout."""
        unused = self.sharding.reducer.take_unused(self.comm)
        every = [p for group in self.sharding.groups for p in group.parameters]
        return torch.tensor([p in unused for p in every], dtype=torch.uint8)

    def parts(self) -> tuple[list[Part], dict[str, Any]]:
        parts, values = self._state.parts()
        values["optimizer"] = merged(self._world.all_gather_object(values["optimizer"]))
        return parts, values | self._settings()

    def checkpoint_bytes(self) -> int:
        parts, _ = self._state.parts()
        nbytes = sum(part.data.nbytes for part in parts)
        if any(self.optimizer.state.values()) or self.sharding.share is None:
            return nbytes
        return nbytes + self._state.trained() * state_bytes(self.optimizer) // len(self._roles.servers)
