"""What a configuration wants of each parameter, by the names and modules of the whole model.

To be found before the model is cut: a stage of a pipeline has other modules and not all names, and a copy of a tied
parameter on another stage must have the role of the first.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from mpitrain.config.training import OptimSection, patterns_of
from mpitrain.errors import refusal


@dataclass(frozen=True)
class ParameterRoles:
    """Roles of parameters, by every name that they have.

    Attributes:
        groups: The number of the entry of optim.groups that each of them matches; missing for none.
        embeddings: Those of nn.Embedding.
        hidden: Matrices that are neither of an embedding nor of the last layer (what Jordan et al. 2024 give to Muon).
    """

    groups: Mapping[str, int] = field(default_factory=dict)
    embeddings: frozenset[str] = frozenset()
    hidden: frozenset[str] = frozenset()

    @staticmethod
    def of(section: OptimSection, module: nn.Module) -> ParameterRoles:
        """The roles in a whole model.

        Raises:
            InputError: A pattern matches no parameter that is trained.
        """
        every = list(module.named_parameters(remove_duplicate=False))
        first = {p: name for name, p in module.named_parameters()}
        trained = [name for p, name in first.items() if p.requires_grad]
        matched = {name: number for name in trained if (number := _first_match(section, name)) is not None}
        _refuse_unmatched(section, trained)
        tables = {p for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
        matrices = [p for _, p in every if p.dim() == 2]
        hidden = set(matrices[:-1]) - tables - {matrices[-1]} if matrices else set()
        return ParameterRoles(
            {name: matched[first[p]] for name, p in every if first[p] in matched},
            frozenset(name for name, p in every if p in tables),
            frozenset(name for name, p in every if p in hidden),
        )


def _first_match(section: OptimSection, name: str) -> int | None:
    for number, group in enumerate(section.groups):
        if any(fnmatchcase(name, pattern) for pattern in patterns_of(group)):
            return number
    return None


def _refuse_unmatched(section: OptimSection, names: list[str]) -> None:
    """Raise InputError for a pattern that matches none of the names."""
    for group in section.groups:
        for pattern in patterns_of(group):
            if not any(fnmatchcase(name, pattern) for name in names):
                near = difflib.get_close_matches(pattern.replace("*", ""), names, n=3, cutoff=0.0)
                raise refusal(
                    f"optim.groups: match = {pattern!r} is the name of no parameter that is trained; there are "
                    f"{', '.join(near)} and others; * stands for any letters"
                )
