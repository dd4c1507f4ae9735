"""Which layers of a tensor plan are divided over the tensor ranks, and which every rank keeps whole.

A divided pair of layers computes less on each rank and keeps less, and pays for it with exchanges; where its layers
are small, the exchanges cost more. Alpa (Zheng et al. 2022, section 4.2) chooses among all shardings of every operator
of a graph, with costs of resharding between neighbours, by integer linear programming. Here a tensor plan has paired
the layers already, so that activations between pairs are whole either way: there is no cost of resharding, and what is
left is a knapsack,

    least  sum of seconds of the choices       with  sum of bytes of the choices <= limit,

with one integer for each class of equal pairs: how many of them stay whole. `choose` solves it class by class, by
dynamic programming over the combinations that no other one beats in both sums:

    G. L. Nemhauser and Z. Ullmann: Discrete dynamic programming and capital allocation. Management Science 15 (9),
    1969, pages 494-505.

That is exact, for numbers that are no integers too. Where more than 16,384 combinations are left, those are thinned out
as in O. H. Ibarra and C. E. Kim: Fast approximation algorithms for the knapsack and sum of subset problems. Journal of
the ACM 22 (4), 1975, pages 463-468: of each 1 / 16,384 of the range of seconds the one with the fewest bytes stays.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mpitrain.planner.model import AxisExchange, BlockCost, Divided, ModelProfile, Weight

_MOST = 1 << 14  # combinations that are looked at before the next class


@dataclass(frozen=True)
class Pairs:
    """Layers of a tensor plan that are equal, and each divided or whole by itself.

    Attributes:
        patterns: Of each of them the pattern that its names match (as parallel.whole takes it).
        seconds: That one takes more where it is whole, in a step; negative where that is faster.
        nbytes: That one takes more of a rank's memory where it is whole.
    """

    patterns: tuple[tuple[str, ...], ...]
    seconds: float
    nbytes: float


@dataclass(frozen=True)
class Prices:
    """What a rank's part of a model costs, beyond what its profile says.

    Attributes:
        exchange: Seconds of a collective of the tensor axis.
        microbatches: Of a step.
        held: Microbatches whose activations are kept at once.
        per_element: Bytes of a parameter with its gradient and states on one rank.
    """

    exchange: Callable[[AxisExchange], float]
    microbatches: int = 1
    held: int = 1
    per_element: float = 16.0


def choose(pairs: Sequence[Pairs], limit: float) -> tuple[int, ...] | None:
    """Return how many of each class stay whole, so that it takes the least seconds.

    The least there is, unless combinations had to be thinned out: then at most 1 / 16,384 of what all seconds add up to
    is lost for each class.

    Args:
        pairs: Classes of equal pairs.
        limit: Bytes that are left where everything is divided; below 0 where not even that fits.

    Returns:
        A number for each class; None where nothing fits.
    """
    seconds, nbytes, counts = np.zeros(1), np.zeros(1), np.zeros((1, 0), dtype=np.int64)
    for each in pairs:
        more = np.arange(len(each.patterns) + 1)
        all_seconds = np.add.outer(seconds, more * each.seconds).ravel()
        all_bytes = np.add.outer(nbytes, more * each.nbytes).ravel()
        kept = np.lexsort((all_seconds, all_bytes))
        least = np.minimum.accumulate(all_seconds[kept])
        kept = kept[np.diff(least, prepend=np.inf) < 0]  # more bytes only for fewer seconds
        seconds, nbytes = all_seconds[kept], all_bytes[kept]
        if len(kept) > _MOST:
            of_range = (seconds - seconds[-1]) / (seconds[0] - seconds[-1])
            thinned = np.flatnonzero(np.diff((of_range * _MOST).astype(int), prepend=-1))
            kept, seconds, nbytes = kept[thinned], seconds[thinned], nbytes[thinned]
        counts = np.column_stack((counts[kept // len(more)], kept % len(more)))
    fitting = np.count_nonzero(nbytes <= limit)  # the first ones, of which the last is fastest
    return tuple(counts[fitting - 1].tolist()) if fitting else None


def whole_patterns(pairs: Sequence[Pairs], counts: Sequence[int]) -> tuple[str, ...]:
    """The patterns of parallel.whole for so many of each class; all of a class in as few words as they allow."""
    found: list[str] = []
    for each, count in zip(pairs, counts, strict=True):
        chosen = [pattern for patterns in each.patterns[:count] for pattern in patterns]
        if count == len(each.patterns) > 1:
            chosen = list(dict.fromkeys(map(_class_of, chosen)))
        found += chosen
    return tuple(found)


def pairs_of(model: ModelProfile, samples: int, divided: Divided, prices: Prices, threads: int = 1) -> list[Pairs]:
    """The classes of pairs that a model's plan divides, with what each costs if it is whole instead.

    Compares profiles: with everything divided, and with all pairs of one class whole. Layers belong together that have
    the same parent or share parameters, or of which one cannot be whole without the next.

    Args:
        model: The model's profile.
        samples: Of a microbatch.
        divided: How it is divided otherwise; `whole` is not looked at.
        prices: Of exchanges and bytes.
        threads: That a rank computes with.
    """
    base = replace(divided, whole=())
    blocks = model.blocks(samples, base, threads)
    before = _cost(blocks, prices)
    found: list[Pairs] = []
    for patterns in _classes(model, base, _units(blocks)):
        whole = replace(base, whole=tuple(name for each in patterns for name in each))
        seconds, nbytes = _cost(model.blocks(samples, whole, threads), prices)
        count = len(patterns)
        found.append(Pairs(tuple(patterns), (seconds - before[0]) / count, (nbytes - before[1]) / count))
    return found


def _cost(blocks: Sequence[BlockCost], prices: Prices) -> tuple[float, float]:
    """(seconds of a step, bytes) of blocks."""
    seconds = sum(block.forward + block.input + block.weight for block in blocks)
    seconds += sum(prices.exchange(each) for block in blocks for each in (*block.forwards, *block.backwards))
    numel = sum(weight.numel for block in blocks for weight in block.weights if not weight.same_as)
    kept = sum(block.kept for block in blocks)
    return seconds * prices.microbatches, kept * prices.held + numel * prices.per_element


def _units(blocks: Sequence[BlockCost]) -> list[tuple[str, ...]]:
    """Patterns of the layers that belong together, in the order of the model."""
    weights = [weight for block in blocks for weight in block.weights if not weight.replicated]
    units: dict[str, list[str]] = {}
    unit_of: dict[str, str] = {}
    for weight in weights:
        layer = weight.name.rpartition(".")[0]
        key = unit_of.get(weight.same_as) or _parent(weight, blocks)
        unit_of[weight.name] = key
        if layer not in units.setdefault(key, []):
            units[key].append(layer)
    return [(f"{key}.*",) if _shared(key, layers) else tuple(layers) for key, layers in units.items()]


def _parent(weight: Weight, blocks: Sequence[BlockCost]) -> str:
    """The module around a weight's layer; of a layer that is a block, or outside of all, the layer itself."""
    layer = weight.name.rpartition(".")[0]
    around = layer.rpartition(".")[0]
    inside = any(around == block.name or around.startswith(f"{block.name}.") for block in blocks)
    return around if inside else layer


def _shared(key: str, layers: Sequence[str]) -> bool:
    """Whether a unit is all that lies in one module."""
    return all(layer.startswith(f"{key}.") for layer in layers)


def _classes(model: ModelProfile, base: Divided, units: Sequence[tuple[str, ...]]) -> list[list[tuple[str, ...]]]:
    """Units in classes of equal ones, each of which can be whole by itself; what cannot is left out."""
    classes: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for unit in units:
        classes.setdefault(tuple(map(_class_of, unit)), []).append(unit)

    def possible(whole: tuple[str, ...]) -> bool:
        return model.takes(replace(base, whole=whole))

    found: list[list[tuple[str, ...]]] = []
    waiting: list[tuple[str, ...]] = []
    for alike in classes.values():
        by_two = [(*first, *second) for first, second in zip(alike[::2], alike[1::2], strict=False)]
        with_last = [(*first, *second) for first, second in zip(waiting, alike, strict=False)]
        fitting = (each for each in (alike, by_two, with_last) if each and possible(each[0]))
        chosen = next(fitting, None)
        waiting = alike if chosen is None else []
        found += [] if chosen is None else [chosen]
    return found


def _class_of(pattern: str) -> str:
    """A pattern with the numbers in it left open."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", pattern)
