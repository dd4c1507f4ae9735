"""A layout, how a model and its batches are spread over ranks: as one line of text, as settings, and what is predicted.

4x2x1 zero1 mb2 1f1b          data x pipeline x tensor ranks, then what is not as it is by default, in any order

zeroZ            parallel.zero                 slicesS         parallel.slices
mbM              train.microbatch [1]          cut:3,2x4,3     parallel.cut [3, 4, 4, 3]
gpipe | 1f1b | interleaved | zero-bubble | package.module:function       parallel.schedule
chunksV          parallel.chunks               recompute       train.recompute
sequence         parallel.sequence             offload:host    parallel.offload
per-node         parallel.shard_within node    private         parallel.share_node false
kept             parallel.reshard false        whole:P,Q       parallel.whole ["P", "Q"]
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby, pairwise, product
from types import MappingProxyType
from typing import Any, get_args

from mpitrain.choices import PipelineSchedule
from mpitrain.config.settings import Config
from mpitrain.errors import InputError, refusal
from mpitrain.layout.boxes import split
from mpitrain.layout.mesh import axes_of, conflict, shape_of, uncompiled
from mpitrain.pipe.partition import partition
from mpitrain.pipe.schedule import default_microbatches
from mpitrain.planner.machine import MachineProfile
from mpitrain.planner.subject import BlockCost, Divided, ModelProfile
from mpitrain.shard import placement
from mpitrain.shard.placement import STAGES, node_has_one_copy
from mpitrain.shard.virtual_workers import VirtualWorkers


@dataclass(frozen=True)
class ParallelLayout:
    """How a model is spread over data x pipeline x tensor ranks.

    Attributes:
        data: Data-parallel ranks.
        pipeline: Pipeline stages' ranks.
        tensor: Tensor-parallel ranks.
        zero: Stage of ZeRO, 0 to 3.
        share_node: parallel.share_node.
        shard_within: "all" or "node": which ranks share states (and gradients, parameters) out.
        reshard: parallel.reshard.
        microbatch: Samples of a rank in one forward pass; at least 1.
        schedule: Of the pipeline.
        chunks: Stages of a pipeline rank.
        slices: Pieces of a sequence in the pipeline.
        cut: Blocks of each stage, in order; empty: equally many.
        recompute: train.recompute.
        offload: parallel.offload.
        sequence: parallel.sequence.
        whole: Patterns of names of layers that the tensor plan would divide and that every rank keeps whole.
    """

    data: int
    pipeline: int = 1
    tensor: int = 1
    zero: int = 0
    share_node: bool = True
    shard_within: str = "all"
    reshard: bool = True
    microbatch: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    slices: int = 1
    cut: tuple[int, ...] = ()
    recompute: bool = False
    offload: str = ""
    sequence: bool = False
    whole: tuple[str, ...] = ()

    @property
    def divided(self) -> Divided:
        """How a rank's part of the model is cut out, before it is cut into stages."""
        return Divided(self.tensor, self.sequence, self.whole, self.slices, synchronized=self.data > 1)

    @property
    def ranks(self) -> int:
        """Of all axes together."""
        return self.data * self.pipeline * self.tensor


@dataclass(frozen=True)
class Prediction:
    """Time and memory of a layout on so many ranks of a machine.

    Attributes:
        layout: The layout.
        seconds: Of one step.
        parts: Seconds of the step by part, in the order in which they are shown; they add up to `seconds`: compute,
            tensor, pipeline (idle and messages), gradients (communication not hidden), update, parameters
            (communication of updated or gathered parameters not hidden), other.
        memory: Bytes on the rank that needs most, by category, in the order in which they are shown: parameters,
            gradients, states, activations, buffers, working, process.
        samples: Of a global batch, so that samples / seconds is the throughput.
    """

    layout: ParallelLayout
    seconds: float
    parts: Mapping[str, float]
    memory: Mapping[str, float]
    samples: int

    @property
    def total_memory(self) -> float:
        """Bytes of all categories."""
        return sum(self.memory.values())


_NUMBERED = {"zero": "zero", "mb": "microbatch", "chunks": "chunks", "slices": "slices"}
_FLAGS: dict[str, tuple[str, Any]] = {
    "recompute": ("recompute", True),
    "sequence": ("sequence", True),
    "per-node": ("shard_within", "node"),
    "private": ("share_node", False),
    "kept": ("reshard", False),
}
SECTION_OF = {  # of the configuration, by key
    each.name: "train" if each.name in ("microbatch", "recompute") else "parallel" for each in fields(ParallelLayout)
}
_EXAMPLE = "4x2x1 zero1 mb2 1f1b"


def text(layout: ParallelLayout) -> str:
    """The layout as one line of text that `read` reads back."""
    words = [f"{layout.data}x{layout.pipeline}x{layout.tensor}"]
    words += [f"zero{layout.zero}"] if layout.zero else []
    words += [f"mb{layout.microbatch}"]
    words += [layout.schedule] if layout.pipeline > 1 or layout.schedule != "1f1b" else []
    words += [f"chunks{layout.chunks}"] if layout.chunks > 1 else []
    words += [f"slices{layout.slices}"] if layout.slices > 1 else []
    words += [word for word, (name, value) in _FLAGS.items() if getattr(layout, name) == value]
    words += [f"offload:{layout.offload}"] if layout.offload else []
    if layout.cut:
        runs = [(blocks, len(list(run))) for blocks, run in groupby(layout.cut)]
        words.append("cut:" + ",".join(f"{times}x{blocks}" if times > 1 else str(blocks) for blocks, times in runs))
    words += [f"whole:{','.join(layout.whole)}"] if layout.whole else []
    return " ".join(words)


