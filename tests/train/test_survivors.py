"""Copies of the ranks' state: on which rank each lies, when they suffice, and that they are complete."""

from __future__ import annotations

import copy

import pytest
import torch
from support import config_of, one_line
from torch import nn

import mpitrain as mt
from mpitrain.checkpoint import Store
from mpitrain.checkpoint.contents import damaged_places
from mpitrain.comm.faults.ulfm import Loss, partners
from mpitrain.config.settings import Config
from mpitrain.layout.mesh import whole_groups_first
from mpitrain.trainer.elastic import Copies, Key, PeriodicCopies, Survivors, data_ranks, newest_complete
from mpitrain.trainer.engine import Engine

LAYOUTS = {
    "one node": [0, 0, 0, 0],
    "three nodes": [0, 0, 1, 1, 2, 2],
    "in turn": [0, 1, 2, 0, 1, 2],
    "unequal": [0, 1, 1, 2, 2],
    "a large node": [0, 1, 1, 1, 2],
    "two ranks": [0, 0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copy_lies_with_another_rank_and_on_another_node_where_that_can_be(layout):
    nodes = LAYOUTS[layout]
    partner_ranks = partners(nodes)
    assert sorted(partner_ranks) == list(range(len(nodes)))
    assert all(rank != partner for rank, partner in enumerate(partner_ranks))
    largest = max(nodes.count(node) for node in nodes)
    if 2 * largest <= len(nodes):
        assert all(nodes[rank] != nodes[partner] for rank, partner in enumerate(partner_ranks))


def test_a_set_is_whole_only_when_every_owners_copy_is_there():
    old, new, fewer = Key(7, 4, 0), Key(8, 4, 0), Key(7, 3, 1)
    before = [(old, rank) for rank in range(4)]
    assert newest_complete(before) == old
    assert newest_complete([*before, (new, 0), (new, 1), (new, 3)]) == old
    assert newest_complete([*before, *((new, rank) for rank in range(4))]) == new
    assert newest_complete([*before, *((fewer, rank) for rank in range(3))]) == fewer
    again = Key(7, 4, 1)  # as many ranks as before, because one took part that had waited
    assert newest_complete([*before[:2], *((again, rank) for rank in (2, 3))]) is None
    assert newest_complete([(old, 0), (old, 0), (old, 2), (old, 3)]) is None
    assert newest_complete([]) is None


def _config(**sections):
    return Config.from_dict({"train": {"batch": 24}} | sections)


def test_the_largest_layout_that_fits_keeps_pipeline_tensor_groups_and_what_the_batch_asks_for():
    mesh = _config(parallel={"pipeline": 2, "tensor": 2})
    assert [data_ranks(mesh, ranks, even=False) for ranks in (9, 8, 7, 4, 3)] == [2, 2, 1, 1, 0]
    reproducible = _config(run={"reproducible": True, "workers": 8})
    assert [data_ranks(reproducible, ranks, even=False) for ranks in (8, 7, 3, 1)] == [8, 4, 2, 1]
    odd = _config(train={"batch": 10, "microbatch": 2})
    assert [data_ranks(odd, ranks, even=True) for ranks in (6, 5, 4, 3)] == [6, 5, 3, 3]  # as batch norms need it
    assert data_ranks(odd, 4, even=False) == 4


def test_tensor_groups_stay_inside_their_nodes_where_ranks_were_lost():
    assert whole_groups_first([0, 1, 1, 2, 2, 2], 2) == [1, 2, 3, 4, 0, 5]
    assert whole_groups_first([0, 0, 1, 1], 2) == [0, 1, 2, 3]
    assert whole_groups_first([0, 1, 1], 1) == [0, 1, 2]


def test_of_two_parts_that_were_cut_apart_only_one_goes_on():
    assert Loss(lost=(2, 3), left=(0, 1, 4, 5), partitioned=(2, 3)).is_main_part
    assert not Loss(lost=(0, 1, 4, 5), left=(2, 3), partitioned=(0, 1, 4, 5)).is_main_part
    assert Loss(lost=(2, 3), left=(0, 1), partitioned=(2, 3)).is_main_part
    assert not Loss(lost=(0, 1), left=(2, 3), partitioned=(0, 1)).is_main_part
    assert Loss(lost=(0, 1, 2), left=(3,), partitioned=()).is_main_part  # dead for certain


def test_shrinking_is_refused_at_start_where_ranks_cannot_die_alone(tmp_path, forked):
    message = one_line(forked.run("train", "--elastic.mode", "shrink", "--run.dir", tmp_path / "r", cwd=tmp_path))
    assert "--with-ft ulfm" in message or "Open MPI 5" in message


def _engine(comm, zero, device="cpu"):
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(5, 33), nn.Tanh(), nn.BatchNorm1d(33), nn.Linear(33, 3)).to(device)
    module[3].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    return Engine(module, nn.functional.mse_loss, optimizer, comm, config_of(zero=zero))


def _step(engine, number, device="cpu"):
    """Train a step on samples that are equal on all ranks, so that it does not depend on the number of ranks."""
    torch.manual_seed(number)
    x, y = torch.randn(8, 5).to(device), torch.randn(8, 3).to(device)
    engine.forward_backward([[(x, y)]], 8 * engine.comm.size)
    engine.step()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("lost", ["first", "last"])
def test_the_ranks_that_are_left_hold_all_of_the_state(world, zero, lost, device):
    victim = 0 if lost == "first" else world.size - 1
    engine, copies = _engine(world, zero, device), Copies()
    for number in range(3):
        copies.take(world, engine, number, {"position": 10 * number})
        _step(engine, number, device)
    copies.take(world, engine, 3, {"position": 30})
    expected = {name: value.cpu().clone() for name, value in engine.state_dict().items()}
    _step(engine, 99, device)  # what nobody has a copy of
    survivors = world.split(None if world.rank == victim else 0, world.rank)
    if survivors is not None:
        after = _engine(survivors, zero, device)
        manifest = copies.restore(survivors, after)
        assert manifest is not None and (manifest.step, manifest.values["position"]) == (3, 30)
        state = after.state_dict()
        assert all(torch.equal(state[name].cpu(), value) for name, value in expected.items())
        states = [s for s in after.optimizer.state.values() if s]
        assert states and all(float(s["step"]) == 3 for s in states)
        copies.take(survivors, after, 3, {"position": 30})
        again = _engine(survivors, zero, device)
        manifest = copies.restore(survivors, again)
        assert manifest is not None and manifest.values["data_ranks"] == survivors.size
        assert all(p.device.type == device.type for p in again.module.parameters())
        assert all(torch.equal(state[name].cpu(), value.cpu()) for name, value in again.state_dict().items())
    world.barrier()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("zero", [0, 1])
def test_a_rank_lost_with_its_partner_leaves_a_whole_state_only_where_each_rank_has_all_of_it(world, zero):
    engine, copies = _engine(world, zero), Copies()
    copies.take(world, engine, 1, {"position": 10})
    _step(engine, 1)
    expected = copy.deepcopy(engine.state_dict())
    lost_ranks = {1, partners(world.nodes)[1]}
    survivors = world.split(None if world.rank in lost_ranks else 0, world.rank)
    if survivors is not None:
        assert copies.restore(survivors, _engine(survivors, zero)) is None
        assert copies.parts(survivors) is None
        if zero == 0:
            copies.take_full(engine, Key(2, world.size, 0), {"position": 20}, world.rank, columns=1)
            after = _engine(survivors, zero)
            manifest = copies.restore(survivors, after)
            assert manifest is not None and (manifest.step, manifest.values["position"]) == (2, 20)
            state = after.state_dict()
            assert all(torch.equal(state[name], value) for name, value in expected.items())
            assert all(float(s["step"]) == 1 for s in after.optimizer.state.values() if s)
            copies._full_copy = copies._full_copy._replace(crc=survivors.rank)  # what should be the same is not
            assert copies.restore(survivors, _engine(survivors, zero)) is None
    world.barrier()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("zero", [0, 3])
def test_a_copy_becomes_a_checkpoint_like_any_other(world, folder, zero):
    engine, copies = _engine(world, zero), Copies()
    _step(engine, 1)
    copies.take(world, engine, 1, {"position": 10, "data": "same"})
    expected = copy.deepcopy(engine.state_dict())
    survivors = world.split(None if world.rank == 0 else 0, world.rank)
    if survivors is not None:
        step, parts, values = copies.parts(survivors)
        with Store(folder / "c", survivors, keep=1) as store:
            store.prepare(set_aside=False)
            path = store.save(step, parts, values)
            after = _engine(survivors, zero)
            manifest = store.load(path, after.parts_to_load)
        after.finish_load(manifest)
        assert (manifest.step, manifest.values["position"], manifest.values["data"]) == (1, 10, "same")
        state = after.state_dict()
        assert all(torch.equal(state[name], value) for name, value in expected.items())
        assert all(float(s["step"]) == 1 for s in after.optimizer.state.values() if s)
        assert len(manifest.extents) == len({extent.piece for extent in manifest.extents})  # each piece once
        if survivors.rank == 0:
            assert not any(damaged_places(path))
    world.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("every", "steps"), [(1, [0, 1, 2, 3, 4, 5, 6]), (3, [0, 3, 6])])
def test_the_state_is_copied_at_the_start_and_after_each_copy_every_steps(
    world, folder, text, monkeypatch, every, steps
):
    taken_steps, take = [], Copies.take
    monkeypatch.setattr(Copies, "take", lambda copies, *args: (taken_steps.append(args[2]), take(copies, *args)))
    sections = {
        "run": {"dir": str(folder / "r")},
        "data": {"path": text},
        "model": {"layers": 1, "width": 16, "heads": 2, "sequence": 16},
        "train": {"steps": 7, "batch": 4, "evaluate_samples": 2},
        "elastic": {"copy_every": every},
    }
    trainer = mt.Trainer(sections, world=world)
    survivors = Survivors(trainer)
    trainer.callbacks += [survivors, PeriodicCopies(survivors)]
    with trainer.working():
        assert trainer.train() == 0
    assert taken_steps == steps
    manifest = survivors.restore(trainer)
    assert manifest is not None and manifest.step == 6
