"""The best layouts of all, or of those that keep what a configuration says explicitly, without a simulation of each.

Layouts are looked at in the order of a guess of their seconds, each in its best variant first (stages of unequal
length, layers kept whole); the other variants come when nothing else is guessed to be faster than the first. What does
not fit into memory is set aside, what fits is simulated, and a layout is left out if as many as are wanted are faster
than a lower bound of it: so the result is that of simulating all (branch and bound), unless the number of simulations
reaches its limit before. That limit counts work and not time, so that an answer does not depend on how busy the machine
is. A layout that only saves memory compared with another (offload) is looked at where that one does not fit.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
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

COUNT = 10
SIMULATED = 200  # layouts and variants that a search simulates at most
_REFUSED = 10  # times as many may turn out not to fit before the search asks which layout is closest to fitting
_NEAR = 6  # layouts that do not fit that a plan tells of

Variants = Callable[[ParallelLayout], Iterable[ParallelLayout]]
_Waiting = tuple[float, int, ParallelLayout, tuple[ParallelLayout, ...] | None]


@dataclass(frozen=True)
class Excess:
    """A layout that does not fit.

    Attributes:
        layout: The layout.
        memory: Bytes on the rank that needs most, by category.
        room: Bytes that it may take.
        seconds: That a step would take at least.
        host: Whether these are bytes of the host's memory, and the rank computes on a device.
    """

    layout: ParallelLayout
    memory: Mapping[str, float]
    room: float
    seconds: float
    host: bool = False

    @property
    def missing(self) -> float:
        """Bytes by which it is too large."""
        return sum(self.memory.values()) - self.room

    @property
    def blame(self) -> str:
        """The category that takes most of it."""
        return max(self.memory, key=lambda category: self.memory[category])


@dataclass(frozen=True)
class LayoutPlan:
    """What a search found.

    Attributes:
        found: Predictions of the best layouts, the best one first.
        excess: The fastest layouts that do not fit, by their bounds; where nothing fits, those that lack least.
        room: Bytes that a rank may take.
        layouts: How many there are.
        predicted: How many were simulated, variants counted.
        beyond: Where the search ended at its limit: the least guess of the seconds of a layout that was not looked at;
            else infinite, and the result is that of simulating all.
        left: Layouts that were not looked at.
    """

    found: Sequence[Prediction]
    excess: Sequence[Excess]
    room: float
    layouts: int
    predicted: int
    beyond: float = float("inf")
    left: int = 0


def best(
    predictor: Predictor,
    rules: LayoutRules = LayoutRules(),
    count: int = COUNT,
    seconds: float = float("inf"),
    wanted: Mapping[str, Any] = MappingProxyType({}),
) -> LayoutPlan:
    """Return the best layouts of all that a model can be trained in.

    Args:
        predictor: Of seconds and bytes on so many ranks of a machine.
        rules: What the rest of the configuration allows.
        count: How many are wanted.
        seconds: Seconds after which the search ends, too, if it has found a layout.
        wanted: Settings that the layouts must have, as `given` finds them.

    Raises:
        InputError: There is no layout with these settings.
    """
    layouts = offered(predictor, rules, wanted)
    if wanted and not layouts:
        said = ", ".join(f"{SECTION_OF[key]}.{key} {value}" for key, value in wanted.items())
        raise refusal(f"parallel.auto finds no layout of {predictor.ranks} ranks with {said}; leave some of these out")
    variants, fixed = Refinement(predictor), [key for key in ("cut", "whole") if key in wanted]

    def refined(layout: ParallelLayout) -> list[ParallelLayout]:
        return [replace(variant, **{key: getattr(layout, key) for key in fixed}) for variant in variants(layout)]

    return best_of(Bounds(predictor), layouts, count, refined, seconds=seconds)


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
        predictor: Of their seconds and bytes.
        layouts: To choose from.
        count: How many are wanted.
        variants: The ways to cut a layout into stages and to divide its layers, the most promising first: what its
            bound holds for.
        limit: Simulations at most.
        seconds: Seconds after which the search ends, too, if it has found a layout.
    """
    guesses = []
    for layout in layouts:
        with suppress(InputError):  # where the layout is impossible
            guesses.append((predictor.guess(layout), simplicity(layout), layout))
    entries = [(guess, layout) for guess, _, layout in sorted(guesses, key=lambda entry: entry[:2])]
    search = _Search(predictor, entries, count, variants)
    search.run(limit, seconds)
    if not search.best:
        search.look_for_the_smallest()
    fit = {replace(each.layout, cut=(), whole=()) for each in search.best}
    search.excess = [each for each in search.excess if replace(each.layout, cut=(), whole=()) not in fit]
    beyond, left = (search.waiting[0][0], len(search.waiting)) if search.waiting else (float("inf"), 0)
    return LayoutPlan(search.best, search.nearest(), predictor.room(), len(entries), search.predicted, beyond, left)


