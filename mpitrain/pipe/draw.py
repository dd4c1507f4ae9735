"""Pictures of a schedule: rows are ranks, columns are time.

    rank 0  F0-F1-......B0----F2-B1----...B2----       F forward, B backward, I and W its halves;
    rank 1  ...F0-B0----F1-B1----F2-B2----......       then the microbatch

Text needs nothing; a PNG, SVG or PDF needs matplotlib.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpitrain.errors import InputError
from mpitrain.pipe.schedule import Backward, BackwardInput, BackwardWeight, Compute, Forward
from mpitrain.pipe.simulate import Simulation
from mpitrain.storage.disk import replacing

_LOOKS: dict[type, tuple[str, str, str]] = {  # letter, colour, meaning
    Forward: ("F", "#4c78a8", "forward"),
    Backward: ("B", "#f2a541", "backward"),
    BackwardInput: ("I", "#72b7b2", "backward, inputs"),
    BackwardWeight: ("W", "#b9b9b9", "backward, weights"),
}


def summary(simulation: Simulation) -> str:
    """One line: what it is and what it costs."""
    schedule = simulation.schedule
    slices = f", {schedule.slices} slices" if schedule.slices > 1 else ""
    return (
        f"{schedule.name}: {schedule.ranks} ranks, {schedule.stages} stages, "
        f"{schedule.microbatches // schedule.slices} microbatches{slices}; {simulation.makespan:.4g} units, "
        f"idle {simulation.idle:.1%}, at most {simulation.in_flight:.4g} microbatches held"
    )


def text(simulation: Simulation, width: int) -> str:
    """A row of characters for each rank, at most `width` columns wide.

    A step is its letter (F, B, I, W; small for the odd stages of a rank) and, where there is room, its microbatch.
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
            letter, number = _letter(run.step, simulation), str(run.step.microbatch)
            label = letter + number if len(number) < end - begin else letter
            row[begin:end] = label.ljust(end - begin, "-")[: end - begin]
        lines.append(f"{f'rank {rank}':{margin}}" + "".join(row))
    return "\n".join(lines)


def picture(simulation: Simulation, path: Path) -> None:
    """Write the picture; its kind from the file's ending. Raises InputError without matplotlib, or for the ending."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise InputError(
            "a picture needs matplotlib: pip install mpitrain[monitor], or leave out --out for one in text"
        ) from None
    ranks = simulation.schedule.ranks
    figure = Figure(figsize=(16, 1.2 + 0.45 * ranks), layout="constrained")
    axes = figure.add_subplot()
    room = simulation.makespan * 0.06 / 15  # a digit's width: 0.06 of 15 inches
    for rank, runs in enumerate(simulation.runs):
        for run in runs:
            _block(axes, simulation, rank, run.step, run.begin, run.end, room)
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
    try:
        with replacing(path) as aside:
            figure.savefig(aside, dpi=150)
    except (OSError, ValueError) as error:
        raise InputError(f"the picture cannot be written to {path}: {error}") from None


def _block(axes: Any, simulation: Simulation, rank: int, step: Compute, begin: float, end: float, room: float) -> None:
    """One step; later stages of a rank are paler."""
    schedule = simulation.schedule
    chunk = schedule.stages_of(rank).index(step.stage)
    paler = 1.0 - 0.5 * chunk / max(1, schedule.chunks - 1)
    colour = _LOOKS[type(step)][1]
    axes.barh(rank, end - begin, left=begin, height=0.86, color=colour, alpha=paler, edgecolor="white", lw=0.4)
    label = str(step.microbatch)
    if end - begin > room * len(label):
        axes.text((begin + end) / 2, rank, label, ha="center", va="center", fontsize=6)


def _letter(step: Compute, simulation: Simulation) -> str:
    """The letter of a step: small for odd stages of a rank."""
    schedule = simulation.schedule
    chunk = schedule.stages_of(schedule.rank_of[step.stage]).index(step.stage)
    letter = _LOOKS[type(step)][0]
    return letter.lower() if chunk % 2 else letter
