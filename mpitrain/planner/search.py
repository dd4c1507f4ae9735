"""The best layouts of all, without a prediction of each.

Layouts are taken in the order of a guess of their seconds. What does not fit into memory is set aside, what fits is
predicted in full, and a layout is left out if as many as are wanted are faster than a lower bound of it: so the result
is that of predicting all (branch and bound), unless time is up before. A layout that only saves memory compared with
another (offload) is looked at where that one does not fit. Layouts come first as they are, then the variants of each
(stages of unequal length, layers kept whole), those of the fastest first: where time is short, the best are refined.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from mpitrain.errors import InputError
from mpitrain.planner.bounds import Bounds
from mpitrain.planner.candidates import LayoutRules, candidates
from mpitrain.planner.layouts import ParallelLayout
from mpitrain.planner.prediction import Prediction
from mpitrain.planner.refine import Refinement

if TYPE_CHECKING:
    from mpitrain.planner.predictor import Predictor

COUNT = 10
_PLAIN = 0.75  # of the patience, for layouts as they are; the rest is for variants of the best
_NEAR = 6  # layouts that do not fit that a plan tells of

Variants = Callable[[ParallelLayout], Iterable[ParallelLayout]]


class Estimates(Protocol):
    """What the search asks of a predictor (`planner.bounds.Bounds`)."""

    def predict(self, layout: ParallelLayout) -> Prediction:
        """Everything of a layout; InputError where it is impossible."""

    def at_least(self, layout: ParallelLayout) -> float:
        """Seconds that a step takes at least, however the blocks are cut into stages; cheap."""

    def guess(self, layout: ParallelLayout) -> float:
        """About the seconds of a step; cheap. It decides what is looked at first, not what is found."""

    def memory(self, layout: ParallelLayout) -> Mapping[str, float]:
        """Bytes of the rank that needs most, by category."""

    def least_memory(self, layout: ParallelLayout) -> Mapping[str, float]:
        """Bytes that it takes at least, however the blocks are cut into stages; cheap."""

    def room(self) -> float:
        """Bytes that a rank may take."""


@dataclass(frozen=True)
class Excess:
    """A layout that does not fit.

    Attributes:
        layout: The layout.
        memory: Bytes on the rank that needs most, by category.
        room: Bytes that it may take.
        seconds: That a step would take at least.
    """

    layout: ParallelLayout
    memory: Mapping[str, float]
    room: float
    seconds: float

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
        predicted: How many were predicted.
        beyond: Where time was up: the least guess of the seconds of a layout that was not looked at; else infinite, and
            the result is that of predicting all.
        left: Layouts that were not looked at.
    """

    found: Sequence[Prediction]
    excess: Sequence[Excess]
    room: float
    layouts: int
    predicted: int
    beyond: float = float("inf")
    left: int = 0


@dataclass
class _Looked:
    """What a search has seen."""

    best: list[Prediction] = field(default_factory=list)
    excess: list[Excess] = field(default_factory=list)
    predicted: int = 0
    beyond: float = float("inf")
    left: int = 0

    def slower_than(self, count: int, at_least: float) -> bool:
        """Whether so many are known that are faster."""
        return len(self.best) >= count and _rounded(at_least) > _rounded(self.best[count - 1].seconds)


def best(
    predictor: Predictor, rules: LayoutRules = LayoutRules(), count: int = COUNT, patience: float = float("inf")
) -> LayoutPlan:
    """The best layouts of all that a model can be trained in.

    Args:
        predictor: Of seconds and bytes on so many ranks of a machine.
        rules: What the rest of the configuration allows.
        count: How many are wanted.
        patience: Seconds after which no more layouts are predicted, if one was found.
    """
    layouts = candidates(predictor.model, predictor.machine, predictor.nodes, predictor.ranks_per_node, rules)
    bounds, refinement = Bounds(predictor), Refinement(predictor)
    return best_of(bounds, layouts, count, refinement, patience, predictor.model.measures)


