"""A model profile from a configuration: sizes from passes without values, and measured or estimated seconds."""

from __future__ import annotations

import os
import time
import warnings
from bisect import bisect
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod

import torch

from mpitrain.comm.memory import device as devices
from mpitrain.config.named import find
from mpitrain.config.settings import Config
from mpitrain.config.training import OptimSection
from mpitrain.data import Description
from mpitrain.errors import InputError
from mpitrain.layout.boxes import is_replicated
from mpitrain.parallel.costs import BlockCost, Divided, ModelProfile, Weight
from mpitrain.parallel.memory import ITEMSIZE
from mpitrain.planner import counted
from mpitrain.planner.counted import BlockObservation, CountedOperation, interpolate, observe
from mpitrain.planner.machine import MachineProfile
from mpitrain.planner.measured import BlockSeconds, MeasurementError, Workers
from mpitrain.planner.subject import Cut, Subject
from mpitrain.shard.flat import blocks_of
from mpitrain.shard.in_place import MIN_ELEMENTS

_EXACT = 4  # samples up to which passes are made; sizes for more samples are extrapolated linearly
_POINTS = (2, _EXACT)  # samples of the passes that the straight line goes through; without measuring, the only passes
_LONG = 0.35  # seconds of a microbatch beyond which larger ones are extrapolated linearly, not measured
_MOST = 4  # processes that measure on each core, however many ranks there are
# seconds of Python for recomputing a block, and for each tensor that it saves; for "selective", and for each call
# (measured on one machine; a device computes meanwhile)
_HOOKS = 3e-4, 1.2e-5
_SELECTING = 4e-4, 3.5e-5
_BUDGET = 25.0  # seconds of measuring, after which further seconds are estimated from those measured


def profile_of(
    config: Config,
    description: Description,
    machine: MachineProfile | None = None,
    measure: bool = True,
    budget: float = _BUDGET,
    ranks_per_node: int = 1,
) -> BlockProfile:
    """Return the profile of a configuration's model: the cost of each block on one rank.

    Args:
        config: Configuration of the job.
        description: Description of the data that the model is trained on.
        machine: Machine whose speeds are used if seconds are not measured.
        measure: If true, measure seconds on this machine; else estimate them from operations and bytes.
        budget: Seconds of measuring, after which divided models and further threads are estimated from earlier
            measurements.
        ranks_per_node: Ranks of a node. As many processes measure side by side, so that they share cores and caches as
            the ranks will; at least enough to keep all cores busy, and at most four per core.

    Raises:
        InputError: The model cannot be built, or does not fit the data.
    """
    known = machine or MachineProfile("default", "assumed", _cores(), 0)
    times = _Times(config, description, known, budget, ranks_per_node) if measure else None
    return BlockProfile(Subject(config, description, real=measure), known, times)


