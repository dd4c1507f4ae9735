"""parallel.mode local computes what its papers say, with all other settings, also after a restart."""

from __future__ import annotations

import pytest
import torch
from loose.replicas import Replicas
from torch.nn.utils import parameters_to_vector

import mpitrain as mt
from mpitrain.comm.job.topology import Member, Topology
from mpitrain.config.parallel import ParallelSection
from mpitrain.errors import EXIT_DONE, EXIT_REQUEUE, InputError
from mpitrain.loose.averaging import OuterOptimizer
from mpitrain.monitor import read_metrics


def settings(text, folder, *, steps=8, batch=5, **sections):
    defaults = {
        "run": {"dir": str(folder)},
        "data": {"path": text},
        "model": {"layers": 2, "width": 16, "heads": 2, "sequence": 16},
        "train": {"steps": steps, "batch": batch, "evaluate_samples": 8, "clip": 0.7},
        "checkpoint": {"every": 0},
        "optim": {"name": "adamw", "lr": 0.01},
    }
    return {name: defaults.get(name, {}) | sections.get(name, {}) for name in defaults | sections}


def local(**keys):
    return {"mode": "local"} | keys


def fit(world, sections, *callbacks):
    """Train and return the trainer, the lines of its metrics and the exit code."""
    trainer = mt.Trainer(sections, callbacks, world=world)
    with trainer.working():
        code = trainer.train()
    world.barrier()
    lines = read_metrics(trainer.folder.path)
    world.barrier()
    return trainer, lines, code


def losses(lines):
    return [line["loss"] for line in lines]


@pytest.mark.ranks(2, 3)
def test_averaging_after_each_step_is_synchronous_training(world, folder, text):
    model = {"layers": 1, "width": 16, "heads": 2, "sequence": 16, "dropout": 0.2}
    plain, expected, _ = fit(world, settings(text, folder / "sync", model=model))
    parallel = local(local_steps=1)
    averaged, averaged_lines, _ = fit(world, settings(text, folder / "local", model=model, parallel=parallel))
    assert losses(averaged_lines) == pytest.approx(losses(expected), rel=1e-5)
    assert [m["grad_norm"] for m in averaged_lines] == pytest.approx([m["grad_norm"] for m in expected], rel=1e-4)
    assert averaged_lines[-1]["held_out_loss"] == pytest.approx(expected[-1]["held_out_loss"], rel=1e-5)
    reference, averaged_state = plain.engine.state_dict(), averaged.engine.state_dict()
    assert all(torch.allclose(reference[name], averaged_state[name], rtol=1e-4, atol=1e-5) for name in reference)


CASES = {
    "local SGD": ({"local_steps": 4}, {"name": "sgd", "lr": 0.1}),
    "AdamW, after synchronous steps": ({"local_steps": 3, "warm": 2}, {}),
    "DiLoCo": ({"local_steps": 2, "outer": "nesterov", "outer_lr": 0.4, "outer_momentum": 0.6}, {}),
    "one round late": ({"local_steps": 2, "overlap": True}, {}),
    "DiLoCo, one round late, a short last round": (
        {"local_steps": 3, "outer": "nesterov", "overlap": True, "warm": 1},
        {},
    ),
}


def check(world, sections, groups):
    """Train, check the losses against replicas in one process, and return the trainer and the replicas' parameters."""
    trainer, lines, _ = fit(world, sections)
    replicas = Replicas(sections, groups)
    shared = replicas.train()
    assert losses(lines) == pytest.approx(replicas.losses, rel=2e-5)
    return trainer, shared


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", CASES)
def test_averaged_groups_match_the_reference(world, folder, text, name):
    parallel, optim = CASES[name]
    trainer, shared = check(
        world, settings(text, folder / "r", parallel=local(**parallel), optim=optim), groups=world.size
    )
    parameters = parameters_to_vector(trainer.engine.module.parameters()).detach()
    assert torch.allclose(parameters, shared, rtol=1e-4, atol=2e-5)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_group_of_ranks_is_one_replica_at_every_zero_stage(world, folder, text, zero):
    parallel = local(local_steps=3, local_group=2, zero=zero, outer="nesterov", warm=1, overlap=zero == 2)
    check(world, settings(text, folder / "r", batch=9, parallel=parallel), groups=2)


@pytest.mark.campaign
@pytest.mark.ranks(4)
@pytest.mark.parametrize("cut", [{"pipeline": 2}, {"tensor": 2}, {"pipeline": 2, "zero": 1}], ids=str)
def test_a_divided_model_is_one_replica(world, folder, text, cut):
    parallel = local(local_steps=3, outer="nesterov", overlap=True, **cut)
    check(world, settings(text, folder / "r", batch=9, parallel=parallel), groups=2)


class StopAt(mt.Callback):
    def on_update(self, trainer, step):
        if step.number == 3:
            trainer.request_stop("enough for now")


class FailAt(mt.Callback):
    def on_update(self, trainer, step):
        if step.number == 5:
            raise ValueError("failed")


