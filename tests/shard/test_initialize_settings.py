"""Configurations for `mpitrain.initialize`: keys that it applies, ignores with a message, or refuses."""

from __future__ import annotations

import pytest
import torch
from shard.steps import gpt
from torch import nn
from train.jobs import run as train_as_a_job

import mpitrain as mt
from mpitrain.config.deepspeed import read_deepspeed
from mpitrain.config.settings import Config
from mpitrain.errors import InputError
from mpitrain.trainer.engine import LossScale
from mpitrain.trainer.options import from_config, from_deepspeed

ADAM = {"type": "Adam", "params": {"lr": 3e-3, "betas": [0.9, 0.95]}}


def settings_of(values, ranks):
    return from_deepspeed(read_deepspeed(values, ranks), ranks)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"train_batch_size": 8, "zero_optimisation": {}}, "did you mean 'zero_optimization'"),
        ({"train_batch_size": 7, "gradient_accumulation_steps": 2}, "train_batch_size 7 is not"),
        ({"train_batch_size": 8, "zero_optimization": {"offload_param": {"device": "gpu"}}}, "offload_param.device"),
        ({"elasticity": "auto"}, '"auto", but mpitrain has no setting for it'),
        ({"train_batch_size": 8, "bf16": {"enabled": True}, "fp16": {"enabled": True}}, "choose one"),
        ({"train_batch_size": 8, "scheduler": {"type": "OneCycle"}}, "OneCycle"),
        ({"train_batch_size": 8, "data_types": {"grad_accum_type": "fp32"}}, "data_types.grad_accum_type"),
        ({"communication_data_type": "fp16", "data_types": {"grad_accum_dtype": "fp32"}}, "make them equal"),
        ({"zero_optimization": {"stage": 2, "ignore_unused_parameters": False}}, "ignore_unused_parameters"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, "zero_hpz_partition_size"),
        ({"bf16": True, "fp16": {}}, "bf16 True is not a section"),
        ({"optimizer": {"type": "Adam", "params": {"lr": "fast"}}, "bf16": {}}, "params.lr 'fast' is not a number"),
        ({"optimizer": {"type": "Adam", "params": {"lr": 0}}}, r"optim\.lr = 0\.0 is wrong"),
        ({"optimizer": {"type": "Adam", "params": {"weight_decay": -1}}}, r"optim\.weight_decay = -1\.0 is wrong"),
        *(
            ({"train_batch_size": 8, key: {"enabled": True, "x": 1}}, key)
            for key in (
                "amp", "autotuning", "checkpoint", "compile", "compression_training", "curriculum_learning",
                "data_efficiency", "eigenvalue", "elasticity", "hybrid_engine", "nebula", "progressive_layer_drop",
                "quantize_training", "sparse_attention", "sparse_gradients", "tensor_parallel", "torch_autocast",
                "zenflow",
            )
        ),
    ],
)  # fmt: skip
def test_unsupported_keys_are_named(values, message):
    with pytest.raises(InputError, match=message):
        read_deepspeed(values, ranks=2)


def test_typical_configuration_is_accepted_and_inactive_keys_are_reported():
    """Use a typical configuration file, with all the keys that are off or empty in it."""
    off = {"enabled": False}
    settings = settings_of(
        {
            "fp16": {"enabled": True, "auto_cast": False, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 3,
                     "loss_scale_window": 1000, "consecutive_hysteresis": True, "min_loss_scale": 1},
            "bf16": {"enabled": False},
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "weight_decay": 0.1, "torch_adam": True}},
            "zero_optimization": {
                "stage": 3, "offload_optimizer": {"device": "none", "pin_memory": True},
                "offload_param": {"device": "none", "pin_memory": True}, "overlap_comm": True, "sub_group_size": 1e9,
                "reduce_bucket_size": 5e8, "stage3_prefetch_bucket_size": 5e8, "stage3_max_live_parameters": 1e9,
                "zero_hpz_partition_size": 1, "mics_shard_size": -1, "zero_quantized_weights": False,
                "ignore_unused_parameters": True, "elastic_checkpoint": False,
            },
            "gradient_accumulation_steps": 4, "train_batch_size": 32, "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": 1.0, "steps_per_print": 2000, "wall_clock_breakdown": False,
            "sparse_gradients": False, "amp": off, "flops_profiler": off, "tensorboard": off, "autotuning": off,
        },
        ranks=2,
    )  # fmt: skip
    train, optim = settings.config.train, settings.config.optim
    assert (train.precision, settings.config.parallel.zero, settings.accumulate, train.clip) == ("fp16", 3, 4, 1.0)
    assert (optim.name, optim.lr, optim.weight_decay, optim.options) == ("AdamW", 1e-3, 0.1, {})  # DeepSpeed's Adam
    named = set(settings.without_effect)
    assert {"amp", "flops_profiler", "sparse_gradients", "zero_optimization.overlap_comm"} <= named
    assert {"fp16.auto_cast", "zero_optimization.offload_param", "zero_optimization.mics_shard_size"} <= named
    scale = LossScale(**settings.deepspeed.scale)
    for _ in range(2):
        scale.update(overflowed=True)
    assert scale.value == 2**16
    scale.update(overflowed=False)  # which gives both back
    again = LossScale(spare=2, refill=True, dynamic=True)
    again.load(scale.state())
    for _ in range(3):
        again.update(overflowed=True)
    assert again.value == 2**15


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"run": {"reproducible": True}}, "run.reproducible"),
        ({"data": {"path": "x"}, "model": {"width": 8}, "monitor": {"every": 5}}, "data.path, model.width, monitor.ev"),
        ({"checkpoint": {"every": 100}}, "checkpoint.every"),
        ({"parallel": {"data": 3}}, "parallel.data"),
        ({"parallel": {"mode": "local"}}, "parallel.mode"),
        ({"optim": {"lr": 0.1}}, "optim.lr because you pass your own optimizer"),
        ({"train": {"steps": 100}}, "train.steps because you pass your own optimizer"),
        ({"elastic": {"mode": "shrink"}}, "elastic.mode"),
    ],
)
def test_settings_that_initialize_ignores_are_refused_by_name(values, named):
    with pytest.raises(InputError, match=named):
        from_config(Config.from_dict(values), 2, own_optimizer=True)
    with pytest.raises(InputError, match=r"run\.toml: mt\.initialize ignores run.seed"):
        from_config(Config.from_dict({"run": {"seed": 1}}), 2, own_optimizer=False, origin="run.toml")


