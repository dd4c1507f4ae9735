"""Machine profiles: the speeds and sizes of a machine's nodes and network, and the file `machine.toml` that has them.

    machine = read_machine("gpu-8")                        a ready-made profile, see machines/
    machine = read_machine("node.toml,network.toml")       merged; for each key the later file wins
    write_values(values, Path("machine.toml"))             values from measurements or from other files

Quantities are text with a unit ("100 Gbit/s", "256 GiB", "2 us", "60 Gflop/s", "90 %"), or plain numbers of bytes,
seconds, bytes per second, or operations per second. Keys that no file has are derived from the others (`complete`).
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.comm.programs.program import Machine
from mpitrain.config.named import suggestion
from mpitrain.config.toml_file import read_toml
from mpitrain.errors import InputError, printable, refusal
from mpitrain.storage.disk import write_whole


@dataclass(frozen=True)
class Device:
    """Accelerators of a node.

    Attributes:
        kind: Device type, as in `torch.device.type`.
        count: Number of devices of a node.
        memory: Bytes of one device.
        matrix: Speeds by precision: (size, operations per second) of products of square matrices of that size.
        memory_rate: Bytes per second of the device's own memory, reads and writes together.
        host_rate: Bytes per second between a device and the host, one way.
        link_rate: Bytes per second of a message between two devices of a node; 0: no direct link, so that messages pass
            through host memory.
        link_latency: Seconds of latency of a message over that link, or of a copy between a device and the host.
    """

    kind: str
    count: int
    memory: int
    matrix: Mapping[str, Sequence[tuple[int, float]]]
    memory_rate: float
    host_rate: float
    link_rate: float
    link_latency: float


class Measured(NamedTuple):
    """Measured seconds of one algorithm of a collective.

    Attributes:
        operation: all_reduce, reduce_scatter, all_gather or broadcast.
        algorithm: Name of the algorithm, as a caller chooses it.
        ranks: Number of ranks that took part.
        nodes: Number of their nodes.
        memory: Place of the vectors: arena or private.
        nbytes: Bytes of a rank's whole vector.
        seconds: Seconds from the first rank's start to the last rank's end.
    """

    operation: str
    algorithm: str
    ranks: int
    nodes: int
    memory: str
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class MachineProfile:
    """Speeds and sizes of a machine whose nodes are alike, except that some may compute more slowly.

    Attributes:
        name: Name for display.
        origin: Source of the figures: "measured ..." or "specification".
        cores: Cores of a node; a fraction of them if one machine plays several nodes or others use the rest.
        memory: Bytes of a node's memory.
        links: Speeds of messages, copies and sums, as `comm.programs.program` uses them; `links.cores` equals `cores`.
        matrix: Speeds by precision: (size, operations per second) of products of square matrices of that size on one
            core, while all other cores do the same.
        threads: Share of a core's speed that each further thread of a rank adds.
        update_rate: Elements per second that one core updates with AdamW, while all other cores do the same.
        overhead: Seconds of a rank's training step spent outside of blocks, messages and the update.
        write_rate: Bytes per second that one node writes into the run folder.
        rank_write_rate: Bytes per second that one rank alone writes into the run folder.
        write_limit: Bytes per second that all nodes together write into the run folder.
        process: Bytes of a rank that trains a tiny model.
        device: Accelerators of a node. Default: none.
        collectives: Measured seconds of collectives. Default: none.
        seen_cores: Cores that the operating system reports to ranks; 0: same as `cores`. Ranks that seem to have a core
            each keep it busy while they wait.
        speeds: Speed of computing on each node, relative to the figures of this profile. Default and further nodes: 1.
    """

    name: str
    origin: str
    cores: float
    memory: int
    links: Machine = field(default_factory=Machine)
    matrix: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)
    threads: float = 0.9
    update_rate: float = 5e8
    overhead: float = 2e-3
    write_rate: float = 1e9
    rank_write_rate: float = 5e8
    write_limit: float = 1e11
    process: int = 360 << 20
    device: Device | None = None
    collectives: tuple[Measured, ...] = ()
    seen_cores: float = 0.0
    speeds: tuple[float, ...] = ()


_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {f"{letter}i": 1024.0**power for power, letter in enumerate("KMGTP", 1)}
_SMALL = {"": 1.0, "m": 1e-3, "u": 1e-6, "µ": 1e-6, "μ": 1e-6, "n": 1e-9}
_NUMBER = re.compile(r"([-+]?[0-9][0-9_,]*(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?)\s*(.*)")
_DIGITS = 4  # digits of a written number: no measurement is more precise


@dataclass(frozen=True)
class Unit:
    """Unit of a quantity.

    Attributes:
        bases: Size of each base unit by name, for example {"B": 1, "bit": 1/8} for bytes.
        prefixes: Factor of each prefix by name.
        written: Base unit and prefixes that values are written with.
        example: Example value for error messages.
    """

    bases: Mapping[str, float]
    prefixes: Mapping[str, float]
    written: tuple[str, Mapping[str, float]]
    example: str

    def parse(self, value: object, where: str) -> float:
        """Return the number that a value of a TOML file stands for, in this unit's base.

        Args:
            value: Number in the unit's base, or text of a number and a unit.
            where: File and key, for the message.

        Raises:
            InputError: The value is not a quantity in this unit, or not above 0.
        """
        number = 0.0
        if isinstance(value, int | float) and not isinstance(value, bool):
            number = float(value) if value < 1e300 else 0.0  # TOML's whole numbers have no bounds
        elif isinstance(value, str) and (match := _NUMBER.fullmatch(value.strip())):
            units = {"": 1.0} | {p + b: self.bases[b] * self.prefixes[p] for b in self.bases for p in self.prefixes}
            factor = units.get("".join(match[2].split()), 0.0)
            number = float(match[1].replace(",", "").replace("_", ""))
            # 20 us are 2e-5 s to the last bit
            number = number / round(1 / factor) if 0 < factor < 1 else number * factor
        if not math.isfinite(number) or number <= 0:
            raise refusal(
                f"{where} = {value!r:.100} is not a positive quantity of this kind; write it as {self.example}"
            )
        return number

    def text(self, value: float) -> str:
        """Return a value as text with four digits, in the largest unit that gives a number of at least one."""
        base, prefixes = self.written
        value /= self.bases.get(base, 1.0)
        fitting = [prefix for prefix, factor in prefixes.items() if value >= factor * (1 - 1e-9)]
        prefix = max(fitting or prefixes, key=lambda p: prefixes[p] * (1 if fitting else -1))
        rounded = float(f"{value / prefixes[prefix]:.{_DIGITS}g}")
        exact = rounded == int(rounded) and abs(rounded) < 1e6  # then it needs no exponent
        number = f"{rounded:.0f}" if exact else f"{rounded:.{_DIGITS}g}"
        return f"{number} {prefix}{base}".strip()


_BYTES = {"bytes": 1.0, "byte": 1.0, "B": 1.0}
_BITS = {"bits": 1 / 8, "bit": 1 / 8, "b": 1 / 8}
_OPERATIONS = dict.fromkeys(("flop/s", "flops", "FLOP/s", "FLOPS", "FLOPs", "flop", "Flop/s", "Flops", "/s"), 1.0)
_RATES = {f"{base}{per}": counts for base, counts in (_BYTES | _BITS).items() for per in ("/s", "ps")}
_UP, _LARGE = {p: _DECIMAL[p] for p in ("", "k", "M", "G", "T")}, {p: _DECIMAL[p] for p in ("M", "G", "T")}

BYTES = Unit(_BYTES, _DECIMAL | _BINARY, ("B", {"": 1.0} | _BINARY), '"256 GiB"')
BYTE_RATE = Unit(_RATES, _DECIMAL | _BINARY, ("B/s", _UP), '"200 GB/s" or "100 Gbit/s"')
BIT_RATE = replace(BYTE_RATE, written=("bit/s", _UP))
_TIMES = {"seconds": 1.0, "second": 1.0, "s": 1.0}
SECONDS = Unit(_TIMES, _SMALL, ("s", {p: _SMALL[p] for p in ("", "m", "u", "n")}), '"2 us"')
OPERATIONS = Unit(_OPERATIONS, _DECIMAL, ("flop/s", _LARGE), '"60 Gflop/s"')
_EACH = dict.fromkeys(("elements/s", "element/s", "/s"), 1.0)
ELEMENTS = Unit(_EACH, _DECIMAL, ("elements/s", {"": 1.0, "M": 1e6}), '"300 Melements/s"')
FRACTION = Unit({"%": 0.01}, {"": 1.0}, ("%", {"": 1.0}), '0.9 or "90 %"')
COUNT = Unit({}, {}, ("", {"": 1.0}), "128")
TEXT = Unit({}, {}, ("", {}), "text")  # not a quantity


def size_of(text: str, option: str) -> float:
    """Return the bytes of a size from the command line, for example 32GiB, 1.5gb or 64.

    Args:
        text: Number with a unit; bytes without a unit.
        option: Option of the command line, for the message.

    Raises:
        InputError: The text is not a size.
    """
    return BYTES.parse(text.upper().replace("I", "i"), option)


PRECISIONS = ("fp32", "bf16", "fp16")
_DEFAULT = Machine()
_CORE = 50e9  # operations per second of a core, if the nodes have devices and the file has no core.matrix
_UPDATE_BYTES = 28  # per element in AdamW, which reads parameter, gradient and two moments, and writes all but gradient
_CORE_CALL, _DEVICE_CALL = 1e-6, 5e-6  # seconds of starting a matrix product
_CORE_SIZES, _DEVICE_SIZES = (64, 256, 1024), (256, 1024, 4096, 8192)


@dataclass(frozen=True)
class MachineKey:
    """A key in a section of a machine profile.

    Attributes:
        unit: Unit of its value.
        attribute: Attribute that it sets, of `MachineProfile`, its `links` or its `device`.
        meaning: Comment behind the key in a written file.
        factor: Number that the value is multiplied by to get the attribute.
        table: If true, the key is a section: a value for each precision, or a table of values by size.
    """

    unit: Unit
    attribute: str
    meaning: str
    factor: float = 1.0
    table: bool = False


HEAD = ("name", "origin")
SECTIONS: Mapping[str, Mapping[str, MachineKey]] = {
    "node": {
        "cores": MachineKey(COUNT, "cores", "cores that ranks run on"),
        "seen_cores": MachineKey(
            COUNT, "seen_cores", "cores that the system reports, if others compute on some of them"
        ),
        "memory": MachineKey(BYTES, "memory", "memory of a node"),
        "memory_bandwidth": MachineKey(
            BYTE_RATE, "links.memory_rate", "reads and writes of all cores at once, as STREAM counts them", 0.5
        ),
    },
    "core": {
        "threads": MachineKey(FRACTION, "threads", "share of a core's speed that each further thread of a rank adds"),
        "update_rate": MachineKey(ELEMENTS, "update_rate", "AdamW on one core, while all others do the same"),
        "copy_rate": MachineKey(BYTE_RATE, "links.copy_rate", "bytes that one core copies"),
        "add_rate": MachineKey(BYTE_RATE, "links.reduce_rate", "bytes of the sum of two vectors, added by one core"),
        "matrix": MachineKey(OPERATIONS, "matrix", "one core, while all others do the same", table=True),
    },
    "rank": {
        "overhead": MachineKey(SECONDS, "overhead", "time of a step outside blocks, messages and the update"),
        "step": MachineKey(SECONDS, "links.step", "time to start one step of a collective"),
        "process": MachineKey(BYTES, "process", "memory of a rank that trains a tiny model"),
    },
    "network": {
        "latency": MachineKey(SECONDS, "links.latency", "latency of a message between nodes"),
        "bandwidth": MachineKey(BIT_RATE, "links.bandwidth", "all network links of a node together, one way"),
        "eager": MachineKey(BYTES, "links.eager", "longer messages are announced first: three latencies"),
    },
    "inside": {
        "latency": MachineKey(SECONDS, "links.local_latency", "latency of a message inside a node"),
        "bandwidth": MachineKey(BYTE_RATE, "links.local_bandwidth", "one message inside a node"),
        "barrier": MachineKey(SECONDS, "links.fence", "barrier on a node, for each doubling of its ranks"),
    },
    "folder": {
        "rank_write_rate": MachineKey(BYTE_RATE, "rank_write_rate", "one rank alone, writing into the run folder"),
        "write_rate": MachineKey(BYTE_RATE, "write_rate", "all ranks of one node"),
        "write_limit": MachineKey(BYTE_RATE, "write_limit", "all nodes together"),
    },
    "device": {
        "kind": MachineKey(TEXT, "device.kind", "device type, as in PyTorch"),
        "count": MachineKey(COUNT, "device.count", "devices of a node"),
        "memory": MachineKey(BYTES, "device.memory", "memory of one device"),
        "memory_bandwidth": MachineKey(BYTE_RATE, "device.memory_rate", "device memory, reads and writes together"),
        "host_bandwidth": MachineKey(BYTE_RATE, "device.host_rate", "between device and host, one way"),
        "link_bandwidth": MachineKey(
            BYTE_RATE, "device.link_rate", "between two devices of a node; if missing, through the host"
        ),
        "link_latency": MachineKey(
            SECONDS, "device.link_latency", "latency of such a message, or of a copy to the host"
        ),
        "matrix": MachineKey(OPERATIONS, "device.matrix", "one device", table=True),
    },
}
KEYS = {f"{section}.{key}": of for section, keys in SECTIONS.items() for key, of in keys.items()}
REQUIRED = ("node.cores", "node.memory", "node.memory_bandwidth")
REQUIRED_OF_DEVICE = ("device.kind", "device.count", "device.memory", "device.memory_bandwidth", "device.matrix")

Table = Mapping[int, float]  # operations per second by the size of square matrices; size 0: the best size


def complete(known: Mapping[str, float]) -> dict[str, float]:
    """Return all figures of a profile: those of its files, and those derived from them.

    Args:
        known: Figures by "section.key", in the files' units; the required keys are present.

    Returns:
        All figures by "section.key", `known` included. Missing are tables, figures with a default in `MachineProfile`
        or its `links`, and without a device those of the device.
    """
    bandwidth, cores = known["node.memory_bandwidth"], known["node.cores"]
    copy = known.get("core.copy_rate", min(_DEFAULT.copy_rate, bandwidth / 2))
    write = known.get("folder.write_rate", known.get("folder.rank_write_rate", 1e9))
    figures = {
        "node.seen_cores": cores,
        "core.update_rate": min(2 * copy, bandwidth / cores) / _UPDATE_BYTES,
        "core.copy_rate": copy,
        "core.add_rate": 0.8 * copy,
        "inside.latency": min(_DEFAULT.local_latency, known.get("network.latency", 1.0)),
        "inside.bandwidth": 0.6 * copy,
        "folder.rank_write_rate": min(5e8, write),
        "folder.write_rate": write,
        "folder.write_limit": max(1e11, write),
    }
    if "device.count" in known:
        figures |= {"device.host_bandwidth": 20e9, "device.link_bandwidth": 0.0, "device.link_latency": 1e-5}
    return figures | dict(known)


def _device_matrix(known: Mapping[str, Table], memory_rate: float) -> dict[str, list[tuple[int, float]]]:
    """Return the speeds of a device by precision and size.

    A missing 16-bit precision is as fast as the other one, or as fast as fp32 if both are missing. A missing fp32 has
    an eighth of the 16-bit speed.

    Args:
        known: Speeds from the file.
        memory_rate: Bytes per second of the device's memory, which limits small matrices.
    """
    half = known.get("bf16") or known.get("fp16")
    fp32 = known.get("fp32") or {size: rate / 8 for size, rate in (half or {}).items()}
    tables = {"fp32": fp32} | {name: known.get(name) or half or fp32 for name in ("bf16", "fp16")}
    per_byte = {name: (4 if name == "fp32" else 2) / memory_rate for name in tables}
    return {name: _by_size(table, _DEVICE_SIZES, _DEVICE_CALL, per_byte[name]) for name, table in tables.items()}


def _by_size(table: Table, sizes: tuple[int, ...], call: float, per_element: float) -> list[tuple[int, float]]:
    """Return speeds by size; one figure for the best size is expanded, with small products limited by calls and memory.

    Args:
        table: Speeds from the file, by size, or by 0 for the best size.
        sizes: Sizes to expand one figure to.
        call: Seconds to start a product.
        per_element: Seconds in which memory delivers an element.
    """
    if 0 not in table:
        return sorted(table.items())
    return [(n, 2.0 * n**3 / (call + max(2.0 * n**3 / table[0], 3 * n * n * per_element))) for n in sizes]


# {"name": text, section: {key: number or {precision: {size: number}}}, "collectives": {fields of `Measured`: seconds}}
Values = dict[str, Any]

MACHINES = Path(__file__).parent / "machines"
_COLLECTIVES = "collectives"  # a file has {"all_reduce ring": {"2 ranks on 1 node, arena": {bytes: seconds}}}
_PLACE = re.compile(r"(\d+) ranks? on (\d+) nodes?, (arena|private)")
_HEADER = """\
# Machine profile for python -m mpitrain.plan. Correct any value that you know better; missing values are derived.
# Profiles can be combined with --machine a.toml,b.toml; for each key, the later file wins.
"""


def ready_made_machines() -> list[str]:
    """Return the names of the ready-made profiles."""
    return sorted(path.stem for path in MACHINES.glob("*.toml"))


def read_machine(files: str | Path) -> MachineProfile:
    """Return the profile from a file, a ready-made profile, or several of them merged.

    Args:
        files: Paths or names of ready-made profiles, separated by commas.

    Raises:
        InputError: A file is missing, has an unknown key or a wrong value, or a required key is in none of the files.
    """
    values: Values = {}
    for part in str(files).split(","):
        values = merge(values, read_values(part.strip()))
    return profile_of(values, str(files))


def read_values(file: str) -> Values:
    """Return the values of one file as numbers.

    Raises:
        InputError: The file is missing, or has an unknown key or a wrong value.
    """
    path = Path(file)
    if not path.suffix and not path.is_file():
        if file not in ready_made_machines():
            names = ready_made_machines()
            fix = suggestion(file, names, f"use one of {', '.join(names)} or the path of a file")
            raise refusal(f"there is no machine profile {file!r}; {fix}")
        path = MACHINES / f"{file}.toml"
    values: Values = {}
    for name, value in read_toml(str(path)).items():
        if name in HEAD:
            values[name] = str(value)
        elif name == "speeds":
            each = value if isinstance(value, list) else [value]
            values[name] = [FRACTION.parse(speed, f"{path}: speeds") for speed in each]
        elif name == _COLLECTIVES:
            values[name] = _collectives(value, str(path))
        elif name in SECTIONS:
            values[name] = dict(_section(name, value, str(path)))
        else:
            raise _unknown_key(str(path), name)
    values.setdefault("name", path.stem)
    return values


def merge(first: Values, second: Values) -> Values:
    """Return the values of both, neither of which is changed; where both have a key, the second wins.

    For each precision, a table of matrix products is replaced as a whole. Seconds of collectives are merged size by
    size.

    Args:
        first: Values of one file, or of several merged.
        second: Values that take precedence.
    """
    result = _merge_nested(first, second, 3)
    origins = [values["origin"] for values in (first, second) if values.get("origin")]
    if origins:
        result["origin"] = "; ".join(dict.fromkeys(origins))
    return result


def profile_of(values: Values, where: str) -> MachineProfile:
    """Return the profile that some values describe, with missing figures derived.

    Args:
        values: Values from files or measurements.
        where: Origin of the values, for the message.

    Raises:
        InputError: A figure is missing that cannot be derived.
    """
    flat = {f"{section}.{key}": value for section in SECTIONS for key, value in values.get(section, {}).items()}
    for name in REQUIRED + (REQUIRED_OF_DEVICE if "device" in values else ("core.matrix",)):
        if name not in flat:
            section, example = name.partition(".")[0], KEYS[name].unit.example
            raise refusal(f"{where}: {name} is missing; write it under [{section}], for example {example}")
    numbers = complete({name: value for name, value in flat.items() if isinstance(value, int | float)})
    top, links, device = dict[str, Any](), dict[str, Any](), dict[str, Any]()
    for name in KEYS.keys() & numbers.keys():
        holder, _, attribute = KEYS[name].attribute.rpartition(".")
        {"": top, "links": links, "device": device}[holder][attribute] = numbers[name] * KEYS[name].factor
    for whole in (top, device):
        whole |= {name: round(whole[name]) for name in ("memory", "process", "count") if name in whole}
    if "device" in values:
        device["kind"] = str(flat["device.kind"])
        device["matrix"] = _device_matrix(flat["device.matrix"], device["memory_rate"])
    core = flat.get("core.matrix", {})
    best = next((core[name] for name in PRECISIONS if core.get(name)), {0: _CORE})  # for missing precisions
    return MachineProfile(
        name=values.get("name", "machine"),
        origin=values.get("origin", "written by hand"),
        links=Machine(cores=top["cores"], **links),
        matrix={name: _by_size(core.get(name) or best, _CORE_SIZES, _CORE_CALL, 0.0) for name in PRECISIONS},
        device=Device(**device) if device else None,
        speeds=tuple(values.get("speeds", ())),
        collectives=tuple(Measured._make((*key, seconds)) for key, seconds in values.get(_COLLECTIVES, {}).items()),
        **top,
    )


def write_values(values: Values, path: Path) -> None:
    """Write values to a file, without derived figures.

    Args:
        values: Values from files or measurements.
        path: File to write.
    """
    write_whole(path, "\n".join(lines_of(values)) + "\n")


# -- reading


def _section(section: str, content: object, path: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(content, Mapping):
        raise refusal(f"{path}: {section} is a section; write [{section}] and its keys under it")
    for key, value in content.items():
        where = f"{path}: {section}.{key}"
        if key not in SECTIONS[section]:
            raise _unknown_key(path, f"{section}.{key}")
        of = SECTIONS[section][key]
        if of.unit is TEXT:
            yield key, str(value)
        elif of.table:
            yield key, dict(_tables(of, value, where))
        else:
            yield key, of.unit.parse(value, where)


def _tables(of: MachineKey, content: object, where: str) -> Iterator[tuple[str, dict[int, float]]]:
    """Yield each precision with its speeds by size of matrices; size 0 stands for the best size."""
    for precision, value in (content if isinstance(content, Mapping) else {"fp32": content}).items():
        if precision not in PRECISIONS:
            raise refusal(f"{where}.{precision} is not a precision; use one of {', '.join(PRECISIONS)}")
        table = value if isinstance(value, Mapping) else {0: value}
        if not table or not all(str(size).isdigit() for size in table):
            raise refusal(
                f'{where}.{precision} needs sizes of matrices, for example {{ 64 = "20 Gflop/s", 1024 = "60 Gflop/s" }}'
            )
        yield precision, {int(n): of.unit.parse(rate, f"{where}.{precision}") for n, rate in table.items()}


def _collectives(content: object, path: str) -> dict[tuple[Any, ...], float]:
    seconds: dict[tuple[Any, ...], float] = {}
    for name, places in (content if isinstance(content, Mapping) else {"": content}).items():
        where = f"{path}: {_COLLECTIVES}.{name}"
        if len(name.split()) != 2 or not isinstance(places, Mapping):
            raise refusal(f'{where} is wrong; write [collectives."all_reduce ring"] and its times under it')
        for place, times in places.items():
            match = _PLACE.fullmatch(place)
            if match is None or not isinstance(times, Mapping):
                raise refusal(
                    f'{where}: {place!r:.100} is wrong; write "4 ranks on 2 nodes, arena" = {{ "64 KiB" = "20 us" }}'
                )
            key = *name.split(), int(match[1]), int(match[2]), match[3]
            sizes = {size: round(BYTES.parse(int(size) if size.isdigit() else size, where)) for size in times}
            seconds |= {(*key, sizes[size]): SECONDS.parse(value, where) for size, value in times.items()}
    return seconds


def _merge_nested(first: Values, second: Values, levels: int) -> Values:
    """Return both dictionaries merged recursively to a depth of `levels`; deeper values are replaced as a whole."""
    deeper = [name for name in first if levels > 1 and isinstance(second.get(name), dict)]
    return {**first, **second, **{name: _merge_nested(first[name], second[name], levels - 1) for name in deeper}}


def _unknown_key(path: str, name: str) -> InputError:
    alone = {key.partition(".")[2]: key for key in KEYS}
    last = name.rpartition(".")[2]
    known = [*HEAD, "speeds", _COLLECTIVES, *SECTIONS, *KEYS]
    near = [alone[last]] if last in alone else difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    near = near or [alone[key] for key in difflib.get_close_matches(last, alone, n=1, cutoff=0.5)]
    fix = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join([*HEAD, *SECTIONS, _COLLECTIVES])}"
    return refusal(f"{path}: unknown key {name!r}; {fix}")


# -- writing


def lines_of(values: Values) -> Iterator[str]:
    """Yield the lines of a profile's file."""
    yield _HEADER
    for name in HEAD:
        if name in values:
            yield f"{name} = {_quote(values[name])}"
    if "speeds" in values:
        yield f"speeds = {values['speeds']}  # of computing on each node"
    for section, keys in SECTIONS.items():
        content = values.get(section, {})
        if not content:
            continue
        yield f"\n[{section}]"
        for key, of in keys.items():  # tables are the last keys of their sections
            if key in content and of.table:
                yield f"\n[{section}.{key}]  # {of.meaning}; by the size of square matrices"
                yield from (f"{precision} = {_table(of, table)}" for precision, table in content[key].items())
            elif key in content:
                text = content[key] if of.unit is TEXT else of.unit.text(content[key])
                value = text if text.isdigit() and of.unit is not TEXT else _quote(text)
                yield f"{f'{key} = {value}':34}  # {of.meaning}"
    tables: dict[str, dict[str, dict[int, float]]] = {}
    for (operation, algorithm, ranks, nodes, memory, nbytes), seconds in values.get(_COLLECTIVES, {}).items():
        place = f"{ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}, {memory}"
        tables.setdefault(f"{operation} {algorithm}", {}).setdefault(place, {})[nbytes] = seconds
    if tables:
        yield "\n# seconds of a collective by bytes of a rank's whole vector"
    for name, places in tables.items():
        yield f"\n[{_COLLECTIVES}.{_quote(name)}]"
        for place, times in places.items():
            cells = (f"{_quote(BYTES.text(n))} = {_quote(SECONDS.text(times[n]))}" for n in sorted(times))
            yield f"{_quote(place)} = {{ {', '.join(cells)} }}"


def _table(of: MachineKey, table: Mapping[int, float]) -> str:
    if 0 in table:
        return _quote(of.unit.text(table[0]))
    return f"{{ {', '.join(f'{n} = {_quote(of.unit.text(table[n]))}' for n in sorted(table))} }}"


def _quote(text: object) -> str:
    return '"{}"'.format(printable(text, None).replace("\\", "\\\\").replace('"', '\\"'))
