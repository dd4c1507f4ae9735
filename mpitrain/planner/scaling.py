"""How step time, efficiency and memory go with the number of ranks: the best layout at each, predicted.

Strong scaling keeps the global batch; weak scaling keeps the samples of a rank. Efficiency is the throughput of a rank
against that at the smallest number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpitrain.planner import notation
from mpitrain.planner.candidates import LayoutRules
from mpitrain.planner.machine import MachineProfile
from mpitrain.planner.model import BlockCost, Divided, ModelProfile
from mpitrain.planner.prediction import Prediction
from mpitrain.planner.predictor import Predictor
from mpitrain.planner.search import best
from mpitrain.storage.disk import replacing
from mpitrain.storage.text import bytes_text, seconds_text

GIB = 1 << 30


@dataclass(frozen=True)
class Point:
    """The best layout at one number of ranks.

    Attributes:
        nodes: How many.
        ranks: Of all nodes.
        prediction: Of the best layout that fits; None where none does.
    """

    nodes: int
    ranks: int
    prediction: Prediction | None

    @property
    def rate(self) -> float:
        """Samples per second of one rank."""
        found = self.prediction
        return found.samples / found.seconds / self.ranks if found is not None else 0.0


class WithBatch(ModelProfile):
    """A model profile with another global batch."""

    def __init__(self, model: ModelProfile, batch: int) -> None:
        self._model, self.batch = model, batch
        self.precision, self.moments, self.sample_bytes = model.precision, model.moments, model.sample_bytes
        self.listed, self.divisible, self.order = model.listed, model.divisible, model.order
        self.synchronous, self.measures = model.synchronous, model.measures

    def blocks(self, samples: int, divided: Divided = Divided(), threads: int = 1) -> tuple[BlockCost, ...]:
        return self._model.blocks(samples, divided, threads)

    def takes(self, divided: Divided) -> bool:
        return self._model.takes(divided)


def scaling(
    model: ModelProfile,
    machine: MachineProfile,
    ranks_per_node: int,
    nodes: Sequence[int],
    *,
    weak: bool,
    memory: float | None = None,
    rules: LayoutRules = LayoutRules(),
    seconds: float = float("inf"),
    told: Callable[[Sequence[Point]], None] = lambda points: None,
) -> list[Point]:
    """The best layout at each number of nodes.

    Args:
        model: What is trained; its batch is that of the first number of nodes.
        machine: Where.
        ranks_per_node: Ranks of each node.
        nodes: From least to most.
        weak: Whether the batch grows with the nodes.
        memory: Bytes that a rank may take.
        rules: What the rest of the configuration allows.
        seconds: Seconds for each number of nodes, as `search.best` says.
        told: Called with the points so far, once another is known.
    """
    points = []
    for count in nodes:
        batch = model.batch * count // nodes[0] if weak else model.batch
        predictor = Predictor(WithBatch(model, batch), machine, count, ranks_per_node, memory)
        found = best(predictor, rules, 1, seconds=seconds).found
        points.append(Point(count, predictor.ranks, found[0] if found else None))
        told(points)
    return points


def efficiency_of(points: Sequence[Point]) -> float:
    """Throughput of a rank at the last of some points, against that at the first that has a layout; 0 without any."""
    first = next((point.rate for point in points if point.rate), 0.0)
    return points[-1].rate / first if first else 0.0


HEAD = "  ranks       step   samples/s  efficiency      memory   batch  layout"


def row(points: Sequence[Point]) -> str:
    """The line of a table about the last of some points; see `HEAD`."""
    point, found = points[-1], points[-1].prediction
    if found is None:
        return f"{point.ranks:7,}  nothing fits"
    told = f"{seconds_text(found.seconds):>9}  {found.samples / found.seconds:10,.1f}  {efficiency_of(points):10.0%}"
    memory = bytes_text(found.total_memory)
    return f"{point.ranks:7,}  {told}  {memory:>10}  {found.samples:6,}  {notation.text(found.layout)}"


def draw(figure: Any, strong: Sequence[Point], weak: Sequence[Point], title: str = "") -> None:
    """Step time, efficiency and memory over ranks, on a matplotlib figure."""
    figure.suptitle(title, fontsize=10)
    figure.set_size_inches(13, 4.2)
    time, efficiency, memory = figure.subplots(1, 3)
    for points, name, style in ((strong, "strong", "o-"), (weak, "weak", "s--")):
        fits = [point for point in points if point.prediction is not None]
        if not fits:
            continue
        ranks = [point.ranks for point in fits]
        predictions = [point.prediction for point in fits if point.prediction is not None]
        time.plot(ranks, [each.seconds for each in predictions], style, label=name)
        efficiency.plot(ranks, [efficiency_of(fits[: n + 1]) for n in range(len(fits))], style, label=name)
        memory.plot(ranks, [each.total_memory / GIB for each in predictions], style, label=name)
    time.set(ylabel="seconds a step", yscale="log")
    efficiency.set(ylabel="efficiency", ylim=(0, 1.1))
    memory.set(ylabel="GiB a rank", ylim=(0, None))
    for axis in (time, efficiency, memory):
        axis.set(xscale="log", xlabel="ranks")
        axis.set_xticks([point.ranks for point in strong], [str(point.ranks) for point in strong], rotation=45)
        axis.grid(alpha=0.3)
        axis.legend()


def picture(path: Path, strong: Sequence[Point], weak: Sequence[Point], title: str = "") -> None:
    """Draw into a file, whose name says the format. Raises ImportError without matplotlib (extra `monitor`)."""
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    draw(figure, strong, weak, title)
    with replacing(path) as aside:
        figure.savefig(aside, dpi=120)
