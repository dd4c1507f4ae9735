"""`model.factory hf:PATH` and `model.lora` through the commands: train, merge, and load in transformers and peft."""

from __future__ import annotations

import hugging_face
import pytest
import torch
from safetensors.torch import load_file
from support import one_line, train_command
from warm import job

from mpitrain.adapters import write_merged, write_peft
from mpitrain.checkpoint import contents
from mpitrain.data.prepare import prepare
from mpitrain.errors import InputError
from mpitrain.generate import main as generate
from mpitrain.loading import load_model
from mpitrain.predict import main as predict

QUICK = ["--model.sequence", 8, "--train.batch", 4, "--train.steps", 2, "--train.evaluate_samples", 4]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder with a data set and two models."""
    folder = tmp_path_factory.mktemp("adapters")
    (folder / "a.txt").write_text("All happy families are alike; each unhappy family is unhappy in its own way.\n" * 40)
    prepare([str(folder / "a.txt")], folder / "text")
    for family in ("gpt2", "llama"):
        hugging_face.save(folder / family, family)
    return folder


def options(place, *more):
    return ["--data.path", place / "text", *QUICK, *map(str, more)]


@pytest.mark.campaign
def test_a_job_of_two_ranks_trains_a_model_of_hugging_face(place):
    arguments = options(place, "--run.dir", "two", "--model.factory", "hf:llama")
    ended = job(2, train_command(*arguments), timeout=110, cwd=place)
    assert ended.returncode == 0, ended.stderr
    assert "hf:llama, 31,904 parameters" in ended.stdout and "done at step 2 of 2" in ended.stdout


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def run(place, forked, family):
    """Return a run folder with trained adapters."""
    arguments = options(place, "--run.dir", place / f"lora-{family}", "--model.factory", f"hf:{place / family}")
    ended = forked.run("train", *arguments, "--model.lora", 4, "--optim.lr", 0.1, cwd=place)
    assert ended.returncode == 0, ended.stderr
    return place / f"lora-{family}"


def test_trained_adapters_are_merged_and_loaded_by_transformers_and_peft(place, run, forked, family, tmp_path, capfd):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    for name in ("whole", "whole.pt", "whole.safetensors"):
        assert f"{8 if family == 'llama' else 4} adapters" in write_merged(run, tmp_path / name)
    write_peft(run, tmp_path / "adapter")
    assert capfd.readouterr() == ("", "")
    base = hugging_face.language_model(family)
    x = torch.randint(256, (2, 12))
    before = base(x).logits
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")(x).logits
    assert (adapted - before).abs().max() > 1e-3
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", local_files_only=True)
    torch.testing.assert_close(merged(x).logits, adapted)
    for state in (torch.load(tmp_path / "whole.pt", weights_only=True), load_file(tmp_path / "whole.safetensors")):
        assert set(state) == set(merged.state_dict())
        assert all(torch.equal(state[name], tensor) for name, tensor in merged.state_dict().items())
    one_line(forked.run("adapters", "merge", run, tmp_path / "whole", cwd=place), "exists already")


def test_a_run_with_adapters_generates_the_same_text_as_transformers(place, run, tmp_path, capfdbinary):
    from transformers import AutoModelForCausalLM

    write_merged(run, tmp_path / "whole")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", local_files_only=True).eval()
    tokens = torch.tensor([list(b"All happy")])
    with torch.no_grad():
        torch.testing.assert_close(load_model(run)(tokens), merged(tokens).logits)
    target = merged.generate(tokens, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)[0].tolist()
    capfdbinary.readouterr()
    assert generate([str(run), "--prompt", "All happy", "--tokens", "12", "--temperature", "0"]) == 0
    assert capfdbinary.readouterr().out.decode() == bytes(target).decode("utf-8", "replace") + "\n"
    assert predict([str(run), str(place / "text"), "--out", str(tmp_path / "all.npz")]) == 0


def test_a_fully_trained_hugging_face_model_is_loaded(place, forked, family, capfd):
    from transformers import AutoModelForCausalLM

    arguments = options(place, "--run.dir", place / f"whole-{family}", "--model.factory", f"hf:{place / family}")
    assert forked.run("train", *arguments, "--optim.lr", 0.1, cwd=place).returncode == 0
    base = AutoModelForCausalLM.from_pretrained(place / family, local_files_only=True)
    trained = load_model(place / f"whole-{family}")
    stored = contents.resolve(place / f"whole-{family}")
    manifest = contents.complete_manifest(stored)
    for name, tensor in trained.state_dict().items():
        saved = manifest.values["tied"].get(name, name)
        assert torch.equal(tensor, contents.load_tensor(stored, manifest, f"model/{saved}"))
    assert not torch.equal(base.get_input_embeddings().weight, trained.inner.get_input_embeddings().weight)
    assert generate([str(place / f"whole-{family}"), "--prompt", "All", "--tokens", "5"]) == 0
    assert capfd.readouterr().out.startswith("All")


def test_adapters_of_a_base_that_has_changed_are_refused(place, run, family, tmp_path):
    changed = hugging_face.language_model(family)
    with torch.no_grad():
        changed.get_output_embeddings().weight[0, 0] += 1
    changed.save_pretrained(place / family)
    with pytest.raises(InputError, match=r"for other base weights than those of .*; use those again"):
        write_merged(run, tmp_path / "again")
    hugging_face.save(place / family, family)
    assert not (tmp_path / "again").exists()
    write_merged(run, tmp_path / "again")


@pytest.mark.parametrize("family", ["llama"], indirect=True, scope="module")
def test_a_run_without_adapters_cannot_resume_from_adapters(place, run, forked, family):
    arguments = options(place, "--run.dir", run, "--model.factory", f"hf:{place / family}", "--train.steps", 4)
    one_line(forked.run("train", *arguments, cwd=place), "contains only adapters of", "set model.lora", alone=False)
