"""From JSON lines to a model in transformers, and from there to a model that answers prompts; each step is a command.

JSON lines -> tokenizer -> data set -> training on four ranks -> evaluate -> generate -> export -> transformers
                                                              prompts with completions -> import -> train -> predict
"""

from __future__ import annotations

import json
import shlex

import numpy as np
import pytest
import torch
from support import train_command
from warm import job

from mpitrain.data import open_dataset

SEQUENCE = 32
SENTENCE = "ranks gather sums while one node waits and another sends its share of every bucket along the ring"
WORDS = SENTENCE.split()
MODEL = "--model.layers 2 --model.width 32 --model.heads 4 --model.kv_heads 2 --model.norm rmsnorm --model.mlp swiglu"
TRAIN = f"""--run.dir runs/mine --data.path data/mine --model.sequence {SEQUENCE} {MODEL} --model.bias false
    --train.steps 40 --train.batch 16 --optim.lr 0.02 --checkpoint.every 0 --checkpoint.best held_out_loss
    --parallel.tensor 2 --parallel.zero 2"""
TUNE = f"--data.path data/pairs --model.sequence {SEQUENCE} --train.steps 4 --train.batch 8 --optim.lr 0.01"


@pytest.fixture
def typed(forked, tmp_path):
    """Return a function that runs a command of mpitrain, which must succeed, and returns its output."""

    def run(words: str) -> str:
        ended = forked.run(*shlex.split(words), cwd=tmp_path)
        assert ended.returncode == 0, (words, ended.stderr)
        return ended.stdout

    return run


def write_texts(folder):
    """Write a file of JSON lines with texts, and one with prompts and completions."""
    draw = np.random.default_rng(1)
    texts = [" ".join(WORDS[i] for i in draw.integers(0, len(WORDS), 12)) + "." for _ in range(300)]
    (folder / "mine.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    pairs = [{"prompt": f"{word}?", "completion": f" {other}."} for word in WORDS for other in WORDS[:9]]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


@pytest.mark.timeout(300)
def test_a_model_of_my_text_works_in_transformers_and_can_be_tuned(typed, tmp_path):
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    write_texts(tmp_path)
    typed("data tokenizer mine.jsonl --vocabulary 300 --out mine.json")
    typed("data prepare mine.jsonl --tokenizer mine.json --out data/mine --held-out 0.1")
    trained = job(4, train_command(*shlex.split(TRAIN)), timeout=80, cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    typed("evaluate runs/mine --json mine-figures.json")
    prompt = "ranks gather"
    ours = typed(f"generate runs/mine --prompt {prompt!r} --tokens 20 --temperature 0")
    typed("checkpoint export runs/mine theirs --format hf")

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", local_files_only=True).eval()
    assert theirs.config.model_type == "llama"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "theirs/tokenizer.json"))
    tokens = tokenizer(prompt, return_tensors="pt").input_ids
    generated = theirs.generate(tokens, max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert ours == tokenizer.decode(generated[0], skip_special_tokens=True) + "\n" and len(ours) > len(prompt) + 20
    held_out = open_dataset(tmp_path / "data/mine", "held_out", sequence=SEQUENCE)
    x, y = map(torch.from_numpy, held_out.read(np.arange(len(held_out))))
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(theirs(x).logits.flatten(0, 1), y.flatten())
    figures = json.loads((tmp_path / "mine-figures.json").read_text())
    assert figures["loss"] == pytest.approx(float(loss), rel=1e-4) and 0 < figures["loss"] < np.log(300) / 2
    assert figures["samples"] == len(held_out)

    typed(
        f"data prepare pairs.jsonl --prompt prompt --tokenizer theirs/tokenizer.json --pack {SEQUENCE} --out data/pairs"
    )
    typed(f"checkpoint import theirs runs/tuned --format hf {TUNE}")
    typed("train runs/tuned/config.toml")
    typed("evaluate runs/tuned --split train --json tuned-figures.json")
    typed("predict runs/tuned data/pairs --out pairs.npz")
    count = len(open_dataset(tmp_path / "data/pairs", sequence=SEQUENCE))
    with np.load(tmp_path / "pairs.npz") as predictions:  # a sample's loss is the mean over its completions' tokens
        by_sample = -predictions["log_probability"][:count] / predictions["tokens"][:count]
    tuned = json.loads((tmp_path / "tuned-figures.json").read_text())
    assert tuned["loss"] == pytest.approx(by_sample.mean(), rel=1e-4) and tuned["samples"] == count
    typed("predict runs/tuned pairs.jsonl --prompt prompt --out answers.jsonl")
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == len(WORDS) * 9
