"""DistributedDataParallel: the replicated case, with the interface of torch's class of that name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from mpitrain.comm import Communicator, init
from mpitrain.shard.reducer import Reducer


class DistributedDataParallel(nn.Module):
    """A module whose gradients are averaged over the ranks of `comm` in backward.

    Parameters and buffers start as rank 0's. bucket_mb: MiB reduced at a time. find_unused_parameters: a
    parameter that gets no gradient counts as zero instead of being an error. broadcast_buffers: buffers (running
    statistics) are rank 0's before each forward pass in training.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Communicator | None = None,
        bucket_mb: float = 25.0,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        algorithm: str = "auto",
    ) -> None:
        super().__init__()
        self.module = module
        self.comm = comm if comm is not None else init()
        self.broadcast_buffers = broadcast_buffers
        broadcast_state(module, self.comm)
        trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.reducer = Reducer(
            self.comm, trained, bucket_mb=bucket_mb, algorithm=algorithm, unused_allowed=find_unused_parameters
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.broadcast_buffers and self.training and self.reducer.enabled and self.comm.size > 1:
            for buffer in self.module.buffers():
                self.comm.broadcast(buffer, 0)
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate; the first one after it reduces all of them."""
        before, self.reducer.enabled = self.reducer.enabled, False
        try:
            yield
        finally:
            self.reducer.enabled = before


def broadcast_state(module: nn.Module, comm: Communicator) -> None:
    """Give every rank rank 0's parameters and buffers. Collective."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_contiguous():
                comm.broadcast(tensor, 0)
            else:
                dense = tensor.contiguous()
                comm.broadcast(dense, 0)
                tensor.copy_(dense)
