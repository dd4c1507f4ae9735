"""Parameters that several stages share, such as an embedding that is the output layer too.

Every rank that holds such a parameter has a copy of it. The copies begin alike and each gets the sum of all copies'
gradients, so they stay alike to the bit. Norms and checkpoints count the copy of the lowest rank alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from mpitrain.comm import Communicator
from mpitrain.errors import InputError


@dataclass(frozen=True)
class Tied:
    """One shared parameter on this rank.

    Attributes:
        name: Of this rank's copy in the whole model; others may have other names for it.
        parameter: This rank's copy.
        group: The ranks that hold a copy.
    """

    name: str
    parameter: nn.Parameter
    group: Communicator


def find_tied(
    stages: Sequence[Sequence[tuple[str, nn.Module]]], rank_of: Sequence[int], comm: Communicator
) -> list[Tied]:
    """Find the parameters of this rank that stages on other ranks have too, and make all copies alike. Collective.

    Args:
        stages: The named blocks of every stage.
        rank_of: The rank of every stage.
        comm: The ranks of the pipeline.

    Raises:
        InputError: A shared parameter is on the meta device.
    """
    holders: dict[int, dict[int, str]] = {}  # parameter -> rank -> its first name there
    parameters: dict[int, nn.Parameter] = {}
    uses: Counter[int] = Counter()
    for rank, blocks in zip(rank_of, stages, strict=True):
        for prefix, block in blocks:
            for name, parameter in block.named_parameters(prefix=prefix, remove_duplicate=False):
                uses[id(parameter)] += 1
                parameters[id(parameter)] = parameter
                holders.setdefault(id(parameter), {}).setdefault(rank, name)
    found: list[Tied] = []
    groups: dict[tuple[int, ...], Communicator | None] = {}
    for key, names in holders.items():
        if parameters[key].is_meta and uses[key] > 1:
            raise InputError(
                f"parameter {next(iter(names.values()))} is shared and has no memory yet, and would get one per use; "
                "build a model with shared parameters on the CPU"
            )
        ranks = sorted(names)
        if len(ranks) == 1 or comm.rank not in names:
            continue
        group = groups.get(tuple(ranks))
        if group is None:
            group = comm.subgroup(ranks, label=f"{comm.label} tied {ranks}")
            assert group is not None
            groups[tuple(ranks)] = group
        group.broadcast(parameters[key].detach(), root=0)
        found.append(Tied(names[comm.rank], parameters[key], group))
    return found
