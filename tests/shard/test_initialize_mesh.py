"""`mpitrain.initialize` on a mesh: a user's loop over stages and divided layers trains like one process."""

from __future__ import annotations

import itertools
import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import mpitrain as mt
from mpitrain.checkpoint.__main__ import main
from mpitrain.errors import InputError
from mpitrain.layout.mesh import Mesh

BATCH, MICRO, WIDTH = 24, 4, 16
PLAN = {"*.up": "column", "*.down": "row"}
ADAMW = {"name": "AdamW", "lr": 1e-2, "schedule": "cosine", "warmup": 3, "weight_decay": 0.1}


class Block(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 36), nn.Linear(36, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Net(nn.Module):
    """Model whose block order only its forward pass shows, and whose first and last layer share a parameter."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.out.weight = self.into.weight
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(4))
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, x):
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


NAMES = ["into", *(f"blocks.{number}" for number in range(4)), "out"]


def net(dropout=0.0):
    torch.manual_seed(3)
    return Net(dropout)


def batch(step):
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, x.roll(1, 1).sin() * 3


def microbatches(engine, first=0):
    """Yield this rank's microbatches from a step on."""
    for step in itertools.count(first):
        x, y = (t[engine.data_rank :: engine.data_size] for t in batch(step))
        yield from zip(x.split(engine.settings.microbatch), y.split(engine.settings.microbatch), strict=True)


def settings(*, train=None, optim=None, **parallel):
    steps = {"steps": 12} if optim else {}
    values = {"train": {"batch": BATCH, "microbatch": MICRO, "clip": 0.5, **steps, **(train or {})}}
    return values | {"parallel": parallel} | ({"optim": optim} if optim else {})


def make_engine(optimizer=None, *, dropout=0.0, comm=None, optim=None, train=None, scheduler=None, **parallel):
    model = net(dropout)
    if callable(optimizer) and getattr(optimizer, "whole", False):
        optimizer = optimizer(model)
    return mt.initialize(
        model,
        optimizer,
        settings(optim=optim, train=train, **parallel),
        loss=nn.functional.mse_loss,
        scheduler=scheduler,
        comm=comm,
        plan=PLAN,
        blocks=NAMES,
    )


def train(engine, steps, first=0):
    coming = microbatches(engine, first)
    return [(engine.train_batch(coming), engine.norm) for _ in range(steps)]


def check_close(actual, expected):
    assert [loss for loss, _ in actual] == pytest.approx([loss for loss, _ in expected], rel=1e-5)
    assert [norm for _, norm in actual] == pytest.approx([norm for _, norm in expected], rel=1e-4)


def train_alone(optimizer_of, steps, scheduler_of=lambda optimizer: None):
    """Train with plain torch in one process; return losses and norms, an evaluation loss, and the parameters."""
    model = net()
    optimizer = optimizer_of(model)
    scheduler = scheduler_of(optimizer)
    results = []
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        results.append((loss.item(), float(norm)))
    with torch.no_grad():
        evaluated = nn.functional.mse_loss(model(batch(99)[0]), batch(99)[1]).item()
    return results, evaluated, model.state_dict()


def grouped_adamw(model):
    """Return an optimizer whose groups depend on the names in the whole model."""
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    others = [p for name, p in model.named_parameters() if "norm" not in name]
    return torch.optim.AdamW([{"params": norms, "lr": 3e-2, "weight_decay": 0.0}, {"params": others}], lr=1e-2)


grouped_adamw.whole = True
halved = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
MESHES = {
    2: [{"pipeline": 2, "zero": 1}, {"tensor": 2}, {"zero": 2}],
    3: [{"pipeline": 3, "schedule": "gpipe"}, {"tensor": 3}, {"zero": 1}],
    4: [{"pipeline": 2, "zero": 2}, {"tensor": 2, "zero": 2}, {"pipeline": 2, "tensor": 2, "schedule": "zero-bubble"}],
}


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("number", [0, 1, 2])
def test_ten_steps_on_a_mesh_match_one_process(world, number):
    parallel = MESHES[world.size][number]
    expected, evaluated, state = train_alone(grouped_adamw, 10, halved)
    engine = make_engine(grouped_adamw, scheduler=halved, **parallel)
    assert [*engine.mesh.shape.values()] == [engine.data_size, parallel.get("pipeline", 1), parallel.get("tensor", 1)]
    assert engine.settings.accumulate == BATCH // (MICRO * engine.data_size)
    ends = world.all_gather_object([engine.is_first_stage, engine.is_last_stage])
    stages = engine.mesh.pipeline.size
    assert [sum(each) for each in zip(*ends, strict=True)] == [world.size // stages] * 2
    check_close(train(engine, 10), expected)
    assert engine.lr == pytest.approx(3e-2 * 0.5**5)
    x, y = (t[engine.data_rank :: engine.data_size] for t in batch(99))
    assert engine.evaluate([(x[:3], y[:3]), (x[3:], y[3:])]) == pytest.approx(evaluated, rel=1e-5)
    assert engine.eval_batch(microbatches(engine, 99)) == pytest.approx(evaluated, rel=1e-5)
    trained_state = engine.state_dict()
    assert list(trained_state) == list(state)
    torch.testing.assert_close(trained_state, state, rtol=1e-4, atol=1e-5)
    engine.close()


@pytest.mark.ranks(2)
def test_optimizers_that_need_whole_matrices_are_refused_with_tensor_parallelism(world):
    for optimizer, optim in ((torch.optim.Adafactor, None), (None, {"name": "adafactor", "lr": 1e-2})):
        with pytest.raises(InputError, match=r"Adafactor cannot be sharded: .* parallel\.tensor 1, or set `opt"):
            make_engine(optimizer, optim=optim, tensor=2)


@pytest.mark.ranks(2)
def test_stages_may_have_different_parameter_groups_and_resume_their_rates(world, folder):
    optim = {**ADAMW, "groups": [{"match": "blocks.3.*", "lr_scale": 0.1}, {"match": "blocks.0.norm.*", "lr": 3e-2}]}
    whole = make_engine(optim=optim, comm=world.split(world.rank))
    expected = train(whole, 6)
    whole.close()
    engine = make_engine(optim=optim, pipeline=2)
    groups = world.all_gather_object([sorted({g.get("lr_scale", 1.0) for g in engine.optimizer.param_groups})])
    assert groups[0] != groups[1]
    check_close(train(engine, 3), expected[:3])
    engine.save(folder / "c")
    engine.close()
    engine = make_engine(optim=optim, pipeline=2)
    engine.load(folder / "c")
    check_close(train(engine, 3, first=3), expected[3:])
    engine.close()


# -- checkpoints


def draw_numbers(world):
    """Draw a number from each random generator; a resumed run must draw the same ones."""
    return [random.random(), float(np.random.rand()), float(np.random.randn()), torch.rand(1).item()]


RECOMPUTING = {
    2: [{"pipeline": 2}, {"pipeline": 2, "schedule": "zero-bubble"}, {"tensor": 2}, {"zero": 3, "share_node": False}],
    4: [{"pipeline": 2, "tensor": 2}],
}


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("recompute", [True, "selective", "every 2", [1, 2]], ids=str)
def test_every_way_of_recomputing_gives_the_same_bits(world, recompute):
    for parallel in RECOMPUTING[world.size]:
        losses = []
        for each in (False, recompute):
            engine = make_engine(optim=ADAMW, dropout=0.3, train={"recompute": each}, **parallel)
            torch.manual_seed(5)
            losses.append(train(engine, 3))
            engine.close()
        assert losses[0] == losses[1]


DROPPING = {
    2: [{"pipeline": 2}, {"tensor": 2}, {"zero": 3}],
    3: [{"pipeline": 3, "schedule": "zero-bubble"}],
    4: [{"pipeline": 2, "zero": 1}, {"pipeline": 2, "tensor": 2}],
}


@pytest.mark.ranks(2, 3, 4)
def test_a_run_with_dropout_resumes_bitwise(world, folder):
    for number, parallel in enumerate(DROPPING[world.size]):
        engine = make_engine(optim=ADAMW, dropout=0.3, train={"recompute": number == 0}, **parallel)
        torch.manual_seed(world.rank)  # as a loop may have done after a while
        random.seed(world.rank)
        np.random.seed(world.rank)
        np.random.randn()
        train(engine, 3)
        engine.save(folder / f"{number}", {"epoch": 2})
        expected = train(engine, 3, first=3), draw_numbers(world)
        engine.close()
        engine = make_engine(optim=ADAMW, dropout=0.3, train={"recompute": number == 0}, **parallel)
        train(engine, 2)
        assert engine.load(folder / f"{number}") == {"epoch": 2} and engine.steps == 3
        assert (train(engine, 3, first=3), draw_numbers(world)) == expected
        engine.close()


@pytest.mark.parametrize("device", ["pretend"], indirect=True)
@pytest.mark.ranks(2)
def test_divided_model_trains_and_resumes_bitwise_on_a_device_in_16_bits(world, folder, device):
    def begin(**parallel):
        values = settings(optim=ADAMW, train={"precision": "bf16"}, **parallel) | {"run": {"device": device.type}}
        return mt.initialize(net(0.3), config=values, loss=nn.functional.mse_loss, plan=PLAN, blocks=NAMES)

    for parallel in ({"pipeline": 2, "zero": 1}, {"tensor": 2}):
        engine = begin(**parallel)
        assert engine.device == device and {p.dtype for p in engine.module.parameters()} == {torch.bfloat16}
        first = train(engine, 3)
        saved = engine.save(folder / str(parallel.get("tensor")))
        expected = train(engine, 2, first=3), torch.rand(1, device=device).item()
        assert expected[0][-1][0] < first[0][0] and all(
            tensor.device == device for tensor in engine.state_dict().values()
        )
        engine.close()
        engine = begin(**parallel)
        engine.load(saved)
        assert (train(engine, 2, first=3), torch.rand(1, device=device).item()) == expected
        engine.close()


@pytest.mark.ranks(2)
def test_a_divided_model_does_not_change_the_callers_generators(world):
    for parallel in ({"pipeline": 2}, {"tensor": 2}):
        engine = make_engine(optim=ADAMW, dropout=0.3, **parallel)
        torch.manual_seed(5)
        expected = torch.rand(1)
        torch.manual_seed(5)
        losses = world.all_gather_object(train(engine, 2))
        assert losses[0] == losses[1]
        assert torch.equal(torch.rand(1), expected)  # which makes a DataLoader shuffle identically on all ranks
        engine.close()


@pytest.mark.ranks(2)
def test_a_pipeline_checkpoint_loads_in_other_layouts_and_is_exported(world, folder):
    engine = make_engine(optim=ADAMW, pipeline=2)
    train(engine, 4)
    saved = engine.save(folder / "run")
    state = engine.state_dict()
    expected = train(engine, 4, first=4)
    engine.close()
    drawings = []
    for parallel in ({"tensor": 2}, {"zero": 2}, {"pipeline": 2, "zero": 1}):
        engine = make_engine(optim=ADAMW, **parallel)
        engine.load(folder / "run")
        drawings.append(world.all_gather_object(draw_numbers(world)))
        check_close(train(engine, 4, first=4), expected)
        engine.close()
    engine = make_engine(optim=ADAMW, tensor=2)
    engine.load(folder / "run")
    assert world.all_gather_object(draw_numbers(world)) == drawings[0]  # seeded for the step and the place in the data
    assert drawings[0][0] == drawings[0][1] == drawings[1][0] != drawings[1][1]
    engine.close()
    one = world.subgroup([0])
    if one is not None:
        engine = make_engine(optim=ADAMW, comm=one)
        engine.load(saved)
        assert draw_numbers(world) == drawings[0][0]
        check_close(train(engine, 4, first=4), expected)
        engine.close()
        one.free()
        out = folder / "model.safetensors"
        assert main(["export", str(saved), str(out)]) == 0
        from safetensors.torch import load_file

        exported = load_file(out)
        assert all(torch.equal(state[name], tensor) for name, tensor in exported.items())
        assert set(state) - set(exported) <= {"into.weight", "out.weight"}
    world.barrier()


# -- user-defined optimizers, and refused arguments


@pytest.mark.ranks(2)
def test_a_function_can_create_the_optimizer_of_each_rank(world):
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5)))
    engine = mt.initialize(
        model,
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        {"train": {"batch": BATCH}, "parallel": {"pipeline": 2, "cut": [2, 3]}},
        loss=nn.functional.mse_loss,
        scheduler=halved,
    )
    assert engine.settings.accumulate == 4  # two a stage, unless something else is said
    mine = {f"{number}.{name}" for number in ((0, 1), (2, 3, 4))[world.rank] for name in ("weight", "bias")}
    assert {name for name, _ in engine.module.named_parameters()} == mine
    assert set(engine.state_dict()) == {f"{number}.{name}" for number in range(5) for name in ("weight", "bias")}
    losses = [engine.train_batch(itertools.repeat(tuple(t[:6] for t in batch(0)))) for _ in range(4)]
    assert losses[-1] < losses[0] and engine.lr == 0.1 / 4
    engine.close()


