"""The training step of a data-parallel rank: forward, backward, reduction, clipping, update.

The loss of a step is the mean over its global batch, however it is cut: each microbatch counts with its share
of the samples, and the ranks' gradients are summed. So the same batch gives the same step on any number of
ranks, also when they get unequal parts of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from mpitrain.checkpoint import Manifest, Part
from mpitrain.comm import Communicator
from mpitrain.errors import InputError
from mpitrain.shard.batchnorm import SyncBatchNorm
from mpitrain.shard.ddp import broadcast_state
from mpitrain.shard.optim import update
from mpitrain.shard.reducer import Reducer
from mpitrain.shard.state import (
    empty_optimizer_state,
    model_tensors,
    optimizer_tensors,
    parts_to_read,
    parts_to_write,
    tied_names,
)

Loss = Callable[[Any, Any], torch.Tensor]


class Engine:
    """A module, its loss and its optimizer on the data-parallel ranks of `comm`. Collective to make.

    loss(module(x), y): the mean over the samples given. clip: largest global gradient norm, 0 for none.
    precision: "fp32", or "bf16" for autocast of forward.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        comm: Communicator,
        *,
        clip: float = 0.0,
        precision: str = "fp32",
        bucket_mb: float = 25.0,
        algorithm: str = "auto",
    ) -> None:
        self.module, self.loss, self.optimizer, self.comm = module, loss, optimizer, comm
        self.clip, self.precision = clip, precision
        broadcast_state(module, comm)
        trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.reducer = Reducer(comm, trained, bucket_mb=bucket_mb, op="sum", algorithm=algorithm, unused_allowed=True)
        self._synchronous = any(isinstance(m, SyncBatchNorm) for m in module.modules())
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._state: dict[nn.Parameter, dict[str, Any]] = {}

    def forward_backward(self, microbatches: Sequence[tuple[torch.Tensor, torch.Tensor]], samples: int) -> float:
        """Gradients of one step. microbatches: this rank's (x, y), possibly none; samples: of the global batch.

        Returns this rank's part of the step's loss. Afterwards every rank has the gradients of the global batch.
        """
        self.reducer.zero()
        total = 0.0
        for number, (x, y) in enumerate(microbatches):
            self.reducer.enabled = number == len(microbatches) - 1
            loss = self._forward(x, y) * (len(x) / samples)
            loss.backward()
            total += float(loss.detach())
        if not microbatches:
            if self._synchronous:
                raise InputError("a rank has no samples in this step, but BatchNorm needs some; raise train.batch")
            self.reducer.finish()
        return total

    def _forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.precision == "bf16":
            with torch.autocast(x.device.type, torch.bfloat16):
                return self.loss(self.module(x), y)
        return self.loss(self.module(x), y)

    def step(self, lr: float) -> float:
        """Clip, update, and return the global gradient norm before clipping."""
        norm = self.gradient_norm()
        if self.clip and norm > self.clip:
            for group in self.reducer.groups:
                group.arena.tensor.mul_(self.clip / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_ does
        for settings in self.optimizer.param_groups:
            settings["lr"] = lr
        update(self.optimizer)
        return norm

    def gradient_norm(self) -> float:
        """The 2-norm of all gradients together."""
        return math.sqrt(sum(float(torch.linalg.vector_norm(g.arena.tensor)) ** 2 for g in self.reducer.groups))

    @torch.no_grad()
    def evaluate(self, x: torch.Tensor, y: torch.Tensor) -> float:
        """The loss of this rank's samples, without training on them."""
        was_training = self.module.training
        self.module.eval()
        try:
            return float(self._forward(x, y))
        finally:
            self.module.train(was_training)

    # -- checkpoints

    def parts(self) -> tuple[list[Part], dict[str, Any]]:
        """What this rank writes into a checkpoint, and the values that go with it."""
        states, values = optimizer_tensors(self.module, self.optimizer)
        tensors = model_tensors(self.module) | states
        rest = {"optimizer": values, "tied": tied_names(self.module)}
        return parts_to_write(tensors, self.comm.rank, self.comm.size), rest

    def parts_to_load(self, manifest: Manifest) -> list[Part]:
        """What this rank fills from a checkpoint; `finish_load` then puts it in place."""
        states, self._state = empty_optimizer_state(self.module, manifest, manifest.values["optimizer"])
        parts, self._copies = parts_to_read(model_tensors(self.module) | states)
        return parts

    @torch.no_grad()
    def finish_load(self) -> None:
        for tensor, filled in self._copies:
            tensor.copy_(filled)
        self.optimizer.state.clear()
        for parameter, entries in self._state.items():
            self.optimizer.state[parameter] = entries
        self._copies, self._state = [], {}
