"""Which of parameters, gradients and optimizer states every data-parallel rank has whole, and which it shares out.

    stage        parameters   gradients    optimizer states     bytes per parameter and rank, 16-bit training
    0  DDP       replicated   replicated   replicated           16
    1  ZeRO-1    replicated   replicated   sharded              4 + 12/N
    2  ZeRO-2    replicated   sharded      sharded              2 + 14/N
    3  ZeRO-3    sharded      sharded      sharded              16/N

The bytes are those of Rajbhandari et al. 2020 (ZeRO, section 3): 2 for a 16-bit parameter, 2 for its gradient and 12
for the optimizer's fp32 copy and its two moments. In fp32 training the copy is the parameter itself: 4, 4 and 8.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpitrain.shard.offload import HOST

CACHED_MB = 4.0  # MiB of gradients that are in the cache from when they were made until they are reduced
DEFERRING = 3  # slots of gradients, where a bucket is reduced in split phases, after the next one was made
SCRATCH = 16 << 20  # elements of fp32 gradients made at a time in 16-bit training


@dataclass(frozen=True)
class ZeroStage:
    """Whether parameters, gradients and optimizer states are sharded (True) or replicated."""

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
        parameters: In the precision of the forward pass.
        gradients: In the same precision.
        states: The optimizer's, its fp32 copy of 16-bit parameters included.
    """

    parameters: float
    gradients: float
    states: float

    @property
    def total(self) -> float:
        """Bytes of all categories."""
        return self.parameters + self.gradients + self.states


def conflict(zero: int, ranks: int, *, staged: bool, one_copy: bool, offload: str = "", on_device: bool = False) -> str:
    """Return why parameters cannot be placed so, and what to change; empty where they can.

    Args:
        zero: The stage of ZeRO.
        ranks: The data-parallel ranks.
        staged: Whether the module is a stage of a pipeline.
        one_copy: Whether the ranks of a node have one copy of the parameters between them.
        offload: parallel.offload_parameters.
        on_device: Whether ranks compute on devices.
    """
    if offload and not STAGES[zero].parameters:
        return (
            "parallel.offload_parameters is for parallel.zero 3, whose ranks gather parameters when they need them, "
            f"and the stage is {zero}; set parallel.zero to 3, or leave it out"
        )
    gathers = is_elsewhere(offload, on_device) or (ranks > 1 and not one_copy)
    if STAGES[zero].parameters and staged and gathers:
        return (
            "parallel.zero 3 would gather each block of a stage twice for every microbatch, where a pipeline has many, "
            "unless the data-parallel ranks share host memory on each node, as many on one as on another, and no "
            "device; use parallel.share_node true, or parallel.zero 2"
        )
    return ""


def is_elsewhere(offload: str, on_device: bool) -> bool:
    """Whether what is offloaded there lies in other memory than that in which ranks compute."""
    return bool(offload) and (on_device or offload != HOST)


def node_has_one_copy(stage: ZeroStage, share_node: bool, on_device: bool, even: bool) -> bool:
    """Return whether the ranks of a node have one copy of the parameters between them, if memory can be shared.

    Args:
        stage: Of ZeRO.
        share_node: Whether they are to.
        on_device: Whether they compute on devices.
        even: Whether each node has as many of the data-parallel ranks.
    """
    return stage.states and share_node and not on_device and even


def bucket_size(bucket_mb: float, sharded: bool, overlaps: bool, nodes: int, on_device: bool) -> float:
    """Return the MiB of a bucket: at most CACHED_MB where it is reduced inside a node, in the middle of backward.

    Args:
        bucket_mb: MiB that are asked for.
        sharded: Whether each rank keeps its share of the gradients alone.
        overlaps: Whether a core is free to reduce one bucket while backward makes the next.
        nodes: Nodes of the ranks that shares are divided over.
        on_device: Whether they compute on devices.
    """
    cached = sharded and not overlaps and nodes == 1 and not on_device
    return min(bucket_mb, CACHED_MB) if cached else bucket_mb


def slot_count(overlaps: bool, in_order: bool, shared: bool, nodes: int) -> int:
    """Return the slots that sharded gradients pass through (see `shard.gradients`).

    Args:
        overlaps: Whether a core is free to reduce one bucket while backward makes the next.
        in_order: Whether buckets are compressed or summed in a fixed order, which leaves no room for split phases.
        shared: Whether a slot is in memory that the ranks of a node share.
        nodes: Nodes of the ranks that shares are divided over.
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
    """What training takes on each rank, without padding.

    Args:
        stage: Of ZeRO.
        ranks: The data-parallel ranks.
        numel: Trained parameters.
        itemsize: Bytes of a parameter in the forward pass.
        moments: fp32 numbers that the optimizer keeps per parameter (Adam: 2).
        copied: The optimizer works on a copy of fp32 parameters too, as where the host updates those of a device.
        sharing: Ranks of a node that have one copy of the parameters between them; 0 where they do not.
    """
    master = 4 if itemsize < 4 or copied else 0

    def per_rank(nbytes: int, sharded: bool) -> float:
        return nbytes * numel / (ranks if sharded else 1)

    return Account(
        itemsize * numel / sharing if sharing else per_rank(itemsize, stage.parameters),
        per_rank(itemsize, stage.gradients),
        per_rank(master + 4 * moments, stage.states),
    )
