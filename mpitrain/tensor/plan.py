"""Tensor parallelism of a plain model, by the names of its modules.

    parallelize(model, comm, {
        "embedding": "vocabulary",            rows of the embedding divided over the ranks
        "blocks.*.attention.qkv": "column",   outputs divided, by heads
        "blocks.*.attention.out": "row",      inputs divided; the ranks' results summed
        "blocks.*.mlp.up": "column",
        "blocks.*.mlp.down": "row",
        "head": "vocabulary",                 scores stay divided; the criterion is the parallel cross-entropy
    })

A norm of the queries' or keys' features is "heads": every rank has it whole, and its gradients are summed. `*` in a
pattern stands for anything. Every rank has built the same whole model and keeps its part of each layer; the
names stay. Each value is a parallel style: one of the strings, or the object of `styles` where there is
more to say. A model must
take the number of heads from the width of what its layers return, or from an attribute (`num_heads` and the like) of
the module that holds them, which becomes this rank's number; and lengths, too, from what they return.

With `sequence=True` what lies outside the pairs of column and row layers is divided along the sequence: from the
embedding on, or from the output of a module the plan calls "scatter", up to the layer that needs it whole again.
Norms there have their gradients summed; any other module with parameters must be said to work on its part ("split")
or on the whole ("whole").

Of what a plan divides, every rank keeps some layers whole all the same (`parallel.whole`). What lies outside of the
pairs of column and row layers is the same on all ranks, and so is its gradient: a layer that is left whole there
computes the same on each of them, as norms do, and is replicated like these. Layers that go with one another are kept
whole together: those of a pair, since what is between them is divided or not, and tied ones.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import nn

from mpitrain.errors import refusal
from mpitrain.layout.boxes import logical_of
from mpitrain.tensor.axis import Axis
from mpitrain.tensor.linear import ColumnParallelLinear, RowParallelLinear, localize_heads, sum_gradient
from mpitrain.tensor.styles import STYLES, OfHeads, ParallelStyle, PlannedModule, Undivided
from mpitrain.tensor.vocabulary import VocabularyCrossEntropy, VocabularyParallelEmbedding

if TYPE_CHECKING:
    from mpitrain.comm import Communicator


def plan_for(
    model: nn.Module, given: Mapping[str, str | ParallelStyle] | None = None, *, sequence: bool = False
) -> dict[str, str | ParallelStyle]:
    """How the model's layers are divided: as is given, or as the model says (`tensor_plan()`).

    Raises InputError where nobody says it, and where activations are to be divided along the sequence and cannot be.
    """
    listing: Any = getattr(model, "tensor_plan", None)
    name = type(model).__name__
    if given is None and not callable(listing):
        raise refusal(
            getattr(model, "undivided", "")
            or f"{name} does not say how it is to be divided; give it a method tensor_plan() that returns "
            '{"*.up": "column", "*.down": "row", ...}, or set parallel.tensor to 1'
        )
    plan = dict(listing() if given is None else given)
    if sequence and getattr(model, "counts_positions", False):
        raise refusal(f"{name} counts positions in what parallel.sequence divides; set that to false")
    styles = [STYLES.get(style) if isinstance(style, str) else style for style in plan.values()]
    if sequence and not any(style is not None and style.begins_sequence for style in styles):
        raise refusal(
            f"parallel.sequence divides what is between an embedding and the head, and the plan of {name} names none; "
            "set parallel.sequence to false"
        )
    return plan


def parallelize(
    model: nn.Module,
    comm: Communicator | Axis,
    plan: Mapping[str, str | ParallelStyle],
    sequence: bool = False,
    whole: Sequence[str] = (),
) -> nn.Module:
    """Divide the planned layers of a model over the ranks of the tensor axis, in place. Collective.

    Every rank must have built the same model with the same weights, and is to be fed the same samples with the same
    random seed.

    Args:
        model: The whole model; its modules are replaced by parallel ones.
        comm: The ranks of the tensor axis.
        plan: Patterns of module names, each with a parallel style.
        sequence: Divide what lies between the divided layers along the sequence (Korthikanti et al. 2022).
        whole: Patterns of names of modules that the plan would divide, and that every rank keeps whole instead.

    Returns:
        The model.

    Raises:
        InputError: On all ranks alike, for a pattern that matches nothing, a module that cannot be divided as
            planned, parameters shared by layers that are divided differently, and layers kept whole without those that
            they go with.
    """
    styles = without_whole(model, _matched(model, plan), whole, sequence) if whole else _matched(model, plan)
    axis = comm if isinstance(comm, Axis) else Axis(comm)
    scattered = any(style.begins_sequence and not style.by_vocabulary for style in styles.values())
    planned = [
        (PlannedModule(name, model.get_submodule(name), _parent(model, name), axis, sequence, scattered), style)
        for name, style in styles.items()
    ]
    made = {each.name: style.apply(each) for each, style in planned}
    _keep_ties(model, [each for each, _ in planned], made)
    columns = {each.parent: each.name.rpartition(".")[0] for each, style in planned if style.needs_row}
    for parent, name in columns.items():  # attention modules count this rank's heads
        inside = [each.rpartition(".")[2] for each in styles if each.rpartition(".")[0] == name]
        for key, count in localize_heads(name, parent, axis.size, inside).items():
            setattr(parent, key, count)
    _replace_criterion(model, [each for each, style in planned if style.by_vocabulary])
    instead = {each.module: made[each.name] for each, _ in planned}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module in instead and instead[module] is not module:
            setattr(_parent(model, name), name.rpartition(".")[2], instead[module])
    if sequence:
        _divide_the_rest(model, axis, {made[each.name]: style for each, style in planned})
    return model


def _matched(model: nn.Module, plan: Mapping[str, str | ParallelStyle]) -> dict[str, ParallelStyle]:
    """The module names the plan means, in the model's order, each module once."""
    names = _all_names(model)
    every = [name for each in names.values() for name in each]
    for pattern, style in plan.items():
        if isinstance(style, str) and style not in STYLES:
            raise refusal(f"the plan's {pattern!r} is {style!r}, which is unknown; use one of {', '.join(STYLES)}")
        if not any(fnmatchcase(name, pattern) for name in every):
            raise refusal(f"the plan's {pattern!r} matches no module of {type(model).__name__}{_meant(pattern, every)}")
    chosen: dict[str, ParallelStyle] = {}
    for first, module_names in names.items():
        found: dict[str, ParallelStyle] = {}
        for pattern, style in plan.items():
            if any(fnmatchcase(name, pattern) for name in module_names):
                found[pattern] = STYLES[style] if isinstance(style, str) else style
        if len(set(found.values())) > 1:
            raise refusal(
                f"{first} is matched by {' and '.join(map(repr, found))} of the plan, which differ; make one narrower"
            )
        if found:
            chosen[first] = next(iter(found.values()))
    split_outputs = [name for name, style in chosen.items() if style.needs_row]
    if split_outputs and not any(style.takes_parts for style in chosen.values()):
        raise refusal(
            f"the plan divides the outputs of {split_outputs[0]}, but has no row layer that takes them; name one, or "
            "use Column(gather=True)"
        )
    return chosen


