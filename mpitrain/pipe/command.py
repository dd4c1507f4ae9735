"""`python -m mpitrain.report schedule`: what a schedule would do, in text or as a picture."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from mpitrain.pipe.draw import picture, summary, text
from mpitrain.pipe.schedules import SCHEDULES, make_schedule
from mpitrain.pipe.simulate import Costs, simulate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    names = [*SCHEDULES, "terapipe"]
    parser.add_argument("--schedule", choices=names, default="1f1b")
    parser.add_argument("--stages", type=int, default=4, metavar="P", help="pipeline ranks [4]")
    parser.add_argument("--microbatches", type=int, default=8, metavar="M", help="[8]")
    parser.add_argument("--chunks", type=int, metavar="V", help="stages a rank [interleaved: 2, others: 1]")
    parser.add_argument("--slices", type=int, metavar="S", help="of the sequence, for terapipe [4]")
    parser.add_argument(
        "--costs", type=_costs, default=Costs(), metavar="F,I,W,C", help="of a step's kinds and a message [1,1,1,0]"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="a picture (.png, .svg, .pdf) instead of text")


def run(arguments: argparse.Namespace) -> None:
    """Print a schedule, or write a picture of it. Raises InputError for what cannot be made or drawn."""
    chunks = arguments.chunks or (2 if arguments.schedule == "interleaved" else 1)
    slices = arguments.slices or (4 if arguments.schedule == "terapipe" else 1)
    schedule = make_schedule(arguments.schedule, arguments.stages, arguments.microbatches, chunks, slices)
    drawn = simulate(schedule, arguments.costs)
    print(summary(drawn))
    if arguments.out is None:
        print(text(drawn, shutil.get_terminal_size((120, 24)).columns))
    else:
        picture(drawn, arguments.out)
        print(f"picture: {arguments.out}")


def _costs(given: str) -> Costs:
    """The argument of --costs."""
    try:
        forward, input_, weight, message = (float(part) for part in given.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError("give four numbers: forward, input, weight, message") from None
    if min(forward, input_, weight) <= 0 or message < 0:
        raise argparse.ArgumentTypeError("costs of steps must be above 0, that of a message not below")
    return Costs(forward, input_, weight, message)
