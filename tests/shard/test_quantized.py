"""Training with gradients and parameters sent as blocks of integers, beside training without compression."""

from __future__ import annotations

import pytest
import torch
from comm.test_block_compression import half_scales, on_two_nodes
from comm.test_compression import is_same_on_all_ranks
from shard.steps import engine_of, gpt, tokens, train_steps

from mpitrain.comm.compression import Int8
from mpitrain.errors import InputError
from mpitrain.trainer.recording.records import data_bytes

BOTH = {"compression": "int8", "parameter_compression": "int8", "bucket_mb": 0.004}
PLACEMENTS = {
    "ddp": {"zero": 0, "compression": "int8", "bucket_mb": 0.004},
    "ddp-int4": {"zero": 0, "compression": "int4", "bucket_mb": 0.004},
    "zero1": {"zero": 1, "share_node": False, **BOTH},
    "zero2-node": {"zero": 2, "compression": "int4", "bucket_mb": 0.004},
    "zero3": {"zero": 3, "share_node": False, **BOTH},
}
ON_NODES = {
    "ddp": {"zero": 0, "compression": "int8", "bucket_mb": 0.004},
    "zero1": {"zero": 1, **BOTH},
    "zero3": {"zero": 3, **BOTH, "compression": "int4"},
    "zero2-within": {"zero": 2, "shard_within": "node", **BOTH},
}


@pytest.fixture(scope="module")
def losses_without(world):
    """Return the losses of 30 steps without compression."""
    engine = engine_of(gpt(), world, "sgd", clip=1e9, zero=0)
    losses = train_steps(engine, world, tokens, steps=30)
    engine.close()
    return losses


def check_training(comm, settings, expected) -> None:
    """Train, and check losses, that all ranks compute with the same parameters, and that owners keep exact ones."""
    engine = engine_of(gpt(), comm, "sgd", clip=1e9, **settings)
    losses = train_steps(engine, comm, tokens, steps=30, microbatches=2)
    within = 0.15 if settings["compression"] == "int4" else 0.1 if "parameter_compression" in settings else 0.04
    assert losses == pytest.approx(expected, rel=within) and losses != expected
    rounded = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    exact = engine.state_dict()
    for name, value in exact.items():
        assert is_same_on_all_ranks(comm, value)
        if "parameter_compression" in settings and not engine.sharding.parameters.gathers:
            now = engine.module.get_parameter(name)
            assert name not in rounded or torch.equal(now, rounded[name])  # `state_dict` changes nothing
            assert is_same_on_all_ranks(comm, now.detach())
            assert (now - value).abs().max() <= max(v.abs().max() for v in exact.values()) / 127
    if "parameter_compression" in settings and settings.get("shard_within") != "node":
        assert any(not torch.equal(exact[name], value) for name, value in rounded.items())
    engine.close()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_losses_follow_those_without_compression(world, losses_without, placement):
    check_training(world, PLACEMENTS[placement], losses_without)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("placement", ON_NODES)
def test_losses_on_two_nodes_follow_those_without_compression(world, losses_without, monkeypatch, placement):
    comm = on_two_nodes(world, monkeypatch)
    check_training(comm, ON_NODES[placement], losses_without)
    comm.free()


@pytest.mark.ranks(2)
def test_a_wrong_scale_changes_the_losses(world, losses_without, monkeypatch):
    monkeypatch.setattr(Int8, "most", 100)  # for the bound of the gathered values
    x = torch.linspace(-1, 1, 256)
    out = torch.empty(512)
    world.all_gather(out, x, compression=Int8())
    assert ((out[:256] - x).abs() <= half_scales(Int8, x) + 1e-6).all()
    monkeypatch.setattr(Int8, "_read_integers", lambda self, values, codes: values.copy_(codes).mul_(1.3))
    with pytest.raises(AssertionError):
        check_training(world, PLACEMENTS["ddp"], losses_without)


def check_bytes(comm, settings):
    engine = engine_of(gpt(), comm, "sgd", **settings)
    train_steps(engine, comm, tokens, steps=1)
    comm.journal.start()
    train_steps(engine, comm, tokens, first=1, steps=2)
    rows = [r for r in comm.journal.account() if r.operation in ("all_reduce", "reduce_scatter", "all_gather")]
    comm.journal.stop()
    sent = torch.tensor([float(sum(r.inside + r.between for r in rows))])
    comm.all_reduce(sent, "avg")
    assert float(sent) / 2 == pytest.approx(data_bytes(engine.sharding, 1), rel=0.01, abs=700)
    engine.close()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_bytes_of_a_step_follow_the_formula(world, placement):
    check_bytes(world, PLACEMENTS[placement])


@pytest.mark.ranks(4)
@pytest.mark.parametrize("placement", ON_NODES)
def test_bytes_of_a_step_on_two_nodes_follow_the_formula(world, monkeypatch, placement):
    comm = on_two_nodes(world, monkeypatch)
    check_bytes(comm, ON_NODES[placement])
    comm.free()


@pytest.mark.ranks(2)
def test_impossible_settings_are_refused(world):
    for settings, message in (
        ({"zero": 0}, "with parallel.zero 0 every rank updates all of them; set parallel.zero to 1, 2 or 3"),
        ({"zero": 1, "reproducible": True}, "run.reproducible excludes; set comm.parameter_compression to none"),
    ):
        with pytest.raises(InputError, match=message):
            engine_of(gpt(), world, parameter_compression="int8", **settings)
