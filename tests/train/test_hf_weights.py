"""Models of transformers imported as ours, trained in any layout, and exported again."""

from __future__ import annotations

import json
from pathlib import Path

import hugging_face
import pytest
import torch
from train.hf_models import SEQUENCE, save_tiny, train_in_torch
from train.jobs import run

from mpitrain.checkpoint.__main__ import main
from mpitrain.config.settings import Config
from mpitrain.errors import InputError
from mpitrain.loading import load_model

pytest.importorskip("transformers")
# of a model that stays transformers' own
THEIRS = {
    1: {"gpt2": [{}]},
    2: {"gpt2": [{"zero": 3}, {"pipeline": 2}], "llama": [{"tensor": 2}, {"pipeline": 2, "zero": 1}]},
}
LAYOUTS = {
    "few": {
        "gpt2": [{"zero": 0}, {"pipeline": 2, "slices": 2}],
        "llama": [{"zero": 3}, {"tensor": 2}],
        "qwen3": [{"zero": 3}, {"tensor": 2}],
    },
    "more": {
        "gpt2": [{"zero": 3}, {"tensor": 2, "sequence": True}],
        "llama": [{"zero": 0}, {"pipeline": 2}],
        "qwen3": [{"zero": 0}, {"pipeline": 2}],
    },
}


def import_model(source: Path, folder: Path, text: str, *settings: str) -> Config:
    """Import a model's folder as a run and return the run's settings."""
    arguments = ["--data.path", text, "--model.sequence", str(SEQUENCE), "--train.steps", "10", "--train.batch", "6"]
    arguments += ["--optim.schedule", "constant", "--optim.warmup", "0", "--train.clip", "0", "--optim.lr", "3e-3"]
    arguments += ["--train.evaluate_samples", "2", "--checkpoint.every", "0"]
    assert main(["import", str(source), str(folder), "--format", "hf", *arguments, *settings]) == 0
    return Config.from_args([str(folder / "config.toml")])


@pytest.mark.ranks(1, 2)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layouts", ["few", pytest.param("more", marks=pytest.mark.campaign)])
@pytest.mark.parametrize("family", LAYOUTS["few"])
def test_imported_models_train_like_transformers_and_can_be_exported(world, folder, text, family, layouts):
    from transformers import AutoModelForCausalLM

    tokens = torch.randint(256, (2, SEQUENCE), generator=torch.Generator().manual_seed(1))
    expected_losses, scores = [], torch.empty(0)
    for number, parallel in enumerate(LAYOUTS[layouts][family] if world.size > 1 else [{}]):
        run_folder, out = folder / f"run-{number}", folder / f"out-{number}"
        if world.rank == 0:
            model = save_tiny(family, folder / "source") if number == 0 else None
            config = import_model(folder / "source", run_folder, text)
            if model is not None:
                expected_losses = train_in_torch(model, config)
                scores = model(tokens).logits
        world.barrier()
        sections = Config.from_args([str(run_folder / "config.toml")]).model_dump(exclude={"run", "parallel"})
        if world.size == 1:
            other = sections["model"] | {"norm_eps": 0.1}
            with pytest.raises(InputError, match=r"with norm_eps .*, but model\.norm_eps is 0\.1; train wi"):
                run(world, run_folder, **(sections | {"model": other}))
        lines = run(world, run_folder, **sections, parallel=parallel)
        if world.rank == 0:
            assert [line["loss"] for line in lines] == pytest.approx(expected_losses, rel=1e-5, abs=1e-5), parallel
            assert main(["export", str(run_folder), str(out), "--format", "hf", "--shard-size", "40KB"]) == 0
            assert json.loads((out / "config.json").read_text())["model_type"] == family
            back = AutoModelForCausalLM.from_pretrained(out).eval()
            torch.testing.assert_close(back(tokens).logits, scores, rtol=1e-3, atol=1e-3)  # ten steps of Adam apart
        world.barrier()


@pytest.mark.ranks(1, 2)
@pytest.mark.timeout(300)
def test_trained_transformers_model_is_exported_as_a_folder(world, folder, text):
    from transformers import AutoModelForCausalLM

    sections = {"data": {"path": text}, "optim": {"lr": 0.05, "warmup": 0}}
    train = {"steps": 2, "batch": 4, "evaluate_samples": 2}
    tokens = torch.randint(256, (2, SEQUENCE), generator=torch.Generator().manual_seed(1))
    for family, layouts in THEIRS[world.size].items():
        source = folder / family
        if world.rank == 0:
            hugging_face.save(source, family)
            (source / "tokenizer_config.json").write_text("{}")
            (source / "vocab.txt").write_text("words")
        world.barrier()
        model = {"factory": f"hf:{source}", "sequence": SEQUENCE}
        for number, parallel in enumerate(layouts):
            run_folder, out = folder / f"{family}-{number}", folder / f"{family}-{number}-out"
            run(world, run_folder, **sections, model=model, train=train, parallel=parallel)
            if world.rank == 0:
                assert main(["export", str(run_folder), str(out), "--format", "hf", "--shard-size", "40KB"]) == 0
                assert (out / "model.safetensors.index.json").exists() and len(list(out.glob("*.safetensors"))) > 1
                assert (out / "vocab.txt").read_text() == "words" and (out / "tokenizer_config.json").exists()
                back = AutoModelForCausalLM.from_pretrained(out).eval()
                logits = load_model(run_folder)(tokens)
                assert torch.equal(back(tokens).logits, logits) and back.config.use_cache
                before = AutoModelForCausalLM.from_pretrained(source).eval()(tokens).logits
                assert (logits - before).abs().max() > 0.01  # it has learned something
                assert not list(folder.glob(f"*{out.name}*tmp*"))
            world.barrier()
    if world.size == 1:
        run(world, folder / "lora", **sections, model=model | {"lora": 2}, train=train)
        assert main(["export", str(folder / "lora"), str(folder / "no"), "--format", "hf"]) == 2
