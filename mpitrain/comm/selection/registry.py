"""The algorithms of an operation by name: a table (`tables`), to which others may add from outside.

The operation's file has the table of the operation as ALGORITHMS.

    from mpitrain.comm.collectives import all_reduce
    from mpitrain.comm.selection.registry import Algorithm

    all_reduce.ALGORITHMS.register("star", Algorithm(lambda setting: star_all_reduce(setting.size, setting.nodes)))
    world.all_reduce(x, algorithm="star")

Every rank registers the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from mpitrain.comm.programs.program import Program
from mpitrain.comm.selection.setting import Setting
from mpitrain.errors import InputError


def never(*_: object) -> bool:
    """False, whatever it is asked of."""
    return False


def always(*_: object) -> bool:
    """True, whatever it is asked of."""
    return True


@dataclass(frozen=True)
class Algorithm:
    """How one algorithm makes its program, and what it needs.

    Attributes:
        program: Makes the program for a setting; None stands for the MPI library's own call.
        one_node: Whether it needs all ranks on one node.
        reach: Whether ranks touch each other's vectors, which must then lie in an arena or where the system lets
            neighbours reach them.
        stages: Whether, where they cannot, shared staging memory stands in for the vectors; only `reach` asks for it.
        reproduces: For which settings it reduces in the order of the fixed tree over the ranks (`tree_order`).
        instead: The algorithms to name where it cannot be used.
    """

    program: Callable[[Setting], Program] | None
    one_node: bool = False
    reach: bool = False
    stages: bool = False
    reproduces: Callable[[Setting], bool] = never
    instead: str = "auto"


LIBRARY = Algorithm(program=None)


class Algorithms:
    """The algorithms of one operation."""

    def __init__(self, operation: str, algorithms: Mapping[str, Algorithm]) -> None:
        self.operation = operation
        self._by_name = dict(algorithms)

    def register(self, name: str, algorithm: Algorithm) -> None:
        """Add an algorithm, which `algorithm=name` chooses from then on.

        Raises:
            InputError: The operation has an algorithm of that name.
        """
        if name == "auto" or name in self._by_name:
            raise InputError(f"{self.operation} has an algorithm {name!r} already; register yours under another name")
        self._by_name[name] = algorithm

    def unregister(self, name: str) -> None:
        """Take back what was registered; tensors it was used on may stay bound to it."""
        del self._by_name[name]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all of them."""
        return tuple(self._by_name)

    def placed(self, name: str, x: Tensor) -> Tensor | None:
        """x, where ranks may touch each other's vectors, so that it matters where these lie in an arena; else None."""
        return x if name == "auto" or (name in self._by_name and self._by_name[name].reach) else None

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> Algorithm:
        """The algorithm of that name. Raises InputError, on all ranks, where there is none."""
        found = self._by_name.get(name)
        if found is None:
            *most, last = ("auto", *self._by_name)
            known = f"{', '.join(most)} or {last}"
            raise InputError(f"{self.operation} has no algorithm {name!r}; use {known}", agreed=True)
        return found