def _parent(model: nn.Module, name: str) -> nn.Module:
    """The module that the named one is an attribute of."""
    return model.get_submodule(name.rpartition(".")[0])


def _keep_ties(model: nn.Module, planned: Sequence[PlannedModule], made: Mapping[str, nn.Module]) -> None:
    """Parameters that were one before are one afterwards."""
    parts: dict[nn.Parameter, tuple[str, nn.Parameter]] = {}
    for each in planned:
        module = made[each.name]
        for key, old in each.module.named_parameters(recurse=False):
            part = getattr(module, key)
            if part is old:
                continue
            first, shared = parts.setdefault(old, (each.name, part))
            if logical_of(shared) != logical_of(part):
                raise refusal(
                    f"{first} and {each.name} share {key}, but the plan divides it differently; plan them alike"
                )
            setattr(module, key, shared)
    modules = {each.module for each in planned}
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            if module not in modules and parameter in parts:
                raise refusal(
                    f"{name} shares {key} with {parts[parameter][0]}, which the plan divides; plan {name} alike"
                )


def _replace_criterion(model: nn.Module, vocabulary: Sequence[PlannedModule]) -> None:
    """Where scores stay divided, put the parallel cross-entropy in the place of the model's `criterion`."""
    for each in vocabulary:
        if not isinstance(each.module, nn.Linear):
            continue
        criterion = getattr(model, "criterion", None)
        if criterion is None:
            raise refusal(
                f"{each.name} leaves the scores divided, but {type(model).__name__} has no attribute `criterion` in "
                "whose place the parallel cross-entropy could be put; give it one, or plan Column(gather=True)"
            )
        options: dict[str, Any] = {}
        if isinstance(criterion, nn.CrossEntropyLoss):
            if criterion.weight is not None or criterion.reduction != "mean":
                raise refusal(
                    "a cross-entropy with weights or without the mean cannot be divided; plan "
                    f"{each.name} as Column(gather=True)"
                )
            options = {"ignore_index": criterion.ignore_index, "label_smoothing": criterion.label_smoothing}
        if getattr(criterion, "by_sample", False):
            options = {"by_sample": True}
        model.criterion = VocabularyCrossEntropy(each.axis, each.module.out_features, **options)


