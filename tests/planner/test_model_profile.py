"""The planner's profile of blocks, compared with the blocks themselves."""

import numpy as np
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from mpitrain.config.settings import Config
from mpitrain.data import Description
from mpitrain.errors import InputError
from mpitrain.layout.boxes import is_replicated
from mpitrain.parallel.costs import REPLICAS, AxisExchange, Divided
from mpitrain.parallel.layouts import ParallelLayout
from mpitrain.parallel.places import Nodes
from mpitrain.planner import measured
from mpitrain.planner.candidates import candidates
from mpitrain.planner.machine import MachineProfile
from mpitrain.planner.measured import MeasurementError, Workers, time_blocks
from mpitrain.planner.predictor import Predictor
from mpitrain.planner.profile import profile_of
from mpitrain.planner.subject import StandIn, Subject
from mpitrain.tensor import parallelize, plan_for
from mpitrain.trainer.memory import ActivationMeter

INT, FLOAT = np.dtype("int64"), np.dtype("float32")
TOKENS = Description("tokens", "train", 1000, (32,), INT, (32,), INT, 256, None, "x")
IMAGES = Description("arrays", "train", 1000, (8, 8), FLOAT, (), INT, None, tuple("0123456789"), "x")
GPT = {"name": "gpt", "layers": 3, "width": 64, "heads": 4, "sequence": 32}
BYTES = 4 * 4 * 32 * 64  # of the activations of four samples


def config(model, **train):
    return Config.from_dict({"model": model, "train": train})


@pytest.mark.parametrize(
    ("model", "description", "precision"),
    [
        (GPT, TOKENS, "fp32"),
        ({**GPT, "dropout": 0.1}, TOKENS, "bf16"),
        ({"name": "resnet", "layers": 18, "width": 8}, IMAGES, "fp32"),
        ({"name": "mlp", "width": 16}, IMAGES, "fp32"),
        ({"factory": "planner.planned_models:sequential"}, IMAGES, "fp32"),
        ({"factory": "planner.planned_models:unlisted", "options": {"reads_values": True}}, IMAGES, "fp32"),
    ],
)
def test_saved_bytes_equal_the_activation_meter(model, description, precision):
    settings = config(model, precision=precision)
    profile = profile_of(settings, description, measure=False)
    for samples in (2, 7):
        cut = Subject(settings, description, real=True).cut(Divided(), fake=False)
        meter = ActivationMeter(cut.module)
        x, y = cut.samples(samples)
        with cut.autocast(), saved_tensors_hooks(meter.add, lambda kept: kept):
            cut.loss(cut.module(x), y)
        assert sum(block.saved_bytes for block in profile.blocks(samples)) == meter.nbytes


@pytest.mark.parametrize("divided", [Divided(tensor=2), Divided(tensor=4, sequence=True)])
def test_a_simulated_division_has_the_real_parameters(divided):
    settings = config(GPT)
    model = Subject(settings, TOKENS, real=True).module
    parallelize(model, StandIn(divided.tensor, times=True), plan_for(model), sequence=divided.sequence)
    blocks = profile_of(settings, TOKENS, measure=False).blocks(2, divided)
    weights = {w.name: w for block in blocks for w in block.weights if not w.same_as}
    real = dict(model.named_parameters())
    assert {name: (w.numel, w.replicated) for name, w in weights.items()} == {
        name: (p.numel(), is_replicated(p)) for name, p in real.items()
    }
    assert [w.same_as for w in blocks[-1].weights] == ["embedding.weight"]


def test_a_block_exchanges_once_for_each_pair_of_layers():
    profile = profile_of(config(GPT), TOKENS, measure=False)
    block = profile.blocks(4, Divided(tensor=2))[2]
    assert block.forwards == block.backwards == (AxisExchange("all_reduce", BYTES),) * 2
    block = profile.blocks(4, Divided(tensor=2, sequence=True))[2]
    assert block.forwards == (AxisExchange("all_gather", BYTES), AxisExchange("reduce_scatter", BYTES)) * 2
    large = [each for each in block.backwards if each.nbytes == BYTES]
    # what the column layers took is gathered again for their weights
    assert sorted(each.operation for each in large) == ["all_gather"] * 4 + ["reduce_scatter"] * 2
    block = profile.blocks(4, Divided(tensor=2, whole=("blocks.*.mlp.*",)))[2]
    assert block.forwards == (AxisExchange("all_reduce", BYTES),)
    with pytest.raises(InputError, match="heads"):
        profile.blocks(4, Divided(tensor=3))


