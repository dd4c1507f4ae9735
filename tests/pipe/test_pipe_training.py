"""Parity of training through a pipeline with training in one process."""

from __future__ import annotations

import random

import pytest
import torch
from pipe.pipe_models import (
    SCHEDULES,
    WHOLE,
    Delay,
    Laborious,
    descend,
    even,
    gpt,
    largest_error,
    layers,
    mean_square,
    numbers,
    step_alone,
    tokens,
    train_both,
)
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from mpitrain.errors import InputError
from mpitrain.models.gpt import GPT, Form
from mpitrain.pipe.pipeline import Pipeline
from mpitrain.pipe.schedule import Compute, make_schedule
from mpitrain.pipe.simulate import simulate

STEPS = (1, 2, 4, 7, 1, 7)  # microbatches of each


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", SCHEDULES)
def test_losses_and_gradients_of_a_tied_gpt_equal_one_process(world, kind):
    batches = [tokens(count) for count in STEPS]
    pipeline, _, results = train_both(world, gpt, lambda m: m.loss, SCHEDULES[kind], batches)
    for loss, expected, error in results:
        assert loss == pytest.approx(expected, rel=1e-5)
        assert error < 1e-5
    assert pipeline.counted_elsewhere() == ({"head.weight"} if _has_second_copy(world, kind) else set())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("device", ["pretend"], indirect=True)
@pytest.mark.parametrize(
    "options", [SCHEDULES["1f1b"] | {"recompute": True}, SCHEDULES["zb-v"], SCHEDULES["interleaved-slices"]]
)
def test_stages_on_devices_train_like_one_process(world, options, device):
    with sdpa_kernel(SDPBackend.MATH):
        batches = [tokens(count) for count in STEPS[:5]]
        _, _, results = train_both(world, gpt, lambda m: m.loss, options, batches, device)
    for loss, expected, error in results:
        assert loss == pytest.approx(expected, rel=0, abs=2e-6)
        assert error < 1e-5


def packed_gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(30, 5, 8, 2, tied=False, apart=3, form=Form(positions="learned"), max_positions=150)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("device", ["cpu", "pretend"], indirect=True)
@pytest.mark.parametrize("kind", ["1f1b", "zb-v", "interleaved-slices"])
def test_packed_documents_pass_from_stage_to_stage(world, kind, device):
    with sdpa_kernel(SDPBackend.MATH):
        batches = [tokens(2, sequence=150), tokens(2, sequence=96)]
        options = SCHEDULES[kind] | {"recompute": kind == "1f1b"}
        _, _, results = train_both(world, packed_gpt, lambda m: m.loss, options, batches, device)
    for loss, expected, error in results:
        assert loss == pytest.approx(expected, rel=0, abs=2e-6)
        assert error < 1e-5


def _has_second_copy(world, kind: str) -> bool:
    return kind != "zb-v" and world.rank == world.size - 1


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", WHOLE)
def test_equal_order_of_arithmetic_gives_equal_bits(world, kind):
    batches = [numbers(count) for count in STEPS]
    _, _, results = train_both(world, layers, lambda m: mean_square, SCHEDULES[kind], batches)
    assert [(loss, error) for loss, _, error in results] == [(expected, 0.0) for _, expected, _ in results]


@pytest.mark.ranks(2, 3)
def test_recompute_is_bitwise_equal(world):
    for kind in ("1f1b", "zb-h1", "interleaved"):
        options = SCHEDULES[kind] | {"recompute": True}
        _, _, results = train_both(world, layers, lambda m: mean_square, options, [numbers(4)] * 2)
        assert [(loss, error) for loss, _, error in results] == [(expected, 0.0) for _, expected, _ in results]


