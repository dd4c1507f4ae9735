"""`model.factory = hf:PATH` in the main job trains like transformers in plain torch, for any division of the model."""

from __future__ import annotations

from pathlib import Path

import hugging_face
import pytest
import torch
from torch.nn import functional
from train import odd_models
from train.jobs import run

from mpitrain.checkpoint import contents
from mpitrain.config.learning_rate import LearningRate
from mpitrain.config.settings import Config
from mpitrain.errors import InputError
from mpitrain.layers.lora import BaseWeights
from mpitrain.loading import load_model
from mpitrain.models.build import adapted_layers
from mpitrain.monitor import read_metrics
from mpitrain.trainer.data import open_data
from mpitrain.trainer.run import Callback
from mpitrain.trainer.trainer import Trainer

STEPS, BATCH, SEQUENCE = 6, 8, 8
FAMILIES = ("gpt2", "llama")
ALL = (*FAMILIES, "qwen3")


@pytest.fixture(scope="module")
def place(world, tmp_path_factory):
    return Path(world.broadcast_object(str(tmp_path_factory.mktemp("hf"))))


@pytest.fixture(scope="module")
def folders(world, place):
    """Folders with one model of each family."""
    if world.rank == 0:
        for family in ALL:
            hugging_face.save(place / family, family)
    world.barrier()
    return {family: place / family for family in ALL}


def settings(text, folder, steps=STEPS, model=(), **parallel):
    return {
        "data": {"path": text},
        "model": {"factory": f"hf:{folder}", "sequence": SEQUENCE, **dict(model)},
        "train": {"steps": steps, "batch": BATCH, "microbatch": 4, "evaluate_samples": 4},
        "optim": {"schedule": "constant"},
        "checkpoint": {"every": 3, "keep": 9},
        "parallel": parallel,
    }


class Batches(Callback):
    """A callback that keeps the batch of each step."""

    def __init__(self):
        self.batches = []

    def on_step_end(self, trainer, step):
        self.batches.append((step.batch.x.clone(), step.batch.y.clone()))


@pytest.fixture(scope="module")
def batches(world, place, folders, text):
    """Batches of a run's steps."""
    alone, pairs = world.subgroup([0]), None
    if alone is not None:
        keeper = Batches()
        config = Config.from_dict({"run": {"dir": str(place / "batches")}} | settings(text, folders["gpt2"]))
        trainer = Trainer(config, [keeper], world=alone)
        with trainer.working():
            trainer.train()
        pairs = [(x.tolist(), y.tolist()) for x, y in keeper.batches]
        alone.free()
    return [(torch.tensor(x), torch.tensor(y)) for x, y in world.broadcast_object(pairs)]


def transformers_loss(model, x, y):
    return functional.cross_entropy(model(input_ids=x).logits.flatten(0, 1), y.flatten())


