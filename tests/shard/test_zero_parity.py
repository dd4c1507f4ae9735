"""Parity of every ZeRO stage with training in one process."""

from __future__ import annotations

import dataclasses
import random
import time

import pytest
import torch
from shard.steps import OPTIMIZERS, engine_of, gpt, images, on_device, resnet, tokens, train_alone, train_steps
from support import config_of
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from mpitrain.checkpoint import Store
from mpitrain.comm.job.topology import Member, Topology
from mpitrain.errors import InputError
from mpitrain.layers.sync_batchnorm import SyncBatchNorm
from mpitrain.shard import update
from mpitrain.shard.optimizers import Lamb, Lars, Muon
from mpitrain.trainer.engine import Engine

PLACEMENTS = {
    "ddp": {"zero": 0},
    "zero1": {"zero": 1},
    "zero1-private": {"zero": 1, "share_node": False},
    "zero2": {"zero": 2},
    "zero2-private": {"zero": 2, "share_node": False},
    "zero3": {"zero": 3},
    "zero3-units": {"zero": 3, "share_node": False},
    "zero3-kept": {"zero": 3, "share_node": False, "reshard": False},
}


@pytest.fixture(scope="module")
def expected():
    """Return losses and parameters of one process, by optimizer."""
    return {
        name: train_alone(m := gpt(), m.loss, OPTIMIZERS[name](m.parameters()), tokens) for name in ("adamw", "sgd")
    }


@pytest.fixture(scope="module")
def four_steps():
    """Return losses and parameters of one process after four steps."""
    return train_alone(m := gpt(), m.loss, OPTIMIZERS["adamw"](m.parameters()), tokens, steps=4)


@pytest.fixture(scope="module")
def eight_steps():
    """Return losses and parameters of one process after eight steps, with the attention kernel that devices use."""
    with sdpa_kernel(SDPBackend.MATH):
        return train_alone(m := gpt(), m.loss, OPTIMIZERS["adamw"](m.parameters()), tokens, steps=8)


@pytest.fixture(scope="module")
def last_of_forty():
    """Return the loss of one process in its 40th step."""
    return train_alone(m := gpt(), m.loss, OPTIMIZERS["adamw"](m.parameters()), tokens, steps=40)[0][-1]


def check_parameters(engine, reference):
    state = engine.state_dict()
    for name, value in reference.items():
        torch.testing.assert_close(state[name].cpu(), value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "optimizer",
    [pytest.param("adamw", marks=pytest.mark.ranks(1, 3)), pytest.param("sgd", marks=pytest.mark.ranks(2))],
)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_ten_steps_are_those_of_one_process(world, expected, placement, optimizer):
    for microbatches in (1, 3):
        take_steps(world, expected[optimizer], optimizer, microbatches, **PLACEMENTS[placement])


@pytest.mark.ranks(8)
@pytest.mark.parametrize("placement", ["ddp", "zero2", "zero3-units"])
def test_many_ranks_with_few_samples_match_one_process(world, four_steps, placement):
    take_steps(world, four_steps, "adamw", 1, steps=4, **PLACEMENTS[placement])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("device", ["pretend"], indirect=True)
