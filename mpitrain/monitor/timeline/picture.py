"""The picture of a timeline: a row for each rank, time from left to right, a colour for each part of a step.

The colours are those of Okabe and Ito, which people who see colours otherwise can tell apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpitrain.monitor.timeline.spans import RankTimeline

_COLOURS = {
    "data": "#F0E442",
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "optimizer": "#009E73",
    "evaluation": "#CC79A7",
    "checkpoint": "#999999",
}
_OPERATION, _WAIT = "#E69F00", "#D55E00"
_MOST_ROWS = 32  # ranks that are drawn
_LABEL = 0.04  # of the width, which the name of a step takes
_MOST_BARS = 20_000  # of a kind and rank


def draw(ranks: Sequence[RankTimeline], summary: dict[str, Any], path: Path) -> None:
    """Draw a timeline as a PNG file.

    Args:
        ranks: In seconds of one clock.
        summary: Its figures.
        path: Of the picture.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    shown = list(ranks[:_MOST_ROWS])
    steps = [step for timeline in shown for step in timeline.steps]
    origin = min((step[1] for step in steps), default=0.0)
    longest = max((step[2] for step in steps), default=origin) - origin
    unit, factor = ("s", 1.0) if longest > 10.0 else ("ms", 1e3)
    figure = Figure(figsize=(13, 1.9 + 0.62 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()

    def bars(row: float, height: float, spans: Sequence[tuple[float, float]], colour: str) -> None:
        pairs = [((begin - origin) * factor, (end - begin) * factor) for begin, end in spans[:_MOST_BARS]]
        axes.broken_barh(pairs, (row, height), facecolors=colour, linewidth=0)

    found: dict[str, str] = {}
    for row, timeline in enumerate(shown):
        for name, colour in _COLOURS.items():
            spans = [(s.begin, s.end) for s in timeline.spans if s.kind == "part" and s.name == name]
            if spans:
                found[name] = colour
                bars(row - 0.40, 0.44, spans, colour)
        bars(row + 0.07, 0.28, [(one.begin, one.end) for one in timeline.operations], _OPERATION)
        waits = [(one.begin, one.begin + one.wait) for one in timeline.operations if one.wait > 0.0]
        bars(row + 0.07, 0.28, waits, _WAIT)
    _name_steps(axes, {number: (begin - origin) * factor for number, begin, _, _ in shown[0].steps}, longest * factor)
    axes.set_yticks(range(len(shown)), [timeline.name for timeline in shown])
    axes.set_ylim(len(shown) - 0.5, -0.55)
    axes.set_xlim(0.0, longest * factor or 1.0)
    axes.set_xlabel(
        f"time since the begin of step {shown[0].steps[0][0] if shown[0].steps else 0} on rank 0's clock [{unit}]"
    )
    axes.spines[["top", "right"]].set_visible(False)
    patches = [Patch(color=colour, label=name) for name, colour in found.items()]
    patches += [
        Patch(color=_OPERATION, label="communication"),
        Patch(color=_WAIT, label="of it, wait for the last rank"),
    ]
    figure.legend(handles=patches, loc="outside upper center", ncols=len(patches), frameon=False, fontsize=9)
    told = _title(summary, len(ranks))
    axes.set_title(told, fontsize=10, loc="left", pad=16)
    figure.savefig(path, dpi=120, format="png")


def _name_steps(axes: Any, begins: dict[int, float], longest: float) -> None:
    """A line where each step begins, and its name where it does not stand over the one before."""
    free = 0.0
    for number, begin in begins.items():
        axes.axvline(begin, color="black", linewidth=0.6, alpha=0.5)
        if begin >= free:
            free = begin + _LABEL * longest
            axes.annotate(f" step {number}", (begin, -0.52), fontsize=8, va="bottom", ha="left", annotation_clip=False)


def _title(summary: dict[str, Any], ranks: int) -> str:
    share = summary["communication_under_backward_share"]
    told = "no communication" if share is None else f"{share:.0%} of communication lay under backward"
    more = f", the first {_MOST_ROWS} of {ranks} ranks" if ranks > _MOST_ROWS else ""
    return f"above: the main thread; below: communication ({told}{more})"
