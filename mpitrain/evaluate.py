"""`mpirun -n N python -m mpitrain.evaluate RUN [--data PATH] [--section.key value]...`: metrics of a checkpoint.

RUN is a run folder, which is only read, or one of its checkpoints. Settings such as --parallel.tensor 2 determine how
the ranks share the work; the layout of the run is not used.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mpitrain import early
from mpitrain.errors import EXIT_DONE, InputError, echo, refusal
from mpitrain.inference.commands import add_trust, parse
from mpitrain.storage.disk import reason, replacing, write_whole
from mpitrain.storage.text import align_rows, counted, with_spaces

if TYPE_CHECKING:
    from mpitrain.comm import Communicator
    from mpitrain.trainer.held_out.evaluating import Evaluation


def main(argv: Sequence[str] | None = None, world: Communicator | None = None) -> int:
    """Evaluate a checkpoint as requested by the command line. Collective.

    Args:
        argv: Arguments; None for those of the process.
        world: Ranks that take part; None for all ranks of the job.

    Returns:
        Exit code.
    """
    words, flags = _split_arguments(list(sys.argv[1:] if argv is None else argv))
    read = early.read_arguments(lambda: _options(words)) if world is None else None
    with early.without_collecting():
        from mpitrain.comm import init
        from mpitrain.trainer.held_out.evaluating import Evaluator, checkpoint_of

    world = world or init()
    options = read or _options(words)
    # as strings, which can be sent to all ranks; "" stands for None
    paths = world.on_root(
        lambda: [str(p or "") for p in checkpoint_of(options.run, best=options.best, step=options.step)]
    )
    options.run, options.checkpoint = Path(paths[0]), Path(paths[1]) if paths[1] else None
    result = Evaluator(options, flags, world).evaluation()
    world.on_root(lambda: _report(result, options))
    return EXIT_DONE


def _options(words: Sequence[str]) -> argparse.Namespace:
    """Return the command's own arguments. Raises InputError on all ranks if they are wrong."""
    options = parse(make_parser(), words)
    if options.best and options.step is not None:
        raise refusal("--best and --step each name a checkpoint; use only one of them")
    if options.confusion is not None and options.confusion.suffix != ".csv":
        raise refusal(f"--confusion {options.confusion} is not the name of a table; use a name that ends in .csv")
    return options


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = early.Parser(
        "evaluate",
        usage="mpirun -n N python -m mpitrain.evaluate RUN [options] [--section.key value]...",
        description="Measure a checkpoint on a data set: the loss and the task's metrics, the same on any layout.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="run folder, or one of its checkpoint folders step-...")
    add("--data", metavar="PATH", help="data set of the same kind as in training [data.path of the run]")
    add("--split", choices=("held_out", "train"), default="held_out", help="split of the data set [held_out]")
    add("--samples", type=early.positive_integer, metavar="N", help="largest number of samples, spread evenly [all]")
    add("--best", action="store_true", help="use the checkpoint kept by checkpoint.best [the newest]")
    add("--step", type=int, metavar="N", help="use the checkpoint of this step [the newest]")
    add("--confusion", type=Path, metavar="FILE.csv", help="write the confusion matrix of the classes")
    add_trust(parser)
    add("--json", type=Path, metavar="FILE", help="write all metrics to this file")
    return parser


def _split_arguments(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the command's own arguments, and the settings (--section.key value) among the words."""
    own_words, flags = list[str](), list[str]()
    while words:
        word = words.pop(0)
        name, equals, _ = word.partition("=")
        if not (name.startswith("--") and "." in name):
            own_words.append(word)
            continue
        flags.append(word)
        if not equals and words:
            flags.append(words.pop(0))
    return own_words, flags


def _report(evaluation: Evaluation, options: argparse.Namespace) -> None:
    """Print the metrics and write the requested files, on one rank."""
    split = options.split.replace("_", "-")
    samples = counted(evaluation.samples, f"{split} sample")
    echo(f"{evaluation.checkpoint} on {samples} of {evaluation.data or 'data.path'}")
    echo(align_rows([(with_spaces(name), f"{value:.6g}") for name, value in evaluation.figures.items()]))
    counts: list[list[int]] = evaluation.confusion.tolist() if evaluation.confusion is not None else []
    values = {
        "checkpoint": str(evaluation.checkpoint),
        "step": evaluation.step,
        "data": evaluation.data,
        "split": options.split,
    }
    values |= {"samples": evaluation.samples}
    values |= {name: value if math.isfinite(value) else None for name, value in evaluation.figures.items()}
    values |= {"classes": list(evaluation.classes), "confusion": counts} if evaluation.confusion is not None else {}
    try:
        if options.confusion is not None:
            with replacing(options.confusion) as aside, open(aside, "w", newline="", encoding="utf-8") as file:
                table = csv.writer(file)  # a line for each true class, a column for each predicted class
                table.writerow(["true \\ predicted", *evaluation.classes])
                table.writerows([name, *row] for name, row in zip(evaluation.classes, counts, strict=True))
        if options.json is not None:
            write_whole(options.json, json.dumps(values, allow_nan=False) + "\n")
    except OSError as error:
        raise InputError(f"{error.filename} cannot be written: {reason(error)}; choose another file") from None


if __name__ == "__main__":
    sys.exit(main())