def test_settings_without_effect_are_accepted():
    off = {"run": {"reproducible": False}, "parallel": {"pipeline": 1, "data": 3}, "monitor": {"timeline": ""}}
    settings = from_config(Config.from_dict(off | {"comm": {"timeout": 9.0}}), 3, own_optimizer=True)
    assert (settings.microbatch, settings.accumulate, settings.config.comm.timeout) == (0, 1, 9.0)


@pytest.mark.ranks(2)
def test_the_configuration_of_a_finished_run_configures_an_engine(world, folder, capfd):
    run = folder / "run"
    sections = {
        "data": {"path": "digits"},
        "model": {"name": "mlp", "width": 16},
        "optim": {"lr": 0.05},
        "train": {"steps": 1, "batch": 8},
        "checkpoint": {"every": 7},
    }
    alone = world.subgroup([0])
    if alone is not None:
        train_as_a_job(alone, run, **sections)
        alone.free()
    world.barrier()
    capfd.readouterr()
    torch.manual_seed(0)
    engine = mt.initialize(
        nn.Linear(2, 1), config=run / "config.toml", loss=lambda output, y: (output - y).square().mean()
    )
    names = "checkpoint.every, data.path, model.name, model.width, run.dir, train.evaluate_samples"
    assert capfd.readouterr().out == (f"without effect here: {names}\n" if world.rank == 0 else "")
    assert isinstance(engine.optimizer, torch.optim.AdamW) and engine.lr == 0.05
    engine.backward(engine(torch.ones(4, 2), torch.ones(4, 1)))
    assert engine.step() and engine.steps == 1
    engine.close()


def test_only_settings_that_change_training_are_refused_in_a_runs_configuration():
    def settings(own_optimizer=True, **sections):
        resolved = Config().model_dump()
        for section, keys in sections.items():
            resolved[section] |= keys
        return from_config(Config.from_dict(resolved), 2, own_optimizer=own_optimizer, origin="RUN/config.toml")

    assert settings().without_effect == settings(own_optimizer=False).without_effect == ()
    changed = {"optim": {"lr": 0.1}, "train": {"steps": 7}, "monitor": {"every": 5}, "parallel": {"data": 2}}
    assert settings(**changed).without_effect == ("monitor.every", "optim.lr", "train.steps")
    assert settings(own_optimizer=False, **changed).without_effect == ("monitor.every",)
    for section, key, value in [("run", "reproducible", True), ("parallel", "mode", "local")]:
        with pytest.raises(InputError, match=rf"^RUN/config\.toml: mt\.initialize ignores {section}\.{key};"):
            settings(**{section: {key: value}})
    with pytest.raises(InputError, match=r"parallel.data 3 x .* does not give 2 ranks"):
        settings(parallel={"data": 3})


@pytest.mark.ranks(1)
def test_an_optimizer_or_a_scheduler_given_twice_is_refused(world):
    model = gpt()
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(InputError, match="an optimizer was passed, but config names another"):
        mt.initialize(model, optimizer, {"train_batch_size": world.size, "optimizer": ADAM})
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    warmup = {"type": "WarmupLR", "params": {}}
    with pytest.raises(InputError, match="a scheduler was passed"):
        mt.initialize(model, optimizer, {"train_batch_size": world.size, "scheduler": warmup}, scheduler=schedule)


@pytest.mark.parametrize(
    ("said", "clip"),
    [({}, 1.0), *(({"gradient_clipping": value}, clip) for value, clip in ((0, 0.0), (2, 2.0), (-1, 0.0)))],
)
def test_deepspeed_clipping_defaults_to_one_and_is_never_negative(said, clip):
    assert read_deepspeed({"train_batch_size": 4, **said}, 2).config.train.clip == clip


def test_a_deepspeed_configuration_is_converted():
    settings = settings_of(
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
    assert (settings.microbatch, settings.accumulate, settings.config.parallel.zero) == (2, 3, 2)
    scale = settings.deepspeed.scale
    assert settings.config.parallel.offload == "host" and (scale["value"], scale["patience"]) == (256, 5)
    assert scale["spare"] == 1  # DeepSpeed's hysteresis is 2 by default
    assert settings.without_effect == ("steps_per_print", "zero_optimization.contiguous_gradients")
    rates = [settings.schedule.rate(update) for update in (0, 1, 2, 11, 16, 21, 25)]
    assert rates == pytest.approx([0.0, 0.0, 0.01, 0.1, 0.05, 0.0, 0.0])
