"""The loss and the metrics of a trained model on held-out samples, the same on all ranks.

Metrics are shown each output where the model ends, summed, and told to all ranks:

    what is measured                    of which settings
    the task's metrics                  what the data are: see `mpitrain.models.metrics`
    measures by name                    train.metrics, as f1
    functions of one's own              train.metrics, as package.module:function; metrics of torchmetrics alike
    what the model says of itself       model.factory: a method `metrics(output, y)` of the module, which returns a dict

With a pipeline outputs are on the last stage alone, with tensor ranks that divide a vocabulary each has a part of the
scores, and a rank may have no samples at all: afterwards all have the same figures.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from mpitrain.comm import Communicator
from mpitrain.comm.memory.device import CPU
from mpitrain.config.named import find, told
from mpitrain.config.settings import Config
from mpitrain.data import Dataset, Description, evaluation_batches
from mpitrain.data.on_device import on_device
from mpitrain.errors import InputError, refusal
from mpitrain.layers.loss_terms import Count
from mpitrain.models.losses import UNCOUNTED
from mpitrain.models.metrics import (
    Collected,
    Gather,
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
from mpitrain.tensor.vocabulary import judge, whole
from mpitrain.trainer.data import GroupPlaces, microbatches
from mpitrain.trainer.engine import Engine

DIRECTION = "higher_is_better"  # the attribute by which one's own metric says so
Function = Callable[[Any, Any], Any]
Spare = tuple[torch.Tensor, torch.Tensor] | tuple[()]  # what a rank without samples computes with
_METHODS = ("update", "compute", "reset")  # of a metric of torchmetrics, which is not imported here
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
        named = f"train.metrics {self.path}"
        return summed(named, _tried(named, lambda: self.function(output, y)), y)

    def value(self, sums: torch.Tensor) -> float:
        total, count = sums.tolist()
        return total / count if count else math.nan


class Meter:
    """Adds up the metrics of samples on this rank, and makes figures of what all ranks have.

    Args:
        metrics: What is measured.
        description: Of the data.
        own: The model's own function, which returns a dict; None where it has none.
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
        ends_here: bool = True,
        divided: tuple[Axis, int] | None = None,
    ) -> None:
        self.metrics, self.worker = list[Measure](), 0
        self.directions: dict[str, bool | None] = {LOSS: False}
        self.add(metrics)
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
        self._collected = [metric for metric in self.metrics if isinstance(metric, Collected)]
        plain = [metric for metric in self.metrics if isinstance(metric, Metric)]
        self._summed = [metric for metric in plain if not metric.counts]
        self._counting = [metric for metric in plain if metric.counts]
        self._top = any(isinstance(metric, OfScores) and metric.top for metric in plain)

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
            nats, guess, above = judge(shown, y, axis, classes, top=self._top)
            right = y.reshape(-1)
            shown = Judged(nats, guess, above, right, right != UNCOUNTED)
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
    """Return the meter of a model that was put onto the ranks.

    Args:
        task: The whole model.
        description: Of the data.
        engine: Of the model.

    Raises:
        InputError: A function of train.metrics cannot be found, or has the name of another figure.
    """
    asked = config.train.metrics
    metrics = measures_of(description) + named_measures([name for name in asked if ":" not in name], description)
    for path in (name for name in asked if ":" in name):
        function, classes = find("train.metrics", path), description.classes or ()
        own = LibraryMetric(path, function, classes) if is_library_metric(function) else OwnMetric(path, function)
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
        ends_here=pipeline is None or pipeline.comm.rank == pipeline.last_rank,
        divided=divided,
    )
    if of_model is not None:
        meter.directions |= getattr(task.module, DIRECTION, None) or {}
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


def _tried(named: str, act: Callable[[], Any]) -> Any:
    """Call a function of the user's. Raises InputError, with its name, where it raises anything."""
    try:
        return act()
    except Exception as error:
        raise InputError(f"{named} raised {told(error)}; mend it") from error


def _of_model(function: Function, output: Any, y: Any) -> dict[str, torch.Tensor]:
    """Return the sums of the model's own `metrics`, by name."""
    named = "the model's metrics(output, y)"
    values = _tried(named, lambda: function(output, y))
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise InputError(f"{named} returned {type(values).__name__}; return a dict of names and values")
    return {name: summed(f"{named}: {name!r}", value, y) for name, value in values.items()}


def is_library_metric(found: object) -> bool:
    """Return whether something that train.metrics names is a metric of torchmetrics, or a class of one."""
    module = isinstance(found, nn.Module) or (isinstance(found, type) and issubclass(found, nn.Module))
    return module and all(callable(getattr(found, name, None)) for name in _METHODS)


