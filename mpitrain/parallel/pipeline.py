"""The pipeline axis: its ranks hold consecutive stages of the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

from torch import nn

from mpitrain.config.training import recomputes_stages
from mpitrain.errors import refusal
from mpitrain.layout.mesh import BLOCKS, MeshAxis
from mpitrain.parallel.costs import Divided, ModelProfile
from mpitrain.parallel.dividing import ModelPart
from mpitrain.parallel.layouts import ParallelLayout, divisors
from mpitrain.parallel.rules import Combination
from mpitrain.pipe.partition import listed_blocks, require_look_back
from mpitrain.pipe.schedule import default_microbatches

if TYPE_CHECKING:
    from mpitrain.comm import Communicator

_CHUNKS = {"1f1b": (1,), "gpipe": (1,), "interleaved": (2, 4), "zero-bubble": (1, 2)}
SCHEDULES = [(schedule, n) for schedule, chunks in _CHUNKS.items() for n in chunks]


class PipelineAxis(MeshAxis):
    """The axis of pipeline parallelism."""

    name = "pipeline"
    divides = BLOCKS
    near = 10
    idle = ("schedule", "slices")

    def refuse(self, combination: Combination) -> str:
        """Refuse a list of blocks per stage without stages, and a cut by time without a data set."""
        cut, staged = combination.parallel.cut, combination.size(self.name) > 1
        if cut and not isinstance(cut, str) and not staged:
            return (
                f"parallel.cut {list(cut)} is for the stages of a pipeline, but parallel.pipeline is 1; raise "
                "parallel.pipeline, or remove parallel.cut"
            )
        return (cut == "time" and staged and not combination.has_data) * (
            "parallel.cut time measures blocks with samples of the data set, which your own training loop "
            "does not provide; set it to parameters, or to the number of blocks of each stage, such as [5, 7]"
        )

    def divide(self, part: ModelPart, group: Communicator) -> None:
        """Cut the model into stages, and keep this rank's stages. Collective.

        Args:
            part: The model, divided along the earlier axes. Its `pipeline` and `module` are replaced.
            group: Ranks of the pipeline.

        Raises:
            InputError: The model does not fit the settings, or a rank would have no parameter to train.
        """
        if group.size == 1:
            return
        from mpitrain.pipe.pipeline import Pipeline  # loads MPI

        assert part.criterion is not None
        parallel = part.parallel
        listed = listed_blocks(part.module, part.names)
        require_look_back(part.module, listed, parallel.slices)
        pipeline = Pipeline(
            listed,
            part.criterion(),
            group,
            schedule=parallel.schedule,
            chunks=parallel.chunks,
            slices=parallel.slices,
            cut=part.cut,
            blocks=() if isinstance(parallel.cut, str) else parallel.cut,
            microbatches=default_microbatches(group.size),
            recompute=recomputes_stages(part.train),  # otherwise see `divide`
            device=part.device,
        )
        part.pipeline, part.module = pipeline, pipeline.module
        _require_parameters(group, pipeline.module)

    def sizes(self, model: ModelProfile, ranks: int, asked: int | str) -> Iterable[int]:
        """Return the numbers of pipeline ranks that a planner tries: divisors of `ranks`, at most one rank per block.

        Args:
            model: Profile of the model. If the model is not a list of blocks, the only size is 1.
            ranks: Ranks that the axes further inside leave.
            asked: Ignored.
        """
        most = len(model.blocks(1)) if model.listed else 1
        return [n for n in divisors(ranks) if n <= most]

    def options(self, layout: ParallelLayout, model: ModelProfile, places: Any) -> Iterable[Mapping[str, Any]]:
        """Return the schedules that a planner tries, each with numbers of stages per rank and slices of a sequence.

        Args:
            layout: Layout with its ranks, and defaults for the rest.
            model: Profile of the model, which limits the number of stages and says if sequences can be sliced.
            places: Ignored.

        Returns:
            Changes of the layout, with the keys schedule, chunks and slices; no change without a pipeline.
        """
        if layout.pipeline == 1:
            return [{}]
        blocks, divided = len(model.blocks(1)), Divided(layout.tensor)
        schedules = [each for each in SCHEDULES if layout.pipeline * each[1] <= blocks]
        sliced = [1, *(n for n in (2, 4) if model.takes(replace(divided, slices=n)))]
        return [
            {"schedule": schedule, "chunks": chunks, "slices": slices}
            for (schedule, chunks), slices in product(schedules, sliced)
            if slices == 1 or schedule != "zero-bubble"
        ]


def _require_parameters(ranks: Communicator, stage: nn.Module) -> None:
    """Raise InputError if a stage has no parameter to train. Collective."""
    trains = ranks.all_gather_object(any(p.requires_grad for p in stage.parameters()))
    if not all(trains):
        raise refusal(
            f"rank {trains.index(False)} of the pipeline would have no parameter to train; use fewer stages "
            "(parallel.pipeline x parallel.chunks), or set parallel.cut to parameters"
        )
