"""Loss and metrics of a trained model on held-out samples, equal on all ranks.

The rank that has the model's output computes sums for each metric, and all ranks receive the totals:

    metrics                             selected by
    metrics of the task                 the kind of data: see `mpitrain.models.metrics`
    built-in measures                   train.metrics, for example f1
    functions of the user               train.metrics, as package.module:function; also metrics of torchmetrics
    metrics of the user's model         model.factory: a method `metrics(output, y)` of the module, which returns a dict

In a pipeline only the last stage has outputs. Tensor ranks that divide a vocabulary each have a part of the scores. A
rank may have no samples at all. In each case all ranks end with the same figures.
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
from mpitrain.config.named import describe_error, find
from mpitrain.config.settings import Config
from mpitrain.data import Dataset, Description, evaluation_batches
from mpitrain.data.on_device import on_device
from mpitrain.errors import InputError, refusal
from mpitrain.layers.loss_terms import Count
from mpitrain.models.losses import UNCOUNTED
from mpitrain.models.metrics import (
    Gather,
    Measure,
    Metric,
    SampleMetric,
    ScoreMetric,
    TargetResults,
    compare_targets,
    fits,
    measures_of,
    named_measures,
)
from mpitrain.models.task import Task
from mpitrain.tensor.axis import Axis
from mpitrain.tensor.vocabulary import evaluate_scores, gather_scores
from mpitrain.trainer.data import GroupPlaces
from mpitrain.trainer.engine import Engine

DIRECTION = "higher_is_better"  # attribute of a user's metric
Function = Callable[[Any, Any], Any]
Spare = tuple[torch.Tensor, torch.Tensor] | tuple[()]  # microbatch with which a rank without samples computes
_METHODS = ("update", "compute", "reset")  # methods of torchmetrics.Metric, which is not imported here
LOSS = "loss"  # name of the figure that is not a metric


class UserMetric(Metric):
    """A user's function(output, y) that is evaluated as a metric.

    The function receives the model's whole output for some samples and their targets, in evaluation mode and without
    gradients. It returns one of two:

        a tensor [samples]    a value of each sample
        a number, or a tensor without dimensions    the mean over these samples

    The figure is the mean over all held-out samples, each counted once, on any number of ranks. With parallel.slices,
    the function receives one piece of each sample's sequence at a time, and each value is weighted by the length of the
    piece. The function's attribute `higher_is_better` says which figures are better, for train.monitor and
    checkpoint.best.

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
        return sums_of(named, _call_user_code(named, lambda: self.function(output, y)), y)

    def value(self, sums: torch.Tensor) -> float:
        total, count = sums.tolist()
        return total / count if count else math.nan


