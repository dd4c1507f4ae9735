"""The 2BW schedule: no idle time, and exactly the update rule with weights that are one step old."""

from __future__ import annotations

import pytest
import torch
from pipe.pipe_models import descend, even, gpt, layers, mean_square, numbers, step_alone, tokens

from mpitrain.errors import InputError
from mpitrain.pipe.executor import Upcoming
from mpitrain.pipe.pipeline import Pipeline
from mpitrain.pipe.schedule import make_schedule, one_f_one_b, separate, two_bw
from mpitrain.pipe.simulate import Costs, forward_only, simulate, verify, with_messages


def train_delayed(model_of, loss_of, batches, rate=0.3):
    """Train in one process by W(t+1) = W(t) - rate * gradient of batch t at W(t-1); return losses and weights."""
    model, previous, losses = model_of(), model_of(), []
    for microbatches in batches:
        losses.append(step_alone(previous, loss_of(previous), microbatches, even(len(microbatches))))
        gradients = [p.grad for p in previous.parameters()]
        previous.load_state_dict(model.state_dict())  # W(t)
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            p.grad = gradient
        descend(model, rate)
    return losses, dict(model.named_parameters(remove_duplicate=False))


def train_2bw(world, model_of, loss_of, batches, *, drained=(), rate=0.3, between=lambda pipeline: None, **options):
    """Train through a pipeline, in which the batches `drained` do not begin the next one."""
    model = model_of()
    pipeline = Pipeline(model, loss_of(model), world, schedule="2bw", **options)
    losses, peaks = [], []
    for number, microbatches in enumerate(batches):
        following = None
        if number + 1 < len(batches) and number not in drained:
            following = Upcoming(batches[number + 1], even(len(batches[number + 1])))
        pipeline.module.zero_grad()
        losses.append(pipeline.forward_backward(microbatches, even(len(microbatches)), upcoming=following))
        peaks.append(pipeline.peak_in_flight)
        pipeline.synchronize_tied()
        pipeline.versions.begin_update()
        descend(pipeline.module, rate)
        between(pipeline)
    return pipeline, losses, peaks


def require_equal(pipeline, losses, expected, weights):
    assert losses == pytest.approx(expected, rel=0, abs=1e-6)
    for name, p in pipeline.module.named_parameters():
        torch.testing.assert_close(p.detach(), weights[name].detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("p", range(1, 9))
def test_every_part_of_the_schedule_is_complete_ordered_and_free_of_deadlock(p):
    for m in (1, 2, 3, 4, 5, 7, 8, 16, 17):
        for begins in (False, True):
            for ends in (False, True):
                part = separate(two_bw(p, m), begins=begins, ends=ends)
                verify(with_messages(part))
                verify(with_messages(part, Costs(1, 3, 0.5, message=2)))
        verify(with_messages(forward_only(separate(two_bw(p, m), begins=True, ends=True))), training=False)


def test_no_rank_is_idle_where_1f1b_has_its_bubble():
    for p, m in ((2, 4), (3, 6), (4, 8), (8, 32)):
        for costs in (Costs(), Costs(1, 0.6, 0.6), Costs(2, 1, 3)):
            assert simulate(two_bw(p, m), costs).idle == pytest.approx(0, abs=1e-12)
            assert simulate(one_f_one_b(p, m), costs).idle == pytest.approx((p - 1) / (m + p - 1))
        assert simulate(two_bw(p, m)).peaks == tuple(2 * (p - rank) - 1 for rank in range(p))


def test_slices_and_chunks_are_refused():
    with pytest.raises(InputError, match=r"2bw does not slice sequences; set parallel.slices to 1"):
        make_schedule("2bw", 2, 4, 1, 2)
    with pytest.raises(InputError, match=r"2bw: 2 chunks a rank are not possible"):
        make_schedule("2bw", 2, 4, 2)


@pytest.mark.ranks(1, 2, 3, 4)
def test_training_equals_the_delayed_update_rule_of_one_process(world):
    batches = [numbers(8, samples=n) for n in (3, 3, 3, 3, 2, 3)]
    pipeline, losses, peaks = train_2bw(world, layers, lambda m: mean_square, batches)
    require_equal(pipeline, losses, *train_delayed(layers, lambda m: mean_square, batches))
    assert max(peaks) == 2 * (world.size - world.rank) - 1
    exact, _ = train_delayed(layers, lambda m: mean_square, batches[:1])
    assert losses[0] == losses[1] == pytest.approx(exact[0])  # batch 1 uses W(0) too, and has the same samples


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("recompute", [False, True])
def test_a_tied_gpt_and_batches_of_other_sizes_follow_the_delayed_rule(world, recompute):
    counts = (5, 5, 7, 7, 7, 1, 2, 2)
    batches = [tokens(count) for count in counts]

    def evaluate(pipeline):  # with the newest weights, and between two batches under way
        pipeline.evaluate(*tokens(1)[0])

    pipeline, losses, _ = train_2bw(world, gpt, lambda m: m.loss, batches, recompute=recompute, between=evaluate)
    require_equal(pipeline, losses, *train_delayed(gpt, lambda m: m.loss, batches))


@pytest.mark.ranks(2, 3)
def test_draining_changes_no_bit(world):
    batches = [numbers(6)] * 6
    losses = [train_2bw(world, layers, lambda m: mean_square, batches, drained=d)[1] for d in ((), (0, 3), range(6))]
    assert losses[0] == losses[1] == losses[2]
