"""The comparison of ranks with threads recommends one rank where that is faster, and leaves no trace in the run."""

from __future__ import annotations

import re
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn
from train.jobs import run

from mpitrain.layers.loss_terms import LossTerm
from mpitrain.models.gpt import GPT
from mpitrain.trainer import threads
from mpitrain.trainer.threads import Comparison
from mpitrain.trainer.trainer import Trainer

TRAIN = {"steps": 12, "batch": 7, "evaluate_every": 5, "evaluate_samples": 4}
MODEL = {"factory": f"{__name__}:drifting", "sequence": 16}
HINT = re.compile(
    r"hint: 1 rank with \d+ threads? takes [\d,.]+ ms per step, and \d ranks with 1 thread each take [\d,.]+ ms "
    r"\(measured with this batch\); to use 1 rank, start with OMP_NUM_THREADS=\d+ mpirun -n 1 --bind-to none$",
    re.MULTILINE,
)


class Drift(nn.Module):
    """A layer whose output depends on earlier passes, through a buffer that it changes and one that it replaces.

    It uses its parameter in every second pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("passes", torch.zeros(()))
        self.factor = nn.Parameter(torch.ones(16))
        self.term = LossTerm("square", 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(), 0.1)
            self.passes = self.passes + 1.0
            x = x * self.factor if int(self.passes) % 2 else x
        return self.term(nn.functional.dropout(x, 0.3, self.training) + self.mean + 0.01 * self.passes, x.pow(2).mean())


def drifting(description):
    model = GPT(description.vocabulary, 1, 16, 2, dropout=0.2)
    model.blocks[0] = nn.Sequential(model.blocks[0], Drift())
    return model


@pytest.fixture
def always(monkeypatch):
    """Measure short runs, too, and show the hint even if one rank is slower."""
    monkeypatch.setattr(threads, "_SHORT", 0.0)
    monkeypatch.setattr(threads, "_MARGIN", 0.0)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("MPITRAIN_AGAIN", raising=False)


def hints(comm, folder):
    """Return the number of hints in the logs of a run."""
    comm.barrier()
    return sum(len(HINT.findall(path.read_text())) for path in (folder / "logs").iterdir())


def results(lines):
    exact = ("loss", "grad_norm", "loss of square", "held_out_loss")
    return [{name: line[name] for name in exact if name in line} for line in lines]


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("parallel", [{"zero": 0}, {"zero": 1}, {"zero": 1, "share_node": False}])
def test_a_measured_run_has_the_same_results_bit_by_bit(world, folder, text, always, monkeypatch, parallel):
    sections = {"data": {"path": text}, "model": MODEL, "parallel": parallel}
    measured = run(world, folder / "measured", train=TRAIN, **sections)
    assert hints(world, folder / "measured") == 1
    assert torch.get_num_threads() == 1
    monkeypatch.setattr(threads, "_SHORT", 60.0)
    plain = run(world, folder / "plain", train=TRAIN, **sections)
    assert hints(world, folder / "plain") == 0
    assert results(measured) == results(plain)
    assert {"loss", "grad_norm", "loss of square"} <= set(results(plain)[-1])


@pytest.mark.ranks(2)
def test_the_same_job_is_not_measured_again_when_it_resumes(world, folder, text, always):
    sections = {"data": {"path": text}, "model": MODEL}
    for steps in (10, 24):
        run(world, folder / "run", train=TRAIN | {"steps": steps}, **sections)
        assert hints(world, folder / "run") == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "more",
    [
        {"parallel": {"zero": 2}},
        {"parallel": {"zero": 3}},
        {"parallel": {"mode": "local"}},
        {"run": {"reproducible": True, "workers": 2}},
    ],
)
def test_jobs_that_cannot_have_fewer_ranks_are_not_measured(world, folder, text, always, more):
    more = {"run": {}} | more
    more["run"] = {**more["run"], "dir": str(folder / "run")}
    run(world, folder / "run", data={"path": text}, model={"width": 16, "sequence": 16}, train=TRAIN, **more)
    assert hints(world, folder / "run") == 0


@pytest.mark.ranks(2)
def test_a_model_that_refuses_the_larger_batch_is_trained_all_the_same(world, folder, text, always):
    model = MODEL | {"factory": f"{__name__}:of_fixed_size"}
    lines = run(world, folder / "run", data={"path": text}, model=model, train=TRAIN | {"batch": 8})
    assert len(lines) == TRAIN["steps"] and hints(world, folder / "run") == 0


class FixedSize(GPT):
    def forward(self, x, *more):
        assert len(x) <= 4
        return super().forward(x, *more)


def of_fixed_size(description):
    return FixedSize(description.vocabulary, 1, 16, 2)


@pytest.mark.ranks(1)
def test_own_training_steps_are_not_measured(world, folder):
    class Own(Trainer):
        def train_step(self, batch):
            return super().train_step(batch)

    def count(kind):
        return sum(isinstance(each, threads.CompareThreads) for each in kind({"run": {"dir": str(folder)}}).callbacks)

    assert (count(Trainer), count(Own)) == (1, 0)


def test_one_slow_or_fast_pass_does_not_decide(monkeypatch):
    engine, lasts, now = MagicMock(), iter([9.0, 2.0, 1.0, 3.0, 4.0]), [0.0]
    engine.module.modules.return_value = []
    engine.forward.side_effect = lambda x, y: now.__setitem__(0, now[0] + next(lasts))
    monkeypatch.setattr(threads, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    assert threads.time_passes(engine, [(None, None)], 20.0) == 3.0


def test_hint_says_what_was_measured_and_how_to_start():
    one, several = Comparison(1, 2, 1, 0.0532, 2, 0.0409), Comparison(3, 4, 2, 1.23, 8, 1.0)
    assert one.hint({}) == (
        "hint: 1 rank with 2 threads takes 40.9 ms per step, and 2 ranks with 1 thread each take 53.2 ms (measured "
        "with this batch); to use 1 rank, start with OMP_NUM_THREADS=2 mpirun -n 1 --bind-to none"
    )
    assert one.hint({"MPITRAIN_AGAIN": "N=2 jobs/local.sh"}).endswith(
        "; to use 1 rank, start with N=1 OMP_NUM_THREADS=2"
    )
    assert several.hint({}).startswith(
        "hint: 1 rank with 8 threads on each node takes 1,000.0 ms per step, and 4 ranks"
    )
    assert several.hint({}).endswith("start with OMP_NUM_THREADS=8 mpirun -n 3 --map-by ppr:1:node --bind-to none")
    assert several.hint({"SLURM_JOB_ID": "7"}).endswith("to use 1 rank, give each node 1 rank with --cpus-per-task=8")
    assert Comparison(1, 2, 1, 0.0419, 2, 0.0400).hint({}) == ""  # within the margin
    assert Comparison(1, 2, 1, 0.0300, 2, 0.0400).hint({}) == ""
