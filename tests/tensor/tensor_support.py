"""Helpers of the tensor tests: assembly of whole tensors from the ranks' parts, and comparison of gradients."""

from __future__ import annotations

import torch
from torch import nn

from mpitrain.layout.boxes import is_replicated, logical_of

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def same_on_all(world, x: torch.Tensor) -> bool:
    """Return whether every rank has the same bits."""
    theirs = x.new_empty(world.size, *x.shape)
    world.all_gather(theirs, x.detach().contiguous())
    return all(torch.equal(each, x) for each in theirs)


def assemble(world, parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the whole model's tensor from every rank's `values`; `parameter` says where they belong."""
    part = logical_of(parameter)
    whole = torch.zeros(part.shape, dtype=torch.float64).view(-1)
    copies = torch.zeros_like(whole)
    flat = values.detach().contiguous().view(-1).double()
    assert flat.numel() == part.numel
    for place, piece in part.pieces("it", 0, flat.numel()):
        for start, length, at in zip(*(runs.tolist() for runs in piece.runs()), strict=True):
            whole[start : start + length] = flat[place + at : place + at + length]
            copies[start : start + length] += 1
    world.all_reduce(whole)
    world.all_reduce(copies)
    assert (copies == (world.size if is_replicated(parameter) else 1)).all()
    return (whole / copies).view(part.shape).to(values.dtype)


def check_gradients(world, model: nn.Module, whole: nn.Module, **close: float) -> None:
    """Check that gradients are those of one process, and that replicated ones have the same bits on all ranks."""
    expected = dict(whole.named_parameters())
    names = dict(model.named_parameters())
    assert list(names) == list(expected)
    for name, parameter in names.items():
        grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        if is_replicated(parameter):
            assert same_on_all(world, grad), name
        torch.testing.assert_close(
            assemble(world, parameter, grad), expected[name].grad, **(close or CLOSE), msg=lambda m, n=name: f"{n}: {m}"
        )
