"""`machine.toml`: a machine profile as a file that people read and write; several of them together; those given.

    machine = read_machine("gpu-8")                        given, see machines/
    machine = read_machine("node.toml,network.toml")       key by key the later file wins
    write_values(values, Path("machine.toml"))             of measurements or of other files

Quantities are text with a unit ("100 Gbit/s"), or numbers of bytes, seconds, bytes per second, operations per second.
A file need not be whole: what all of them together leave out is derived (`machine_keys.derived`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpitrain.comm.programs.simulate import Machine
from mpitrain.config.toml_file import read_toml
from mpitrain.errors import InputError, printable, refusal
from mpitrain.planner.machine import (
    BYTES,
    HEAD,
    KEYS,
    PRECISIONS,
    REQUIRED,
    REQUIRED_OF_DEVICE,
    SECONDS,
    SECTIONS,
    Device,
    MachineKey,
    MachineProfile,
    Measured,
    core_matrix,
    derived,
    device_matrix,
)
from mpitrain.storage.disk import write_whole

Values = dict[str, Any]  # {"name": text, section: {key: number, or by precision {size: number}}, "collectives": ...}

GIVEN = Path(__file__).parent / "machines"
_COLLECTIVES = "collectives"  # {"all_reduce ring": {"2 ranks on 1 node, arena": {bytes: seconds}}}
_PLACE = re.compile(r"(\d+) ranks? on (\d+) nodes?, (arena|private)")
_ON_TOP = """\
# A machine profile for python -m mpitrain.plan. Change what you know better; what is left out is derived.
# Several together, --machine a.toml,b.toml: key by key the later one wins.
"""


def given_machines() -> list[str]:
    """The names of the profiles that come along."""
    return sorted(path.stem for path in GIVEN.glob("*.toml"))


def read_machine(files: str | Path) -> MachineProfile:
    """The profile of a file, of one that is given, or of several of them merged.

    Args:
        files: Paths or names of given profiles, with commas between them.

    Raises:
        InputError: A file is missing, has an unknown key or a wrong value, or all together lack a key that is needed.
    """
    values: Values = {}
    for part in str(files).split(","):
        values = merged(values, read_values(part.strip()))
    return profile_of(values, str(files))


def read_values(file: str) -> Values:
    """What one file says, in numbers. Raises InputError."""
    path = Path(file)
    if not path.suffix and not path.is_file():
        if file not in given_machines():
            near = difflib.get_close_matches(file, given_machines(), n=1)
            mend = f"did you mean {near[0]}?" if near else f"there are {', '.join(given_machines())}; or give a file"
            raise refusal(f"there is no machine profile {file!r}; {mend}")
        path = GIVEN / f"{file}.toml"
    said = read_toml(str(path))
    values: Values = {}
    for name, value in said.items():
        if name in HEAD:
            values[name] = str(value)
        elif name == _COLLECTIVES:
            values[name] = _collectives(value, str(path))
        elif name in SECTIONS:
            values[name] = dict(_section(name, value, str(path)))
        else:
            raise _unknown(str(path), name)
    values.setdefault("name", path.stem)
    return values


def merged(first: Values, second: Values) -> Values:
    """Both together; where both say something, what the second says. Neither is changed.

    A table of matrix products is taken as a whole for each precision, times of collectives size by size.
    """
    found = _nested(first, second, 3)
    if _COLLECTIVES in first and _COLLECTIVES in second:
        found[_COLLECTIVES] = _nested(first[_COLLECTIVES], second[_COLLECTIVES], 3)
    origins = [values["origin"] for values in (first, second) if values.get("origin")]
    if origins:
        found["origin"] = "; ".join(dict.fromkeys(origins))
    return found


def profile_of(values: Values, where: str) -> MachineProfile:
    """The profile that values give, with what they leave out derived.

    Args:
        values: From files or measurements.
        where: Where they come from, for the message.

    Raises:
        InputError: A figure is missing that cannot be derived.
    """
    flat = {f"{section}.{key}": value for section in SECTIONS for key, value in values.get(section, {}).items()}
    needed = REQUIRED + (REQUIRED_OF_DEVICE if "device" in values else ("core.matrix",))
    for name in needed:
        if name not in flat:
            section, unit = name.partition(".")[0], KEYS[name].unit
            raise refusal(
                f"{where}: {name} is missing; write it under [{section}], as {unit.example if unit else 'text'}"
            )
    numbers = derived({name: value for name, value in flat.items() if isinstance(value, int | float)})
    top, links, device = dict[str, Any](), dict[str, Any](), dict[str, Any]()
    for name in KEYS.keys() & numbers.keys():
        holder, _, attribute = KEYS[name].attribute.rpartition(".")
        {"": top, "links": links, "device": device}[holder][attribute] = numbers[name] * KEYS[name].factor
    for whole in (top, device):
        whole |= {name: round(whole[name]) for name in ("memory", "process", "count") if name in whole}
    if "device" in values:
        device["kind"] = str(flat["device.kind"])
        device["matrix"] = device_matrix(flat["device.matrix"], device["memory_rate"])
    return MachineProfile(
        name=values.get("name", "machine"),
        origin=values.get("origin", "written by hand"),
        links=Machine(cores=top["cores"], **links),
        matrix=core_matrix(flat.get("core.matrix", {})),
        device=Device(**device) if device else None,
        collectives=tuple(_rows(values.get(_COLLECTIVES, {}))),
        **top,
    )


def collective_values(rows: Sequence[Measured]) -> Values:
    """Times of collectives as values that a file could have given."""
    found: Values = {}
    for row in rows:
        place = f"{row.ranks} rank{'s' * (row.ranks > 1)} on {row.nodes} node{'s' * (row.nodes > 1)}, {row.memory}"
        found.setdefault(f"{row.operation} {row.algorithm}", {}).setdefault(place, {})[row.nbytes] = row.seconds
    return found


def write_values(values: Values, path: Path) -> None:
    """Write what values say, and nothing that is derived."""
    write_whole(path, "\n".join(_lines(values)) + "\n")


# -- reading


def _section(section: str, said: object, path: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(said, Mapping):
        raise refusal(f"{path}: {section} is a section; write [{section}] and its keys under it")
    for key, value in said.items():
        where = f"{path}: {section}.{key}"
        if key not in SECTIONS[section]:
            raise _unknown(path, f"{section}.{key}")
        of = SECTIONS[section][key]
        if of.unit is None:
            yield key, str(value)
        elif of.table:
            yield key, dict(_tables(of, value, where))
        else:
            yield key, of.unit.parsed(value, where)


def _tables(of: MachineKey, said: object, where: str) -> Iterator[tuple[str, dict[int, float]]]:
    """By precision: by size of matrices the speed; by 0: the speed at the best size."""
    assert of.unit is not None
    for precision, value in (said if isinstance(said, Mapping) else {"fp32": said}).items():
        if precision not in PRECISIONS:
            raise refusal(f"{where}.{precision} is no precision; there are {', '.join(PRECISIONS)}")
        table = value if isinstance(value, Mapping) else {0: value}
        if not table or not all(str(size).isdigit() for size in table):
            raise refusal(
                f'{where}.{precision} needs sizes of matrices, as {{ 64 = "20 Gflop/s", 1024 = "60 Gflop/s" }}'
            )
        yield precision, {int(n): of.unit.parsed(rate, f"{where}.{precision}") for n, rate in table.items()}


def _collectives(said: object, path: str) -> Values:
    found: Values = {}
    for name, places in (said if isinstance(said, Mapping) else {"": said}).items():
        where = f"{path}: {_COLLECTIVES}.{name}"
        if len(name.split()) != 2 or not isinstance(places, Mapping):
            raise refusal(f'{where} is wrong; write [collectives."all_reduce ring"] and its times under it')
        for place, times in places.items():
            if not _PLACE.fullmatch(place) or not isinstance(times, Mapping):
                raise refusal(
                    f'{where}: {place!r:.100} is wrong; write "4 ranks on 2 nodes, arena" = {{ "64 KiB" = "20 us" }}'
                )
            table = {round(_size(size, where)): SECONDS.parsed(value, where) for size, value in times.items()}
            found.setdefault(name, {})[place] = table
    return found


def _size(text: str, where: str) -> float:
    return BYTES.parsed(int(text) if text.isdigit() else text, where)


def _rows(said: Values) -> Iterator[Measured]:
    for name, places in said.items():
        operation, algorithm = name.split()
        for place, times in places.items():
            match = _PLACE.fullmatch(place)
            assert match is not None
            for nbytes, seconds in times.items():
                yield Measured(operation, algorithm, int(match[1]), int(match[2]), match[3], nbytes, seconds)


def _nested(first: Values, second: Values, levels: int) -> Values:
    """Return both together; below so many levels a table is taken as a whole."""
    deeper = [name for name in first if levels > 1 and isinstance(second.get(name), dict)]
    return {**first, **second, **{name: _nested(first[name], second[name], levels - 1) for name in deeper}}


def _unknown(path: str, name: str) -> InputError:
    alone = {key.partition(".")[2]: key for key in KEYS}
    last = name.rpartition(".")[2]
    known = [*HEAD, _COLLECTIVES, *SECTIONS, *KEYS]
    near = [alone[last]] if last in alone else difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    near = near or [alone[key] for key in difflib.get_close_matches(last, alone, n=1, cutoff=0.5)]
    mend = f"did you mean {near[0]!r}?" if near else f"there are {', '.join([*HEAD, *SECTIONS, _COLLECTIVES])}"
    return refusal(f"{path}: unknown key {name!r}; {mend}")


# -- writing


def _lines(values: Values) -> Iterator[str]:
    yield _ON_TOP
    for name in HEAD:
        if name in values:
            yield f"{name} = {_quoted(values[name])}"
    for section, keys in SECTIONS.items():
        said = values.get(section, {})
        if not said:
            continue
        yield f"\n[{section}]"
        for key, of in keys.items():
            if key in said and not of.table:
                yield f"{f'{key} = {_value(of, said[key])}':34}  # {of.meaning}"
        for key, of in keys.items():
            if key in said and of.table:
                yield f"\n[{section}.{key}]  # {of.meaning}; by the size of square matrices"
                yield from (f"{precision} = {_table(of, table)}" for precision, table in said[key].items())
    if values.get(_COLLECTIVES):
        yield "\n# seconds of a collective by bytes of a rank's whole vector"
    for name, places in values.get(_COLLECTIVES, {}).items():
        yield f"\n[{_COLLECTIVES}.{_quoted(name)}]"
        for place, times in places.items():
            cells = (f"{_quoted(BYTES.text(n))} = {_quoted(SECONDS.text(times[n]))}" for n in sorted(times))
            yield f"{_quoted(place)} = {{ {', '.join(cells)} }}"


def _value(of: MachineKey, value: Any) -> str:
    if of.unit is None:
        return _quoted(value)
    text = of.unit.text(value)
    return text if text.isdigit() else _quoted(text)


def _table(of: MachineKey, table: Mapping[int, float]) -> str:
    assert of.unit is not None
    if 0 in table:
        return _quoted(of.unit.text(table[0]))
    return f"{{ {', '.join(f'{n} = {_quoted(of.unit.text(table[n]))}' for n in sorted(table))} }}"


def _quoted(text: object) -> str:
    return '"{}"'.format(printable(text, None).replace("\\", "\\\\").replace('"', '\\"'))
