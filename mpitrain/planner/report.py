"""A plan as lines of up to 120 characters, and the predicted scaling of the best layouts with the number of ranks.

Strong scaling keeps the global batch; weak scaling keeps the samples of a rank. Efficiency is the throughput of a rank
divided by that at the smallest number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mpitrain.parallel.layouts import text
from mpitrain.planner.predictor import Prediction
from mpitrain.planner.search import Excess, LayoutPlan
from mpitrain.storage.text import align_rows, bytes_text, seconds_text, short

_WIDTH = 118


def table(predictions: Sequence[Prediction]) -> str:
    """Return predictions, sorted from best to worst, as a table with one line each."""
    lines = ["      step   samples/s      memory   compute   messages   idle  layout"]
    for number, each in enumerate(predictions, 1):
        share = {name: seconds / each.seconds for name, seconds in each.times.items()}
        talk = sum(share.get(name, 0.0) for name in ("tensor", "gradients", "parameters"))
        busy = share.get("compute", 0.0) + share.get("update", 0.0)
        lines.append(
            f"{number:2} {seconds_text(each.seconds):>8} {short(each.samples / each.seconds):>9} "
            f"{bytes_text(each.total_memory):>13} {busy:9.0%} {talk:10.0%} {share.get('pipeline', 0.0):6.0%}  "
            f"{_shorten(text(each.layout), _WIDTH - 61)}"
        )
    return "\n".join(lines)


def details(prediction: Prediction, room: float) -> str:
    """Return all predicted figures of one layout as text.

    Args:
        prediction: Prediction of the layout.
        room: Bytes that a rank may use.
    """
    parts = [
        f"{name} {seconds_text(seconds)} ({seconds / prediction.seconds:.0%})"
        for name, seconds in prediction.times.items()
        if seconds > prediction.seconds * 0.005  # smaller parts are not shown
    ]
    large = [f"{name} {bytes_text(nbytes)}" for name, nbytes in prediction.memory.items() if nbytes >= 1024]
    rows = [
        ("step", f"{seconds_text(prediction.seconds)}: {', '.join(parts)}"),
        ("throughput", f"{short(prediction.samples / prediction.seconds)} samples/s"),
        ("memory", f"{bytes_text(prediction.total_memory)} of {bytes_text(room)} per rank: {', '.join(large)}"),
    ]
    return "\n".join([f"layout {text(prediction.layout)}", _wrap(rows)])


def excess_text(excess: Sequence[Excess]) -> str:
    """Return text that says by how much layouts exceed the memory, and which category of memory takes most."""
    lines = []
    for each in excess:
        lines.append(f"  {_shorten(text(each.layout), _WIDTH - 2)}")
        total = bytes_text(sum(each.memory.values()))
        where = " on the host" if each.host else ""
        lines.append(f"      {total}{where}, {bytes_text(each.missing)} too much; most of it {_largest_category(each)}")
    return "\n".join(lines)


def report(plan: LayoutPlan, title: str) -> str:
    """Return a plan as text: the best layouts, the first one in detail, and layouts that do not fit.

    Args:
        plan: Result of the search.
        title: Heading, with the ranks and the machine.
    """
    parts = [f"{title}: {plan.layouts:,} layouts, {plan.predicted:,} simulated, {bytes_text(plan.room)} per rank"]
    if plan.predictions:
        parts += [table(plan.predictions), details(plan.predictions[0], plan.room)]
    if not math.isinf(plan.unvisited_seconds):
        at_least = seconds_text(plan.unvisited_seconds)
        parts.append(f"not simulated: {plan.unvisited:,} layouts, expected to take {at_least} or more per step")
    if plan.excess:
        head = "possibly faster, but too large for memory" if plan.predictions else "closest to fitting"
        parts.append(f"{head}:\n{excess_text(plan.excess)}")
    return "\n\n".join(parts)


def nothing_fits(plan: LayoutPlan) -> str:
    """Return a sentence that explains why a plan has no layout."""
    if not plan.excess:
        return f"none of {plan.layouts:,} layouts can be trained"
    least = plan.excess[0]
    whose = "of host memory per rank" if least.host else "per rank"
    return (
        f"no layout fits into {bytes_text(least.room)} {whose}; the closest one is {text(least.layout)}, which needs "
        f"{math.ceil(least.missing):,} bytes ({bytes_text(least.missing)}) more, most of it {_largest_category(least)}"
    )


def _largest_category(excess: Excess) -> str:
    """Return the category that takes most memory, and a setting that makes it smaller."""
    layout, blame = excess.layout, excess.largest_category
    recomputes_all = layout.recompute is True or str(layout.recompute).startswith("every")
    fixes = {
        "states": "" if layout.zero else "a higher zero",
        "gradients": "zero 2" if layout.zero < 2 else "",
        "parameters": "zero 3" if layout.zero < 3 else "more pipeline or tensor ranks",
        "activations": "a smaller microbatch" if recomputes_all else "recompute",
        "working": "a smaller microbatch" if layout.microbatch > 1 else "",
        "process": "fewer ranks per node",
        "model": "fewer ranks per node",
        "pinned": "a higher zero" if not layout.zero else "",
    }
    fix = fixes.get(blame, "")
    return f"{blame}, {bytes_text(excess.memory[blame])}" + (f" ({fix} takes less)" if fix else "")


def _wrap(rows: Sequence[tuple[str, str]]) -> str:
    """Return rows of a label and a text as lines, broken at commas."""
    broken = []
    width = _WIDTH - 5 - max(len(label) for label, _ in rows)
    for label, content in rows:
        line, *parts = content.split(", ")
        for part in parts:
            if len(line) + len(part) + 2 > width:
                broken.append((label, f"{line},"))
                label, line = "", part
            else:
                line = f"{line}, {part}"
        broken.append((label, line))
    return align_rows(broken)


def _shorten(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[: width - 1]}…"


Point = tuple[int, Prediction | None]  # a number of ranks, and the best layout that fits on them


def efficiency_of(points: Sequence[Point]) -> float:
    """Return the throughput of a rank at the last point that has a layout, divided by that at the first point."""
    rates = [prediction.samples / prediction.seconds / ranks for ranks, prediction in points if prediction is not None]
    return rates[-1] / rates[0]


HEAD = "  ranks       step   samples/s  efficiency      memory   batch  layout"


def row(points: Sequence[Point]) -> str:
    """Return the table line of the last point, with its efficiency relative to the first; `HEAD` is the heading."""
    ranks, best = points[-1]
    if best is None:
        return f"{ranks:7,}  nothing fits"
    speed = f"{seconds_text(best.seconds):>9}  {best.samples / best.seconds:10,.1f}  {efficiency_of(points):10.0%}"
    return f"{ranks:7,}  {speed}  {bytes_text(best.total_memory):>10}  {best.samples:6,}  {text(best.layout)}"


def picture(figure: Any, strong: Sequence[Point], weak: Sequence[Point], title: str) -> None:
    """Draw step time, efficiency and memory over the number of ranks into a matplotlib figure.

    Args:
        figure: Figure of matplotlib.
        strong: Points with the same global batch.
        weak: Points with the same samples of a rank.
        title: Heading of the figure.
    """
    figure.suptitle(title, fontsize=10)
    time, efficiency, memory = figure.subplots(1, 3)
    for points, name, style in ((strong, "strong", "o-"), (weak, "weak", "s--")):
        fits = [(count, prediction) for count, prediction in points if prediction is not None]
        ranks = [count for count, _ in fits]
        time.plot(ranks, [prediction.seconds for _, prediction in fits], style, label=name)
        efficiency.plot(ranks, [efficiency_of(fits[: n + 1]) for n in range(len(fits))], style, label=name)
        memory.plot(ranks, [prediction.total_memory / 2**30 for _, prediction in fits], style, label=name)
    time.set(ylabel="seconds per step", yscale="log")
    efficiency.set(ylabel="efficiency", ylim=(0, 1.1))
    memory.set(ylabel="GiB per rank", ylim=(0, None))
    for axis in (time, efficiency, memory):
        axis.set(xscale="log", xlabel="ranks")
        axis.set_xticks([ranks for ranks, _ in strong], [str(ranks) for ranks, _ in strong], rotation=45)
        axis.grid(alpha=0.3)
        axis.legend()
