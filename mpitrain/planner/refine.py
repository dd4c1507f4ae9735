"""Variants of a layout that depend on the costs of its blocks: stages of equal time, and small layers left whole.

**Stages.** Contiguous runs of blocks go to the stages of a pipeline so that this time is least, by dynamic programming:

    seconds = sum of the stages / chunks + (microbatches x chunks - 1) x the slowest stage         (1)

The seconds of a stage are those of its blocks, forward and backward, and of the messages to the next stage. With one
stage per rank, (1) is the latency of a pipeline in Zheng et al. 2022 (Alpa, section 5.1), which 1F1B and GPipe reach
with equal stages. With more chunks per rank, the idle share shrinks as in Narayanan et al. 2021 (section 2.2). (1) only
ranks the cuts; the seconds of the chosen cut are simulated.

The algorithm follows Alpa. For a fixed limit on the slowest stage, dynamic programming over (stages, blocks) finds the
least sum with no stage slower than the limit. The limit is raised from value to value until no better sum could make
up for a slower stage. There are three differences. All stages have the same mesh, whose shape the layout gives, so
submeshes and their assignment are not searched, and Alpa's recurrence loses the dimension of devices; instead, ranks
may differ in speed (`speeds` of the machine's profile), and a stage takes the time of its own rank. The memory limit
of a stage depends on its position, because the first stage keeps more microbatches than the last. The result is exact:
Alpa's step width between values (its epsilon) is zero here. If all messages have the same length, as in a transformer,
one value of the limit is enough.

**Layers.** A divided pair of layers computes and keeps less on each rank, but needs exchanges, which cost more than
they save if the layers are small. Alpa (Zheng et al. 2022, section 4.2) chooses among all shardings of every operator
of a graph, with costs of resharding between neighbours, by integer linear programming. Here a tensor plan has already
paired the layers, so that activations between pairs are whole either way and resharding costs nothing. A knapsack
problem remains:

    least  sum of seconds of the choices       with  sum of bytes of the choices <= limit,

with one integer for each class of equal pairs: the number of pairs that stay whole. `choose` solves it class by class,
by dynamic programming over the combinations that are not worse than another one in both sums:

    G. L. Nemhauser and Z. Ullmann: Discrete dynamic programming and capital allocation. Management Science 15 (9),
    1969, pages 494-505.

This is exact, also for numbers that are not integers. If more than 16,384 combinations remain, they are thinned out as
in O. H. Ibarra and C. E. Kim: Fast approximation algorithms for the knapsack and sum of subset problems. Journal of the
ACM 22 (4), 1975, pages 463-468: the range of seconds is divided into 16,384 equal intervals, and in each interval the
combination with the fewest bytes stays.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt

from mpitrain.errors import InputError
from mpitrain.parallel.costs import REPLICAS, AxisExchange, BlockCost, Divided, ModelProfile
from mpitrain.parallel.layouts import SECTION_OF, ParallelLayout, sizes
from mpitrain.parallel.memory import ITEMSIZE, Recomputed, recomputed
from mpitrain.planner.predictor import Predictor

_Array = npt.NDArray[np.float64]
_EVEN = 1e-9  # share of a stage's seconds that decides between cuts that are equally good otherwise


@dataclass(frozen=True)
class Limits:
    """Memory limits of the stages of a pipeline.

    Attributes:
        room: Bytes for activations, parameters, gradients and states of a stage.
        microbatches: Largest number of microbatches that each stage keeps at once.
        per_element: Bytes of a parameter element with its gradient and states on one rank.
        recomputed: Recomputation of each block. Default: none.
    """

    room: float
    microbatches: Sequence[int]
    per_element: float
    recomputed: Sequence[Recomputed] = ()


def peak_microbatches(pipeline: int, chunks: int, microbatches: int, schedule: str) -> list[int]:
    """Return the largest number of microbatches that each stage keeps at once (see `pipe.schedule`).

    With several stages per rank, the number is a mean over them.

    Args:
        pipeline: Ranks of the pipeline.
        chunks: Stages of a rank.
        microbatches: Microbatches of a step.
        schedule: Schedule of the pipeline.
    """
    if schedule == "1f1b":
        return [min(pipeline - rank, microbatches) for rank in range(pipeline)]
    most = {"gpipe": microbatches, "interleaved": pipeline + -(-(pipeline - 1) // chunks)}.get(schedule, pipeline)
    return [min(most, microbatches)] * (pipeline * chunks)


def best_cut(
    blocks: Sequence[BlockCost],
    stages: int,
    microbatches: int,
    chunks: int = 1,
    message: Callable[[int], float] = lambda nbytes: 0.0,
    limits: Limits | None = None,
    slowness: Sequence[float] = (),
) -> list[int] | None:
    """Return the bounds of the stages in the list of blocks for which (1) in the module's docstring is least.

    Args:
        blocks: Blocks of the model, in order.
        stages: Number of stages; each gets at least one block.
        microbatches: Microbatches of a step.
        chunks: Stages of a rank.
        message: Function from bytes to the seconds of a message to the next stage; gradients take as long to come back.
        limits: Memory limits of the stages. Default: none.
        slowness: Factor by which the rank of each stage computes slower than `blocks` say. Default: 1.

    Returns:
        One bound more than stages: stage s has blocks bounds[s] to bounds[s + 1] - 1. Of several best cuts, the one
        with the most even stages. None if no cut is possible.
    """
    if not 1 <= stages <= len(blocks):
        return None
    again = limits.recomputed if limits is not None else ()
    known = {slow: stage_seconds(blocks, message, again, slow) for slow in {*slowness} or {1.0}}
    seconds = [known[slow] for slow in slowness or [1.0] * stages]
    allowed = [np.isfinite(seconds[0])] * stages if limits is None else stage_fits(blocks, limits)
    sum_weight, slowest_weight = 1 / chunks, microbatches * chunks - 1
    slowest = _minimize(seconds, allowed, np.maximum)[0]
    if not np.isfinite(slowest):
        return None
    least_sum = _minimize(seconds, allowed, np.add)[0]
    best, best_bounds = np.inf, None
    every = np.stack([*known.values()])
    for limit in np.unique(every[(every >= slowest) & np.isfinite(every)]):
        if sum_weight * least_sum + slowest_weight * limit >= best:
            break
        uneven = [each * (1 + _EVEN * each / limit) if limit else each for each in seconds]
        below = [possible & (each <= limit) for possible, each in zip(allowed, seconds, strict=True)]
        total, bounds = _minimize(uneven, below, np.add)
        if sum_weight * total + slowest_weight * limit < best:
            best, best_bounds = sum_weight * total + slowest_weight * limit, bounds
    return best_bounds


def stage_seconds(
    blocks: Sequence[BlockCost],
    message: Callable[[int], float],
    recomputed: Sequence[Recomputed] = (),
    slowness: float = 1.0,
) -> _Array:
    """Return seconds [begin, end] of a stage of blocks begin to end - 1; infinite for end <= begin.

    Args:
        blocks: Blocks of the model, in order.
        message: Function from bytes to the seconds of a message to the next stage.
        recomputed: Recomputation of each block. Default: none.
        slowness: Factor by which the stage's rank computes slower than `blocks` say.
    """
    again = [block.seconds for block in recomputed] or [0.0] * len(blocks)
    each = (np.array([block.seconds for block in blocks]) + np.array(again)) * slowness
    sums = np.concatenate([[0.0], np.cumsum(each)])
    seconds: _Array = sums[None, :] - sums[:, None]
    seconds[:, 1:-1] += 2 * np.array([message(block.output_bytes) for block in blocks[:-1]])[None, :]
    seconds[np.tril_indices(len(sums))] = np.inf
    return seconds


def stage_fits(blocks: Sequence[BlockCost], limits: Limits) -> list[npt.NDArray[np.bool_]]:
    """Return an array [begin, end] for each stage that is true where blocks begin to end - 1 fit on its rank.

    Tied parameters count in every block that has them.

    Args:
        blocks: Blocks of the model, in order.
        limits: Memory limits of the stages.
    """
    kept_bytes = [block.kept_bytes for block in limits.recomputed] or [block.saved_bytes for block in blocks]
    activations = np.array(kept_bytes, dtype=float)
    weights = np.array([sum(weight.numel for weight in block.weights) for block in blocks], dtype=float)
    fits = []
    for microbatches in limits.microbatches:
        sums = np.concatenate([[0.0], np.cumsum(activations * microbatches + weights * limits.per_element)])
        fits.append(sums[None, :] - sums[:, None] <= limits.room)
    return fits


def _minimize(
    seconds: Sequence[_Array], allowed: Sequence[npt.NDArray[np.bool_]], combine: Callable[[_Array, _Array], _Array]
) -> tuple[float, list[int]]:
    """Return the least sum (or maximum) of the stages' seconds over all allowed cuts, and the bounds of that cut."""
    places = len(seconds[0])
    best = np.full(places, np.inf)
    best[0] = 0.0
    choices = []
    for possible, each in zip(allowed, seconds, strict=True):
        options = combine(best[:, None], np.where(possible, each, np.inf))
        choice = np.argmin(options, axis=0)
        best = options[choice, np.arange(places)]
        choices.append(choice)
    bounds = [places - 1]
    for choice in reversed(choices):
        bounds.append(int(choice[bounds[-1]]))
    return float(best[-1]), bounds[::-1]


