"""`mpitrain.initialize` trains a loop of one's own, from our settings or from a DeepSpeed configuration."""

from __future__ import annotations

import json
import os
import sys

import pytest
import torch
from shard.steps import BATCH, gpt, tokens
from support import job, next_handle, one_line
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from train.jobs import run as train_as_a_job

import mpitrain as mt
from mpitrain.checkpoint import Store
from mpitrain.config.deepspeed import read_deepspeed
from mpitrain.config.settings import Config
from mpitrain.errors import InputError
from mpitrain.mesh import Mesh
from mpitrain.trainer.options import from_config, from_deepspeed
from mpitrain.trainer.precision import LossScale

ADAM = {"type": "Adam", "params": {"lr": 3e-3, "betas": [0.9, 0.95]}}


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


@pytest.mark.parametrize("device", ["pretend"], indirect=True)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("zero", [0, 2])
def test_a_model_on_a_device_stays_there_and_batches_follow_it(world, device, zero):
    found = {}
    for where in ("moved", "there", "host"):
        model = gpt().to(device) if where == "there" else gpt()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=where == "moved")
        config = {"run": {"device": device.type} if where == "moved" else {}, "train": {"clip": 0.5, "microbatch": 1}}
        config["train"]["batch"] = 2 * world.size
        config["parallel"] = {"zero": zero}
        engine = mt.initialize(model, optimizer, config)
        assert engine.device == (torch.device("cpu") if where == "host" else device)
        assert model.head.weight is model.embedding.weight

        def batches():
            for step in range(8):
                x, y = (t[world.rank :: world.size] for t in tokens(step))
                yield x[:1], y[:1]

        coming = batches()
        with sdpa_kernel(SDPBackend.MATH):
            losses = [engine.train_batch(coming) for _ in range(4)]
        found[where] = losses, {name: value.cpu() for name, value in engine.state_dict().items()}
        engine.close()
    for where in ("moved", "there"):
        assert found[where][0] == pytest.approx(found["host"][0], rel=2e-6)
        torch.testing.assert_close(found[where][1], found["host"][1], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("device", ["pretend"], indirect=True)
@pytest.mark.ranks(2)
def test_a_model_on_another_kind_of_device_than_run_device_is_refused(world, device):
    with pytest.raises(InputError, match=r"run.device is cpu, and the model is on pretend:\d; move it"):
        mt.initialize(gpt().to(device), config={"run": {"device": "cpu"}})
    with pytest.raises(InputError, match="there is no device of kind 'xpu': this process has pretend devices"):
        mt.initialize(gpt(), config={"run": {"device": "xpu"}})


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


ANOTHER_JOB = """
import sys, torch, mpitrain as mt
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine = mt.initialize(model, optimizer, {"train": {"batch": 2}}, loss=lambda output, y: output.sum())
engine.save(sys.argv[1])
"""


@pytest.mark.ranks(2)
def test_a_folder_of_checkpoints_is_one_jobs_whose_engines_may_save_in_turn(world, folder):
    engines = []
    for _ in range(2):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engines.append(mt.initialize(model, optimizer, {"train": {"batch": 2}}, loss=lambda output, y: output.sum()))
    for engine in (*engines, *engines):
        saved = engine.save(folder / "run")
    before = [path.stat().st_mtime_ns for path in sorted(saved.iterdir())]
    engines.clear()
    ended = world.on_root(lambda: _run(ANOTHER_JOB, folder / "run"))
    one_line(tuple(ended), "is in use by another job; save into another folder")
    assert [path.stat().st_mtime_ns for path in sorted(saved.iterdir())] == before
    theirs = folder / "theirs"
    world.on_root(lambda: (theirs / "step-00000000").mkdir(parents=True) or (theirs / "step-00000000/mine").touch())
    with pytest.raises(InputError, match="step-00000000 is in the way of a checkpoint"):
        engine.save(theirs)
    assert (theirs / "step-00000000/mine").exists() and sorted(os.listdir(theirs)) == ["lock", "step-00000000"]


def _run(code, *arguments):
    ended = job(0, [sys.executable, "-c", code, *map(str, arguments)])
    return [ended.returncode, ended.stderr]


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
    with pytest.raises(InputError, match="there is no checkpoint in nowhere; give a folder that save has written into"):
        engine.load("nowhere")
    assert saved.is_dir()
    state = engine.state_dict()
    fresh = gpt()
    fresh.load_state_dict(state)
    engine.close()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("parallel", [{"zero": 0}, {"zero": 2, "shard_within": "node"}])
def test_engines_their_saves_and_loads_leave_nothing_in_mpi(world, folder, parallel):
    numbers = set()
    for _ in range(6):
        model = nn.Linear(3, 2)
        engine = mt.initialize(
            model, torch.optim.SGD(model.parameters(), lr=0.1), {"parallel": parallel, "train": {"batch": world.size}}
        )
        for name in ("a", "b", "a"):
            engine.save(folder / name)
            engine.load(folder / name)
            numbers.add(next_handle(world))
        engine.close()
        with Store(folder / "nodes", world, 2, files="node") as store:
            store.prepare(set_aside=False)
            store.save(1, [], {})
        Mesh.make(world).free()
        numbers.add(next_handle(world))
    assert len(numbers) < 10, sorted(numbers)


def settings_of(values, ranks):
    return from_deepspeed(read_deepspeed(values, ranks))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"train_batch_size": 8, "zero_optimisation": {}}, "did you mean 'zero_optimization'"),
        ({"train_batch_size": 7, "gradient_accumulation_steps": 2}, "train_batch_size 7 is not"),
        ({"train_batch_size": 8, "zero_optimization": {"offload_param": {"device": "gpu"}}}, "offload_param.device"),
        ({"elasticity": "auto"}, '"auto", for which we have no setting'),
        ({"train_batch_size": 8, "bf16": {"enabled": True}, "fp16": {"enabled": True}}, "choose one"),
        ({"train_batch_size": 8, "scheduler": {"type": "OneCycle"}}, "OneCycle"),
        ({"train_batch_size": 8, "data_types": {"grad_accum_type": "fp32"}}, "data_types.grad_accum_type"),
        ({"communication_data_type": "fp16", "data_types": {"grad_accum_dtype": "fp32"}}, "make them equal"),
        ({"zero_optimization": {"stage": 2, "ignore_unused_parameters": False}}, "ignore_unused_parameters"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, "zero_hpz_partition_size"),
        ({"bf16": True, "fp16": {}}, "bf16 True is no section"),
        ({"optimizer": {"type": "Adam", "params": {"lr": "fast"}}, "bf16": {}}, "params.lr 'fast' is no number"),
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
def test_a_key_that_means_nothing_here_is_named(values, message):
    with pytest.raises(InputError, match=message):
        read_deepspeed(values, ranks=2)


