"""A layout, the division of a model and its batches over ranks: as one line of text and as settings.

4x2x1 zero1 mb2 1f1b          data x pipeline x tensor ranks, then what is not as it is by default, in any order

zeroZ            parallel.zero                 slicesS         parallel.slices
mbM              train.microbatch [1]          cut:3,2x4,3     parallel.cut [3, 4, 4, 3]
gpipe | 1f1b | interleaved | zero-bubble | package.module:function       parallel.schedule
chunksV          parallel.chunks               recompute       train.recompute true
sequence         parallel.sequence             recompute:WAY   train.recompute: selective, every4 or blocks 0-5,8
offload:host     parallel.offload
per-node         parallel.shard_within node    private         parallel.share_node false
kept             parallel.reshard false        whole:P,Q       parallel.whole ["P", "Q"]
partitioned      train.partition_activations   activations:host                train.offload_activations
shares:time      parallel.shares time          axes:package.module:Axis=N,...  parallel.axes {"...:Axis" = N, ...}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import groupby, pairwise
from math import prod
from types import MappingProxyType
from typing import Any, get_args

from mpitrain.choices import PipelineSchedule
from mpitrain.config.named import find
from mpitrain.config.parallel import ParallelSection
from mpitrain.config.settings import Config
from mpitrain.config.training import recomputes_stages
from mpitrain.errors import refusal
from mpitrain.layout.boxes import split
from mpitrain.layout.mesh import LAYERS, PARTS, SAMPLES, MeshAxis, axes_of, count_along, shape_of
from mpitrain.parallel.costs import BlockCost, Divided
from mpitrain.pipe.partition import partition
from mpitrain.pipe.schedule import default_microbatches, make_schedule
from mpitrain.shard.placement import stage_of


@dataclass(frozen=True)
class ParallelLayout:
    """Division of a model and its batches over data x pipeline x tensor ranks.

    Attributes:
        data: Ranks of the data axis.
        pipeline: Ranks of the pipeline axis.
        tensor: Ranks of the tensor axis.
        zero: Stage of ZeRO, 0 to 3.
        share_node: The setting parallel.share_node.
        shard_within: "all" or "node": ranks over which states (and gradients, parameters) are sharded.
        reshard: The setting parallel.reshard.
        microbatch: Samples of a rank in one forward pass; at least 1.
        schedule: Schedule of the pipeline.
        chunks: Stages of a pipeline rank.
        slices: Pieces of a sequence in the pipeline.
        shares: The setting parallel.shares.
        cut: Number of blocks of each stage, in order; empty: equal numbers.
        recompute: The setting train.recompute; a list of blocks as a tuple.
        offload: The setting parallel.offload.
        sequence: The setting parallel.sequence.
        whole: Patterns of the names of layers that the tensor plan divides, but that every rank keeps whole.
        axes: The setting parallel.axes, as pairs of an axis's class (package.module:Class) and its ranks.
        offload_activations: The setting train.offload_activations.
        partition_activations: The setting train.partition_activations.
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
    recompute: bool | str | tuple[int, ...] = False
    offload: str = ""
    sequence: bool = False
    whole: tuple[str, ...] = ()
    axes: tuple[tuple[str, int], ...] = ()
    offload_activations: str = ""
    partition_activations: bool = False
    shares: str = "equal"

    @property
    def sizes(self) -> tuple[tuple[MeshAxis, int], ...]:
        """Axes of the mesh, outermost first, with the ranks along each."""
        return sizes_of(self.data, self.pipeline, self.tensor, self.axes)

    @property
    def divided(self) -> Divided:
        """Division of the model's layers and sequences, before the model is cut into stages."""
        return Divided(self.tensor, self.sequence, self.whole, self.slices, self.replicas > 1, in_layers(self.axes))

    @property
    def recomputes_stages(self) -> bool:
        """True if a pipeline's stages are recomputed as a whole."""
        return self.pipeline > 1 and recomputes_stages(self)

    @property
    def can_partition_activations(self) -> bool:
        """True if tensor ranks keep equal inputs of recomputed blocks, which they can divide among them."""
        return self.tensor > 1 and bool(self.recompute) and not self.sequence

    @property
    def idle(self) -> set[str]:
        """Settings without effect because their axis has one rank."""
        return {key for axis, ranks in self.sizes if ranks == 1 for key in axis.idle}

    def only(self, *names: str) -> ParallelLayout:
        """Return a layout on the same mesh that keeps the named settings and has defaults for all others."""
        names += ("data", "pipeline", "tensor", "axes")
        return ParallelLayout(**{name: getattr(self, name) for name in names})

    @property
    def ranks(self) -> int:
        """Number of ranks: the product over all axes."""
        return prod(ranks for _, ranks in self.sizes)

    @property
    def readers(self) -> int:
        """Number of ranks that read different samples (see `mpitrain.layout.mesh`)."""
        return count_along(self.sizes, SAMPLES)

    @property
    def replicas(self) -> int:
        """Number of ranks that have the same part of the model."""
        return count_along(self.sizes, SAMPLES, PARTS)


