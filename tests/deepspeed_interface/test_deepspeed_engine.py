"""A loop over `mpitrain.deepspeed`'s engine trains like plain torch in one process, at every stage of ZeRO."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import mpitrain.deepspeed as deepspeed
from mpitrain.errors import InputError

BATCH, STEPS = 24, 6
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4}}
CONFIG = {"train_batch_size": BATCH, "gradient_accumulation_steps": 2, "gradient_clipping": 0.1, "optimizer": ADAMW}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Sequential(nn.Linear(16, 16), nn.Tanh()), nn.Linear(16, 1))


def batch(step):
    x = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(step))
    return x, x.sum(-1, keepdim=True)


def make(stage=0, model=None, **keys):
    model = model if model is not None else net()
    values = {**CONFIG, "zero_optimization": {"stage": stage, "overlap_comm": True}, **keys}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=values)


def warm_rate(update):
    return 1e-2 * min(1.0, math.log(max(update, 1)) / math.log(4))


def reference(steps, rate=lambda update: 1e-2, groups=lambda model: model.parameters()):
    model = net()
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2, weight_decay=0.1)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        x, y = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


def train(engine, world, steps, first=0, parts=1):
    """Train on this rank's rows; with `parts`, a microbatch has this number of losses and backward passes."""
    losses = []
    for step in range(first, first + steps):
        total = torch.zeros(())
        rows = zip(*(t[world.rank :: world.size].chunk(2) for t in batch(step)), strict=True)
        for number, (x, y) in enumerate(rows):
            assert engine.is_gradient_accumulation_boundary() == (number == 1)
            for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
                loss = nn.functional.mse_loss(engine(a), b) / parts
                assert float(engine.backward(loss)) == float(loss.detach()) / 2
                total += loss.detach() / 2
            engine.step()
            assert engine.was_step_applied() == (number == 1)
        world.all_reduce(total, "avg")
        losses.append(float(total))
    return losses