class Meter:
    """Accumulator of metrics on this rank, which combines the sums of all ranks into figures.

    Args:
        metrics: Metrics to evaluate.
        description: Description of the data.
        model_metrics: The model's own function, which returns a dict; None if it has none.
        ends_here: If true, this rank has the model's outputs; otherwise it does not call functions of the user.
        divided: Axis of ranks that have parts of the scores, and number of classes over all of them; None if each rank
            has all scores.

    Attributes:
        metrics: Metrics to evaluate.
        worker: Virtual worker to which samples are attributed.
        directions: For the loss and each metric, by name: true if larger is better, None if unknown.
        counts: Sums over all ranks of the metrics that count, by name; set by `gather_sums`.
    """

    def __init__(
        self,
        metrics: Sequence[Measure],
        description: Description,
        model_metrics: Function | None = None,
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
        self._has_model_metrics, self._model_metrics = model_metrics is not None, model_metrics if ends_here else None
        self._sums: dict[str, torch.Tensor] = {}  # by the metric's name: [workers, size]
        self._model_sums: dict[str, torch.Tensor] = {}  # by the name in the model's dict: [workers, 2]
        self._figures: dict[str, float] = {}  # figures of metrics that collect outputs
        self._names: list[str] = []  # names in the model's dict, equal on all ranks
        self._like = torch.empty(0, 1)

    def add(self, metrics: Sequence[Measure]) -> None:
        """Evaluate further metrics."""
        self.metrics += metrics
        for metric in metrics:
            self.directions |= metric.directions
        self._collected = [metric for metric in self.metrics if isinstance(metric, SampleMetric)]
        plain = [metric for metric in self.metrics if isinstance(metric, Metric)]
        self._summed = [metric for metric in plain if not metric.counts]
        self._counting = [metric for metric in plain if metric.counts]
        self._top = any(isinstance(metric, ScoreMetric) and metric.top for metric in plain)

    def begin(self, like: torch.Tensor) -> None:
        """Reset all sums. like: float64 [workers, 1], on the device of the results."""
        self._like, self.worker = like, 0
        self.counts, self._sums, self._model_sums, self._figures = {}, {}, {}, {}
        for metric in self._collected:
            metric.begin()

    def see(self, output: Any, y: Any) -> None:
        """Add the metrics of some samples.

        Args:
            output: Output of the model for these samples.
            y: Their targets.
        """
        shown: Any = output
        axis, classes = self._divided or (None, 0)
        if axis is not None:
            if self._model_metrics is not None or any(isinstance(m, (UserMetric, SampleMetric)) for m in self.metrics):
                output = gather_scores(output, axis, classes)
            nats, guess, above = evaluate_scores(shown, y, axis, classes, top=self._top)
            right = y.reshape(-1)
            shown = TargetResults(nats, guess, above, right, right != UNCOUNTED)
        elif any(isinstance(metric, ScoreMetric) and fits(metric, output, y) for metric in self.metrics):
            shown = compare_targets(output, y, top=self._top)
        share = y.numel() / (len(y) * self._y_numbers) if isinstance(y, torch.Tensor) and len(y) else 1.0
        for metric in self.metrics:
            if isinstance(metric, UserMetric):
                self._add(self._sums, metric.name, metric.sums(output, y) * share)
            elif isinstance(metric, ScoreMetric) and isinstance(shown, TargetResults):
                if axis is not None or fits(metric, output, y):
                    self._add(self._sums, metric.name, metric.target_sums(shown))
            elif isinstance(metric, Metric) and fits(metric, output, y):
                self._add(self._sums, metric.name, metric.sums(output, y))
        for collected in self._collected if self._ends_here else ():
            collected.update(output, y)
        if self._model_metrics is not None:
            for name, sums in _sums_of_model(self._model_metrics, output, y).items():
                self._add(self._model_sums, name, sums * share)

    def _add(self, to: dict[str, torch.Tensor], name: str, sums: torch.Tensor) -> None:
        if name not in to:
            to[name] = torch.zeros(len(self._like), len(sums), dtype=torch.float64, device=sums.device)
        to[name][self.worker] += sums

    def gather_sums(self, places: GroupPlaces, engine: Engine) -> torch.Tensor:
        """Return the sums of this rank's virtual workers, on all stages of a pipeline. Collective.

        The counts of metrics that count are summed over all ranks into `counts`.

        Args:
            places: Place of this rank.
            engine: Engine of the model.

        Returns:
            Sums, float64 [workers, numbers].
        """
        pipeline = engine.pipeline
        if self._has_model_metrics:
            names_of_ranks = places.everyone.all_gather_object(sorted(self._model_sums))
            self._names = sorted({name for names in names_of_ranks for name in names})
            if pipeline is not None:
                self._names = pipeline.comm.broadcast_object(self._names, pipeline.last_rank)
        columns = [self._rows(self._sums.get(metric.name), metric.size) for metric in self._summed]
        columns += [self._rows(self._model_sums.get(name), 2) for name in self._names]
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
            gather = make_gather(places.everyone)
            if self._ends_here:
                self._figures = {n: v for metric in self._collected for n, v in metric.figures(gather).items()}
            if pipeline is not None:
                self._figures = pipeline.comm.broadcast_object(self._figures, pipeline.last_rank)
        return sums

    def _rows(self, sums: torch.Tensor | None, size: int) -> torch.Tensor:
        return self._like.new_zeros(len(self._like), size) if sums is None else sums.to(self._like.device)

    def values(self, totals: Sequence[float]) -> dict[str, float]:
        """Return the figures by name, without metrics that do not suit the model's output.

        Args:
            totals: Numbers of `gather_sums`, summed over all virtual workers.
        """
        figures, remaining = dict[str, float](), list(totals)
        for metric in self._summed:
            sums, remaining = remaining[: metric.size], remaining[metric.size :]
            if sums[-1]:  # number of samples or targets counted
                figures |= metric.figures(torch.tensor(sums, dtype=torch.float64))
        for metric in self._counting:
            if self.counts[metric.name].any():
                figures |= metric.figures(self.counts[metric.name])
        figures |= self._figures
        for name in self._names:
            (total, count), remaining = remaining[:2], remaining[2:]
            figures[name] = total / count
        return figures


def meter_of(config: Config, task: Task, description: Description, engine: Engine) -> Meter:
    """Return the meter of a model that was divided over the ranks.

    Args:
        config: The settings.
        task: The whole model.
        description: Description of the data.
        engine: Engine of the model.

    Raises:
        InputError: If a function of train.metrics cannot be found, or has the name of another figure.
    """
    requested = config.train.metrics
    metrics = measures_of(description) + named_measures([name for name in requested if ":" not in name], description)
    for path in (name for name in requested if ":" in name):
        function, classes = find("train.metrics", path), description.classes or ()
        user_metric = (
            LibraryMetric(path, function, classes) if is_library_metric(function) else UserMetric(path, function)
        )
        if user_metric.name in {LOSS, *(metric.name for metric in metrics)}:
            raise refusal(f"train.metrics {path}: the name {user_metric.name!r} is already used; rename the function")
        metrics.append(user_metric)
    pipeline, criterion = engine.pipeline, getattr(task.module, "criterion", None)
    axis = getattr(criterion, "axis", None)  # attribute of a criterion that works on parts of the scores
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


def sums_of(named: str, value: Any, y: Any) -> torch.Tensor:
    """Return [sum, samples] from the value of a user's metric: one number for each sample of y, or their mean.

    Args:
        named: Name of the metric in messages.
        value: Return value of the metric.
        y: Targets of the samples.

    Raises:
        InputError: If the value is neither.
    """
    samples = len(y)
    tensor = torch.as_tensor(value).detach() if isinstance(value, (int, float, torch.Tensor)) else None
    if tensor is None or tensor.shape not in ((), (samples,)) or tensor.is_complex():
        what = f"a tensor {list(tensor.shape)}" if tensor is not None else type(value).__name__
        raise InputError(
            f"{named} returned {what} for {samples} samples; return one number per sample, or the mean over them"
        )
    total = tensor.double() * samples if tensor.dim() == 0 else tensor.double().sum()
    return torch.stack([total, torch.full_like(total, samples)])


def _call_user_code(named: str, act: Callable[[], Any]) -> Any:
    """Return `act()`; convert any exception into an InputError that names the user's function."""
    try:
        return act()
    except Exception as error:
        raise InputError(f"{named} raised {describe_error(error)}; fix it") from error


def _sums_of_model(function: Function, output: Any, y: Any) -> dict[str, torch.Tensor]:
    """Return the sums of the model's own `metrics`, by name."""
    named = "the model's metrics(output, y)"
    values = _call_user_code(named, lambda: function(output, y))
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise InputError(f"{named} returned {type(values).__name__}; return a dict of names and values")
    return {name: sums_of(f"{named}: {name!r}", value, y) for name, value in values.items()}


def is_library_metric(value: object) -> bool:
    """Return whether an object that train.metrics names is a metric of torchmetrics, or a class of one."""
    module = isinstance(value, nn.Module) or (isinstance(value, type) and issubclass(value, nn.Module))
    return module and all(callable(getattr(value, name, None)) for name in _METHODS)


class LibraryMetric(SampleMetric):
    """A torchmetrics.Metric or MetricCollection of the user.

    It is updated with the model's output and the targets, on the output's device. Its states are gathered from all
    ranks and reduced as they specify. A figure is the number that it computes. If it computes a number for each class
    or a dict, there is a figure for each entry.

    Args:
        path: package.module:name, for messages; the figure has that name.
        metric: The metric, which is copied, or a class that needs no arguments.
        classes: Names of the classes; may be empty.
    """

    def __init__(self, path: str, metric: Any, classes: Sequence[str]) -> None:
        self.path, self.name, self._classes = path, path.rpartition(":")[2], tuple(classes)
        self._metric = self._call_user_code(lambda: metric() if isinstance(metric, type) else copy.deepcopy(metric))
        self.higher = getattr(self._metric, "higher_is_better", None)
        for metric in self._metrics():
            metric.sync_on_compute = metric._to_sync = False  # torch.distributed is not used
        self._seen = 0  # samples

    def begin(self) -> None:
        self._metric.reset()
        self._seen = 0

    def update(self, output: Any, y: Any) -> None:
        if isinstance(output, torch.Tensor):
            self._metric.to(output.device)
        self._call_user_code(lambda: self._metric.update(output, y))
        self._seen += len(y)

    def figures(self, gather: Gather) -> dict[str, float]:
        if not sum(int(seen) for seen in gather(torch.tensor([self._seen]))):
            return {}
        for metric in self._metrics():
            for state, reduce in metric._reductions.items():
                setattr(metric, state, _reduced(getattr(metric, state), reduce, gather))
            metric._update_count = max(metric._update_count, 1)
            metric._computed = None
        return dict(self._named(self.name, self._call_user_code(self._metric.compute)))

    def _metrics(self) -> Iterator[Any]:
        """Return the metric and the metrics that it contains; their states are to be gathered from all ranks."""
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
                f"train.metrics {self.path} computed {what}; it must compute a number, one number per class, or a dict"
            )

    def _call_user_code(self, act: Callable[[], Any]) -> Any:
        return _call_user_code(f"train.metrics {self.path}", act)


