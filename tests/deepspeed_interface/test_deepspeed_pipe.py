"""A `PipelineModule` over stages trains like plain torch in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mpitrain.deepspeed as deepspeed
from mpitrain.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from mpitrain.errors import InputError

BATCH, STEPS, WORDS = 24, 4, 11
CONFIG = {
    "train_batch_size": BATCH,
    "train_micro_batch_size_per_gpu": 3,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 2}},
}


class Block(nn.Module):
    def __init__(self, width, scale=1.0):
        super().__init__()
        self.inner, self.scale = nn.Linear(width, width), scale

    def forward(self, x):
        return x + self.scale * torch.tanh(self.inner(x))


def loss_fn(scores, targets):
    """Cross-entropy in which some targets are masked: DeepSpeed takes the mean over microbatches."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=0)


def layers():
    head = TiedLayerSpec("words", nn.Embedding, WORDS, 8, forward_fn=lambda module, x: x @ module.weight.T)
    blocks = [LayerSpec(Block, 8, scale=0.5) for _ in range(4)]
    return [TiedLayerSpec("words", nn.Embedding, WORDS, 8), lambda x: x * 2, *blocks, nn.LayerNorm(8), head]


def make(stages, data=None, **options):
    torch.manual_seed(2)
    model = PipelineModule(layers(), num_stages=stages, loss_fn=loss_fn, **options)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG, training_data=data)[0]


def samples(step=0):
    return torch.randint(WORDS, (2, BATCH, 5), generator=torch.Generator().manual_seed(step))


def microbatches(world, stages, steps):
    """Yield this rank's microbatches; ranks of one pipeline have the same."""
    ranks = world.size // stages
    for step in range(steps):
        x, y = samples(step)
        for number in range(BATCH // 3 // ranks):
            rows = slice(3 * (number * ranks + world.rank // stages), None)
            yield x[rows][:3], y[rows][:3]


def reference(steps):
    torch.manual_seed(2)
    model = PipelineModule(layers(), num_stages=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-2 * (step > 1)
        optimizer.zero_grad()
        x, y = samples(step)
        loss = torch.stack([loss_fn(model(a), b) for a, b in zip(x.split(3), y.split(3), strict=True)]).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("options", [{}, {"partition_method": "type:block", "activation_checkpoint_interval": 2}])
def test_batches_train_as_in_plain_torch_and_go_on_from_a_checkpoint(world, folder, options):
    stages = min(world.size, 2)
    losses, weights = reference(STEPS)
    engine = make(stages, **options)
    coming = microbatches(world, stages, STEPS)
    assert [float(engine.train_batch(coming)) for _ in range(2)] == pytest.approx(losses[:2], rel=1e-4)
    engine.save_checkpoint(folder)
    engine = make(stages, **options)
    engine.load_checkpoint(folder)
    assert [float(engine.train_batch(coming)) for _ in range(2)] == pytest.approx(losses[2:], rel=1e-4)
    for name, value in engine.module_state_dict().items():
        torch.testing.assert_close(value, weights[name], rtol=1e-4, atol=1e-5)
    assert engine.global_steps == STEPS and engine.is_first_stage() == (world.rank % stages == 0)
    if stages > 1 and options:  # type:block puts two of the four blocks on each stage
        assert sum(isinstance(layer, Block) for layer in engine.module.modules()) == 2


@pytest.mark.ranks(2)
def test_the_training_data_of_initialize_and_evaluation(world):
    x, y = samples()
    data = torch.utils.data.TensorDataset(x, y)
    engine = make(2, data)
    expected, _ = reference(1)
    batches = iter(data for data in deepspeed.utils.RepeatingLoader(engine.training_dataloader.loader))
    assert float(engine.eval_batch(batches)) == pytest.approx(expected[0], rel=1e-4)
    assert float(engine.train_batch()) == pytest.approx(expected[0], rel=1e-4)
    for call in (engine.forward, engine.backward, engine.step):
        with pytest.raises(InputError, match="use train_batch and eval_batch"):
            call()


@pytest.mark.ranks(2)
def test_what_a_pipeline_module_cannot_be_is_one_line(world):
    for arguments, words in (
        ({"topology": object()}, "num_stages"),
        ({"num_stages": 2, "partition_method": "profile"}, "partition_method 'profile'"),
        ({"num_stages": 3}, "2 ranks are no multiple of num_stages 3"),
        ({"num_stages": 2, "loss_fn": None}, "no loss"),
    ):
        with pytest.raises(InputError, match=words):
            model = PipelineModule(**{"layers": [nn.Linear(2, 2)] * 2, "loss_fn": loss_fn, **arguments})
            deepspeed.initialize(model=model, config=CONFIG)
    with pytest.raises(InputError, match="LayerSpec needs a class"):
        LayerSpec(torch.tanh)
