"""Which algorithm of an operation is fastest at which size: built-in defaults, or a table measured on this machine.

`python -m mpitrain.doctor --tune` measures and writes the table, one file per kind of machine and
MPI library, under $XDG_CACHE_HOME/mpitrain (or ~/.cache/mpitrain). Rank 0 reads it; all ranks use the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mpitrain.comm.selection.registry import Algorithms, Setting
from mpitrain.storage.disk import read_plain, write_whole
from mpitrain.storage.text import bytes_text

KIB, MIB = 1 << 10, 1 << 20
Rule = tuple[int, str]  # up to this many bytes (exclusive), this algorithm
_NO_LIMIT = 1 << 62
_CLEARLY = 0.95  # of the time of the algorithm used for smaller vectors

_ALWAYS_MPI: tuple[Rule, ...] = ((_NO_LIMIT, "mpi"),)


def _shared_from(
    arena: int, arena_oversubscribed: int, ordinary: int, ordinary_oversubscribed: int
) -> dict[str, tuple[Rule, ...]]:
    """Rules of an operation that goes through the memory of one node from so many bytes on, and by MPI otherwise.

    The limits are those from which it was at least as fast at 2 ranks on 2 cores, and at 4 ranks where oversubscribed.
    """
    limits = {"node arena": arena, "node arena oversubscribed": arena_oversubscribed}
    limits |= {"node": ordinary, "node oversubscribed": ordinary_oversubscribed}
    return {place: ((limit, "mpi"), (_NO_LIMIT, "shared")) for place, limit in limits.items()}


# operation -> where the ranks and the data are -> rules in order of size; elsewhere: MPI
_DEFAULTS: dict[str, dict[str, tuple[Rule, ...]]] = {
    "all_reduce": {
        **_shared_from(12 * KIB, 32 * KIB, 96 * KIB, 512 * KIB),
        **dict.fromkeys(
            ["nodes", "nodes arena", "nodes oversubscribed", "nodes arena oversubscribed"],
            ((64 * KIB, "mpi"), (_NO_LIMIT, "two_level")),
        ),
        **dict.fromkeys(["nodes single", "nodes single oversubscribed"], ((16 * MIB, "mpi"), (_NO_LIMIT, "ring"))),
    },
    "reduce": _shared_from(96 * KIB, 192 * KIB, MIB, MIB),
    "reduce_scatter": _shared_from(32 * KIB, 96 * KIB, 128 * KIB, MIB),
    "broadcast": _shared_from(96 * KIB, 192 * KIB, 2 * MIB, 2 * MIB),
    "all_gather": _shared_from(16 * KIB, 64 * KIB, 4 * MIB, 8 * MIB),
}


@dataclass(frozen=True)
class Tuning:
    """Rules by operation and place.

    Attributes:
        measured: Rules that override the defaults, by "operation place/ranks".
        origin: Where these come from.
    """

    measured: Mapping[str, Sequence[Rule]] = field(default_factory=dict)
    origin: str = "built-in"

    def algorithm(self, algorithms: Algorithms, setting: Setting) -> str:
        """The operation's fastest algorithm for a vector of the setting's size, ranks and place."""
        rules = self.rules(algorithms.operation, setting.place, setting.size)
        if any(name not in algorithms for _, name in rules):  # one that this job has not registered
            rules = Tuning().rules(algorithms.operation, setting.place, setting.size)
        if not rules:  # of an operation that is not in the table
            return "mpi" if "mpi" in algorithms else algorithms.names[0]
        return next(name for limit, name in rules if setting.nbytes < limit)

    def rules(self, operation: str, place: str, ranks: int) -> Sequence[Rule]:
        """In order of size; none for an operation that is not in the table."""
        by_place = _DEFAULTS.get(operation)
        otherwise = () if by_place is None else by_place.get(place, _ALWAYS_MPI)
        return self.measured.get(key(operation, place, ranks)) or otherwise

    def is_measured(self, operation: str, place: str, ranks: int) -> bool:
        """Whether there are rules of this machine's own."""
        return key(operation, place, ranks) in self.measured

    def to_json(self) -> str:
        """The table as text, from which `from_json` makes it again."""
        return json.dumps({"origin": self.origin, "measured": {k: list(v) for k, v in self.measured.items()}})

    @staticmethod
    def from_json(text: str) -> Tuning:
        """Raises ValueError for a text that is not a table."""
        try:
            values = json.loads(text)
            measured = {
                _present(key): tuple((int(limit), str(name)) for limit, name in rules)
                for key, rules in values["measured"].items()
            }
            if any(not rules or rules[-1][0] < _NO_LIMIT for rules in measured.values()):
                raise ValueError("rules without an end")
            return Tuning(measured, str(values["origin"]))
        except (LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"not a tuning table: {error}") from None


def key(operation: str, place: str, ranks: int) -> str:
    """Under which the table keeps what was measured."""
    return f"{operation} {place}/{ranks}"


def _present(key: str) -> str:
    """A key as it is now written: the first tables knew all_reduce alone, and said crowded."""
    key = key.replace(" crowded", " oversubscribed")
    return f"all_reduce {key}" if key.startswith("node") else key


def rules_from(times: Mapping[int, Mapping[str, float]]) -> tuple[Rule, ...]:
    """Rules by measured seconds of each algorithm at each size in bytes.

    A change of algorithm lies half-way (geometrically) between two sizes, and is made only for a clear gain, so
    that noise does not make rules.
    """
    rules: list[Rule] = []
    chosen, last = "", 0
    for size in sorted(times):
        fastest = min(times[size], key=times[size].__getitem__)
        if not chosen:
            chosen = fastest
        elif times[size][fastest] < times[size].get(chosen, float("inf")) * _CLEARLY:
            rules.append((round((last * size) ** 0.5), chosen))
            chosen = fastest
        last = size
    return (*rules, (_NO_LIMIT, chosen))


def describe(rules: Sequence[Rule]) -> str:
    """mpi below 12 KiB, then shared."""
    *changes, (_, last) = rules
    parts = [f"{name} below {bytes_text(limit)}" for limit, name in changes]
    return ", then ".join([*parts, last])


def table_path(machine: str) -> Path:
    """Where the table of a machine (see `topology.this_machine`) is kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "mpitrain" / f"tuning-{machine}.json"


def load(machine: str) -> Tuning:
    """The measured table of the machine, or the built-in defaults where there is none that can be read."""
    try:
        return Tuning.from_json(read_plain(table_path(machine)).decode())
    except (OSError, ValueError):
        return Tuning()


def keep(machine: str, measured: Mapping[str, Sequence[Rule]], origin: str) -> Path:
    """Write the machine's table, with the rules for other places and rank counts that it had; its path."""
    path = table_path(machine)
    table = Tuning({**load(machine).measured, **measured}, origin)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, table.to_json())
    return path
