"""Tensor-parallel GPT: parity with one process, 16 bits, dropout, and division along the sequence."""

import copy
from dataclasses import replace

import pytest
import torch
from tensor_support import CLOSE, assemble, check_gradients, same_on_all
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from mpitrain.errors import InputError
from mpitrain.layout.boxes import is_replicated, logical_of
from mpitrain.models.gpt import GPT, Form
from mpitrain.tensor import Axis, parallelize, plan_for

SIZES = (1, 2, 3, 4)
HEADS = {1: 2, 2: 2, 3: 3, 4: 4}


def gpt(ranks, dropout=0.0, vocabulary=257):
    torch.manual_seed(0)
    heads = HEADS[ranks]
    return GPT(vocabulary, layers=2, width=8 * heads, heads=heads, dropout=dropout)


def pair(world, sequence=False, **options):
    """Return the divided and the whole model."""
    whole = gpt(world.size, **options)
    model = copy.deepcopy(whole)
    return parallelize(model, world, plan_for(model), sequence), whole


def batch(vocabulary=257, samples=3, tokens=10, seed=1):
    generator = torch.Generator().manual_seed(seed)
    both = torch.randint(vocabulary, (samples, tokens + 1), generator=generator)
    return both[:, :-1], both[:, 1:]


@pytest.mark.ranks(*SIZES)
@pytest.mark.parametrize("sequence", [False, True])
def test_ten_steps_are_those_of_one_process(world, sequence):
    model, whole = pair(world, sequence)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, whole)]
    for step in range(10):
        x, y = batch(seed=step, tokens=10 if step % 3 else 7)  # lengths may change, and need not divide
        losses = []
        for m, optimizer in zip((model, whole), optimizers, strict=True):
            optimizer.zero_grad()
            loss = m.loss(m(x), y)
            loss.backward()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5), step
        if step == 0:
            check_gradients(world, model, whole)
        for optimizer in optimizers:
            optimizer.step()
    for (name, parameter), expected in zip(model.named_parameters(), whole.parameters(), strict=True):
        if is_replicated(parameter):
            assert same_on_all(world, parameter), name
        torch.testing.assert_close(assemble(world, parameter, parameter), expected, rtol=1e-3, atol=1e-4)


FORMS = {
    "llama": {
        "form": Form(norm="rmsnorm", mlp="swiglu", bias=False, qkv_bias=True, qk_norm=True, hidden=50),
        "tied": False,
        "apart": 3,
    },
    "gpt2": {"form": Form(positions="learned"), "max_positions": 10, "apart": 3, "dropout": 0.0},
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("kind", FORMS)
def test_other_blocks_and_packed_documents_match_one_process(world, sequence, kind):
    torch.manual_seed(0)
    options = dict(FORMS[kind])
    if kind == "llama":
        options["form"] = replace(options["form"], kv_heads=world.size)
    whole = GPT(7, 2, 16 * world.size, 2 * world.size, **options)
    model = copy.deepcopy(whole)
    parallelize(model, world, plan_for(model), sequence)
    for seed in (1, 2):
        x, y = batch(vocabulary=7, seed=seed)
        losses = [m.loss(m(x), y) for m in (model, whole)]
        torch.testing.assert_close(*losses, **CLOSE)
        for loss in losses:
            loss.backward()
    check_gradients(world, model, whole, rtol=1e-5, atol=2e-6)


@pytest.mark.ranks(2, 3)
def test_indivisible_key_value_heads_are_refused_in_one_line(world):
    model = GPT(7, 1, 24, 6, form=Form(kv_heads=1))
    with pytest.raises(InputError, match=rf"qkv: 1 key-value heads cannot be divided evenly over {world.size} tensor"):
        parallelize(model, world, plan_for(model))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("device", ["pretend"], indirect=True)
@pytest.mark.parametrize("sequence", [False, True])
def test_a_model_on_devices_trains_like_one_process(world, sequence, device):
    model, whole = pair(world, sequence)
    model.to(device)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (model, whole)]
    with sdpa_kernel(SDPBackend.MATH):
        for step in range(5):
            x, y = batch(seed=step, tokens=10 if step % 3 else 7)
            losses = []
            for m, optimizer, where in zip((model, whole), optimizers, (device, "cpu"), strict=True):
                optimizer.zero_grad()
                loss = m.loss(m(x.to(where)), y.to(where))
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            assert losses[0] == pytest.approx(losses[1], rel=0, abs=2e-6), step


