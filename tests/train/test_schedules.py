"""The learning rate of each step equals that of torch, of transformers and of the papers' formulas."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from torch.optim import lr_scheduler
from train.jobs import run

from mpitrain.config.settings import Config
from mpitrain.errors import InputError
from mpitrain.trainer.optimizing import schedule_of

STEPS, WARMUP, LR = 40, 8, 0.02


def rates(**optim):
    section = Config.from_dict({"optim": {"lr": LR, "warmup": WARMUP} | optim}).optim
    schedule = schedule_of(section, STEPS)
    return [schedule.rate(step) for step in range(STEPS)]


def stepped(make):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    scheduler, learning_rates = make(optimizer), []
    for _ in range(STEPS):
        learning_rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return learning_rates


def test_schedules_match_transformers_after_the_warm_up():
    from transformers import optimization as theirs

    for optim, make in (
        ({"schedule": "constant"}, lambda o: theirs.get_constant_schedule_with_warmup(o, WARMUP)),
        ({"schedule": "linear"}, lambda o: theirs.get_linear_schedule_with_warmup(o, WARMUP, STEPS)),
        ({"schedule": "cosine"}, lambda o: theirs.get_cosine_schedule_with_warmup(o, WARMUP, STEPS)),
        ({"schedule": "inverse-sqrt"}, lambda o: theirs.get_inverse_sqrt_schedule(o, WARMUP)),
        (
            {"schedule": "polynomial", "lr_end": 1e-4, "schedule_options": {"power": 3}},
            lambda o: theirs.get_polynomial_decay_schedule_with_warmup(o, WARMUP, STEPS, lr_end=1e-4, power=3),
        ),
        (
            {"schedule": "wsd", "decay_steps": 10},
            lambda o: theirs.get_wsd_schedule(o, WARMUP, 10, num_training_steps=STEPS, decay_type="linear"),
        ),
    ):
        ours, expected = rates(**optim), stepped(make)
        assert ours[WARMUP:] == pytest.approx(expected[WARMUP:], rel=1e-12), optim
        assert ours[: WARMUP - 1] == pytest.approx(expected[1:WARMUP], rel=1e-12)  # theirs trains one step at 0
        assert ours[WARMUP - 1] == pytest.approx(LR)
    assert rates(schedule="wsd", decay_steps=0.25) == rates(schedule="wsd", decay_steps=10)
    assert rates(schedule="wsd", lr_end=1e-3)[-1] == pytest.approx(1e-3 + (LR - 1e-3) / 8)
    assert rates(schedule="cosine", lr_end=1e-3)[-1] == pytest.approx(
        1e-3 + (LR - 1e-3) * 0.5 * (1 + math.cos(math.pi * 31 / 32))
    )


def test_torch_schedules_give_the_rates_of_torch():
    for name, options, more in (
        ("OneCycleLR", {}, {"max_lr": LR, "total_steps": STEPS, "cycle_momentum": False}),
        ("OneCycleLR", {"max_lr": 0.1, "pct_start": 0.5}, {"total_steps": STEPS, "cycle_momentum": False}),
        ("CyclicLR", {"step_size_up": 5}, {"base_lr": 0.0, "max_lr": LR, "cycle_momentum": False}),
        ("CosineAnnealingLR", {"eta_min": 1e-4}, {"T_max": STEPS}),
        ("CosineAnnealingWarmRestarts", {"T_0": 7}, {}),
        ("StepLR", {"step_size": 6, "gamma": 0.5}, {}),
        ("MultiStepLR", {"milestones": [3, 20]}, {}),
        ("ExponentialLR", {"gamma": 0.9}, {}),
        ("LinearLR", {}, {}),
        ("ConstantLR", {}, {}),
        ("PolynomialLR", {"total_iters": 30, "power": 2.0}, {}),
    ):
        expected = stepped(lambda o, n=name, k=options | more: getattr(lr_scheduler, n)(o, **k))
        assert rates(schedule=name, schedule_options=options) == expected, name


@pytest.mark.parametrize(
    ("optim", "message"),
    [
        ({"schedule": "StepLr"}, r"'StepLr' is not in torch.optim.lr_scheduler; did you mean 'StepLR'"),
        ({"schedule": "StepLR"}, r"StepLR does not accept optim.schedule_options: .*step_size"),
        ({"schedule": "StepLR", "schedule_options": {"size": 1}}, r"StepLR has no size; it has step_size, gamma"),
        (
            {"schedule": "ReduceLROnPlateau", "schedule_options": {"mode": "max"}},
            r"lower is better; use mode min",
        ),
        ({"schedule": "ReduceLROnPlateau", "schedule_options": {"rate": 1}}, r"has no rate; it has factor, patience"),
        ({"schedule": "LambdaLR"}, r"LambdaLR needs a Python function, .*; give mt.initialize a scheduler"),
        ({"schedule": "SequentialLR"}, r"needs arguments that a configuration cannot contain"),
        ({"schedule": "OneCycle"}, r"OneCycle of DeepSpeed is called 'one-cycle' here"),
        ({"schedule": "one-cycle", "schedule_options": {"pct": 1}}, r"there is no option pct; the options are"),
        (
            {"schedule": "one-cycle", "schedule_options": {"cycle_momentum": 1}},
            r"momentum: input should be a valid boolean",
        ),
        (
            {"schedule": "range-test", "schedule_options": {"lr_range_test_step_size": 2.5}},
            r"step_size: input should be a valid integer",
        ),
        (
            {"name": "sgd", "schedule": "one-cycle", "schedule_options": {"cycle_momentum": True}},
            r"which SGD does not have",
        ),
        ({"schedule": "OneCycleLR", "schedule_options": {"total_steps": 9}}, r"OneCycleLR ends before train.steps: "),
        ({"schedule": "cosine", "schedule_options": {"power": 1}}, r"cosine has no option power; polynomial has"),
        ({"schedule": "cosin"}, r"input should be 'constant', 'linear'"),
    ],
)
def test_invalid_schedules_are_refused_in_one_line(optim, message):
    with pytest.raises(InputError, match=message) as caught:
        rates(**optim)
    assert "\n" not in str(caught.value)


def test_one_cycle_matches_deepspeed():
    """Formula of its documentation: up and down, in stairs if there are any, then divided by a growing number."""
    least, most = 0.001, 0.005
    options = {"cycle_min_lr": least, "cycle_max_lr": most, "cycle_first_step_size": 10, "cycle_second_step_size": 20}
    decay = {"decay_step_size": 4, "decay_lr_rate": 0.5, "decay_mom_rate": 0.01}
    momenta = {"cycle_momentum": True, "cycle_min_mom": 0.85, "cycle_max_mom": 0.95}
    for stairs in ({}, {"cycle_first_stair_count": 5}, {"cycle_first_stair_count": 4, "cycle_second_stair_count": 5}):
        schedule_options = options | decay | momenta | stairs
        section = Config.from_dict({"optim": {"schedule": "one-cycle", "schedule_options": schedule_options}}).optim
        schedule = schedule_of(section, STEPS)
        up = stairs.get("cycle_first_stair_count", 0)
        down = stairs.get("cycle_second_stair_count", up)
        for step in range(STEPS):
            share, count = (step / 10, up) if step <= 10 else ((30 - step) / 20, down)
            share = math.floor(share * count + 1e-9) / count if count else share
            rate, momentum = least + (most - least) * share, 0.95 - 0.1 * share
            if step >= 30:
                rate, momentum = least / (1 + 0.5 * (step - 30) / 4), 0.95 * (1 + 0.01 * (step - 30) / 4)
            assert schedule.rate(step) == pytest.approx(rate, rel=1e-12), (stairs, step)
            assert schedule.momentum(step) == pytest.approx(momentum, rel=1e-12), (stairs, step)
    whole = rates(schedule="one-cycle")
    assert whole[0] == pytest.approx(LR / 10) and whole[STEPS // 2] == pytest.approx(LR) and whole[1] == whole[-1]


def test_range_test_matches_deepspeed():
    options = {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 8, "lr_range_test_step_rate": 5}
    expected = [1e-4 * (1 + 5 * step / 8) for step in range(STEPS)]
    assert rates(schedule="range-test", schedule_options=options) == pytest.approx(expected, rel=1e-12)
    options["lr_range_test_staircase"] = True
    expected = [1e-4 * (1 + 5 * (step // 8)) for step in range(STEPS)]
    assert rates(schedule="range-test", schedule_options=options) == pytest.approx(expected, rel=1e-12)
    whole = rates(schedule="range-test")
    assert whole[0] == pytest.approx(LR / 100) and whole[-1] == pytest.approx(LR)


def test_plateau_matches_torch_and_resumes_from_its_state():
    losses = [1.0, 0.9, 0.95, 0.95, 0.95, math.nan, 0.9, 0.89, 0.5, 0.6, 0.6, 0.6]
    options = {"factor": 0.5, "patience": 1, "cooldown": 1, "min_lr": 1e-4}
    optim = {"lr": LR, "schedule": "ReduceLROnPlateau", "schedule_options": options}
    section = Config.from_dict({"optim": optim}).optim
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    theirs, ours = lr_scheduler.ReduceLROnPlateau(optimizer, **options), schedule_of(section, STEPS)
    for loss in losses:
        state = json.loads(json.dumps(ours.state(), allow_nan=False))
        ours = schedule_of(section, STEPS)
        ours.load(state)
        ours.observe(loss)
        theirs.step(loss)
        assert ours.rate(0) == optimizer.param_groups[0]["lr"]
    assert ours.rate(0) < LR / 4


@pytest.mark.ranks(1)
def test_a_run_resumes_bitwise_equal_within_a_schedule(world, folder, text):
    def settings(optim, **checkpoint):
        return {
            "data": {"path": text},
            "model": {"sequence": 16, "width": 16, "heads": 2, "layers": 1},
            "train": {"steps": 4, "batch": 4, "evaluate_every": 1, "evaluate_samples": 4},
            "optim": {"warmup": 0} | optim,
            "checkpoint": {"every": 2, "keep": 2} | checkpoint,
        }

    plateau = {"threshold": 10.0, "threshold_mode": "abs", "patience": 1, "factor": 0.5}  # never better by so much
    for optim in (
        ({"schedule": "one-cycle", "schedule_options": {"cycle_momentum": True}}),
        ({"schedule": "ReduceLROnPlateau", "schedule_options": plateau}),
    ):
        where = folder / optim["schedule"]
        whole = run(world, where, **settings(optim))
        if world.rank == 0:
            shutil.rmtree(where / "checkpoints/step-00000004")
        world.barrier()
        again = run(world, where, **settings(optim))
        expected = [(m["step"], m["lr"], m["loss"]) for m in whole[2:]]
        assert [(m["step"], m["lr"], m["loss"]) for m in again[-2:]] == expected, optim
        assert len({lr for _, lr, _ in expected}) == 2, optim
    with pytest.raises(
        InputError, match=r"ReduceLROnPlateau follows the held-out loss, but train.evaluate_every 0 measures"
    ):
        run(world, folder / "never", **settings(optim) | {"train": {"evaluate_every": 0}})
