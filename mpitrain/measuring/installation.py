"""Report on the MPI installation and the nodes of a job, with a verdict on each line (`mpitrain.doctor`)."""

from __future__ import annotations

import os
import platform
import shutil
import socket
from collections import Counter
from collections.abc import Sequence
from functools import partial

import h5py
import numpy
import torch

from mpitrain.comm import Communicator
from mpitrain.comm.collectives.transports.choice import Way
from mpitrain.comm.inspection import bandwidth, launcher_name, library_path, reads_neighbours, thread_level
from mpitrain.comm.job import launcher
from mpitrain.comm.job.mpi import MPI4PY
from mpitrain.comm.job.topology import cores_of, groups_sharing_cores, library_name, siblings
from mpitrain.comm.memory import device as hardware
from mpitrain.comm.selection import Setting
from mpitrain.comm.tuning import describe_rules
from mpitrain.early import VERSION
from mpitrain.measuring.findings import BAD, OK, WARN, Line
from mpitrain.monitor.memory import node_memory_bytes
from mpitrain.speeds.timing import Contender, measure_in_turns
from mpitrain.storage.disk import SHARED_MEMORY
from mpitrain.storage.text import counted

MIB = 1 << 20
_CMA = "MPIR_CVAR_CH4_CMA_ENABLE"  # MPICH's setting for messages through process_vm_readv
_ONE_THREAD = "operations cannot run during computation; use an MPI with THREAD_MULTIPLE"
_UNMEASURED = "built-in; measured by python -m mpitrain.doctor --tune"
_RANKS_SHOWN, _SHOWN = 8, 12  # number of ranks whose devices are listed, and of last characters of a device's identity


def report(world: Communicator) -> list[Line]:
    """Return all lines. Collective."""
    lines = [*software(world), *placement(world), *memory(world), *devices(world)]
    reached = reach(world)
    if any(verdict == BAD for verdict, _, _ in reached):
        return [*lines, *reached, *algorithms(world)]
    return [*lines, *reached, *speed(world), *algorithms(world)]


def software(world: Communicator) -> list[Line]:
    """Return lines about libraries and whether all ranks have the same versions. Collective."""
    library, level, missing = library_name(), thread_level(), launcher.missing_for_faults()
    versions = ", ".join(f"{module.__name__} {module.__version__}" for module in (torch, h5py, numpy))
    seen = world.all_gather_object([library, MPI4PY, versions, platform.python_version()])
    lines: list[Line] = [
        (OK, "MPI", f"{library} ({library_path()}), started by {launcher_name()}"),
        (OK, "thread level", level) if level == "MULTIPLE" else (BAD, "thread level", f"{level}: {_ONE_THREAD}"),
        (OK, "mpi4py", MPI4PY),
        (OK, "python", f"{platform.python_version()}, {VERSION}, {versions}"),
        (OK, "fault tolerance", f"ULFM is off: elastic.mode needs {missing}" if missing else "ULFM is on"),
    ]
    different = [rank for rank, values in enumerate(seen) if values != seen[0]]
    text = f"{world.size} ranks have the same versions"
    if different:
        text = f"ranks {different[:8]} have other versions than rank 0: {seen[different[0]]}"
        text += "; use one environment on all nodes"
    return [*lines, (BAD if different else OK, "same versions", text)]