def _divide_the_rest(model: nn.Module, axis: Axis, styles: Mapping[nn.Module, ParallelStyle]) -> None:
    """In sequence parallel, let the norms and dropouts that the plan does not name work on a part of the sequence."""
    parallel = (ColumnParallelLinear, RowParallelLinear, VocabularyParallelEmbedding)
    for name, module in model.named_modules():
        style = styles.get(module)
        if isinstance(module, nn.modules.dropout._DropoutNd) and not (style and style.replicated):
            module.register_forward_pre_hook(lambda m, args: axis.rng.enter(m, args[0].device) if m.training else None)
            # called in any case, because recomputation stops by raising
            module.register_forward_hook(lambda m, args, out: axis.rng.leave(m), always_call=True)
        if style is not None or isinstance(module, parallel):
            continue
        own = list(module.parameters(recurse=False))
        if own and not type(module).__name__.endswith("Norm"):
            raise refusal(
                f"{name or type(model).__name__} has parameters, and the plan does not say whether it works on a part "
                'of the sequence ("split") or on the whole ("whole"); name it'
            )
        for parameter in own:
            sum_gradient(parameter, axis)


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
            meant = _meant(pattern, divided) or "; leave it out"
            raise refusal(f"parallel.whole {pattern!r} matches no layer that the plan divides{meant}")
        kept.update(found)
    users: dict[nn.Parameter, list[str]] = {}
    for name in divided:
        for parameter in model.get_submodule(name).parameters(recurse=False):
            users.setdefault(parameter, []).append(name)
    for groups, why in ((_pairs(divided, styles), "are a pair"), (users.values(), "share a weight")):
        for group in groups:
            if 0 < len(kept.intersection(group)) < len(group):
                named, left = (next(name for name in group if (name in kept) is there) for there in (True, False))
                raise refusal(f"parallel.whole names {named} and not {left}, which {why}; name both, or neither")
    around = {name.rpartition(".")[0] for name in kept}  # attention that is whole has all heads on every rank
    kept |= {each for each, of in styles.items() if isinstance(of, OfHeads) and each.rpartition(".")[0] in around}
    return {name: style for name, style in styles.items() if name not in kept}


def _all_names(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of each module inside of a model, by the first of them."""
    found: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name:
            found.setdefault(module, []).append(name)
    return {names[0]: names for names in found.values()}


def _meant(pattern: str, names: Sequence[str]) -> str:
    """Return a hint at the name that is most like a pattern which matches none; empty where there are no names."""
    near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)
    return f"; did you mean {near[0]!r}?" if near else ""


def _pairs(divided: Sequence[str], styles: Mapping[str, ParallelStyle]) -> list[list[str]]:
    """Column layers with the row layers that take what becomes of their outputs.

    Those of one parent belong together, and others, such as the layers of an nn.Sequential, in the model's order.
    """
    of = {name: styles[name] for name in divided}
    alone = [n for n, s in of.items() if s.needs_row or (s.takes_parts and not getattr(s, "scatter", False))]
    families: dict[str, list[str]] = {}
    for name in alone:
        families.setdefault(name.rpartition(".")[0], []).append(name)
    whole = [each for each in families.values() if len({styles[name].needs_row for name in each}) == 2]
    rest = [name for name in alone if not any(name in family for family in whole)]
    return [pair for family in [*whole, rest] for pair in _in_order(family, styles)]


def _in_order(names: Sequence[str], styles: Mapping[str, ParallelStyle]) -> list[list[str]]:
    """Layers in stretches of columns and then rows; columns that no row follows belong to the stretch before."""
    found: list[list[str]] = []
    for name in names:
        if not found or (styles[name].needs_row and not styles[found[-1][-1]].needs_row):
            found.append([])
        found[-1].append(name)
    if len(found) > 1 and styles[found[-1][-1]].needs_row:
        found[-2:] = [found[-2] + found[-1]]
    return found
