"""Sequence slices: a trial run shows whether a model can process its sequences slice by slice."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mpitrain.errors import InputError
from mpitrain.models.gpt import GPT
from mpitrain.pipe.partition import check_slices, listed_blocks, slice_sequences


def samples(length: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    both = torch.randint(11, (2, length + 1), generator=draw)
    return both[:, :-1], both[:, 1:]


class Looking(nn.Module):
    """Layer that adds a projection of the mean over all or over past positions. The projection starts at zero."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.into = nn.Linear(6, 6)
        nn.init.zeros_(self.into.weight)
        nn.init.zeros_(self.into.bias)

    def forward(self, x):
        return self.forward_slice(x, [])[0]

    def forward_slice(self, x, past):
        before = torch.cat([*(state for (state,) in past), x], 1)
        counts = torch.arange(1, before.shape[1] + 1).view(1, -1, 1)
        mean = before.cumsum(1) / counts if self.causal else before.mean(1, keepdim=True).expand_as(before)
        return x + self.into(mean[:, -x.shape[1] :]), (x,)


class Table(nn.Module):
    """Learned positions that restart in every slice."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(20, 6))

    def forward(self, x):
        return x + self.positions[: x.shape[1]]


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Fixed(nn.Module):
    """Layer that accepts only sequences of seven positions."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(7, 7)

    def forward(self, x):
        return self.mix(x.transpose(1, 2)).transpose(1, 2)


def model_with(block: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 6), block, nn.Dropout(0.5), nn.Linear(6, 11))


@pytest.mark.parametrize("make", [lambda: GPT(11, 2, 8, 2, dropout=0.3), lambda: model_with(Looking(causal=True))])
def test_causal_models_pass_unchanged(make):
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    for slices in (2, 3, 7):
        check_slices(listed_blocks(model), *samples(), slices)
    assert torch.equal(torch.rand(2), expected)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("block", "what"),
    [
        (Looking(causal=False), "its output differs"),
        (Table(), "its output differs"),
        (Norm(), "normalises over all positions"),
        (Fixed(), "it fails"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_block_that_needs_the_whole_sequence_is_refused_by_name(block, what):
    with pytest.raises(InputError, match=f"block 1 .{type(block).__name__}.*{what}"):
        check_slices(listed_blocks(model_with(block)), *samples(), 2)
    assert block.training


def test_too_short_sequences_and_whole_sequence_labels_are_refused():
    x, y = samples(3)
    for arguments in ((x, y, 4), (x, y[:, 0], 2), (x.float(), y[:, :2], 2)):
        with pytest.raises(InputError, match="slices of the sequence"):
            slice_sequences([arguments[:2]], [1.0], arguments[2])


def test_slices_are_weighted_by_their_length():
    parts, weights = slice_sequences([samples(7)], [0.5], 3)
    lengths = [x.shape[1] for x, _ in parts]
    assert sum(lengths) == 7 and weights == [0.5 * n / 7 for n in lengths]
    assert torch.equal(torch.cat([y for _, y in parts], 1), samples(7)[1])