RESUMED = [
    {"local_steps": 2},
    {"local_steps": 2, "outer": "nesterov", "overlap": True, "local_compression": "topk", "zero": 1},
]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("parallel", RESUMED, ids=["averaged", "one round late, compressed"])
def test_a_stopped_or_failed_run_resumes_bitwise_equal(world, folder, text, parallel):
    more = {
        "parallel": local(**parallel),
        "train": {"steps": 8, "batch": 5, "evaluate_samples": 8, "evaluate_every": 2, "precision": "bf16"},
        "checkpoint": {"every": 2, "background": True},
    }
    _, whole, _ = fit(world, settings(text, folder / "whole", **more))
    _, _, code = fit(world, settings(text, folder / "r", **more), StopAt())
    assert code == EXIT_REQUEUE
    with pytest.raises(ValueError, match="failed"):
        fit(world, settings(text, folder / "r", **more), FailAt())
    _, lines, code = fit(world, settings(text, folder / "r", **more))
    assert code == EXIT_DONE and len(lines) == 8
    for key in ("loss", "held_out_loss", "grad_norm"):
        assert [line.get(key) for line in lines] == [line.get(key) for line in whole]


@pytest.mark.ranks(3)
def test_a_checkpoint_can_be_loaded_by_other_groups_and_in_mode_sync(world, folder, text):
    trained, _, _ = fit(
        world, settings(text, folder / "r", steps=4, parallel=local(local_steps=2, outer="nesterov", overlap=True))
    )
    trained_state = trained.engine.state_dict()
    for number, parallel in enumerate([{}, local(local_steps=2), local(local_steps=2, outer="nesterov")]):
        more = {"parallel": parallel, "checkpoint": {"resume": str(folder / "r")}}
        again = mt.Trainer(settings(text, folder / str(number), steps=6, **more), world=world)
        with again.working():
            assert again.train() == EXIT_DONE and again.met == 6
    alone = world.subgroup([0])
    if alone is not None:
        loaded = mt.Trainer(
            settings(text, folder / "alone", steps=4, checkpoint={"resume": str(folder / "r")}), world=alone
        )
        with loaded.working():
            loaded.train()
        loaded_state = loaded.engine.state_dict()
        assert all(torch.equal(trained_state[name], loaded_state[name]) for name in trained_state)
        alone.free()


@pytest.mark.ranks(2)
def test_compressed_differences_reach_similar_losses(world, folder, text):
    metrics = {}
    for kind in ("none", "fp16", "int8"):
        parallel = local(local_steps=2, local_compression=kind)
        metrics[kind] = fit(world, settings(text, folder / kind, parallel=parallel))[1]
    assert losses(metrics["fp16"]) == pytest.approx(losses(metrics["none"]), rel=1e-3) and losses(
        metrics["fp16"]
    ) != losses(metrics["none"])
    assert losses(metrics["int8"]) == pytest.approx(losses(metrics["none"]), rel=2e-2)
    sent = [[line.get("between_groups_bytes") for line in lines] for lines in metrics.values()]
    assert sent[0][0] is None and sent[0][1] == pytest.approx(2 * sent[1][1], rel=0.01)
    assert sent[0][1] == pytest.approx(256 / 260 * 4 * sent[2][1], rel=0.02)


@pytest.mark.ranks(2)
def test_unsupported_settings_of_groups_are_refused_in_one_line(world, folder, text):
    wrong = {
        "parallel.local_group": {"parallel": local(local_group=2)},
        "train.batch": {"parallel": local(), "train": {"batch": 1}},
        "overlap": {"parallel": local(local_steps=1, overlap=True)},
        "warm": {"parallel": local(warm=8)},
        "run.reproducible": {"parallel": local(), "run": {"reproducible": True}},
        "elastic.mode": {"parallel": local(), "elastic": {"mode": "shrink"}},
        "node": {"parallel": local(local_group="node")},
    }
    for word, more in wrong.items():
        with pytest.raises(InputError, match=word) as caught:
            mt.Trainer(settings(text, folder / "r", **more), world=world)
        assert "\n" not in str(caught.value) and caught.value.agreed


def test_outer_optimizer_is_bitwise_equal_to_torch():
    torch.manual_seed(0)
    theirs = torch.nn.Parameter(torch.randn(1000))
    anchor = theirs.detach().clone()
    sgd = torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=True)
    outer = OuterOptimizer(ParallelSection(mode="local", outer="nesterov"), [anchor])
    for _ in range(5):
        difference = torch.randn(1000)
        theirs.grad = -difference
        sgd.step()
        outer.step(0, anchor, difference)
        assert torch.equal(anchor, theirs.detach())


@pytest.mark.ranks(4)
def test_ranks_of_a_node_form_a_group_whatever_their_numbers(world, folder, text, monkeypatch):
    topology = Topology(world.rank, (0, 1, 0, 1), world.world_ranks)
    for name, value in vars(Member(topology, world.label)).items():
        monkeypatch.setattr(world, name, value)
    parallel = local(local_steps=3, local_group="node", zero=1, share_node=False)
    trainer, _ = check(world, settings(text, folder / "r", batch=9, parallel=parallel), groups=2)
    assert trainer.mesh.data.num_nodes == 1 and trainer.mesh.world.world_ranks == ((0, 2), (1, 3))[world.rank % 2]
    assert trainer.engine.meeting.num_nodes == 2 and "2 groups of 2" in trainer.strategy.describe()
