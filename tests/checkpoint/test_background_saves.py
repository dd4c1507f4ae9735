"""Saves in a background thread: the state at the call is saved, and every rank learns of errors."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest
import torch
from checkpoint_states import empty, in_shares, in_slices, same, small_tensors
from support import one_line

from mpitrain.checkpoint import Store
from mpitrain.errors import MpitrainError


@pytest.fixture
def store(world, folder):
    empty_store = Store(folder / "c", world, keep=2)
    empty_store.prepare(set_aside=False)
    return empty_store


def _check(store):
    """Raise a background save's error on every rank if any rank had one, as a trainer does at each step."""
    failing = torch.tensor([int(store.failing)])
    store.comm.all_reduce(failing, "max")
    if failing:
        store.finish()


@pytest.mark.ranks(1, 2, 3)
def test_a_background_save_stores_the_state_at_its_call(world, store, device):
    tensors = small_tensors()
    parts = [replace(part, data=part.data.to(device)) for part in in_shares(tensors, world.rank, world.size)]
    with store:
        for step in (1, 2, 3):
            for each in parts:
                each.data.copy_(each.data + 1 if each.data.dtype != torch.bool else each.data)
            originals = [p.data.clone() for p in parts]
            store.save(step, parts, {"position": step}, background=True)
            for each in parts:
                each.data.zero_()
            numbers = torch.full((4,), world.rank + 1.0)
            world.all_reduce(numbers)  # the training goes on
            assert numbers[0] == world.size * (world.size + 1) / 2
            for each, data in zip(parts, originals, strict=True):
                each.data.copy_(data)
    parts = [replace(part, data=part.data.cpu()) for part in parts]
    filled = empty(parts)
    assert store.load(store.newest_first()[0], lambda manifest: filled).values == {"position": 3}
    assert same(filled, parts)
    assert [p.name for p in store.newest_first()] == ["step-00000003", "step-00000002"]


@pytest.mark.ranks(1, 2)
def test_an_error_in_the_background_is_raised_on_all_ranks_by_the_next_check(world, store, monkeypatch):
    parts = in_slices(small_tensors(), world.rank, world.size)
    store.save(1, parts, {})
    if world.rank == world.size - 1:

        def full(*args):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("mpitrain.checkpoint.commit.write_parts", full)
    store.save(2, parts, {}, background=True)
    with pytest.raises(MpitrainError, match="step-00000002 could not be saved: the disk is full") as caught:
        for _ in range(3000):  # 30 s
            _check(store)
            time.sleep(0.01)
    assert caught.value.agreed
    monkeypatch.undo()
    _check(store)
    store.save(3, parts, {}, background=True)  # and the next one can be whole
    store.finish()
    world.barrier()
    assert sorted(os.listdir(store.root)) == ["latest", "step-00000001", "step-00000003"]


@pytest.mark.ranks(2)
def test_the_next_save_waits_for_the_last_and_raises_its_error(world, store, monkeypatch):
    parts = in_slices(small_tensors(), world.rank, world.size)
    if world.rank == 1:

        def slow(*args):
            time.sleep(0.2)
            raise OSError(5, "Input/output error")

        monkeypatch.setattr("mpitrain.checkpoint.commit.write_parts", slow)
    store.save(1, parts, {}, background=True)
    with pytest.raises(MpitrainError, match="step-00000001 could not be saved: Input/output error"):
        store.save(2, parts, {}, background=True)
    monkeypatch.undo()
    world.barrier()
    assert os.listdir(store.root) == []


@pytest.mark.ranks(2)
def test_training_collectives_work_during_a_background_save(world, store):
    parts = in_slices({"model/x": torch.arange(3_000_000.0)}, world.rank, world.size)
    numbers = torch.ones(1000)
    with store:
        for step in range(1, 6):
            store.save(step, parts, {}, background=True)
            for _ in range(50):
                world.all_reduce(numbers, "avg")
                _check(store)
    assert bool((numbers == 1).all())
    filled = empty(parts)
    store.load(store.newest_first()[0], lambda manifest: filled)
    assert same(filled, parts)


def test_background_saves_require_an_mpi_with_threads(tmp_path, forked):
    code = (
        "import pathlib, mpitrain\n"
        "from mpitrain.checkpoint import Store\n"
        "store = Store(pathlib.Path('saves'), mpitrain.init(), 2)\n"
        "store.prepare(set_aside=False)\n"
        "store.save(1, [], {}, background=True)\n"
    )
    ended = forked.run("-c", code, cwd=tmp_path, MPI4PY_RC_THREAD_LEVEL="funneled")
    one_line(ended, "THREAD_MULTIPLE", "checkpoint.background = false")
