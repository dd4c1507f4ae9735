"""Metrics of torchmetrics as measures: their states are gathered from all ranks, and reduced as they say themselves.

The library is not imported here. What has its methods `update`, `compute` and `reset` is taken for one of its metrics.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mpitrain.comm import Communicator
from mpitrain.config.named import told
from mpitrain.errors import InputError
from mpitrain.models.metrics import Collected, Gather

_METHODS = ("update", "compute", "reset")


def is_library_metric(found: object) -> bool:
    """Return whether something that train.metrics names is a metric of torchmetrics, or a class of one."""
    module = isinstance(found, nn.Module) or (isinstance(found, type) and issubclass(found, nn.Module))
    return module and all(callable(getattr(found, name, None)) for name in _METHODS)


class LibraryMetric(Collected):
    """A torchmetrics.Metric or MetricCollection of the user's.

    It is updated with the model's output and the targets, on the device of the output. A figure is what it computes: a
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
        value = self._tried(self._metric.compute)
        return dict(self._named(self.name, value))

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
        try:
            return act()
        except Exception as error:
            raise InputError(f"train.metrics {self.path} raised {told(error)}; mend it") from error


def _reduced(state: Any, reduce: Any, gather: Gather) -> Any:
    """Return a state of all ranks together: reduced, or one after the other where the metric keeps a list."""
    if isinstance(state, torch.Tensor):
        stacked = torch.stack([part.to(state.device) for part in gather(state)])
        return reduce(stacked) if reduce is not None else stacked
    counts = [int(count) for count in gather(torch.tensor([len(state)]))]
    items: list[list[torch.Tensor]] = [[] for _ in counts]
    for number in range(max(counts)):
        parts = gather(state[number] if number < len(state) else torch.empty(0))
        for of_rank, part, count in zip(items, parts, counts, strict=True):
            if number < count:
                of_rank.append(part)
    flat = [item for of_rank in items for item in of_rank]
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
