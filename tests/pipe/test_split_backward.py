"""Backward in two halves: the gradients of a whole backward, for any module."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from mpitrain.pipe.stage import Stage


class SharedTwice(nn.Module):
    """Two layers with the same weight and bias, and an elementwise scale that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.second.bias = self.first.bias
        self.scale = nn.Parameter(torch.rand(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x) * self.scale)) * self.scale


class ManyOutputs(nn.Module):
    """Module with two outputs that need a gradient, one that does not, and a parameter that is an output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 12)
        self.offset = nn.Parameter(torch.rand(6))
        self.unused = nn.Parameter(torch.rand(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        left, right = self.linear(x).chunk(2, dim=-1)
        return left.exp(), right * left, x.argmax(-1), self.offset * 2


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return 2 * x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return 2 * gradient * weight, (2 * gradient * x).sum(0)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(torch.sin(x), self.weight)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.unsqueeze(1)).mean((2, 3))


MODULES = {
    "in place": lambda: nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)), nn.ReLU(inplace=True), nn.Linear(6, 6)),
    "deep": lambda: nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(9))),
    "linear": lambda: nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.LayerNorm(9), nn.Linear(9, 6)),
    "shared twice": SharedTwice,
    "many outputs": ManyOutputs,
    "custom function": Custom,
    "convolution": Images,
    "parametrized": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 6)), nn.Tanh()),
    "transformer": lambda: nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True),
    "recurrent": lambda: nn.GRUCell(6, 6),
    "no parameters": nn.Tanh,
}


def inputs(name: str) -> torch.Tensor:
    torch.manual_seed(5)
    shape = (3, 5, 6) if name in ("transformer", "convolution") else (4, 6)
    return torch.randn(shape)


def run(name: str, how: str, *, recompute: bool, first: bool = False, cut: bool = False) -> tuple[list, dict, dict]:
    """Run two microbatches; return the gradients of the input and of the parameters, added to preset memory."""
    torch.manual_seed(3)
    module = MODULES[name]()
    stage = Stage(list(module) if cut else [module], first=first, recompute=recompute, halves=how == "split")
    homes = {}
    for key, p in module.named_parameters():
        p.grad = torch.full_like(p, 0.5)
        homes[key] = p.grad
    records, gradients, input_gradients = [], [], []
    for scale in (1.0, 2.0):
        x = (inputs(name) * scale).requires_grad_(not first)
        output, record = stage.forward(x)
        differentiable = [t for t in (output if isinstance(output, tuple) else (output,)) if t.requires_grad]
        torch.manual_seed(9)
        records.append(record)
        gradients.append([torch.randn_like(t) for t in differentiable])
    if how == "whole":
        for record, output_gradients in zip(records, gradients, strict=True):
            input_gradients += stage.backward(record, output_gradients)
    else:
        for record, output_gradients in zip(records, gradients, strict=True):
            input_gradients += stage.backward_input(record, output_gradients)
        for record in records:
            stage.backward_weight(record)
    for key, p in module.named_parameters():
        assert p.grad is homes[key], "the gradient was replaced, not added to"
    return input_gradients, homes, dict(module.named_buffers())


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("recompute", [False, True])
def test_two_halves_give_the_gradients_of_one_backward(name, recompute):
    x_whole, whole, _ = run(name, "whole", recompute=False)
    x_split, split, _ = run(name, "split", recompute=recompute)
    for a, b in zip(x_whole, x_split, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    for key in whole:
        torch.testing.assert_close(whole[key], split[key], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["deep", "in place", "parametrized"])
def test_a_stage_of_several_blocks_has_the_same_gradients(name):
    for recompute in (False, True):
        x_whole, whole, _ = run(name, "whole", recompute=False)
        x_split, split, _ = run(name, "split", recompute=recompute, cut=True)
        assert all(torch.equal(a, b) for a, b in zip(x_whole, x_split, strict=True))
        for key in whole:
            torch.testing.assert_close(whole[key], split[key], rtol=1e-6, atol=1e-6)


def test_a_stage_may_begin_by_overwriting_its_input():
    torch.manual_seed(0)
    stage = Stage([nn.ReLU(inplace=True), nn.Linear(4, 4)], first=False, recompute=False)
    x = torch.randn(2, 4, requires_grad=True)
    before = x.detach().clone()
    _, record = stage.forward(x)
    (input_gradient,) = stage.backward(record, [torch.ones(2, 4)])
    assert torch.equal(x.detach(), before)
    assert torch.equal(input_gradient == 0, before <= 0)


def test_the_first_stage_computes_all_gradients_in_the_weight_half():
    _, whole, _ = run("linear", "whole", recompute=False, first=True)
    input_gradients, split, _ = run("linear", "split", recompute=False, first=True)
    assert input_gradients == []
    for key in whole:
        torch.testing.assert_close(whole[key], split[key], rtol=0, atol=0)


def test_the_input_half_computes_no_weight_gradients():
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    stage = Stage([module], first=False, recompute=False)
    _, record = stage.forward(torch.randn(2, 4, requires_grad=True))
    stage.backward_input(record, [torch.ones(2, 4)])
    assert all(layer.weight.grad is None for layer in (module[0], module[2]))
    stage.backward_weight(record)
    assert all(p.grad is not None for p in module.parameters())


def test_frozen_parameters_get_no_gradient():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[0].requires_grad_(False)
    stage = Stage([module], first=False, recompute=False)
    _, record = stage.forward(torch.randn(2, 4, requires_grad=True))
    (input_gradient,) = stage.backward_input(record, [torch.ones(2, 4)])
    stage.backward_weight(record)
    assert input_gradient.abs().sum() > 0
    assert module[0].weight.grad is None and module[1].weight.grad is not None


def test_recompute_draws_the_same_dropout():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5))
    stage = Stage([module], first=False, recompute=True)
    x = torch.randn(4, 8, requires_grad=True)
    output, record = stage.forward(x)
    torch.rand(10)  # the generator moves on before backward
    stage.backward(record, [torch.ones_like(output)])
    assert torch.equal(module[0].bias.grad, 2.0 * (output != 0).sum(0))


def test_recompute_leaves_the_statistics_of_one_forward_pass():
    buffers = []
    for recompute in (False, True):
        module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        stage = Stage([module], first=False, recompute=recompute)
        torch.manual_seed(0)
        module[0].reset_parameters()
        output, record = stage.forward(torch.randn(4, 8, requires_grad=True))
        stage.backward(record, [torch.ones_like(output)])
        buffers.append(dict(module.named_buffers()))
    assert all(torch.equal(buffers[1][name], buffer) for name, buffer in buffers[0].items())


def test_recompute_keeps_only_the_input():
    kept_bytes = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept_bytes.append(t.nbytes)
        return t

    stage = Stage([nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)], first=False, recompute=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        _, record = stage.forward(torch.randn(4, 8, requires_grad=True))
    assert kept_bytes == []
    assert record.outputs == ()