@pytest.mark.parametrize("offload", ["", "host"])
@pytest.mark.parametrize("placement", ["ddp", "zero1", "zero2", "zero3"])
def test_steps_on_a_device_match_the_cpu(world, eight_steps, placement, offload, device):
    """Compare losses and parameters, and check that the account lists the states on the host separately."""
    with sdpa_kernel(SDPBackend.MATH):
        options = PLACEMENTS[placement] | {"bucket_mb": 0.004, "offload": offload}
        engine = engine_of(gpt().to(device), world, "fused", **options)
        losses = train_steps(engine, world, on_device(device, tokens), steps=8, microbatches=2)
    assert losses == pytest.approx(eight_steps[0], rel=0, abs=2e-6)
    check_parameters(engine, eight_steps[1])
    account = engine.memory()
    states = [t for state in engine.optimizer.state.values() for t in state.values() if t.numel() > 1]
    assert {t.is_cpu for t in states} == {bool(offload)}
    assert (account.host >= account.states > 0) if offload else account.host == 0
    engine.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("device", ["pretend"], indirect=True)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_stage_3_parameters_on_the_host_train_as_on_the_device(world, precision, device, tmp_path):
    """Keep parameters on the host or in files, on all ranks and on one; they are updated there with any offload."""
    alone = world.split(world.rank)
    with sdpa_kernel(SDPBackend.MATH):
        for comm in (world, alone):
            losses = {}
            for number, offload in enumerate(("", "host", str(tmp_path / "parameters"))):
                options = {"zero": 3, "offload_parameters": offload, "offload": "host", "bucket_mb": 0.004}
                options |= {"offload": ""} if number == 2 else {}
                engine = engine_of(gpt().to(device), comm, "fused", precision=precision, **options)
                losses[number] = train_steps(engine, comm, on_device(device, tokens), steps=3, microbatches=2)
                account = engine.memory()
                first, last = engine.sharding.groups[0].layout.share(0, comm.rank)
                assert engine.sharding.parameters.local_view(0, first, last).is_cpu == bool(offload)
                assert not offload or account.host >= account.parameters + account.states > 0
                assert all(p.device == device for p in engine.module.parameters())
                engine.close()
            assert losses[1] == losses[0] and losses[2] == losses[0]
    alone.free()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("device", ["pretend"], indirect=True)
@pytest.mark.parametrize("placement", ["zero1", "zero3"])
def test_host_update_skips_and_continues_like_the_device_update(world, placement, device):
    """Train in 16 bits; a skipped update leaves no gradients behind for the next one."""
    losses = {}
    for offload in ("", "host"):
        engine = engine_of(gpt().to(device), world, "fused", precision="fp16", offload=offload, **PLACEMENTS[placement])
        engine.scale.value = 2.0**60  # the first steps overflow
        data, step_losses = on_device(device, tokens), []
        for step in range(4):
            engine.scale.value = 1024.0 if step % 2 else 2.0**60
            step_losses += train_steps(engine, world, data, first=step, steps=1)
        losses[offload] = step_losses
        engine.close()
    assert losses["host"] == pytest.approx(losses[""], rel=1e-3) and losses[""][-1] != losses[""][0]


def take_steps(world, reference, optimizer, microbatches, steps=10, **options):
    engine = engine_of(gpt(), world, optimizer, bucket_mb=0.004, **options)
    losses = train_steps(engine, world, tokens, steps=steps, microbatches=microbatches)
    assert losses == pytest.approx(reference[0], rel=1e-5)
    check_parameters(engine, reference[1])
    engine.close()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("placement", ["zero1", "zero2-private", "zero3", "zero3-units"])
def test_lamb_and_lars_match_one_process(world, placement):
    """Use shares that end in the middle of matrices, and clipped gradients."""
    for kind, options in ((Lamb, {"lr": 0.01}), (Lars, {"lr": 0.1, "trust_coefficient": 0.1, "weight_decay": 0.1})):
        whole, model = gpt(), gpt()
        single_process = train_alone(whole, whole.loss, kind(whole.parameters(), **options), tokens, steps=3)
        optimizer = kind(model.parameters(), **options)
        placed = config_of(bucket_mb=0.004, clip=0.5, **PLACEMENTS[placement])
        engine = Engine(model, model.loss, optimizer, world, placed)
        assert train_steps(engine, world, tokens, steps=3) == pytest.approx(single_process[0], rel=1e-5)
        check_parameters(engine, single_process[1])
        engine.close()
    model = gpt()
    with pytest.raises(InputError, match="lamb and lars add up squares in an order that depends"):
        Engine(model, model.loss, Lamb(model.parameters()), world, config_of(zero=1, reproducible=True))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("placement", ["zero1", "zero2", "zero3-units"])
