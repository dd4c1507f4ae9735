"""Rules by which the fastest algorithm of an operation is chosen for each size, and the table of measured rules.

The rules come from built-in defaults or from a table measured on this machine. `python -m mpitrain.doctor --tune`
measures and writes the table, one file per kind of machine and MPI library, under $XDG_CACHE_HOME/mpitrain (or
~/.cache/mpitrain). Rules for ordinary tensors that it lacks are measured and added when an operation is first used
(`collectives/first_use.py`). Rank 0 reads the table, and all ranks use it.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mpitrain.storage.disk import read_plain, write_whole
from mpitrain.storage.text import bytes_text

KIB, MIB = 1 << 10, 1 << 20
Rule = tuple[int, str]  # (limit, algorithm): use the algorithm for fewer bytes than the limit
_NO_LIMIT = 1 << 62
_CLEAR_GAIN = 0.95  # a faster algorithm is chosen if it takes less than this fraction of the current one's time


def _shared_from(*limits: int) -> dict[str, tuple[Rule, ...]]:
    """Return rules that select "shared" from a number of bytes on, and "mpi" below.

    Args:
        limits: Bytes for four places: in an arena, in an arena oversubscribed, elsewhere, elsewhere oversubscribed.
            From these on, "shared" was at least as fast with 2 ranks on 2 cores, and with 4 ranks if oversubscribed.
    """
    places = "node arena", "node arena oversubscribed", "node", "node oversubscribed"
    return {place: ((limit, "mpi"), (_NO_LIMIT, "shared")) for place, limit in zip(places, limits, strict=True)}


_SINGLE = "nodes single", "nodes single oversubscribed"  # one rank per node
_NODES = "nodes", "nodes arena", "nodes oversubscribed", "nodes arena oversubscribed"


def _between_nodes(places: tuple[str, ...], *rules: Rule) -> dict[str, tuple[Rule, ...]]:
    """Return the same rules for several places.

    They are those of the fastest on three nodes that were joined by 1 Gbit/s and 10 ms, 10 Gbit/s and 0.1 ms, and
    memory: Open MPI sends long vectors to be reduced over a link several times.
    """
    return dict.fromkeys(places, rules)


# operation -> place (see `Setting.place`) -> rules in order of size; MPI for places that are not listed
_DEFAULTS: dict[str, dict[str, tuple[Rule, ...]]] = {
    "all_reduce": {
        **_shared_from(12 * KIB, 32 * KIB, 96 * KIB, 512 * KIB),
        "node": ((96 * KIB, "mpi"), (_NO_LIMIT, "staged")),
        **_between_nodes(_NODES, (64 * KIB, "mpi"), (_NO_LIMIT, "two_level")),
        **_between_nodes(_SINGLE, (128 * KIB, "mpi"), (_NO_LIMIT, "two_level")),
    },
    "reduce": _shared_from(96 * KIB, 192 * KIB, MIB, MIB),
    "reduce_scatter": {
        **_shared_from(32 * KIB, 96 * KIB, 128 * KIB, MIB),
        **_between_nodes(_NODES, (64 * KIB, "mpi"), (_NO_LIMIT, "two_level")),
        **_between_nodes(_SINGLE, (64 * KIB, "mpi"), (8 * MIB, "pairwise"), (_NO_LIMIT, "ring")),
    },
    "broadcast": {
        **_shared_from(96 * KIB, 192 * KIB, 2 * MIB, 2 * MIB),
        **_between_nodes(_NODES, (128 * KIB, "mpi"), (_NO_LIMIT, "tree")),
    },
    "all_gather": {
        **_shared_from(16 * KIB, 64 * KIB, 4 * MIB, 8 * MIB),
        **_between_nodes((*_NODES, *_SINGLE), (192 * KIB, "mpi"), (_NO_LIMIT, "two_level")),
    },
}


@dataclass(frozen=True)
class Tuning:
    """Tuning table: rules by operation and place.

    Attributes:
        measured: Rules that override the defaults, by "operation place/ranks".
        origin: Source of the measured rules.
    """

    measured: Mapping[str, Sequence[Rule]] = field(default_factory=dict)
    origin: str = "built-in"

    def rules(self, operation: str, place: str, ranks: int) -> Sequence[Rule]:
        """Return the rules in order of size; none for an operation that is not in the table.

        Args:
            operation: Name of the operation.
            place: Place, see `Setting.place`.
            ranks: Number of ranks.
        """
        by_place = _DEFAULTS.get(operation)
        otherwise = () if by_place is None else by_place.get(place, ((_NO_LIMIT, "mpi"),))
        return self.measured.get(rules_key(operation, place, ranks)) or otherwise

    def is_measured(self, operation: str, place: str, ranks: int) -> bool:
        """Return True if rules were measured on this machine.

        Args:
            operation: Name of the operation.
            place: Place, see `Setting.place`.
            ranks: Number of ranks.
        """
        return rules_key(operation, place, ranks) in self.measured

    def to_json(self) -> str:
        """Return the table as JSON text, for `from_json`."""
        return json.dumps({"origin": self.origin, "measured": {k: list(v) for k, v in self.measured.items()}})

    @staticmethod
    def from_json(text: str) -> Tuning:
        """Return the table that a JSON text describes.

        Raises:
            ValueError: The text is not a table.
        """
        try:
            values = json.loads(text)
            measured = {
                _current_key(key): tuple((int(limit), str(name)) for limit, name in rules)
                for key, rules in values["measured"].items()
            }
            if any(not rules or rules[-1][0] < _NO_LIMIT for rules in measured.values()):
                raise ValueError("rules without an end")
            return Tuning(measured, str(values["origin"]))
        except (LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"not a tuning table: {error}") from None


def rules_key(operation: str, place: str, ranks: int) -> str:
    """Return the key of measured rules in the table.

    Args:
        operation: Name of the operation.
        place: Place, see `Setting.place`.
        ranks: Number of ranks.
    """
    return f"{operation} {place}/{ranks}"


def _current_key(key: str) -> str:
    """Return a key in the present format.

    In tables of the first format, all keys are of all_reduce and lack its name, and "oversubscribed" is "crowded".
    """
    key = key.replace(" crowded", " oversubscribed")
    return f"all_reduce {key}" if key.startswith("node") else key


def rules_from(times: Mapping[int, Mapping[str, float]]) -> tuple[Rule, ...]:
    """Return rules from measured times.

    The limit between two algorithms is the geometric mean of two measured sizes. The algorithm changes only for a clear
    gain, so that noise does not make rules.

    Args:
        times: Seconds by size in bytes and name of the algorithm.
    """
    rules: list[Rule] = []
    chosen, last = "", 0
    for size in sorted(times):
        fastest = min(times[size], key=times[size].__getitem__)
        if not chosen:
            chosen = fastest
        elif times[size][fastest] < times[size].get(chosen, float("inf")) * _CLEAR_GAIN:
            rules.append((round((last * size) ** 0.5), chosen))
            chosen = fastest
        last = size
    return (*rules, (_NO_LIMIT, chosen))


def describe_rules(rules: Sequence[Rule]) -> str:
    """Describe rules in words, such as "mpi below 12 KiB, then shared"."""
    *changes, (_, last) = rules
    parts = [f"{name} below {bytes_text(limit)}" for limit, name in changes]
    return ", then ".join([*parts, last])


def table_path(machine: str) -> Path:
    """Return the path of the table of a machine (see `topology.this_machine`)."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "mpitrain" / f"tuning-{machine}.json"


def load_tuning(machine: str) -> Tuning:
    """Return the measured table of a machine, or the built-in defaults, with a warning if there is a damaged table."""
    path = table_path(machine)
    try:
        return Tuning.from_json(read_plain(path).decode())
    except (FileNotFoundError, NotADirectoryError):
        return Tuning()
    except (OSError, ValueError) as error:
        warnings.warn(f"the tuning table {path} is ignored ({error}); delete it", RuntimeWarning, stacklevel=2)
        return Tuning()


def save_tuning(machine: str, measured: Mapping[str, Sequence[Rule]], origin: str) -> Path:
    """Write measured rules to the table of a machine, which keeps its other rules, and return the table's path.

    Args:
        machine: Name of the machine, see `topology.this_machine`.
        measured: Rules by "operation place/ranks".
        origin: Source of the rules.
    """
    path = table_path(machine)
    table = Tuning({**load_tuning(machine).measured, **measured}, origin)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, table.to_json())
    return path
