"""Tensor parallelism of a plain model, by the names of its modules.

    parallelize(model, comm, {
        "embedding": "vocabulary",            rows of the embedding divided over the ranks
        "blocks.*.attention.qkv": "column",   outputs divided, by heads
        "blocks.*.attention.out": "row",      inputs divided; the ranks' results summed
        "blocks.*.mlp.up": "column",
        "blocks.*.mlp.down": "row",
        "head": "vocabulary",                 scores stay divided; the criterion is the parallel cross-entropy
    })

Each value is a parallel style: a string, or an object of `styles` that has more options. `*` in a pattern matches any
characters. A norm of the queries' or keys' features has the style "heads": every rank has it whole, and its gradients
are summed.

Every rank builds the same whole model and keeps its part of each layer; the names of modules do not change. The model
must derive the number of heads from the width of its layers' outputs, or from an attribute such as `num_heads` of the
module that contains the layers, which is set to this rank's number of heads. It must also derive lengths from its
layers' outputs.

With `sequence=True`, activations outside the pairs of column and row layers are divided along the sequence: from the
embedding on, or from the output of a module with the style "scatter", up to the layer that needs the whole sequence.
The gradients of norms there are summed. The plan must declare for any other module with parameters whether it works on
its part ("split") or on the whole sequence ("whole").

Some layers of a plan can stay whole on every rank (`parallel.whole`). Activations outside the pairs of column and row
layers are the same on all ranks, and so are their gradients. A layer that stays whole there computes the same on each
rank and is replicated, as norms are. Layers that depend on each other must stay whole together: a pair of column and
row layers, because the activations between them are either divided or not, and layers with tied weights.
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
from mpitrain.tensor.styles import STYLES, ParallelStyle, PerHead, PlannedModule, Undivided
from mpitrain.tensor.vocabulary import VocabularyCrossEntropy, VocabularyParallelEmbedding

if TYPE_CHECKING:
    from mpitrain.comm import Communicator


def plan_for(
    model: nn.Module, given: Mapping[str, str | ParallelStyle] | None = None, *, sequence: bool = False
) -> dict[str, str | ParallelStyle]:
    """Return the plan that divides a model's layers: the given one, or that of the model's method `tensor_plan()`.

    Args:
        model: Model.
        given: Patterns of module names, each with a parallel style; None to use the model's own plan.
        sequence: If true, activations are divided along the sequence.

    Raises:
        InputError: There is no plan, or activations cannot be divided along the sequence although `sequence` is true.
    """
    listing: Any = getattr(model, "tensor_plan", None)
    name = type(model).__name__
    if given is None and not callable(listing):
        raise refusal(
            getattr(model, "undivided", "")
            or f"{name} does not define how to divide it; add a method tensor_plan() that returns "
            '{"*.up": "column", "*.down": "row", ...}, or set parallel.tensor to 1'
        )
    plan = dict(listing() if given is None else given)
    if sequence and getattr(model, "counts_positions", False):
        raise refusal(f"{name} counts positions along the sequence, which parallel.sequence divides; set that to false")
    styles = [STYLES.get(style) if isinstance(style, str) else style for style in plan.values()]
    if sequence and not any(style is not None and style.begins_sequence for style in styles):
        raise refusal(
            f"parallel.sequence divides activations from an embedding on, but the plan of {name} names no embedding; "
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

    Every rank must build the same model with the same weights, and then use the same samples and the same random seed.

    Args:
        model: Whole model; its modules are replaced by parallel ones.
        comm: Ranks of the tensor axis.
        plan: Patterns of module names, each with a parallel style.
        sequence: If true, divide activations between the divided layers along the sequence (Korthikanti et al. 2022).
        whole: Patterns of names of planned modules that every rank keeps whole.

    Returns:
        The model.

    Raises:
        InputError: On all ranks: a pattern matches nothing, a module cannot be divided as planned, layers that share a
            parameter are divided differently, or a layer stays whole without the layers that depend on it.
    """
    styles = without_whole(model, _match_plan(model, plan), whole, sequence) if whole else _match_plan(model, plan)
    axis = comm if isinstance(comm, Axis) else Axis(comm)
    scattered = any(style.begins_sequence and not style.by_vocabulary for style in styles.values())
    planned = [
        (PlannedModule(name, model.get_submodule(name), _parent(model, name), axis, sequence, scattered), style)
        for name, style in styles.items()
    ]
    divided_modules = {each.name: style.apply(each) for each, style in planned}
    _keep_ties(model, [each for each, _ in planned], divided_modules)
    columns = {each.parent: each.name.rpartition(".")[0] for each, style in planned if style.needs_row}
    for parent, name in columns.items():  # attention modules get this rank's number of heads
        inside = [each.rpartition(".")[2] for each in styles if each.rpartition(".")[0] == name]
        for key, count in localize_heads(name, parent, axis.size, inside).items():
            setattr(parent, key, count)
    _replace_criterion(model, [each for each, style in planned if style.by_vocabulary])
    instead = {each.module: divided_modules[each.name] for each, _ in planned}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module in instead and instead[module] is not module:
            setattr(_parent(model, name), name.rpartition(".")[2], instead[module])
    if sequence:
        _divide_other_modules(model, axis, {divided_modules[each.name]: style for each, style in planned})
    return model


