"""`mpitrain.initialize` trains a loop of one's own, from our settings or from a DeepSpeed configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from shard.steps import BATCH, gpt, tokens
from torch import nn

import mpitrain as mt
from mpitrain.errors import InputError
from mpitrain.shard.deepspeed import from_deepspeed

ADAM = {"type": "Adam", "params": {"lr": 3e-3, "betas": [0.9, 0.95]}}


@pytest.fixture
def folder(world, mpi_tmp_path):
    return Path(world.broadcast_object(str(mpi_tmp_path)))


def train(engine, world, steps, first=0, accumulate=1):
    """Steps over this rank's part of the batch; returns the averaged losses."""
    losses = []
    for step in range(first, first + steps):
        total = torch.zeros(())
        for part in range(accumulate):
            x, y = (t[world.rank :: world.size][part::accumulate] for t in tokens(step))
            loss = engine(x, y)
            engine.backward(loss)
            updated = engine.step()
            assert updated == (part == accumulate - 1)
            total += loss.detach() / accumulate
        world.all_reduce(total, "avg")
        losses.append(float(total))
    return losses


def reference(steps):
    model = gpt()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    losses = []
    for step in range(steps):
        x, y = tokens(step)
        optimizer.zero_grad()
        loss = model.loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_deepspeed_file_trains_like_one_process_at_every_stage(world, folder, stage):
    accumulate = 5 // world.size if world.size == 1 else 5
    values = {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": 0.5,
        "optimizer": ADAM,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000, "overlap_comm": True},
    }
    if world.rank == 0:
        (folder / "ds_config.json").write_text(json.dumps(values))
    world.barrier()
    engine = mt.initialize(gpt(), config=str(folder / "ds_config.json"))
    assert train(engine, world, 6, accumulate=accumulate) == pytest.approx(reference(6), rel=1e-5)
    assert engine.steps == 6
    engine.close()


@pytest.mark.ranks(1, 2)
def test_our_settings_and_an_optimizer_of_ones_own(world, folder):
    config = {"train": {"batch": BATCH, "clip": 0.5}, "parallel": {"zero": 2}}
    model = gpt()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    engine = mt.initialize(model=model, optimizer=optimizer, config=config)
    assert train(engine, world, 4) == pytest.approx(reference(4), rel=1e-5)
    engine.close()


@pytest.mark.ranks(1, 2, 3)
def test_an_engine_goes_on_from_what_another_saved(world, folder):
    def made(zero):
        model = gpt()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return mt.initialize(
            model, optimizer, {"parallel": {"zero": zero}, "train": {"batch": world.size}}, scheduler=schedule
        )

    engine = made(1)
    train(engine, world, 3)
    saved = engine.save(folder / "run", {"epoch": 7})
    wanted, rate = train(engine, world, 3, first=3), engine.lr
    engine.close()
    engine = made(3)
    assert engine.load(folder / "run") == {"epoch": 7}
    assert engine.steps == 3
    assert train(engine, world, 3, first=3) == pytest.approx(wanted, rel=1e-6)
    assert engine.lr == rate
    assert saved.is_dir()
    state = engine.state_dict()
    fresh = gpt()
    fresh.load_state_dict(state)
    engine.close()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"train_batch_size": 8, "zero_optimisation": {}}, "zero_optimisation has no counterpart"),
        ({"train_batch_size": 7, "gradient_accumulation_steps": 2}, "train_batch_size 7 is not"),
        ({"train_batch_size": 8, "zero_optimization": {"offload_param": {"device": "cpu"}}}, "offload_param"),
        ({"train_batch_size": "auto"}, "auto"),
        ({"train_batch_size": 8, "bf16": {"enabled": True}, "fp16": {"enabled": True}}, "choose one"),
        ({"train_batch_size": 8, "scheduler": {"type": "OneCycle"}}, "OneCycle"),
    ],
)
def test_a_key_that_means_nothing_here_is_named(values, message):
    with pytest.raises(InputError, match=message):
        from_deepspeed(values, ranks=2)


def test_a_deepspeed_configuration_is_taken_over():
    settings = from_deepspeed(
        {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 3,
            "steps_per_print": 10,
            "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 5},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "contiguous_gradients": True},
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {
                    "warmup_max_lr": 0.1,
                    "warmup_num_steps": 10,
                    "total_num_steps": 20,
                    "warmup_type": "linear",
                },
            },
        },
        ranks=4,
    )
    assert (settings.microbatch, settings.accumulate, settings.options.zero) == (2, 3, 2)
    assert settings.options.offload == "host" and settings.scale.value == 256 and settings.scale.patience == 5
    assert settings.without_effect == ("steps_per_print", "zero_optimization.contiguous_gradients")
    rates = [settings.schedule.rate(step) for step in (0, 9, 15, 20, 25)]
    assert rates == pytest.approx([0.01, 0.1, 0.05, 0.0, 0.0])