def test_batch_norms_are_summed_over_the_data_axis(monkeypatch):
    settings = config({"name": "resnet", "layers": 18, "width": 8})
    profile = profile_of(settings, IMAGES, measure=False)
    plain, synced = profile.blocks(2), profile.blocks(2, Divided(synchronized=True))
    forward, backward = (AxisExchange("all_reduce", n * 8, REPLICAS) for n in (2 * 8 + 1, 2 * 8))
    at = [block.name for block in synced].index("stages.0.0")
    assert synced[at].forwards == (forward,) * 2 and synced[at].backwards == (backward,) * 2
    assert not plain[at].forwards
    assert synced[at].forward > 1.2 * plain[at].forward and synced[at].weights == plain[at].weights
    assert profile.synchronous

    monkeypatch.setattr(measured, "_SECONDS", 0.0)
    cpu = torch.device("cpu")
    cut = Subject(settings, IMAGES, real=True).cut(Divided(synchronized=True), fake=False, device=cpu)
    timed = time_blocks(cut, 2, cpu)
    assert len(timed) == len(synced) and timed[at].forward > 0 < timed[at].backward


def test_a_model_without_batch_norms_does_not_depend_on_replicas():
    profile = profile_of(config({"factory": "planner.planned_models:sequential"}), IMAGES, measure=False)
    assert not profile.synchronous
    assert profile.blocks(2, Divided(synchronized=True)) is profile.blocks(2)
    microbatch = ParallelLayout(data=3, microbatch=3)
    assert microbatch in list(candidates(profile, Nodes(1, 3)))  # 32 samples for 3 ranks


@pytest.mark.parametrize("zero", [0, 2])
def test_later_microbatches_add_to_earlier_gradients(zero):
    profile = profile_of(config({"factory": "planner.planned_models:sequential"}, batch=32), IMAGES, measure=False)
    machine = MachineProfile("m", "s", 2, 1 << 33)
    flatten, first, tanh, _ = blocks = profile.blocks(4)
    assert flatten.later == tanh.later == 0 < first.later
    step = Predictor(profile, machine, 1, 2).predict(ParallelLayout(data=2, microbatch=4, zero=zero))
    once = sum(block.forward + block.input + block.weight for block in blocks)
    added = 3 * sum(block.later for block in blocks) if zero == 0 else 0.0  # with 2, each pass is reduced by itself
    assert step.times["compute"] == pytest.approx(4 * once + added, rel=1e-9)


def test_times_that_cannot_be_measured_are_estimated_with_a_warning(monkeypatch):
    def fails(self, samples, divided):
        raise MeasurementError("blocks cannot be measured: no memory")

    monkeypatch.setattr(Workers, "__init__", lambda self, *args: None)
    monkeypatch.setattr(Workers, "measure", fails)
    settings = config({"factory": "planner.planned_models:sequential"})
    with pytest.warns(UserWarning, match="estimated, not measured.*no memory"):
        blocks = profile_of(settings, IMAGES).blocks(4)
    assert blocks == profile_of(settings, IMAGES, measure=False).blocks(4)


def test_operations_and_sizes_of_linear_layers():
    profile = profile_of(config({"factory": "planner.planned_models:sequential"}), IMAGES, measure=False)
    _, first, tanh, last = profile.blocks(6)
    flops = [sum(each.flops for each in block.forward) for block in profile._observations(6, Divided())]
    assert (flops[1], flops[3]) == (2 * 6 * 64 * 48, 2 * 6 * 48 * 10)
    assert (tanh.input_bytes, tanh.output_bytes, tanh.saved_bytes) == (6 * 48 * 4, 6 * 48 * 4, 6 * 48 * 4)
    assert last.output_bytes == 4  # the loss
    assert first.input == 0 < first.weight  # nobody wants the gradient of the data
    assert (profile.moments, profile.sample_bytes) == (2, 64 * 4 + 8)
    averaged = config({"factory": "planner.planned_models:sequential"}, average="swa")
    assert profile_of(averaged, IMAGES, measure=False).moments == 3
    assert profile.listed and not profile.divisible
    assert not profile_of(config({"factory": "planner.planned_models:unlisted"}), IMAGES, measure=False).listed


def test_measured_and_estimated_times_roughly_agree():
    settings = config({**GPT, "width": 128, "layers": 2})
    timed, counted = (profile_of(settings, TOKENS, measure=measure) for measure in (True, False))
    try:
        blocks = timed.blocks(4)
        scaled = timed.blocks(4, Divided(tensor=2, whole=("blocks.*.mlp.*",)))
    finally:
        timed.close()
    seconds = [sum(b.forward + b.input + b.weight for b in each) for each in (blocks, counted.blocks(4), scaled)]
    assert 1 / 5 < seconds[0] / seconds[1] < 5  # of a machine of which nothing is known
    assert 0.5 * seconds[0] < seconds[2] < seconds[0]
    assert blocks[2].forward == blocks[3].forward > 0 == blocks[0].input
    assert torch.tensor([[b.forward, b.input, b.weight] for b in blocks]).min() >= 0
