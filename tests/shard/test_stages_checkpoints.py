"""Checkpoints between ZeRO stages and numbers of ranks: training goes on without a difference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from shard.steps import engine_of, gpt, on_device, tokens, train_steps

from mpitrain.checkpoint import Store

PLACEMENTS = {
    "ddp": {"zero": 0},
    "zero1": {"zero": 1},
    "zero2": {"zero": 2},
    "zero3": {"zero": 3},
    "zero3-units": {"zero": 3, "share_node": False},
}


def save(engine, comm, folder):
    parts, values = engine.parts()
    with Store(folder, comm, 3) as store:
        store.prepare(set_aside=False)
        return store.save(3, parts, values)


def load(engine, comm, folder):
    with Store(folder.parent, comm, 3) as store:
        engine.finish_load(store.load(folder, engine.parts_to_load))


@pytest.mark.parametrize(
    "optimizer", [pytest.param("sgd", marks=pytest.mark.ranks(2)), pytest.param("adamw", marks=pytest.mark.ranks(3))]
)
def test_any_stage_resumes_from_any_other(world, folder, optimizer):
    """Resume at another stage on all ranks, and on a single rank."""
    alone = world.subgroup([world.rank])
    whole = engine_of(gpt(), world, optimizer, bucket_mb=0.004)
    expected = train_steps(whole, world, tokens, steps=6)
    whole.close()
    saved = {}
    for name, placement in PLACEMENTS.items():
        engine = engine_of(gpt(), world, optimizer, bucket_mb=0.004, **placement)
        train_steps(engine, world, tokens, steps=3)
        saved[name] = save(engine, world, folder / name)
        engine.close()
    names = list(PLACEMENTS)
    distances = (1,) if optimizer == "sgd" else (2, 3, 4)  # at two ranks some of the pairs, at three the others
    for source, target in [(name, names[(at + by) % len(names)]) for at, name in enumerate(names) for by in distances]:
        engine = engine_of(gpt(), world, optimizer, bucket_mb=0.007, **PLACEMENTS[target])
        load(engine, world, saved[source])
        assert train_steps(engine, world, tokens, first=3, steps=3) == pytest.approx(expected[3:], rel=1e-5), (
            source,
            target,
        )
        engine.close()
    for name in names:
        engine = engine_of(gpt(), alone, optimizer, **PLACEMENTS[name])
        load(engine, alone, saved[name])
        assert train_steps(engine, alone, tokens, first=3, steps=3) == pytest.approx(expected[3:], rel=1e-5), name
        engine.close()
    alone.free()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("placement", "precision"),
    [*((placement, "bf16") for placement in PLACEMENTS), ("ddp", "fp16"), ("zero3-units", "fp16")],
)
def test_sixteen_bit_training_resumes_bitwise(world, folder, placement, precision):
    engine = engine_of(gpt(), world, precision=precision, **PLACEMENTS[placement])
    train_steps(engine, world, tokens, steps=3)
    saved = save(engine, world, folder / "a")
    expected = train_steps(engine, world, tokens, first=3, steps=3)
    state = engine.state_dict()
    engine.close()
    engine = engine_of(gpt(), world, precision=precision, **PLACEMENTS[placement])
    load(engine, world, saved)
    assert train_steps(engine, world, tokens, first=3, steps=3) == expected
    again = engine.state_dict()
    assert all(torch.equal(state[name], again[name]) for name in state)
    engine.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("device", ["pretend"], indirect=True)
def test_training_on_a_device_resumes_bitwise_and_on_the_cpu(world, folder, device, monkeypatch):
    monkeypatch.setattr("mpitrain.checkpoint.device_memory._BUFFER", 4096)  # so that tensors come in several pieces
    cases = (
        ("bf16", {"zero": 0}, device, {"zero": 0}, device),
        ("fp32", {"zero": 3}, device, {"zero": 3}, device),
        ("bf16", {"zero": 2, "offload": "host"}, device, {"zero": 2, "offload": "host"}, device),
        ("bf16", {"zero": 1}, device, {"zero": 3}, torch.device("cpu")),
        ("fp32", {"zero": 3}, torch.device("cpu"), {"zero": 1, "offload": "host"}, device),
        ("fp32", {"zero": 3, "offload_parameters": "host"}, device, {"zero": 2}, device),
    )
    for number, (precision, source, there, target, here) in enumerate(cases):
        engine = engine_of(gpt().to(there), world, "fused", precision=precision, bucket_mb=0.004, **source)
        train_steps(engine, world, on_device(there, tokens), steps=2)
        saved = save(engine, world, folder / f"{number}")
        expected = train_steps(engine, world, on_device(there, tokens), first=2, steps=3)
        engine.close()
        engine = engine_of(gpt().to(here), world, "fused", precision=precision, bucket_mb=0.004, **target)
        load(engine, world, saved)
        losses = train_steps(engine, world, on_device(here, tokens), first=2, steps=3)
        engine.close()
        near = 1e-2 if precision == "bf16" else 2e-6
        assert losses == (expected if (source, there) == (target, here) else pytest.approx(expected, rel=0, abs=near))


@pytest.mark.ranks(2)
def test_a_checkpoint_resumes_in_another_precision(world, folder):
    for source, target, rel in (("fp32", "bf16", 0.02), ("bf16", "fp32", 0.02), ("fp16", "bf16", 0.02)):
        engine = engine_of(gpt(), world, precision=source, zero=1)
        train_steps(engine, world, tokens, steps=3)
        saved = save(engine, world, folder / source / target)
        copies = {n: p.float() for n, p in engine.state_dict().items()}
        expected = train_steps(engine, world, tokens, first=3, steps=3)
        engine.close()
        engine = engine_of(gpt(), world, precision=target, zero=2)
        load(engine, world, saved)
        for name, value in engine.state_dict().items():
            torch.testing.assert_close(value.float(), copies[name], rtol=0.01, atol=1e-3)
        assert train_steps(engine, world, tokens, first=3, steps=3) == pytest.approx(expected, rel=rel)
        engine.close()


@pytest.mark.ranks(3)
def test_states_in_mapped_files_give_the_same_bits(world, folder):
    for placement in ({"zero": 0}, {"zero": 2}, {"zero": 3, "offload_parameters": str(folder / "parameters")}):
        for precision in ("fp32", "bf16"):
            plain = engine_of(gpt(), world, precision=precision, **placement)
            expected = train_steps(plain, world, tokens, steps=3)
            plain.close()
            engine = engine_of(gpt(), world, precision=precision, offload=str(folder / "states"), **placement)
            assert train_steps(engine, world, tokens, steps=3) == expected
            moments = [t for state in engine.optimizer.state.values() for t in state.values() if t.numel() > 1]
            mapped = Path("/proc/self/maps").read_text()
            assert moments and str(folder / "states") in mapped
            assert not list((folder / "states").iterdir())  # nothing to be left behind
            engine.close()