def assert_close(state, expected):
    assert state.keys() == expected.keys()
    for name, value in state.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_losses_and_weights_are_those_of_plain_torch(world, stage):
    engine, optimizer, loader, scheduler = make(stage, scheduler=WARMUP)
    assert optimizer is engine.optimizer and loader is None and isinstance(engine, nn.Module)
    losses, weights = reference(STEPS, warm_rate)
    assert train(engine, world, STEPS) == pytest.approx(losses, rel=1e-4)
    assert_close(engine.module_state_dict(), weights)
    assert (engine.global_steps, engine.micro_steps, engine.skipped_steps) == (STEPS, 2 * STEPS, 0)
    assert engine.train_batch_size() == BATCH and engine.gradient_accumulation_steps() == 2
    assert engine.train_micro_batch_size_per_gpu() * 2 * world.size == BATCH
    assert engine.zero_optimization_stage() == stage and not engine.bfloat16_enabled()
    assert engine.get_lr() == scheduler.get_last_lr() == pytest.approx([warm_rate(STEPS)])
    assert (engine.global_rank, engine.local_rank) == (world.rank, world.local_rank)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_several_backward_passes_before_a_step_add_up(world, stage):
    engine, *_ = make(stage)
    losses, weights = reference(STEPS)
    assert train(engine, world, STEPS, parts=2) == pytest.approx(losses, rel=1e-4)
    assert_close(engine.module_state_dict(), weights)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_two_engines_train_against_each_other(world, stage):
    """A discriminator's loss reaches the generator's parameters and the reverse, as in a GAN."""

    def play(first, second, backward, step, x):
        outputs = []
        for _ in range(STEPS):
            fake = first(x)
            for loss in (second(x * 2).pow(2).mean(), second(fake.detach()).sub(1).pow(2).mean()):
                backward(1, loss)
            step(1)
            backward(0, loss := second(first(x)).pow(2).mean())
            step(0)
            outputs.append(loss.detach())
        return torch.stack(outputs)

    def nets():
        torch.manual_seed(1)
        return [nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)) for _ in range(2)]

    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    plain = nets()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1) for model in plain]

    def plain_step(number):
        nn.utils.clip_grad_norm_(plain[number].parameters(), 0.1)
        optimizers[number].step()
        for model in plain:
            model.zero_grad()

    expected = play(*plain, lambda number, loss: loss.backward(), plain_step, x)
    models = nets()
    keys = {"train_batch_size": 8, "gradient_accumulation_steps": 1}
    engines = [make(stage, model, **keys)[0] for model in models]
    step = [lambda e=e: e.step() for e in engines]
    losses = play(*models, lambda n, loss: engines[n].backward(loss), lambda n: step[n](), x[world.rank :: 2])
    world.all_reduce(losses, "avg")
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(("before", "after"), [(0, 3), (3, 1), (2, 2)])
def test_training_continues_from_a_checkpoint(world, folder, before, after):
    expected, weights = reference(STEPS, warm_rate)
    engine, *_ = make(before, scheduler=WARMUP)
    train(engine, world, 3)
    assert engine.load_checkpoint(folder) == (None, None)
    engine.save_checkpoint(folder, client_state={"epoch": 3})
    engine.save_checkpoint(folder, tag="other", save_latest=False)
    assert (folder / "latest").read_text() == "global_step3"
    engine, *_ = make(after, net().apply(lambda m: [nn.init.ones_(p) for p in m.parameters()]), scheduler=WARMUP)
    path, client_state = engine.load_checkpoint(folder)
    assert path == str(folder / "global_step3") and client_state == {"epoch": 3}
    assert engine.global_steps == 3 and engine.get_lr() == pytest.approx([warm_rate(3)])
    assert train(engine, world, 3, first=3) == pytest.approx(expected[3:], rel=1e-4)
    assert_close(engine.module_state_dict(), weights)
    engine.save_16bit_model(folder)
    assert_close(torch.load(folder / "pytorch_model.bin"), weights)
    with pytest.raises(InputError, match="export"):
        engine.load_checkpoint(folder, load_module_only=True)
    with pytest.raises(InputError, match="client_state cannot be written as JSON"):
        engine.save_checkpoint(folder, client_state={"x": torch.ones(1)})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_gathered_parameters_are_whole_and_changes_of_one_rank_reach_all(world, stage, precision):
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = net()
    with deepspeed.zero.GatheredParameters(model[0].bias, modifier_rank=1):
        model[0].bias.data.fill_(world.rank)
    assert float(model[0].bias[0]) == 1.0
    engine, *_ = make(stage, model, **precision)
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=1):
        if world.rank == 1:
            model[3].weight.data.fill_(0.5)
    with deepspeed.zero.GatheredParameters(model.parameters()):
        assert model[3].weight.shape == (1, 16) and bool((model[3].weight == 0.5).all())
    x, y = (t[world.rank :: 2].to(model[0].weight.dtype) for t in batch(0))
    for part in range(2):
        engine.backward(nn.functional.mse_loss(engine(x), y))
        engine.step()
        assert engine.global_steps == part
    moved = engine.module_state_dict()["3.weight"].float()
    assert 0 < float((moved - 0.5 * (1 - 1e-3)).abs().max()) < 2e-2  # AdamW: one update of 1e-2 from 0.5


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_groups_of_parameters_keep_their_settings_and_scripts_may_change_weights(world, stage):
    def groups(model):
        weights, biases = ([p for p in model.parameters() if (p.dim() > 1) == large] for large in (True, False))
        return [{"params": weights}, {"params": biases, "weight_decay": 0.0, "name": "biases"}]

    model = net()
    values = {**CONFIG, "zero_optimization": {"stage": stage}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups(model), config=values)
    train(engine, world, 3)
    _, weights = reference(3, groups=groups)
    assert_close(engine.module_state_dict(), weights)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)  # by every rank, once
    assert_close(engine.module_state_dict(), {name: value / 2 for name, value in weights.items()})


