"""Tensor parallelism of a plain model, by the names of its modules.

    parallelize(model, comm, {
        "embedding": "vocabulary",            rows of the embedding divided over the ranks
        "blocks.*.attention.qkv": "column",   outputs divided, by heads
        "blocks.*.attention.out": "row",      inputs divided; the ranks' results summed
        "blocks.*.mlp.up": "column",
        "blocks.*.mlp.down": "row",
        "head": "vocabulary",                 scores stay divided; the criterion is the parallel cross-entropy
    })

`*` in a pattern stands for anything. Every rank has built the same whole model and keeps its part of each layer; the
names stay. Each value is one of the strings, or the object it stands for where there is more to say. A model must
take the number of heads from the width of what its layers return, or from an attribute (`num_heads` and the like) of
the module that holds them, which becomes this rank's number; and lengths, too, from what they return.

With `sequence=True` what lies outside the pairs of column and row layers is divided along the sequence: from the
embedding on, or from the output of a module the plan calls "scatter", up to the layer that needs it whole again.
Norms there have their gradients summed; any other module with parameters must be said to work on its part ("split")
or on the whole ("whole").
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from mpitrain.comm import Communicator
from mpitrain.errors import InputError
from mpitrain.layout import logical_of
from mpitrain.tensor.axis import Axis
from mpitrain.tensor.heads import localize_heads
from mpitrain.tensor.linear import ColumnParallelLinear, RowParallelLinear, sum_gradient
from mpitrain.tensor.styles import WAYS, Column, Place, Row, Scatter, Vocabulary, Way, Whole
from mpitrain.tensor.vocabulary import VocabularyCrossEntropy, VocabularyParallelEmbedding


def plan_for(model: nn.Module) -> dict[str, str | Way]:
    """What the model itself says (`tensor_plan()`). Raises InputError for one that does not."""
    if callable(listing := getattr(model, "tensor_plan", None)):
        return dict(listing())
    raise InputError(
        f"{type(model).__name__} does not say how it is to be divided; give it a method tensor_plan() that returns "
        '{"*.up": "column", "*.down": "row", ...}, or set parallel.tensor to 1',
        agreed=True,
    )


def parallelize(
    model: nn.Module, comm: Communicator | Axis, plan: Mapping[str, str | Way], sequence: bool = False
) -> nn.Module:
    """Divide the planned layers of a model over the ranks of the tensor axis, in place. Collective; returns it.

    comm: the axis; every rank must have built the same model with the same weights, and is to be fed the same
    samples with the same random seed. Raises InputError (agreed) for a pattern that matches nothing, a module that
    cannot be divided as planned, and parameters shared by layers that are divided differently.
    """
    ways = _matched(model, plan)
    axis = comm if isinstance(comm, Axis) else Axis(comm)
    scattered = any(isinstance(way, Scatter) for way in ways.values())
    places = [
        (Place(name, model.get_submodule(name), _parent(model, name), axis, sequence, scattered), way)
        for name, way in ways.items()
    ]
    made = {place.name: way.apply(place) for place, way in places}
    _keep_ties(model, [place for place, _ in places], made)
    _localize(model, [place for place, way in places if isinstance(way, Column) and not way.gather], ways, axis.size)
    _replace_criterion(model, [place for place, way in places if isinstance(way, Vocabulary)])
    instead = {place.module: made[place.name] for place, _ in places}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module in instead and instead[module] is not module:
            setattr(_parent(model, name), name.rpartition(".")[2], instead[module])
    if sequence:
        _divide_the_rest(model, axis, {made[place.name]: way for place, way in places})
    return model


def _matched(model: nn.Module, plan: Mapping[str, str | Way]) -> dict[str, Way]:
    """The module names the plan means, in the model's order, each module once."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name:
            names.setdefault(module, []).append(name)
    every = [name for each in names.values() for name in each]
    for pattern, way in plan.items():
        if isinstance(way, str) and way not in WAYS:
            raise InputError(
                f"the plan's {pattern!r} is {way!r}, which is unknown; use one of {', '.join(WAYS)}", agreed=True
            )
        if not any(fnmatchcase(name, pattern) for name in every):
            near = difflib.get_close_matches(pattern, every, n=1, cutoff=0.0)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            raise InputError(f"the plan's {pattern!r} matches no module of {type(model).__name__}{meant}", agreed=True)
    chosen: dict[str, Way] = {}
    for module_names in names.values():
        found: dict[str, Way] = {}
        for pattern, way in plan.items():
            if any(fnmatchcase(name, pattern) for name in module_names):
                found[pattern] = WAYS[way] if isinstance(way, str) else way
        if len(set(found.values())) > 1:
            raise InputError(
                f"{module_names[0]} is matched by {' and '.join(map(repr, found))} of the plan, which differ; make "
                "one narrower",
                agreed=True,
            )
        if found:
            chosen[module_names[0]] = next(iter(found.values()))
    split_outputs = [name for name, way in chosen.items() if isinstance(way, Column) and not way.gather]
    if split_outputs and not any(isinstance(way, Row) for way in chosen.values()):
        raise InputError(
            f"the plan divides the outputs of {split_outputs[0]}, but has no row layer that takes them; name one, or "
            "use Column(gather=True)",
            agreed=True,
        )
    return chosen


