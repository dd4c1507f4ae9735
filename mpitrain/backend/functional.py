"""Functional collectives that torch carries out in C++ by ways that a process group in Python is not asked on."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


@functools.cache
def install(kind: str) -> torch.library.Library | None:
    """Give torch the operations; they are there as long as what is returned, which is for ever.

    Args:
        kind: Of the devices that their tensors lie on.

    Returns:
        None where torch has none of them.
    """
    if not hasattr(torch.ops._c10d_functional, "all_gather_into_tensor_out"):
        return None
    library = torch.library.Library("_c10d_functional", "IMPL")
    key: str = torch._C._dispatch_key_for_device(kind)
    library.impl("all_gather_into_tensor_out", _all_gather_into_tensor_out, key)
    return library


def _all_gather_into_tensor_out(input: torch.Tensor, group_size: int, group_name: Any, *, out: Any) -> torch.Tensor:
    """What torch.compile makes of several all-gathers that it puts into one bucket."""
    functions: Any = c10d  # whose types of arguments differ between releases
    group = functions._resolve_process_group(group_name) if isinstance(group_name, str) else group_name
    if not isinstance(group, dist.ProcessGroup):
        group = functions.ProcessGroup.unbox(group)
    options = c10d.AllgatherOptions()
    options.asyncOp = True
    torch._C._distributed_c10d._register_work(out, group._allgather_base(out, input, options))
    return out
