"""Tensor-parallel layers and functions against one process: outputs and the gradients of inputs and weights."""

import copy

import pytest
import torch
from tensor_support import CLOSE, assemble, check_gradients, same_on_all
from torch import nn

from mpitrain.layout.boxes import is_replicated, split
from mpitrain.tensor import (
    Axis,
    ColumnParallelLinear,
    RowParallelLinear,
    VocabularyCrossEntropy,
    VocabularyParallelEmbedding,
    cross_entropy,
)
from mpitrain.tensor import axis as functions
from mpitrain.tensor.linear import Features

SIZES = (1, 2, 3, 4)


@pytest.fixture
def axis(world):
    tensor_axis = Axis(world)
    yield tensor_axis
    tensor_axis.free()


def local_slice(axis, length):
    bounds = split(length, axis.size)
    return slice(bounds[axis.rank], bounds[axis.rank + 1])


@pytest.mark.ranks(*SIZES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("outputs", [12, 10, 3])
def test_column_parallel_outputs_equal_rows_of_the_whole_layer(axis, world, outputs, bias):
    torch.manual_seed(0)
    whole = nn.Linear(7, outputs, bias=bias)
    layer = ColumnParallelLinear(whole, axis)
    x = torch.randn(2, 5, 7, requires_grad=True)
    x_whole = x.detach().clone().requires_grad_()
    y, expected = layer(x), whole(x_whole)
    rows = local_slice(axis, outputs)
    assert torch.equal(y, nn.functional.linear(x, whole.weight[rows], whole.bias[rows] if bias else None))
    torch.testing.assert_close(y, expected[..., rows], **CLOSE)  # BLAS may add in another order in a smaller matrix
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    (y * weights[..., local_slice(axis, outputs)]).sum().backward()
    torch.testing.assert_close(x.grad, x_whole.grad, **CLOSE)
    assert same_on_all(world, x.grad)
    check_gradients(world, layer, whole)


@pytest.mark.ranks(*SIZES)
def test_column_parallel_outputs_match_the_whole_layer(axis):
    torch.manual_seed(0)
    for inputs, outputs, samples in ((16, 64, 32), (64, 192, 100), (100, 300, 64)):
        whole, x = nn.Linear(inputs, outputs), torch.randn(samples, inputs)
        # not the same bits: a BLAS may sum in another order where there are fewer columns
        torch.testing.assert_close(
            ColumnParallelLinear(whole, axis)(x), whole(x)[:, local_slice(axis, outputs)], **CLOSE
        )


@pytest.mark.ranks(*SIZES)
def test_gathered_column_parallel_outputs_match_the_whole_output(axis, world):
    torch.manual_seed(0)
    whole = nn.Linear(6, 11)
    layer = ColumnParallelLinear(whole, axis, gather_output=True)
    x = torch.randn(3, 6, requires_grad=True)
    y = layer(x)
    torch.testing.assert_close(y, whole(x), **CLOSE)
    (y**2).sum().backward()
    (whole(x.detach()) ** 2).sum().backward()
    check_gradients(world, layer, whole)


@pytest.mark.ranks(*SIZES)
@pytest.mark.parametrize("scatter_input", [True, False])
@pytest.mark.parametrize("inputs", [12, 10, 3])
def test_row_parallel_sums_once_and_adds_the_bias_once(axis, world, inputs, scatter_input):
    torch.manual_seed(0)
    whole = nn.Linear(inputs, 5)
    layer = RowParallelLinear(copy.deepcopy(whole), axis, scatter_input=scatter_input)
    x_whole = torch.randn(2, 3, inputs, requires_grad=True)
    x = x_whole.detach() if scatter_input else x_whole.detach()[..., local_slice(axis, inputs)].clone()
    x.requires_grad_()
    y, expected = layer(x), whole(x_whole)
    torch.testing.assert_close(y, expected, **CLOSE)
    assert same_on_all(world, y)
    (expected**2).sum().backward()
    (y**2).sum().backward()
    x_gradient = x_whole.grad if scatter_input else x_whole.grad[..., local_slice(axis, inputs)]
    torch.testing.assert_close(x.grad, x_gradient, **CLOSE)
    check_gradients(world, layer, whole)


@pytest.mark.ranks(*SIZES)
def test_a_fused_layer_is_divided_in_each_of_its_sections(axis, world):
    for features in (Features((8, 8, 8), 2), Features((16, 8, 8), 2), Features((5, 5))):
        torch.manual_seed(0)
        whole = nn.Linear(3, sum(features.sections))
        layer = ColumnParallelLinear(whole, axis, features)
        x = torch.randn(4, 3)
        rows = torch.cat([torch.arange(lo, hi) for lo, hi in features.ranges(axis.rank, axis.size)])
        torch.testing.assert_close(layer(x), whole(x)[:, rows], **CLOSE)
        assert torch.equal(assemble(world, layer.weight, layer.weight), whole.weight)
        assert torch.equal(assemble(world, layer.bias, layer.bias), whole.bias)


@pytest.mark.ranks(*SIZES)
@pytest.mark.parametrize("tokens", [8, 7, 2])
def test_a_column_and_row_pair_along_the_sequence_equals_one_process(axis, world, tokens):
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6))
    alone = copy.deepcopy(whole)
    column = ColumnParallelLinear(whole[0], axis, sequence=True)
    row = RowParallelLinear(whole[2], axis, sequence=True)
    pair = nn.Sequential(column, nn.GELU(), row)
    x_whole = torch.randn(2, tokens, 6, requires_grad=True)
    x = x_whole.detach()[:, local_slice(axis, tokens)].clone().requires_grad_()
    y, expected = pair(x), alone(x_whole)
    torch.testing.assert_close(y, expected[:, local_slice(axis, tokens)], **CLOSE)
    (expected**2).sum().backward()
    (y**2).sum().backward()
    torch.testing.assert_close(x.grad, x_whole.grad[:, local_slice(axis, tokens)], **CLOSE)
    check_gradients(world, pair, alone)


