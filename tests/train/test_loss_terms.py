"""On every layout, means are over unmasked targets, and loss terms inside a model count as in one process."""

from __future__ import annotations

import itertools
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from train.jobs import run

import mpitrain as mt
from mpitrain.config.settings import Config
from mpitrain.data import open_dataset
from mpitrain.data.prepare import PrepareOptions, prepare
from mpitrain.errors import InputError
from mpitrain.layers.loss_terms import LossTerm, counted
from mpitrain.models.gpt import GPT

STEPS, BATCH, WIDTH, CLASSES = 3, 7, 8, 5
CASES = {
    1: [{"microbatch": 1}],
    2: [
        {"microbatch": 1},
        {"zero": 2, "microbatch": 2},
        {"zero": 3, "microbatch": 2},
        {"tensor": 2},
        {"pipeline": 2, "microbatch": 1},
        {"pipeline": 2, "slices": 3, "microbatch": 2},
    ],
    3: [{"microbatch": 1}, {"zero": 2, "microbatch": 2}],
    4: [{"pipeline": 2, "microbatch": 2}, {"pipeline": 2, "tensor": 2}],
}


def by_token(description):
    """Return a GPT with torch's loss: the mean over the targets that are not masked."""
    torch.manual_seed(1)
    model = GPT(description.vocabulary, 2, 16, 2)
    model.criterion = TokenMean()
    return model


class TokenMean(nn.CrossEntropyLoss):
    def forward(self, scores, y):
        return super().forward(scores.flatten(0, -2), y.flatten())


@pytest.fixture(scope="module")
def place(world, tmp_path_factory):
    return Path(world.broadcast_object(str(tmp_path_factory.mktemp("loss-terms"))))


@pytest.fixture(scope="module")
def pairs(world, place):
    """Pairs of very different lengths; in some samples all targets are masked."""
    if world.rank == 0:
        source = place / "pairs.jsonl"
        records = [{"prompt": f"{i}" + "?" * (i % 60), "completion": str(2 * i) * (1 + i % 3)} for i in range(200)]
        source.write_text("".join(f"{json.dumps(each)}\n" for each in records))
        prepare(
            [str(source)], place / "pairs", options=PrepareOptions(prompt="prompt", completion="completion", pack=24)
        )
    world.barrier()
    return str(place / "pairs")


def settings(pairs, parallel=(), **more):
    parallel = dict(parallel)
    train = {"steps": STEPS, "batch": BATCH, "microbatch": parallel.pop("microbatch", 0), "evaluate_every": 2}
    model = {"factory": f"{__name__}:by_token", "sequence": 24}
    return {"data": {"path": pairs}, "model": model, "train": train, "parallel": parallel, **more}


def formula(pairs):
    config = Config.from_dict(settings(pairs))
    data = open_dataset(pairs, sequence=24)
    model = by_token(data.description)
    x, y = map(torch.from_numpy, data.read(data.order(config.run.seed).ids(0, BATCH)))
    counts = (y != -100).sum(1)
    assert counts.min() == 0 and len(set(counts.tolist())) > 2
    with torch.no_grad():
        return model.loss(model(x), y).item()


@pytest.mark.ranks(1, 2, 3, 4)
def test_masked_targets_have_equal_weight_on_every_layout(world, place, pairs):
    alone = world.subgroup([0])
    reference = run(alone, place / "alone", **settings(pairs)) if alone is not None else None
    reference = world.broadcast_object(reference)
    assert reference[0]["loss"] == pytest.approx(formula(pairs), rel=1e-5)
    for number, parallel in enumerate(CASES[world.size]):
        lines = run(world, place / f"masked-{world.size}-{number}", **settings(pairs, parallel))
        for key, rel in (("loss", 1e-5), ("grad_norm", 1e-4)):
            values, expected = ([line[key] for line in each] for each in (lines, reference))
            assert values == pytest.approx(expected, rel=rel), (parallel, key)
        assert lines[-1]["held_out_loss"] == pytest.approx(reference[-1]["held_out_loss"], rel=1e-5), parallel


@pytest.mark.ranks(2)
def test_masked_reproducible_runs_have_the_same_bits(world, place, pairs):
    exact = {"reproducible": True, "workers": 4}

    def losses(comm, folder):
        lines = run(comm, place / folder, **settings(pairs, run={"dir": str(place / folder), **exact}))
        return [line["loss"] for line in lines]

    alone = world.subgroup([0])
    reference = world.broadcast_object(losses(alone, "exact-alone") if alone is not None else None)
    assert losses(world, "exact") == reference