@pytest.mark.ranks(2)
@pytest.mark.parametrize("device", ["pretend"], indirect=True)
def test_dropout_on_devices_is_recomputed_from_the_right_streams(world, device):
    model, _ = pair(world, dropout=0.3)
    model.to(device)
    x, y = (t.to(device) for t in batch())
    losses = []
    for recompute in (False, True):
        torch.manual_seed(5)
        h = x
        for _, block in model.pipeline_blocks():
            h = checkpoint(block, h, use_reentrant=False) if recompute else block(h)
        loss = model.loss(h, y)
        model.zero_grad()
        loss.backward()
        losses.append([loss.item(), *(p.grad.sum().item() for p in model.parameters())])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5, abs=1e-6)
    layers = nn.Sequential(nn.Linear(4, 96), nn.Dropout(0.5), nn.Linear(96, 40), nn.Dropout(0.5))
    parallelize(layers, world, {"0": "column", "2": "row"})
    layers.to(device)
    masks = Recorder()
    masks.watch(layers[1])
    masks.watch(layers[3])
    torch.manual_seed(1)
    layers(torch.ones(8, 4, device=device))
    distinct_mask, shared_mask = (mask.byte().cpu() for mask in masks.seen)
    assert same_on_all(world, shared_mask) and not same_on_all(world, distinct_mask)


@pytest.mark.ranks(*SIZES)
def test_parameters_are_marked_with_their_slices(world):
    model, whole = pair(world)
    expected = dict(whole.named_parameters())
    assert list(dict(model.named_parameters())) == list(expected)
    elements = torch.zeros(1)
    for name, parameter in model.named_parameters():
        part = logical_of(parameter)
        assert part.shape == tuple(expected[name].shape) and part.numel == parameter.numel()
        assert torch.equal(assemble(world, parameter, parameter), expected[name]), name
        assert is_replicated(parameter) == ("norm" in name or name.endswith(("out.bias", "down.bias")))
        elements += 0 if is_replicated(parameter) else parameter.numel()
    world.all_reduce(elements)
    sharded = sum(p.numel() for n, p in expected.items() if not is_replicated(dict(model.named_parameters())[n]))
    assert int(elements) == sharded
    assert model.head.weight is model.embedding.weight


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("sequence", [False, True])
def test_several_backward_passes_accumulate(world, sequence):
    model, whole = pair(world, sequence)
    for seed in (1, 2, 3):
        x, y = batch(seed=seed)
        for m in (model, whole):
            m.loss(m(x), y).backward()
    check_gradients(world, model, whole, rtol=1e-5, atol=2e-6)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("sequence", [False, True])
def test_bf16_autocast_stays_near_one_process(world, sequence):
    model, whole = pair(world, sequence)
    x, y = batch(tokens=32)
    losses = []
    for m in (model, whole):
        with torch.autocast("cpu", torch.bfloat16):
            scores = m(x)
            loss = m.loss(scores, y)
        assert scores.dtype == torch.bfloat16 and loss.dtype == torch.float32
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    for (name, parameter), expected in zip(model.named_parameters(), whole.parameters(), strict=True):
        if is_replicated(parameter):
            assert same_on_all(world, parameter.grad), name
        gradient = assemble(world, parameter, parameter.grad)
        assert (gradient - expected.grad).norm() < 0.03 * expected.grad.norm() + 1e-6, name


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("sequence", [False, True])
def test_recomputed_blocks_give_the_same_gradients(world, sequence):
    for dropout in (0.0, 0.3):
        model, _ = pair(world, sequence, dropout=dropout)
        x, y = batch()
        gradients = []
        for recompute in (False, True):
            torch.manual_seed(5)
            model.zero_grad()
            h = x
            for _, block in model.pipeline_blocks():
                h = checkpoint(block, h, use_reentrant=False) if recompute else block(h)
            model.loss(h, y).backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
        for gradient, expected in zip(*gradients, strict=True):
            torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-7)