class _Search:
    """A search under way.

    Attributes:
        waiting: A heap of (guess, number, layout, variants of it to look at; None: all).
        best: The best predictions, as many as are wanted.
        excess: What does not fit.
        predicted: Simulations so far.
        refused: Layouts so far whose bytes were added up and do not fit.
        hopeless: Whether the host has no room for the model that every rank builds, whatever the layout.
    """

    def __init__(
        self, predictor: Bounds, entries: Sequence[tuple[float, ParallelLayout]], count: int, variants: Variants
    ) -> None:
        self._predictor, self._count, self._variants, self._room = predictor, count, variants, predictor.room()
        self._layouts = [layout for _, layout in entries]
        self.waiting: list[_Waiting] = [(guess, n, layout, None) for n, (guess, layout) in enumerate(entries)]
        self._number = len(entries)
        self._fitting: set[ParallelLayout] = set()
        self.best: list[Prediction] = []
        self.excess: list[Excess] = []
        self.predicted = self.refused = 0
        self.hopeless = False

    def run(self, limit: int, seconds: float) -> None:
        """Look at layouts until there are no more, or a limit is reached."""
        end = time.monotonic() + seconds
        while self.waiting and self.predicted < limit and not self.hopeless:
            if self.refused > _REFUSED * limit or (self.best and time.monotonic() > end):
                return
            _, _, layout, left = heapq.heappop(self.waiting)
            at_least = self._predictor.at_least(layout)
            if self._slower_than_best(at_least) or (layout.offload and replace(layout, offload="") in self._fitting):
                continue
            if left is None:
                least = self._predictor.least_memory(layout)
                if sum(least.values()) > self._room:
                    self.excess.append(Excess(layout, least, self._room, at_least))
                    continue
                left = tuple(dict.fromkeys(self._variants(layout)))
            self._look(layout, left, at_least)

    def _look(self, layout: ParallelLayout, variants: Sequence[ParallelLayout], at_least: float) -> None:
        """Simulate the first variant that fits; the others wait until nothing is guessed to be faster than that."""
        too_large = []
        for number, variant in enumerate(variants, 1):
            try:
                excess = excess_of(self._predictor, variant, at_least)
                if excess is not None:
                    self.hopeless = self.hopeless or (excess.host and not layout.offload)
                    too_large.append(excess)
                    self.refused += 1
                    continue
                found = self._predictor.predict(variant)
            except InputError:
                continue
            self.predicted += 1
            self._fitting.add(layout)
            self.best = ranked([*self.best, found])[: self._count]
            if variants[number:]:
                heapq.heappush(self.waiting, (found.seconds, self._number, layout, tuple(variants[number:])))
                self._number += 1
            return
        if too_large and layout not in self._fitting:
            self.excess.append(min(too_large, key=lambda each: each.missing))

    def look_for_the_smallest(self) -> None:
        """Find the layout that takes the fewest bytes, and simulate it if it fits."""
        if self.hopeless:
            self.excess, self.waiting = [each for each in self.excess if each.host], []
            return
        entries = [(sum(self._predictor.least_memory(layout).values()), layout) for layout in self._layouts]
        self.excess, least_missing = [], float("inf")
        for least, layout in sorted(entries, key=lambda entry: entry[0]):
            if least - self._room >= least_missing:
                break
            self._look(layout, tuple(dict.fromkeys(self._variants(layout))), 0.0)
            if self.best:
                return
            least_missing = min([least_missing, *(each.missing for each in self.excess[-1:])])
        self.waiting = []  # nothing fits

    def nearest(self) -> list[Excess]:
        """Return what did not fit and is worth telling: one of a mesh and stage of ZeRO."""
        if not self.best:
            self.excess.sort(key=lambda each: each.missing)
        told: dict[tuple[int, ...], Excess] = {}
        for each in self.excess:
            if self._slower_than_best(each.seconds):
                continue
            layout = each.layout
            kind = (*(ranks for _, ranks in layout.sizes), layout.zero)
            if kind not in told or each.missing < told[kind].missing:
                told[kind] = each
        return list(told.values())[:_NEAR]

    def _slower_than_best(self, at_least: float) -> bool:
        """Whether as many as are wanted are known that are faster."""
        return len(self.best) >= self._count and _rounded(at_least) > _rounded(self.best[-1].seconds)