def _match_plan(model: nn.Module, plan: Mapping[str, str | ParallelStyle]) -> dict[str, ParallelStyle]:
    """Return the styles of the modules that match the plan, by name, in the model's order, each module once."""
    names = _all_names(model)
    every = [name for each in names.values() for name in each]
    for pattern, style in plan.items():
        if isinstance(style, str) and style not in STYLES:
            raise refusal(f"the plan's {pattern!r} is {style!r}, which is unknown; use one of {', '.join(STYLES)}")
        if not any(fnmatchcase(name, pattern) for name in every):
            raise refusal(
                f"the plan's {pattern!r} matches no module of {type(model).__name__}{_suggest_name(pattern, every)}"
            )
    chosen: dict[str, ParallelStyle] = {}
    for first, module_names in names.items():
        matches: dict[str, ParallelStyle] = {}
        for pattern, style in plan.items():
            if any(fnmatchcase(name, pattern) for name in module_names):
                matches[pattern] = STYLES[style] if isinstance(style, str) else style
        if len(set(matches.values())) > 1:
            raise refusal(
                f"{first} is matched by {' and '.join(map(repr, matches))} of the plan, which have different styles; "
                "make one pattern narrower"
            )
        if matches:
            chosen[first] = next(iter(matches.values()))
    split_outputs = [name for name, style in chosen.items() if style.needs_row]
    if split_outputs and not any(style.takes_parts for style in chosen.values()):
        raise refusal(
            f"the plan divides the outputs of {split_outputs[0]}, but has no row layer that takes them; add one, or "
            "use Column(gather=True)"
        )
    return chosen


def _parent(model: nn.Module, name: str) -> nn.Module:
    """Return the module of which the named module is an attribute."""
    return model.get_submodule(name.rpartition(".")[0])


def _keep_ties(model: nn.Module, planned: Sequence[PlannedModule], divided_modules: Mapping[str, nn.Module]) -> None:
    """Make parameters that were tied before the division tied afterwards. Raises InputError if that is impossible."""
    parts: dict[nn.Parameter, tuple[str, nn.Parameter]] = {}
    for each in planned:
        module = divided_modules[each.name]
        for key, old in each.module.named_parameters(recurse=False):
            part = getattr(module, key)
            if part is old:
                continue
            first, shared = parts.setdefault(old, (each.name, part))
            if logical_of(shared) != logical_of(part):
                raise refusal(
                    f"{first} and {each.name} share {key}, but the plan divides it differently; give them one style"
                )
            setattr(module, key, shared)
    modules = {each.module for each in planned}
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            if module not in modules and parameter in parts:
                raise refusal(
                    f"{name} shares {key} with {parts[parameter][0]}, which the plan divides; give {name} that style"
                )


def _replace_criterion(model: nn.Module, vocabulary: Sequence[PlannedModule]) -> None:
    """Replace the model's `criterion` by the parallel cross-entropy if its scores stay divided."""
    for each in vocabulary:
        if not isinstance(each.module, nn.Linear):
            continue
        criterion = getattr(model, "criterion", None)
        if criterion is None:
            raise refusal(
                f"{each.name} leaves the scores divided, but {type(model).__name__} has no attribute `criterion` that "
                "the parallel cross-entropy could replace; add one, or plan Column(gather=True)"
            )
        options: dict[str, Any] = {}
        if isinstance(criterion, nn.CrossEntropyLoss):
            if criterion.weight is not None or criterion.reduction != "mean":
                raise refusal(
                    "a cross-entropy with class weights, or with another reduction than the mean, cannot be divided; "
                    f"plan {each.name} as Column(gather=True)"
                )
            options = {"ignore_index": criterion.ignore_index, "label_smoothing": criterion.label_smoothing}
        if getattr(criterion, "by_sample", False):
            options = {"by_sample": True}
        model.criterion = VocabularyCrossEntropy(each.axis, each.module.out_features, **options)