def test_a_configuration_as_people_have_it_is_taken_with_what_is_off_named():
    """In the style of the files that are passed around, with all that is off or empty in them."""
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
    assert (settings.precision, settings.options.zero, settings.accumulate, settings.clip) == ("fp16", 3, 4, 1.0)
    assert settings.optimizer == ("AdamW", {"lr": 1e-3, "weight_decay": 0.1})  # what DeepSpeed's Adam is
    named = set(settings.without_effect)
    assert {"amp", "flops_profiler", "sparse_gradients", "zero_optimization.overlap_comm"} <= named
    assert {"fp16.auto_cast", "zero_optimization.offload_param", "zero_optimization.mics_shard_size"} <= named
    scale = settings.scale
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
        ({"optim": {"lr": 0.1}}, "optim.lr beside an optimizer of your own"),
        ({"train": {"steps": 100}}, "train.steps beside an optimizer of your own"),
        ({"elastic": {"mode": "shrink"}}, "elastic.mode"),
    ],
)
def test_a_key_of_ours_that_initialize_does_nothing_with_is_named(values, named):
    with pytest.raises(InputError, match=named):
        from_config(Config.from_dict(values), 2, own_optimizer=True)
    with pytest.raises(InputError, match=r"run\.toml: mt\.initialize does nothing with run.seed"):
        from_config(Config.from_dict({"run": {"seed": 1}}), 2, own_optimizer=False, origin="run.toml")


def test_what_asks_for_nothing_is_no_error_and_a_batch_that_was_not_given_cuts_nothing():
    off = {"run": {"reproducible": False}, "parallel": {"pipeline": 1, "data": 3}, "monitor": {"timeline": ""}}
    settings = from_config(Config.from_dict(off | {"comm": {"timeout": 9.0}}), 3, own_optimizer=True)
    assert (settings.microbatch, settings.accumulate, settings.timeout) == (0, 1, 9.0)


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


