"""Slices of logical tensors: each element belongs to exactly one rank, for any shape."""

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from torch import nn

from mpitrain.layout.boxes import Piece, Slice, common_intervals, is_replicated, logical_of
from mpitrain.tensor.axis import Axis
from mpitrain.tensor.linear import Features, part_of


@pytest.mark.parametrize(
    ("shape", "dim", "features"),
    [
        ((7,), 0, Features((7,))),
        ((12, 5), 0, Features((4, 4, 4), 2)),
        ((14, 3), 0, Features((8, 4, 2), 2)),
        ((5, 9), 1, Features((9,))),
        ((2, 3), 0, Features((2,))),
        ((6, 2, 3), 1, Features((2,))),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_element_is_on_one_rank_as_its_slice_describes(shape, dim, features, size):
    whole = nn.Parameter(torch.arange(float(np.prod(shape))).view(shape))
    assembled = torch.full_like(whole, -1).view(-1)
    for rank in range(size):
        part = part_of(whole, dim, features, cast(Axis, SimpleNamespace(rank=rank, size=size, names=("tensor",))))
        logical = logical_of(part)
        assert logical.shape == shape and logical.numel == part.numel() and not is_replicated(part)
        flat = part.detach().view(-1)
        half = flat.numel() // 2  # a sharded optimizer has some elements of a rank's part
        for lo, hi in ((0, half), (half, flat.numel())):
            values = flat[lo:hi]
            for place, piece in logical.pieces("w", lo, hi):
                for at, to, length in zip(*common_intervals(piece, Piece.whole("w", whole.numel())), strict=True):
                    target = assembled[to : to + length]
                    assert (target == -1).all()
                    target.copy_(values[place + at : place + at + length])
    assert torch.equal(assembled.view(shape), whole.detach())


def test_undivided_parameters_are_whole_and_replicated():
    parameter = nn.Parameter(torch.zeros(3, 4))
    assert logical_of(parameter) == Slice.whole((3, 4)) and is_replicated(parameter)
    [(place, piece)] = logical_of(parameter).pieces("w", 2, 7)
    assert (place, piece.lo, piece.hi) == (0, 2, 7)


def test_a_section_that_is_no_multiple_of_its_unit_is_refused():
    with pytest.raises(ValueError, match="not multiples of 3"):
        Features((6, 8), 3)