def check_refused(world, message, call):
    with pytest.raises(InputError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
    world.barrier()


@pytest.mark.ranks(2)
def test_invalid_arguments_are_refused_in_one_line(world):
    def begin(model=None, optimizer=None, config=None, **options):
        parallel = {"pipeline": 2} if config is None else config
        values = {"train": {"batch": BATCH}, "parallel": parallel}
        return lambda: mt.initialize(model or net(), optimizer, values, **{"loss": nn.functional.mse_loss, **options})

    used = net()
    stepped = torch.optim.AdamW(used.parameters())
    used(torch.zeros(1, WIDTH)).sum().backward()
    stepped.step()
    strange = torch.optim.SGD(net().parameters(), lr=0.1)
    uneven = lambda params: torch.optim.SGD([{"params": [p]} for p in params], lr=0.1)  # noqa: E731
    head = nn.Sequential(nn.Embedding(8, WIDTH), nn.Linear(WIDTH, 8))
    head.criterion = nn.CrossEntropyLoss()
    check_refused(world, "Net does not list the blocks at which it can be divided; .* an nn.Sequential", begin())
    check_refused(world, "Net has no module 'outo'", begin(blocks=[*NAMES[:-1], "outo"]))
    check_refused(
        world, r"parameters \['out.*'\] of the model are in none|parameters .* in none", begin(blocks=NAMES[1:-1])
    )
    check_refused(world, "Net does not define how to divide it; .* tensor_plan", begin(config={"tensor": 2}))
    check_refused(world, "the optimizer already has a state", begin(used, stepped, blocks=NAMES))
    check_refused(world, "parameters that are not in the model", begin(None, strange, blocks=NAMES))
    check_refused(world, "made 7 groups of parameters on rank 0 and 19 on rank 1", begin(
        None, uneven, {"pipeline": 2, "cut": [2, 4]}, blocks=NAMES))  # fmt: skip
    check_refused(world, "returned a list; it must return an optimizer", begin(None, list, blocks=NAMES))
    check_refused(world, "pipeline stages need a loss, but Net has none", begin(blocks=NAMES, loss=None))
    check_refused(
        world, "parallel.cut time measures blocks", begin(blocks=NAMES, config={"pipeline": 2, "cut": "time"})
    )
    check_refused(world, "the model has 6 blocks, but there are 8 stages", begin(
        blocks=NAMES, config={"pipeline": 2, "schedule": "interleaved", "chunks": 4}))  # fmt: skip
    check_refused(world, "scores of Sequential divided over ranks, which the loss that you passed does not", begin(
        head, config={"tensor": 2}, plan={"1": "vocabulary"}))  # fmt: skip
    odd = {"train": {"batch": 7, "microbatch": 2}, "parallel": {"pipeline": 2}}
    check_refused(world, "train.batch 7 is not 2 x 3 x 1 ranks", lambda: mt.initialize(net(), config=odd))
    none = {"parallel": {"pipeline": 2}}
    check_refused(world, "a pipeline computes all microbatches of a step in one call: set", lambda: mt.initialize(
        net(), config=none))  # fmt: skip
    engine = make_engine(optim=ADAMW, pipeline=2)
    coming = microbatches(engine)
    check_refused(
        world, r"engine\(...\) does not support a model in pipeline stages.*train_batch", lambda: engine(*batch(0))
    )
    check_refused(world, "come from an iterator, not a list", lambda: engine.train_batch([batch(0)]))
    check_refused(world, "ended after 5 of the 6 microbatches", lambda: engine.train_batch(itertools.islice(coming, 5)))
    with pytest.raises(StopIteration):
        engine.train_batch(iter(()))
    assert engine.train_batch(coming) > 0
    engine.close()
    Mesh.make(world).free()
