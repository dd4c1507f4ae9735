"""Which algorithm is fastest at which size: built-in defaults, or a table measured on this machine.

`python -m mpitrain.bench collectives --tune` measures and writes the table, one file per kind of machine and
MPI library, under $XDG_CACHE_HOME/mpitrain (or ~/.cache/mpitrain). Rank 0 reads it; all ranks use the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

KIB, MIB = 1 << 10, 1 << 20
Rule = tuple[int, str]  # up to this many bytes (exclusive), this algorithm
_NO_LIMIT = 1 << 62

# where the ranks and the data are -> rules in order of size; crowded: more ranks than cores
_DEFAULTS: dict[str, tuple[Rule, ...]] = {
    "node arena": ((12 * KIB, "mpi"), (_NO_LIMIT, "shared")),
    "node arena crowded": ((32 * KIB, "mpi"), (_NO_LIMIT, "shared")),
    "node": ((96 * KIB, "mpi"), (_NO_LIMIT, "shared")),
    "node crowded": ((512 * KIB, "mpi"), (_NO_LIMIT, "shared")),
    "node private crowded": ((16 * MIB, "mpi"), (_NO_LIMIT, "ring")),
    "node private": ((16 * MIB, "mpi"), (_NO_LIMIT, "ring")),
    "nodes arena crowded": ((64 * KIB, "mpi"), (_NO_LIMIT, "two_level")),
    "nodes crowded": ((64 * KIB, "mpi"), (_NO_LIMIT, "two_level")),
    "nodes single crowded": ((16 * MIB, "mpi"), (_NO_LIMIT, "ring")),
    "nodes arena": ((64 * KIB, "mpi"), (_NO_LIMIT, "two_level")),
    "nodes": ((64 * KIB, "mpi"), (_NO_LIMIT, "two_level")),
    "nodes single": ((16 * MIB, "mpi"), (_NO_LIMIT, "ring")),
}


@dataclass(frozen=True)
class Tuning:
    """Rules for all_reduce by place; `measured` overrides the defaults, keyed "place/ranks"."""

    measured: Mapping[str, Sequence[Rule]] = field(default_factory=dict)
    origin: str = "built-in"

    def algorithm(self, place: str, ranks: int, nbytes: int) -> str:
        """The algorithm for a vector of nbytes on `ranks` ranks at a place of `PLACES`."""
        rules = self.measured.get(f"{place}/{ranks}") or _DEFAULTS[place]
        return next(name for limit, name in rules if nbytes < limit)

    def rules(self, place: str, ranks: int) -> Sequence[Rule]:
        return self.measured.get(f"{place}/{ranks}") or _DEFAULTS[place]

    def to_json(self) -> str:
        return json.dumps({"origin": self.origin, "measured": {k: list(v) for k, v in self.measured.items()}})

    @staticmethod
    def from_json(text: str) -> Tuning:
        """Raises ValueError for a text that is not a table."""
        try:
            values = json.loads(text)
            measured = {
                key: tuple((int(limit), str(name)) for limit, name in rules)
                for key, rules in values["measured"].items()
            }
            if any(not rules or rules[-1][0] < _NO_LIMIT for rules in measured.values()):
                raise ValueError("rules without an end")
            return Tuning(measured, str(values["origin"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a tuning table: {error}") from None


PLACES = tuple(_DEFAULTS)


def table_path(machine: str) -> Path:
    """Where the table of a machine (see `topology.machine_key`) is kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "mpitrain" / f"tuning-{machine}.json"


def load(machine: str) -> Tuning:
    """The measured table of the machine, or the built-in defaults where there is none that can be read."""
    try:
        return Tuning.from_json(table_path(machine).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return Tuning()
