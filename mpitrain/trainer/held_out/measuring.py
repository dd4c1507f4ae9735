"""Metrics of a model on the ranks: shown each output where the model ends, summed, and told to all ranks.

    what is measured                    of which settings
    the task's metrics                  what the data are: see `mpitrain.models.metrics`
    measures by name                    train.metrics, as f1
    functions of one's own              train.metrics, as package.module:function; metrics of torchmetrics alike
    what the model says of itself       model.factory: a method `metrics(output, y)` of the module, which returns a dict

With a pipeline outputs are on the last stage alone, with tensor ranks that divide a vocabulary each has a part of the
scores, and a rank may have no samples at all: afterwards all have the same figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mpitrain.config.named import find, told
from mpitrain.config.settings import Config
from mpitrain.data import Description
from mpitrain.errors import InputError, refusal
from mpitrain.models.losses import UNCOUNTED
from mpitrain.models.metrics import (
    Collected,
    Judged,
    Measure,
    Metric,
    OfScores,
    fits,
    judged,
    measures_of,
    named_measures,
)
from mpitrain.models.task import Task
from mpitrain.tensor.axis import Axis
from mpitrain.tensor.judging import judge, whole
from mpitrain.trainer.engine import Engine
from mpitrain.trainer.held_out.library_metric import LibraryMetric, gathered_from, is_library_metric
from mpitrain.trainer.modes.strategy import GroupPlaces

DIRECTION = "higher_is_better"  # the attribute by which one's own metric says so
Function = Callable[[Any, Any], Any]
LOSS = "loss"  # the figure that is no metric


class OwnMetric(Metric):
    """A function(output, y) of the user's, beside the loss.

    It gets the whole output of the model for some samples and their targets, in evaluation mode and without gradients,
    and returns one of two:

        a tensor [samples]    a value of each sample
        a number, or a tensor without dimensions    the mean over the samples that were given

    The figure is the mean over all held-out samples, each counted once, on however many ranks. With parallel.slices it
    gets a piece of the sequence of each sample at a time, and each value counts by the length of that piece. An
    attribute `higher_is_better` of the function says which figures are better, for train.monitor and checkpoint.best.

    Args:
        path: package.module:function, for messages; the figure has the function's name.
        function: The function.
    """

    def __init__(self, path: str, function: Function) -> None:
        self.path, self.function = path, function
        self.name = path.rpartition(":")[2]
        self.higher = getattr(function, DIRECTION, None)

    def sums(self, output: Any, y: torch.Tensor) -> torch.Tensor:
        try:
            value = self.function(output, y)
        except Exception as error:
            raise InputError(f"train.metrics {self.path} raised {told(error)}; mend it") from error
        return summed(f"train.metrics {self.path}", value, y)

    def value(self, sums: torch.Tensor) -> float:
        total, count = sums.tolist()
        return total / count if count else math.nan


class Meter:
    """Adds up the metrics of samples on this rank, and makes figures of what all ranks have.

    Args:
        metrics: What is measured.
        description: Of the data.
        own: The model's own function, which returns a dict; None where it has none.
        directions: Of the names in that dict, whether more is better.
        ends_here: Whether outputs come to this rank; elsewhere functions of one's own are let go.
        divided: The ranks that have parts of the scores, and how many classes these have together; None: all whole.

    Attributes:
        metrics: What is measured.
        worker: The virtual worker whose samples are shown.
        directions: Of the loss and each metric, by name, whether more is better; None: it does not say.
        counts: Of the metrics that count, by name, the sums over all ranks, once they are `gathered`.
    """

    def __init__(
        self,
        metrics: Sequence[Measure],
        description: Description,
        own: Function | None = None,
        *,
        directions: Mapping[str, bool] | None = None,
        ends_here: bool = True,
        divided: tuple[Axis, int] | None = None,
    ) -> None:
        self.metrics, self.worker = list[Measure](), 0
        self.directions: dict[str, bool | None] = {LOSS: False}
        self.add(metrics)
        self.directions |= directions or {}
        self.counts: dict[str, torch.Tensor] = {}
        self._y_numbers = max(1, math.prod(description.y_shape))
        self._divided = divided
        self._ends_here = ends_here
        self._asks_model, self._own = own is not None, own if ends_here else None
        self._sums: dict[str, torch.Tensor] = {}  # by the metric's name: [workers, size]
        self._told: dict[str, torch.Tensor] = {}  # by the name in the model's dict: [workers, 2]
        self._found: dict[str, float] = {}  # figures of measures that collect
        self._names: list[str] = []  # of those, agreed on by all ranks
        self._like = torch.empty(0, 1)

    def add(self, metrics: Sequence[Measure]) -> None:
        """Measure these, too."""
        self.metrics += metrics
        for metric in metrics:
            self.directions |= metric.directions

    @property
    def _top(self) -> bool:
        return any(isinstance(metric, OfScores) and metric.top for metric in self.metrics)

    def begin(self, like: torch.Tensor) -> None:
        """Begin with nothing. like: float64 [workers, 1]; where sums are to be in the end."""
        self._like, self.worker = like, 0
        self.counts, self._sums, self._told, self._found = {}, {}, {}, {}
        for metric in self._collected:
            metric.begin()

    def see(self, output: Any, y: Any) -> None:
        """Add what the output of some samples and their targets are worth."""
        shown: Any = output
        axis, classes = self._divided or (None, 0)
        if axis is not None:
            if self._own is not None or any(isinstance(m, (OwnMetric, Collected)) for m in self.metrics):
                output = whole(output, axis, classes)
            shown = self._judged_part(shown, y, axis, classes)
        elif any(isinstance(metric, OfScores) and fits(metric, output, y) for metric in self.metrics):
            shown = judged(output, y, top=self._top)
        share = y.numel() / (len(y) * self._y_numbers) if isinstance(y, torch.Tensor) and len(y) else 1.0
        for metric in self.metrics:
            if isinstance(metric, OwnMetric):
                self._add(self._sums, metric.name, metric.sums(output, y) * share)
            elif isinstance(metric, OfScores) and isinstance(shown, Judged):
                if axis is not None or fits(metric, output, y):
                    self._add(self._sums, metric.name, metric.of(shown))
            elif isinstance(metric, Metric) and fits(metric, output, y):
                self._add(self._sums, metric.name, metric.sums(output, y))
        for collected in self._collected if self._ends_here else ():
            collected.see(output, y)
        if self._own is not None:
            for name, sums in _of_model(self._own, output, y).items():
                self._add(self._told, name, sums * share)

    def _judged_part(self, scores: torch.Tensor, y: torch.Tensor, axis: Axis, classes: int) -> Judged:
        nats, guess, above = judge(scores, y, axis, classes, top=self._top)
        y = y.reshape(-1)
        return Judged(nats, guess, above, y, y != UNCOUNTED)

    def _add(self, to: dict[str, torch.Tensor], name: str, sums: torch.Tensor) -> None:
        if name not in to:
            to[name] = torch.zeros(len(self._like), len(sums), dtype=torch.float64, device=sums.device)
        to[name][self.worker] += sums

    def gathered(self, places: GroupPlaces, engine: Engine) -> torch.Tensor:
        """The sums of this rank's virtual workers, from where its model ends: float64 [workers, numbers]. Collective.

        What metrics count is summed over all ranks, into `counts`.
        """
        pipeline = engine.pipeline
        if self._asks_model:
            told = places.everyone.all_gather_object(sorted(self._told))
            self._names = sorted({name for names in told for name in names})
            if pipeline is not None:
                self._names = pipeline.comm.broadcast_object(self._names, pipeline.last_rank)
        columns = [self._rows(self._sums.get(metric.name), metric.size) for metric in self._summed]
        columns += [self._rows(self._told.get(name), 2) for name in self._names]
        sums = torch.cat([self._like[:, :0], *columns], 1).contiguous()
        if pipeline is not None and sums.numel():
            pipeline.comm.broadcast(sums, pipeline.last_rank)
        for metric in self._counting:
            counted = self._rows(self._sums.get(metric.name), metric.size).sum(0)
            if pipeline is not None:
                pipeline.comm.broadcast(counted, pipeline.last_rank)
            places.everyone.all_reduce(counted)
            self.counts[metric.name] = counted.cpu()
        if self._collected:
            gather = gathered_from(places.everyone)
            if self._ends_here:
                self._found = {n: v for metric in self._collected for n, v in metric.figures(gather).items()}
            if pipeline is not None:
                self._found = pipeline.comm.broadcast_object(self._found, pipeline.last_rank)
        return sums

    def _rows(self, sums: torch.Tensor | None, size: int) -> torch.Tensor:
        return self._like.new_zeros(len(self._like), size) if sums is None else sums.to(self._like.device)

    @property
    def _summed(self) -> list[Metric]:
        return [metric for metric in self.metrics if isinstance(metric, Metric) and not metric.counts]

    @property
    def _counting(self) -> list[Metric]:
        return [metric for metric in self.metrics if isinstance(metric, Metric) and metric.counts]

    @property
    def _collected(self) -> list[Collected]:
        return [metric for metric in self.metrics if isinstance(metric, Collected)]

    def values(self, totals: Sequence[float]) -> dict[str, float]:
        """The figures, by name. totals: of the numbers that `gathered` gave, the sums over all virtual workers.

        Without the metrics that the model's output does not go with.
        """
        found, rest = dict[str, float](), list(totals)
        for metric in self._summed:
            own, rest = rest[: metric.size], rest[metric.size :]
            if own[-1]:  # how many were counted
                found |= metric.figures(torch.tensor(own, dtype=torch.float64))
        for metric in self._counting:
            if self.counts[metric.name].any():
                found |= metric.figures(self.counts[metric.name])
        found |= self._found
        for name in self._names:
            (total, count), rest = rest[:2], rest[2:]
            found[name] = total / count
        return found


def meter_of(config: Config, task: Task, description: Description, engine: Engine) -> Meter:
    """What measures a model that was put onto the ranks.

    Args:
        task: The whole model.
        description: Of the data.
        engine: Of the model.

    Raises:
        InputError: A function of train.metrics cannot be found, or has the name of another figure.
    """
    asked = config.train.metrics
    metrics = measures_of(description)
    metrics += named_measures([name for name in asked if ":" not in name], description)
    for path in (name for name in asked if ":" in name):
        function, classes = find("train.metrics", path), description.classes or ()
        library = is_library_metric(function)
        own = LibraryMetric(path, function, classes) if library else OwnMetric(path, function)
        if own.name in {LOSS, *(metric.name for metric in metrics)}:
            raise refusal(f"train.metrics {path}: there is a figure {own.name!r} already; give it another name")
        metrics.append(own)
    pipeline, criterion = engine.pipeline, getattr(task.module, "criterion", None)
    axis = getattr(criterion, "axis", None)  # of a criterion that takes parts of the scores
    divided = (axis, criterion.classes) if isinstance(axis, Axis) and axis.size > 1 and criterion is not None else None
    of_model = getattr(task.module, "metrics", None) if config.model.factory else None
    meter = Meter(
        metrics,
        description,
        of_model if callable(of_model) and not isinstance(of_model, nn.Module) else None,
        directions=getattr(task.module, DIRECTION, None) if of_model is not None else None,
        ends_here=pipeline is None or pipeline.comm.rank == pipeline.last_rank,
        divided=divided,
    )
    meter.directions |= dict.fromkeys((f"{LOSS} of {name}" for name in config.data.mix), False)
    return meter


def summed(named: str, value: Any, y: Any) -> torch.Tensor:
    """[sum, samples] of what a metric of one's own gave for the samples of y: a value of each, or their mean.

    Raises:
        InputError: It is neither.
    """
    samples = len(y)
    found = torch.as_tensor(value).detach() if isinstance(value, (int, float, torch.Tensor)) else None
    if found is None or found.shape not in ((), (samples,)) or found.is_complex():
        what = f"a tensor {list(found.shape)}" if found is not None else type(value).__name__
        raise InputError(
            f"{named} returned {what} for {samples} samples; return a tensor with a number for each, or their mean"
        )
    total = found.double() * samples if found.dim() == 0 else found.double().sum()
    return torch.stack([total, torch.full_like(total, samples)])


def _of_model(function: Function, output: Any, y: Any) -> dict[str, torch.Tensor]:
    """What the model's own `metrics` says, by name."""
    named = "the model's metrics(output, y)"
    try:
        values = function(output, y)
    except Exception as error:
        raise InputError(f"{named} raised {told(error)}; mend it") from error
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise InputError(f"{named} returned {type(values).__name__}; return a dict of names and values")
    return {name: summed(f"{named}: {name!r}", value, y) for name, value in values.items()}
