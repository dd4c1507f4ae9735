"""Pictures of a schedule, drawn by `python -m mpitrain.report schedule`: rows are ranks, columns are time.

    rank 0  F0-F1-......B0----F2-B1----...B2----       F forward, B backward, I and W its halves;
    rank 1  ...F0-B0----F1-B1----F2-B2----......       then the microbatch

Text needs no extra package; a PNG, SVG or PDF needs matplotlib.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mpitrain.errors import InputError
from mpitrain.pipe.schedule import DELAYED, SCHEDULES, Backward, BackwardInput, BackwardWeight, Forward, make_schedule
from mpitrain.pipe.simulate import Costs, Simulation, simulate
from mpitrain.storage.disk import replacing

_LOOKS: dict[type, tuple[str, str, str]] = {  # letter, colour, meaning
    Forward: ("F", "#4c78a8", "forward"),
    Backward: ("B", "#f2a541", "backward"),
    BackwardInput: ("I", "#72b7b2", "backward, inputs"),
    BackwardWeight: ("W", "#b9b9b9", "backward, weights"),
}


def summary(simulation: Simulation) -> str:
    """Return one line with the schedule's numbers, its idle fraction and its microbatches in flight."""
    schedule = simulation.schedule
    slices = f", {schedule.slices} slices" if schedule.slices > 1 else ""
    return (
        f"{schedule.name}: {schedule.ranks} ranks, {schedule.stages} stages, "
        f"{schedule.microbatches // schedule.slices} microbatches{slices}; {simulation.makespan:.4g} units, "
        f"idle {simulation.idle:.1%}, at most {simulation.in_flight:.4g} microbatches in flight"
    )


def text(simulation: Simulation, width: int) -> str:
    """Return a picture in text, one row of characters for each rank.

    A step is shown as its letter (F, B, I, W; lower case for every second stage of a rank), followed by its microbatch
    if there is space.

    Args:
        simulation: Simulated schedule.
        width: Largest number of columns.
    """
    span = simulation.makespan or 1.0
    shortest = min((run.end - run.begin for runs in simulation.runs for run in runs), default=span)
    margin = len(f"rank {simulation.schedule.ranks - 1}  ")
    columns = max(1, min(width - margin, round(3 * span / shortest) if shortest > 0 else width))
    lines = []
    for rank, runs in enumerate(simulation.runs):
        row = ["."] * columns
        for run in runs:
            begin, end = (round(t / span * columns) for t in (run.begin, run.end))
            letter, number = _LOOKS[type(run.step)][0], str(run.step.microbatch)
            if simulation.schedule.stages_of(rank).index(run.step.stage) % 2:
                letter = letter.lower()
            label = letter + number if len(number) < end - begin else letter
            row[begin:end] = label.ljust(end - begin, "-")[: end - begin]
        lines.append(f"{f'rank {rank}':{margin}}" + "".join(row))
    return "\n".join(lines)


@contextmanager
def figure_file(path: Path, width: float, height: float) -> Iterator[Any]:
    """Yield an empty matplotlib figure, and write it to a file on exit.

    Args:
        path: File to write; its suffix selects the format.
        width: Width in inches.
        height: Height in inches.

    Raises:
        InputError: matplotlib is not installed, the file cannot be written, or its suffix is not a picture format.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("a picture needs matplotlib: pip install mpitrain[monitor], or leave out --out") from None
    figure = Figure(figsize=(width, height), layout="constrained")
    yield figure
    try:
        with replacing(path) as aside:
            figure.savefig(aside, dpi=150)
    except (OSError, ValueError) as error:
        raise InputError(f"the picture cannot be written to {path}: {error}; give a file such as picture.png") from None


def picture(simulation: Simulation, figure: Any) -> None:
    """Draw a simulated schedule into a matplotlib figure.

    Args:
        simulation: Simulated schedule.
        figure: Empty `matplotlib.figure.Figure`.
    """
    from matplotlib.patches import Patch

    ranks = simulation.schedule.ranks
    axes = figure.add_subplot()
    room = simulation.makespan * 0.06 / 15  # time as wide as a digit: 0.06 of 15 inches
    for rank, runs in enumerate(simulation.runs):
        stages = simulation.schedule.stages_of(rank)
        for run in runs:
            lasts, colour, label = run.end - run.begin, _LOOKS[type(run.step)][1], str(run.step.microbatch)
            paler = 1.0 - 0.5 * stages.index(run.step.stage) / max(1, len(stages) - 1)  # later stages of a rank
            axes.barh(rank, lasts, left=run.begin, height=0.86, color=colour, alpha=paler, edgecolor="white", lw=0.4)
            if lasts > room * len(label):
                axes.text((run.begin + run.end) / 2, rank, label, ha="center", va="center", fontsize=6)
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_xlim(0, simulation.makespan)
    axes.set_yticks(range(ranks), [f"rank {r}" for r in range(ranks)])
    axes.set_xlabel("time (units)")
    axes.set_title(summary(simulation), loc="left", fontsize=10)
    kinds = dict.fromkeys(type(run.step) for runs in simulation.runs for run in runs)
    patches = [Patch(facecolor=colour, label=meaning) for _, colour, meaning in map(_LOOKS.__getitem__, kinds)]
    axes.legend(
        handles=patches, ncols=len(patches), loc="lower right", bbox_to_anchor=(1, 1), fontsize=8, frameon=False
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line arguments of the command."""
    parser.add_argument("--schedule", choices=[*SCHEDULES, *DELAYED, "terapipe"], default="1f1b")
    parser.add_argument("--stages", type=int, default=4, metavar="P", help="pipeline ranks [4]")
    parser.add_argument("--microbatches", type=int, default=8, metavar="M", help="[8]")
    parser.add_argument("--chunks", type=int, metavar="V", help="stages per rank [interleaved: 2, others: 1]")
    parser.add_argument("--slices", type=int, metavar="S", help="slices of the sequence, for terapipe [4]")
    parser.add_argument(
        "--costs",
        type=_costs,
        default=Costs(),
        metavar="F,I,W,C",
        help="times of forward, input-gradient, weight-gradient and message [1,1,1,0]",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write a picture (.png, .svg, .pdf) instead of text")


def run(arguments: argparse.Namespace) -> None:
    """Print a schedule, or write a picture of it. Raises InputError if it cannot be made or drawn."""
    chunks = arguments.chunks or (2 if arguments.schedule == "interleaved" else 1)
    slices = arguments.slices or (4 if arguments.schedule == "terapipe" else 1)
    schedule = make_schedule(arguments.schedule, arguments.stages, arguments.microbatches, chunks, slices)
    simulation = simulate(schedule, arguments.costs)
    print(summary(simulation))
    if arguments.out is None:
        print(text(simulation, shutil.get_terminal_size((120, 24)).columns))
    else:
        with figure_file(arguments.out, 16, 1.2 + 0.45 * schedule.ranks) as figure:
            picture(simulation, figure)
        print(f"picture: {arguments.out}")


def _costs(text: str) -> Costs:
    """Parse the argument of --costs."""
    try:
        forward, input_, weight, message = (float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError("give four numbers: forward, input, weight, message") from None
    if min(forward, input_, weight) <= 0 or message < 0:
        raise argparse.ArgumentTypeError("costs of steps must be greater than 0, and that of a message at least 0")
    return Costs(forward, input_, weight, message)
