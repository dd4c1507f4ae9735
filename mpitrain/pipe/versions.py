"""Two versions of a rank's weights, for schedules that update the weights while the next batch is under way.

Forward and backward of one batch use the same version on every stage. Batch t uses W(t-1), the weights before the
update of the last batch, because its first forward steps run while batch t-1 still computes its gradients:

    W(t+1) = W(t) - lr * gradient of batch t at W(t-1),    W(-1) = W(0)

    during batch t    previous  W(t-1)    forward and backward of batch t
                      newest    W(t)      first forward steps of batch t+1; evaluation; checkpoints
    update            previous  W(t)      the memory of W(t-1) becomes that of W(t+1)
                      newest    W(t+1)

A tensor's memory is not written while a graph of autograd refers to it: batch t+1 keeps W(t) until its own end.

Reference: Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-2BW).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class WeightVersions:
    """Newest and previous weights of a module. Its parameters hold the newest, except while a batch is computed.

    Args:
        module: Module whose trained parameters have two versions.

    Attributes:
        on_select: Function called with True or False when the newest or the previous weights have been selected.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._newest = module, True
        self.on_select: Callable[[bool], None] = lambda newest: None
        self._others: dict[nn.Parameter, torch.Tensor] = {}
        self._gradients: dict[nn.Parameter, torch.Tensor | None] = {}  # of the batch that `.grad` is not of

    @property
    def others(self) -> dict[nn.Parameter, torch.Tensor]:
        """Version of each trained parameter that it does not hold now: the previous one between batches."""
        if not self._others:
            self._others = {p: p.detach().clone() for p in self._module.parameters() if p.requires_grad}
        return self._others

    def begin_batch(self, *, begun: bool) -> None:
        """Add the gradients of a batch that has begun before to `.grad`, and let its graphs be used.

        Autograd would refuse their backward pass, because the parameters have been updated since. The update was in
        memory to which these graphs do not refer, so they are still right.

        Args:
            begun: If false, nothing of the batch has been computed, and the gradients of another one are dropped.
        """
        parameters = tuple(self.others)
        torch._C._autograd._unsafe_set_version_counter(parameters, (0,) * len(parameters))
        for p, gradient in self._gradients.items() if begun else ():
            p.grad = gradient if p.grad is None else p.grad if gradient is None else p.grad + gradient
        self._gradients = dict.fromkeys(parameters)
        self._swap_gradients()

    def select(self, newest: bool) -> None:
        """Let the parameters hold the newest weights and the next batch's gradients, or the previous and this batch's.

        Nothing is copied.
        """
        if newest != self._newest:
            for p, other in self.others.items():
                self._others[p], p.data = p.data, other
            self._swap_gradients()
            self._newest = newest
            self.on_select(newest)

    def end_batch(self) -> None:
        """Let the parameters hold the newest weights, and this batch's gradients."""
        self.select(True)
        self._swap_gradients()

    def begin_update(self) -> None:
        """Make the newest weights the previous ones, and let the parameters hold a copy of them, to be updated."""
        for p, other in self.others.items():
            other.copy_(p.detach())
            self._others[p], p.data = p.data, other

    def _swap_gradients(self) -> None:
        for p, gradient in self._gradients.items():
            self._gradients[p], p.grad = p.grad, gradient
