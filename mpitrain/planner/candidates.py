"""All layouts that a model can be trained in on so many nodes: what the runtime takes, but for what is never better.

Left out, because another layout is always as good or cannot be told from it:

    zero 1-3 on one data-parallel rank                      there is nothing to share out
    share_node false, but at zero 3 without a pipeline      one copy a node takes less memory and fewer messages
    reshard false, but where zero 3 gathers                 it says nothing elsewhere
    offload without a device                                states are in the host's memory already
    slices of a sequence that is divided already            a block takes its lengths from a part of what it attends to
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mpitrain.config.settings import Config
from mpitrain.errors import refusal
from mpitrain.planner.layouts import ParallelLayout
from mpitrain.planner.machine import MachineProfile
from mpitrain.planner.model import Divided, ModelProfile

_SLICES = (2, 4)
_OF_PIPELINE = (
    ("1f1b", 1),
    ("gpipe", 1),
    ("interleaved", 2),
    ("interleaved", 4),
    ("zero-bubble", 1),
    ("zero-bubble", 2),
)
_STEPS = 4  # of the fewest microbatches of a rank, all numbers up to this are looked at


@dataclass(frozen=True)
class LayoutRules:
    """What the rest of a configuration allows.

    Attributes:
        cut: Whether the model may be cut into stages or divided over tensor ranks.
        slices: Whether sequences may be sliced.
        zero: Stages of ZeRO that may be used.
        warmup: The sizes of the batches of a warm-up.
    """

    cut: bool = True
    slices: bool = True
    zero: tuple[int, ...] = (0, 1, 2, 3)
    warmup: tuple[int, ...] = ()


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
    return LayoutRules(cut=not config.run.reproducible, slices=not config.model.compile, warmup=warmup)


def candidates(
    model: ModelProfile, machine: MachineProfile, nodes: int, ranks_per_node: int, rules: LayoutRules = LayoutRules()
) -> Iterator[ParallelLayout]:
    """Every layout for so many ranks.

    Args:
        model: What is trained.
        machine: That it is trained on.
        nodes: Of the machine.
        ranks_per_node: Of the training.
        rules: What the rest of the configuration allows.
    """
    blocks = len(model.blocks(1))
    for data, pipeline, tensor in shapes(model, nodes * ranks_per_node, blocks, rules):
        base = ParallelLayout(data, pipeline, tensor)
        placed = [
            placement
            for placement in placements(base, nodes, ranks_per_node, machine.device is not None)
            if placement.zero in rules.zero
        ]
        for cut in passes(model, base, blocks, rules):
            for placement in placed:
                yield replace(
                    cut,
                    zero=placement.zero,
                    share_node=placement.share_node,
                    shard_within=placement.shard_within,
                    reshard=placement.reshard,
                    offload=placement.offload,
                )


def shapes(model: ModelProfile, ranks: int, blocks: int, rules: LayoutRules) -> list[tuple[int, int, int]]:
    """(data, pipeline, tensor) of all meshes that the model and its batch can be divided over."""
    found = []
    for tensor in _divisors(ranks):
        if tensor > 1 and not (rules.cut and model.divisible and model.takes(Divided(tensor))):
            continue
        for pipeline in _divisors(ranks // tensor):
            data = ranks // (tensor * pipeline)
            if pipeline > 1 and not (rules.cut and model.listed and pipeline <= blocks):
                continue
            uneven = any(size % data for size in (model.batch, *rules.warmup))
            if data <= model.batch and not (model.synchronous and uneven):
                found.append((data, pipeline, tensor))
    return found


def placements(base: ParallelLayout, nodes: int, ranks_per_node: int, device: bool) -> list[ParallelLayout]:
    """The ways to place parameters, gradients and states over the data-parallel ranks of a mesh."""
    found = [base]
    stage = base.pipeline * base.tensor
    even = ranks_per_node % stage == 0 or stage % ranks_per_node == 0  # ranks of a data-parallel group on each node
    together = ranks_per_node // stage if ranks_per_node % stage == 0 else 1
    if base.data > 1:
        gathered = device or not even
        for zero in (1, 2, 3):
            if zero == 3 and base.pipeline > 1 and gathered:
                continue  # needs one copy of the parameters for a node's ranks
            found.append(replace(base, zero=zero))
        if base.pipeline == 1:
            third = replace(base, zero=3, share_node=device)
            found += ([] if device else [third]) + [replace(third, reshard=False)]
    if nodes > 1 and even and together > 1:
        found += [replace(each, shard_within="node") for each in found if each.zero]
    if device:
        found += [replace(each, offload="host") for each in found]
    return found


def passes(model: ModelProfile, base: ParallelLayout, blocks: int, rules: LayoutRules) -> Iterator[ParallelLayout]:
    """The ways to take a rank's share of a batch through its part of the model."""
    divided = Divided(base.tensor)
    sequences = [False]
    if base.tensor > 1 and model.takes(replace(divided, sequence=True)):
        sequences.append(True)
    schedules = [each for each in _OF_PIPELINE if base.pipeline * each[1] <= blocks]
    for sequence in sequences:
        sliced = [1]
        if base.pipeline > 1 and rules.slices and not sequence:
            sliced += [n for n in _SLICES if model.takes(Divided(base.tensor, slices=n))]
        for microbatch in microbatches(model.batch, base.data, model.synchronous):
            for recompute in (False, True):
                layout = replace(base, microbatch=microbatch, sequence=sequence, recompute=recompute)
                if base.pipeline == 1:
                    yield layout
                    continue
                for schedule, chunks in schedules:
                    for slices in sliced if schedule != "zero-bubble" else [1]:
                        yield replace(layout, schedule=schedule, chunks=chunks, slices=slices)


def microbatches(batch: int, data: int, even: bool = False) -> list[int]:
    """Sizes of microbatches that are looked at: powers of two, and a rank's share in one to a few equal pieces.

    Args:
        batch: Samples of a step.
        data: Ranks that share them.
        even: Only those that divide the share.
    """
    share = -(-batch // data)
    found = {-(-share // pieces) for pieces in range(1, _STEPS + 1)}
    size = 1
    while size < share:
        found.add(size)
        size *= 2
    return sorted(size for size in found if not even or share % size == 0)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
