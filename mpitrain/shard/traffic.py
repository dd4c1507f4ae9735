"""Formulas: what a rank sends along the data axis in a training step.

Of N ranks, X bytes of gradients and as many of parameters:

    data parallel              2 (N-1)/N X    gradients are all-reduced
    ZeRO-1                     2 (N-1)/N X    gradients are reduce-scattered, updated parameters all-gathered
    ZeRO-2                       (N-1)/N X    for each microbatch, and once more for the parameters
    ZeRO-3                     3 (N-1)/N X    for each microbatch: parameters are gathered for forward and for backward

Where the ranks of a node share one copy of the parameters (parallel.share_node), an update is made in it, and nothing
is gathered inside the node: ZeRO-1 to 3 then send (N-1)/N X for the gradients, and between M nodes (M-1)/N X for the
parameters. X counts the gaps by which parameters are aligned in flat memory.

A rank that reads its neighbours' vectors where they lie moves as much as a ring sends: it takes (N-1)/N X out of them,
and for an all-reduce writes as much into them. Less common algorithms move other amounts: `doubling` and what passes
through one message for each pair of ranks, which are taken for a few bytes, where a ring's steps would cost more.

Not in the formulas are the few bytes that go with each step: of the norm, the loss and which parameters were used.

Reference:
    Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC20, section 7.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from mpitrain.comm.compression import TopK
from mpitrain.comm.job.traffic import bytes_sent
from mpitrain.shard.flat import numbered
from mpitrain.shard.parameters import Gathered

if TYPE_CHECKING:
    from mpitrain.shard.sharding import Sharding


def expected_bytes(
    gradients: float,
    ranks: int,
    gathered: Iterable[Gathered] = (),
    *,
    sharded: bool = False,
    passes: int = 1,
    replicas: int = 1,
) -> float:
    """Bytes that a rank sends along the data axis in a step, by the formulas above.

    Args:
        gradients: Bytes of all gradients.
        ranks: Over which they are reduced.
        gathered: The parameters that are gathered.
        sharded: Whether a rank gets its share of the reduced gradients alone (ZeRO-1 to 3).
        passes: How often they are reduced in a step: once, or once for each microbatch (ZeRO-2 and 3).
        replicas: Ranks that keep the same share, over which it is reduced once more (parallel.shard_within node).
    """
    sent = bytes_sent("reduce_scatter" if sharded else "all_reduce", gradients, ranks)
    sent += bytes_sent("all_reduce", gradients / ranks if sharded else gradients, replicas)
    return passes * sent + sum(each.times * bytes_sent("all_gather", each.nbytes, each.ranks) for each in gathered)


def data_bytes(sharding: Sharding, microbatches: int, *, staged: bool = False) -> float:
    """`expected_bytes` of what a sharding does.

    Args:
        sharding: The parameters and gradients of an engine.
        microbatches: Of a step: the most that any rank has.
        staged: Whether these pass through a pipeline, after which gradients are reduced once.
    """
    gradients, reduction = sharding.gradients, sharding.gradients.reduction
    passes = microbatches if gradients.reduces_each_pass and not staged else 1
    gathered = sharding.parameters.gathered(1 if staged else microbatches)
    replicas = 1 if reduction.replicas is None else reduction.replicas.size
    if reduction.compression is None:
        items = [(sharding.options.reduce_dtype or group.dtype).itemsize for group in sharding.groups]
        nbytes = sum(g.layout.numel * item for g, item in zip(sharding.groups, items, strict=True))
        sharded = sharding.stage.states
        return expected_bytes(nbytes, reduction.comm.size, gathered, sharded=sharded, passes=passes, replicas=replicas)
    return passes * _compressed(sharding) + expected_bytes(0, 1, gathered)


def _compressed(sharding: Sharding) -> float:
    """What a rank sends of all gradients once, compressed."""
    reduction, sent = sharding.gradients.reduction, 0.0
    assert reduction.compression is not None
    ranks = reduction.comm.size
    for number, (g, b) in enumerate(numbered(sharding.groups)):
        group = sharding.groups[g]
        lo, hi = group.layout.bounds[b : b + 2]
        dtype, bucket = sharding.options.reduce_dtype or group.dtype, reduction.compressed(group, b, (number,))
        wire = reduction.compression.bytes_on_wire(hi - lo, dtype, bucket.shapes if bucket is not None else None)
        gathers = isinstance(reduction.compression, TopK)
        sent += (ranks - 1) * wire if gathers else bytes_sent("all_reduce", wire, ranks)
    return sent