def test_of_a_runs_configuration_only_what_would_train_otherwise_is_refused():
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
        with pytest.raises(InputError, match=rf"^RUN/config\.toml: mt\.initialize does nothing with {section}\.{key};"):
            settings(**{section: {key: value}})
    with pytest.raises(InputError, match=r"parallel.data 3 x .* does not make 2 ranks"):
        settings(parallel={"data": 3})


@pytest.mark.ranks(1)
def test_an_optimizer_or_a_scheduler_given_twice_is_refused(world):
    model = gpt()
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(InputError, match="an optimizer was given, and config names another"):
        mt.initialize(model, optimizer, {"train_batch_size": world.size, "optimizer": ADAM})
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    warmup = {"type": "WarmupLR", "params": {}}
    with pytest.raises(InputError, match="a scheduler was given"):
        mt.initialize(model, optimizer, {"train_batch_size": world.size, "scheduler": warmup}, scheduler=schedule)


@pytest.mark.parametrize(
    ("said", "clip"), [({}, 1.0), ({"gradient_clipping": 0}, 0.0), ({"gradient_clipping": 2}, 2.0)]
)
def test_gradients_are_clipped_at_one_where_a_deepspeed_configuration_says_nothing(said, clip):
    assert read_deepspeed({"train_batch_size": 4, **said}, 2).clip == clip


def test_a_deepspeed_configuration_is_taken_over():
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
    assert (settings.microbatch, settings.accumulate, settings.options.zero) == (2, 3, 2)
    assert settings.options.offload == "host" and settings.scale.value == 256 and settings.scale.patience == 5
    assert settings.scale.spare == 1  # DeepSpeed's hysteresis is 2 unless told otherwise
    assert settings.without_effect == ("steps_per_print", "zero_optimization.contiguous_gradients")
    rates = [settings.schedule.rate(update) for update in (0, 1, 2, 11, 16, 21, 25)]
    assert rates == pytest.approx([0.0, 0.0, 0.01, 0.1, 0.05, 0.0, 0.0])


@pytest.mark.ranks(1)
def test_what_would_train_with_wrong_gradients_is_refused_in_a_line(world):
    def engine(**more):
        model = nn.Linear(2, 1)
        return mt.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), {"train": {"batch": 2}}, **more)

    ours, x = engine(loss=lambda output, y: output.sum()), torch.ones(2, 2)
    with pytest.raises(InputError, match=r"step was called without engine\.backward before it"):
        ours.step()
    for wrong, told in (
        (ours.module(x), r"shape \[2, 1\]; give its mean"),
        (1.5, "this is a float"),
        (x[0, 0], "no_grad"),
    ):
        with pytest.raises(InputError, match=told):
            ours.backward(wrong)
    ours.backward(ours(x, x))
    with pytest.raises(InputError, match="twice without a step between"):
        ours.backward(ours(x, x))
    with pytest.raises(InputError, match="would lose the gradients of a step"):
        ours.save("nowhere")
    assert ours.step()
    with pytest.raises(InputError, match=r"\(x, y\), and this is a tuple of 3"):
        ours.train_batch(iter([(x, x, x)]))
    with pytest.raises(AttributeError, match=r"here it is engine\.save\(folder\)"):
        ours.save_checkpoint("nowhere")
    with pytest.raises(InputError, match="returns the engine alone"):
        _, _ = ours
    with pytest.raises(InputError, match=r"Linear has an engine already; call that one's close\(\)"):
        mt.initialize(ours.module, ours.optimizer, {"train": {"batch": 2}})
    ours.close()
    for use in (lambda: ours(x, x), lambda: ours.backward(ours.module(x).sum()), lambda: ours.save("nowhere"),
                lambda: ours.load("nowhere"), ours.state_dict, lambda: ours.train_batch(iter([(x, x)]))):  # fmt: skip
        with pytest.raises(InputError, match="the engine was closed; make another"):
            use()
        ours._pending = False
    ours.close()
    mt.initialize(ours.module, ours.optimizer, {"train": {"batch": 2}}).close()
    with pytest.raises(InputError, match="the scheduler is of another optimizer"):
        engine(scheduler=torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(x)], lr=0.1), 1))
    with pytest.raises(InputError, match=r"in DistributedDataParallel already; give mt.initialize its \.module"):
        mt.initialize(mt.DistributedDataParallel(nn.Linear(2, 1)))