def _parent(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _keep_ties(model: nn.Module, places: Sequence[Place], made: Mapping[str, nn.Module]) -> None:
    """Parameters that were one before are one afterwards."""
    parts: dict[nn.Parameter, tuple[str, nn.Parameter]] = {}
    for place in places:
        module = made[place.name]
        for key, old in place.module.named_parameters(recurse=False):
            part = getattr(module, key)
            if part is old:
                continue
            first, shared = parts.setdefault(old, (place.name, part))
            if logical_of(shared) != logical_of(part):
                raise InputError(
                    f"{first} and {place.name} share {key}, but the plan divides it differently; plan them alike",
                    agreed=True,
                )
            setattr(module, key, shared)
    planned = {place.module for place in places}
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            if module not in planned and parameter in parts:
                raise InputError(
                    f"{name} shares {key} with {parts[parameter][0]}, which the plan divides; plan {name} alike",
                    agreed=True,
                )


def _localize(model: nn.Module, columns: Sequence[Place], ways: Mapping[str, Way], ranks: int) -> None:
    """Attention modules that count their heads get the number of this rank's."""
    for parent, name in {place.parent: place.name.rpartition(".")[0] for place in columns}.items():
        inside = [each.rpartition(".")[2] for each in ways if each.rpartition(".")[0] == name]
        for key, count in localize_heads(name, parent, ranks, inside).items():
            setattr(parent, key, count)


def _replace_criterion(model: nn.Module, vocabulary: Sequence[Place]) -> None:
    """Scores that stay divided go to the parallel cross-entropy, in the place of the model's `criterion`."""
    for place in vocabulary:
        if not isinstance(place.module, nn.Linear):
            continue
        criterion = getattr(model, "criterion", None)
        if criterion is None:
            raise InputError(
                f"{place.name} leaves the scores divided, but {type(model).__name__} has no attribute `criterion` in "
                "whose place the parallel cross-entropy could be put; give it one, or plan Column(gather=True)",
                agreed=True,
            )
        options: dict[str, Any] = {}
        if isinstance(criterion, nn.CrossEntropyLoss):
            if criterion.weight is not None or criterion.reduction != "mean":
                raise InputError(
                    "a cross-entropy with weights or without the mean cannot be divided; plan "
                    f"{place.name} as Column(gather=True)",
                    agreed=True,
                )
            options = {"ignore_index": criterion.ignore_index, "label_smoothing": criterion.label_smoothing}
        model.criterion = VocabularyCrossEntropy(place.axis, place.module.out_features, **options)


def _divide_the_rest(model: nn.Module, axis: Axis, ways: Mapping[nn.Module, Way]) -> None:
    """What the plan does not name, in sequence parallel: norms and dropout work on their part of the sequence."""
    parallel = (ColumnParallelLinear, RowParallelLinear, VocabularyParallelEmbedding)
    for name, module in model.named_modules():
        way = ways.get(module)
        if isinstance(module, nn.modules.dropout._DropoutNd) and not isinstance(way, (Whole, Scatter)):
            module.register_forward_pre_hook(_entering(axis))
            module.register_forward_hook(_leaving(axis), always_call=True)  # recomputation stops by raising
        if way is not None or isinstance(module, parallel):
            continue
        own = list(module.parameters(recurse=False))
        if own and not type(module).__name__.endswith("Norm"):
            raise InputError(
                f"{name or type(model).__name__} has parameters, and the plan does not say whether it works on a part "
                'of the sequence ("split") or on the whole ("whole"); name it',
                agreed=True,
            )
        for parameter in own:
            sum_gradient(parameter, axis)


def _entering(axis: Axis) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
    def enter(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if module.training:
            axis.streams.enter(module, args[0].device)

    return enter


def _leaving(axis: Axis) -> Callable[[nn.Module, Any, Any], None]:
    def leave(module: nn.Module, args: Any, out: Any) -> None:
        axis.streams.leave(module)

    return leave