def test_random_delays_do_not_change_results(world, expected, placement):
    chance = random.Random(world.rank)
    engine = engine_of(gpt(), world, bucket_mb=0.004, **PLACEMENTS[placement])
    reduction = engine.sharding.gradients.reduction
    scatter, publish = reduction.scatter, engine.sharding.parameters.publish

    def late(call):
        def delayed(*args, **kwargs):
            time.sleep(chance.choice([0, 0, 0.005]))
            return call(*args, **kwargs)

        return delayed

    reduction.scatter, engine.sharding.parameters.publish = late(scatter), late(publish)
    losses = train_steps(engine, world, tokens, microbatches=3, delay=late(lambda: None))
    assert losses == pytest.approx(expected["adamw"][0], rel=1e-5)
    check_parameters(engine, expected["adamw"][1])
    engine.close()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_overlapped_communication_does_not_change_results(world, four_steps, placement, monkeypatch):
    monkeypatch.setattr(world, "process", dataclasses.replace(world.process, spare_cores=1))
    comm = world.split(0)
    assert comm.overlaps
    engine = engine_of(gpt(), comm, bucket_mb=0.004, **PLACEMENTS[placement])
    losses = train_steps(engine, comm, tokens, steps=4, microbatches=3)
    assert losses == pytest.approx(four_steps[0], rel=1e-5)
    check_parameters(engine, four_steps[1])
    engine.close()
    comm.free()


