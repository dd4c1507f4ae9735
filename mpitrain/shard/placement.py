"""Stages of ZeRO: which of parameters, gradients and optimizer states are replicated or sharded over the ranks.

    stage        parameters   gradients    optimizer states     bytes per parameter and rank, 16-bit training
    0  DDP       replicated   replicated   replicated           16
    1  ZeRO-1    replicated   replicated   sharded              4 + 12/N
    2  ZeRO-2    replicated   sharded      sharded              2 + 14/N
    3  ZeRO-3    sharded      sharded      sharded              16/N

N is the number of data-parallel ranks. The bytes are those of Rajbhandari et al. 2020 (ZeRO, section 3): 2 for a 16-bit
parameter, 2 for its gradient and 12 for the optimizer's fp32 copy and its two moments. In fp32 training there is no
separate copy, so the bytes are 4, 4 and 8.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpitrain.config.settings import Config
from mpitrain.shard.offload import HOST

CACHED_MB = 4.0  # MiB of gradients that stay in the cache from backward until they are reduced
DEFERRING = 3  # slots of gradients if a bucket is reduced in split phases, after the next one was computed
SCRATCH = 16 << 20  # elements of fp32 gradients that exist at a time in 16-bit training


@dataclass(frozen=True)
class ZeroStage:
    """One stage of ZeRO: parameters, gradients and optimizer states are each sharded (True) or replicated (False)."""

    parameters: bool
    gradients: bool
    states: bool


STAGES = (
    ZeroStage(False, False, False),
    ZeroStage(False, False, True),
    ZeroStage(False, True, True),
    ZeroStage(True, True, True),
)


@dataclass(frozen=True)
class Account:
    """Bytes on a rank, by category.

    Attributes:
        parameters: Bytes of parameters, in the precision of the forward pass.
        gradients: Bytes of gradients, in the same precision.
        states: Bytes of optimizer states, including the fp32 copy of 16-bit parameters.
    """

    parameters: float
    gradients: float
    states: float

    @property
    def total(self) -> float:
        """Bytes of all categories."""
        return self.parameters + self.gradients + self.states


def stage_of(config: Config, ranks: int, *, shardable: bool = True) -> int:
    """Return the stage of ZeRO of a configuration; for parallel.zero "auto" the fastest one with the same result.

    Stage 1 is faster than stage 0, because each rank updates only its share. Stage 0 is used if there is nothing to
    shard, if any rank must be able to restore the states (elastic.mode shrink), if compressed gradients would depend on
    the shares, in modes other than sync, and with the pipeline schedule 2bw.

    Args:
        config: Configuration; [parallel], [elastic] and [comm] count.
        ranks: Number of ranks that sum gradients.
        shardable: False if the optimizer's states cannot be sharded.
    """
    zero = config.parallel.zero
    if zero != "auto":
        return zero
    plain = config.parallel.mode == "sync" and config.elastic.mode == "off" and config.comm.compression == "none"
    return int(plain and shardable and ranks > 1 and config.parallel.schedule != "2bw")


def conflict(
    zero: int | str, ranks: int, *, staged: bool, one_copy: bool, offload: str = "", on_device: bool = False
) -> str:
    """Return why this placement of parameters is impossible and how to change it; empty if it is possible.

    Args:
        zero: Stage of ZeRO, or "auto".
        ranks: Number of data-parallel ranks.
        staged: If true, the module is a stage of a pipeline.
        one_copy: If true, the ranks of a node share one copy of the parameters.
        offload: Setting parallel.offload_parameters.
        on_device: If true, ranks compute on devices.
    """
    if offload and zero != 3:
        return (
            f"parallel.offload_parameters needs parallel.zero 3, but parallel.zero is {zero}; set parallel.zero to 3, "
            "or remove parallel.offload_parameters"
        )
    gathers = is_elsewhere(offload, on_device) or (ranks > 1 and not one_copy)
    if zero == 3 and staged and gathers:
        return (
            "parallel.zero 3 would gather each block of a stage twice for every microbatch, and a pipeline has many; "
            "set parallel.zero to 2, or parallel.share_node to true, which needs host memory and the same number of "
            "data-parallel ranks on each node"
        )
    return ""


def is_elsewhere(offload: str, on_device: bool) -> bool:
    """Return True if data is offloaded to memory other than the memory in which the ranks compute.

    Args:
        offload: "host", or a folder for mapped files; empty for no offload.
        on_device: If true, ranks compute on devices.
    """
    return bool(offload) and (on_device or offload != HOST)


def node_has_one_copy(stage: ZeroStage, share_node: bool, on_device: bool, even: bool) -> bool:
    """Return whether the ranks of a node share one copy of the parameters, provided that memory can be shared.

    Args:
        stage: Stage of ZeRO.
        share_node: Setting parallel.share_node.
        on_device: If true, ranks compute on devices.
        even: If true, each node has the same number of data-parallel ranks.
    """
    return stage.states and share_node and not on_device and even


def bucket_size(bucket_mb: float, sharded: bool, overlaps: bool, nodes: int, on_device: bool) -> float:
    """Return the size of a bucket in MiB.

    It is at most CACHED_MB for sharded gradients on the CPU within one node if communication does not overlap backward,
    so that a bucket is reduced while it is in the cache.

    Args:
        bucket_mb: Requested MiB.
        sharded: If true, each rank keeps only its share of the gradients.
        overlaps: If true, a core is free to reduce one bucket while backward computes the next.
        nodes: Number of nodes of the ranks that shares are divided over.
        on_device: If true, ranks compute on devices.
    """
    cached = sharded and not overlaps and nodes == 1 and not on_device
    return min(bucket_mb, CACHED_MB) if cached else bucket_mb


def slot_count(overlaps: bool, in_order: bool, shared: bool, nodes: int) -> int:
    """Return the number of slots that sharded gradients pass through (see `shard.gradients`).

    Args:
        overlaps: If true, a core is free to reduce one bucket while backward computes the next.
        in_order: If true, buckets are compressed or summed in a fixed order, which excludes split phases.
        shared: If true, a slot is in memory that the ranks of a node share.
        nodes: Number of nodes of the ranks that shares are divided over.
    """
    if overlaps:
        return 2
    return DEFERRING if shared and nodes == 1 and not in_order else 1


def formula(
    stage: ZeroStage,
    ranks: int,
    numel: float,
    itemsize: int,
    moments: int,
    *,
    copied: bool = False,
    sharing: int = 0,
) -> Account:
    """Return the bytes of parameters, gradients and optimizer states on each rank, without padding.

    Args:
        stage: Stage of ZeRO.
        ranks: Number of data-parallel ranks.
        numel: Number of trained parameters.
        itemsize: Bytes of a parameter in the forward pass.
        moments: Number of fp32 values per parameter in the optimizer's state (Adam: 2).
        copied: If true, the optimizer also works on a copy of fp32 parameters, as when the host updates a device's
            parameters.
        sharing: Number of ranks of a node that share one copy of the parameters; 0 if they do not.
    """
    master = 4 if itemsize < 4 or copied else 0

    def per_rank(nbytes: int, sharded: bool) -> float:
        return nbytes * numel / (ranks if sharded else 1)

    return Account(
        itemsize * numel / sharing if sharing else per_rank(itemsize, stage.parameters),
        per_rank(itemsize, stage.gradients),
        per_rank(master + 4 * moments, stage.states),
    )