def _reduced(state: Any, reduce: Any, gather: Gather) -> Any:
    """Return a state of all ranks: reduced, or concatenated if the metric has a list."""
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


def make_gather(comm: Communicator) -> Gather:
    """Return a function that gathers a tensor from every rank, in order, on the host.

    The tensors' sizes may differ and be 0. Calls of the function are collective over `comm`.
    """

    def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
        host_tensor = tensor.detach().cpu()
        headers = comm.all_gather_object(
            [list(host_tensor.shape), str(host_tensor.dtype).removeprefix("torch."), host_tensor.numel()]
        )
        counts = [count for _, _, count in headers]
        names = [name for _, name, count in headers if count] or [headers[0][1]]
        dtype = getattr(torch, names[0])  # a rank without elements may have another dtype
        carried = torch.uint8 if dtype == torch.bool else dtype
        everything = torch.empty(sum(counts), dtype=carried)
        if len(everything):
            comm.all_gather(everything, host_tensor.reshape(-1).to(carried).contiguous(), counts=counts)
        parts = everything.to(dtype).split(counts)
        return [part.reshape(shape) for part, (shape, _, _) in zip(parts, headers, strict=True)]

    return gather


def evaluate_samples(
    config: Config,
    places: GroupPlaces,
    engine: Engine,
    samples: Dataset,
    meter: Meter,
    *,
    most: int = 0,
    spare: Spare = (),
) -> dict[str, float]:
    """Return the mean loss and the metrics of samples, each counted once. Collective.

    The host waits for the device only once, at the end.

    Args:
        config: The settings.
        places: Place of this rank.
        engine: Engine of the model.
        samples: Data set, from which samples are chosen at equal distances.
        meter: Meter of the metrics.
        most: Largest number of samples; 0 for train.evaluate_samples.
        spare: Microbatch (x, y) with which a rank without samples takes part in other ranks' passes; empty for one on
            which it was trained.

    Returns:
        "loss", each metric, and for a mix "loss of NAME" of each data set, by name; equal on all ranks.
    """
    workers = places.evaluating
    chosen = min(most or config.train.evaluate_samples, len(samples))
    pipeline = places.mesh.stages.size > 1  # divides batches itself, and returns losses on the host
    microbatch = 0 if pipeline else config.train.microbatch
    losses = torch.zeros(len(workers.local_workers), 2, dtype=torch.float64, device=CPU if pipeline else engine.device)
    meter.begin(losses[:, :1])
    parts = LossOfParts(samples.parts(chosen), losses)
    batches = evaluation_batches(samples, samples=chosen, batch=config.train.batch, share=workers.share)
    for batch in on_device(batches, engine.device):
        x_of, y_of = places.mesh.take(batch.x, batch.y)
        size = min(config.train.batch, chosen - batch.position)
        done = 0
        for meter.worker, each in enumerate(workers.microbatches(size, microbatch)):
            for lo, hi in each:
                x, y = x_of[lo:hi], y_of[lo:hi]
                loss = engine.evaluate(x, y, meter.see)
                count = engine.count(x, y)
                losses[meter.worker, 0] += loss.double() * count
                losses[meter.worker, 1] += count
                parts.add(meter.worker, batch.position + batch.first + lo, x, y, loss, count)
                done += 1
        for _ in range(done, workers.rounds(size, microbatch)):
            engine.evaluate(*spare)
        parts.end_batch(engine, batch.position, size, spare)
    sums = meter.gather_sums(places, engine)
    reduced = workers.begin_totals(places.everyone, torch.cat([losses, sums, parts.sums], 1))()
    total, counts, *totals = [each / places.mesh.parts.size for each in reduced]
    measured = sums.shape[1]
    mean = total / counts if counts else math.nan
    return {LOSS: mean} | meter.values(totals[:measured]) | parts.values(totals[measured:])