class BlockProfile(ModelProfile):
    """Model profile that measures on demand and caches the results; `profile_of` makes one."""

    def __init__(self, subject: Subject, machine: MachineProfile, times: _Times | None) -> None:
        config = subject.config
        self.batch, self.precision = config.train.batch, config.train.precision
        self.moments = moments(config.optim) + (config.train.average != "none")
        self.sample_bytes = sum(prod(shape) * dtype.itemsize for shape, dtype in subject.shapes)
        self.listed, self.divisible, self.synchronous = subject.listed, subject.divisible, subject.synchronous
        self.has_units = bool(blocks_of(subject.module))
        self.order = [name for name, _ in subject.module.named_parameters()]
        self._subject = subject
        self._machine, self._times = machine, times
        self._observations = lru_cache(None)(self._observe)
        self._weights = lru_cache(None)(self._list_weights)
        self._cached_blocks = lru_cache(None)(self._make_blocks)

    def blocks(self, samples: int, divided: Divided = Divided(), threads: int = 1) -> tuple[BlockCost, ...]:
        """Return the costs of the blocks, measured or estimated; the rest is as in `ModelProfile.blocks`."""
        if divided.synchronized and not self.synchronous:
            divided = replace(divided, synchronized=False)
        return self._cached_blocks(samples, divided, threads)

    def takes(self, divided: Divided) -> bool:
        """Return True if the model can be divided in this way, see `ModelProfile.takes`."""
        try:
            self._cut(divided, True)
        except InputError:
            return False
        except Exception:  # the model's code may raise anything without values
            return super().takes(divided)
        return True

    def close(self) -> None:
        """End the measuring processes, if any. Cached results remain available."""
        if self._times is not None:
            self._times.close()

    def _make_blocks(self, samples: int, divided: Divided, threads: int) -> tuple[BlockCost, ...]:
        names, weights = self._weights(divided)
        observed = self._observations(samples, divided)
        estimates = self._estimate(observed, weights, threads)
        timed = estimates
        if self._times is not None:
            undivided, whole = estimates, Divided()
            if divided != whole:
                undivided = self._estimate(self._observations(samples, whole), self._weights(whole)[1], threads)
            timed = self._times.of(samples, divided, threads, estimates, undivided)
        blocks = []
        shares: dict[int, tuple[float, ...]] = {}  # equal blocks share one observation
        for name, weight, each, one, time_ in zip(names, weights, observed, estimates, timed, strict=True):
            if id(each) not in shares:
                needed = each.forward[: round(each.needed)]
                parts = each.input, needed, [operation for operation in needed if operation.kept_bytes]
                inner, *again = (counted.seconds(some, self._machine, self.precision, threads) for some in parts)
                inner_part = min(1.0, inner / one.backward) if one.backward else 1.0
                shares[id(each)] = inner_part, *(seconds / (one.forward or 1.0) for seconds in again)
            part, needed_part, products = shares[id(each)]
            hooks = selecting = 0.0
            if self._machine.device is None:
                hooks, selecting = _HOOKS[0] + _HOOKS[1] * each.saved, _SELECTING[0] + _SELECTING[1] * each.calls
            block = BlockCost(
                name=name,
                forward=time_.forward,
                input=time_.backward * part,
                weight=time_.backward * (1 - part),
                saved_bytes=round(each.saved_bytes),
                input_bytes=round(each.input_bytes),
                output_bytes=round(each.output_bytes),
                working=round(each.working_bytes),
                shared_bytes=round(each.shared_bytes),
                weights=weight,
                forwards=each.forwards,
                backwards=each.backwards,
                later=time_.later,
                tail=time_.forward * (1 - needed_part),
                hooks=hooks,
                products=time_.forward * products - selecting,
                product_bytes=round(sum(operation.kept_bytes for operation in each.forward)),
            )
            blocks.append(block)
        return tuple(blocks)

    def _estimate(
        self, observed: Sequence[BlockObservation], weights: Sequence[Sequence[Weight]], threads: int
    ) -> list[BlockSeconds]:
        """Return the seconds of each block, estimated from operations and bytes."""
        machine, precision, itemsize = self._machine, self.precision, ITEMSIZE[self.precision]
        times: list[BlockSeconds] = []
        once: dict[tuple[int, tuple[int, ...]], BlockSeconds] = {}  # equal blocks share one observation
        for each, block_weights in zip(observed, weights, strict=True):
            trained = [weight.numel for weight in block_weights if weight.trained]
            key = id(each), tuple(trained)
            if key not in once:
                # the first gradient of a small weight is copied into flat memory, others are computed there
                # (`shard.in_place`)
                copied = [CountedOperation("copy_", 0.0, 2.0 * n * itemsize) for n in trained if n < MIN_ELEMENTS]
                more = sum(n * itemsize * (1 if n < MIN_ELEMENTS else 3) for n in trained)
                passes = each.forward, (*each.backward, *copied)
                forward, backward = (counted.seconds(one, machine, precision, threads) for one in passes)
                once[key] = BlockSeconds(forward, backward, counted.seconds_to_move(more, machine, threads))
            times.append(once[key])
        return times

    def _observe(self, samples: int, divided: Divided) -> list[BlockObservation]:
        if samples > _EXACT or (self._times is None and samples not in _POINTS):
            return self._interpolate(samples, divided)
        for fake in (True, False):
            try:
                return observe(self._cut(divided, fake), samples)
            except InputError:
                raise
            except Exception as error:  # the model's code may raise anything without values
                failed = error
        if samples == 1:  # a batch norm cannot compute the variance of one value
            return self._interpolate(samples, divided)
        text = " ".join(f"{type(failed).__name__}: {failed}".split())
        raise InputError(f"a pass through the model fails for {samples} samples: {text}") from failed

    def _interpolate(self, samples: int, divided: Divided) -> list[BlockObservation]:
        few, more = (self._observations(size, divided) for size in _POINTS)
        along = (samples - _POINTS[0]) / (_POINTS[1] - _POINTS[0])
        interpolated: dict[tuple[int, int], BlockObservation] = {}
        for a, b in zip(few, more, strict=True):
            if (id(a), id(b)) not in interpolated:
                interpolated[id(a), id(b)] = interpolate(a, b, along)
        return [interpolated[id(a), id(b)] for a, b in zip(few, more, strict=True)]

    @lru_cache(64)  # noqa: B019 a profile lives as long as the plan
    def _cut(self, divided: Divided, fake: bool) -> Cut:
        return self._subject.cut(divided, fake=fake)

    def _list_weights(self, divided: Divided) -> tuple[list[str], list[tuple[Weight, ...]]]:
        """Return the names of the blocks, and the weights of each block."""
        first: dict[int, str] = {}
        weights: list[tuple[Weight, ...]] = []
        cut = self._cut(divided, True)
        names = [name for name, _ in cut.blocks]
        for number, (name, block) in enumerate(cut.blocks):
            like, block_weights = cut.first_equal[number], list[Weight]()
            if like != number:
                block_weights = [
                    replace(each, name=name + each.name.removeprefix(names[like])) for each in weights[like]
                ]
            else:
                for key, p in block.named_parameters(prefix=name):
                    before = first.setdefault(id(p), key)
                    same_as = before if before != key else ""
                    block_weights.append(Weight(key, p.numel(), is_replicated(p), p.requires_grad, same_as))
            weights.append(tuple(block_weights))
        return names, weights