@pytest.mark.ranks(2, 3)
def test_copies_of_a_tied_parameter_stay_bitwise_equal(world):
    pipeline, _, _ = train_both(world, gpt, lambda m: m.loss, SCHEDULES["1f1b"], [tokens(3)] * 3)
    mine = dict(pipeline.module.named_parameters())
    weight = mine.get("embedding.weight", mine.get("head.weight", torch.zeros(30, 8))).detach()
    everyone = torch.empty(world.size * weight.numel())
    world.all_gather(everyone, weight.flatten())
    copies = everyone.view(world.size, -1)
    assert torch.equal(copies[0], copies[-1])
    assert copies[0].abs().sum() > 0


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", SCHEDULES)
def test_microbatches_in_flight_match_the_simulation(world, kind):
    options = SCHEDULES[kind]
    model, samples_of = (layers(), numbers) if kind in WHOLE else (gpt(), tokens)
    pipeline = Pipeline(model, mean_square if kind in WHOLE else model.loss, world, **options)
    slices, chunks = options.get("slices", 1), options.get("chunks", 1)
    for count in (1, 2, 3, 9):
        pipeline.forward_backward(samples_of(count), even(count))
        schedule = make_schedule(options["schedule"], world.size, count, chunks, slices)
        assert pipeline.peak_in_flight == simulate(schedule).peaks[world.rank] / chunks / slices


@pytest.mark.ranks(8)
def test_microbatches_in_flight_of_eight_ranks_match_the_literature(world):
    table = [
        ({"schedule": "gpipe"}, 32),
        ({"schedule": "1f1b"}, 8),
        ({"schedule": "interleaved", "chunks": 2}, 11.5),
        ({"schedule": "interleaved", "chunks": 4}, 9.75),
        ({"schedule": "zero-bubble", "chunks": 2}, 8),
    ]
    for options, most in table:
        pipeline = Pipeline(layers(32), mean_square, world, **options)
        pipeline.forward_backward(numbers(32), even(32))
        assert max(world.all_gather_object(pipeline.peak_in_flight)) == most


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", ["1f1b", "interleaved", "zb-h1", "zb-v"])
def test_random_delays_change_nothing(world, kind):
    draw = random.Random(world.rank)

    def with_delays() -> nn.Sequential:
        model = layers(8)
        late = [Delay(lambda: draw.choice((0, 0, 0.002))) for _ in model]
        return nn.Sequential(*(nn.Sequential(block, wait) for block, wait in zip(model, late, strict=True)))

    _, _, results = train_both(world, with_delays, lambda m: mean_square, SCHEDULES[kind], [numbers(5)])
    assert [(loss, error) for loss, _, error in results] == [(expected, 0.0) for _, expected, _ in results]