_LESS = 0.95  # part of the seconds with equal shares that shares by time may take at most
_MOST = 1 << 14  # combinations that are kept for the next class


@dataclass(frozen=True)
class Pairs:
    """A class of equal pairs of layers in a tensor plan, each of which may be divided or whole.

    Attributes:
        patterns: Patterns of each pair that its names match (as in parallel.whole).
        seconds: Further seconds of a step for each pair that is whole; negative if whole is faster.
        nbytes: Further bytes of a rank's memory for each pair that is whole.
    """

    patterns: tuple[tuple[str, ...], ...]
    seconds: float
    nbytes: float


def choose(pairs: Sequence[Pairs], limit: float) -> tuple[int, ...] | None:
    """Return how many pairs of each class stay whole, so that a step takes the least seconds within the memory limit.

    The result is optimal unless combinations are thinned out. In that case each class costs at most 1 / 16,384 of the
    range of seconds.

    Args:
        pairs: Classes of equal pairs.
        limit: Bytes that are free if everything is divided; negative if not even that fits.

    Returns:
        A number for each class; None if nothing fits.
    """
    seconds, nbytes, counts = np.zeros(1), np.zeros(1), np.zeros((1, 0), dtype=np.int64)
    for each in pairs:
        more = np.arange(len(each.patterns) + 1)
        all_seconds = np.add.outer(seconds, more * each.seconds).ravel()
        all_bytes = np.add.outer(nbytes, more * each.nbytes).ravel()
        indices = np.lexsort((all_seconds, all_bytes))
        least = np.minimum.accumulate(all_seconds[indices])
        indices = indices[np.diff(least, prepend=np.inf) < 0]  # more bytes only for fewer seconds
        seconds, nbytes = all_seconds[indices], all_bytes[indices]
        if len(indices) > _MOST:
            of_range = (seconds - seconds[-1]) / (seconds[0] - seconds[-1])
            thinned = np.flatnonzero(np.diff((of_range * _MOST).astype(int), prepend=-1))
            indices, seconds, nbytes = indices[thinned], seconds[thinned], nbytes[thinned]
        counts = np.column_stack((counts[indices // len(more)], indices % len(more)))
    fitting = np.count_nonzero(nbytes <= limit)  # the first ones fit, and the last of these is fastest
    return tuple(counts[fitting - 1].tolist()) if fitting else None


def whole_patterns(pairs: Sequence[Pairs], counts: Sequence[int]) -> tuple[str, ...]:
    """Return the patterns of parallel.whole that keep a number of pairs of each class whole, as short as possible.

    Args:
        pairs: Classes of equal pairs.
        counts: Number of pairs of each class that stay whole.
    """
    all_patterns: list[str] = []
    for each, count in zip(pairs, counts, strict=True):
        chosen = [pattern for patterns in each.patterns[:count] for pattern in patterns]
        if count == len(each.patterns) > 1:
            chosen = list(dict.fromkeys(map(_class_of, chosen)))
        all_patterns += chosen
    return tuple(all_patterns)


def pairs_of(
    model: ModelProfile,
    samples: int,
    divided: Divided,
    exchange: Callable[[AxisExchange], float],
    microbatches: int,
    per_element: float,
    threads: int = 1,
) -> list[Pairs]:
    """Return the classes of pairs that a model's plan divides, with the extra cost of each pair if it stays whole.

    The cost is the difference of two profiles: with everything divided, and with all pairs of one class whole. Layers
    belong to one pair if they have the same parent, share parameters, or cannot be whole without each other.

    Args:
        model: Profile of the model.
        samples: Samples of a microbatch.
        divided: Division of the model; its `whole` is ignored.
        exchange: Function that returns the seconds of a collective of the tensor axis.
        microbatches: Microbatches of a step.
        per_element: Bytes of a parameter element with its gradient and states on one rank.
        threads: Threads that a rank computes with.
    """

    def cost(blocks: Sequence[BlockCost]) -> tuple[float, float]:
        """Return (seconds of a step, bytes) of blocks."""
        seconds = sum(block.seconds for block in blocks)
        seconds += sum(exchange(each) for block in blocks for each in (*block.forwards, *block.backwards))
        numel, activations = sum(block.numel for block in blocks), sum(block.saved_bytes for block in blocks)
        return seconds * microbatches, activations + numel * per_element

    base = replace(divided, whole=())
    blocks = model.blocks(samples, base, threads)
    before = cost(blocks)
    classes: list[Pairs] = []
    for patterns in _classes(model, base, _units(blocks)):
        whole = replace(base, whole=tuple(name for each in patterns for name in each))
        seconds, nbytes = cost(model.blocks(samples, whole, threads))
        count = len(patterns)
        classes.append(Pairs(tuple(patterns), (seconds - before[0]) / count, (nbytes - before[1]) / count))
    return classes


def _units(blocks: Sequence[BlockCost]) -> list[tuple[str, ...]]:
    """Return the patterns of layers that are divided or whole together, in the order of the model."""
    weights = [weight for block in blocks for weight in block.weights if not weight.replicated]
    units: dict[str, list[str]] = {}
    unit_of: dict[str, str] = {}
    for weight in weights:
        layer = weight.name.rpartition(".")[0]
        around = layer.rpartition(".")[0]  # parent; for a layer that is a block, or in no block, the layer
        inside = any(around == block.name or around.startswith(f"{block.name}.") for block in blocks)
        key = unit_of.get(weight.same_as) or (around if inside else layer)
        unit_of[weight.name] = key
        if layer not in units.setdefault(key, []):
            units[key].append(layer)
    return [
        (f"{key}.*",) if all(layer.startswith(f"{key}.") for layer in layers) else tuple(layers)  # all of one module
        for key, layers in units.items()
    ]


def _classes(model: ModelProfile, base: Divided, units: Sequence[tuple[str, ...]]) -> list[list[tuple[str, ...]]]:
    """Return classes of equal units, each of which can be whole by itself; other units are left out."""
    classes: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for unit in units:
        classes.setdefault(tuple(map(_class_of, unit)), []).append(unit)
    separable: list[list[tuple[str, ...]]] = []
    waiting: list[tuple[str, ...]] = []
    for members in classes.values():
        by_two = [(*first, *second) for first, second in zip(members[::2], members[1::2], strict=False)]
        with_last = [(*first, *second) for first, second in zip(waiting, members, strict=False)]
        fitting = (each for each in (members, by_two, with_last) if each and model.takes(replace(base, whole=each[0])))
        chosen = next(fitting, [])
        waiting = [] if chosen else members
        separable += [chosen] if chosen else []
    return separable


def _class_of(pattern: str) -> str:
    """Return a pattern with its numbers replaced by "*"."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", pattern)


class Refinement:
    """Callable that returns the variants of a layout, the most promising first and the layout itself last.

    Args:
        predictor: Predictor with the model to cut and divide, and the machine that gives the seconds of messages.
    """

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._cached_whole = lru_cache(maxsize=None)(self._find_whole)
        self._cached_cut = lru_cache(maxsize=None)(self._find_cut)

    def __call__(self, layout: ParallelLayout) -> list[ParallelLayout]:
        variants = [layout]
        if layout.tensor > 1 and not layout.sequence:
            whole = self._cached_whole(_without_placement(layout))
            variants = ([replace(layout, whole=whole)] if whole else []) + variants
        if layout.pipeline > 1:
            cuts = [
                (each, self._cached_cut(_without_placement(each), self._bytes_per_element(each))) for each in variants
            ]
            variants = [replace(each, cut=cut) for each, cut in cuts if cut] + variants
        elif len({*self._predictor.slowness(layout, "data")}) > 1:
            uneven = [replace(each, shares="time") for each in variants]
            seconds, before = (min(self._seconds(each) for each in some) for some in (uneven, variants))
            variants = (uneven if seconds < _LESS * before else []) + variants
        return variants

    def _seconds(self, layout: ParallelLayout) -> float:
        try:
            return self._predictor.predict(layout).seconds
        except InputError:
            return math.inf

    def _find_cut(self, layout: ParallelLayout, per_element: float) -> tuple[int, ...]:
        """Return the number of blocks of each stage; empty if stages of equally many blocks are best."""
        count, stages = self._predictor.microbatches(layout), layout.pipeline * layout.chunks
        microbatches = peak_microbatches(layout.pipeline, layout.chunks, count, layout.schedule)
        room = (self._predictor.room() - self._predictor.machine.process) / layout.chunks
        places = self._predictor.places(layout)
        message = partial(self._predictor.collectives.message, inside=places.stages.spans == 1)
        blocks = self._predictor.blocks(layout, places)
        # where stages begin is not known yet; if blocks are recomputed, each is taken as a segment of its own
        begins = range(len(blocks)) if layout.recompute else (0,)
        limits = Limits(room, microbatches, per_element, recomputed(layout, blocks, begins))
        flow, slowness = self._predictor.flow(layout), self._predictor.slowness(layout)
        assert flow is not None
        cut = partial(best_cut, blocks, stages, count, layout.chunks, message)
        cut = partial(cut, slowness=[slowness[rank] for rank in flow.shape.rank_of])
        bounds = cut(limits) or cut()  # the limits are estimates
        return sizes(bounds) if bounds else ()

    def _find_whole(self, layout: ParallelLayout) -> tuple[str, ...]:
        """Return patterns of the layers that are better left whole, as far as memory allows."""
        places = self._predictor.places(layout)

        def exchange(each: AxisExchange) -> float:
            group = places.replicas if each.axis == REPLICAS else places.over(each.axis)
            return self._predictor.collectives.seconds(each.operation, each.nbytes, group)

        count, per_element = self._predictor.microbatches(layout), self._bytes_per_element(layout) / layout.pipeline
        try:
            pairs = pairs_of(
                self._predictor.model, layout.microbatch, layout.divided, exchange, count, per_element, places.threads
            )
            taken = sum(self._predictor.memory(layout).values())
        except InputError:
            return ()
        counts = choose(pairs, self._predictor.room() - taken)
        return whole_patterns(pairs, counts) if counts and any(counts) else ()

    def _bytes_per_element(self, layout: ParallelLayout) -> float:
        """Return the bytes of a parameter element with its gradient and states on one rank."""
        inputs = self._predictor.inputs(self._predictor.places(layout))
        return inputs.stored(1.0, ITEMSIZE[self._predictor.model.precision]).total


def _without_placement(layout: ParallelLayout) -> ParallelLayout:
    """Return the layout with default placement of states, which neither a cut nor a division depends on."""
    placement = {"zero", "share_node", "shard_within", "reshard", "offload"}
    return layout.only(*(SECTION_OF.keys() - placement))
