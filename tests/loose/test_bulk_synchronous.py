"""parallel.mode server at staleness 0: the steps of an all-reduce over the workers, for any number of servers."""

from __future__ import annotations

import shutil

import h5py
import numpy as np
import pytest
from train.jobs import run

import mpitrain as mt
from mpitrain.checkpoint.manifest import read_manifest
from mpitrain.comm.memory import arena
from mpitrain.data.prepare import prepare
from mpitrain.errors import EXIT_REQUEUE
from mpitrain.monitor import read_metrics

GPT = {"layers": 2, "width": 32, "heads": 2, "sequence": 16, "dropout": 0.1}
TRAIN = {"steps": 8, "batch": 7, "microbatch": 2, "clip": 0.5, "evaluate_every": 4, "evaluate_samples": 13}
ALL = pytest.mark.ranks(1, 2, 3)


def settings(text, *, servers=0, **sections):
    """Return settings of training with a parameter server, or with an all-reduce if `servers` is None."""
    parallel = {} if servers is None else {"mode": "server", "servers": servers}
    defaults = {"data": {"path": text, "record_ids": True}, "model": GPT, "train": TRAIN, "parallel": parallel}
    defaults |= {
        "checkpoint": {"every": 0},
        "optim": {"warmup": 2, "schedule": "constant"},
        "comm": {"bucket_mb": 0.02},
    }
    return {name: defaults.get(name, {}) | sections.get(name, {}) for name in defaults | sections}


def assert_equal_metrics(lines, reference, tolerance=1e-5):
    """Check that two runs have the same metrics."""
    assert [m["step"] for m in lines] == [m["step"] for m in reference]
    assert [m["loss"] for m in lines] == pytest.approx([m["loss"] for m in reference], rel=tolerance)
    assert [m["grad_norm"] for m in lines] == pytest.approx([m["grad_norm"] for m in reference], rel=10 * tolerance)
    assert [m["lr"] for m in lines] == [m["lr"] for m in reference]
    assert [m.get("ids") for m in lines] == [m.get("ids") for m in reference]
    losses, expected = ([m["held_out_loss"] for m in metrics if "held_out_loss" in m] for metrics in (lines, reference))
    assert losses == pytest.approx(expected, rel=tolerance) and len(losses) == len(expected)


class AllReduce:
    """Reference runs in mode sync on the first ranks, each trained once, with which servers are compared."""

    def __init__(self, world, place):
        self._world, self._place, self._runs = world, place, {}

    def __call__(self, workers, sections):
        name = f"sync {workers} {sorted(sections.items())}".replace("/", "-")
        if name not in self._runs:
            some = self._world.subgroup(range(workers))
            folder = self._place / f"sync-{len(self._runs)}"
            if some is not None:
                run(some, folder, **sections)
                some.free()
            self._world.barrier()
            self._runs[name] = read_metrics(folder)
        return self._runs[name]


@pytest.fixture(scope="module")
def all_reduce(world, place):
    return AllReduce(world, place)


def numbers_of_servers(world):
    """Return the values of parallel.servers that leave at least one worker."""
    return {1: [0], 2: [0, 1], 3: [0, 1, 2]}[world.size]


@ALL
def test_bulk_synchronous_losses_equal_those_of_an_all_reduce(world, place, text, all_reduce):
    for servers in numbers_of_servers(world):
        lines = run(world, place / f"served-{servers}", **settings(text, servers=servers))
        workers = world.size - servers
        assert_equal_metrics(lines, all_reduce(workers, settings(text, servers=None)))
        assert "staleness_mean" not in lines[0] and lines[0]["between_nodes_bytes"] == 0
        assert any(m["grad_norm"] > 0.5 for m in lines)  # some were clipped
        assert all(len(m["ids"]) == 7 for m in lines)


@pytest.mark.ranks(3)
def test_ranks_without_shared_memory_reach_the_same_losses(world, place, text, all_reduce, monkeypatch):
    monkeypatch.setattr(arena, "_shared_window", lambda *_: None)
    for servers in (0, 1):
        lines = run(world, place / f"letters-{servers}", **settings(text, servers=servers))
        assert_equal_metrics(lines, all_reduce(world.size - servers, settings(text, servers=None)))
        shared = read_metrics(place / f"served-{servers}")  # the same sums in the same order
        assert [m["loss"] for m in lines] == [m["loss"] for m in shared]


MOMENTUM = {"optim": {"name": "sgd", "lr": 0.1, "options": {"momentum": 0.9}}}
CASES = {
    "bf16, momentum": ({"train": {"precision": "bf16"}, **MOMENTUM}, 5e-3),
    "bf16": ({"train": {"precision": "bf16"}}, 5e-3),
    "momentum": (MOMENTUM, 1e-5),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "case", [case if "," in case else pytest.param(case, marks=pytest.mark.campaign) for case in CASES]
)
def test_bf16_and_momentum_reach_the_losses_of_an_all_reduce(world, place, text, all_reduce, case):
    sections, tolerance = CASES[case]
    lines = run(world, place / case, **settings(text, **sections))
    assert_equal_metrics(lines, all_reduce(2, settings(text, servers=None, **sections)), tolerance)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("servers", [0, pytest.param(1, marks=pytest.mark.campaign)])
