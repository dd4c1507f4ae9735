"""Settings of the division of training over ranks, and of the communication between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge
from pydantic import BeforeValidator, model_validator

from mpitrain.choices import AllReduce, Compression, DelayedSchedule, DeviceWay, Mode, Outer, PipelineSchedule, one_of
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
            raise ValueError(
                f"parallel.cut {list(value)} is not a list of the number of blocks of each stage; give numbers of "
                "at least 1"
            )
    elif value not in _CUTS:
        raise ValueError(
            f"parallel.cut {value!r} is unknown; set it to {one_of(_CUTS)}, or to the number of blocks of each "
            "stage, such as [5, 7]"
        )
    return value


class ParallelSection(Section):
    """Settings of [parallel]: the division of training over ranks."""

    data: int | Literal["auto"] = followed(
        "auto", "data-parallel ranks; auto: all ranks that the other axes leave", also=["dp"]
    )
    pipeline: int = followed(1, "pipeline stages", ge=1, also=["pp", "pipeline_parallel"])
    tensor: int = followed(1, "tensor-parallel ranks (inside a node)", ge=1, also=["tp", "tensor_parallel"])
    axes: dict[Named, Annotated[int, Ge(1)]] = followed(
        {}, 'ranks along additional axes, such as {"package.module:Axis" = 2}', also=["mesh"]
    )
    zero: Literal["auto", 0, 1, 2, 3] = followed(
        "auto",
        "0: DDP; 1: sharded optimizer states; 2: also gradients; 3: also parameters (in a pipeline, gradients "
        "stay whole until the end of the step); auto: 1, or 0 where states cannot be sharded",
        also=["zero_stage", "zero_optimization"],
    )
    share_node: bool = followed(True, "zero 1-3: the ranks of a node share one copy of the parameters")
    shard_within: Literal["all", "node"] = followed(
        "all", "divide shares over all ranks, or inside each node with a replica on every node"
    )
    reshard: bool = followed(
        True,
        "zero 3 without share_node: free the parameters of a block between forward and backward",
        also=["reshard_after_forward"],
    )
    schedule: PipelineSchedule | DelayedSchedule | Named = followed(
        "1f1b",
        "pipeline schedule, 2bw (not exact: gradients of weights that are one step old), or package.module:function "
        "of your own",
        also=["pipeline_schedule"],
    )
    cut: Annotated[_Cut | tuple[int, ...], BeforeValidator(_check_cut)] = followed(
        "uniform",
        "quantity that is balanced between stages (uniform: number of blocks), or the number of blocks of "
        "each stage, such as [5, 7]",
    )
    shares: Literal["equal", "time"] = setting(
        "equal",
        "samples of each batch on a data-parallel rank: equal numbers, or numbers in proportion to its measured speed",
        mode="sync",
    )
    slices: int = followed(1, "parts of each sequence that pass through the pipeline one by one", ge=1)
    sequence: bool = followed(
        False, "with tensor: divide activations along the sequence between the layers", also=["sequence_parallel"]
    )
    whole: tuple[str, ...] = followed(
        (), 'with tensor: layers that are not divided, such as ["blocks.0.attention.*"]; name both layers of a pair'
    )
    chunks: int = followed(1, "model chunks per pipeline rank (interleaved)", ge=1, also=["virtual_stages"])
    offload: str = followed_folder(
        "", "store optimizer states in `host` memory, or in memory-mapped files in the folder PATH"
    )
    offload_parameters: str = followed_folder(
        "",
        "zero 3: store parameters that are not in use in `host` memory, or in memory-mapped files in the folder PATH",
        also=["offload_param"],
    )
    auto: bool = setting(False, "let the planner choose how training is divided over the ranks")
    machine: str = setting(
        "",
        "with auto: machine profile, as a file or the name of one that mpitrain includes; empty: measure at the start",
    )
    mode: Mode = setting(
        "sync",
        "sync: all ranks take each step together; server: parameter server; local: replicas take steps "
        "independently, and are averaged periodically",
        off="sync",
        decisive=True,
    )
    servers: int = _of_server(
        0,
        "mode server: number of ranks, the last ones, that only serve; 0: every rank serves a share and trains",
        ge=0,
        also=["num_ps"],
    )
    staleness: Annotated[int, Ge(0)] | Literal["none"] = _of_server(
        0,
        "mode server: steps that a worker may be ahead of the slowest worker; none: no limit (asynchronous)",
        also=["max_staleness"],
    )
    staleness_lr: bool = _of_server(False, "mode server: divide the learning rate of an update by its staleness")
    local_steps: int = _of_local(
        16, "mode local: steps between two averages of the replicas", ge=1, also=["sync_every", "sync_interval"]
    )
    local_group: Annotated[int, Ge(1)] | Literal["node"] = _of_local(
        1, "mode local: number of data-parallel ranks that form one synchronous replica; node: those of each node"
    )
    outer: Outer = _of_local(
        "average",
        "mode local: average the parameters, or use their mean change as the gradient of a nesterov step (DiLoCo)",
    )
    outer_lr: float = _of_local(0.7, "learning rate of parallel.outer nesterov", gt=0.0)
    outer_momentum: float = _of_local(0.9, "momentum of parallel.outer nesterov", ge=0.0, lt=1.0)
    warm: int = _of_local(0, "mode local: synchronous steps before the first local step", ge=0)
    overlap: bool = _of_local(
        False, "mode local: average while the next steps are taken, and apply the average one round late"
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
                    f"parallel.{key} {value} needs parallel.mode {mode}, but the mode is {self.mode}; set "
                    f"parallel.mode to {mode}, or remove parallel.{key}"
                )
        return self


class CommSection(Section):
    """Settings of [comm]: communication between ranks."""

    algorithm: Literal["auto", AllReduce] = followed("auto", "all-reduce algorithm", also=["all_reduce"])
    bucket_mb: float = followed(
        25.0,
        "gradient bucket size in MiB; at most 4 with parallel.zero 2 or 3 on one node without spare cores",
        gt=0.0,
        also=["bucket_cap_mb"],
    )
    rings: int = followed(
        1,
        "communicators, each with a thread, that buckets use in turn where cores are spare: the next bucket is sent "
        "while one waits for the network",
        ge=1,
        also=["round_robin"],
    )
    compression: Literal["none", Compression] = followed("none", "compression of the gradients that ranks send")
    parameter_compression: Literal["none", "int8"] = followed(
        "none", "zero 1-3: compression of the parameters that ranks gather; each rank keeps its own shares exact"
    )
    device: Literal["auto", DeviceWay] = followed_apart(
        "auto", "how device memory is sent between ranks; auto: the fastest available way"
    )
    timeout: float = followed_apart(600.0, "seconds before an unfinished operation ends the job", gt=0.0)
