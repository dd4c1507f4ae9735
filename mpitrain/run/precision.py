"""Training of a script in bfloat16 with parameters in float32 (`--train.precision bf16`).

Calls of modules run under torch's autocast, from the outermost one on; their results go back to the script as float32.
Losses, metrics and optimizers of the script itself therefore stay in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map


def install() -> None:
    """Run the outermost call of every module under autocast from now on."""
    call = torch.nn.Module.__call__
    is_inside = False

    def call_module(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_inside
        if is_inside:
            return call(self, *args, **kwargs)
        first = next(self.parameters(), None)
        device = "cpu" if first is None else first.device.type
        is_inside = True
        try:
            with torch.autocast(device, torch.bfloat16):
                out = call(self, *args, **kwargs)
        finally:
            is_inside = False
        return tree_map(lambda x: x.float() if isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16 else x, out)

    torch.nn.Module.__call__ = call_module  # type: ignore[method-assign]
