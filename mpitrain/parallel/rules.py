"""What goes together: one list of rules, asked by the start of a job, by a loop of the user's and by the planner.

A `Combination` holds the facts that are known so far; a rule says nothing about those that are not. What only one axis
knows is in its own file (`MeshAxis.refuse`); the rules here depend on what the axes divide, whichever they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
    """Settings and facts of a training that may not go together.

    Attributes:
        parallel: The settings [parallel], or a layout, whose fields have the same names.
        sizes: Axes of the mesh, each with its ranks.
        compiled: model.compile.
        reproducible: run.reproducible.
        has_blocks: Whether the model has blocks that can be compiled by themselves.
        has_data: Whether the data set is known, not only batches that a loop of the user's brings.
        synchronous: Whether several ranks compute batch norms together.
        one_copy: Whether the ranks of a node have one copy of the parameters, as far as is known.
        gathers: Whether ranks gather parameters when they need them.
        offload: parallel.offload_parameters.
        on_device: Whether ranks compute on devices.
        workers: How the ranks divide a batch; None: not known yet.
        batches: Samples of each batch to come.
        microbatch: Samples of a microbatch; 0 for all of a worker's at once.
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
        """Return the ranks along all axes that divide one of these kinds of things."""
        return count_along(self.sizes, *kinds)

    def size(self, name: str) -> int:
        """Return the ranks along one axis."""
        return next((int(ranks) for axis, ranks in self.sizes if axis.name == name), 1)


def conflict(combination: Combination) -> str:
    """Return the first reason why a combination cannot be trained, and what to change; empty where it can."""
    refusals = [axis.refuse for axis, _ in combination.sizes]
    return next(filter(None, (rule(combination) for rule in (*RULES, *refusals))), "")


def require_compatible(combination: Combination) -> None:
    """Raise InputError for a combination that cannot be trained."""
    if why := conflict(combination):
        raise refusal(why)


def _compiled_as_called(of: Combination) -> str:
    if not of.compiled or not (of.reproducible or of.parallel.slices > 1):
        return ""
    why = "run.reproducible needs sums whose order is known"
    why = "with parallel.slices blocks are called piece by piece, as they are" if of.parallel.slices > 1 else why
    return f"model.compile: {why}; set one of them to its default"


def _whole_where_reproducible(of: Combination) -> str:
    cut = [axis.name for axis, ranks in of.sizes if axis.divides != SAMPLES and ranks != 1]
    return bool(of.reproducible and cut) * (
        "run.reproducible is for data parallel runs: a cut model sums in another order; set parallel.pipeline and "
        "parallel.tensor to 1, or run.reproducible to false"
    )


def _placed(of: Combination) -> str:
    """Ask how parameters are placed over the ranks that have the same part of the model (`shard.placement`)."""
    return placement.conflict(
        of.parallel.zero,
        of.count(SAMPLES, PARTS),
        staged=of.count(BLOCKS) > 1,
        one_copy=of.one_copy,
        offload=of.offload,
        on_device=of.on_device,
    )


def _compiled_as_placed(of: Combination) -> str:
    if not of.compiled:
        return ""
    if not of.has_blocks:
        return without_blocks("model.compile")
    if of.gathers:
        return (
            "model.compile cannot see through the gathering of blocks at parallel.zero 3; use parallel.zero 2, or set "
            "model.compile to false"
        )
    return of.synchronous * (
        "model.compile cannot see through batch norms, which the ranks compute together; set model.compile to false"
    )


def _samples_for_all(of: Combination) -> str:
    """Ask whether ranks that communicate in their layers can share every batch (`VirtualWorkers`)."""
    if of.workers is None:
        return ""
    has = {"synchronous": of.synchronous, "gathers": of.gathers}
    return next(filter(None, (of.workers.conflict(size, of.microbatch, **has) for size in of.batches)), "")


RULES: Sequence[Callable[[Combination], str]] = (
    _compiled_as_called,
    _whole_where_reproducible,
    _placed,
    _compiled_as_placed,
    _samples_for_all,
)


def without_blocks(key: str) -> str:
    """Return what is wrong with a setting that is for the blocks of a model that has none."""
    return f"{key} finds no blocks in the model: put its layers into a ModuleList or Sequential, or set it to false"


# -- what a configuration leaves to a planner


@dataclass(frozen=True)
class LayoutRules:
    """What the rest of a configuration allows.

    Attributes:
        warmup: The sizes of the batches of a warm-up.
        compiled: model.compile.
        workers: run.workers, with run.reproducible; 0 without.
        offload: parallel.offload_parameters.
        axes: parallel.axes.
    """

    warmup: tuple[int, ...] = ()
    compiled: bool = False
    workers: int = 0
    offload: str = ""
    axes: tuple[tuple[str, int], ...] = ()

    def allow(self, layout: ParallelLayout, model: ModelProfile, nodes: Nodes = Nodes()) -> bool:
        """Whether a job takes a layout, by the rules that it asks at its start.

        Args:
            layout: The layout; a microbatch of 0 is a rank's whole share of a batch.
            model: What is trained.
            nodes: Where.
        """
        stage, several = STAGES[layout.zero], layout.replicas > 1
        one_copy = nodes.share(layout) and not placement.is_elsewhere(self.offload, nodes.on_device)
        try:
            workers = VirtualWorkers.of(layout.readers, self.workers > 0, self.workers)
        except InputError:
            return False
        found = Combination(layout, layout.sizes, self.compiled, self.workers > 0, model.has_units)
        gathers = stage.parameters and several and not one_copy
        batches, synchronous = {model.batch, *self.warmup}, model.synchronous and several
        found = replace(found, synchronous=synchronous, one_copy=one_copy, gathers=gathers, offload=self.offload)
        return not conflict(
            replace(found, on_device=nodes.on_device, workers=workers, batches=batches, microbatch=layout.microbatch)
        )


def rules_of(config: Config) -> LayoutRules:
    """What a configuration allows.

    Raises:
        InputError: It is not for ranks that train in step.
    """
    if config.parallel.mode != "sync":
        raise refusal(
            f"a plan is for ranks that train in step, and parallel.mode is {config.parallel.mode}; set it to sync"
        )
    if config.train.accumulation:
        raise refusal(
            "a plan chooses how many microbatches a rank has, and train.accumulation says it; leave that out, or give "
            "train.microbatch"
        )
    warmup = tuple(size for _, size in config.train.batch_warmup)
    workers, parallel = config.run.workers if config.run.reproducible else 0, config.parallel
    return LayoutRules(
        warmup, config.model.compile, workers, parallel.offload_parameters, tuple(sorted(parallel.axes.items()))
    )