class LibraryMetric(Collected):
    """A torchmetrics.Metric or MetricCollection of the user's.

    It is updated with the model's output and the targets, on the device of the output. Its states are gathered from all
    ranks, and reduced as they say themselves. A figure is what it computes: a
    number, a number for each class, or a dict of these.

    Args:
        path: package.module:name, for messages; the figure has that name.
        found: The metric, which is copied, or a class that needs no arguments.
        classes: Names of the classes; empty where there are none.
    """

    def __init__(self, path: str, found: Any, classes: Sequence[str]) -> None:
        self.path, self.name, self._classes = path, path.rpartition(":")[2], tuple(classes)
        self._metric = self._tried(lambda: found() if isinstance(found, type) else copy.deepcopy(found))
        self.higher = getattr(self._metric, "higher_is_better", None)
        for metric in self._metrics():
            metric.sync_on_compute = metric._to_sync = False  # over torch.distributed, which need not be there
        self._seen = 0  # samples

    def begin(self) -> None:
        self._metric.reset()
        self._seen = 0

    def see(self, output: Any, y: Any) -> None:
        if isinstance(output, torch.Tensor):
            self._metric.to(output.device)
        self._tried(lambda: self._metric.update(output, y))
        self._seen += len(y)

    def figures(self, gather: Gather) -> dict[str, float]:
        if not sum(int(seen) for seen in gather(torch.tensor([self._seen]))):
            return {}
        for metric in self._metrics():
            for state, reduce in metric._reductions.items():
                setattr(metric, state, _reduced(getattr(metric, state), reduce, gather))
            metric._update_count = max(metric._update_count, 1)
            metric._computed = None
        return dict(self._named(self.name, self._tried(self._metric.compute)))

    def _metrics(self) -> Iterator[Any]:
        """Every metric in this one, which have the states."""
        return (part for part in self._metric.modules() if hasattr(part, "_reductions"))

    def _named(self, name: str, value: Any) -> Iterator[tuple[str, float]]:
        if isinstance(value, Mapping):
            for key, part in value.items():
                yield from self._named(f"{name}_{key}", part)
        elif isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1):
            yield name, float(value)
        elif isinstance(value, torch.Tensor) and value.shape == (len(self._classes),):
            yield from ((f"{name} of {each}", float(part)) for each, part in zip(self._classes, value, strict=True))
        else:
            what = f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise InputError(
                f"train.metrics {self.path} computed {what}; have it compute a number, one for each class, or a dict"
            )

    def _tried(self, act: Callable[[], Any]) -> Any:
        return _tried(f"train.metrics {self.path}", act)


def _reduced(state: Any, reduce: Any, gather: Gather) -> Any:
    """Return a state of all ranks together: reduced, or one after the other where the metric keeps a list."""
    if isinstance(state, torch.Tensor):
        stacked = torch.stack([part.to(state.device) for part in gather(state)])
        return reduce(stacked) if reduce is not None else stacked
    counts = [int(count) for count in gather(torch.tensor([len(state)]))]
    padded = [*state, *[torch.empty(0)] * (max(counts) - len(state))]
    items = [gather(item) for item in padded]
    flat = [items[number][rank] for rank, count in enumerate(counts) for number in range(count)]
    if reduce is None or not flat:
        return flat
    return [torch.cat([item.reshape(1) if item.dim() == 0 else item for item in flat])]


def gathered_from(comm: Communicator) -> Gather:
    """Return what gathers a tensor from every rank, in order, on the host. The sizes may differ, and be 0."""

    def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
        own = tensor.detach().cpu()
        about = comm.all_gather_object([list(own.shape), str(own.dtype).removeprefix("torch."), own.numel()])
        counts = [count for _, _, count in about]
        names = [name for _, name, count in about if count] or [about[0][1]]
        dtype = getattr(torch, names[0])  # a rank without anything may not know
        carried = torch.uint8 if dtype == torch.bool else dtype
        everything = torch.empty(sum(counts), dtype=carried)
        if len(everything):
            comm.all_gather(everything, own.reshape(-1).to(carried).contiguous(), counts=counts)
        parts = everything.to(dtype).split(counts)
        return [part.reshape(shape) for part, (shape, _, _) in zip(parts, about, strict=True)]

    return gather


