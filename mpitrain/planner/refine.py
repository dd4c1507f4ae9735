"""The variants of a layout that only its own costs tell: stages that are even in time, and small layers left whole."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from mpitrain.errors import InputError
from mpitrain.planner.held import ITEMSIZE
from mpitrain.planner.layouts import ParallelLayout
from mpitrain.planner.model import AxisExchange, BlockCost, Divided
from mpitrain.planner.notation import sizes
from mpitrain.planner.parts import Prices, choose, pairs_of, whole_patterns
from mpitrain.planner.predictor import Predictor
from mpitrain.planner.stages import Limits, best_cut, held_at_most


class Refinement:
    """Gives the variants of a layout, the most promising first and itself last.

    Args:
        predictor: Whose model is cut and divided, and whose machine tells what messages cost.
    """

    def __init__(self, predictor: Predictor) -> None:
        self._of = predictor
        self._whole = lru_cache(maxsize=None)(self._find_whole)
        self._cut = lru_cache(maxsize=None)(self._find_cut)

    def __call__(self, layout: ParallelLayout) -> Iterable[ParallelLayout]:
        found = [layout]
        if layout.tensor > 1 and not layout.sequence:
            whole = self._whole(_plain(layout))
            found = ([replace(layout, whole=whole)] if whole else []) + found
        if layout.pipeline > 1:
            cuts = [(each, self._cut(_plain(each), self._per_element(each))) for each in found]
            found = [replace(each, cut=cut) for each, cut in cuts if cut] + found
        return found

    def _find_cut(self, layout: ParallelLayout, per_element: float) -> tuple[int, ...]:
        """Blocks of each stage; empty where equally many are best."""
        count, stages = self._of.microbatches(layout), layout.pipeline * layout.chunks
        held = held_at_most(layout.pipeline, layout.chunks, count, layout.schedule)
        limits = Limits(self._room() / layout.chunks, held, per_element, layout.recompute)
        places = self._of.places(layout)
        inside = len(set(places.pipeline)) == 1

        def message(nbytes: int) -> float:
            return self._of.collectives.message(nbytes, inside)

        blocks = self._blocks(layout)
        bounds = best_cut(blocks, stages, count, layout.chunks, message, limits)
        bounds = bounds or best_cut(blocks, stages, count, layout.chunks, message)  # the limits are estimates
        return sizes(bounds) if bounds else ()

    def _find_whole(self, layout: ParallelLayout) -> tuple[str, ...]:
        """Patterns of the layers that are better left whole, as far as there is room for it."""
        places = self._of.places(layout)

        def exchange(each: AxisExchange) -> float:
            return self._of.collectives.seconds(each.operation, each.nbytes, places.axis(each.axis))

        per_element = self._per_element(layout) / layout.pipeline
        prices = Prices(exchange, self._of.microbatches(layout), 1, per_element)
        divided = Divided(layout.tensor, slices=layout.slices, synchronized=layout.data > 1)
        try:
            pairs = pairs_of(self._of.model, layout.microbatch, divided, prices, places.threads)
            taken = sum(self._of.memory(layout).values())
        except InputError:
            return ()
        counts = choose(pairs, self._of.room() - taken)
        return whole_patterns(pairs, counts) if counts and any(counts) else ()

    def _blocks(self, layout: ParallelLayout) -> tuple[BlockCost, ...]:
        return self._of.blocks(layout, self._of.places(layout))

    def _room(self) -> float:
        return self._of.room() - self._of.machine.process

    def _per_element(self, layout: ParallelLayout) -> float:
        """Bytes of a parameter with its gradient and states on one rank."""
        return self._of.means(self._of.places(layout)).stored(1.0, ITEMSIZE[self._of.model.precision]).total


def _plain(layout: ParallelLayout) -> ParallelLayout:
    """The layout without what neither a cut nor a division depends on: where states are."""
    return replace(layout, zero=0, share_node=True, shard_within="all", reshard=True, offload="")
