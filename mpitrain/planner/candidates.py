"""All layouts that a model can be trained in: what the runtime takes, but for what is never better."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from mpitrain.config.settings import Config
from mpitrain.errors import InputError, refusal
from mpitrain.layout.mesh import conflict, uncompiled
from mpitrain.parallel.costs import Divided, ModelProfile
from mpitrain.parallel.layouts import ParallelLayout
from mpitrain.parallel.places import evenly
from mpitrain.planner.machine import MachineProfile
from mpitrain.shard import placement
from mpitrain.shard.placement import STAGES, node_has_one_copy
from mpitrain.shard.virtual_workers import VirtualWorkers


@dataclass(frozen=True)
class LayoutRules:
    """What the rest of a configuration allows.

    Attributes:
        warmup: The sizes of the batches of a warm-up.
        compiled: model.compile.
        workers: run.workers, with run.reproducible; 0 without.
        offload: parallel.offload_parameters.
    """

    warmup: tuple[int, ...] = ()
    compiled: bool = False
    workers: int = 0
    offload: str = ""

    def allow(self, layout: ParallelLayout, model: ModelProfile, ranks_per_node: int = 1, device: bool = False) -> bool:
        """Whether a job takes a layout, by the rules that it asks at its start.

        Args:
            layout: The layout; a microbatch of 0 is a rank's whole share of a batch.
            model: What is trained.
            ranks_per_node: Of the training.
            device: Whether ranks compute on devices.
        """
        data, stage, reproducible, staged = layout.data, STAGES[layout.zero], self.workers > 0, layout.pipeline > 1
        one_copy = node_has_one_copy(stage, layout.share_node, device, evenly(layout, ranks_per_node))
        one_copy = one_copy and not placement.is_elsewhere(self.offload, device)
        asked = {"synchronous": model.synchronous, "gathers": stage.parameters and data > 1 and not one_copy}
        if conflict(layout, compiled=self.compiled, reproducible=reproducible):
            return False
        zero, offload = layout.zero, self.offload
        if placement.conflict(zero, data, staged=staged, one_copy=one_copy, offload=offload, on_device=device):
            return False
        if self.compiled and (not model.has_units or uncompiled(asked["gathers"], model.synchronous and data > 1)):
            return False
        try:
            workers = VirtualWorkers.of(data, reproducible, self.workers)
        except InputError:
            return False
        return not any(workers.conflict(size, layout.microbatch, **asked) for size in {model.batch, *self.warmup})


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
    workers = config.run.workers if config.run.reproducible else 0
    return LayoutRules(warmup, config.model.compile, workers, config.parallel.offload_parameters)


def candidates(
    model: ModelProfile, machine: MachineProfile, nodes: int, ranks_per_node: int, rules: LayoutRules = LayoutRules()
) -> Iterator[ParallelLayout]:
    """Every layout for so many ranks: what the runtime takes, but for what is never better.

    Left out, because another layout is always as good or cannot be told from it:

        zero 1-3 on one data-parallel rank                      there is nothing to share out
        share_node false, but at zero 3 without a pipeline      one copy a node takes less memory and fewer messages
        reshard false, but where zero 3 gathers                 it says nothing elsewhere
        offload without a device                                states are in the host's memory already
        slices of a sequence that is divided already            a block takes its lengths from a part of what it attends
                                                                to

    Args:
        model: What is trained.
        machine: That it is trained on.
        nodes: Of the machine.
        ranks_per_node: Of the training.
        rules: What the rest of the configuration allows.
    """
    blocks, device = len(model.blocks(1)), machine.device is not None
    for data, pipeline, tensor in shapes(model, nodes * ranks_per_node, blocks, rules):
        base = ParallelLayout(data, pipeline, tensor)
        for cut in passes(model, base, blocks):
            layouts = placements(cut, nodes, ranks_per_node, device)
            yield from (layout for layout in layouts if rules.allow(layout, model, ranks_per_node, device))


def shapes(model: ModelProfile, ranks: int, blocks: int, rules: LayoutRules) -> list[tuple[int, int, int]]:
    """(data, pipeline, tensor) of all meshes that the model and its batch can be divided over."""
    found, rules = [], replace(rules, offload="")  # which says something of how parameters are placed alone
    for tensor in _divisors(ranks):
        if tensor > 1 and not (model.divisible and model.takes(Divided(tensor))):
            continue
        for pipeline in _divisors(ranks // tensor):
            data = ranks // (tensor * pipeline)
            cut = pipeline == 1 or (model.listed and pipeline <= blocks)
            if cut and data <= model.batch and rules.allow(ParallelLayout(data, pipeline, tensor, microbatch=0), model):
                found.append((data, pipeline, tensor))
    return found


def placements(base: ParallelLayout, nodes: int, ranks_per_node: int, device: bool) -> list[ParallelLayout]:
    """The ways to place parameters, gradients and states over the data-parallel ranks of a mesh."""
    found = [base]
    if base.data > 1:
        found += [replace(base, zero=zero) for zero in (1, 2, 3)]
        third = replace(base, zero=3, share_node=device)
        found += ([] if device else [third]) + [replace(third, reshard=False)]
    if nodes > 1 and evenly(base, ranks_per_node) and ranks_per_node > base.pipeline * base.tensor:
        found += [replace(each, shard_within="node") for each in found if each.zero]
    if device:
        found += [replace(each, offload="host") for each in found]
    return found


def passes(model: ModelProfile, base: ParallelLayout, blocks: int) -> Iterator[ParallelLayout]:
    """The ways to take a rank's share of a batch through its part of the model."""
    divided = Divided(base.tensor)
    sequences = (False, True)[: 1 + (base.tensor > 1 and model.takes(replace(divided, sequence=True)))]
    schedules = [each for each in _OF_PIPELINE if base.pipeline * each[1] <= blocks]
    sliced = [1, *(n for n in (2, 4) if base.pipeline > 1 and model.takes(replace(divided, slices=n)))]
    recomputes = (False, True)[: 1 + (model.has_units or base.pipeline > 1)]
    for sequence, microbatch, recompute in product(sequences, microbatches(model.batch, base.data), recomputes):
        layout = replace(base, microbatch=microbatch, sequence=sequence, recompute=recompute)
        if base.pipeline == 1:
            yield layout
            continue
        for (schedule, chunks), slices in product(schedules, sliced):
            if slices == 1 or schedule != "zero-bubble":
                yield replace(layout, schedule=schedule, chunks=chunks, slices=slices)


def microbatches(batch: int, data: int) -> list[int]:
    """Sizes of microbatches that are looked at: powers of two, and a rank's share in one to a few equal pieces.

    Args:
        batch: Samples of a step.
        data: Ranks that share them.
    """
    share = -(-batch // data)
    powers = {1 << n for n in range((share - 1).bit_length())}
    return sorted(powers | {-(-share // pieces) for pieces in range(1, _STEPS + 1)})


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


_CHUNKS = {"1f1b": (1,), "gpipe": (1,), "interleaved": (2, 4), "zero-bubble": (1, 2)}


_OF_PIPELINE = [(schedule, n) for schedule, chunks in _CHUNKS.items() for n in chunks]


_STEPS = 4  # of the fewest microbatches of a rank, all numbers up to this are looked at
