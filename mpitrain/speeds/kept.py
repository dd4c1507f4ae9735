"""Measured profile of this kind of machine: as values of machine.toml, and stored for `parallel.auto`.

It is stored beside the machine's tuning table.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from mpitrain.comm import Communicator
from mpitrain.comm.job.topology import processor_name, this_machine
from mpitrain.comm.tuning import table_path
from mpitrain.errors import InputError
from mpitrain.monitor import peak_memory_bytes
from mpitrain.monitor.memory import node_memory_bytes
from mpitrain.planner.machine import SECTIONS, Values, merge, read_values, write_values
from mpitrain.speeds import cores, links
from mpitrain.speeds.cores import COPY, COPY_ALONE, PRECISIONS, THREADS, UPDATE, Effort
from mpitrain.storage.text import counted

_LEAST_SHARE = 0.2  # least share of a core that a thread adds; a lower result means that other work disturbed it


def values_from(results: dict[int, Any], quick: bool) -> Values:
    """Return the measurements as values of machine.toml, without entries for what was not measured.

    Args:
        results: Results by number of ranks.
        quick: True for a quick run, whose figures are marked as inaccurate.
    """
    first = next(of for of in results.values() if "cores" in of)
    cores, nodes = first["cores"]["cores"], len(set(first["nodes"]))
    how = "quickly, so the figures are inaccurate" if quick else f"at {' and '.join(map(str, results))} ranks"
    values: Values = {
        "name": f"{first['machine'] or 'machine'}, {counted(cores, 'core')}",
        "origin": f"measured {time.strftime('%Y-%m-%d')} on {counted(nodes, 'node')}, {how}",
        "node": {"cores": cores, "memory": first["memory"]},
        "core": dict(_core_values(first["cores"])),
        "rank": {key: first[key] for key in ("overhead", "process") if key in first},
        "folder": first.get("folder", {}),
    }
    values["node"]["memory_bandwidth"] = 2 * cores * first["cores"]["copied"] / first["cores"]["seconds"][COPY]
    _add_links(values, results, cores)
    if device := first.get("device"):
        values["device"] = {key: device[key] for key in SECTIONS["device"] if key in device}
        matrix = device["matrix"].items()  # JSON has turned the sizes into text
        values["device"]["matrix"] = {name: {int(n): rate for n, rate in table.items()} for name, table in matrix}
    values["collectives"] = {tuple(row): s for of in results.values() for *row, s in of.get("collectives", [])}
    return values


def _core_values(measurements: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    seconds = measurements["seconds"]
    if measurements["threads"] > 1 and f"fp32 {measurements['threaded']}" in seconds:
        alone, threaded = seconds[f"fp32 {measurements['threaded']}"], seconds[THREADS]
        share = (alone / threaded - 1) / (measurements["threads"] - 1)
        if share >= _LEAST_SHARE:
            yield "threads", min(1.0, share)
    yield "update_rate", measurements["updated"] / seconds[UPDATE]
    yield "copy_rate", measurements["copied"] / seconds[COPY_ALONE]
    tables: dict[str, dict[int, float]] = {}
    for precision in PRECISIONS:
        sizes = (int(name.split()[1]) for name in seconds if name.startswith(precision))
        tables[precision] = {n: 2.0 * n**3 / seconds[f"{precision} {n}"] for n in sizes}
    yield "matrix", tables


def _add_links(values: Values, results: dict[int, Any], cores: int) -> None:
    """Add the measured speeds of messages to the values of a profile.

    They are from the measurement with the most ranks that had a core each; if there is none, from the one with the
    fewest ranks.
    """
    counts = {ranks: max(map(of["nodes"].count, of["nodes"])) for ranks, of in results.items() if "links" in of}
    if not counts:
        return
    fitting = [ranks for ranks, local in counts.items() if local <= cores]
    chosen = max(fitting) if fitting else min(counts)
    links = results[chosen]["links"]
    sections = ["rank"]
    if counts[chosen] > 1:
        sections += ["core", "inside"]
    if len(set(results[chosen]["nodes"])) > 1:
        sections.append("network")
    for section in sections:
        for key, of in SECTIONS[section].items():
            holder, _, attribute = of.attribute.rpartition(".")
            if holder == "links" and attribute in links:
                values.setdefault(section, {})[key] = links[attribute] / of.factor


def profile_path() -> Path:
    """Return the path of the stored profile of this kind of machine."""
    machine = this_machine()
    return table_path(machine).with_name(f"machine-{machine}.toml")


def load_profile() -> Values:
    """Return the stored profile; empty if there is no readable file."""
    path = profile_path()
    try:
        return read_values(str(path)) if path.is_file() else {}
    except InputError:
        return {}


def store_profile(values: Values) -> Path | None:
    """Store a profile in place of the previous one.

    Returns:
        Path of the file, or None if the folder cannot be written.
    """
    path = profile_path()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_values(values, path)
        return path
    return None


def has_sections_for(values: Values, world: Communicator, on_device: bool) -> bool:
    """Return whether a profile has all sections needed to plan for these ranks.

    Args:
        values: Profile.
        world: All ranks.
        on_device: True if the ranks compute on accelerators.
    """
    needed = ["core", *(["device"] if on_device else [])]
    needed += ["inside"] if world.size > world.num_nodes else []
    needed += ["network"] if world.num_nodes > 1 else []
    return all(section in values for section in needed)


def measure_nodes(world: Communicator, effort: Effort, kind: str) -> dict[str, Any]:
    """Return the speeds and sizes of a node that do not depend on messages. Collective.

    Args:
        world: All ranks.
        effort: Amount of work to measure.
        kind: Kind of devices, as in run.device.
    """
    return {
        "cores": cores.measure(world, effort),
        "machine": processor_name(),
        "memory": node_memory_bytes(),
        "device": cores.measure_device(world, kind, effort == "quick"),
    }


def measure_and_store(world: Communicator, on_device: bool, kind: str) -> Values:
    """Return a profile with a short measurement of these ranks' nodes; rank 0 stores it. Collective.

    On rank 0 the measurement is merged into the stored profile.

    Args:
        world: All ranks.
        on_device: If true, the ranks compute on accelerators, which are then measured.
        kind: Kind of devices, as in run.device.
    """
    results: dict[str, Any] = {"nodes": list(world.nodes), "process": peak_memory_bytes()}
    results |= measure_nodes(world, "short", kind if on_device else "cpu")
    if world.size > 1:
        results["links"] = links.measure(world, quick=False)
    values = values_from({world.size: results}, quick=False)
    values["origin"] = f"measured {time.strftime('%Y-%m-%d')} at the start of a job"
    if world.rank == 0:
        values = merge(load_profile(), values)
        store_profile(values)
    return values