# -- loss terms of a model


class Penalized(nn.Module):
    """A layer that adds the mean square of its output to the loss."""

    def __init__(self, name, weight):
        super().__init__()
        self.layer, self.term = nn.Linear(WIDTH, WIDTH), LossTerm(name, weight)

    def forward(self, x):
        y = torch.tanh(self.layer(x))
        return self.term(y, y.square().mean())


def penalized(description=None):
    """Return a model whose first, middle and last third add a loss term; two of the terms have the same name."""
    torch.manual_seed(2)
    inputs = 64 if description is not None else WIDTH
    blocks = [nn.Sequential(nn.Flatten(), nn.Linear(inputs, WIDTH)), Penalized("size", 0.5), nn.Linear(WIDTH, WIDTH)]
    blocks += [Penalized("other", 2.0), Penalized("size", 0.25), nn.Linear(WIDTH, 10)]
    return nn.Sequential(*blocks), functional.cross_entropy


def digits(parallel=(), **more):
    parallel = dict(parallel)
    overrides = {key: parallel.pop(key) for key in ("microbatch", "recompute", "precision") if key in parallel}
    train = {"steps": STEPS, "batch": 14, **overrides}
    model = {"factory": f"{__name__}:penalized"}
    return {"data": {"path": "digits"}, "model": model, "train": train, "parallel": parallel, **more}


TERMS = {
    1: [{"microbatch": 3}],
    2: [
        {"microbatch": 3, "zero": 2},
        {"microbatch": 7, "zero": 3, "recompute": True},
        {"pipeline": 2, "microbatch": 4, "recompute": True},
        {"pipeline": 2, "microbatch": 4, "schedule": "zero-bubble"},
        {"pipeline": 2, "microbatch": 4, "precision": "fp16"},
        {"mode": "local", "local_steps": 1},
    ],
    3: [{"pipeline": 3, "microbatch": 4}, {"microbatch": 2}],
    4: [{"pipeline": 2, "microbatch": 2}],
}


@pytest.mark.ranks(1, 2, 3, 4)
def test_loss_terms_of_a_model_give_the_results_of_one_process(world, place):
    alone = world.subgroup([0])
    reference = world.broadcast_object(run(alone, place / "terms-alone", **digits()) if alone is not None else None)
    assert {"loss of size", "loss of other"} <= reference[0].keys()
    keys = ("loss", "grad_norm", "loss of size", "loss of other")
    for number, parallel in enumerate(TERMS[world.size]):
        lines = run(world, place / f"terms-{world.size}-{number}", **digits(parallel))
        rel = 1e-2 if "precision" in parallel else 1e-4
        for key in keys:
            values, expected = ([line[key] for line in each] for each in (lines, reference))
            assert values == pytest.approx(expected, rel=rel), (parallel, key)
        assert lines[-1]["held_out_loss"] == pytest.approx(reference[-1]["held_out_loss"], rel=rel), parallel


@pytest.mark.ranks(2)
def test_reproducible_terms_have_the_same_bits(world, place):
    def figures(comm, folder):
        exact = {"dir": str(place / folder), "reproducible": True, "workers": 4}
        lines = run(comm, place / folder, **digits({"microbatch": 2}, run=exact))
        return [[line[key] for key in ("loss", "loss of size", "grad_norm")] for line in lines]

    alone = world.subgroup([0])
    reference = world.broadcast_object(figures(alone, "terms-exact-alone") if alone is not None else None)
    assert figures(world, "terms-exact") == reference


def test_loss_term_has_the_gradient_of_an_explicit_sum():
    model, loss = penalized()
    x, y = torch.randn(6, WIDTH), torch.randint(10, (6,))
    loss(model(x), y).backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    values, hidden = [], x
    for block in model:
        if isinstance(block, Penalized):
            hidden = torch.tanh(block.layer(hidden))
            values.append(block.term.weight * hidden.square().mean())
        else:
            hidden = block(hidden)
    (loss(hidden, y) + sum(values)).backward()
    torch.testing.assert_close(gradients, [p.grad for p in model.parameters()])