def excess_of(predictor: Bounds | Predictor, layout: ParallelLayout, at_least: float = 0.0) -> Excess | None:
    """Return by how much a layout exceeds the memory of the device or the host; None if it fits.

    Args:
        predictor: Of bytes.
        layout: The layout.
        at_least: Seconds of a step at least.
    """
    memory, room = predictor.memory(layout), predictor.room()
    if sum(memory.values()) > room:
        return Excess(layout, memory, room, at_least)
    host, room = predictor.host_memory(layout), predictor.host_room()
    return Excess(layout, host, room, at_least, host=True) if sum(host.values()) > room else None


def ranked(found: Iterable[Prediction]) -> list[Prediction]:
    """Predictions, the best first; of those that are equally fast the simpler layout."""
    return sorted(found, key=lambda each: (_rounded(each.seconds), simplicity(each.layout)))


def _rounded(seconds: float) -> float:
    """Seconds, to the digits that make one layout better than another."""
    return float(f"{seconds:.6g}")


def simplicity(layout: ParallelLayout) -> tuple[Any, ...]:
    """A key that is less for a layout that is simpler: fewer axes, a lower stage of ZeRO, fewer pieces."""
    axes = sum(ranks > 1 for _, ranks in layout.sizes)
    options = (layout.recompute, bool(layout.offload), layout.sequence, layout.shard_within != "all")
    own = (not layout.share_node, not layout.reshard, bool(layout.cut), len(layout.whole))
    sizes = (layout.chunks, layout.slices, layout.tensor, layout.pipeline, -layout.microbatch)
    return (axes, layout.zero, sum(options), *own, layout.schedule not in ("1f1b", "gpipe"), *sizes, layout.schedule)


_OPEN = {"data": "auto", "microbatch": 0}  # values that leave the choice to the program
_TAKEN = ("microbatch", "offload", "share_node", "reshard")  # as they are, whatever else a layout has
_CHOSEN = [key for key in SECTION_OF if key not in (*_TAKEN, "cut", "whole", "axes")]


def given(config: Config) -> dict[str, Any]:
    """The settings of a layout that a configuration sets explicitly, by their keys, which no two sections share."""
    sections = {key: getattr(config, name) for key, name in SECTION_OF.items()}
    found = {key: getattr(of, key) for key, of in sections.items() if key in of.model_fields_set}
    return {key: value for key, value in found.items() if key not in _OPEN or value != _OPEN[key]}


def offered(predictor: Predictor, rules: LayoutRules, wanted: Mapping[str, Any]) -> dict[ParallelLayout, None]:
    """The layouts with given settings that a job takes, in order."""
    model, nodes = predictor.model, predictor.at
    layouts = candidates(model, nodes, rules)
    if not wanted:
        return dict.fromkeys(layouts)
    layouts = _with(layouts, wanted)
    return {layout: None for layout in layouts if rules.allow(layout, model, nodes)}


def _with(layouts: Iterable[ParallelLayout], wanted: Mapping[str, Any]) -> Iterator[ParallelLayout]:
    fixed = {key: wanted[key] for key in _TAKEN if key in wanted} | {"cut": _list(wanted.get("cut", ""))}
    schedule = wanted.get("schedule", "")
    for layout in layouts:
        changed = {key: value for key, value in fixed.items() if _matters(key, layout)}
        changed["whole"] = _list(wanted.get("whole", ""))
        if ":" in schedule and layout.schedule == "1f1b" and layout.pipeline > 1:  # the user's code takes its place
            changed["schedule"] = schedule
        made = replace(layout, **changed)
        if all(getattr(made, key) == wanted[key] for key in _CHOSEN if key in wanted and _matters(key, made)):
            yield made


def _list(value: Any) -> tuple[Any, ...]:
    """What is listed; nothing for a word."""
    return () if isinstance(value, str) else tuple(value)


def _matters(key: str, layout: ParallelLayout) -> bool:
    """Whether a setting says anything about a layout."""
    sharded = layout.zero > 0
    where = {"share_node": sharded, "shard_within": sharded, "reshard": layout.zero == 3}
    return where.get(key, key not in layout.idle)
