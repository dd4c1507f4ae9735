"""Settings of the division of training over ranks, and of the communication between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge
from pydantic import BeforeValidator, model_validator

from mpitrain.choices import AllReduce, Compression, DeviceWay, Mode, Outer, PipelineSchedule, one_of
from mpitrain.config.section import Named, Section, declared, followed, followed_apart, followed_folder, setting

_of_server = partial(setting, mode="server")
_of_local = partial(setting, mode="local")

# classes of the mesh axes whose number of ranks is a setting of the same name, the outermost axis first
_AXES = {
    "data": "mpitrain.parallel.data:DataAxis",
    "pipeline": "mpitrain.parallel.pipeline:PipelineAxis",
    "tensor": "mpitrain.parallel.tensor:TensorAxis",
}

_Cut = Literal["uniform", "parameters", "time"]
_CUTS: Sequence[str] = get_args(_Cut)


def _check_cut(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        if not value or not all(type(each) is int and each > 0 for each in value):
            raise ValueError(f"parallel.cut {list(value)} is no list of the blocks of each stage; give each 1 or more")
    elif value not in _CUTS:
        raise ValueError(
            f"parallel.cut {value!r} is unknown; set it to {one_of(_CUTS)}, or to each stage's blocks, as [5, 7]"
        )
    return value


class ParallelSection(Section):
    """Settings of [parallel]: the division of training over ranks."""

    data: int | Literal["auto"] = followed("auto", "data-parallel ranks; auto: what is left", also=["dp"])
    pipeline: int = followed(1, "pipeline stages", ge=1, also=["pp", "pipeline_parallel"])
    tensor: int = followed(1, "tensor-parallel ranks (inside a node)", ge=1, also=["tp", "tensor_parallel"])
    axes: dict[Named, Annotated[int, Ge(1)]] = followed(
        {}, 'ranks along further axes, as {"package.module:Axis" = 2}', also=["mesh"]
    )
    zero: Literal[0, 1, 2, 3] = followed(
        0,
        "0 DDP; 1 + optimizer states, 2 + gradients, 3 + parameters sharded (in a pipeline, gradients are "
        "whole until the step's end)",
        also=["zero_stage", "zero_optimization"],
    )
    share_node: bool = followed(True, "zero 1-3: one copy of the parameters for the ranks of a node")
    shard_within: Literal["all", "node"] = followed(
        "all", "cut shares over all ranks, or inside each node and replicate them over the nodes"
    )
    reshard: bool = followed(
        True, "zero 3 without share_node: free a block between forward and backward", also=["reshard_after_forward"]
    )
    schedule: PipelineSchedule | Named = followed(
        "1f1b", "pipeline schedule, or package.module:function of your own", also=["pipeline_schedule"]
    )
    cut: Annotated[_Cut | tuple[int, ...], BeforeValidator(_check_cut)] = followed(
        "uniform",
        "what stages have equally much of (uniform: of blocks), or how many blocks each has, as [5, 7]",
    )
    slices: int = followed(1, "pieces of each sequence that go through the pipeline by themselves", ge=1)
    sequence: bool = followed(
        False, "with tensor: cut activations along the sequence between the layers", also=["sequence_parallel"]
    )
    whole: tuple[str, ...] = followed(
        (), 'with tensor: layers that each rank keeps whole, as ["blocks.0.attention.*"]; both layers of a pair'
    )
    chunks: int = followed(1, "model chunks per pipeline rank (interleaved)", ge=1, also=["virtual_stages"])
    offload: str = followed_folder("", "optimizer states in `host` memory or in a memory-mapped file under a PATH")
    offload_parameters: str = followed_folder(
        "",
        "zero 3: parameters, between their uses, in `host` memory or in memory-mapped files under a PATH",
        also=["offload_param"],
    )
    auto: bool = setting(False, "let the planner choose how the training is spread over these ranks")
    machine: str = setting(
        "", "with auto: a machine profile, a file or the name of a given one; empty: measured at the start"
    )
    mode: Mode = setting(
        "sync",
        "sync: all ranks wait for each step; server: parameter server; local: each replica takes steps alone",
        off="sync",
        decisive=True,
    )
    servers: int = _of_server(
        0, "mode server: the last K ranks only serve; 0: each rank serves a share and trains", ge=0, also=["num_ps"]
    )
    staleness: Annotated[int, Ge(0)] | Literal["none"] = _of_server(
        0, "mode server: steps that a worker may be ahead of the slowest; none: asynchronous", also=["max_staleness"]
    )
    staleness_lr: bool = _of_server(False, "mode server: divide the learning rate of an update by its staleness")
    local_steps: int = _of_local(
        16, "mode local: steps between two averages of the replicas", ge=1, also=["sync_every", "sync_interval"]
    )
    local_group: Annotated[int, Ge(1)] | Literal["node"] = _of_local(
        1, "mode local: data-parallel ranks that stay synchronous, as one replica; node: those of each node"
    )
    outer: Outer = _of_local(
        "average", "mode local: average the parameters, or let nesterov take the difference as a gradient (DiLoCo)"
    )
    outer_lr: float = _of_local(0.7, "learning rate of parallel.outer nesterov", gt=0.0)
    outer_momentum: float = _of_local(0.9, "momentum of parallel.outer nesterov", ge=0.0, lt=1.0)
    warm: int = _of_local(0, "mode local: steps that are synchronous, before the first local one", ge=0)
    overlap: bool = _of_local(
        False, "mode local: average while the next steps are taken, and use the average one period late"
    )
    local_compression: Literal["none", Compression] = _of_local(
        "none", "mode local: compression of the differences that are averaged"
    )

    @property
    def requested_sizes(self) -> dict[str, int | str]:
        """Ranks along each axis, or "auto", by the class that declares the axis (package.module:Class)."""
        return {path: getattr(self, name) for name, path in _AXES.items()} | dict(self.axes)

    @property
    def ranks_per_data(self) -> int:
        """Number of ranks that have the same number along the data axis."""
        return self.pipeline * self.tensor * prod(self.axes.values())

    @model_validator(mode="after")
    def _check_mode(self) -> ParallelSection:
        for key, field in type(self).model_fields.items():
            mode, value = declared(field, "mode"), getattr(self, key)
            if mode not in ("", self.mode) and value != field.default:
                raise ValueError(
                    f"parallel.{key} {value} is for parallel.mode {mode}, and the mode is {self.mode}; set "
                    f"parallel.mode to {mode}, or leave parallel.{key} out"
                )
        return self


class CommSection(Section):
    """Settings of [comm]: communication between ranks."""

    algorithm: Literal["auto", AllReduce] = followed("auto", "all-reduce algorithm", also=["all_reduce"])
    bucket_mb: float = followed(
        25.0,
        "gradient bucket size in MiB; at parallel.zero 2 and 3 at most 4 on one busy node",
        gt=0.0,
        also=["bucket_cap_mb"],
    )
    compression: Literal["none", Compression] = followed("none", "gradient compression on the wire")
    device: Literal["auto", DeviceWay] = followed_apart(
        "auto", "how device memory is carried between ranks; auto: the fastest that is there"
    )
    timeout: float = followed_apart(600.0, "seconds before an unfinished operation ends the job", gt=0.0)
