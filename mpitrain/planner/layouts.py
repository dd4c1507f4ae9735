"""A layout: how a model and its batches are spread over ranks. Every field is a setting of the configuration."""

from __future__ import annotations

from dataclasses import dataclass

from mpitrain.planner.model import Divided


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
