"""The measured profile of this kind of machine, kept beside its tuning table and used by `parallel.auto`."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from mpitrain.comm import Communicator
from mpitrain.comm.job.topology import processor_name, this_machine
from mpitrain.comm.plain_mpi import PlainMPI
from mpitrain.comm.selection.tuning import table_path
from mpitrain.errors import InputError
from mpitrain.monitor import peak_memory_bytes
from mpitrain.monitor.memory import node_memory_bytes
from mpitrain.planner.machine_file import Values, merged, read_values, write_values
from mpitrain.speeds import cores, device, links
from mpitrain.speeds.values import values_from


def profile_path() -> Path:
    """Where the profile of this kind of machine is kept."""
    machine = this_machine()
    return table_path(machine).with_name(f"machine-{machine}.toml")


def kept() -> Values:
    """What is kept; nothing where there is no file that can be read."""
    path = profile_path()
    try:
        return read_values(str(path)) if path.is_file() else {}
    except InputError:
        return {}


def keep(values: Values) -> Path | None:
    """Keep a profile instead of the one before; its path, or None where the folder cannot be written."""
    path = profile_path()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_values(values, path)
        return path
    return None


def tells(values: Values, world: Communicator, on_device: bool) -> bool:
    """Whether values say all that is needed to plan for these ranks."""
    needed = ["core", *(["device"] if on_device else [])]
    needed += ["inside"] if world.size > world.num_nodes else []
    needed += ["network"] if world.num_nodes > 1 else []
    return all(section in values for section in needed)


def measured(world: Communicator, on_device: bool, kind: str) -> Values:
    """A short measurement of the nodes of these ranks, added to what is kept; rank 0 keeps it. Collective.

    Args:
        world: The ranks.
        on_device: Whether they compute on accelerators, which are measured then.
        kind: Of these, as for run.device.
    """
    found: dict[str, Any] = {"nodes": list(world.nodes), "process": peak_memory_bytes()}
    found["cores"] = cores.measure(world, "short")
    found["machine"] = processor_name()
    found["memory"] = node_memory_bytes()
    if on_device:
        found["device"] = device.measure(world, kind, False)
    if world.size > 1:
        plain = PlainMPI(world)
        found["links"] = links.measure(world, plain, False)
        plain.free()
    values = values_from({world.size: found}, quick=False)
    values["origin"] = f"measured {time.strftime('%Y-%m-%d')} at the start of a job"
    if world.rank == 0:
        values = merged(kept(), values)
        keep(values)
    return values
