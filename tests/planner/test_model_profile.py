"""What the planner says of blocks, beside what the same blocks do."""

import numpy as np
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from mpitrain.config.settings import Config
from mpitrain.data import Description
from mpitrain.errors import InputError
from mpitrain.layout import is_replicated
from mpitrain.planner.dividing import StandIn
from mpitrain.planner.model import AxisExchange, Divided
from mpitrain.planner.profile import profile_of
from mpitrain.planner.subject import Subject
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
        ({"factory": "planner.planned_models:whole", "options": {"asks": True}}, IMAGES, "fp32"),
    ],
)
def test_as_many_bytes_are_kept_as_the_meter_counts(model, description, precision):
    settings = config(model, precision=precision)
    profile = profile_of(settings, description, measure=False)
    for samples in (2, 7):
        cut = Subject(settings, description, real=True).cut(Divided(), fake=False)
        meter = ActivationMeter(cut.module)
        x, y = cut.samples(samples)
        with cut.autocast(), saved_tensors_hooks(meter.add, lambda kept: kept):
            cut.loss(cut.module(x), y)
        assert sum(block.kept for block in profile.blocks(samples)) == meter.nbytes


@pytest.mark.parametrize("divided", [Divided(tensor=2), Divided(tensor=4, sequence=True)])
def test_a_divided_model_has_the_parameters_of_one_that_is_really_divided(divided):
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


def test_the_exchanges_of_a_block_are_those_of_its_pairs_of_layers():
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


def test_operations_and_sizes_of_linear_layers():
    profile = profile_of(config({"factory": "planner.planned_models:sequential"}), IMAGES, measure=False)
    _, first, tanh, last = profile.blocks(6)
    assert first.operations == 2 * 6 * 64 * 48
    assert last.operations == 2 * 6 * 48 * 10
    assert (tanh.taken, tanh.given, tanh.kept) == (6 * 48 * 4, 6 * 48 * 4, 6 * 48 * 4)
    assert last.given == 4  # the loss
    assert first.input == 0 < first.weight  # nobody wants the gradient of the data
    assert (profile.moments, profile.sample_bytes) == (2, 64 * 4 + 8)
    assert profile.listed and not profile.divisible
    assert not profile_of(config({"factory": "planner.planned_models:whole"}), IMAGES, measure=False).listed


def test_seconds_measured_and_counted_agree_roughly():
    settings = config({**GPT, "width": 128, "layers": 2})
    measured, counted = (profile_of(settings, TOKENS, measure=measure) for measure in (True, False))
    try:
        blocks = measured.blocks(4)
        scaled = measured.blocks(4, Divided(tensor=2, whole=("blocks.*.mlp.*",)))
    finally:
        measured.close()
    seconds = [sum(b.forward + b.input + b.weight for b in each) for each in (blocks, counted.blocks(4), scaled)]
    assert 1 / 5 < seconds[0] / seconds[1] < 5  # of a machine of which nothing is known
    assert 0.5 * seconds[0] < seconds[2] < seconds[0]
    assert blocks[2].forward == blocks[3].forward > 0 == blocks[0].input
    assert torch.tensor([[b.forward, b.input, b.weight] for b in blocks]).min() >= 0
