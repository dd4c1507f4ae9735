"""Compressed collectives: fewer bytes between the ranks, for an approximate result.

    world.all_reduce(gradient, "avg", compression=mt.compression.PowerSGD(rank=2))
    world.all_gather(parameters, share, compression=mt.compression.Int8())

| class    | data sent                                            | result                                        |
|----------|------------------------------------------------------|-----------------------------------------------|
| FP16     | 2 bytes per element                                  | fp32 sum of the rounded values, rounded again |
| BF16     | 2 bytes per element                                  | fp32 sum of the rounded values, rounded again |
| Int8     | 1 byte per element, between nodes                    | fp32 sum of the rounded values, rounded again |
| Int4     | half a byte per element, between nodes               | fp32 sum of the rounded values, rounded again |
| TopK     | k largest elements of each rank, with their indices  | sum of the elements that were sent            |
| PowerSGD | rank * (rows + columns) elements for each matrix     | approximation of the sum by a matrix of `rank`|

Int4, TopK and PowerSGD remember what they left out of each buffer and add it in the next call (error feedback), so that
nothing is lost permanently. The memory belongs to the object: use one object for one set of buffers, with the same
options on all ranks.
"""

from __future__ import annotations

import inspect
from typing import Any

from mpitrain.comm.compression.base import Bucket, Collectives, Compression, Shapes
from mpitrain.comm.compression.blocks import Int4, Int8
from mpitrain.comm.compression.powersgd import PowerSGD
from mpitrain.comm.compression.rounding import BF16, FP16
from mpitrain.comm.compression.topk import TopK
from mpitrain.errors import InputError

__all__ = [
    "BF16",
    "FP16",
    "Bucket",
    "Collectives",
    "Compression",
    "Int4",
    "Int8",
    "PowerSGD",
    "Shapes",
    "TopK",
    "from_name",
]


def from_name(name: str, **options: Any) -> Compression:
    """Return the compression of a name (fp16, bf16, int8, int4, topk, powersgd), with `options` for its constructor.

    Raises:
        InputError: There is no such compression or option.
    """
    kinds: dict[str, type[Compression]] = {kind.name: kind for kind in (FP16, BF16, Int8, Int4, TopK, PowerSGD)}
    if name not in kinds:
        raise InputError(f"there is no compression {name!r}; use one of {', '.join(kinds)}")
    known = list(inspect.signature(kinds[name]).parameters)
    for option in options:
        if option not in known:
            raise InputError(f"compression {name} has no option {option!r}; it has {', '.join(known) or 'none'}")
    return kinds[name](**options)