# -- held-out loss of each data set of a mix
# Held-out samples are ordered by data set, so that few microbatches have samples of several data sets. The loss of any
# other microbatch is added to its data set directly; those few are computed again in pieces, after the batch:
#
#     places      0  1  2  3 | 4  5  6  7 | 8  9 10 11      microbatches of 4
#     data set    a  a  a  a | a  a  b  b | b  b  b  b      in pieces: 4 5, 6 7


class LossOfParts:
    """Accumulator of losses by data set on one rank.

    Args:
        parts: Number of samples of each data set, by name, in the order of the samples.
        like: float64 [workers, 1], on the device of the sums.

    Attributes:
        sums: For each data set, sum of losses times counts, and sum of counts, float64 [workers, 2 data sets]; without
            columns for a single data set.
    """

    def __init__(self, parts: Mapping[str, int], like: torch.Tensor) -> None:
        self._parts = dict(parts) if len(parts) > 1 else {}
        self._bounds = list(accumulate(self._parts.values(), initial=0))
        self._mixed: list[tuple[int, int, torch.Tensor, torch.Tensor]] = []  # worker, place and samples
        self.sums = like.new_zeros(len(like), 2 * len(self._parts))

    def add(self, worker: int, place: int, x: torch.Tensor, y: torch.Tensor, loss: torch.Tensor, count: Count) -> None:
        """Add a microbatch whose mean loss was computed.

        Args:
            worker: Virtual worker of the samples.
            place: Position of the microbatch's first sample among all samples.
            x: Inputs.
            y: Targets.
            loss: Mean loss.
            count: Count that the mean is over.
        """
        pieces = list(self._pieces(place, len(x)))
        if len(pieces) == 1:
            self._add(worker, pieces[0][0], loss, count)
        elif pieces:
            self._mixed.append((worker, place, x, y))

    def end_batch(self, engine: Engine, position: int, size: int, spare: Spare) -> None:
        """Compute microbatches with samples of several data sets in pieces.

        Collective: all ranks make the same number of passes.

        Args:
            engine: Engine of the model.
            position: Position of the global batch among the samples.
            size: Samples of the global batch.
            spare: Microbatch with which a rank without samples computes.
        """
        done = 0
        for worker, place, x, y in self._mixed:
            for number, lo, hi in self._pieces(place, len(x)):
                piece = x[lo:hi], y[lo:hi]
                self._add(worker, number, engine.evaluate(*piece), engine.count(*piece))
                done += 1
        self._mixed.clear()
        inside = {bound for bound in self._bounds if position < bound < position + size}
        for _ in range(done, 2 * len(inside)):  # upper bound of the pieces: each bound in a different microbatch
            engine.evaluate(*spare)

    def values(self, totals: Sequence[float]) -> dict[str, float]:
        """Return the figures by name. totals: `sums`, added over all virtual workers."""
        named = zip(self._parts, totals[::2], totals[1::2], strict=True)
        return {f"{LOSS} of {name}": total / count for name, total, count in named if count}

    def _add(self, worker: int, number: int, loss: torch.Tensor, count: Count) -> None:
        self.sums[worker, 2 * number] += loss.double() * count
        self.sums[worker, 2 * number + 1] += count

    def _pieces(self, place: int, size: int) -> Iterator[tuple[int, int, int]]:
        """Yield (data set, first, last) for each data set with samples in a range of positions.

        `first` and `last` are counted from the first position, `place`.
        """
        for number, (begin, end) in enumerate(zip(self._bounds, self._bounds[1:], strict=False)):
            lo, hi = max(begin, place), min(end, place + size)
            if lo < hi:
                yield number, lo - place, hi - place
