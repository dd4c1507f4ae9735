"""Reduces gradients over the ranks as backward produces them.

A hook on each parameter notes that its gradient is complete. When all of a bucket are, and all buckets before
it have been started, its all-reduce starts, in the same order on every rank. Where no core is free to carry it
out meanwhile nothing would overlap, so then everything is reduced at the end of backward in one operation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from mpitrain.comm import Communicator, Work
from mpitrain.errors import CommunicationError
from mpitrain.shard.flat import FlatGradients, adopt, by_dtype

MIB = 1 << 20


class Reducer:
    """Gradients of a module's parameters, kept in arenas and reduced in place.

    comm: the data-parallel ranks. named: (name, parameter), those that are trained. op: sum or avg.
    unused_allowed: parameters without a gradient count as zero; else they are an error that names them.
    """

    def __init__(
        self,
        comm: Communicator,
        named: Sequence[tuple[str, nn.Parameter]],
        *,
        bucket_mb: float = 25.0,
        op: str = "avg",
        algorithm: str = "auto",
        unused_allowed: bool = False,
    ) -> None:
        self.comm, self.op, self.algorithm, self.unused_allowed = comm, op, algorithm, unused_allowed
        self.names = {p: name for name, p in named}
        backward_order = list(self.names)[::-1]
        self.groups = [
            FlatGradients(comm, members, int(bucket_mb * MIB)) for members in by_dtype(backward_order).values()
        ]
        self.enabled = True  # False while gradients are only accumulated
        self._overlaps = comm.overlaps
        self._buckets: list[torch.Tensor] = []
        self._place: dict[nn.Parameter, tuple[torch.Tensor, int]] = {}
        self._sizes: list[int] = []
        for group in self.groups:
            first = len(self._buckets)
            self._buckets += group.buckets
            self._sizes += [0] * len(group.buckets)
            for parameter, view, place in zip(group.parameters, group.views, group.plan.places, strict=True):
                self._place[parameter] = (view, first + place.bucket)
                self._sizes[first + place.bucket] += 1
        self._missing: list[int] = []
        self._ready: set[nn.Parameter] = set()
        self._work: list[Work | None] = []
        self._in_backward = False
        self._hooks = [p.register_post_accumulate_grad_hook(self._hook) for p in self._place]

    def close(self) -> None:
        """Remove the hooks and release the arenas. Collective."""
        for hook in self._hooks:
            hook.remove()
        for parameter in self._place:
            parameter.grad = None
        for group in self.groups:
            group.arena.free()

    def zero(self) -> None:
        """Set all gradients to zero, in place."""
        for group in self.groups:
            group.attach()
            group.zero()

    def _hook(self, parameter: nn.Parameter) -> None:
        view, bucket = self._place[parameter]
        adopt(parameter, view)
        if not self.enabled:
            return
        if not self._in_backward:
            self._begin()
        if parameter in self._ready:  # it takes part in several places, or in several backward passes
            return
        self._ready.add(parameter)
        self._missing[bucket] -= 1
        if self._overlaps:
            self._start_ready()

    def _begin(self) -> None:
        self._in_backward = True
        self._missing = list(self._sizes)
        self._ready.clear()
        self._work = []
        torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def _start_ready(self) -> None:
        while len(self._work) < len(self._buckets) and self._missing[len(self._work)] == 0:
            bucket = self._buckets[len(self._work)]
            self._work.append(self.comm.all_reduce(bucket, self.op, self.algorithm, async_op=True))

    def finish(self) -> None:
        """Complete the reduction of all buckets; called by autograd at the end of backward.

        A rank that has no backward pass to do calls it itself, so that the others need not wait.
        """
        if not self._in_backward:
            self._missing, self._work = list(self._sizes), []
            self._ready.clear()
        self._in_backward = False
        unused = [p for p in self._place if p not in self._ready]
        if unused and not self.unused_allowed and self._ready:
            raise CommunicationError(self._unused_message(unused))
        for parameter in unused:
            adopt(parameter, self._place[parameter][0])
        self._missing = [0] * len(self._buckets)
        if self._overlaps:
            self._start_ready()
            for work in self._work:
                if work is not None:
                    work.wait()
        else:
            for group in self.groups:
                self.comm.all_reduce(group.arena.tensor, self.op, self.algorithm)
        if self.unused_allowed:
            self._forget_unused()

    def _forget_unused(self) -> None:
        """Parameters that no rank used keep no gradient, so that optimizers leave them alone."""
        used = np.array([p in self._ready for p in self._place], dtype=np.uint8)
        self.comm.all_reduce(used, "max")
        for parameter, anywhere in zip(self._place, used, strict=True):
            if not anywhere:
                parameter.grad = None

    def _unused_message(self, unused: Sequence[nn.Parameter]) -> str:
        names = [self.names[p] for p in unused]
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        return (
            f"{len(names)} parameters got no gradient in this backward pass: {shown}; use them in the loss, or set "
            "find_unused_parameters=True"
        )
