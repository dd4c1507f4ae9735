"""`mpitrain.initialize` in a user's training loop, with our settings or with a DeepSpeed configuration."""

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

import mpitrain as mt
from mpitrain.checkpoint import Store
from mpitrain.errors import InputError
from mpitrain.layout.mesh import Mesh

ADAM = {"type": "Adam", "params": {"lr": 3e-3, "betas": [0.9, 0.95]}}


def train(engine, world, steps, first=0, accumulate=1):
    """Train on this rank's part of each batch; return the averaged losses."""
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
    results = {}
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
        results[where] = losses, {name: value.cpu() for name, value in engine.state_dict().items()}
        engine.close()
    for where in ("moved", "there"):
        assert results[where][0] == pytest.approx(results["host"][0], rel=2e-6)
        torch.testing.assert_close(results[where][1], results["host"][1], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("device", ["pretend"], indirect=True)
@pytest.mark.ranks(2)
def test_a_model_on_another_kind_of_device_than_run_device_is_refused(world, device):
    with pytest.raises(InputError, match=rf"run.device is cpu, but the model is on {device.type}:\d; move the model"):
        mt.initialize(gpt().to(device), config={"run": {"device": "cpu"}})
    with pytest.raises(InputError, match=f"there is no device of kind 'xpu': this process has {device.type} devices"):
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
def test_native_settings_and_user_defined_optimizer(world, folder):
    config = {"train": {"batch": BATCH, "clip": 0.5}, "parallel": {"zero": 2}}
    model = gpt()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    engine = mt.initialize(model=model, optimizer=optimizer, config=config)
    assert train(engine, world, 4) == pytest.approx(reference(4), rel=1e-5)
    engine.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("zero", [0, 1])
def test_a_loss_that_does_not_pass_through_the_engine_is_reduced(world, zero):
    model, settings = nn.Linear(2, 1), {"train": {"batch": 2, "clip": 0.0}, "parallel": {"zero": zero}}
    engine = mt.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), settings)
    start, x = model.weight.detach().clone(), torch.full((1, 2), world.rank + 1.0)
    engine.backward(nn.functional.linear(x, model.weight, model.bias).sum())
    engine.step()
    torch.testing.assert_close(model.weight.detach(), start - 1.5)
    engine.close()


ANOTHER_JOB = """
import sys, torch, mpitrain as mt
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine = mt.initialize(model, optimizer, {"train": {"batch": 2}}, loss=lambda output, y: output.sum())
engine.save(sys.argv[1])
"""


@pytest.mark.ranks(2)
def test_engines_of_one_job_share_a_checkpoint_folder(world, folder):
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
    with pytest.raises(InputError, match="step-00000000 exists already, but mpitrain did not write it"):
        engine.save(theirs)
    assert (theirs / "step-00000000/mine").exists() and sorted(os.listdir(theirs)) == ["lock", "step-00000000"]


def _run(code, *arguments):
    ended = job(0, [sys.executable, "-c", code, *map(str, arguments)])
    return [ended.returncode, ended.stderr]


@pytest.mark.ranks(1, 2, 3)
def test_an_engine_resumes_from_another_engines_checkpoint(world, folder):
    def make_engine(zero):
        model = gpt()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return mt.initialize(
            model, optimizer, {"parallel": {"zero": zero}, "train": {"batch": world.size}}, scheduler=schedule
        )

    engine = make_engine(1)
    train(engine, world, 3)
    saved = engine.save(folder / "run", {"epoch": 7})
    expected, rate = train(engine, world, 3, first=3), engine.lr
    engine.close()
    engine = make_engine(3)
    assert engine.load(folder / "run") == {"epoch": 7}
    assert engine.steps == 3
    assert train(engine, world, 3, first=3) == pytest.approx(expected, rel=1e-6)
    assert engine.lr == rate
    with pytest.raises(
        InputError, match=r"there is no checkpoint in nowhere; give a folder that engine.save has written to"
    ):
        engine.load("nowhere")
    assert saved.is_dir()
    state = engine.state_dict()
    fresh = gpt()
    fresh.load_state_dict(state)
    engine.close()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("parallel", [{"zero": 0}, {"zero": 2, "shard_within": "node"}])
def test_engines_free_their_mpi_resources(world, folder, parallel):
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


