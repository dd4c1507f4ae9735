"""Blocks that do the same, so that only one of them is copied, divided and observed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn


class Double(nn.Module):
    """Stands in a copied model in the place of a block that is like an earlier one."""


def alike(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], patterns: Iterable[str]) -> list[int]:
    """Of each block the number of the first block that it is like: its own where there is none before it.

    Blocks are alike where they do the same, share no parameters with others, and the same patterns match their layers.

    Args:
        model: The whole model.
        blocks: Its blocks in order, with their names.
        patterns: Of names of modules that are going to be treated differently.
    """
    owners = Counter(id(p) for _, block in blocks for p in block.parameters())
    names = {module: name for name, module in model.named_modules()}
    several = Counter(block for _, block in blocks)
    known: dict[Any, int] = {}
    found = []
    for number, (_, block) in enumerate(blocks):
        own = all(owners[id(p)] == 1 for p in block.parameters()) and several[block] == 1
        key: Any = number
        if own and block in names and any(True for _ in block.parameters()):
            inside = [(m, [p for p in patterns if fnmatchcase(names.get(m, ""), p)]) for m in block.modules()]
            key = signature(block), tuple(tuple(matching) for _, matching in inside)
        found.append(known.setdefault(key, number))
    return found


def signature(block: nn.Module) -> Any:
    """Equal for blocks that do the same: their structure, attributes, and parameters' shapes."""
    simple = (int, float, str, bool, tuple, type(None))
    told: list[Any] = []
    for name, module in block.named_modules():
        own = tuple((k, repr(v)) for k, v in vars(module).items() if isinstance(v, simple))
        hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
        told.append((name, type(module), own, hooks))
    shapes = tuple((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in block.named_parameters())
    return tuple(told), shapes
