"""`python -m mpitrain.predict RUN INPUT --out FILE`: predictions of a trained model for samples.

The lines of FILE (.csv, .jsonl or .npz) are in the order of INPUT. A single process needs no MPI. With several ranks
(`mpirun -n 4 python -m mpitrain.predict ...`) each has the whole model and processes a part of the samples.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mpitrain.early import positive_integer
from mpitrain.errors import EXIT_DONE, refusal
from mpitrain.inference.commands import Job, add_run, parse, run_as_job

if TYPE_CHECKING:
    from mpitrain.inference.inputs import Samples
    from mpitrain.loading import SavedModel


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    arguments = parse(make_parser(), argv)
    return run_as_job(lambda job: _run(arguments, job))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    about = "Predict samples with a trained model: probabilities of classes, numbers, or probabilities of texts."
    parser = argparse.ArgumentParser(prog="python -m mpitrain.predict", description=about)
    add_run(parser)
    add = parser.add_argument
    kinds = "data set folder (train, then held-out samples), .npy, .npz, table (.csv, .parquet), image or folder of "
    kinds += "images; for a model of text: .txt with one text per line, or JSON lines"
    add("input", type=Path, metavar="INPUT", help=kinds)
    add("--out", type=Path, required=True, metavar="FILE", help="a new .csv, .jsonl or .npz file")
    add("--batch", type=positive_integer, default=64, metavar="N", help="samples per rank and batch [64]")
    bad = "skip and count images that cannot be read, and table rows that do not fit"
    add("--skip-bad", action="store_true", help=bad)
    keep = "tables: columns to copy to the output, such as an id"
    add("--keep", type=_names, default=(), metavar="A,B", help=keep)
    add("--text", default="text", metavar="FIELD", help="JSON lines: field with the text [text]")
    prompt = "JSON lines: field with a prompt; only the completion is predicted"
    add("--prompt", metavar="FIELD", help=prompt)
    add("--completion", metavar="FIELD", help="with --prompt: field with the completion [completion]")
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(str.strip, text.split(","))))


def _open_samples(arguments: argparse.Namespace, saved: SavedModel) -> Samples:
    """Return the samples to predict."""
    from mpitrain.data.sources.documents import TextFields
    from mpitrain.inference.inputs import Texts, open_samples
    from mpitrain.inference.prompts import codec_of, is_texts

    about = saved.description
    if about.kind != "tokens" or not is_texts(arguments.input):
        return open_samples(arguments.input, about, skip_bad=arguments.skip_bad, keep=arguments.keep)
    if arguments.keep:
        raise refusal("--keep is for columns of a table, but the model was trained on text; remove it")
    fields = TextFields(arguments.text, arguments.prompt, arguments.completion)
    return Texts(arguments.input, about, codec_of(saved.tokenizer, about.vocabulary or 0, saved.run), fields)


def _run(arguments: argparse.Namespace, job: Job) -> int:
    """Predict all samples. Collective over the ranks of the job."""
    import numpy as np
    import torch

    from mpitrain.inference.predictions import format_of, new_file, require_file
    from mpitrain.loading import load_folder

    job.on_root(lambda: require_file(arguments.out))
    load = partial(load_folder, trust=arguments.trust)
    task, saved = job.first_complete(
        arguments.run, lambda folder: job.run_agreed(partial(load, folder)), best=arguments.best
    )
    samples = job.run_agreed(lambda: _open_samples(arguments, saved))
    table_format, device = format_of(saved.description), job.device(arguments.device)
    module = task.module.to(device)

    def rows_of(lo: int, hi: int) -> np.ndarray:
        """Return one row for each sample that was not left out: its number, followed by its prediction.

        Args:
            lo, hi: Range [lo, hi) of sample numbers; may be empty.
        """
        numbers, x, y = samples.read(lo, hi) if lo < hi else (np.empty(0), np.empty(0), None)
        if len(numbers) == 0:
            return np.empty((0, 1 + table_format.width))
        with torch.no_grad():
            output = module(torch.from_numpy(np.ascontiguousarray(x)).to(device))
            rows = table_format.rows(output, None if y is None else torch.from_numpy(y).to(device)).cpu().numpy()
        return np.concatenate([numbers[:, None].astype(np.float64), rows], 1)

    with ExitStack() as stack:
        write = (
            stack.enter_context(new_file(arguments.out, table_format, samples.names, samples.extra_columns))
            if job.first
            else None
        )
        per_round, count = arguments.batch * job.columns, 0
        for first in range(0, len(samples), per_round):
            end = min(first + per_round, len(samples))
            lo = min(first + arguments.batch * job.column, end)
            hi = min(lo + arguments.batch, end)
            all_rows = job.gather_rows(job.run_agreed(partial(rows_of, lo, hi)))
            count += len(all_rows)
            if write is not None:
                write(all_rows[:, 0].astype(np.int64).tolist(), all_rows[:, 1:])
        if count == 0 and arguments.skip_bad:
            raise refusal(f"{arguments.input} has only {samples.left_out_kind}; use others")
    if bad := sorted(
        set(job.gather(samples.left_out))
    ):  # every rank reads the whole table, so ranks may report the same row
        job.print_message(f"left out {len(bad)} {samples.left_out_kind}, such as {bad[0][1]}")
    job.print_message(f"{count} samples in {arguments.out}")
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
