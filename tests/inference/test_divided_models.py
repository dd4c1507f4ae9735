"""Models trained by several ranks: `load_model`, and text and predictions by several ranks."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

import hugging_face
import numpy as np
import pytest
import torch
from train.jobs import run

from mpitrain.checkpoint import MODEL
from mpitrain.config.settings import Config
from mpitrain.data import open_dataset
from mpitrain.inference import placing
from mpitrain.inference.commands import Job
from mpitrain.inference.generation import Draws, Generation, Sampling
from mpitrain.inference.placing import CachedBlocks, RecomputedBlocks
from mpitrain.layout.mesh import Mesh
from mpitrain.loading import load_model, load_task, load_weights
from mpitrain.monitor import read_metrics
from mpitrain.predict import _run as predict
from mpitrain.trainer.trainer import Trainer

GPT = {"layers": 3, "width": 32, "heads": 4, "sequence": 16}
LAYOUTS = [{"zero": 3}, {"tensor": 2}, {"pipeline": 2}, {"zero": 1, "precision": "bf16"}]


def sections(text, parallel):
    parallel = dict(parallel)
    precision = parallel.pop("precision", "fp32")
    return {
        "data": {"path": text},
        "model": GPT,
        "train": {"steps": 3, "batch": 4, "microbatch": 1, "precision": precision, "evaluate_samples": 20},
        "parallel": parallel,
    }


@pytest.mark.ranks(2)
@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_a_loaded_model_equals_the_trained_one_bit_by_bit(world, folder, text, parallel):
    trainer = Trainer(Config.from_dict({"run": {"dir": str(folder / "run")}} | sections(text, parallel)), world=world)
    with trainer.working():
        assert trainer.train() == 0
    parts, _ = trainer.engine.parts()
    world.barrier()
    before = torch.random.get_rng_state()
    model = load_model(folder / "run")
    assert torch.equal(before, torch.random.get_rng_state()) and not model.training
    tensors, element_count = dict(model.named_parameters()), 0
    masters = {part.spec.name.removeprefix("master/") for part in parts if part.spec.name.startswith("master/")}
    for part in parts:
        kind, _, name = part.spec.name.partition("/")
        if (kind + "/" == MODEL and name not in masters) or kind == "master":
            starts, lengths, places = part.piece.runs()
            for start, length, place in zip(starts.tolist(), lengths.tolist(), places.tolist(), strict=True):
                mine = part.data[place : place + length]
                assert torch.equal(tensors[name].detach().reshape(-1)[start : start + length], mine)
                element_count += length
    assert sum(world.all_gather_object(element_count)) >= sum(p.numel() for p in tensors.values())
    task, description = load_task(folder / "run")
    held_out = open_dataset(text, "held_out", sequence=16)
    x, y = map(torch.from_numpy, held_out.read(np.arange(20) * len(held_out) // 20))
    with torch.no_grad():
        loss = float(task.loss(task.module(x), y))
    recorded_loss = read_metrics(folder / "run")[-1]["held_out_loss"]
    assert loss == pytest.approx(recorded_loss, rel=1e-5 if "precision" not in parallel else 2e-2)
    assert (description.kind, description.vocabulary, description.x_shape) == ("tokens", 256, (16,))


@pytest.mark.ranks(2, 3)
def test_a_divided_model_generates_the_text_of_one_rank(world, folder, text):
    run(world, folder / "run", **sections(text, {"pipeline": world.size}))
    prompts = [list(prompt) for prompt in (b"def ", b"import torch", b"x", b"    return functional")]
    shapes = [{"pipeline": world.size}, {}] + ([{"tensor": 2}] if world.size == 2 else [])
    alone = placing.load_language_model(folder / "run", Job(), torch.device("cpu"))
    for sampling in (Sampling(0), Sampling(0.8, 40, 0.9)):
        expected = Generation(alone, sampling, 24).run(prompts, Draws(2, prompts))
        for shape in shapes:
            mesh = Mesh.make(world, **shape)
            model = placing.load_language_model(folder / "run", Job(mesh), torch.device("cpu"))
            mine = range(mesh.data.rank, len(prompts), mesh.data.size)
            continuations = Generation(model, sampling, 24).run(prompts, Draws(2, prompts), mine)
            assert [continuations[n] for n in mine] == [expected[n] for n in mine]
            mesh.free()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_divided_hugging_face_model_uses_its_cache_and_generates_the_same_text(world, folder, text, family):
    if world.rank == 0:
        hugging_face.save(folder / family, family)
    world.barrier()
    model = {"factory": f"hf:{folder / family}", "sequence": 8}
    run(world, folder / "run", **sections(text, {}) | {"model": model})
    prompts = [list(prompt) for prompt in (b"def ", b"impo", b"x")]
    alone = placing.load_language_model(folder / "run", Job(), torch.device("cpu"))
    recomputed = replace(alone, decoder=RecomputedBlocks([("", load_model(folder / "run"))]))
    sampling = Sampling(0.8, 40, 0.9)
    expected = Generation(recomputed, sampling, 12).run(prompts, Draws(2, prompts))
    for shape in ({"pipeline": 2}, {"tensor": 2}):
        mesh = Mesh.make(world, **shape)
        divided = placing.load_language_model(folder / "run", Job(mesh), torch.device("cpu"))
        assert isinstance(divided.decoder, CachedBlocks) and not divided.remark
        assert Generation(divided, sampling, 12).run(prompts, Draws(2, prompts), range(3)) == expected
        divided.decoder.begin()
        several = [divided.decoder.advance(torch.tensor([piece])) for piece in ([1, 2, 3], [4, 5], [6])][-1]
        if several is not None:
            recomputed.decoder.begin()
            scores = recomputed.decoder.advance(torch.tensor([[1, 2, 3, 4, 5, 6]]))
            torch.testing.assert_close(several, scores, rtol=1e-5, atol=1e-5)
        mesh.free()


@pytest.mark.ranks(2, 3)
def test_predictions_of_several_ranks_equal_those_of_one(world, folder):
    model = {"name": "resnet", "layers": 18, "width": 4} if world.size == 2 else {"name": "mlp"}
    train = {"steps": 2, "batch": 6, "evaluate_samples": 6}
    run(world, folder / "run", data={"path": "digits"}, model=model, train=train)
    data = open_dataset("digits")
    x, _ = data.read(np.arange(50))
    if world.rank == 0:
        np.save(folder / "x.npy", x)
    world.barrier()
    mesh = Mesh.make(world)
    out = folder / "out.npz"
    predict(
        Namespace(
            run=folder / "run",
            input=folder / "x.npy",
            out=out,
            batch=7,
            device="cpu",
            best=False,
            skip_bad=False,
            keep=(),
            trust=False,
            text="text",
            prompt=None,
            completion=None,
        ),
        Job(mesh),
    )
    world.barrier()
    model = load_model(folder / "run")
    with torch.no_grad():
        expected = torch.softmax(model(torch.from_numpy(x)).double(), 1)
    with np.load(out) as arrays:
        assert arrays["probabilities"] == pytest.approx(expected.numpy(), abs=1e-5)
        assert arrays["class"].tolist() == expected.argmax(1).tolist()
        assert arrays["classes"].tolist() == list(data.description.classes)
    assert sorted(path.name for path in folder.iterdir()) == ["out.npz", "run", "x.npy"]
    mesh.free()


@pytest.mark.ranks(2)
def test_weights_fill_a_ranks_part_of_a_model(world, folder, text):
    from mpitrain.tensor import parallelize, plan_for

    run(world, folder / "run", **sections(text, {"zero": 2}))
    whole, (part, _) = load_model(folder / "run"), load_task(folder / "run")
    module = parallelize(part.module, world, plan_for(part.module))
    for parameter in module.parameters():
        torch.nn.init.zeros_(parameter)
    load_weights(module, folder / "run")
    tokens = torch.arange(12).view(2, 6)
    half = torch.from_numpy(np.array_split(whole(tokens).detach().numpy(), 2, axis=2)[world.rank])
    assert torch.allclose(module(tokens), half, atol=1e-5)
