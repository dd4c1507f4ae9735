"""The best layouts among those that keep what a configuration says explicitly: parallel.zero 1, train.microbatch 4."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from mpitrain.config.settings import Config
from mpitrain.errors import refusal
from mpitrain.planner import notation
from mpitrain.planner.bounds import Bounds
from mpitrain.planner.candidates import LayoutRules, candidates
from mpitrain.planner.layouts import ParallelLayout
from mpitrain.planner.predictor import Predictor
from mpitrain.planner.refine import Refinement
from mpitrain.planner.search import LayoutPlan, best_of

_OPEN = {"data": "auto", "microbatch": 0}  # values that leave the choice to the program
_CHOSEN = ["data", "pipeline", "tensor", "zero", "shard_within", "schedule", "chunks", "slices", "sequence"]
_CHOSEN += ["recompute"]
_TAKEN = ("microbatch", "offload", "share_node", "reshard")  # as they are, whatever else a layout has


def given(config: Config) -> dict[str, Any]:
    """The settings of a layout that a configuration sets explicitly, by their keys, which no two sections share."""
    sections = {"parallel": config.parallel, "train": config.train}
    found: dict[str, Any] = {}
    for name, keys in notation.settings(ParallelLayout(1)).items():
        section = sections[name]
        found |= {key: getattr(section, key) for key in keys if key in section.model_fields_set}
    return {key: value for key, value in found.items() if key not in _OPEN or value != _OPEN[key]}


def best_with(predictor: Predictor, rules: LayoutRules, wanted: Mapping[str, Any], count: int) -> LayoutPlan:
    """The best layouts with given settings.

    Args:
        predictor: Of seconds and bytes on so many ranks of a machine.
        rules: What the rest of the configuration allows.
        wanted: What the layouts must have, as `given` finds it.
        count: How many are wanted.

    Raises:
        InputError: There is no such layout.
    """
    layouts = list(offered(predictor, rules, wanted))
    if not layouts:
        said = ", ".join(f"{_section(key)}.{key} {value}" for key, value in wanted.items())
        raise refusal(
            f"parallel.auto finds no layout of {predictor.ranks} ranks "
            + (f"with {said}; leave some of these out" if said else "for this model; set parallel.auto to false")
        )
    variants = Refinement(predictor)

    def refined(layout: ParallelLayout) -> Iterable[ParallelLayout]:
        for variant in variants(layout):
            yield replace(variant, **{key: getattr(layout, key) for key in ("cut", "whole") if key in wanted})

    return best_of(Bounds(predictor), layouts, count, refined)


def offered(predictor: Predictor, rules: LayoutRules, wanted: Mapping[str, Any]) -> dict[ParallelLayout, None]:
    """The layouts with given settings that a job takes, in order."""
    model, machine, nodes, each = predictor.model, predictor.machine, predictor.nodes, predictor.ranks_per_node
    layouts = _with(candidates(model, machine, nodes, each, rules), wanted)
    return {layout: None for layout in layouts if rules.allow(layout, model, each, machine.device is not None)}


def settings(layout: ParallelLayout, wanted: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The settings that run a layout, by section and key; what is given stays as it is."""
    return {
        name: {key: wanted.get(key, value) for key, value in keys.items()}
        for name, keys in notation.settings(layout).items()
    }


def _with(layouts: Iterable[ParallelLayout], wanted: Mapping[str, Any]) -> Iterator[ParallelLayout]:
    fixed = {key: wanted[key] for key in _TAKEN if key in wanted} | {"cut": _list(wanted.get("cut", ""))}
    schedule = wanted.get("schedule", "")
    own = {"schedule": schedule} if ":" in schedule else {}  # of the user's code: takes the place of 1f1b
    for layout in layouts:
        changed = {key: value for key, value in fixed.items() if _matters(key, layout)}
        changed["whole"] = _list(wanted.get("whole", "")) if layout.tensor > 1 else ()
        if own and layout.schedule == "1f1b" and layout.pipeline > 1:
            changed |= own
        made = replace(layout, **changed)
        if all(getattr(made, key) == wanted[key] for key in _CHOSEN if key in wanted and _matters(key, made)):
            yield made


def _list(value: Any) -> tuple[Any, ...]:
    """What is listed; nothing for a word."""
    return () if isinstance(value, str) else tuple(value)


def _matters(key: str, layout: ParallelLayout) -> bool:
    """Whether a setting says anything about a layout."""
    if key in ("schedule", "slices"):
        return layout.pipeline > 1
    if key == "sequence":
        return layout.tensor > 1
    if key in ("share_node", "shard_within"):
        return layout.zero > 0
    return layout.zero == 3 if key == "reshard" else True


def _section(key: str) -> str:
    return next(name for name, keys in notation.settings(ParallelLayout(1)).items() if key in keys)