def _divide_other_modules(model: nn.Module, axis: Axis, styles: Mapping[nn.Module, ParallelStyle]) -> None:
    """With a divided sequence, make norms and dropouts that the plan does not name work on a part of the sequence."""
    parallel = (ColumnParallelLinear, RowParallelLinear, VocabularyParallelEmbedding)
    for name, module in model.named_modules():
        style = styles.get(module)
        if isinstance(module, nn.modules.dropout._DropoutNd) and not (style and style.replicated):
            module.register_forward_pre_hook(lambda m, args: axis.rng.enter(m, args[0].device) if m.training else None)
            # always called, because recomputation ends a forward pass with an exception
            module.register_forward_hook(lambda m, args, out: axis.rng.leave(m), always_call=True)
        if style is not None or isinstance(module, parallel):
            continue
        parameters = list(module.parameters(recurse=False))
        if parameters and not type(module).__name__.endswith("Norm"):
            raise refusal(
                f"{name or type(model).__name__} has parameters, but the plan does not define whether it works on a "
                'part of the sequence ("split") or on the whole ("whole"); add it to the plan'
            )
        for parameter in parameters:
            sum_gradient(parameter, axis)


def without_whole(
    model: nn.Module, styles: Mapping[str, ParallelStyle], whole: Sequence[str], sequence: bool
) -> dict[str, ParallelStyle]:
    """Return the styles of the modules that stay divided.

    Args:
        model: Model.
        styles: Styles of the planned modules by name, in the model's order.
        whole: Patterns of the names of modules that stay whole although the plan divides them.
        sequence: If true, activations are divided along the sequence.

    Raises:
        InputError: On all ranks: a pattern matches no divided module, layers that depend on each other are not all
            named, or `sequence` is true.
    """
    if sequence:
        raise refusal("parallel.whole cannot be combined with parallel.sequence; remove one of them")
    names = _all_names(model)
    divided = [name for name, style in styles.items() if not isinstance(style, Undivided | PerHead)]
    left_whole: set[str] = set()
    for pattern in whole:
        matches = [each for each in divided if any(fnmatchcase(name, pattern) for name in names[each])]
        if not matches:
            hint = _suggest_name(pattern, divided) or "; remove it"
            raise refusal(f"parallel.whole {pattern!r} matches no layer that the plan divides{hint}")
        left_whole.update(matches)
    users: dict[nn.Parameter, list[str]] = {}
    for name in divided:
        for parameter in model.get_submodule(name).parameters(recurse=False):
            users.setdefault(parameter, []).append(name)
    for groups, why in ((_pairs(divided, styles), "are a pair"), (users.values(), "share a weight")):
        for group in groups:
            if 0 < len(left_whole.intersection(group)) < len(group):
                named, left = (next(name for name in group if (name in left_whole) is there) for there in (True, False))
                raise refusal(f"parallel.whole names {named} but not {left}, which {why}; name both, or neither")
    around = {name.rpartition(".")[0] for name in left_whole}  # whole attention has all heads on every rank
    left_whole |= {each for each, of in styles.items() if isinstance(of, PerHead) and each.rpartition(".")[0] in around}
    return {name: style for name, style in styles.items() if name not in left_whole}


def _all_names(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of each module in a model, by the first of these names."""
    names_of: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name:
            names_of.setdefault(module, []).append(name)
    return {names[0]: names for names in names_of.values()}


def _suggest_name(pattern: str, names: Sequence[str]) -> str:
    """Return a hint with the name most similar to a pattern that matches none; empty if there are no names."""
    near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)
    return f"; did you mean {near[0]!r}?" if near else ""


def _pairs(divided: Sequence[str], styles: Mapping[str, ParallelStyle]) -> list[list[str]]:
    """Return groups of column layers and the row layers that use their outputs.

    Layers of one parent belong together; other layers, such as those of an nn.Sequential, are grouped in the model's
    order.
    """
    of = {name: styles[name] for name in divided}
    alone = [n for n, s in of.items() if s.needs_row or (s.takes_parts and not getattr(s, "scatter", False))]
    families: dict[str, list[str]] = {}
    for name in alone:
        families.setdefault(name.rpartition(".")[0], []).append(name)
    whole = [each for each in families.values() if len({styles[name].needs_row for name in each}) == 2]
    rest = [name for name in alone if not any(name in family for family in whole)]
    return [pair for family in [*whole, rest] for pair in _group_in_order(family, styles)]


def _group_in_order(names: Sequence[str], styles: Mapping[str, ParallelStyle]) -> list[list[str]]:
    """Return groups of consecutive column and then row layers; last columns without a row join the group before."""
    groups: list[list[str]] = []
    for name in names:
        if not groups or (styles[name].needs_row and not styles[groups[-1][-1]].needs_row):
            groups.append([])
        groups[-1].append(name)
    if len(groups) > 1 and styles[groups[-1][-1]].needs_row:
        groups[-2:] = [groups[-2] + groups[-1]]
    return groups
