"""Hugging Face models from folders, without a network: detection, blocks, and refusals."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

import hugging_face
import numpy as np
import pytest
import torch
from torch import nn

from mpitrain.config.settings import Config
from mpitrain.errors import InputError
from mpitrain.models import build_model
from mpitrain.pipe.partition import listed_blocks
from mpitrain.tensor import plan_for

INTEGERS = np.dtype("int64")


@dataclass(frozen=True)
class Data:
    kind: str = "tokens"
    x_shape: tuple[int, ...] = (16,)
    x_dtype: np.dtype = INTEGERS
    y_shape: tuple[int, ...] = ()
    vocabulary: int | None = 256
    classes: tuple[str, ...] | None = None
    apart: int | None = None
    masked: bool = False


TEXT = Data()
IMAGES = Data("arrays", (12, 12), np.dtype("float32"), vocabulary=None, classes=("a", "b", "c"))
ROWS = Data("arrays", (16,), vocabulary=None, classes=("a", "b"))


def build(folder, data=TEXT, seed=0, **model):
    torch.manual_seed(seed)
    return build_model(Config.from_dict({"model": {"factory": f"hf:{folder}", **model}}).model, data)


@pytest.fixture(scope="module", params=["gpt2", "llama", "mistral", "qwen2", "qwen3"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    return hugging_face.save(tmp_path_factory.mktemp("hf") / family, family)


def test_a_folder_gives_the_model_that_transformers_loads_from_it(family, folder):
    module, theirs = build(folder).module, hugging_face.language_model(family)
    x = torch.randint(256, (3, 16))
    assert torch.equal(module(x), theirs(x).logits)
    assert list(module.state_dict()) == list(theirs.state_dict())


def test_blocks_in_order_equal_the_model_bit_by_bit(family, folder):
    module = build(folder).module
    x = torch.randint(256, (3, 16))
    out, names = x, set()
    for name, block in listed_blocks(module):
        out = block(out)
        names.update(each for each, _ in block.named_parameters(prefix=name, remove_duplicate=False))
    assert torch.equal(out, module(x))
    assert names == {name for name, _ in module.named_parameters(remove_duplicate=False)}
    out.sum().backward()
    assert all(p.grad is not None for p in module.parameters())
    norms = {"heads"} if family == "qwen3" else set()
    assert {"vocabulary", "column", "row"} | norms == set(plan_for(module).values())


def test_prompts_are_masked_and_samples_count_equally(family, folder):
    task = build(folder, Data(masked=True))
    x, y = torch.randint(256, (2, 16)), torch.randint(256, (2, 16))
    y[0, :12] = -100
    scores = task.module(x)
    each = [nn.functional.cross_entropy(scores[n], y[n], ignore_index=-100) for n in range(2)]
    torch.testing.assert_close(task.loss(scores, y), (each[0] + each[1]) / 2)
    assert list(task.module.state_dict()) == list(hugging_face.language_model(family).state_dict())


def test_a_configuration_without_weights_gives_random_weights_of_the_seed(tmp_path):
    hugging_face.configuration("gpt2", architectures=["GPT2LMHeadModel"]).save_pretrained(tmp_path)
    first, same, other = (build(tmp_path, seed=seed).module.state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["transformer.wte.weight"], other["transformer.wte.weight"])
    changed = build(tmp_path, options={"n_layer": 1}).module
    assert len(changed.transformer.h) == 1


def test_weights_of_torch_save_are_read_without_running_code(tmp_path):
    model = hugging_face.language_model("gpt2")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert torch.equal(build(tmp_path).module.lm_head.weight, model.lm_head.weight)
    ran = tmp_path / "ran"

    class Runs:
        def __reduce__(self):
            return open, (str(ran), "w")

    torch.save(model.state_dict() | {"lm_head.weight": Runs()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"^model.factory hf:.*fix this one$") as refused:
        build(tmp_path)
    assert "\n" not in str(refused.value) and not ran.exists()


def test_an_image_classifier_gets_a_head_for_the_classes_of_the_data(tmp_path):
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = ViTConfig(**sizes, image_size=12, patch_size=4, num_labels=7)
    theirs = ViTForImageClassification(config)
    theirs.save_pretrained(tmp_path)
    task = build(tmp_path, IMAGES)
    assert torch.equal(task.module.state_dict()["vit.layernorm.weight"], theirs.vit.layernorm.weight)
    scores = task.module(torch.rand(2, 12, 12))
    assert scores.shape == (2, 3)
    task.loss(scores, torch.tensor([0, 2])).backward()
    with pytest.raises(InputError, match=r"images of 12 x 12, but the data have 8 x 8; .*image_size"):
        build(tmp_path, Data("arrays", (8, 8), classes=("a", "b")))
    with pytest.raises(InputError, match=r"is a ViTForImageClassification, but the data are tokens"):
        build(tmp_path)
    with pytest.raises(
        InputError, match=r"ViT.* cannot be divided, only .*gpt2.*; use parallel.data and parallel.zero"
    ):
        listed_blocks(task.module)
    with pytest.raises(InputError, match=r"set parallel.pipeline and parallel.tensor to 1"):
        plan_for(task.module)


def test_a_sequence_classifier_ignores_padding(tmp_path):
    hugging_face.configuration("gpt2", pad_token_id=255).save_pretrained(tmp_path)
    module = build(tmp_path, ROWS).module.eval()
    x = torch.randint(255, (2, 16))
    x[:, 9:] = 255
    torch.testing.assert_close(module(x), module(x[:, :9]))


def test_unsuitable_models_are_refused_in_one_line(tmp_path, monkeypatch):
    folder = hugging_face.save(tmp_path / "gpt2", "gpt2")

    def refused(match, path=folder, data=TEXT, **model):
        with pytest.raises(InputError, match=match) as error:
            build(path, data, **model)
        assert "\n" not in str(error.value)

    refused("there is no folder 'nowhere'", "nowhere")
    refused("has no config.json", tmp_path)
    refused(
        r"vocabulary of 256, but the data have 257 tokens; prepare them with the tokenizer in",
        data=Data(vocabulary=257),
    )
    refused(r"has 32 positions, but samples have 33 tokens; set model.sequence to 32", data=Data(x_shape=(33,)))
    refused(r"model.options \['n_layers'\] are not keys", options={"n_layers": 3})
    refused(r"takes tokens, or images .* shape \(7, 7, 7, 7\)", data=Data("arrays", (7, 7, 7, 7)))
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/config.json").write_text(json.dumps({"model_type": "no such model"}))
    refused(r"no such model.*; fix its config.json", tmp_path / "odd")
    hugging_face.configuration("gpt2", n_layer=3).save_pretrained(folder)
    refused(r"its weights lack transformer.h.2.attn.c_attn.bias, .* and \d+ more")
    monkeypatch.setitem(sys.modules, "transformers", None)
    refused(r'needs the package transformers; pip install "mpitrain\[hf\]"')


# -- adapters


def test_adapters_are_in_the_chosen_layers_and_start_as_identity(family, folder):
    plain, adapted = build(folder).module, build(folder, lora=4)
    x = torch.randint(256, (2, 16))
    torch.testing.assert_close(adapted.module(x), plain(x))
    trained = {name for name, p in adapted.module.named_parameters() if p.requires_grad}
    assert trained and all(".attn." in name or ".self_attn." in name for name in trained)
    assert adapted.base.names == {name for name, _ in plain.named_parameters()}
    for name, tensor in plain.state_dict().items():
        assert torch.equal(adapted.module.state_dict()[name], tensor)
    few = build(folder, lora=4, lora_targets=["attn.c_proj" if family == "gpt2" else "q_proj"]).module
    assert len([p for p in few.parameters() if p.requires_grad]) == 4


def test_the_built_in_gpt_and_factories_take_adapters():
    torch.manual_seed(0)
    task = build_model(Config.from_dict({"model": {"lora": 2, "width": 16}}).model, TEXT)
    trained = {name.rpartition(".")[0] for name, p in task.module.named_parameters() if p.requires_grad}
    assert trained == {f"blocks.{block}.attention.{layer}" for block in (0, 1) for layer in ("qkv", "out")}
    task.loss(task.module(torch.randint(256, (2, 16))), torch.randint(256, (2, 16))).backward()
    for section, match in (
        ({"lora_targets": ["qvk"]}, r"'qvk' matches no linear layer .* did you mean '"),
        ({"lora_targets": ["head"]}, r"head shares its weight \(embedding.weight and head.weight\); leave it out"),
    ):
        with pytest.raises(InputError, match=match):
            build_model(Config.from_dict({"model": {"lora": 2} | section}).model, TEXT)
    with pytest.raises(InputError, match=r"has no linear layers in modules called attention, .*; name layers"):
        build_model(Config.from_dict({"model": {"lora": 2, "name": "mlp"}}).model, IMAGES)


def test_a_merged_layer_equals_the_layer_with_its_adapter():
    from transformers.pytorch_utils import Conv1D

    from mpitrain.layers.lora import LoraLinear, linear_parts

    for plain in (nn.Linear(6, 5), Conv1D(5, 6)):
        parts = linear_parts(plain)
        layer = LoraLinear(parts.weight, parts.bias, rank=2, alpha=3.0, transposed=parts.transposed)
        nn.init.normal_(layer.lora_b)
        x = torch.randn(4, 6)
        expected = plain(x) + 1.5 * x @ layer.lora_a.t() @ layer.lora_b.t()
        torch.testing.assert_close(layer(x), expected)
        plain.weight = nn.Parameter(layer.merged_weight())
        torch.testing.assert_close(plain(x), expected)