class Fork(nn.Module):
    """Layer from a tensor to features that need a gradient, integers, and features that need none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x):
        return self.linear(x), x.argmax(-1), x * 2


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, parts):
        x, index, other = parts
        return torch.tanh(self.linear(x)) + other, index, other


class Join(nn.Module):
    """Layer that leaves one of its inputs unused."""

    def forward(self, parts):
        x, index, _ = parts
        return x * (index + 1).unsqueeze(-1)


def forked() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(Fork(), *(Middle() for _ in range(6)), Join())


@pytest.mark.ranks(2, 3)
def test_several_tensors_pass_between_stages(world):
    for kind in ("1f1b", "zb-h1", "zb-v"):
        for recompute in (False, True):
            options = SCHEDULES[kind] | {"recompute": recompute}
            _, _, results = train_both(world, forked, lambda m: mean_square, options, [numbers(3)] * 2)
            assert [(loss, error) for loss, _, error in results] == [(expected, 0.0) for _, expected, _ in results]


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("static", [True, False])
def test_shapes_may_change_between_and_inside_batches(world, static):
    model, alone = gpt(), gpt()
    pipeline = Pipeline(model, model.loss, world, schedule="1f1b", static_shapes=static)
    batches = [tokens(3), tokens(2, samples=1, sequence=9), [*tokens(3), *tokens(1, samples=1)], tokens(3)]
    for microbatches in batches:
        weights = [len(x) / 7 for x, _ in microbatches]
        expected = step_alone(alone, alone.loss, microbatches, weights)
        pipeline.module.zero_grad()
        assert pipeline.forward_backward(microbatches, weights) == pytest.approx(expected, rel=1e-5)
        pipeline.synchronize_tied()
        assert largest_error(pipeline, alone) < 1e-5


@pytest.mark.ranks(2, 3)
def test_evaluation_returns_the_same_loss_on_every_rank_and_no_side_effects(world):
    for kind, options in SCHEDULES.items():
        model, alone = gpt(), gpt().eval()
        pipeline = Pipeline(model, model.loss, world, microbatches=3, **options)
        pipeline.module.train()
        ((x, y),) = tokens(1, samples=5)
        with torch.no_grad():
            expected = float(alone.loss(alone(x), y))
        loss = pipeline.evaluate(x, y)
        assert loss == pytest.approx(expected, rel=1e-5), kind
        everyone = torch.empty(world.size, dtype=torch.float64)
        world.all_gather(everyone, torch.tensor([loss], dtype=torch.float64))
        assert len(set(everyone.tolist())) == 1
        assert pipeline.module.training
        assert all(p.grad is None for p in pipeline.module.parameters())


@pytest.mark.ranks(2)
def test_gradients_are_accumulated_in_place(world):
    for kind in ("1f1b", "zb-h1", "zb-v"):
        pipeline = Pipeline(layers(), mean_square, world, **SCHEDULES[kind])
        parameters = list(pipeline.module.parameters())
        arena = world.arena(sum(p.numel() for p in parameters))
        offset = 0
        for p in parameters:
            p.grad = arena.view(offset, p.shape)
            offset += p.numel()
        pipeline.forward_backward(numbers(3), even(3))
        once = arena.tensor.clone()
        pipeline.forward_backward(numbers(3), even(3))
        torch.testing.assert_close(arena.tensor, 2 * once)
        assert once.abs().sum() > 0
        for p in parameters:
            p.grad = None
        arena.free()


@pytest.mark.ranks(2, 3)
def test_half_precision_passes_between_stages(world):
    model, alone = gpt(), gpt()
    pipeline = Pipeline(model, model.loss, world, schedule="zero-bubble")
    with torch.autocast("cpu", torch.bfloat16):
        expected = step_alone(alone, alone.loss, tokens(4), even(4))
        loss = pipeline.forward_backward(tokens(4), even(4))
    pipeline.synchronize_tied()
    assert loss == pytest.approx(expected, rel=1e-5)
    assert largest_error(pipeline, alone) < 2e-2


@pytest.mark.ranks(2, 3)
def test_all_cuts_reach_the_same_losses(world):
    ((x, _),) = tokens(1)
    for cut in ("uniform", "parameters", "time"):
        options = {"schedule": "1f1b", "cut": cut, "sample": x}
        pipeline, _, results = train_both(world, gpt, lambda m: m.loss, options, [tokens(2)])
        assert results[0][2] < 1e-5
        bounds = world.all_gather_object(list(pipeline.bounds))
        assert all(b == bounds[0] for b in bounds)


@pytest.mark.ranks(2, 3)
def test_a_slow_rank_measures_itself_and_gets_fewer_blocks(world):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(*(Laborious(0.02 if world.rank == 0 else 0.004) for _ in range(12)))

    ((x, _),) = numbers(1)
    losses = {}
    for cut in ("uniform", "time"):
        pipeline, _, results = train_both(
            world, model, lambda m: mean_square, {"cut": cut, "sample": x}, [numbers(1)] * 2
        )
        losses[cut] = [loss for loss, _, _ in results]
        assert max(error for _, _, error in results) < 1e-5
    assert losses["time"] == losses["uniform"]
    bounds = world.all_gather_object(list(pipeline.bounds))
    assert all(each == bounds[0] for each in bounds)
    assert bounds[0][1] <= 3  # 2 of 12 without noise with two ranks, 1 with three


@pytest.mark.ranks(2, 3)
def test_names_are_those_of_the_whole_model(world):
    pipeline = Pipeline(gpt(), gpt().loss, world, schedule="1f1b")
    everywhere = [name for names in world.all_gather_object(list(pipeline.module.state_dict())) for name in names]
    assert sorted(everywhere) == sorted(gpt().state_dict())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", SCHEDULES)
def test_watched_steps_follow_the_order_of_the_schedule(world, kind):
    options, model, recorded = SCHEDULES[kind], gpt(), []

    def watched(step, call):
        return lambda: (recorded.append(step), call())

    pipeline = Pipeline(model, model.loss, world, **options)
    pipeline.watched = watched
    pipeline.forward_backward(tokens(4), even(4))
    schedule = make_schedule(options["schedule"], 2, 4, options.get("chunks", 1), options.get("slices", 1))
    assert tuple(step for step in recorded if isinstance(step, Compute)) == schedule.steps[world.rank]


@pytest.mark.ranks(2)
def test_a_model_may_be_built_without_memory(world):
    whole = layers()
    with torch.device("meta"):
        empty = layers()
    pipeline = Pipeline(empty, mean_square, world)
    pipeline.module.to_empty(device="cpu")
    state = whole.state_dict()
    pipeline.module.load_state_dict({name: state[name] for name in pipeline.module.state_dict()})
    expected = step_alone(whole, mean_square, numbers(2), even(2))
    assert pipeline.forward_backward(numbers(2), even(2)) == expected
    assert largest_error(pipeline, whole) == 0.0
    with torch.device("meta"), pytest.raises(InputError, match=r"embedding.weight is shared"):
        Pipeline(gpt(), mean_square, world)


@pytest.mark.ranks(2)
def test_an_empty_batch_has_no_loss(world):
    assert Pipeline(layers(), mean_square, world).forward_backward([], []) == 0.0


def test_unexpected_shape_changes_are_reported():
    import mpitrain

    class Grows(nn.Module):
        wide = False

        def forward(self, x):
            return torch.cat([x, x]) if self.wide else x

    grows = Grows()
    model = nn.Sequential(nn.Linear(5, 5), grows, nn.Linear(5, 5), nn.Linear(5, 5))
    pipeline = Pipeline(model, lambda output, y: output.sum(), mpitrain.init(), schedule="zero-bubble", chunks=2)
    pipeline.forward_backward(numbers(1), [1.0])
    grows.wide = True
    with pytest.raises(InputError, match="static_shapes=False"):
        pipeline.forward_backward(numbers(1), [1.0])
    dynamic = Pipeline(
        model, lambda o, y: o.sum(), mpitrain.init(), schedule="zero-bubble", chunks=2, static_shapes=False
    )
    dynamic.forward_backward(numbers(1), [1.0])
    grows.wide = False
    dynamic.forward_backward(numbers(1), [1.0])


def test_skipping_the_last_step_leaks_no_state():
    """Check that a failed batch does not affect the next one."""
    import mpitrain

    fails = [True]

    def loss(output, y):
        if fails[0]:
            raise ValueError("once")
        return mean_square(output, y)

    pipeline = Pipeline(layers(4), loss, mpitrain.init(), schedule="interleaved", chunks=4)
    alone = layers(4)
    with pytest.raises(ValueError, match="once"):
        pipeline.forward_backward(numbers(2), even(2))
    fails[0] = False
    pipeline.module.zero_grad()
    expected = step_alone(alone, mean_square, numbers(2), even(2))
    assert pipeline.forward_backward(numbers(2), even(2)) == expected
    assert largest_error(pipeline, alone) == 0
    descend(alone)


def test_a_model_without_forward_slice_is_refused():
    import mpitrain

    with pytest.raises(InputError, match="forward_slice"):
        Pipeline(layers(2), mean_square, mpitrain.init(), schedule="terapipe", slices=2)
    pipeline = Pipeline(gpt(1), gpt(1).loss, mpitrain.init(), schedule="terapipe", slices=3)
    with pytest.raises(InputError, match="3 slices of the sequence"):
        pipeline.forward_backward(tokens(1, sequence=2), [1.0])