@pytest.mark.ranks(2)
def test_what_ranks_have_unlike_is_named_before_they_train_apart(world):
    def engine(*, width=2, own=0.1, frozen=False, zero=1, precision="fp32", clip=0.5, lr=0.1, decay=0.0, make=False):
        model = nn.Sequential(nn.Linear(2, width), nn.Linear(width, 1))
        model[0].bias.requires_grad_(not frozen)
        config = {"train": {"batch": 2, "clip": clip, "precision": precision}, "parallel": {"zero": zero}}
        if own is None:
            return mt.initialize(model, config=config | {"optim": {"lr": lr}})
        optimizer = torch.optim.SGD(model.parameters(), lr=own, weight_decay=decay)
        return mt.initialize(model, (lambda p: torch.optim.SGD(p, lr=own)) if make else optimizer, config)

    for values, told in (
        ({"clip": (0.5, 1.0)}, r"^clip is 0.5 on rank 0 and 1 on rank 1; give mt.initialize the same on every rank$"),
        ({"zero": (0, 3)}, r"^parallel\.zero is 0 on rank 0 and 3 on rank 1;"),
        ({"precision": ("fp32", "bf16")}, r"^precision is fp32 on rank 0 and bf16 on rank 1;"),
        ({"lr": (0.1, 0.2), "own": (None, None)}, r"^optim\.lr is 0.1 on rank 0 and 0.2 on rank 1;"),
        ({"own": (0.1, 0.2)}, r"^optimizer\.param_groups\[0\]\.lr is 0.1 on rank 0 and 0.2 on rank 1;"),
        ({"own": (0.1, 0.2), "make": (True, True)}, r"^optimizer\.param_groups\[0\]\.lr is 0.1 on rank 0 and 0.2"),
        ({"decay": (0.0, 0.1)}, r"^optimizer\.param_groups\[0\]\.weight_decay is 0 on rank 0 and 0.1 on rank 1;"),
        ({"width": (3, 4)}, r"^model\.0\.weight is float32 \[3, 2\] on rank 0 and float32 \[4, 2\] on rank 1;"),
        ({"frozen": (False, True)}, r"^model\.0\.bias is float32 \[2\] on rank 0 and float32 \[2\] frozen on rank 1;"),
    ):
        with pytest.raises(InputError, match=told):
            engine(**{name: each[world.rank] for name, each in values.items()})
    ours = engine(frozen=True)
    ours.module[0].bias.requires_grad_()
    with pytest.raises(InputError, match=r"^0\.bias requires gradients, and did not when the engine was made"):
        ours.backward(ours(torch.ones(1, 2)).sum())
    ours.close()


@pytest.mark.ranks(1, 2)
def test_states_of_another_optimizer_are_refused_and_those_of_the_same_are_not(world, folder):
    def engine(kind, **options):
        model = nn.Linear(2, 1)
        made = kind(model.parameters(), lr=0.1, **options)
        return mt.initialize(model, made, {"train": {"batch": 2}, "parallel": {"zero": 1}})

    def saved(name, kind, **options):
        ours = engine(kind, **options)
        for _ in range(ours.settings.accumulate):
            ours.backward(ours(torch.ones(1, 2)).sum())
            ours.step()
        ours.save(folder / name)
        ours.close()

    adam, sgd = torch.optim.AdamW, torch.optim.SGD
    saved("adam", adam)
    saved("sgd", sgd)
    for kind, options in ((sgd, {}), (sgd, {"momentum": 0.9}), (adam, {"amsgrad": True})):
        ours = engine(kind, **options)
        with pytest.raises(InputError, match=r"another optimizer's states \(exp_avg, .* export .*adam weights\.pt"):
            ours.load(folder / "adam")
        ours.load(folder / "sgd")  # which has none
        assert ours.steps == 1
        ours.close()
    ours = engine(torch.optim.Adam)  # with the same states
    ours.load(folder / "adam")
    assert ours.steps == 1 and ours._engine.optimizer.state
    ours.close()
