"""The keys of `machine.toml`: what each one means, its unit, and what it is where a file leaves it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mpitrain.comm.programs.simulate import Machine
from mpitrain.planner.units import (
    BIT_RATE,
    BYTE_RATE,
    BYTES,
    COUNT,
    ELEMENTS,
    FRACTION,
    OPERATIONS,
    SECONDS,
    Unit,
)

PRECISIONS = ("fp32", "bf16", "fp16")
_DEFAULT = Machine()
_CORE = 50e9  # operations per second: of a core of a node whose devices compute
_UPDATE_BYTES = 28  # of an element in AdamW: parameter, gradient, two moments are read, all but the gradient written
_CORE_CALL, _DEVICE_CALL = 1e-6, 5e-6  # seconds of starting a matrix product
_CORE_SIZES, _DEVICE_SIZES = (64, 256, 1024), (256, 1024, 4096, 8192)


@dataclass(frozen=True)
class MachineKey:
    """A key of a section.

    Attributes:
        unit: Of its value; None: text.
        attribute: Of `MachineProfile`, of its `links` or of its `device` that it sets.
        meaning: For the comment behind it.
        factor: What the value is multiplied with to be the attribute.
        table: Whether it is a section of its own: by precision a value, or a table of values by size.
    """

    unit: Unit | None
    attribute: str
    meaning: str
    factor: float = 1.0
    table: bool = False


HEAD = {
    "name": MachineKey(None, "name", "for people"),
    "origin": MachineKey(None, "origin", "where the figures come from"),
}
SECTIONS: Mapping[str, Mapping[str, MachineKey]] = {
    "node": {
        "cores": MachineKey(COUNT, "cores", "that ranks run on"),
        "seen_cores": MachineKey(COUNT, "seen_cores", "that they believe to have, where others compute on them too"),
        "memory": MachineKey(BYTES, "memory", "of a node"),
        "memory_bandwidth": MachineKey(
            BYTE_RATE, "links.memory_rate", "reads and writes of all cores at once, as STREAM counts them", 0.5
        ),
    },
    "core": {
        "threads": MachineKey(FRACTION, "threads", "of a core's speed that each further thread of a rank adds"),
        "update_rate": MachineKey(ELEMENTS, "update_rate", "AdamW of one core, while all others do the same"),
        "copy_rate": MachineKey(BYTE_RATE, "links.copy_rate", "copied by one core"),
        "add_rate": MachineKey(BYTE_RATE, "links.reduce_rate", "bytes of the sum of two vectors, added by one core"),
        "matrix": MachineKey(OPERATIONS, "matrix", "one core, while all others do the same", table=True),
    },
    "rank": {
        "overhead": MachineKey(SECONDS, "overhead", "of a training step, beside blocks, messages and the update"),
        "step": MachineKey(SECONDS, "links.step", "of starting one step of a collective"),
        "process": MachineKey(BYTES, "process", "that trains next to nothing"),
    },
    "network": {
        "latency": MachineKey(SECONDS, "links.latency", "of a message between nodes"),
        "bandwidth": MachineKey(BIT_RATE, "links.bandwidth", "of a node's links together, one way"),
        "eager": MachineKey(BYTES, "links.eager", "a longer message is announced and asked for: three latencies"),
    },
    "inside": {
        "latency": MachineKey(SECONDS, "links.local_latency", "of a message inside a node"),
        "bandwidth": MachineKey(BYTE_RATE, "links.local_bandwidth", "of one message inside a node"),
        "barrier": MachineKey(SECONDS, "links.fence", "of the ranks of a node, for each doubling of them"),
    },
    "folder": {
        "rank_write_rate": MachineKey(BYTE_RATE, "rank_write_rate", "one rank alone, into the run folder, to the disk"),
        "write_rate": MachineKey(BYTE_RATE, "write_rate", "all ranks of one node"),
        "write_limit": MachineKey(BYTE_RATE, "write_limit", "all nodes together"),
    },
    "device": {
        "kind": MachineKey(None, "device.kind", "as PyTorch names it"),
        "count": MachineKey(COUNT, "device.count", "of a node"),
        "memory": MachineKey(BYTES, "device.memory", "of one"),
        "memory_bandwidth": MachineKey(BYTE_RATE, "device.memory_rate", "of its own memory, reads and writes together"),
        "host_bandwidth": MachineKey(BYTE_RATE, "device.host_rate", "to or from the host, one way"),
        "link_bandwidth": MachineKey(
            BYTE_RATE, "device.link_rate", "between two of a node; left out: through the host"
        ),
        "link_latency": MachineKey(SECONDS, "device.link_latency", "of such a message, or of a copy to the host"),
        "matrix": MachineKey(OPERATIONS, "device.matrix", "of one", table=True),
    },
}
REQUIRED = ("node.cores", "node.memory", "node.memory_bandwidth")
REQUIRED_OF_DEVICE = ("device.kind", "device.count", "device.memory", "device.memory_bandwidth", "device.matrix")

Table = Mapping[int, float]  # operations per second by the size of square matrices; by 0: at the best size


def derived(given: Mapping[str, float]) -> dict[str, float]:
    """What the figures that a file leaves out are, from those that every file gives.

    Args:
        given: By "section.key", in the file's units; those required are there.

    Returns:
        By "section.key" all that are numbers, those given included; those of a device only where there is one.
    """
    bandwidth, cores = given["node.memory_bandwidth"], given["node.cores"]
    copy = given.get("core.copy_rate", min(_DEFAULT.copy_rate, bandwidth / 2))
    write = given.get("folder.write_rate", given.get("folder.rank_write_rate", 1e9))
    found = {
        "node.seen_cores": cores,
        "core.threads": 0.9,
        "core.update_rate": min(2 * copy, bandwidth / cores) / _UPDATE_BYTES,
        "core.copy_rate": copy,
        "core.add_rate": 0.8 * copy,
        "rank.overhead": 2e-3,
        "rank.step": _DEFAULT.step,
        "rank.process": 360 << 20,
        "network.latency": _DEFAULT.latency,
        "network.bandwidth": _DEFAULT.bandwidth,
        "network.eager": _DEFAULT.eager,
        "inside.latency": min(_DEFAULT.local_latency, given.get("network.latency", 1.0)),
        "inside.bandwidth": 0.6 * copy,
        "inside.barrier": _DEFAULT.fence,
        "folder.rank_write_rate": min(5e8, write),
        "folder.write_rate": write,
        "folder.write_limit": max(1e11, write),
    }
    if "device.count" in given:
        found |= {"device.host_bandwidth": 20e9, "device.link_bandwidth": 0.0, "device.link_latency": 1e-5}
    return found | dict(given)


def core_matrix(given: Mapping[str, Table]) -> dict[str, list[tuple[int, float]]]:
    """Speed of a core by precision and size; one not given is reckoned to be as fast as fp32."""
    best = given.get("fp32") or given.get("bf16") or given.get("fp16") or {0: _CORE}
    return {name: _sized(given.get(name) or best, _CORE_SIZES, _CORE_CALL, 0.0) for name in PRECISIONS}


def device_matrix(given: Mapping[str, Table], memory_rate: float) -> dict[str, list[tuple[int, float]]]:
    """Speed of a device by precision and size.

    Of the 16-bit precisions one is as fast as the other; fp32 is reckoned an eighth of them, or they as fast as fp32,
    where one of these is all that is given.

    Args:
        given: What the file gives.
        memory_rate: Bytes per second of the device's memory, which small matrices wait for.
    """
    half = given.get("bf16") or given.get("fp16")
    fp32 = given.get("fp32") or {size: rate / 8 for size, rate in (half or {}).items()}
    tables = {"fp32": fp32} | {name: given.get(name) or half or fp32 for name in ("bf16", "fp16")}
    per_byte = {name: (4 if name == "fp32" else 2) / memory_rate for name in tables}
    return {name: _sized(table, _DEVICE_SIZES, _DEVICE_CALL, per_byte[name]) for name, table in tables.items()}


def _sized(table: Table, sizes: tuple[int, ...], call: float, per_element: float) -> list[tuple[int, float]]:
    """The table; or, of one figure for the best size, one by size: what is small waits for the call and for memory.

    Args:
        table: As given.
        sizes: For which to say how fast they are.
        call: Seconds of starting a product.
        per_element: Seconds in which memory brings an element.
    """
    if 0 not in table:
        return sorted(table.items())
    return [(n, 2.0 * n**3 / (call + max(2.0 * n**3 / table[0], 3 * n * n * per_element))) for n in sizes]
