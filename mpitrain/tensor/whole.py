"""Which layers of a plan every rank of the tensor axis keeps whole, all the same (`parallel.whole`).

What lies outside of the pairs of column and row layers is the same on all ranks, and so is its gradient: a layer that
is left whole there computes the same on each of them, as norms do, and is replicated like these. Layers that go with
one another are kept whole together: those of a pair, since what is between them is divided or not, and tied ones.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from mpitrain.errors import refusal
from mpitrain.tensor.styles import OfHeads, ParallelStyle, Undivided


def without_whole(
    model: nn.Module, styles: Mapping[str, ParallelStyle], whole: Sequence[str], sequence: bool
) -> dict[str, ParallelStyle]:
    """The styles of those modules that stay divided.

    Args:
        model: The model.
        styles: Of the planned modules, by name, in the model's order.
        whole: Patterns of the names of divided modules that are to stay whole.
        sequence: Whether activations are divided along the sequence.

    Raises:
        InputError: On all ranks alike, where a pattern matches no divided module, where layers that go with one another
            are not all named, and with `sequence`.
    """
    if sequence:
        raise refusal("parallel.whole does not go with parallel.sequence; leave one of them out")
    names = _all_names(model)
    divided = [name for name, style in styles.items() if not isinstance(style, Undivided | OfHeads)]
    kept: set[str] = set()
    for pattern in whole:
        found = [each for each in divided if any(fnmatchcase(name, pattern) for name in names[each])]
        if not found:
            near = difflib.get_close_matches(pattern, divided, n=1, cutoff=0.0)
            meant = f"; did you mean {near[0]!r}?" if near else "; leave it out"
            raise refusal(f"parallel.whole {pattern!r} matches no layer that the plan divides{meant}")
        kept.update(found)
    for groups, why in ((_pairs(divided, styles), "are a pair"), (_tied(model, divided), "share a weight")):
        for group in groups:
            if 0 < len(kept.intersection(group)) < len(group):
                named, left = (next(name for name in group if (name in kept) is there) for there in (True, False))
                raise refusal(f"parallel.whole names {named} and not {left}, which {why}; name both, or neither")
    around = {name.rpartition(".")[0] for name in kept}  # attention that is whole has all heads on every rank
    kept |= {each for each, of in styles.items() if isinstance(of, OfHeads) and each.rpartition(".")[0] in around}
    return {name: style for name, style in styles.items() if name not in kept}


def _all_names(model: nn.Module) -> dict[str, list[str]]:
    """By the first name of each module all that it has."""
    found: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found.setdefault(module, []).append(name)
    return {names[0]: names for names in found.values()}


def _pairs(divided: Sequence[str], styles: Mapping[str, ParallelStyle]) -> list[list[str]]:
    """Column layers with the row layers that take what becomes of their outputs.

    Those of one parent belong together, and others, such as the layers of an nn.Sequential, in the model's order.
    """
    alone = [name for name in divided if styles[name].needs_row or _takes_parts(styles[name])]
    families: dict[str, list[str]] = {}
    for name in alone:
        families.setdefault(name.rpartition(".")[0], []).append(name)
    whole = [each for each in families.values() if len({styles[name].needs_row for name in each}) == 2]
    taken = {name for family in whole for name in family}
    rest = [name for name in alone if name not in taken]
    return [pair for family in [*whole, rest] for pair in _in_order(family, styles)]


def _in_order(names: Sequence[str], styles: Mapping[str, ParallelStyle]) -> list[list[str]]:
    """Layers in stretches of columns and then rows; columns that no row follows belong to the stretch before."""
    found: list[list[str]] = []
    for name in names:
        if not found or (styles[name].needs_row and not styles[found[-1][-1]].needs_row):
            found.append([])
        found[-1].append(name)
    if len(found) > 1 and styles[found[-1][-1]].needs_row:
        last = found.pop()
        found[-1] += last
    return found


def _takes_parts(style: ParallelStyle) -> bool:
    return style.takes_parts and not getattr(style, "scatter", False)


def _tied(model: nn.Module, divided: Sequence[str]) -> list[list[str]]:
    """Divided layers that have a parameter in common."""
    users: dict[nn.Parameter, list[str]] = {}
    for name in divided:
        for parameter in model.get_submodule(name).parameters(recurse=False):
            users.setdefault(parameter, []).append(name)
    return [names for names in users.values() if len(names) > 1]