@pytest.mark.ranks(1)
def test_calls_that_give_wrong_gradients_are_refused(world):
    def engine(**more):
        model = nn.Linear(2, 1)
        return mt.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), {"train": {"batch": 2}}, **more)

    ours, x = engine(loss=lambda output, y: output.sum()), torch.ones(2, 2)
    with pytest.raises(InputError, match=r"step was called without engine\.backward before it"):
        ours.step()
    for wrong, message in (
        (ours.module(x), r"shape \[2, 1\]; pass its mean"),
        (1.5, "got a float"),
        (x[0, 0], "no_grad"),
    ):
        with pytest.raises(InputError, match=message):
            ours.backward(wrong)
    ours.backward(ours(x, x))
    with pytest.raises(InputError, match=r"twice without engine.step between"):
        ours.backward(ours(x, x))
    with pytest.raises(InputError, match="would lose its gradients"):
        ours.save("nowhere")
    assert ours.step()
    with pytest.raises(InputError, match=r"\(x, y\), but this is a tuple of 3"):
        ours.train_batch(iter([(x, x, x)]))
    with pytest.raises(AttributeError, match=r"here it is engine\.save\(folder\)"):
        ours.save_checkpoint("nowhere")
    with pytest.raises(InputError, match="returns only the engine"):
        _, _ = ours
    with pytest.raises(InputError, match=r"Linear already has an engine; call close\(\) of that engine"):
        mt.initialize(ours.module, ours.optimizer, {"train": {"batch": 2}})
    ours.close()
    for use in (lambda: ours(x, x), lambda: ours.backward(ours.module(x).sum()), lambda: ours.save("nowhere"),
                lambda: ours.load("nowhere"), ours.state_dict, lambda: ours.train_batch(iter([(x, x)]))):  # fmt: skip
        with pytest.raises(InputError, match="the engine was closed; make another"):
            use()
        ours._pending = False
    ours.close()
    mt.initialize(ours.module, ours.optimizer, {"train": {"batch": 2}}).close()
    with pytest.raises(InputError, match="the scheduler belongs to another optimizer"):
        engine(scheduler=torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(x)], lr=0.1), 1))
    with pytest.raises(InputError, match=r"wrapped in DistributedDataParallel; pass its \.module to mt.initialize"):
        mt.initialize(mt.DistributedDataParallel(nn.Linear(2, 1)))


@pytest.mark.ranks(2)
def test_differences_between_ranks_are_reported_before_training(world):
    def engine(*, width=2, sgd_lr=0.1, frozen=False, zero=1, precision="fp32", clip=0.5, lr=0.1, decay=0.0, make=False):
        model = nn.Sequential(nn.Linear(2, width), nn.Linear(width, 1))
        model[0].bias.requires_grad_(not frozen)
        config = {"train": {"batch": 2, "clip": clip, "precision": precision}, "parallel": {"zero": zero}}
        if sgd_lr is None:
            return mt.initialize(model, config=config | {"optim": {"lr": lr}})
        optimizer = torch.optim.SGD(model.parameters(), lr=sgd_lr, weight_decay=decay)
        return mt.initialize(model, (lambda p: torch.optim.SGD(p, lr=sgd_lr)) if make else optimizer, config)

    for values, message in (
        (
            {"clip": (0.5, 1.0)},
            r"^train\.clip is 0.5 on rank 0 and 1 on rank 1; pass the same to mt.initialize on every rank$",
        ),
        ({"zero": (0, 3)}, r"^parallel\.zero is 0 on rank 0 and 3 on rank 1;"),
        ({"precision": ("fp32", "bf16")}, r"^train\.precision is fp32 on rank 0 and bf16 on rank 1;"),
        ({"lr": (0.1, 0.2), "sgd_lr": (None, None)}, r"^optim\.lr is 0.1 on rank 0 and 0.2 on rank 1;"),
        ({"sgd_lr": (0.1, 0.2)}, r"^optimizer\.param_groups\[0\]\.lr is 0.1 on rank 0 and 0.2 on rank 1;"),
        ({"sgd_lr": (0.1, 0.2), "make": (True, True)}, r"^optimizer\.param_groups\[0\]\.lr is 0.1 on rank 0 and 0.2"),
        ({"decay": (0.0, 0.1)}, r"^optimizer\.param_groups\[0\]\.weight_decay is 0 on rank 0 and 0.1 on rank 1;"),
        ({"width": (3, 4)}, r"^model\.0\.weight is float32 \[3, 2\] on rank 0 and float32 \[4, 2\] on rank 1;"),
        ({"frozen": (False, True)}, r"^model\.0\.bias is float32 \[2\] on rank 0 and float32 \[2\] frozen on rank 1;"),
    ):
        with pytest.raises(InputError, match=message):
            engine(**{name: each[world.rank] for name, each in values.items()})
    ours = engine(frozen=True)
    ours.module[0].bias.requires_grad_()
    with pytest.raises(InputError, match=r"^0\.bias requires gradients now but did not when the engine was made"):
        ours.backward(ours(torch.ones(1, 2)).sum())
    ours.close()


@pytest.mark.ranks(1, 2)
def test_only_states_of_the_same_optimizer_are_loaded(world, folder):
    def engine(kind, **options):
        model = nn.Linear(2, 1)
        optimizer = kind(model.parameters(), lr=0.1, **options)
        return mt.initialize(model, optimizer, {"train": {"batch": 2}, "parallel": {"zero": 1}})

    def save_engine(name, kind, **options):
        ours = engine(kind, **options)
        for _ in range(ours.settings.accumulate):
            ours.backward(ours(torch.ones(1, 2)).sum())
            ours.step()
        ours.save(folder / name)
        ours.close()

    adam, sgd = torch.optim.AdamW, torch.optim.SGD
    save_engine("adam", adam)
    save_engine("sgd", sgd)
    for kind, options in ((sgd, {}), (sgd, {"momentum": 0.9}), (adam, {"amsgrad": True})):
        ours = engine(kind, **options)
        with pytest.raises(InputError, match=r"states of another optimizer \(exp_avg, .* export .*adam weights\.pt"):
            ours.load(folder / "adam")
        ours.load(folder / "sgd")  # which has none
        assert ours.steps == 1
        ours.close()
    ours = engine(torch.optim.Adam)  # with the same states
    ours.load(folder / "adam")
    assert ours.steps == 1 and ours._engine.optimizer.state
    ours.close()
