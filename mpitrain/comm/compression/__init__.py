"""Compressed all-reduce: fewer bytes between the ranks for a result that is not quite the sum.

    world.all_reduce(gradient, "avg", compression=mt.compression.PowerSGD(rank=2))

| object   | what travels                                      | the result                                  |
|----------|---------------------------------------------------|---------------------------------------------|
| FP16     | 2 bytes an element                                | sum of the rounded values in fp32, rounded  |
| BF16     | 2 bytes an element                                | likewise                                    |
| TopK     | each rank's k largest elements and their places   | their sum; the rest waits in the memory     |
| PowerSGD | rank * (rows + columns) elements for each matrix  | nearest found matrix of that rank; likewise |

The last two keep what was left out of each buffer and add it the next time (error feedback), so that nothing
is lost for good. An object holds that memory: use one object for one set of buffers, alike on all ranks.
"""

from __future__ import annotations

import inspect
from typing import Any

from mpitrain.comm.compression.base import BF16, FP16, Bucket, Collectives, Compression, Shapes
from mpitrain.comm.compression.powersgd import PowerSGD
from mpitrain.comm.compression.topk import TopK
from mpitrain.errors import InputError

__all__ = ["BF16", "FP16", "Bucket", "Collectives", "Compression", "PowerSGD", "Shapes", "TopK", "from_name"]

_KINDS: tuple[type[Compression], ...] = (FP16, BF16, TopK, PowerSGD)


def from_name(name: str, **options: Any) -> Compression:
    """The compression of a name (fp16, bf16, topk, powersgd) with its constructor's options."""
    kinds = {kind.name: kind for kind in _KINDS}
    if name not in kinds:
        raise InputError(f"there is no compression {name!r}; use one of {', '.join(kinds)}")
    known = [p for p in inspect.signature(kinds[name]).parameters if p != "self"]
    for option in options:
        if option not in known:
            raise InputError(f"compression {name} has no option {option!r}; it has {', '.join(known) or 'none'}")
    return kinds[name](**options)
