"""`python -m mpitrain.generate RUN --prompt TEXT`: a trained model goes on from prompts.

Text goes to standard output and all else to standard error: of one prompt as it is made, of several as JSON lines. One
process needs no MPI. A model that is too large for a rank is divided as in training:

    mpirun -n 2 python -m mpitrain.generate RUN --prompt TEXT --parallel.tensor 2
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mpitrain.early import whole_number
from mpitrain.errors import EXIT_DONE, printable, refusal
from mpitrain.inference.commands import Job, add_run, json_lines, parse, require_new, run_as_job
from mpitrain.monitor.progress import terminal_behind

if TYPE_CHECKING:
    from mpitrain.inference.placing import LanguageModel
    from mpitrain.inference.prompts import TextCodec, TextDecoder


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line says; returns the exit code."""
    arguments = parse(_parser(), argv)
    return run_as_job(lambda job: _run(arguments, job), pipeline=arguments.pipeline, tensor=arguments.tensor)


def _parser() -> argparse.ArgumentParser:
    about = "a trained model of text goes on from prompts; text to standard output"
    parser = argparse.ArgumentParser(prog="python -m mpitrain.generate", description=about)
    add_run(parser)
    add = parser.add_argument
    add("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be repeated")
    prompts = 'prompts, one a line; of FILE.jsonl what each line has under "prompt"'
    add("--prompts", type=Path, metavar="FILE", help=prompts)
    add("--tokens", type=whole_number, default=128, metavar="N", help="tokens to be made, at most [128]")
    divided = "what scores are divided by; 0: the likeliest token each time [1]"
    add("--temperature", type=float, default=1.0, metavar="T", help=divided)
    add("--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest tokens; 0: all [0]")
    nucleus = "draw from the fewest likeliest tokens that have probability P together [1]"
    add("--top-p", type=float, default=1.0, metavar="P", help=nucleus)
    least = "draw from tokens at least P times as likely as the likeliest [0]"
    add("--min-p", type=float, default=0.0, metavar="P", help=least)
    penalty = "what scores of tokens that the text has already are divided by, negative ones multiplied [1]"
    add("--repetition-penalty", type=float, default=1.0, metavar="R", help=penalty)
    add("--stop", action="append", default=[], metavar="TEXT", help="end a text before this one; may be repeated")
    seed = "of what is drawn; a prompt goes on alike beside any others [1]"
    add("--seed", type=int, default=1, metavar="S", help=seed)
    lines = 'write {"prompt", "text", "tokens", "ended"} of each prompt there; else to standard output'
    add("--out", type=Path, metavar="FILE.jsonl", help=lines)
    layers, blocks = "ranks that share the layers of the model [1]", "ranks that share its blocks, as stages [1]"
    add("--parallel.tensor", dest="tensor", type=int, default=1, metavar="N", help=layers)
    add("--parallel.pipeline", dest="pipeline", type=int, default=1, metavar="N", help=blocks)
    return parser


def _run(given: argparse.Namespace, job: Job) -> int:
    """Let all prompts go on. Collective over the ranks of the job."""
    from mpitrain.inference import placing
    from mpitrain.inference.generation import Draws, Generation, Sampling, StopWatch

    sampling = Sampling(given.temperature, given.top_k, given.top_p, given.min_p, given.repetition_penalty)
    stops = tuple(given.stop)
    if "" in stops:
        raise refusal("--stop '': an empty text is at once there; give a text to stop at, or leave it out")
    texts: list[str] = job.decided(lambda: _texts(given))
    model = placing.placed(given.run, job, job.device(given.device), best=given.best, trust=given.trust)
    if model.remark:
        job.say(model.remark)
    codec, prompts = job.agreed(lambda: _encoded(texts, model))

    def watch() -> StopWatch:
        return StopWatch(codec.decoder(), stops)

    generation = Generation(model, sampling, given.tokens, watch if stops else None)
    if min(map(generation.left, prompts)) < given.tokens:
        job.say(f"the model has positions for {model.longest} tokens, so that texts end there")
    stream = len(texts) == 1 and not given.out
    screen = _Screen(texts[0], watch()) if stream and job.first else None
    mine = range(job.column, len(prompts), job.columns)
    made = generation.run(prompts, Draws(given.seed, prompts), mine, screen.add if screen is not None else None)
    if screen is not None:
        screen.end()
    found = job.gathered([(number, made[number].tokens, made[number].ended) for number in mine])
    if job.first and not stream:
        texts_of = {n: {"text": watch().decode(of), "tokens": len(of), "ended": ended} for n, of, ended in found}
        json_lines(given.out, ({"prompt": text} | texts_of[number] for number, text in enumerate(texts)))
    return EXIT_DONE


def _texts(arguments: argparse.Namespace) -> list[str]:
    """The prompts that the command line and its file give."""
    from mpitrain.inference.prompts import read_prompts

    if arguments.out is not None:
        require_new(arguments.out)
    found = [*arguments.prompt, *(read_prompts(arguments.prompts) if arguments.prompts is not None else [])]
    if not found:
        raise refusal("nothing to go on from; give --prompt TEXT, or --prompts FILE")
    return found


def _encoded(texts: Sequence[str], model: LanguageModel) -> tuple[TextCodec, list[list[int]]]:
    """What makes tokens of text, and the tokens of the prompts. An empty one begins a document, if that can be said."""
    from mpitrain.inference.prompts import codec_of

    codec = codec_of(model.saved.tokenizer, model.vocabulary, model.saved.run)
    prompts = []
    for text in texts:
        tokens = codec.encode(text) or ([] if model.end is None else [model.end])
        if not tokens:
            raise refusal("an empty prompt, and the data have no token that ends a document to begin with; give a text")
        if max(tokens) >= model.vocabulary:
            raise refusal(
                f"the prompt {text[:40]!r} has the token {max(tokens)}, and the model was trained on "
                f"{model.vocabulary}; put the tokenizer.json of its data into {model.saved.run}"
            )
        if model.longest is not None and len(tokens) >= model.longest:
            raise refusal(
                f"the prompt {text[:40]!r} has {len(tokens)} tokens, and the model has positions for {model.longest}; "
                "give a shorter one"
            )
        prompts.append(tokens)
    return codec, prompts


class _Screen:
    """Standard output, where a text appears as it is made."""

    def __init__(self, prompt: str, decoder: TextDecoder) -> None:
        self._decoder = decoder
        self._on_terminal = terminal_behind(sys.stdout.fileno()) is not None  # a file gets the text as it is
        self._write(prompt)

    def add(self, number: int, token: int) -> None:
        """The next token of the text."""
        self._write(self._decoder.add(token))

    def end(self) -> None:
        """The text is at its end."""
        self._write(self._decoder.finish() + "\n")

    def _write(self, text: str) -> None:
        from mpitrain.inference.prompts import utf8

        if text:
            sys.stdout.buffer.write(utf8(printable(text, None, as_text=True) if self._on_terminal else text))
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
