"""DeepSpeed configurations: files of public repositories, and one error that lists everything unsupported."""

import io
import json
import math
import warnings
from contextlib import redirect_stdout
from itertools import product

import pytest
import torch
from deepspeed_files import FILES, READ, REFUSED
from torch import nn

import mpitrain as mt
from mpitrain.config.deepspeed import read_deepspeed, read_json
from mpitrain.config.settings import Config
from mpitrain.errors import InputError
from mpitrain.shard.optimizers import Lamb
from mpitrain.trainer.optimizing import Lion, UncorrectedAdamW
from mpitrain.trainer.options import from_deepspeed


def requested_value(read, key):
    """Return what a configuration requests under a key of `deepspeed_files`."""
    train, parallel, optim = read.config.train, read.config.parallel, read.config.optim
    if key in ("microbatch", "accumulate"):
        settings = from_deepspeed(read, 2)
        return getattr(settings, key)
    if key == "optimizer":
        if "name" not in optim.model_fields_set:
            return None
        return optim.name, {"lr": optim.lr, "weight_decay": optim.weight_decay} | optim.options
    if key == "trackers":
        return tuple(read.trackers)
    if key == "bucket_mb":
        return read.config.comm.bucket_mb
    holder = next((section for section in (train, parallel) if hasattr(section, key)), read)
    return getattr(read if key == "schedule" else holder, key)


@pytest.mark.parametrize("name", [*FILES, *READ])
def test_public_deepspeed_files_are_supported(name):
    values, ours, expected = (FILES | READ)[name]
    read = read_deepspeed(values, ranks=2, auto=Config.from_dict(ours))
    rates, momenta = expected.get("rates", {}), expected.get("momenta", {})
    for key, value in expected.items():
        if key not in ("rates", "momenta"):
            if key == "optimizer" and value is not None:
                value = (value[0], {"weight_decay": 0.0} | value[1])
            assert requested_value(read, key) == value, key
    assert {step: pytest.approx(read.schedule.rate(step), abs=1e-12) for step in rates} == rates
    assert {step: pytest.approx(read.schedule.momentum(step), abs=1e-12) for step in momenta} == momenta
    assert all(isinstance(key, str) for key in read.without_effect)
    settings = [value for key, value in vars(read).items() if key != "config"]
    settings.append(read.config.model_dump(exclude_unset=True))
    assert sum("auto" in str(value) for value in settings) == ("auto" in str(read.without_effect))


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_keys_are_all_reported_with_alternatives(name):
    values, parts = REFUSED[name]
    with pytest.raises(InputError) as caught:
        read_deepspeed(values, ranks=1)
    for part in parts:
        assert part in str(caught.value), str(caught.value)


def test_comments_and_trailing_commas_are_accepted(tmp_path):
    file = tmp_path / "ds_config.json"
    file.write_text('{"bf16": {"enabled": true,},  // here\n"x": ["a, ]//#", 1,], # there\n/* and\n*/ "y": 2\n}')
    assert read_json(file) == {"bf16": {"enabled": True}, "x": ["a, ]//#", 1], "y": 2}
    for text, message in (('{"a": 1, "a": 2}', "the key 'a' occurs twice"), ('{"a": SIZE}', "line 1 column 7")):
        file.write_text(text)
        with pytest.raises(InputError, match=message):
            read_json(file)