def placement(world: Communicator) -> list[Line]:
    """Return lines about ranks, nodes, cores and threads. Collective."""
    per_host = Counter(world.all_gather_object(socket.gethostname()))
    core_of, threads = siblings(), os.sched_getaffinity(0)
    cores, machine = cores_of(threads, core_of), cores_of(range(os.cpu_count() or 1), core_of)
    everyone = world.all_gather_object([world.node, sorted(cores), torch.get_num_threads(), len(machine), len(threads)])
    shown = ", ".join(f"{name} x {count}" for name, count in list(per_host.items())[:4])
    shown += f" and {len(per_host) - 4} more" if len(per_host) > 4 else ""
    lines: list[Line] = [(OK, "ranks", f"{world.size} on {counted(world.num_nodes, 'node')}: {shown}")]
    if len(per_host) > world.num_nodes:
        lines.append((WARN, "nodes", f"{len(per_host)} host names but {world.num_nodes} groups that share memory"))
    crowded: list[str] = []
    binding: set[int] = set()
    for node in range(world.num_nodes):
        here = [values for values in everyone if values[0] == node]
        binding |= {len(values[1]) for values in here}
        for ranks, available in groups_sharing_cores([values[1] for values in here]):
            requested = sum(here[rank][2] for rank in ranks)
            if requested > len(available):
                crowded.append(f"node {node}: {requested} threads on {counted(len(available), 'core')}")
    bound, computing = _range(binding), _range({values[2] for values in everyone})
    hardware_threads = {values[4] for values in everyone}
    more = f" ({_range(hardware_threads)} hardware threads)" if hardware_threads != binding else ""
    lines.append((OK, "cores", f"each rank may use {bound} of {everyone[0][3]}{more}; threads per rank: {computing}"))
    text = "no node has more threads than cores"
    if crowded:
        text = f"{'; '.join(crowded[:4])}: ranks will take turns; set OMP_NUM_THREADS or start fewer ranks"
    return [*lines, (WARN if crowded else OK, "threads", text)]


def memory(world: Communicator) -> list[Line]:
    """Return lines about /dev/shm and the memory limit of each node. Collective."""
    try:
        shared = shutil.disk_usage(SHARED_MEMORY)[::2]  # total, free
    except OSError:
        shared = 0, 0
    everyone = world.all_gather_object([shared, node_memory_bytes()])
    total, free = (min(values[0][i] for values in everyone) for i in range(2))
    text, low = f"{free // MIB:,} of {total // MIB:,} MiB free on the smallest node", free < 256 * MIB
    if low:
        text += (
            ": arenas will be private, which is slower; mount -o remount,size=50% /dev/shm, in containers --shm-size"
        )
    smallest = f"{min(values[1] for values in everyone) // MIB:,} MiB on the smallest node"
    return [(WARN if low else OK, SHARED_MEMORY, text), (OK, "memory", smallest)]


def devices(world: Communicator) -> list[Line]:
    """Return lines about the ranks' devices, and the ways to send their memory. Collective."""
    kind = hardware.accelerator()
    names = [hardware.name(torch.device(kind, number)) for number in range(hardware.count(kind))] if kind else []
    mine = hardware.of_rank("auto", world.local_rank)
    # equal for ranks that share the device; a device without a unique identity is assumed not to be shared
    identity = hardware.identity(mine) if hardware.is_accelerator(mine) else ""
    if identity == str(mine) and hardware.count(mine.type) == 1:
        identity += f" of rank {world.rank}"
    everyone = world.all_gather_object([world.node, kind, names, identity, str(mine)])
    kinds = {values[1] for values in everyone}
    if kinds == {""}:
        return [(OK, "device", "no accelerator: the ranks compute on CPUs")]
    if len(kinds) > 1:
        without = [rank for rank, values in enumerate(everyone) if values[1] != everyone[0][1]]
        text = f"rank 0 has {kind or 'no accelerator'}, ranks {without[:8]} have another kind or none"
        return [(BAD, "device", f"{text}; request the same devices for all ranks of the job")]
    seen = ", ".join(f"{number} x {name}" for name, number in Counter(names).items())
    numbers = _range({len(values[2]) for values in everyone})
    shared = max(Counter((values[0], values[3]) for values in everyone).values())
    text = "each rank has its own" if shared == 1 else f"up to {shared} ranks take turns on one; start fewer ranks"
    taken = [f"{rank} {values[4]} ({values[3][-_SHOWN:]})" for rank, values in enumerate(everyone[:_RANKS_SHOWN])]
    text += f": {', '.join(taken)}{' …' if len(everyone) > _RANKS_SHOWN else ''}"
    lines: list[Line] = [
        (OK, "device", f"{kind}: a rank sees {numbers}; rank 0: {seen}"),
        (OK if shared == 1 else WARN, "devices of ranks", text),
    ]
    ways = world.device_ways(mine)
    lines += [(OK, "device memory", f"{way.name}: {way.obstacle or _speeds(way)}") for way in ways]
    alone = "one rank sends nothing; start several ranks to see the choice"
    choice = f"comm.device auto uses {_choice(ways, world.size)}" if ways else alone
    return [*lines, (OK, "device memory", choice)]


