"""Search for the best of all layouts, or of those that keep a configuration's explicit settings, with few simulations.

The search is a branch and bound. Layouts are visited in the order of their estimated seconds, each with its best
variant first (stages of unequal length, layers kept whole). The other variants follow when no other layout is estimated
to be faster than the first variant. A variant that does not fit into memory is set aside; one that fits is simulated. A
layout is skipped if the requested number of layouts is already known to be faster than its lower bound. The result
therefore equals that of simulating all layouts, unless the number of simulations reaches its limit. The limit counts
simulations instead of seconds, so that the answer does not depend on how busy the machine is. A layout that only saves
memory compared with another (offload, recompute) is visited only if the other one does not fit; of the ways to
recompute, the one that takes least time and fits is chosen.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import Any

from mpitrain.config.settings import Config
from mpitrain.errors import InputError, refusal
from mpitrain.parallel.layouts import SECTION_OF, ParallelLayout
from mpitrain.parallel.rules import LayoutRules
from mpitrain.planner.bounds import Bounds
from mpitrain.planner.candidates import candidates
from mpitrain.planner.predictor import Prediction, Predictor
from mpitrain.planner.refine import Refinement
from mpitrain.shard.offload import HOST

COUNT = 10
SIMULATED = 200  # layouts and variants that a search simulates at most
_MOST_TOO_LARGE = 10  # variants that may not fit, per allowed simulation, before the smallest layout is sought
_MOST_NEAREST = 6  # maximum number of layouts in a plan that do not fit

Variants = Callable[[ParallelLayout], Iterable[ParallelLayout]]
_Waiting = tuple[float, int, ParallelLayout, tuple[ParallelLayout, ...] | None]


@dataclass(frozen=True)
class Excess:
    """A layout that does not fit into memory.

    Attributes:
        layout: Layout that does not fit.
        memory: Bytes on the rank that needs most, by category.
        room: Bytes that this rank may use.
        seconds: Lower bound of the seconds of a step.
        host: If true, the bytes are those of the host's memory while the rank computes on a device.
    """

    layout: ParallelLayout
    memory: Mapping[str, float]
    room: float
    seconds: float
    host: bool = False

    @property
    def missing(self) -> float:
        """Bytes by which the layout is too large."""
        return sum(self.memory.values()) - self.room

    @property
    def largest_category(self) -> str:
        """Category that takes the most memory."""
        return max(self.memory, key=lambda category: self.memory[category])


@dataclass(frozen=True)
class LayoutPlan:
    """Result of a search.

    Attributes:
        predictions: Predictions of the best layouts, the best one first.
        excess: The fastest layouts that do not fit, by their lower bounds; if nothing fits, those that are closest to
            fitting.
        room: Bytes that a rank may use.
        layouts: Number of layouts in the search.
        predicted: Number of simulations, variants included.
        unvisited_seconds: Least estimated seconds of a layout that was not visited because the search reached its
            limit; infinite if it did not, and the result is that of simulating all layouts.
        unvisited: Number of layouts that were not visited.
    """

    predictions: Sequence[Prediction]
    excess: Sequence[Excess]
    room: float
    layouts: int
    predicted: int
    unvisited_seconds: float = float("inf")
    unvisited: int = 0


def best(
    predictor: Predictor,
    rules: LayoutRules = LayoutRules(),
    count: int = COUNT,
    seconds: float = float("inf"),
    requested: Mapping[str, Any] = MappingProxyType({}),
) -> LayoutPlan:
    """Return the best of all layouts that a model can be trained in.

    Args:
        predictor: Predictor of seconds and bytes on the machine's ranks.
        rules: Restrictions from the rest of the configuration.
        count: Number of layouts to return.
        seconds: Seconds after which the search also ends if it has found a layout.
        requested: Settings that the layouts must have, as returned by `explicit_settings`.

    Raises:
        InputError: There is no layout with these settings.
    """
    layouts = layouts_with(predictor, rules, requested)
    if requested and not layouts:
        settings = ", ".join(f"{SECTION_OF[key]}.{key} {value}" for key, value in requested.items())
        raise refusal(
            f"parallel.auto finds no layout of {predictor.ranks} ranks with {settings}; remove some of these settings"
        )
    variants, fixed = Refinement(predictor), [key for key in ("cut", "whole", "shares") if key in requested]

    def refine(layout: ParallelLayout) -> list[ParallelLayout]:
        changed = (replace(each, **{key: getattr(layout, key) for key in fixed}) for each in variants(layout))
        allowed = layout.shares == "time" or rules.allow(replace(layout, shares="time"), predictor.model, predictor.at)
        return [each for each in changed if allowed or each.shares == "equal"]

    plan = best_of(Bounds(predictor), layouts, count, refine, seconds=seconds)
    moved = [] if plan.predictions else list(_with_moved_activations(layouts, predictor, rules, requested))
    if moved:
        second = best_of(Bounds(predictor), moved, count, refine, seconds=seconds)
        plan = second if second.predictions else plan
    return plan


def _with_moved_activations(
    layouts: Iterable[ParallelLayout], predictor: Predictor, rules: LayoutRules, requested: Mapping[str, Any]
) -> Iterator[ParallelLayout]:
    """Yield layouts with activations offloaded to the host or partitioned over tensor ranks, where that saves memory.

    The search visits them only if no layout fits otherwise.
    """
    for layout in layouts:
        hosts, parts = [layout.offload_activations], [layout.partition_activations]
        if predictor.at.on_device and not rules.compiled and "offload_activations" not in requested:
            hosts.append(HOST)
        if layout.can_partition_activations and "partition_activations" not in requested:
            parts.append(True)
        ways = [*product(hosts, parts)][1:]
        yield from (replace(layout, offload_activations=host, partition_activations=part) for host, part in ways)


def best_of(
    predictor: Bounds,
    layouts: Iterable[ParallelLayout],
    count: int = COUNT,
    variants: Variants = lambda layout: (layout,),
    limit: int = SIMULATED,
    seconds: float = float("inf"),
) -> LayoutPlan:
    """Return the best of some layouts.

    Args:
        predictor: Predictor of seconds and bytes, with lower bounds.
        layouts: Layouts to choose from.
        count: Number of layouts to return.
        variants: Function that returns the ways to cut a layout into stages and to divide its layers, the most
            promising first; the lower bound of the layout must hold for all of them.
        limit: Maximum number of simulations.
        seconds: Seconds after which the search also ends if it has found a layout.
    """
    guesses = []
    for layout in layouts:
        with suppress(InputError):  # where the layout is impossible
            guesses.append((predictor.guess(layout), simplicity(layout), layout))
    entries = [(guess, layout) for guess, _, layout in sorted(guesses, key=lambda entry: entry[:2])]
    search = _Search(predictor, entries, count, variants)
    search.run(limit, seconds)
    if not search.best:
        search.find_smallest()
    fit = {replace(each.layout, cut=(), whole=(), shares="equal") for each in search.best}
    search.excess = [e for e in search.excess if replace(e.layout, cut=(), whole=(), shares="equal") not in fit]
    beyond, left = (search.waiting[0][0], len(search.waiting)) if search.waiting else (float("inf"), 0)
    return LayoutPlan(search.best, search.nearest(), predictor.room(), len(entries), search.predicted, beyond, left)


class _Search:
    """State of a search.

    Attributes:
        waiting: Heap of (estimate, number, layout, variants to visit; None: all).
        best: Best predictions, at most the requested number.
        excess: Layouts that do not fit.
        predicted: Number of simulations so far.
        too_large_count: Number of variants so far that do not fit by their full memory account.
        model_exceeds_host: True if the host has no memory for the whole model that every rank builds, in any layout.
    """

    def __init__(
        self, predictor: Bounds, entries: Sequence[tuple[float, ParallelLayout]], count: int, variants: Variants
    ) -> None:
        self._predictor, self._count, self._variants, self._room = predictor, count, variants, predictor.room()
        self._layouts = [layout for _, layout in entries]
        self.waiting: list[_Waiting] = [(guess, n, layout, None) for n, (guess, layout) in enumerate(entries)]
        self._number = len(entries)
        self._fitting: set[ParallelLayout] = set()
        self._fitting_somehow: set[ParallelLayout] = set()  # with some way of recomputing, which is left out
        self.best: list[Prediction] = []
        self.excess: list[Excess] = []
        self.predicted = self.too_large_count = 0
        self.model_exceeds_host = False

    def run(self, limit: int, seconds: float) -> None:
        """Visit layouts until none are left or a limit is reached.

        Args:
            limit: Maximum number of simulations.
            seconds: Seconds after which the search also ends if it has found a layout.
        """
        end = time.monotonic() + seconds
        while self.waiting and self.predicted < limit and not self.model_exceeds_host:
            if self.too_large_count > _MOST_TOO_LARGE * limit or (self.best and time.monotonic() > end):
                return
            _, _, layout, left = heapq.heappop(self.waiting)
            lower_bound = self._predictor.lower_bound(layout)
            if left is None and replace(layout, recompute=False) in self._fitting_somehow:
                continue
            if self._slower_than_best(lower_bound) or (layout.offload and replace(layout, offload="") in self._fitting):
                continue
            if left is None:
                least = self._predictor.least_memory(layout)
                if sum(least.values()) > self._room:
                    self.excess.append(Excess(layout, least, self._room, lower_bound))
                    continue
                left = tuple(dict.fromkeys(self._variants(layout)))
            self._visit(layout, left, lower_bound)

    def _visit(self, layout: ParallelLayout, variants: Sequence[ParallelLayout], lower_bound: float) -> None:
        """Simulate the first variant that fits.

        The remaining variants are queued with the simulated time of this one as their estimate.
        """
        too_large = []
        for number, variant in enumerate(variants, 1):
            try:
                excess = excess_of(self._predictor, variant, lower_bound)
                if excess is not None:
                    self.model_exceeds_host = self.model_exceeds_host or (excess.host and not layout.offload)
                    too_large.append(excess)
                    self.too_large_count += 1
                    continue
                prediction = self._predictor.predict(variant)
            except InputError:
                continue
            self.predicted += 1
            self._fitting.add(layout)
            self._fitting_somehow.add(replace(layout, recompute=False))
            self.best = rank_predictions([*self.best, prediction])[: self._count]
            if variants[number:]:
                heapq.heappush(self.waiting, (prediction.seconds, self._number, layout, tuple(variants[number:])))
                self._number += 1
            return
        if too_large and layout not in self._fitting:
            self.excess.append(min(too_large, key=lambda each: each.missing))

    def find_smallest(self) -> None:
        """Find the layout that takes the fewest bytes, and simulate it if it fits."""
        if self.model_exceeds_host:
            self.excess, self.waiting = [each for each in self.excess if each.host], []
            return
        entries = [(sum(self._predictor.least_memory(layout).values()), layout) for layout in self._layouts]
        self.excess, least_missing = [], float("inf")
        for least, layout in sorted(entries, key=lambda entry: entry[0]):
            if least - self._room >= least_missing:
                break
            self._visit(layout, tuple(dict.fromkeys(self._variants(layout))), 0.0)
            if self.best:
                return
            least_missing = min([least_missing, *(each.missing for each in self.excess[-1:])])
        self.waiting = []  # nothing fits

    def nearest(self) -> list[Excess]:
        """Return the layouts that do not fit and are worth showing: at most one for each mesh and stage of ZeRO."""
        if not self.best:
            self.excess.sort(key=lambda each: each.missing)
        nearest: dict[tuple[int, ...], Excess] = {}
        for each in self.excess:
            if self._slower_than_best(each.seconds):
                continue
            layout = each.layout
            kind = (*(ranks for _, ranks in layout.sizes), layout.zero)
            if kind not in nearest or each.missing < nearest[kind].missing:
                nearest[kind] = each
        return list(nearest.values())[:_MOST_NEAREST]

    def _slower_than_best(self, lower_bound: float) -> bool:
        """Return True if the requested number of layouts is known to be faster."""
        return len(self.best) >= self._count and _rounded(lower_bound) > _rounded(self.best[-1].seconds)


def excess_of(predictor: Bounds | Predictor, layout: ParallelLayout, lower_bound: float = 0.0) -> Excess | None:
    """Return the layout's excess over the memory of the device or the host; None if it fits.

    Args:
        predictor: Predictor of bytes.
        layout: Layout to check.
        lower_bound: Lower bound of the seconds of a step, stored in the result.
    """
    memory, room = predictor.memory(layout), predictor.room()
    if sum(memory.values()) > room:
        return Excess(layout, memory, room, lower_bound)
    host, room = predictor.host_memory(layout), predictor.host_room()
    return Excess(layout, host, room, lower_bound, host=True) if sum(host.values()) > room else None


def rank_predictions(predictions: Iterable[Prediction]) -> list[Prediction]:
    """Return predictions, the best first; if two are equally fast, the simpler layout comes first."""
    return sorted(predictions, key=lambda each: (_rounded(each.seconds), simplicity(each.layout)))


def _rounded(seconds: float) -> float:
    """Return seconds rounded to six digits; smaller differences do not make a layout better."""
    return float(f"{seconds:.6g}")


def simplicity(layout: ParallelLayout) -> tuple[Any, ...]:
    """Return a sort key that is smaller for a simpler layout: fewer axes, a lower stage of ZeRO, fewer pieces."""
    axes = sum(ranks > 1 for _, ranks in layout.sizes)
    moves = bool(layout.offload), bool(layout.offload_activations), layout.partition_activations
    options = (bool(layout.recompute), *moves, layout.sequence, layout.shard_within != "all")
    flags = (not layout.share_node, not layout.reshard, bool(layout.cut), layout.shares, len(layout.whole))
    sizes = (layout.chunks, layout.slices, layout.tensor, layout.pipeline, -layout.microbatch)
    return (axes, layout.zero, sum(options), *flags, layout.schedule not in ("1f1b", "gpipe"), *sizes, layout.schedule)


_AUTOMATIC = {"data": "auto", "zero": "auto", "microbatch": 0}  # values that leave the choice to the planner
_MOVES = ("offload", "offload_activations", "partition_activations")
_OVERRIDES = ("microbatch", "share_node", "reshard", "shares", *_MOVES)  # settings that replace those of any layout
_FILTERS = [key for key in SECTION_OF if key not in (*_OVERRIDES, "cut", "whole", "axes")]


def explicit_settings(config: Config) -> dict[str, Any]:
    """Return the layout settings that a configuration sets explicitly, by key; a key belongs to only one section."""
    sections = {key: getattr(config, name) for key, name in SECTION_OF.items()}
    values = {key: getattr(section, key) for key, section in sections.items() if key in section.model_fields_set}
    return {key: value for key, value in values.items() if key not in _AUTOMATIC or value != _AUTOMATIC[key]}


def layouts_with(predictor: Predictor, rules: LayoutRules, requested: Mapping[str, Any]) -> dict[ParallelLayout, None]:
    """Return the layouts that a job accepts and that have the given settings, as the ordered keys of a dictionary.

    Args:
        predictor: Predictor with the model and its nodes.
        rules: Restrictions from the rest of the configuration.
        requested: Settings that the layouts must have, as returned by `explicit_settings`.
    """
    model, nodes = predictor.model, predictor.at
    rules = replace(rules, recompute=requested.get("recompute"))
    layouts = candidates(model, nodes, rules)
    if not requested:
        return dict.fromkeys(layouts)
    layouts = _with_settings(layouts, requested)
    return {layout: None for layout in layouts if rules.allow(layout, model, nodes)}


def _with_settings(layouts: Iterable[ParallelLayout], requested: Mapping[str, Any]) -> Iterator[ParallelLayout]:
    fixed = {key: requested[key] for key in _OVERRIDES if key in requested} | {"cut": _list(requested.get("cut", ""))}
    schedule = requested.get("schedule", "")
    for layout in layouts:
        changed = {key: value for key, value in fixed.items() if _has_effect(key, layout)}
        changed["whole"] = _list(requested.get("whole", ""))
        if ":" in schedule and layout.schedule == "1f1b" and layout.pipeline > 1:  # the user's code takes its place
            changed["schedule"] = schedule
        variant = replace(layout, **changed)
        if variant.partition_activations and not variant.can_partition_activations:
            continue
        if all(
            getattr(variant, key) == requested[key]
            for key in _FILTERS
            if key in requested and _has_effect(key, variant)
        ):
            yield variant


def _list(value: Any) -> tuple[Any, ...]:
    """Return the elements of a setting that is a list; none if it is a word such as "uniform"."""
    return () if isinstance(value, str) else tuple(value)


def _has_effect(key: str, layout: ParallelLayout) -> bool:
    """Return True if a setting has an effect on a layout."""
    sharded = layout.zero > 0
    where = {"share_node": sharded, "shard_within": sharded, "reshard": layout.zero == 3}
    return where.get(key, key not in layout.idle)
