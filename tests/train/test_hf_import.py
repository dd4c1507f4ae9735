"""Presets, and import and export of transformers weights: equal logits, and a one-line error for a misfit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from train.hf_models import FAMILIES, VOCABULARY, save_tiny

from mpitrain.checkpoint.__main__ import main
from mpitrain.checkpoint.contents import complete_manifest, load_tensor, resolve
from mpitrain.config.settings import Config
from mpitrain.errors import InputError
from mpitrain.models.gpt import GPT, Form

pytest.importorskip("transformers")
LIKE_LLAMA = ("mistral", "qwen2", "qwen3")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    """Folders of models, by family; the content of their tokenizer.json does not matter here."""
    options = {"llama": {"attention_bias": True, "mlp_bias": True}, "mistral": {"sliding_window": None}}
    folders = {family: tmp_path_factory.mktemp(family) for family in (*FAMILIES, *LIKE_LLAMA)}
    for family, folder in folders.items():
        save_tiny(family, folder, **options.get(family, {}))
        (folder / "tokenizer.json").write_text("{}")
    return folders


def load(run: Path) -> GPT:
    """Return our model, built from a run's settings and its newest checkpoint alone."""
    section = Config.from_args([str(run / "config.toml")]).model
    assert section.preset == ""  # all that it said is there, and the folder need not be
    form = Form(**{key: getattr(section, key) for key in Form.__dataclass_fields__})
    sizes = section.vocabulary, section.layers, section.width, section.heads
    model = GPT(*sizes, tied=section.tied, max_positions=section.max_positions, form=form).eval()
    folder = resolve(run)
    manifest = complete_manifest(folder)
    weights = {name.removeprefix("model/"): load_tensor(folder, manifest, name) for name in manifest.tensors}
    left = model.load_state_dict(weights, strict=False)
    assert not left.unexpected_keys and left.missing_keys == (["head.weight"] if section.tied else [])
    return model


def refusal(capsys, *arguments) -> str:
    """Return the one-line error with which a command is refused."""
    assert main([str(each) for each in arguments]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *((family, kind) for family in FAMILIES for kind in ("safetensors", "bin", "without its head")),
        *((family, "safetensors") for family in LIKE_LLAMA),
    ],
)
def test_import_and_export_keep_the_logits_of_transformers(saved, tmp_path, family, kind):
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    source, run, out = saved[family], tmp_path / "run", tmp_path / "out"
    model = AutoModelForCausalLM.from_pretrained(source).eval()
    if kind != "safetensors":
        source = tmp_path / "other"
        source.mkdir()
        (source / "config.json").write_bytes((saved[family] / "config.json").read_bytes())
        state = model.state_dict()
    if kind == "bin":
        torch.save(state, source / "pytorch_model.bin")
    elif kind == "without its head":  # as the first GPT-2 on the hub, whose buffers are masks
        prefix = f"{model.base_model_prefix}."
        bare = {n.removeprefix(prefix): t.clone() for n, t in state.items() if family == "llama" or "lm_head" not in n}
        save_file(bare | {"h.0.attn.bias": torch.ones(1, 1, 3, 3)}, source / "model.safetensors")
    tokens = torch.randint(VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(1))
    assert main(["import", str(source), str(run), "--format", "hf", "--model.sequence", "20"]) == 0
    torch.testing.assert_close(load(run)(tokens), model(tokens).logits, rtol=1e-5, atol=1e-5)
    (run / "tokenizer.json").write_text('{"of": "the run"}')
    assert main(["export", str(run), str(out), "--format", "hf", "--shard-size", "30KB"]) == 0
    assert (out / "tokenizer.json").read_text() == '{"of": "the run"}'
    shards = sorted(out.glob("model-*.safetensors"))
    assert len(shards) > 3 and json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    for shard in shards:
        tensors = load_file(shard)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 30_000
    back = AutoModelForCausalLM.from_pretrained(out).eval()
    assert back.config.model_type == ("llama" if family == "mistral" else family)
    assert torch.equal(back(tokens).logits, model(tokens).logits)