def read(line: str) -> ParallelLayout:
    """The layout that a text in this file's notation means.

    Raises:
        InputError: A word of it is unknown, or it has no shape.
    """
    shape: tuple[int, ...] = ()
    found: dict[str, Any] = {}
    for word in line.split():
        if match := re.fullmatch(r"(\d+)x(\d+)x(\d+)", word):
            shape = tuple(map(int, match.groups()))
        else:
            found.update(_meant(word))
    if not shape:
        raise refusal(f"layout {line!r} does not begin with data x pipeline x tensor ranks; write {_EXAMPLE!r}")
    if min(shape) < 1 or min(found.get(name, 1) for name in ("microbatch", "chunks", "slices")) < 1:
        raise refusal(f"layout {line!r}: each number must be at least 1; write {_EXAMPLE!r}")
    data, pipeline, tensor = shape
    return ParallelLayout(data, pipeline, tensor, **found)


def _meant(word: str) -> dict[str, Any]:
    """The fields that one word sets. Raises InputError for a word that is unknown."""
    if word in _FLAGS:
        return dict([_FLAGS[word]])
    name, colon, value = word.partition(":")
    if colon and value:
        if name == "offload":
            return {"offload": value}
        if name == "whole":
            return {"whole": tuple(value.split(","))}
        if name == "cut" and re.fullmatch(r"(\d+x)?[1-9]\d*(,(\d+x)?[1-9]\d*)*", value):
            runs = [part.rpartition("x") for part in value.split(",")]
            return {"cut": tuple(int(blocks) for times, _, blocks in runs for _ in range(int(times or 1)))}
    match = re.fullmatch(r"([a-z]+)(\d+)", word)
    if match and match[1] in _NUMBERED and (match[1] != "zero" or int(match[2]) <= 3):
        return {_NUMBERED[match[1]]: int(match[2])}
    if word in get_args(PipelineSchedule) or re.fullmatch(r"[\w.]+:\w+", word):
        return {"schedule": word}
    raise refusal(
        f"{word!r} is no part of a layout; write words such as {_EXAMPLE!r} (all are listed by "
        "python -m mpitrain.plan --help)"
    )


def settings(layout: ParallelLayout, wanted: Mapping[str, Any] = MappingProxyType({})) -> dict[str, dict[str, Any]]:
    """The settings that run a layout, by section and key: all that it decides, defaults too.

    Args:
        layout: The layout.
        wanted: Settings that stay as they were given, by key, which no two sections share.
    """
    found: dict[str, dict[str, Any]] = {"parallel": {}, "train": {}}
    for name, section in SECTION_OF.items():
        value = getattr(layout, name)
        if isinstance(value, tuple):
            value = list(value) or ("uniform" if name == "cut" else [])
        found[section][name] = wanted.get(name, value)
    return found


def layout_of(config: Config, ranks: int, blocks: Sequence[BlockCost] = ()) -> ParallelLayout:
    """The layout that a configuration asks for.

    Args:
        config: The configuration; what it leaves open is filled in as training does.
        ranks: That it runs on.
        blocks: Of the model, for a cut by parameters or by time; without them such a cut is taken as uniform.

    Raises:
        InputError: The axes do not make so many ranks.
    """
    parallel, train = config.parallel, config.train
    data, pipeline, tensor = list(shape_of(axes_of(parallel), ranks).values())[:3]
    asked = {name: getattr(getattr(config, section), name) for name, section in SECTION_OF.items()}
    asked |= {"data": data, "pipeline": pipeline, "tensor": tensor}
    asked["microbatch"] = train.microbatch or -(-train.batch // (data * default_microbatches(pipeline)))
    asked["cut"] = _cut(parallel.cut, pipeline * parallel.chunks, blocks) if pipeline > 1 else ()
    asked["whole"] = tuple(parallel.whole) if tensor > 1 else ()
    layout = ParallelLayout(**asked)
    return replace(layout, slices=layout.slices if pipeline > 1 else 1, sequence=layout.sequence and tensor > 1)


def _cut(cut: str | Sequence[int], stages: int, blocks: Sequence[BlockCost]) -> tuple[int, ...]:
    """Blocks of each stage; empty where stages have equally many."""
    if not isinstance(cut, str):
        return tuple(int(number) for number in cut)
    if cut == "uniform" or len(blocks) < stages:
        return ()
    costs = [float(sum(w.numel for w in b.weights)) if cut == "parameters" else b.seconds for b in blocks]
    return sizes(partition(costs, stages))


def sizes(bounds: Sequence[int]) -> tuple[int, ...]:
    """How many blocks each stage has, from the bounds of the stages; empty where they have equally many."""
    counts = tuple(hi - lo for lo, hi in pairwise(bounds))
    return () if list(bounds) == split(bounds[-1], len(counts)) else counts


# -- all layouts that a model can be trained in

_CHUNKS = {"1f1b": (1,), "gpipe": (1,), "interleaved": (2, 4), "zero-bubble": (1, 2)}
_OF_PIPELINE = [(schedule, n) for schedule, chunks in _CHUNKS.items() for n in chunks]
_STEPS = 4  # of the fewest microbatches of a rank, all numbers up to this are looked at


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


def evenly(layout: ParallelLayout, ranks_per_node: int) -> bool:
    """Whether the nodes of a data-parallel group have equally many of its ranks (`shard.parameters.shard_order`)."""
    stage = layout.pipeline * layout.tensor
    return ranks_per_node % stage == 0 or stage > ranks_per_node  # then at most one on each node


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