@pytest.mark.ranks(2)
def test_loss_terms_with_parallel_sequence_are_refused(world, place, pairs):
    sections = settings(pairs, {"tensor": 2, "sequence": True})
    sections["model"]["factory"] = f"{__name__}:with_a_term"
    with pytest.raises(InputError, match="'size', which needs all of them; set parallel"):
        run(world, place / "in-parts", **sections)


def with_a_term(description):
    model = by_token(description)
    model.term = LossTerm("size")
    return model


# -- training loops written by the user


def masked_batch(step, samples=12, sequence=4):
    draw = torch.Generator().manual_seed(step)
    x, y = torch.randn(samples, WIDTH, generator=draw), torch.randint(10, (samples, sequence), generator=draw)
    masks = torch.arange(samples)[:, None] // 2 <= torch.arange(sequence)[None] + 1
    return x, y.masked_fill(masks.roll(step, 0), -100)


def repeated(output, y):
    return functional.cross_entropy(output.unsqueeze(1).expand(-1, y.shape[1], -1).flatten(0, 1), y.flatten())


def train_in_user_loop(comm, **parallel):
    model, _ = penalized()
    config = {"train": {"batch": 12, "microbatch": 2}, "parallel": parallel}
    engine = mt.initialize(model, partial(torch.optim.SGD, lr=0.1), config, loss=repeated, comm=comm)

    def microbatches():
        for step in itertools.count():
            x, y = (t.chunk(engine.data_size)[engine.data_rank] for t in masked_batch(step))
            yield from zip(x.split(2), y.split(2) if engine.is_last_stage else y.mul(0).split(2), strict=True)

    coming = microbatches()
    losses = [[engine.train_batch(coming), *engine.loss_terms.values(), engine.norm] for _ in range(STEPS)]
    evaluated = engine.evaluate(itertools.islice(microbatches(), 6 // engine.data_size))
    engine.close()
    return losses, evaluated


def train_by_hand():
    model, _ = penalized()
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for step in range(STEPS):
        x, y = masked_batch(step)
        optimizer.zero_grad()
        loss = repeated(model(x), y)
        loss.backward()
        terms = {"other": 0.0, "size": 0.0}
        for block in model:
            if isinstance(block, Penalized):
                terms[block.term.name] += block.term.total.item()
                loss = loss + block.term.weight * block.term.total
                block.term.total = None
        losses.append(
            [loss.item(), *terms.values(), nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()]
        )
        optimizer.step()
    return losses, repeated(model.eval()(masked_batch(0)[0]), masked_batch(0)[1]).item()


@pytest.mark.ranks(1, 2, 3)
def test_user_loop_weighs_masked_targets_and_loss_terms(world):
    expected_losses, expected_evaluation = train_by_hand()
    cases = {1: [{}], 2: [{}, {"zero": 2}, {"zero": 3}, {"pipeline": 2}], 3: [{}, {"pipeline": 3}]}
    for parallel in cases[world.size]:
        losses, evaluation = train_in_user_loop(world, **parallel)
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected_losses), rtol=1e-4, atol=1e-6)
        assert evaluation == pytest.approx(expected_evaluation, rel=1e-4), parallel


# -- what a mean is over


def test_count_of_targets_that_a_loss_averages():
    y = torch.tensor([[1, -100, 2], [0, 0, -100]])
    assert counted(functional.cross_entropy, y) == 4
    assert counted(nn.CrossEntropyLoss(ignore_index=0), y.clamp(min=0)) == 2
    assert counted(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 4.0])), y) == 8
    assert counted(nn.CrossEntropyLoss(reduction="sum"), y) == 2
    assert counted(functional.mse_loss, y.float()) == 2

    class CountSamples(nn.Module):
        counted = staticmethod(len)

    assert counted(CountSamples(), y) == 2


@pytest.mark.ranks(4)
def test_batch_norms_on_stages_need_equal_numbers_of_microbatches(world, place):
    sections = {"data": {"path": "digits"}, "model": {"name": "resnet", "layers": 18, "width": 4}}
    sections |= {"train": {"steps": 1, "batch": 5, "microbatch": 1}, "parallel": {"pipeline": 2}}
    with pytest.raises(InputError, match="BatchNorm needs the same number of microbatches on each rank"):
        run(world, place / "uneven", **sections)