@pytest.mark.ranks(2)
def test_the_loader_gives_each_rank_its_own_samples(world):
    data = [(torch.tensor([float(number)]), number) for number in range(10)]
    model = nn.Linear(1, 1)
    values = {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAMW}
    engine, _, loader, _ = deepspeed.initialize(model=model, config=values, training_data=data)
    mine = [number for _, numbers in loader for number in numbers.tolist()]
    every = world.all_gather_object(mine)
    assert len(loader) == 3 and sorted(every[0] + every[1]) == list(range(10)) and mine != sorted(mine)
    again = deepspeed.utils.RepeatingLoader(engine.deepspeed_io(data, route="eval"))
    assert [next(again)[1].tolist()[0] for _ in range(4)] == [world.rank + n for n in (0, 4, 8, 0)]


def log_warm_up(n):
    return 0.1 * min(1.0, math.log(n + 1) / math.log(5))


def cosine(n):
    return 1e-2 * (0.2 + 0.8 * n / 4 if n < 4 else 1e-4 + (1 - 1e-4) * (1 + math.cos(math.pi * (n - 3) / 6)) / 2)


TO_TEN = {"warmup_num_steps": 4, "total_num_steps": 10, "warmup_type": "linear"}
SCHEDULES = {
    "WarmupLR": ({"warmup_max_lr": 0.1, "warmup_num_steps": 5}, log_warm_up),
    "WarmupDecayLR": ({"warmup_max_lr": 0.1, **TO_TEN}, lambda n: 0.1 * (n / 4 if n < 4 else (10 - n) / 6)),
    "WarmupCosineLR": ({**TO_TEN, "warmup_min_ratio": 0.2}, cosine),
    "OneCycle": (
        {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 4},
        lambda n: 0.01 + 0.09 * (1 - abs((n + 1) / 4 - 1)),
    ),
}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_get_lr_is_the_rate_of_the_next_update(world, name):
    params, formula = SCHEDULES[name]
    model = nn.Linear(1, 1, bias=False)
    values = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 1e-2}}, "gradient_clipping": 0.0}
    engine, *_ = deepspeed.initialize(model=model, config={**values, "scheduler": {"type": name, "params": params}})
    for batches in range(7):
        (rate,) = engine.get_lr()
        if batches:  # DeepSpeed counts the first step as batch 0
            assert rate == pytest.approx(formula(batches - 1)), batches
        before = float(model.weight)
        engine.backward(engine(torch.ones(1, 1)).sum())
        engine.step()
        assert before - float(model.weight) == pytest.approx(rate, abs=1e-6)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage 4"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "zero_quantized_weights.*comm.compression"),
        ({"amp": {"enabled": True}}, "amp has no counterpart here; .*bf16"),
        ({"gradient_cliping": 1.0}, "gradient_cliping is unknown; did you mean 'gradient_clipping'"),
        ({"train_batch_size": None, "gradient_accumulation_steps": None}, "no batch size"),
        ({"optimizer": None}, "no optimizer"),
    ],
)  # fmt: skip
def test_what_the_configuration_cannot_ask_for_is_one_line(world, keys, words):
    with pytest.raises(InputError, match=words) as error:
        make(0, **keys)
    assert "\n" not in str(error.value)


@pytest.mark.ranks(1)
def test_missing_names_say_what_to_use_instead(world):
    engine, *_ = make(0)
    for look_up, words in (
        (lambda: deepspeed.init_inference, "deepspeed.init_inference; use mt.load_model"),
        (lambda: deepspeed.zero.register_external_parameter, "zero.register_external_parameter; use ZeRO stage 2"),
        (lambda: deepspeed.moe.MoE(), "deepspeed.moe.layer.MoE; use"),
        (lambda: engine.no_sync, "no_sync; use gradient_accumulation_steps"),
        (lambda: engine.backward(engine(torch.ones(1, 6)).sum(), retain_graph=True), "no retain_graph"),
        (lambda: engine.step(), "without engine.backward"),
    ):
        with pytest.raises(InputError, match=words):
            look_up()
    assert (
        not hasattr(engine, "nothing") and not hasattr(deepspeed, "nothing") and engine.append.__self__ is engine.module
    )