_NUMBERED = {"zero": "zero", "mb": "microbatch", "chunks": "chunks", "slices": "slices"}
_FLAGS: dict[str, tuple[str, Any]] = {
    "recompute": ("recompute", True),
    "sequence": ("sequence", True),
    "per-node": ("shard_within", "node"),
    "private": ("share_node", False),
    "kept": ("reshard", False),
    "partitioned": ("partition_activations", True),
    "shares:time": ("shares", "time"),
}
_OF_TRAIN = ("microbatch", "recompute", "offload_activations", "partition_activations")
SECTION_OF = {  # section of the configuration for each key
    each.name: "train" if each.name in _OF_TRAIN else "parallel" for each in fields(ParallelLayout)
}
_EXAMPLE = "4x2x1 zero1 mb2 1f1b"


@lru_cache(maxsize=4096)
def sizes_of(
    data: int, pipeline: int, tensor: int, axes: tuple[tuple[str, int], ...] = ()
) -> tuple[tuple[MeshAxis, int], ...]:
    """Return the axes of a mesh, outermost first, with the ranks along each.

    Args:
        data: Ranks of the data axis.
        pipeline: Ranks of the pipeline axis.
        tensor: Ranks of the tensor axis.
        axes: The setting parallel.axes, as pairs.
    """
    section = ParallelSection.model_construct(data=data, pipeline=pipeline, tensor=tensor, axes=dict(axes))
    return tuple((axis, int(ranks)) for axis, ranks in axes_of(section))