class Recorder(nn.Module):
    """Layer that records which elements of a tensor of ones the dropout kept."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def watch(self, dropout):
        dropout.register_forward_hook(lambda m, args, out: self.seen.append((out != 0) | (args[0] == 0)))


@pytest.mark.ranks(2, 3)
def test_dropout_is_equal_for_replicated_and_different_for_divided_activations(world):
    torch.manual_seed(0)
    # many hidden features: that two ranks draw the same mask by chance is out of the question
    model = nn.Sequential(nn.Linear(4, 96), nn.Dropout(0.5), nn.Linear(96, 40), nn.Dropout(0.5))
    parallelize(model, world, {"0": "column", "2": "row"})
    inner, outer = Recorder(), Recorder()
    inner.watch(model[1])
    outer.watch(model[3])
    for step in (1, 2, 1):
        torch.manual_seed(step)
        y = model(torch.ones(8, 4))
        model(torch.ones(8, 4))
        assert same_on_all(world, y)
        assert same_on_all(world, torch.default_generator.get_state())
    distinct_masks, shared_masks = inner.seen, outer.seen
    assert all(same_on_all(world, mask.byte()) for mask in shared_masks)
    assert not any(same_on_all(world, mask.byte()) for mask in distinct_masks)
    for masks in (distinct_masks, shared_masks):
        assert torch.equal(masks[0], masks[4]) and torch.equal(masks[1], masks[5])  # the seed of the step gives all
        assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[0], masks[2])
    model.eval()
    before = torch.default_generator.get_state()
    model(torch.ones(8, 4))
    assert torch.equal(before, torch.default_generator.get_state())


@pytest.mark.ranks(2, 3)
def test_sequence_parallel_ranks_draw_different_dropout(world):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 32), nn.Dropout(0.5), nn.Linear(32, 96), nn.Linear(96, 32), nn.Dropout(0.5))
    parallelize(model, world, {"0": "vocabulary", "2": "column", "3": "row"}, sequence=True)
    recorder = Recorder()
    recorder.watch(model[1])
    recorder.watch(model[4])
    torch.manual_seed(7)
    model(torch.zeros(2, 4 * world.size, dtype=torch.int64))
    assert [mask.shape[1] for mask in recorder.seen] == [4, 4]
    assert not any(same_on_all(world, mask.byte()) for mask in recorder.seen)
    assert same_on_all(world, torch.default_generator.get_state())


@pytest.mark.ranks(2, 3)
def test_random_streams_recover_after_a_failed_forward_pass(world):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 96), nn.Dropout(0.5), nn.Linear(96, 4), nn.Dropout(0.5))
    parallelize(model, world, {"0": "column", "2": "row"})
    model[0](torch.ones(2, 4))  # and never the row layer
    torch.manual_seed(3)
    masks = Recorder()
    masks.watch(model[1])
    y = model(torch.ones(2, 4))
    assert same_on_all(world, y)
    assert not same_on_all(world, masks.seen[0].byte())


@pytest.mark.ranks(2, 3)
def test_evaluation_needs_no_gradients(world):
    model, whole = pair(world)
    x, y = batch()
    with torch.no_grad():
        torch.testing.assert_close(model.eval().loss(model(x), y), whole.eval().loss(whole(x), y), **CLOSE)


@pytest.mark.ranks(2)
def test_an_axis_may_serve_several_models(world):
    axis = Axis(world)
    for _ in range(2):
        whole = gpt(2)
        model = copy.deepcopy(whole)
        parallelize(model, axis, plan_for(model))
        x, y = batch()
        torch.testing.assert_close(model.loss(model(x), y), whole.loss(whole(x), y), **CLOSE)
    axis.free()
