"""Reduces gradients over the ranks as backward produces them.

A hook on each parameter notes that its gradient is complete. When all of a bucket are, and all buckets before
it have been started, its reduction starts, in the same order on every rank. Where no core is free to carry it out
meanwhile nothing would overlap: whole gradients are then reduced at the end of backward in one operation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from mpitrain.comm import Communicator, Work
from mpitrain.errors import CommunicationError, InputError
from mpitrain.shard.flat import numbered
from mpitrain.shard.gradients import Gradients
from mpitrain.shard.in_place import InPlace


class Reducer:
    """Watches the backward passes of some parameters, and reduces their gradients bucket by bucket.

    Args:
        gradients: Where the gradients are kept; says which parameters there are.
        names: Of the parameters, for messages.
        module: Theirs, whose linear layers are to compute gradients where they are reduced (see `in_place`); None
            where gradients are made by other means than autograd's backward pass.
        unused_allowed: Parameters without a gradient count as zero; else they are an error that names them.
        static: The first backward pass tells which parameters are used, and how often, in all of them.
        forget_unused: Parameters that no rank used get no gradient, so that optimizers leave them alone.

    Attributes:
        enabled: Whether backward passes are reduced; False while gradients are only accumulated.
        last: Whether no more passes are expected before the step, after this one.
        order: The parameters in the order in which the gradients of the last backward pass came.
        passes: Backward passes reduced so far.
        used: Parameters that got a gradient since the last update; None where nobody asks for them.
        factor: What a reduction's result is multiplied by.
    """

    def __init__(
        self,
        gradients: Gradients,
        names: Mapping[nn.Parameter, str],
        module: nn.Module | None,
        *,
        unused_allowed: bool = False,
        static: bool = False,
        forget_unused: bool = True,
    ) -> None:
        self.gradients, self.names = gradients, names
        self.unused_allowed, self.static = unused_allowed, static
        self.enabled = self.last = True
        self.order: list[nn.Parameter] = []
        self.passes = 0
        self.factor = 1.0
        self.used: set[nn.Parameter] | None = None
        self._forget = forget_unused and (unused_allowed or static)
        self._as_it_goes = gradients.reduction.overlaps or gradients.reduces_each_pass
        buckets = [gradients.groups[g].members(b) for g, b in numbered(gradients.groups)]
        self._bucket = {p: number for number, members in enumerate(buckets) for p, _ in members}
        self._total = len(buckets)
        self._expected = dict.fromkeys(self._bucket, 1)  # gradients of each parameter in one backward pass
        self._came: dict[nn.Parameter, int] = {}
        self._touched: set[nn.Parameter] = set()  # got a gradient since the last reduction
        self._missing: list[int] = []  # by bucket, parameters whose gradients are still to come
        self._works: list[Work | None] = []  # of the buckets started so far
        self._in_backward = False
        self._hooks = [p.register_post_accumulate_grad_hook(self._hook) for p in self._bucket]
        self._in_place = InPlace(module, self._bucket, gradients) if module is not None else None

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        if self._in_place is not None:
            self._in_place.remove()

    def take_over(self, earlier: Reducer) -> None:
        """Take the place of another reducer of the same parameters, which is closed, and take over its gradients."""
        for parameter in self._bucket:
            if parameter.grad is not None:
                self.gradients.arrived(parameter)
        self.passes, self.factor, self.enabled = earlier.passes, earlier.factor, earlier.enabled
        self._expected.update(earlier._expected)
        self._touched = earlier._touched
        earlier.gradients.free()

    def _hook(self, parameter: nn.Parameter) -> None:
        """Autograd has added to the parameter's `.grad`."""
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            name = self.names[parameter]
            raise InputError(
                f"the gradient of {name} is sparse, and flat gradients are dense; make its layer with sparse=False"
            )
        self._touched.add(parameter)
        if not self.enabled:
            self.gradients.arrived(parameter)
            return
        if not self._in_backward:
            self._begin()
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        bucket = self._bucket[parameter]
        if bucket < len(self._works) and not self._expected[parameter]:
            raise InputError(
                f"{self.names[parameter]} got a gradient, and none in the first backward pass, but static_graph=True "
                "says that all are alike; leave it out"
            )
        if bucket < len(self._works):
            raise InputError(
                f"{self.names[parameter]} got a second gradient in one backward pass, after the first was sent: a "
                "checkpoint with use_reentrant=True does that; use use_reentrant=False, or static_graph=True"
            )
        self.gradients.arrived(parameter)
        came = self._came.get(parameter, 0) + 1
        self._came[parameter] = came
        if came == 1:
            self.order.append(parameter)
        if came == self._expected[parameter]:
            self._missing[bucket] -= 1
            if self._as_it_goes and (self.passes or not self.static):
                self._start_ready()

    def _begin(self) -> None:
        """Expect the gradients of a new backward pass."""
        self._missing = [0] * self._total
        for parameter, times in self._expected.items():
            self._missing[self._bucket[parameter]] += times > 0
        self._came, self.order, self._works = {}, [], []

    def _start_ready(self, everything: bool = False) -> None:
        """Start the buckets that have all their gradients, in order up to the first that has not, or all of them."""
        background = self.gradients.reduction.overlaps
        while len(self._works) < self._total and (everything or self._missing[len(self._works)] <= 0):
            self._works.append(self.gradients.start(len(self._works), background))

    def finish(self) -> None:
        """Complete the reduction of all buckets. Collective.

        Autograd calls this at the end of backward. A rank that has no backward pass to do, or whose gradients were
        added up while not `enabled`, calls it itself.
        """
        alone = not self._in_backward
        if alone:
            self._begin()
        self._in_backward = False
        unused = [p for p, times in self._expected.items() if times and p not in self._touched]
        if unused and not alone and not self.unused_allowed and not (self.static and not self.passes):
            raise CommunicationError(self._unused_message(unused))
        self.gradients.settle()
        at_once = self.gradients.at_once
        if at_once is None:
            self._start_ready(everything=True)
            self.gradients.end(self._works)
        else:
            for number, flat in enumerate(at_once):
                self.gradients.reduction.sum(flat, number, None, background=False)
        if self.factor != 1.0:
            self.gradients.scale(self.factor)
        if self.static and not self.passes and not alone:
            self._expected = {p: self._came.get(p, 0) for p in self._bucket}
        if self._forget:
            for parameter in self._unused_by_all(self._touched, self.gradients.reduction.comm):
                parameter.grad = None
        if self.used is not None:
            self.used |= self._touched
        self._touched.clear()
        self.passes += 1

    def touched(self) -> set[nn.Parameter]:
        """Return the parameters that got a gradient since the last reduction, to which others may be added.

        Gradients that came by other means than a backward pass with hooks must still be the parameters' `.grad`.
        """
        self._touched |= {p for p in self._bucket if p.grad is not None}
        return self._touched

    def take_unused(self, comm: Communicator) -> set[nn.Parameter]:
        """Return the parameters that no rank of `comm` used since the last call. Collective, where anybody asks."""
        if self.used is None:
            return set()
        unused = set(self._unused_by_all(self.used, comm))
        self.used.clear()
        return unused

    def _unused_by_all(self, used: Collection[nn.Parameter], comm: Communicator) -> list[nn.Parameter]:
        """Return the parameters that no rank used. Collective."""
        anywhere = np.array([p in used for p in self._bucket], dtype=np.uint8)
        comm.all_reduce(anywhere, "max")
        return [p for p, somewhere in zip(self._bucket, anywhere, strict=True) if not somewhere]

    def _unused_message(self, unused: Sequence[nn.Parameter]) -> str:
        """The message about parameters that got no gradient."""
        names = [self.names[p] for p in unused]
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        mend = (
            "they had one in the first, and static_graph=True says that all are alike; leave it out"
            if self.static
            else "use them in the loss, or set find_unused_parameters=True"
        )
        return f"{len(names)} parameters got no gradient in this backward pass: {shown}; {mend}"