def test_model_with_fewer_positions_than_the_default_sequence_is_imported(tmp_path, capsys, forked):
    import mpitrain as mt

    source, run = tmp_path / "gpt2", tmp_path / "run"
    save_tiny("gpt2", source, n_positions=24)
    message = refusal(capsys, "import", source, run, "--format", "hf", "--model.sequence", "25")
    assert "model.sequence 25 is longer than model.max_positions 24" in message and not (run / "config.toml").exists()
    assert main(["import", str(source), str(run), "--format", "hf"]) == 0
    assert load(run)(torch.zeros(1, 24, dtype=torch.long)).shape == (1, 24, VOCABULARY)
    assert mt.load_model(run).positions.weight.shape[0] == 24
    (tmp_path / "tokens.txt").write_text("one two three\n" * 200)
    data = tmp_path / "data"
    assert forked.run("data", "prepare", tmp_path / "tokens.txt", "--out", data).returncode == 0
    settings = ("--data.path", data, "--model.vocabulary", 256, "--train.steps", 1, "--train.batch", 2)
    settings += ("--model.positions", "learned", "--model.max_positions", 24)
    done = forked.run("train", "--run.dir", tmp_path / "new", *settings)
    assert done.returncode == 0, done.stderr
    assert Config.from_args([str(tmp_path / "new/config.toml")]).model.sequence == 24


WRONG = [
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling of kind 'yarn'"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1.0}}, "rope_parameters of kind 'linear'"),
    ("llama", {"hidden_act": "relu"}, 'hidden_act "relu"'),
    ("llama", {"head_dim": 16}, "head_dim 16"),
    ("llama", {"mlp_bias": False}, "attention_bias and mlp_bias differ"),
    ("gpt2", {"activation_function": "relu"}, 'activation_function "relu"'),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx true"),
    ("gpt2", {"n_layer": "many"}, "n_layer is 'many'"),
    ("mistral", {"sliding_window": 4096}, "sliding_window 4096"),
    ("qwen2", {"use_sliding_window": True}, "use_sliding_window true"),
    ("qwen3", {"head_dim": None}, "head_dim 128"),
    ("qwen3", {"attention_bias": True}, "attention_bias true"),
    ("qwen3", {"layer_types": ["sliding_attention"] * 4}, 'layer_types ["sliding_attention"'),
    ("qwen3", {"model_type": "qwen3_moe"}, "model_type 'qwen3_moe' is none of gpt2, llama, mistral, qwen2, qwen3; use"),
    ("gpt2", {"model_type": "bert"}, "model_type 'bert' is none of gpt2, llama"),
    ("gpt2", {"quantization_config": {}}, "quantization_config"),
]


@pytest.mark.parametrize(("family", "change", "words"), WRONG)
def test_unsupported_presets_are_refused_by_key(saved, tmp_path, family, change, words):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads((saved[family] / "config.json").read_text()) | change))
    with pytest.raises(InputError) as caught:
        Config.from_args(["--model.preset", str(tmp_path)])
    assert words in str(caught.value) and str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_explicit_settings_override_a_preset(saved):
    section = Config.from_args(["--model.preset", str(saved["llama"] / "config.json"), "--model.layers", "9"]).model
    assert (section.layers, section.kv_heads, section.norm, section.rope_base) == (9, 2, "rmsnorm", 500.0)
    again = Config.from_dict({"model": section.model_dump()}).model
    assert again == section
    with pytest.raises(InputError, match=r"has layers 4, and model\.layers is 9, as all its keys are given"):
        Config.from_dict({"model": section.model_dump() | {"preset": str(saved["llama"])}})


def test_weights_of_another_model_are_refused(saved, tmp_path, capsys):
    run = tmp_path / "run"
    message = refusal(capsys, "import", saved["llama"], run, "--format", "hf", "--model.layers", "3")
    assert "'model.layers.3." in message and "is not in the model" in message
    message = refusal(capsys, "import", saved["gpt2"], run, "--format", "hf", "--model.hidden", "80")
    assert "transformer.h.0.mlp.c_fc.weight is [32, 72] instead of [32, 80]" in message
    message = refusal(capsys, "import", tmp_path, run, "--format", "hf")
    assert "config.json" in message
    plain = tmp_path / "plain.pt"
    torch.save(GPT(256, 1, 16, 2).state_dict(), plain)
    message = refusal(capsys, "import", plain, run, "--model.width", "32", "--model.layers", "1")
    assert "embedding.weight is [256, 16] instead of [256, 32]" in message and not (run / "config.toml").exists()
    narrow = ["--model.width", "16", "--model.layers", "1", "--model.heads", "2"]
    assert main(["import", str(plain), str(run), *narrow]) == 0
    assert Config.from_args([str(run / "config.toml")]).model.width == 16
    message = refusal(capsys, "export", run, tmp_path / "out", "--format", "hf")
    assert "layernorm, positions rotary, mlp gelu is neither" in message and not (tmp_path / "out").exists()
    (tmp_path / "known").mkdir()
    (tmp_path / "known/config.toml").write_text("model.width = 32\n")
    message = refusal(capsys, "import", plain, tmp_path / "known")
    assert "blocks.1." in message or "is [256, 16] instead of [256, 32]" in message