class Branches(nn.Module):
    """Model of two layers; the second is used only by batches whose y is nonzero."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)

    def loss(self, output, used):
        return (self.second(output) if used.any() else output).square().mean()

    def forward(self, x):
        return self.first(x)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("reduce_dtype", [None, torch.float64])
@pytest.mark.parametrize("placement", ["ddp", "zero1", "zero2", "zero3", "zero3-units"])
def test_gradients_of_earlier_steps_are_cleared(world, placement, reduce_dtype):
    model, whole = Branches(), Branches()
    engine = engine_of(model, world, "sgd", clip=0.0, reduce_dtype=reduce_dtype, **PLACEMENTS[placement])
    plain = torch.optim.SGD(whole.parameters(), lr=0.1)
    engine.optimizer.param_groups[0]["momentum"] = 0.0
    samples = torch.randn(4, world.size, 2, 5, generator=torch.Generator().manual_seed(1))
    for step, ranks in enumerate((range(world.size), (), (0,), ())):  # the ranks that use the second layer
        used = [torch.full((2,), rank in ranks) for rank in range(world.size)]
        engine.forward_backward([[(samples[step, world.rank], used[world.rank])]], 2 * world.size)
        engine.step()
        plain.zero_grad()
        for rank in range(world.size):
            (whole.loss(whole(samples[step, rank]), used[rank]) / world.size).backward()
        plain.step()
        check_parameters(engine, dict(whole.named_parameters()))
    engine.close()


KINDS = {
    "Adam": {},
    "AdamW": {},
    "SGD": {"momentum": 0.9},
    "Adagrad": {"lr_decay": 0.1},
    "RMSprop": {},
    "Lamb": {},
    "Lars": {},
    "Muon": {},
}


class SometimesUsed:
    """Training of a never used layer and of one that some ranks use in some steps, compared with one process."""

    def __init__(self, world, kind):
        self.world, self.kind, self.step = world, kind, 0
        self.whole = self._branches()
        self.plain = self.optimizer(self.whole)

    @staticmethod
    def _branches():
        model = Branches()
        model.never = nn.Linear(5, 3)
        return model

    def optimizer(self, model):
        options = {"lr": 0.01, "weight_decay": 0.1} | KINDS[self.kind]
        parameters = [p for p in model.parameters() if self.kind != "Muon" or p.dim() == 2]
        kind = getattr(torch.optim, self.kind, None) if self.kind != "Muon" else Muon
        return (kind or {"Lamb": Lamb, "Lars": Lars}[self.kind])(parameters, **options)

    def engine(self, device=None, **settings):
        model = self._branches().to(device)
        if self.kind == "Muon":
            for p in model.parameters():
                p.requires_grad_(p.dim() == 2)
        return Engine(model, model.loss, self.optimizer(model), self.world, config_of(**settings))

    def train(self, engine, users, plain=True):
        """Take a step per entry of `users`, the ranks that use the second layer. plain: compare with one process."""
        size, device = self.world.size, engine.device
        for ranks in users:
            samples = torch.randn(size, 2, 5, generator=torch.Generator().manual_seed(self.step))
            used = [torch.full((2,), rank in ranks) for rank in range(size)]
            mine = samples[self.world.rank].to(device), used[self.world.rank].to(device)
            engine.forward_backward([[mine]], 2 * size)
            engine.step()
            self.step += 1
            if not plain:
                continue
            self.plain.zero_grad()
            for rank in range(size):
                (self.whole.loss(self.whole(samples[rank]), used[rank]) / size).backward()
            self.plain.step()
            check_parameters(engine, dict(self.whole.named_parameters()))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("placement", "kind"),
    [
        ("ddp", "AdamW"),
        ("zero1", "Adam"),
        ("zero1-private", "AdamW"),
        ("zero2-private", "SGD"),
        ("zero2", "Lamb"),
        ("zero2", "Lars"),
        ("zero1", "Muon"),
        ("zero3", "Adagrad"),
        ("zero3-units", "AdamW"),
        ("zero3-units", "RMSprop"),
    ],
)
def test_parameters_that_no_rank_used_are_not_updated(world, placement, kind):
    """Check that weight decay, states and the step count, by which Adam corrects its averages, leave it alone."""
    sometimes = SometimesUsed(world, kind)
    engine = sometimes.engine(**PLACEMENTS[placement])
    sometimes.train(engine, ((), (0,), (), (0,), range(world.size), (), (1,)))
    engine.close()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_missed_steps_of_a_parameter_survive_a_checkpoint_at_every_stage(world, folder, kind):
    sometimes = SometimesUsed(world, kind)
    names = ["zero1", "zero3-units", "ddp", "zero2", "zero1"]
    engine = sometimes.engine(**PLACEMENTS[names[0]])
    for number, name in enumerate(names[1:]):
        sometimes.train(engine, ((), (0,), ())[number:])
        with Store(folder / str(number), world, 3) as store:
            store.prepare(set_aside=False)
            saved = store.save(number, *engine.parts())
            engine.close()
            engine = sometimes.engine(**PLACEMENTS[name])
            manifest = store.load(saved, engine.parts_to_load)
            engine.finish_load(manifest)
        assert not any("never" in key for key in manifest.tensors if key.startswith("optimizer/"))
    sometimes.train(engine, ((0,), (), range(world.size)))
    counts = sorted({float(state["step"]) for state in engine.optimizer.state.values() if state})
    counts = sorted({count for of_rank in world.all_gather_object(counts) for count in of_rank})
    assert len(counts) == 2 and counts[-1] == sometimes.step
    engine.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("placement", "files"), [("zero1", False), ("zero2", True), ("zero3-units", False)])
def test_fp32_copies_of_parameters_that_missed_steps_match_stage_0(world, placement, files, folder):
    states = []
    for options in ({}, PLACEMENTS[placement] | ({"offload": str(folder / "states")} if files else {})):
        sometimes = SometimesUsed(world, "AdamW")
        engine = sometimes.engine(precision="bf16", **options)
        sometimes.train(engine, ((), (0,), (), (0,), (0, 1), ()), plain=False)
        states.append(engine.state_dict())
        engine.close()
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=0.0, atol=1e-4)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("offload", ["", "host", "files"])
def test_parameters_that_missed_steps_have_separate_counts_on_a_device(world, offload, device, folder):
    sometimes = SometimesUsed(world, "AdamW")
    engine = sometimes.engine(device, zero=2, offload=str(folder / "states") if offload == "files" else offload)
    sometimes.train(engine, ((), (0,), (), (0,), (0, 1)))
    engine.close()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("zero", [0, 1])
def test_an_optimizer_of_another_model_is_refused(world, zero):
    model = gpt()
    with pytest.raises(InputError, match="not the model's"):
        Engine(model, model.loss, torch.optim.SGD(gpt().parameters()), world, config_of(zero=zero))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("device", ["pretend"], indirect=True)
def test_reproducible_runs_on_devices_have_the_same_bits_at_any_number_of_ranks(world, device):
    single, states, losses = world.subgroup([world.rank]), [], []
    for comm in (single, world):
        engine = engine_of(gpt().to(device), comm, zero=1, reproducible=True, bucket_mb=0.004)
        losses.append(train_steps(engine, comm, on_device(device, tokens), steps=3, workers=8))
        states.append(engine.state_dict())
        engine.close()
    assert losses[0] == losses[1]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    single.free()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("placement", ["ddp", "zero1", "zero2", "zero3", "zero3-units"])
def test_reproducible_runs_have_the_same_bits_at_any_number_of_ranks(world, placement):
    options = {**PLACEMENTS[placement], "reproducible": True, "bucket_mb": 0.004}
    single = world.subgroup([world.rank])
    single_engine = engine_of(gpt(), single, **options)
    losses = train_steps(single_engine, single, tokens, steps=3, workers=8)
    engine = engine_of(gpt(), world, **options)
    assert train_steps(engine, world, tokens, steps=3, workers=8) == losses
    mine, theirs = engine.state_dict(), single_engine.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    engine.close()
    single_engine.close()
    single.free()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("placement", ["ddp", "zero3-units"])
def test_a_resnet_with_batch_statistics_of_all_ranks_trains_like_one_process(world, placement):
    model = resnet()
    single_losses, _ = train_alone(model, model.loss, torch.optim.SGD(model.parameters(), lr=0.02), images, steps=4)
    model = SyncBatchNorm.convert(resnet(), world)
    engine = engine_of(model, world, "sgd", **PLACEMENTS[placement])
    for settings in engine.optimizer.param_groups:
        settings.update(lr=0.02, momentum=0.0)
    assert train_steps(engine, world, images, steps=4) == pytest.approx(single_losses, rel=2e-5)
    engine.close()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_hybrid_sharding_matches_one_process(world, four_steps, zero, monkeypatch):
    topology = Topology(world.rank, (0, 0, 1, 1), world.world_ranks)
    for name, value in vars(Member(topology, world.label)).items():
        monkeypatch.setattr(world, name, value)
    engine = engine_of(gpt(), world, bucket_mb=0.004, zero=zero, shard_within="node", share_node=False)
    assert engine.sharding.shard.size == 2 and engine.sharding.replicas.size == 2
    losses = train_steps(engine, world, tokens, steps=4, microbatches=3)
    assert losses == pytest.approx(four_steps[0], rel=1e-5)
    check_parameters(engine, four_steps[1])
    engine.close()


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("placement", "precision"),
    [("ddp", "fp16"), ("zero1", "bf16"), ("zero2-private", "fp16"), ("zero3", "bf16"), ("zero3-units", "bf16")],
)
def test_sixteen_bit_training_with_fp32_copies_learns_like_fp32(world, last_of_forty, placement, precision):
    engine = engine_of(gpt(), world, precision=precision, bucket_mb=0.004, **PLACEMENTS[placement])
    assert all(p.dtype != torch.float32 for p in engine.module.parameters())
    losses = train_steps(engine, world, tokens, steps=40)
    assert losses[-1] < losses[0] - 0.3
    assert losses[-1] == pytest.approx(last_of_forty, rel=0.05)
    engine.close()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_all_ranks_skip_a_step_with_a_nonfinite_gradient(world, zero):
    engine = engine_of(gpt(), world, precision="fp16", zero=zero)
    before = engine.state_dict()
    scale = engine.scale.value
    x, y = tokens(0)
    weight = engine.module.blocks[0].mlp.up.weight
    hook = weight.register_hook(lambda grad: grad * (float("inf") if world.rank == world.size - 1 else 1.0))
    engine.forward_backward([[(x, y)]], len(x))
    hook.remove()
    assert engine.step().skipped
    assert engine.scale.value == scale / 2
    after = engine.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    engine.forward_backward([[(x, y)]], len(x))
    assert not engine.step().skipped
    engine.close()


@pytest.mark.ranks(2)
def test_an_optimizer_that_is_not_element_wise_is_refused_by_name(world):
    model = gpt()
    with pytest.raises(InputError, match="Adafactor cannot be sharded"):
        Engine(model, model.loss, torch.optim.Adafactor(model.parameters()), world, config_of(zero=1))
    engine = Engine(model, model.loss, torch.optim.Adafactor(model.parameters()), world, config_of())
    assert engine.sharding.zero == 0
    engine.close()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("placement", ["zero1", "zero2", "zero3", "zero3-units"])
def test_frozen_parameters_do_not_change(world, placement):
    def frozen():
        model = gpt()
        for p in model.blocks[0].parameters():
            p.requires_grad_(False)
        return model

    model = frozen()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    single_losses, parameters = train_alone(model, model.loss, OPTIMIZERS["adamw"](trained), tokens, steps=4)
    engine = engine_of(frozen(), world, bucket_mb=0.004, **PLACEMENTS[placement])
    assert train_steps(engine, world, tokens, steps=4) == pytest.approx(single_losses, rel=1e-5)
    check_parameters(engine, parameters)
    state = engine.state_dict()
    assert torch.equal(state["blocks.0.mlp.up.weight"], before["blocks.0.mlp.up.weight"])
    engine.close()


@pytest.mark.ranks(2)
def test_sharded_parameters_are_nan_between_passes(world):
    engine = engine_of(gpt(), world, zero=3, share_node=False)
    train_steps(engine, world, tokens, steps=1)
    weight = engine.module.blocks[0].mlp.up.weight
    assert weight.shape == (48, 12) and bool(weight.isnan().all())
    with engine.sharding.parameters.unshard_all():
        assert bool(engine.module.blocks[0].mlp.up.weight.isfinite().all())
    engine.close()


@pytest.mark.ranks(2, 3)
def test_ranks_of_a_node_read_each_other_s_shares_without_waiting(world, monkeypatch):
    if world.overlaps or world.num_nodes > 1:
        pytest.skip("parameters are gathered by messages, or in the background")
    step, last = update.optimizer_step, world.rank == world.size - 1
    monkeypatch.setattr(update, "optimizer_step", lambda optimizer: time.sleep(0.2 * last) or step(optimizer))
    engine = engine_of(gpt(), world, zero=3, share_node=False)
    read = []
    for number in range(2):
        train_steps(engine, world, tokens, first=number, steps=1)
        if world.rank == 0:  # alone, and the last rank updates late
            with engine.sharding.parameters.unshard_all():
                read.append({name: p.detach().clone() for name, p in engine.module.named_parameters()})
        parameters = engine.state_dict()
        for name, value in read[number].items() if world.rank == 0 else ():
            assert torch.equal(value, parameters[name]), name
    engine.close()


@pytest.mark.ranks(2, 3)
def test_gathered_parameters_are_copied_only_where_a_share_ends(world):
    if world.overlaps or world.num_nodes > 1:
        pytest.skip("parameters are gathered by messages, or in the background")
    engine = engine_of(gpt(), world, zero=3, share_node=False)
    parameters = engine.sharding.parameters
    with parameters.unshard_all():
        for unit in parameters._units:
            copied = [p for _, p, _ in unit.members if p.untyped_storage().data_ptr() not in parameters._addresses]
            assert len(copied) < world.size
    engine.close()
