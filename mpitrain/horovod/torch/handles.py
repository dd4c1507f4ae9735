"""Handles of submitted operations, and the gradients of operations."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpitrain.horovod.torch.session import ProcessSet, global_process_set
from mpitrain.horovod.torch.submission import HorovodArgumentError, Submission

Tensors = Sequence[torch.Tensor]


def poll(handle: Submission) -> bool:
    """Return whether an operation is complete.

    If it is not, this call may wait until every rank waits for an operation or polls.

    Args:
        handle: Handle of an asynchronous operation.
    """
    if handle.first_poll is None:
        handle.first_poll = time.monotonic()  # what was submitted just now has hardly arrived everywhere
        return handle.is_complete
    return handle.negotiator is not None and handle.negotiator.poll(handle)


def synchronize(handle: Submission) -> Any:
    """Wait for an operation, and return its result. Collective over its process set.

    Args:
        handle: Handle of an asynchronous operation.

    Raises:
        HorovodInternalError: The ranks disagree on the operation, or a rank died.
    """
    if handle.negotiator is not None:
        handle.negotiator.wait(handle)
    return handle.result


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of a process set are here. Collective over it."""
    synchronize(submit("barrier", (), None, process_set))


def join(device: int = -1) -> int:
    """Take part in the other ranks' all-reduces with zeros until all ranks have joined. Collective.

    Args:
        device: Not used; zeros are made on the kind of device that the others use.

    Returns:
        The last rank that joined.
    """
    return global_process_set.require().join()


def submit(kind: str, tensors: Tensors, name: str | None, process_set: ProcessSet, **options: Any) -> Submission:
    """Submit an operation, and return its handle.

    Args:
        kind: Kind of the operation, see `Submission`.
        tensors: Inputs.
        name: Name of the operation; None to number it.
        process_set: Ranks that take part.
        options: Attributes of `Submission`.
    """
    negotiation = process_set.require()
    if any(not isinstance(x, torch.Tensor) for x in tensors):
        raise HorovodArgumentError(f"{kind}: pass torch tensors, not {[type(x).__name__ for x in tensors][:3]}")
    tensors = [x.detach() for x in tensors]
    outputs = options.pop("outputs", None)
    full_name = negotiation.full_name(kind, name)
    return negotiation.submit(Submission(kind, full_name, tensors, tensors if outputs is None else outputs, **options))


def results(handle: Submission) -> Tensors:
    """Wait for an operation, and return its outputs as a sequence."""
    synchronize(handle)
    return handle.outputs


def differentiable(
    run: Callable[[Tensors], Tensors], gradient: Callable[[Tensors], Tensors], tensors: Tensors
) -> Tensors:
    """Return the outputs of an operation; gradients flow through it if an input requires them.

    Args:
        run: Function that carries out the operation.
        gradient: Function that returns the gradients of the inputs from those of the outputs.
        tensors: Inputs.
    """
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in tensors):
        return run(tensors)
    return _Communication.apply(run, gradient, *tensors)


class _Communication(torch.autograd.Function):
    """Autograd function of an operation."""

    @staticmethod
    def forward(ctx: Any, run: Any, gradient: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.gradient = gradient
        return tuple(run(tensors))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.gradient([g.contiguous() for g in grads])