@pytest.mark.ranks(2, 3)
def test_sequence_parallel_saves_only_the_local_part_for_backward(axis):
    layer = ColumnParallelLinear(nn.Linear(16, 64), axis, sequence=True)
    x = torch.randn(1, 12 // axis.size, 16, requires_grad=True)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        y = layer(x)
    assert 12 * 16 not in sizes
    y.sum().backward()
    expected = torch.cat([x.detach()] * axis.size, 1)  # every rank drew the same
    torch.testing.assert_close(layer.weight.grad, expected.sum((0, 1)).expand_as(layer.weight), **CLOSE)


@pytest.mark.ranks(*SIZES)
@pytest.mark.parametrize("vocabulary", [257, 12, 3])
@pytest.mark.parametrize("padding", [None, 1])
def test_vocabulary_parallel_embedding_equals_the_whole_embedding(axis, world, vocabulary, padding):
    torch.manual_seed(0)
    whole = nn.Embedding(vocabulary, 5, padding_idx=padding)
    layer = VocabularyParallelEmbedding(whole, axis)
    tokens = torch.randint(vocabulary, (4, 9))
    y, expected = layer(tokens), whole(tokens)
    assert torch.equal(y, expected)
    weights = torch.randn_like(expected)
    (y * weights).sum().backward()
    (expected * weights).sum().backward()
    check_gradients(world, layer, whole)


@pytest.mark.ranks(*SIZES)
@pytest.mark.parametrize("vocabulary", [257, 12, 3])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ignored", [-100, 2])
def test_vocabulary_parallel_cross_entropy_equals_torch(axis, world, vocabulary, smoothing, ignored):
    torch.manual_seed(0)
    scores = (torch.randn(3, 7, vocabulary) * 5).requires_grad_()
    y = torch.randint(vocabulary, (3, 7))
    y[0, :3] = ignored
    part = scores.detach()[..., local_slice(axis, vocabulary)].clone().requires_grad_()
    loss = cross_entropy(part, y, axis, vocabulary, ignored, smoothing)
    expected = nn.functional.cross_entropy(
        scores.flatten(0, 1), y.flatten(), ignore_index=ignored, label_smoothing=smoothing
    )
    torch.testing.assert_close(loss, expected, **CLOSE)
    assert same_on_all(world, loss)
    (3 * loss).backward()
    (3 * expected).backward()
    torch.testing.assert_close(part.grad, scores.grad[..., local_slice(axis, vocabulary)], rtol=1e-5, atol=1e-7)


@pytest.mark.ranks(*SIZES)
def test_cross_entropy_is_stable_for_large_scores_and_16_bits(axis):
    scores = torch.tensor([[1e4, -1e4, 0.0, 9990.0, 5.0], [-3e4, -3e4, -3e4, -3e4, -2.9e4]])
    y = torch.tensor([3, 0])
    expected = nn.functional.cross_entropy(scores, y)
    part = scores[:, local_slice(axis, 5)].clone()
    torch.testing.assert_close(VocabularyCrossEntropy(axis, 5)(part, y), expected)
    half = part.bfloat16().requires_grad_()
    loss = cross_entropy(half, y, axis, 5)
    loss.backward()
    assert loss.dtype == torch.float32 and half.grad.dtype == torch.bfloat16
    torch.testing.assert_close(loss, nn.functional.cross_entropy(scores.bfloat16().float(), y))


@pytest.mark.ranks(*SIZES)
def test_cross_entropy_matches_torch_if_every_target_is_ignored(axis):
    y = torch.full((4,), -100)
    scores = torch.randn(4, 8)[:, local_slice(axis, 8)].clone().requires_grad_()
    assert cross_entropy(scores, y, axis, 8).isnan()


@pytest.mark.ranks(2, 3)
def test_a_token_or_target_outside_the_vocabulary_is_refused_as_torch_does(axis):
    layer = VocabularyParallelEmbedding(nn.Embedding(9, 4), axis)
    for wrong in (9, -1):
        with pytest.raises(IndexError, match=f"token {wrong} is not between 0 and 8"):
            layer(torch.tensor([0, wrong]))
        with pytest.raises(IndexError, match=f"target {wrong} is not between 0 and 8"):
            cross_entropy(torch.randn(2, 9)[:, local_slice(axis, 9)], torch.tensor([0, wrong]), axis, 9)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("device", ["pretend"], indirect=True)
def test_a_token_or_target_outside_the_vocabulary_gives_nan_on_a_device(axis, device):
    layer = VocabularyParallelEmbedding(nn.Embedding(9, 4), axis).to(device)
    scores = torch.randn(2, 9)[:, local_slice(axis, 9)].to(device)
    for wrong in (9, -1):
        strange = torch.tensor([0, wrong]).to(device)
        assert layer(strange).isnan().any(1).tolist() == [False, True]
        assert cross_entropy(scores, strange, axis, 9).isnan()
    assert cross_entropy(scores, torch.tensor([0, -100]).to(device), axis, 9).isfinite()


@pytest.mark.ranks(*SIZES)
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("length", [8, 5, 2])
def test_exchange_functions_and_their_gradients(axis, dim, length):
    shape = [3, 4, 5]
    shape[dim] = length
    generator = torch.Generator().manual_seed(3)
    everyones = [torch.randn(shape, generator=generator) for _ in range(axis.size)]
    factors = [torch.randn(shape, generator=generator) for _ in range(axis.size)]
    bounds = split(length, axis.size)

    def part(x, rank=axis.rank):
        return x.narrow(dim, bounds[rank], bounds[rank + 1] - bounds[rank])

    def run(function, x, factor, *arguments):
        x = x.clone().requires_grad_()
        y = function(x, axis, *arguments)
        (y * factor).sum().backward()
        return y.detach(), x.grad

    mine, factor = everyones[axis.rank], factors[axis.rank]
    total, factors_total = sum(everyones), sum(factors)
    common = everyones[0]
    y, grad = run(functions.copy, common, factor)
    assert torch.equal(y, common)
    torch.testing.assert_close(grad, factors_total, **CLOSE)
    y, grad = run(functions.reduce, mine, factors[0])
    torch.testing.assert_close(y, total, **CLOSE)
    assert torch.equal(grad, factors[0])
    y, grad = run(functions.gather, part(common), factors[0], dim)
    assert torch.equal(y, common) and torch.equal(grad, part(factors[0]))
    y, grad = run(functions.scatter, common, part(factors[0]), dim)
    assert torch.equal(y, part(common)) and torch.equal(grad, factors[0])
    y, grad = run(functions.all_gather, part(common), factor, dim)
    assert torch.equal(y, common)
    torch.testing.assert_close(grad, part(factors_total), **CLOSE)
    y, grad = run(functions.reduce_scatter, mine, part(factors[0]), dim)
    torch.testing.assert_close(y, part(total), **CLOSE)
    assert torch.equal(grad, factors[0])


@pytest.mark.ranks(2, 3)
def test_replicated_parameters_are_distinguished_from_parts(axis):
    column, row = ColumnParallelLinear(nn.Linear(4, 6), axis), RowParallelLinear(nn.Linear(6, 4), axis)
    assert [is_replicated(p) for p in (column.weight, column.bias, row.weight, row.bias)] == [False, False, False, True]


class Counting(Axis):
    """Axis that counts the exchanges of each kind."""

    def __init__(self, comm):
        super().__init__(comm)
        self.count = {"all_reduce": 0, "all_gather": 0, "reduce_scatter": 0}

    def all_reduce(self, x, tag=0):
        self.count["all_reduce"] += 1
        return super().all_reduce(x, tag)

    def all_gather(self, x, dim, tag=0, lengths=None):
        self.count["all_gather"] += 1
        return super().all_gather(x, dim, tag, lengths)

    def reduce_scatter(self, x, dim, lengths=None):
        self.count["reduce_scatter"] += 1
        return super().reduce_scatter(x, dim, lengths)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("sequence", [False, True])
def test_an_input_of_several_layers_is_communicated_once(world, sequence):
    torch.manual_seed(0)
    axis = Counting(world)
    wholes = [nn.Linear(4, 12) for _ in range(3)]
    out = nn.Linear(12, 4)
    layers = [ColumnParallelLinear(whole, axis, paired=True, sequence=sequence) for whole in wholes]
    row = RowParallelLinear(copy.deepcopy(out), axis, sequence=sequence)
    x_whole = torch.randn(2, 6, 4, requires_grad=True)
    x = x_whole.detach()[:, local_slice(axis, 6)].clone() if sequence else x_whole.detach().clone()
    x.requires_grad_()
    q, k, v = (layer(x) for layer in layers)
    y = row(q * k + v)
    assert axis.column_input is None
    expected = out(wholes[0](x_whole) * wholes[1](x_whole) + wholes[2](x_whole))
    torch.testing.assert_close(y, expected[:, local_slice(axis, 6)] if sequence else expected, **CLOSE)
    forward = {"all_reduce": 0, "all_gather": 1, "reduce_scatter": 1} if sequence else {"all_reduce": 1}
    assert {name: axis.count[name] for name in forward} == forward
    (y**2).sum().backward()
    (expected**2).sum().backward()
    torch.testing.assert_close(x.grad, x_whole.grad[:, local_slice(axis, 6)] if sequence else x_whole.grad, **CLOSE)
    assert (axis.count["reduce_scatter"] if sequence else axis.count["all_reduce"]) == 2
    for layer, whole in zip((*layers, row), (*wholes, out), strict=True):
        check_gradients(world, layer, whole)
    with torch.no_grad():  # the same input once more: nothing is taken from the pass before
        torch.testing.assert_close(
            row(layers[0](x)),
            out(wholes[0](x_whole))[:, local_slice(axis, 6)] if sequence else out(wholes[0](x_whole)),
            **CLOSE,
        )
    axis.free()