class _Times:
    """Measured seconds of blocks, and seconds estimated from them."""

    def __init__(
        self, config: Config, description: Description, machine: MachineProfile, budget: float, ranks: int
    ) -> None:
        self._config, self._description, self._machine = config, description, machine
        self._budget_left, self._ranks = budget, ranks
        self._workers: dict[int, Workers] = {}
        self._points: dict[tuple[Divided, int, int], list[BlockSeconds] | None] = {}
        self._failure, self._has_warned = "", False  # why a measurement failed; whether a warning was given

    def close(self) -> None:
        for workers in self._workers.values():
            workers.close()
        self._workers.clear()

    def of(
        self,
        samples: int,
        divided: Divided,
        threads: int,
        estimates: Sequence[BlockSeconds],
        undivided: Sequence[BlockSeconds],
    ) -> list[BlockSeconds]:
        """Return the seconds of each block.

        Args:
            samples: Samples of the microbatch.
            divided: Division of the model.
            threads: Threads of a rank.
            estimates: Seconds of each block, estimated from operations and bytes.
            undivided: Estimated seconds of each block of the model that is not divided.
        """
        plain = Divided()
        if threads > 1 and (self._budget_left <= 0 or threads > _cores()):
            gain = 1 + (threads - 1) * self._machine.threads
            return [BlockSeconds(*(s / gain for s in t)) for t in self.of(samples, divided, 1, estimates, undivided)]
        if divided == plain or (self._budget_left > 0 and not divided.whole):
            times = self._interpolated_seconds(samples, divided, threads)
            if times is not None:
                return times
        if divided == plain:
            if not self._has_warned:
                self._has_warned, why = True, self._failure or "the time for measuring is used up"
                warnings.warn(f"block times are estimated, not measured, which is less exact: {why}", stacklevel=2)
            return list(estimates)
        base = self.of(samples, plain, threads, undivided, undivided)
        return [
            BlockSeconds(
                *(seconds * part / whole if whole else part for seconds, part, whole in zip(*each, strict=True))
            )
            for each in zip(base, estimates, undivided, strict=True)
        ]

    def _interpolated_seconds(self, samples: int, divided: Divided, threads: int) -> list[BlockSeconds] | None:
        """Return seconds on a straight line through the two nearest measured powers of two; None if not measured."""
        known = self._measured_powers(samples, divided, threads)
        if samples in known or len(known) < 2:
            return known.get(samples)
        sizes = sorted(known)
        at = min(max(1, bisect(sizes, samples)), len(sizes) - 1)
        low, high = sizes[at - 1], sizes[at]
        along = (samples - low) / (high - low)
        return [_on_line(a, b, along) for a, b in zip(known[low], known[high], strict=True)]

    def _measured_powers(self, samples: int, divided: Divided, threads: int) -> dict[int, list[BlockSeconds]]:
        """Return seconds measured for 1, 2, 4 ... samples, up to `samples` or until a microbatch takes too long."""
        measured: dict[int, list[BlockSeconds]] = {}
        size = 1
        while True:
            point = self._measured_seconds(size, divided, threads)
            if point is not None:
                measured[size] = point
            if (size >= samples and measured) or (size > 1 and point is None):
                return measured  # a failure at size 1 is no reason to stop: batch norms may refuse a single sample
            if point is not None and sum(t.forward + t.backward for t in point) > _LONG and len(measured) > 1:
                return measured
            size *= 2

    def _measured_seconds(self, samples: int, divided: Divided, threads: int) -> list[BlockSeconds] | None:
        """Return the seconds measured for a number of samples, from the cache if there; None if measuring fails."""
        key = (divided, samples, threads)
        if key not in self._points:
            if threads not in self._workers:
                least = max(1, _cores() // threads)
                count = max(least, min(self._ranks, _MOST * _cores()))
                if devices.accelerator() and devices.of_rank(self._config.run.device, 0).type != "cpu":
                    count = 1
                self._workers[threads] = Workers(self._config, self._description, count, threads)
            begin = time.perf_counter()
            try:
                self._points[key] = self._workers[threads].measure(samples, divided)
            except MeasurementError as error:
                self._points[key], self._failure = None, str(error)
            self._budget_left -= time.perf_counter() - begin
        return self._points[key]


def _on_line(a: BlockSeconds, b: BlockSeconds, along: float) -> BlockSeconds:
    """Return the seconds at `along` on the straight line from a (at 0) to b (at 1), or beyond.

    Noise may make a longer than b. The result is therefore at least b / 2, or b * along / 2 for `along` below 1.
    """
    forward = max(a.forward + (b.forward - a.forward) * along, b.forward * min(1.0, along) / 2)
    backward = max(a.backward + (b.backward - a.backward) * along, b.backward * min(1.0, along) / 2)
    return BlockSeconds(forward, backward, (a.later + b.later) / 2)  # `later` does not depend on samples


def _cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def moments(section: OptimSection) -> int:
    """Return how many fp32 numbers the configured optimizer keeps for each element; 2 if that cannot be found out."""
    own_optimizers = {"muon": 2, "lion": 1}  # muon: the parameters that are not hidden matrices keep most
    if section.name.lower() in own_optimizers:
        return own_optimizers[section.name.lower()]
    try:
        kinds = {key.lower(): kind for key, kind in vars(torch.optim).items() if isinstance(kind, type)}
        kind = find("optim.name", section.name) if ":" in section.name else kinds[section.name.lower()]
        tensor = torch.zeros(32, 32, requires_grad=True)
        tensor.grad = torch.ones(32, 32)
        optimizer = kind([tensor], **{"lr": section.lr, **section.options})
        optimizer.step()
        states = [value for value in optimizer.state[tensor].values() if torch.is_tensor(value)]
        return round(sum(value.nbytes for value in states) / tensor.nbytes)
    except Exception:  # the job itself reports what is wrong with the optimizer
        return 2