def test_lamb_and_lars_match_their_papers():
    """Compare Lion with its algorithm, and AdamW without bias correction with torch's at rates that undo it."""
    torch.manual_seed(0)
    gradients, begin = torch.randn(5, 7), torch.randn(7)
    p, momentum, mine = begin.clone(), torch.zeros(7), nn.Parameter(begin.clone())
    lion = Lion([mine], lr=0.1, betas=(0.8, 0.9), weight_decay=0.2)
    for g in gradients:
        p = p - 0.1 * (torch.sign(0.8 * momentum + 0.2 * g) + 0.2 * p)
        momentum = 0.9 * momentum + 0.1 * g
        mine.grad = g.clone()
        lion.step()
        assert torch.allclose(mine, p, rtol=1e-6, atol=1e-7)
    for decoupled, kind in ((True, torch.optim.AdamW), (False, torch.optim.Adam)):
        theirs, mine = nn.Parameter(begin.clone()), nn.Parameter(begin.clone())
        torchs = kind([theirs], lr=0.1, weight_decay=0.2)
        ours = UncorrectedAdamW([mine], lr=0.1, weight_decay=0.2, decoupled=decoupled)
        for number, g in enumerate(gradients):
            theirs.grad, mine.grad = g.clone(), g.clone()
            torchs.step()
            for state in torchs.state.values():
                assert number or state["step"] == 1
                state["step"].fill_(10**9)  # by then nothing is corrected any more
            if not number:  # torch corrected its first step
                theirs.data.copy_(begin)
                for state in torchs.state.values():
                    state["exp_avg"].zero_(), state["exp_avg_sq"].zero_()
                torchs.step()
            ours.step()
            assert torch.allclose(mine, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("correct", [True, False])
def test_lamb_matches_deepspeed(correct):
    """Compare where the lower, the upper or none of the default ratio bounds applies, and without bias correction."""
    values = {"optimizer": {"type": "Lamb", "params": {"lr": 0.1, "bias_correction": correct, "weight_decay": 0.01}}}
    kind, options = requested_value(read_deepspeed(values, ranks=1), "optimizer")
    torch.manual_seed(0)
    for size, bound in ((1e-3, 0.01), (1.0, None), (100.0, 10.0)):
        w, gradients = torch.randn(7) * size, torch.randn(5, 7)
        mine, m, v = nn.Parameter(w.clone()), torch.zeros(7), torch.zeros(7)
        lamb = Lamb([mine], **options)
        for number, g in enumerate(gradients, 1):
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            lacks = (1 - 0.9**number, 1 - 0.999**number) if correct else (1, 1)
            update = m / lacks[0] / ((v / lacks[1]).sqrt() + 1e-8) + 0.01 * w
            ratio = min(max(w.norm() / update.norm(), 0.01), 10.0)
            assert number > 1 or (ratio == bound) == (bound is not None)
            w = w - 0.1 * ratio * update
            mine.grad = g.clone()
            lamb.step()
            assert torch.allclose(mine, w, rtol=1e-5, atol=1e-8)
    assert kind == "lamb"


def deepspeed_rates(name, update, *, low, high, warmup, steps, log, ratio=0.0, floor=0.0):
    """Return the rate by DeepSpeed's lr_schedules.py: update 0 has the first rate, update n that of batch n - 1."""
    batch = update - 1
    if batch < 0:
        return 0.0 if name == "WarmupCosineLR" else low
    if batch < warmup:
        gamma = math.log(batch + 1) / math.log(warmup) if log else batch / warmup
        return high * (ratio + (1 - ratio) * gamma) if name == "WarmupCosineLR" else low + (high - low) * gamma
    if name == "WarmupLR":
        return high
    if name == "WarmupDecayLR":
        return low + (high - low) * max(0.0, (steps - batch) / max(1, steps - warmup))
    done = min(1.0, (batch - warmup + 1) / max(1, steps - warmup))
    return high * (floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2)


def test_warmup_matches_deepspeed_at_every_update():
    """Compare the warm-up schedules; tests/train/test_schedules.py has one cycle and the range test."""
    for name, warmup, kind in product(("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"), (1, 2, 7), ("log", "linear")):
        params = {"warmup_num_steps": warmup, "warmup_type": kind}
        ratios = {"warmup_min_ratio": 0.2, "cos_min_ratio": 0.05} if name == "WarmupCosineLR" else {}
        params |= ratios or {"warmup_min_lr": 1e-4, "warmup_max_lr": 2e-3}
        params |= {} if name == "WarmupLR" else {"total_num_steps": 20}
        values = {"optimizer": {"type": "Adam", "params": {"lr": 2e-3}}, "scheduler": {"type": name, "params": params}}
        schedule = read_deepspeed(values, ranks=1).schedule
        warmup_settings = {"low": 1e-4, "high": 2e-3, "warmup": max(2, warmup), "steps": 20, "log": kind == "log"}
        warmup_settings |= {"ratio": 0.2, "floor": 0.05}
        expected = [deepspeed_rates(name, update, **warmup_settings) for update in range(30)]
        assert [schedule.rate(update) for update in range(30)] == pytest.approx(expected, rel=1e-12), params


@pytest.mark.ranks(1)
def test_schedule_starts_from_each_groups_rate_and_ignores_skipped_updates(world):
    model = nn.Linear(4, 2)
    groups = [{"params": [model.weight], "lr": 0.02}, {"params": [model.bias], "lr": 0.01}]
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_type": "linear", "warmup_min_lr": 0.002}}
    values = {"train_micro_batch_size_per_gpu": 3, "scheduler": scheduler}
    engine = mt.initialize(model, torch.optim.SGD(groups), values, loss=nn.functional.mse_loss)
    rates = []
    for number in range(5):
        x = torch.full((3, 4), torch.inf if number == 1 else 1.0)
        engine.train_batch(iter([(x, torch.ones(3, 2))]))
        rates.append([group["lr"] for group in engine.optimizer.param_groups])
    assert engine.skipped == 1
    assert rates == [pytest.approx(e) for e in ([0.002] * 2, [0.002] * 2, [0.002] * 2, [0.011, 0.006], [0.02, 0.01])]
    engine.close()


@pytest.mark.ranks(2)
def test_public_deepspeed_files_train(world, tmp_path):
    """Train one step with each file; rank 0 reports the values used for "auto" and the keys without effect."""
    for name, (values, ours, _) in FILES.items():
        values = json.loads(json.dumps(values).replace("/disk/", f"{tmp_path}/"))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
        optimizer = None if "optimizer" in values else torch.optim.AdamW(model.parameters(), lr=1e-3)
        if "scheduler" not in values or "optimizer" in values:
            out = io.StringIO()
            with redirect_stdout(out):
                engine = mt.initialize(model, optimizer, values, loss=nn.functional.mse_loss, auto=ours)
            assert ("without effect here:" in out.getvalue()) == (
                world.rank == 0 and bool(engine.settings.without_effect)
            ), name
            trackers = bool(engine.settings.deepspeed.trackers) and world.rank == 0
            assert ("your own loop has no trackers (" in out.getvalue()) == trackers, name
            assert out.getvalue().count("\n") <= 3
            batches = iter([(torch.randn(3, 4), torch.randn(3, 2))] * engine.settings.accumulate)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert engine.train_batch(batches) > 0 and engine.steps == 1, name
            if hasattr(engine.settings.schedule, "momentum"):
                assert engine.optimizer.param_groups[0]["betas"] == (0.8, 0.99), name
            if engine.settings.deepspeed.torch_schedule is not None:
                assert engine.skipped or 0 < engine.lr < 0.1
            engine.close()


def test_unsupported_settings_are_reported_in_one_line():
    values = {
        "train_batch_size": 8,
        "zero_optimisation": {"stage": 2},
        "amp": {"enabled": True},
        "optimizer": {"type": "OneBitAdam", "parms": {}},
        "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_mx_lr": 1}},
        "torch_autocast": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_parm": {"device": "cpu"}, "mics_shard_size": 4},
        "elasticity": "auto",
    }
    with pytest.raises(InputError) as caught:
        read_deepspeed(values, ranks=2, origin="ds_config.json")
    message = str(caught.value)
    assert "\n" not in message and message.startswith("ds_config.json: ")
    for part in (
        "zero_optimisation is unknown (did you mean 'zero_optimization'?)",
        'amp has no counterpart here (Apex is not supported; enable "bf16" or "fp16"',
        'torch_autocast has no counterpart here (enable "bf16" or "fp16"',
        'optimizer.type OneBitAdam has no counterpart here (use "AdamW"',
        "optimizer.parms is unknown (did you mean 'params'?)",
        "scheduler.params of OneCycle: cycle_max_lr: field required (fix it)",
        "scheduler.params.cycle_mx_lr is unknown (did you mean 'cycle_max_lr'?)",
        "zero_optimization.offload_parm is unknown (did you mean 'offload_param'?)",
        "zero_optimization.mics_shard_size has no counterpart here (remove it, or use an mpitrain conf",
        'elasticity is "auto", but mpitrain has no setting for it (give a value)',
    ):
        assert part in message, message


def test_auto_values_are_reported_with_their_source():
    values, ours, _ = FILES["a vision and language model, ZeRO-3 offload"]
    filled = read_deepspeed(values, ranks=2, auto=Config.from_dict(ours)).filled
    assert "optimizer.params.lr 0.0003 (optim.lr)" in filled and "train_batch_size 48 (train.batch)" in filled
    assert "gradient_clipping 0.5 (train.clip)" in filled
    with pytest.raises(InputError, match=r"mt.initialize ignores checkpoint\.every"):
        mt.initialize(nn.Linear(2, 2), config={"checkpoint": {"every": 5}})
    with pytest.raises(InputError, match="auto is for a DeepSpeed configuration"):
        mt.initialize(nn.Linear(2, 2), config={"train": {"batch": 2}}, auto={})