def best_of(
    predictor: Estimates,
    layouts: Iterable[ParallelLayout],
    count: int = COUNT,
    variants: Variants = lambda layout: (layout,),
    patience: float = float("inf"),
    ahead: bool = False,
) -> LayoutPlan:
    """The best of some layouts.

    Args:
        predictor: Of their seconds and bytes.
        layouts: To choose from.
        count: How many are wanted.
        variants: Of a layout, the ways to cut it into stages and to divide its layers: what its bound holds for.
        patience: Seconds after which no more layouts are predicted, if one was found.
        ahead: Ask for all bounds first, before time is counted: where blocks are timed for them.
    """
    room, begin = predictor.room(), time.monotonic()
    entries = _guessed(predictor, layouts, ahead)
    begin = time.monotonic() if ahead else begin
    seen, fitting = _Looked(), set[ParallelLayout]()
    plain: dict[ParallelLayout, float] = {}  # of each layout as it is, its seconds, or a guess where it does not fit
    for number, (guess, layout) in enumerate(entries):
        now = time.monotonic() - begin
        if now > patience * _PLAIN and (seen.best or now > 2 * patience):
            seen.beyond, seen.left = guess, len(entries) - number
            break
        try:
            at_least = predictor.at_least(layout)
        except InputError:
            continue
        if seen.slower_than(count, at_least) or (layout.offload and replace(layout, offload="") in fitting):
            continue
        least = predictor.least_memory(layout)
        if sum(least.values()) > room:
            seen.excess.append(Excess(layout, least, room, at_least))
            continue
        found = _look(predictor, (layout,), at_least, room, seen)
        plain[layout] = max(at_least, found or guess)
        if found:
            fitting.add(layout)
        seen.best = ranked(seen.best)[:count]
    for number, layout in enumerate(sorted(plain, key=plain.__getitem__)):
        at_least = predictor.at_least(layout)
        if time.monotonic() - begin > patience and seen.best:
            seen.beyond, seen.left = min(seen.beyond, plain[layout]), seen.left + len(plain) - number
            break
        if not seen.slower_than(count, at_least):
            _look(predictor, (each for each in variants(layout) if each != layout), at_least, room, seen)
            seen.best = ranked(seen.best)[:count]
    fit = {replace(each.layout, cut=(), whole=()) for each in seen.best}
    seen.excess = [each for each in seen.excess if replace(each.layout, cut=(), whole=()) not in fit]
    return LayoutPlan(seen.best, _nearest(seen, count), room, len(entries), seen.predicted, seen.beyond, seen.left)


def _guessed(
    predictor: Estimates, layouts: Iterable[ParallelLayout], ahead: bool
) -> list[tuple[float, ParallelLayout]]:
    """Possible layouts with guesses of their seconds, the fastest first. ahead: ask for their bounds, too."""
    entries = []
    for layout in layouts:
        try:
            if ahead:
                predictor.at_least(layout)
            entries.append((predictor.guess(layout), simplicity(layout), layout))
        except InputError:
            continue
    entries.sort(key=lambda entry: entry[:2])
    return [(guess, layout) for guess, _, layout in entries]


def _look(
    predictor: Estimates, variants: Iterable[ParallelLayout], at_least: float, room: float, seen: _Looked
) -> float:
    """Predict what fits of a layout's variants; returns the seconds of the fastest, 0 where none fits."""
    fits, too_large = 0.0, []
    for variant in dict.fromkeys(variants):
        try:
            memory = predictor.memory(variant)
            if sum(memory.values()) > room:
                too_large.append(Excess(variant, memory, room, at_least))
                continue
            found = predictor.predict(variant)
        except InputError:
            continue
        seen.best.append(found)
        seen.predicted += 1
        fits = min(fits or found.seconds, found.seconds)
    if too_large and not fits:
        seen.excess.append(min(too_large, key=lambda each: each.missing))
    return fits


def ranked(found: Iterable[Prediction]) -> list[Prediction]:
    """Predictions, the best first; of those that are equally fast the simpler layout."""
    return sorted(found, key=lambda each: (_rounded(each.seconds), simplicity(each.layout)))


def _rounded(seconds: float) -> float:
    """Seconds, to the digits that make one layout better than another."""
    return float(f"{seconds:.6g}")


def simplicity(layout: ParallelLayout) -> tuple[Any, ...]:
    """A key that is less for a layout that is simpler: fewer axes, a lower stage of ZeRO, fewer pieces."""
    axes = sum(ranks > 1 for ranks in (layout.data, layout.pipeline, layout.tensor))
    options = (layout.recompute, bool(layout.offload), layout.sequence, layout.shard_within != "all")
    own = (not layout.share_node, not layout.reshard, bool(layout.cut), len(layout.whole))
    sizes = (layout.chunks, layout.slices, layout.tensor, layout.pipeline, -layout.microbatch)
    return (axes, layout.zero, sum(options), *own, layout.schedule not in ("1f1b", "gpipe"), *sizes, layout.schedule)


def _nearest(seen: _Looked, count: int) -> list[Excess]:
    """What did not fit and is worth telling: one of a mesh and stage of ZeRO."""
    if not seen.best:
        seen.excess.sort(key=lambda each: each.missing)
    told: dict[tuple[int, ...], Excess] = {}
    for each in seen.excess:
        if seen.slower_than(count, each.seconds):
            continue
        layout = each.layout
        kind = (layout.data, layout.pipeline, layout.tensor, layout.zero)
        if kind not in told or each.missing < told[kind].missing:
            told[kind] = each
    return list(told.values())[:_NEAR]