def _speeds(way: Way) -> str:
    """Return a text with the measured all_reduce times of this way, if there are any."""
    rates = [f"{size // 1024:,} KiB in {seconds * 1e3:.2f} ms" for size, seconds in way.seconds.items()]
    return f"possible; all_reduce of {', '.join(rates)}" if rates else "possible"


def _choice(ways: Sequence[Way], ranks: int) -> str:
    """Return a text with the way that is used for each size, and for reductions of three or more ranks."""
    measured, first = [way for way in ways if way.seconds], next(way.name for way in ways if not way.obstacle)
    if not measured:
        return first
    best = {size: min(measured, key=lambda way: way.seconds[size]).name for size in measured[0].seconds}
    near = [f"{name} near {size // 1024:,} KiB" for size, name in best.items()]
    text = ", ".join(near) if len(set(best.values())) > 1 else next(iter(best.values()))
    return text if ranks == 2 else f"{text}; for reductions {first}"


def reach(world: Communicator) -> list[Line]:
    """Return a line on whether the ranks of a node can read each other's memory. Collective."""
    if world.num_nodes == world.size:
        return []
    if reads_neighbours(world):
        return [(OK, "ranks of a node", "read each other's memory directly")]
    forbidden = "the system forbids reading other processes' memory (process_vm_readv)"
    if "MPICH" in world.library and os.environ.get(_CMA) != "0":  # large messages would fail
        return [(BAD, "ranks of a node", f"{forbidden}, which this MPI needs: export {_CMA}=0")]
    fix = "other tensors are summed through shared memory, which is slower; in containers use --cap-add=SYS_PTRACE"
    return [(WARN, "ranks of a node", f"{forbidden}: {fix}")]


def speed(world: Communicator) -> list[Line]:
    """Measure the bandwidth of messages and the time of all-reduces in about a second; return the report's lines.

    Collective.
    """
    if world.size == 1:
        return [(OK, "bandwidth", "one rank, nothing to measure")]
    lines: list[Line] = []
    for name, near in (("inside a node", True), ("between nodes", False)):
        other = next((r for r in range(1, world.size) if (world.nodes[r] == world.nodes[0]) is near), None)
        if other is not None:
            rate = bandwidth(world, other, 0.4)
            lines.append((OK, "bandwidth", f"{rate / 1e9:.2f} GB/s {name} (rank 0 to {other}, 4 MiB messages)"))
    arena = world.arena(MIB)  # 4 MiB of fp32
    reduce = partial(world.all_reduce, arena.tensor)
    calls = {name: Contender(partial(reduce, algorithm=name), single=True) for name in ("mpi", "auto")}
    library, ours = (times.best for times in measure_in_turns(world, calls, repeats=5).values())
    arena.free()
    verdict = OK if ours < 1.5 * library else WARN
    lines.append((verdict, "all_reduce", f"4 MiB: {ours * 1e3:.2f} ms, the MPI library's own {library * 1e3:.2f} ms"))
    return lines


def algorithms(world: Communicator) -> list[Line]:
    """Return lines on the algorithms that "auto" selects for all_reduce at each size, and their origin."""
    if world.size == 1:
        return []
    lines: list[Line] = []
    table = world.process.tuning
    for memory, words in (("arena", "in an arena"), ("private", "ordinary tensors")):
        place = Setting(0, 0, world.nodes, memory, world.process.spare_cores < 0).place
        origin = table.origin if table.is_measured("all_reduce", place, world.size) else _UNMEASURED
        rules = describe_rules(table.rules("all_reduce", place, world.size))
        lines.append((OK, "algorithms", f"all_reduce, {words}: {rules} ({origin})"))
    return lines


def _range(values: set[int]) -> str:
    return f"{min(values)} to {max(values)}" if len(values) > 1 else f"{max(values)}"
