"""Models of transformers that go on as ours, by any layout, and come back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from train.hf_models import SEQUENCE, save_tiny, trained_in_torch
from train.jobs import run

from mpitrain.checkpoint.__main__ import main
from mpitrain.config.settings import Config
from mpitrain.errors import InputError

pytest.importorskip("transformers")
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


def imported(source: Path, folder: Path, text: str, *settings: str) -> Config:
    """The settings of a run that was made of a model's folder."""
    given = ["--data.path", text, "--model.sequence", str(SEQUENCE), "--train.steps", "10", "--train.batch", "6"]
    given += ["--optim.schedule", "constant", "--optim.warmup", "0", "--train.clip", "0", "--optim.lr", "3e-3"]
    given += ["--train.evaluate_samples", "2", "--checkpoint.every", "0"]
    assert main(["import", str(source), str(folder), "--format", "hf", *given, *settings]) == 0
    return Config.from_args([str(folder / "config.toml")])


@pytest.mark.ranks(1, 2)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layouts", ["few", pytest.param("more", marks=pytest.mark.campaign)])
@pytest.mark.parametrize("family", LAYOUTS["few"])
def test_models_of_transformers_train_as_ours_by_any_layout_and_come_back(world, folder, text, family, layouts):
    from transformers import AutoModelForCausalLM

    tokens = torch.randint(256, (2, SEQUENCE), generator=torch.Generator().manual_seed(1))
    wanted, scores = [], torch.empty(0)
    for number, parallel in enumerate(LAYOUTS[layouts][family] if world.size > 1 else [{}]):
        made, out = folder / f"run-{number}", folder / f"out-{number}"
        if world.rank == 0:
            model = save_tiny(family, folder / "source") if number == 0 else None
            config = imported(folder / "source", made, text)
            if model is not None:
                wanted = trained_in_torch(model, config)
                scores = model(tokens).logits
        world.barrier()
        sections = Config.from_args([str(made / "config.toml")]).model_dump(exclude={"run", "parallel"})
        if world.size == 1:
            other = sections["model"] | {"norm_eps": 0.1}
            with pytest.raises(InputError, match=r"with norm_eps .*, and model\.norm_eps is 0\.1; train wi"):
                run(world, made, **(sections | {"model": other}))
        lines = run(world, made, **sections, parallel=parallel)
        if world.rank == 0:
            assert [line["loss"] for line in lines] == pytest.approx(wanted, rel=1e-5, abs=1e-5), parallel
            assert main(["export", str(made), str(out), "--format", "hf", "--shard-size", "40KB"]) == 0
            assert json.loads((out / "config.json").read_text())["model_type"] == family
            back = AutoModelForCausalLM.from_pretrained(out).eval()
            torch.testing.assert_close(back(tokens).logits, scores, rtol=1e-3, atol=1e-3)  # ten steps of Adam apart
        world.barrier()