def train_in_torch(model, batches, lrs, loss_of=transformers_loss):
    """Return losses and gradient norms of a model in plain torch, with AdamW and the job's default settings."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.01},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]])
    losses, norms = [], []
    for (x, y), lr in zip(batches, lrs, strict=True):
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, 1.0).item())
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


@pytest.fixture(scope="module")
def rates(text, folders):
    """Learning rates of all steps."""
    config = Config.from_dict(settings(text, folders["gpt2"]))
    return [LearningRate.of(config.optim, STEPS).rate(step) for step in range(STEPS)]


@pytest.fixture(scope="module")
def curves(batches, rates):
    """Losses and gradient norms of transformers, by family."""
    return {family: train_in_torch(hugging_face.language_model(family), batches, rates) for family in ALL}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("family", "parallel"),
    [
        ("gpt2", {"zero": 3}),
        ("llama", {"zero": 0}),
        ("qwen3", {"tensor": 2}),  # whose norms of queries and keys see each rank's heads alone
        *((family, parallel) for family in FAMILIES for parallel in ({"tensor": 2}, {"pipeline": 2})),
    ],
    ids=str,
)
def test_every_layout_trains_like_transformers_in_plain_torch(world, folder, folders, text, curves, family, parallel):
    lines = run(world, folder, **settings(text, folders[family], **parallel) | {"checkpoint": {"every": 0}})
    assert [m["loss"] for m in lines] == pytest.approx(curves[family][0], rel=1e-5)
    assert [m["grad_norm"] for m in lines] == pytest.approx(curves[family][1], rel=1e-4)


LORA = {"lora": 4, "lora_alpha": 8.0}


def with_peft(family, module):
    """Return the transformers model with peft adapters in the same layers and with the same values as in `module`."""
    import peft

    ours = adapted_layers(module)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(ours), fan_in_fan_out=family == "gpt2")
    model = peft.get_peft_model(hugging_face.language_model(family), config)
    with torch.no_grad():
        for name, layer in ours.items():
            theirs = model.base_model.model.get_submodule(name)
            theirs.lora_A["default"].weight.copy_(layer.lora_a)
            assert not theirs.lora_B["default"].weight.any() and not layer.lora_b.any()
    return model


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("family", "parallel"),
    [
        ("gpt2", {"zero": 3}),
        pytest.param("gpt2", {"tensor": 2}, marks=pytest.mark.campaign),
        ("gpt2", {"pipeline": 2}),
        ("llama", {"zero": 1, "tensor": 2}),
        pytest.param("llama", {"pipeline": 2, "cut": [2, 3]}, marks=pytest.mark.campaign),
    ],
    ids=str,
)
def test_adapters_train_like_peft_and_only_they_are_saved(
    world, folder, folders, text, batches, rates, family, parallel
):
    sections = settings(text, folders[family], 5, LORA, **parallel)
    trainer = Trainer(Config.from_dict({"run": {"dir": str(folder / "run")}} | sections), world=world)
    torch.manual_seed(trainer.config.run.seed)
    trainer.data, _ = open_data(trainer.config, world)
    begun = trainer.make_model()
    with trainer.working():
        trainer.train()
    lines = read_metrics(folder / "run")
    losses, norms = train_in_torch(with_peft(family, begun.module), batches[:5], rates[:5])
    assert [m["loss"] for m in lines] == pytest.approx(losses, rel=1e-5)
    assert [m["grad_norm"] for m in lines] == pytest.approx(norms, rel=1e-4)
    if parallel == {"zero": 3}:
        assert BaseWeights.of(trainer.engine.module, "").crc == begun.base.crc
    saved = contents.complete_manifest(contents.resolve(folder / "run"))
    adapters = {f"model/{name}" for name, p in begun.module.named_parameters() if p.requires_grad}
    states = {name for name in saved.tensors if name.startswith("optimizer/")}
    assert set(saved.tensors) == adapters | states and all(".lora_" in name for name in saved.tensors)
    assert sorted(saved.values["left_out"]) == sorted(begun.base.names)
    sections["checkpoint"]["resume"] = str(folder / "run/checkpoints/step-00000003")
    again = run(world, folder / "again", **sections)
    assert [(m["step"], m["loss"]) for m in again] == [(m["step"], m["loss"]) for m in lines[3:]]


@pytest.fixture(scope="module")
def trained_gpt(world, place, text):
    """A run of the built-in gpt."""
    model = {"layers": 2, "width": 16, "heads": 2, "norm": "rmsnorm"}
    sections = settings(text, "", 3, model | {"factory": ""})
    run(world, place / "gpt", **sections)
    return place / "gpt"


@pytest.mark.ranks(2)
def test_adapters_of_a_run_train_like_peft_on_its_weights(world, folder, text, batches, rates, trained_gpt):
    import peft

    losses = []
    for number, parallel in enumerate([{}, {"zero": 3}, {"tensor": 2}, {"pipeline": 2}]):
        sections = settings(text, "", 4, LORA | {"base": str(trained_gpt), "factory": ""}, **parallel)
        lines = run(world, folder / str(number), **sections)
        losses.append([m["loss"] for m in lines])
    saved = contents.complete_manifest(contents.resolve(folder / "1"))
    assert {name.rpartition(".lora_")[1] for name in saved.tensors} == {".lora_"}
    assert saved.values["base"]["checkpoint"] == str(trained_gpt / "checkpoints/step-00000003")
    trainer = Trainer(Config.from_dict({"run": {"dir": str(folder / "begun")}} | sections), world=world)
    torch.manual_seed(trainer.config.run.seed)
    trainer.data, _ = open_data(trainer.config, world)
    ours = adapted_layers(trainer.make_model().module)
    theirs = load_model(trained_gpt)
    model = peft.get_peft_model(theirs, peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(ours)))
    with torch.no_grad():
        for name, layer in ours.items():
            model.base_model.model.get_submodule(name).lora_A["default"].weight.copy_(layer.lora_a)
    expected, _ = train_in_torch(model, batches[:4], rates[:4], lambda model, x, y: theirs.loss(model(x), y))
    for each in losses:
        assert each == pytest.approx(expected, rel=1e-5)


@pytest.mark.ranks(2)
def test_only_the_adapters_of_a_peft_model_are_trained_and_saved(world, folder, text, batches, rates):
    model = {"factory": "train.odd_models:of_peft", "options": {"family": "llama"}}
    sections = settings(text, "", 4, model, zero=2)
    lines = run(world, folder / "run", **sections)
    theirs, _ = odd_models.of_peft(None, "llama")
    losses, _ = train_in_torch(theirs.model, batches[:4], rates[:4])
    assert [m["loss"] for m in lines] == pytest.approx(losses, rel=1e-5)
    saved = contents.complete_manifest(contents.resolve(folder / "run"))
    assert {name.rpartition(".lora_")[1] for name in saved.tensors} == {".lora_"}
    sections["checkpoint"]["resume"] = str(folder / "run/checkpoints/step-00000003")
    assert run(world, folder / "again", **sections)[-1]["loss"] == lines[-1]["loss"]


@pytest.mark.ranks(2)
def test_models_that_ranks_cannot_divide_are_refused(world, folder, folders, text):
    if world.rank == 0:
        hugging_face.save(folder / "one", "llama", num_key_value_heads=1)
    world.barrier()
    cases = [
        (
            folder / "one",
            {},
            {"tensor": 2},
            r"k_proj: 1 heads cannot be divided evenly over 2 tensor ranks; use 1 ranks",
        ),
        (folders["llama"], LORA | {"lora_dropout": 0.1}, {"tensor": 2}, r"model.lora_dropout 0.1 .*; set it to 0"),
        (
            folders["gpt2"],
            {},
            {"tensor": 2, "sequence": True},
            r"counts positions along the sequence, which parallel.sequence divides",
        ),
        (folders["llama"], LORA, {"pipeline": 2}, r"rank 1 of the pipeline would have no parameter to train"),
    ]
    for number, (path, model, parallel, match) in enumerate(cases):
        with pytest.raises(InputError, match=match) as refused:
            run(world, folder / str(number), **settings(text, path, 2, model, **parallel))
        assert "\n" not in str(refused.value) and refused.value.agreed
