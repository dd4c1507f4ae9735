"""Settings of how the training is spread over ranks, and how they communicate."""

from __future__ import annotations

from typing import Literal

from mpitrain.choices import AllReduce, Compression, DeviceWay, PipelineSchedule
from mpitrain.config.section import Named, Section, setting


class ParallelSection(Section):
    """[parallel]"""

    data: int | Literal["auto"] = setting("auto", "data-parallel ranks; auto: what is left", also=["dp"])
    pipeline: int = setting(1, "pipeline stages", ge=1, also=["pp", "pipeline_parallel"])
    tensor: int = setting(1, "tensor-parallel ranks (inside a node)", ge=1, also=["tp", "tensor_parallel"])
    zero: Literal[0, 1, 2, 3] = setting(
        0,
        "0 DDP; 1 + optimizer states, 2 + gradients, 3 + parameters sharded (in a pipeline, gradients are "
        "whole until the step's end)",
        also=["zero_stage", "zero_optimization"],
    )
    share_node: bool = setting(True, "zero 1-3: one copy of the parameters for the ranks of a node")
    shard_within: Literal["all", "node"] = setting(
        "all", "cut shares over all ranks, or inside each node and replicate them over the nodes"
    )
    reshard: bool = setting(
        True, "zero 3 without share_node: free a block between forward and backward", also=["reshard_after_forward"]
    )
    schedule: PipelineSchedule | Named = setting(
        "1f1b", "pipeline schedule, or package.module:function of your own", also=["pipeline_schedule"]
    )
    cut: Literal["uniform", "parameters", "time"] = setting(
        "uniform", "what stages have equally much of: blocks, parameters or measured time"
    )
    slices: int = setting(1, "pieces of each sequence that go through the pipeline by themselves", ge=1)
    sequence: bool = setting(
        False, "with tensor: cut activations along the sequence between the layers", also=["sequence_parallel"]
    )
    chunks: int = setting(1, "model chunks per pipeline rank (interleaved)", ge=1, also=["virtual_stages"])
    recording: str = setting("", "file for when each pipeline step ran, in the third training step")
    offload: str = setting("", "optimizer states in `host` memory or in a memory-mapped file under a PATH")


class CommSection(Section):
    """[comm]"""

    algorithm: Literal["auto", AllReduce] = setting("auto", "all-reduce algorithm", also=["all_reduce"])
    bucket_mb: float = setting(
        25.0,
        "gradient bucket size in MiB; at parallel.zero 2 and 3 at most 4 on one busy node",
        gt=0.0,
        also=["bucket_cap_mb"],
    )
    compression: Literal["none", Compression] = setting("none", "gradient compression on the wire")
    device: Literal["auto", DeviceWay] = setting(
        "auto", "how device memory is carried between ranks; auto: the fastest that is there"
    )
    timeout: float = setting(600.0, "seconds before an unfinished operation ends the job", gt=0.0)