@lru_cache(maxsize=256)
def in_layers(axes: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    """Return those of the axes in parallel.axes that change what a layer computes."""
    return tuple(each for each in axes if find("parallel.axes", each[0])().divides in (LAYERS, PARTS))


def text(layout: ParallelLayout) -> str:
    """Return the layout as one line of text that `read` can parse."""
    words = [f"{layout.data}x{layout.pipeline}x{layout.tensor}"]
    words += [f"zero{layout.zero}"] if layout.zero else []
    words += [f"mb{layout.microbatch}"]
    words += [layout.schedule] if layout.pipeline > 1 or layout.schedule != "1f1b" else []
    words += [f"chunks{layout.chunks}"] if layout.chunks > 1 else []
    words += [f"slices{layout.slices}"] if layout.slices > 1 else []
    words += [word for word, (name, value) in _FLAGS.items() if getattr(layout, name) == value]
    if not isinstance(layout.recompute, bool):
        way = layout.recompute.replace(" ", "") if isinstance(layout.recompute, str) else _ranges(layout.recompute)
        words.append(f"recompute:{way}")
    words += [f"offload:{layout.offload}"] if layout.offload else []
    words += [f"activations:{layout.offload_activations}"] if layout.offload_activations else []
    if layout.cut:
        runs = [(blocks, len(list(run))) for blocks, run in groupby(layout.cut)]
        words.append("cut:" + ",".join(f"{times}x{blocks}" if times > 1 else str(blocks) for blocks, times in runs))
    words += [f"whole:{','.join(layout.whole)}"] if layout.whole else []
    words += ["axes:" + ",".join(f"{path}={ranks}" for path, ranks in layout.axes)] if layout.axes else []
    return " ".join(words)


def read(line: str) -> ParallelLayout:
    """Return the layout that a line of text describes in this module's notation.

    Raises:
        InputError: A word is unknown, or the ranks are missing.
    """
    shape: tuple[int, ...] = ()
    values: dict[str, Any] = {}
    for word in line.split():
        if match := re.fullmatch(r"(\d+)x(\d+)x(\d+)", word):
            shape = tuple(map(int, match.groups()))
        else:
            values.update(_parse_word(word))
    if not shape:
        raise refusal(f"layout {line!r} does not begin with data x pipeline x tensor ranks; write {_EXAMPLE!r}")
    if min(shape) < 1 or min(values.get(name, 1) for name in ("microbatch", "chunks", "slices")) < 1:
        raise refusal(f"layout {line!r}: each number must be at least 1; write {_EXAMPLE!r}")
    data, pipeline, tensor = shape
    return ParallelLayout(data, pipeline, tensor, **values)


def _ranges(numbers: Sequence[int]) -> str:
    """Return numbers in ascending order as text, consecutive ones as a range."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), key=lambda each: each[1] - each[0])]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _parse_word(word: str) -> dict[str, Any]:
    """Return the fields of a layout that one word of its text sets.

    Raises:
        InputError: The word is unknown.
    """
    if word in _FLAGS:
        return dict([_FLAGS[word]])
    name, colon, value = word.partition(":")
    if colon and value:
        if name in ("offload", "activations"):
            return {"offload" if name == "offload" else "offload_activations": value}
        if name == "recompute" and re.fullmatch(r"selective|every[1-9]\d*", value):
            return {"recompute": value.replace("every", "every ")}
        if name == "recompute" and re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", value):
            ends = [(int(begin), int(end or begin)) for begin, _, end in (r.partition("-") for r in value.split(","))]
            return {"recompute": tuple(number for begin, end in ends for number in range(begin, end + 1))}
        if name == "axes" and re.fullmatch(r"[\w.]+:\w+=[1-9]\d*(,[\w.]+:\w+=[1-9]\d*)*", value):
            pairs = [part.rpartition("=") for part in value.split(",")]
            return {"axes": tuple(sorted((path, int(ranks)) for path, _, ranks in pairs))}
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
        f"{word!r} is not part of a layout; write words such as {_EXAMPLE!r} (all are listed by python -m "
        "mpitrain.plan --help)"
    )


def settings(
    layout: ParallelLayout, replacements: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, dict[str, Any]]:
    """Return all settings that a layout determines, by section and key, defaults included.

    Args:
        layout: The layout.
        replacements: Settings that replace those of the layout, by key; a key belongs to only one section.
    """
    sections: dict[str, dict[str, Any]] = {"parallel": {}, "train": {}}
    for name, section in SECTION_OF.items():
        value = dict(layout.axes) if name == "axes" else getattr(layout, name)
        if isinstance(value, tuple):
            value = list(value) or ("uniform" if name == "cut" else [])
        sections[section][name] = replacements.get(name, value)
    return sections


def layout_of(
    config: Config,
    ranks: int,
    blocks: Sequence[BlockCost] = (),
    slowness: Callable[[ParallelLayout], Sequence[float]] = lambda layout: [1.0] * layout.pipeline,
) -> ParallelLayout:
    """Return the layout that a configuration describes.

    Args:
        config: The configuration; open settings are filled in as in training.
        ranks: Number of ranks.
        blocks: Blocks of the model, for a cut by parameters or by time; without them, such a cut is taken as uniform.
        slowness: Function that returns the factor by which each rank of a layout's pipeline computes slower than
            `blocks` say. Default: all ranks are equal.

    Raises:
        InputError: The product of the axes is not the number of ranks.
    """
    parallel, train = config.parallel, config.train
    values = {name: getattr(getattr(config, section), name) for name, section in SECTION_OF.items()}
    shape = shape_of(axes_of(parallel), ranks)
    values |= {name: shape[name] for name in ("data", "pipeline", "tensor")}
    values["axes"] = tuple(sorted(parallel.axes.items()))
    layout = ParallelLayout(**values | {"zero": 0, "cut": (), "whole": tuple(parallel.whole)})
    layout = replace(layout, zero=stage_of(config, layout.replicas))
    most = layout.readers * default_microbatches(layout.pipeline)
    return replace(
        layout.only(*(SECTION_OF.keys() - layout.idle)),
        microbatch=train.microbatch or -(-train.batch // most),
        cut=_cut(parallel.cut, layout, blocks, slowness(layout)) if layout.pipeline > 1 else (),
    )


def _cut(
    cut: str | Sequence[int], layout: ParallelLayout, blocks: Sequence[BlockCost], slowness: Sequence[float]
) -> tuple[int, ...]:
    """Return the number of blocks of each stage; empty if the stages have equal numbers."""
    if not isinstance(cut, str):
        return tuple(int(number) for number in cut)
    stages = layout.pipeline * layout.chunks
    if cut == "uniform" or len(blocks) < stages:
        return ()
    if cut == "parameters":
        return sizes(partition([[float(sum(w.numel for w in b.weights)) for b in blocks]] * stages))
    rank_of = make_schedule(layout.schedule, layout.pipeline, layout.pipeline, layout.chunks, layout.slices).rank_of
    return sizes(partition([[b.seconds * slowness[rank] for b in blocks] for rank in rank_of]))


def sizes(bounds: Sequence[int]) -> tuple[int, ...]:
    """Return the number of blocks of each stage from the stages' bounds; empty if the numbers are equal."""
    counts = tuple(hi - lo for lo, hi in pairwise(bounds))
    return () if list(bounds) == split(bounds[-1], len(counts)) else counts


# -- all layouts that a model can be trained in


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, in ascending order."""
    return [n for n in range(1, number + 1) if number % n == 0]