def test_a_resumed_run_is_bitwise_equal_to_an_uninterrupted_one(world, place, text, servers):
    class StopAt(mt.Callback):
        def on_update(self, trainer, step):
            if step.number >= 3 and trainer.world.rank == 1:
                trainer.request_stop("rank 1 has seen enough")

    sections = settings(text, servers=servers, checkpoint={"every": 6, "keep": 5})
    stopped, whole = place / f"stopped-{servers}", place / f"whole-{servers}"
    trainer = mt.Trainer(sections | {"run": {"dir": str(stopped)}}, [StopAt()], world=world)
    with trainer.working():
        assert trainer.train() == EXIT_REQUEUE
    assert 3 <= trainer.step < 6
    resumed = run(world, stopped, **sections)
    reference = run(world, whole, **sections)
    keys = ("step", "loss", "lr", "grad_norm", "ids")
    assert [[m[k] for k in keys] for m in resumed] == [[m[k] for k in keys] for m in reference]
    assert resumed[-1]["held_out_loss"] == reference[-1]["held_out_loss"]
    mine, theirs = (read_manifest(folder / "checkpoints/step-00000008") for folder in (stopped, whole))
    assert [extent.hashes for extent in mine.extents] == [extent.hashes for extent in theirs.extents] != []


@pytest.mark.ranks(3)
def test_checkpoints_can_be_read_in_the_other_mode(world, place, text, all_reduce):
    whole = all_reduce(3, settings(text, servers=None))
    modes = {"sync": None, "server": 0}
    for first, then in (("sync", "server"), ("server", "sync")):
        folder = place / f"{first}-{then}"
        run(world, folder, **settings(text, servers=modes[first], train={"steps": 4}, checkpoint={"every": 4}))
        assert_equal_metrics(run(world, folder, **settings(text, servers=modes[then], checkpoint={"every": 4})), whole)
    if world.rank == 0:
        tensors = []
        for name in ("sync-server", "server-sync"):
            with h5py.File(place / name / "checkpoints/step-00000008/model.h5") as file:
                tensors.append({key: np.asarray(file[key]) for key in file})
        assert tensors[0].keys() == tensors[1].keys() != set()
        for key, tensor in tensors[0].items():
            assert np.allclose(tensor, tensors[1][key], rtol=1e-3, atol=1e-5), key


@pytest.mark.ranks(3)
def test_all_workers_evaluate_with_the_saved_batch_statistics(world, folder):
    """Each worker normalizes its part of a batch; the model has the running statistics of the first worker."""
    if world.rank == 0:
        generator, y = np.random.default_rng(0), np.arange(90) % 3
        source = folder / "source"
        source.mkdir()
        np.save(source / "x.npy", (generator.random((90, 6)) + y[:, None] / 3).astype(np.float32))
        np.save(source / "y.npy", y)
        prepare([str(source)], folder / "points", held_out=0.3)
    world.barrier()
    sections = settings(str(folder / "points"), servers=1, checkpoint={"every": 4}, train={"microbatch": 0})
    sections["model"] = {"factory": "train.odd_models:normalized"}
    whole = run(world, folder / "whole", **sections)
    if world.rank == 0:
        shutil.copytree(folder / "whole", folder / "resumed")
        shutil.rmtree(folder / "resumed/checkpoints/step-00000008")
    world.barrier()
    resumed = run(world, folder / "resumed", **sections)
    keys = ("loss", "grad_norm", "held_out_loss")
    assert [[m.get(k) for k in keys] for m in resumed] == [[m.get(k) for k in keys] for m in whole]


@ALL
@pytest.mark.parametrize("letters", [False, True])
def test_parameters_that_no_worker_used_are_not_updated(world, place, text, letters, monkeypatch):
    """It is not decayed and its step is not counted, also after a checkpoint of the other mode."""
    if letters:
        monkeypatch.setattr(arena, "_shared_window", lambda *_: None)
    for servers in numbers_of_servers(world):
        workers, tensors = world.size - servers, []
        some = world.subgroup(range(workers))
        kinds = {"served": (servers, servers), "sync": (None, None), "mixed": (servers, None)}
        for kind, modes in list(kinds.items())[: 2 if letters else 3]:
            folder = place / f"unused-{kind}-{servers}-{letters}"
            for mode, steps in zip(modes, (5, 11), strict=True):
                sections = settings(text, servers=mode, train={"steps": steps, "batch": 3, "microbatch": 1})
                sections |= {"model": {"factory": "train.odd_models:sometimes"}, "checkpoint": {"every": 50}}
                sections["optim"] = {"lr": 0.02, "weight_decay": 0.3, "schedule": "constant", "no_decay": "nothing"}
                comm = world if mode is not None else some
                if comm is not None:
                    run(comm, folder, **sections)
                world.barrier()
            if world.rank == 0:
                with h5py.File(folder / "checkpoints/step-00000011/model.h5") as file:
                    tensors.append({key: np.asarray(file[key]) for key in file})
        if some is not None:
            some.free()
        for parameters in tensors[1:]:
            assert parameters.keys() == tensors[0].keys() != set()
            for key, tensor in parameters.items():
                assert np.allclose(tensor, tensors[0][key], rtol=1e-4, atol=1e-5), (servers, key)