def evaluated(
    config: Config,
    places: GroupPlaces,
    engine: Engine,
    samples: Dataset,
    meter: Meter,
    *,
    most: int = 0,
    spare: Spare = (),
) -> dict[str, float]:
    """The mean loss, and the metrics, of samples that are each counted once. Collective.

    The host waits for the device once, at the end.

    Args:
        samples: Of which so many are taken, spread evenly.
        meter: Of the metrics.
        most: How many samples are taken at most; 0: train.evaluate_samples.
        spare: (x, y) that a rank without samples computes with, where others need it to; empty: samples that it was
            trained on.

    Returns:
        "loss", each metric, and of a mix "loss of NAME" of each data set, by name, the same on all ranks.
    """
    workers = places.evaluating
    chosen = min(most or config.train.evaluate_samples, len(samples))
    pipeline = places.mesh.stages.size > 1  # it cuts batches itself, and tells the host the loss of each
    microbatch = 0 if pipeline else config.train.microbatch
    losses = torch.zeros(len(workers.own), 2, dtype=torch.float64, device=CPU if pipeline else engine.device)
    meter.begin(losses[:, :1])
    parts = LossOfParts(samples.parts(chosen), losses)
    batches = evaluation_batches(samples, samples=chosen, batch=config.train.batch, share=workers.share)
    for batch in on_device(batches, engine.device):
        x_of, y_of = places.mesh.take(batch.x, batch.y)
        size = min(config.train.batch, chosen - batch.position)
        done = 0
        for worker, (lo, hi) in enumerate(workers.within(size)):
            meter.worker, place = worker, batch.position + batch.first + lo
            for x, y in microbatches(x_of[lo:hi], y_of[lo:hi], microbatch):
                loss = engine.evaluate(x, y, meter.see)
                count = engine.count(x, y)
                losses[worker, 0] += loss.double() * count
                losses[worker, 1] += count
                parts.add(worker, place, x, y, loss, count)
                place, done = place + len(x), done + 1
        for _ in range(done, workers.rounds(size, microbatch)):
            engine.evaluate(*spare)
        parts.end_batch(engine, batch.position, size, spare)
    sums = meter.gathered(places, engine)
    found = workers.begin_totals(places.everyone, torch.cat([losses, sums, parts.sums], 1))()
    total, counts, *totals = [each / places.mesh.parts.size for each in found]
    measured = sums.shape[1]
    mean = total / counts if counts else math.nan
    return {LOSS: mean} | meter.values(totals[:measured]) | parts.values(totals[measured:])


# -- The held-out loss of each data set of a mix, beside that of all of them together
# Held-out samples come one data set after the other, so that few microbatches have samples of several. The loss of
# every other one counts for its data set as it is; those few are computed once more in pieces, after the batch:
#
#     places      0  1  2  3 | 4  5  6  7 | 8  9 10 11      microbatches of 4
#     data set    a  a  a  a | a  a  b  b | b  b  b  b      in pieces: 4 5, 6 7


class LossOfParts:
    """Adds up losses by data set on one rank.

    Args:
        parts: By the name of a data set, how many of the samples are its own; in their order.
        like: float64 [workers, 1]; where the sums are to be.

    Attributes:
        sums: Of losses times what they are means over, and of the latter, float64 [workers, 2 data sets]; no columns
            for a single data set.
    """

    def __init__(self, parts: Mapping[str, int], like: torch.Tensor) -> None:
        self._parts = dict(parts) if len(parts) > 1 else {}
        self._bounds = list(accumulate(self._parts.values(), initial=0))
        self._mixed: list[tuple[int, int, torch.Tensor, torch.Tensor]] = []  # worker, place and samples
        self.sums = like.new_zeros(len(like), 2 * len(self._parts))

    def add(self, worker: int, place: int, x: torch.Tensor, y: torch.Tensor, loss: torch.Tensor, count: Count) -> None:
        """Take a microbatch whose mean loss was computed, over a count. place: of its first sample among all."""
        pieces = list(self._pieces(place, len(x)))
        if len(pieces) == 1:
            self._add(worker, pieces[0][0], loss, count)
        elif pieces:
            self._mixed.append((worker, place, x, y))

    def end_batch(self, engine: Engine, position: int, size: int, spare: Spare) -> None:
        """Compute what has samples of several data sets in pieces. Collective: every rank computes as often.

        Args:
            engine: Of the model.
            position: Of the global batch among the samples.
            size: How many it has.
            spare: What a rank without samples computes with.
        """
        done = 0
        for worker, place, x, y in self._mixed:
            for number, lo, hi in self._pieces(place, len(x)):
                piece = x[lo:hi], y[lo:hi]
                self._add(worker, number, engine.evaluate(*piece), engine.count(*piece))
                done += 1
        self._mixed.clear()
        inside = {bound for bound in self._bounds if position < bound < position + size}
        for _ in range(done, 2 * len(inside)):  # so many pieces there are at most, each bound in another microbatch
            engine.evaluate(*spare)

    def values(self, totals: Sequence[float]) -> dict[str, float]:
        """The figures by name. totals: of `sums`, over all virtual workers."""
        named = zip(self._parts, totals[::2], totals[1::2], strict=True)
        return {f"{LOSS} of {name}": total / count for name, total, count in named if count}

    def _add(self, worker: int, number: int, loss: torch.Tensor, count: Count) -> None:
        self.sums[worker, 2 * number] += loss.double() * count
        self.sums[worker, 2 * number + 1] += count

    def _pieces(self, place: int, size: int) -> Iterator[tuple[int, int, int]]:
        """(data set, first, last) of the samples of each data set in a stretch of places, counted from its first."""
        for number, (begin, end) in enumerate(zip(self._bounds, self._bounds[1:], strict=False)):
            lo, hi = max(begin, place), min(end, place + size)
            if lo < hi:
                yield number, lo - place, hi - place
