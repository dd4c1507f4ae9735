"""`model.compile`: torch.compile of a model's blocks.

Each block is compiled in place, so that names in the model's state stay as they are. Between blocks nothing changes:
hooks on parameters, which reduce gradients, run as ever.
"""

from __future__ import annotations

from torch import nn

from mpitrain.shard.units import blocks_of


def compile_blocks(module: nn.Module) -> int:
    """Compile every block of a model; it happens when each is called first. Returns their number."""
    blocks = blocks_of(module)
    for block in blocks:
        block.compile()
    return len(blocks)
