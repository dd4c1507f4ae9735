"""Rules about settings that exclude each other, used at the start of a job, in user loops and by the planner.

A `Combination` contains the facts known so far; a rule ignores facts that are unknown. Rules of one axis alone are in
that axis's file (`MeshAxis.refuse`). The rules here depend on what the axes divide, not on which axes there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from mpitrain.choices import DelayedSchedule
from mpitrain.config.settings import Config
from mpitrain.errors import InputError, refusal
from mpitrain.layout.mesh import BLOCKS, PARTS, SAMPLES, Sizes, count_along
from mpitrain.parallel.costs import ModelProfile
from mpitrain.parallel.layouts import ParallelLayout
from mpitrain.parallel.places import Nodes
from mpitrain.shard import placement
from mpitrain.shard.placement import STAGES
from mpitrain.shard.virtual_workers import VirtualWorkers


@dataclass(frozen=True)
class Combination:
    """Settings and facts of a training job, to be checked for conflicts.

    Attributes:
        parallel: The settings [parallel], or a layout, which has fields of the same names.
        sizes: Axes of the mesh, each with its ranks.
        compiled: The setting model.compile.
        reproducible: The setting run.reproducible.
        has_blocks: True if the model has blocks that can be compiled one by one.
        has_data: True if the data set is known; false in a user loop, which only passes batches.
        synchronous: True if several ranks compute batch norms together.
        one_copy: True if the ranks of a node share one copy of the parameters, or if that is not known yet.
        gathers: True if ranks gather parameters when they need them.
        offload: The setting parallel.offload_parameters.
        on_device: True if ranks compute on devices.
        workers: Division of a batch over the ranks; None if not known yet.
        batches: Number of samples of each batch to come.
        microbatch: Samples of a microbatch; 0: all samples of a worker at once.
    """

    parallel: Any
    sizes: Sizes = ()
    compiled: bool = False
    reproducible: bool = False
    has_blocks: bool = True
    has_data: bool = True
    synchronous: bool = False
    one_copy: bool = True
    gathers: bool = False
    offload: str = ""
    on_device: bool = False
    workers: VirtualWorkers | None = None
    batches: Iterable[int] = ()
    microbatch: int = 0

    def count(self, *kinds: str) -> int:
        """Return the number of ranks along all axes that divide one of `kinds` (SAMPLES, PARTS, BLOCKS, LAYERS)."""
        return count_along(self.sizes, *kinds)

    def size(self, name: str) -> int:
        """Return the number of ranks along one axis."""
        return next((int(ranks) for axis, ranks in self.sizes if axis.name == name), 1)


def conflict(combination: Combination) -> str:
    """Return the first reason why a combination cannot be trained, and how to fix it; empty if it can be trained."""
    refusals = [axis.refuse for axis, _ in combination.sizes]
    return next(filter(None, (rule(combination) for rule in (*RULES, *refusals))), "")


def require_compatible(combination: Combination) -> None:
    """Raise InputError if a combination cannot be trained."""
    if why := conflict(combination):
        raise refusal(why)


def _compile_conflict(of: Combination) -> str:
    sliced = of.parallel.slices > 1 and of.count(BLOCKS) > 1
    if not of.compiled or not (of.reproducible or sliced):
        return ""
    why = "run.reproducible, which needs sums in a known order"
    why = "parallel.slices, which calls the blocks slice by slice without compiling them" if sliced else why
    return f"model.compile cannot be combined with {why}; set one of them to its default"


def _reproducible_conflict(of: Combination) -> str:
    cut = [axis.name for axis, ranks in of.sizes if axis.divides != SAMPLES and ranks != 1]
    return bool(of.reproducible and cut) * (
        "run.reproducible supports only data parallelism, because a divided model sums in another order; set "
        "parallel.pipeline and parallel.tensor to 1, or run.reproducible to false"
    )


def _placement_conflict(of: Combination) -> str:
    """Return a conflict in the placement of parameters over replicas (`shard.placement`); empty if there is none."""
    return placement.conflict(
        of.parallel.zero,
        of.count(SAMPLES, PARTS),
        staged=of.count(BLOCKS) > 1,
        one_copy=of.one_copy,
        offload=of.offload,
        on_device=of.on_device,
    )


def _compiled_placement_conflict(of: Combination) -> str:
    if not of.compiled:
        return ""
    if not of.has_blocks:
        return without_blocks("model.compile")
    if of.gathers:
        return (
            "model.compile cannot compile blocks whose parameters are gathered at parallel.zero 3; use "
            "parallel.zero 2, or set model.compile to false"
        )
    return of.synchronous * (
        "model.compile cannot compile batch norms that several ranks compute together; set model.compile to false"
    )


def _batch_conflict(of: Combination) -> str:
    """Return why ranks that communicate in their layers cannot share a batch (`VirtualWorkers`); empty if they can."""
    if of.workers is None:
        return ""
    has = {"synchronous": of.synchronous, "gathers": of.gathers}
    return next(filter(None, (of.workers.conflict(size, of.microbatch, **has) for size in of.batches)), "")


RULES: Sequence[Callable[[Combination], str]] = (
    _compile_conflict,
    _reproducible_conflict,
    _placement_conflict,
    _compiled_placement_conflict,
    _batch_conflict,
)


def without_blocks(key: str) -> str:
    """Return the message for a setting that needs blocks when the model has none."""
    return (
        f"{key} needs a model with blocks, and this one has none; put its layers into a ModuleList or Sequential, "
        f"or set {key} to false"
    )


# -- layouts that a planner may choose


@dataclass(frozen=True)
class LayoutRules:
    """Restrictions on layouts from the rest of a configuration.

    Attributes:
        warmup: Sizes of the batches of a warm-up.
        compiled: The setting model.compile.
        workers: The setting run.workers if run.reproducible is on, else 0.
        offload: The setting parallel.offload_parameters.
        axes: The setting parallel.axes, as pairs.
        recompute: The value of train.recompute that layouts must have; None: any.
    """

    warmup: tuple[int, ...] = ()
    compiled: bool = False
    workers: int = 0
    offload: str = ""
    axes: tuple[tuple[str, int], ...] = ()
    recompute: bool | str | tuple[int, ...] | None = None

    def allow(self, layout: ParallelLayout, model: ModelProfile, nodes: Nodes = Nodes()) -> bool:
        """Return True if a job accepts a layout, by the rules that it checks at its start.

        Args:
            layout: The layout; its microbatch 0 is a rank's whole share of a batch.
            model: Profile of the model.
            nodes: Nodes that the ranks run on.
        """
        stage, several = STAGES[layout.zero], layout.replicas > 1
        one_copy = nodes.share(layout) and not placement.is_elsewhere(self.offload, nodes.on_device)
        try:
            workers = VirtualWorkers.of(layout.readers, self.workers > 0, self.workers)
        except InputError:
            return False
        combination = Combination(layout, layout.sizes, self.compiled, self.workers > 0, model.has_units)
        gathers = stage.parameters and several and not one_copy
        batches, synchronous = {model.batch, *self.warmup}, model.synchronous and several
        combination = replace(
            combination, synchronous=synchronous, one_copy=one_copy, gathers=gathers, offload=self.offload
        )
        return not conflict(
            replace(
                combination, on_device=nodes.on_device, workers=workers, batches=batches, microbatch=layout.microbatch
            )
        )


def rules_of(config: Config) -> LayoutRules:
    """Return the restrictions on layouts from a configuration.

    Raises:
        InputError: A planner cannot be used with parallel.mode, parallel.schedule or train.accumulation of the
            configuration.
    """
    if config.parallel.mode != "sync":
        raise refusal(
            f"the planner supports only parallel.mode sync, and the mode is {config.parallel.mode}; set it to sync"
        )
    if config.parallel.schedule in get_args(DelayedSchedule):
        raise refusal(
            f"the planner compares layouts that train alike, which parallel.schedule {config.parallel.schedule} does "
            "not; set it to another one, such as 1f1b"
        )
    if config.train.accumulation:
        raise refusal(
            "the planner chooses the number of microbatches, but train.accumulation sets it; remove "
            "train.accumulation, or set train.microbatch instead"
        )
    warmup = tuple(size for _, size in config.train.batch_warmup)
    workers, parallel = config.run.workers if config.run.reproducible else 0, config.parallel
    return LayoutRules(
        warmup, config.model.compile, workers, parallel.offload_parameters, tuple(sorted(parallel.axes.items()))
    )
