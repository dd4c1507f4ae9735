"""Text that goes on from prompts, by `mpitrain.generate` and by transformers' model.generate: tokens a second.

Both load the same model with random weights from one Hugging Face folder, once with GPT-2's architecture and once with
Llama's. They continue prompts of 32 tokens by 128 tokens, greedily and with a cache of keys and values: one prompt
alone, and 8 in one batch. If their tokens differ, the benchmark fails. When a contender's turn comes, its weights are
in main memory, as far as the other contender has displaced them from the caches.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.runner.jobs import BenchmarkParser, run, summaries, timed
from benchmarks.runner.report import Report, ReportTable, target_of
from mpitrain.comm import Communicator
from mpitrain.errors import CommunicationError, InputError

FAMILIES = ("gpt2", "llama")
OURS, THEIRS = "mpitrain", "transformers"
PROMPTS = (1, 8)
TARGET = 1.0  # target: tokens per second over transformers'
_USUAL = {"layers": 6, "width": 384, "vocabulary": 8192, "prompt": 32, "tokens": 128}
_QUICK = {"layers": 2, "width": 128, "vocabulary": 512, "prompt": 8, "tokens": 16}
_HEAD = 64  # features
_STD = 0.05  # of random weights; smaller weights give nearly equal scores, where rounding decides the token
Tokens = list[list[int]]


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and return its exit code."""
    what, of = "Compare text generation with transformers' model.generate.", "one model and number of prompts"
    parser = BenchmarkParser("generate", what, "1", repeats=7, seconds=120.0, of=of, quick=(3, 120.0))
    return run(parser, measure, report, arguments)


def measure(world: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """Time both contenders for each family and number of prompts. Collective.

    Args:
        world: Communicator of all ranks.
        options: Options of the command.

    Returns:
        The sizes, and median and best seconds by family, number of prompts and contender.
    """
    if world.size > 1:
        raise InputError("transformers generates in one process; use 1 rank", agreed=True)
    sizes = _QUICK if options.quick else _USUAL
    seconds: dict[str, Any] = {}
    for family in FAMILIES:
        generators = _generators(family, sizes)
        for count in PROMPTS:
            source = torch.Generator().manual_seed(2)
            prompts = torch.randint(sizes["vocabulary"], (count, sizes["prompt"]), generator=source)
            calls = {name: partial(generate, prompts) for name, generate in generators.items()}
            ours, theirs = (call() for call in calls.values())
            if ours != theirs:
                raise CommunicationError(f"{family}, {count} prompts: {OURS} and {THEIRS} generate different tokens")
            times = timed(world, f"{family}, {count} prompts", calls, options)
            seconds.setdefault(family, {})[str(count)] = summaries(times)
    return {"sizes": sizes, "seconds": seconds}


def _generators(family: str, sizes: dict[str, int]) -> dict[str, Callable[[torch.Tensor], Tokens]]:
    """Return a function per contender that continues prompts [count, positions]; both have the same weights.

    Args:
        family: Model family, "gpt2" or "llama".
        sizes: Sizes of the model and numbers of tokens, as in `_USUAL`.
    """
    import transformers

    from mpitrain.inference.commands import Job
    from mpitrain.inference.generation import Draws, Generation, Sampling
    from mpitrain.inference.placing import load_language_model
    from mpitrain.models.hugging_face import quiet
    from mpitrain.trainer.weights import import_folder

    tokens = sizes["tokens"]
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory(prefix="mpitrain-bench-") as parent, quiet():
        folder = Path(parent)
        model = transformers.AutoModelForCausalLM.from_config(_configuration(family, sizes)).float().eval()
        model.save_pretrained(folder / "model")
        import_folder(folder / "model", folder / "run", ["--model.sequence", str(sizes["prompt"] + tokens)])
        placed_model = load_language_model(folder / "run", Job(), torch.device("cpu"))
    generation = Generation(placed_model, Sampling(temperature=0), tokens)

    def ours(prompts: torch.Tensor) -> Tokens:
        token_lists = prompts.tolist()
        return [continued.tokens for continued in generation.run(token_lists, Draws(1, token_lists))]

    def theirs(prompts: torch.Tensor) -> Tokens:
        tokens_out = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=tokens, do_sample=False, use_cache=True
        )
        return tokens_out[:, prompts.shape[1] :].tolist()

    return {OURS: ours, THEIRS: theirs}


def _configuration(family: str, sizes: dict[str, int]) -> Any:
    """Return the transformers configuration of a family, with the names of sizes that all families accept."""
    import transformers

    width, heads = sizes["width"], sizes["width"] // _HEAD
    values: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id"))
    values |= {"vocab_size": sizes["vocabulary"], "max_position_embeddings": sizes["prompt"] + sizes["tokens"]}
    values |= {"hidden_size": width, "num_hidden_layers": sizes["layers"], "num_attention_heads": heads}
    if family == "llama":  # half as many heads for keys and values
        values |= {"num_key_value_heads": heads // 2, "intermediate_size": 8 * width // 3}
    return transformers.AutoConfig.for_model(family, initializer_range=_STD, **values)


# -- the report --------------------------------------------------------------------------------------------


def report(results: dict[int, Any], options: argparse.Namespace) -> Report:
    """Return the report with table and targets.

    Args:
        results: Results of `measure`, by number of ranks.
        options: Options of the command.
    """
    [result] = results.values()
    sizes, rows, targets = result["sizes"], [], []
    for family, by_count in result["seconds"].items():
        for count, seconds in by_count.items():
            rates = [int(count) * sizes["tokens"] / seconds[name]["median"] for name in (OURS, THEIRS)]
            ratio = rates[0] / rates[1]
            rows.append((family, int(count), *rates, ratio))
            what = f"{family}, prompts at a time {count}: tokens per second, relative to transformers"
            targets.append(target_of(what, ratio, least=TARGET, where=" times"))
    note = (
        f"{sizes['layers']} layers of width {sizes['width']}, vocabulary {sizes['vocabulary']}; prompts of "
        f"{sizes['prompt']} tokens, {sizes['tokens']} new tokens, fp32, greedy; median tokens per second."
    )
    columns = ("model", "prompts", OURS, THEIRS, "ratio")
    table = ReportTable("Tokens per second", columns, rows, note)
    return Report("Generation", [table], targets)
