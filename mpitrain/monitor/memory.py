"""Current and peak memory of this process in bytes.

Host figures count pages, including the pages of a node-shared window that this process has touched. A sum over the
ranks of a node therefore counts shared pages several times.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mpitrain.storage import proc

if TYPE_CHECKING:
    import torch


def node_memory_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of memory that all processes of this node share: the machine's, or a lower cgroup limit.

    A batch system or a container may set a limit for this process's cgroup or one above it; the lowest limit counts.

    Args:
        root: Folder that contains proc/ and sys/.
    """
    limits = [int(line.split()[1]) << 10 for line in _lines(root / "proc/meminfo") if line.startswith("MemTotal:")]
    limits += [limit for limit, _ in _cgroups(root)]
    return min(filter(None, limits), default=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def out_of_memory_kills(root: Path = Path("/")) -> dict[str, int]:
    """Return how many processes the kernel has killed because memory was full, by the place of the counter.

    The places are `node`, and the path of the cgroup with the lowest limit. Version 1 of cgroups counts a process only
    in its own cgroup, which is then a further place.

    Args:
        root: Folder that contains proc/ and sys/.
    """
    files, cgroups = {"node": root / "proc/vmstat"}, _cgroups(root)
    if limits := [limit for limit, _ in cgroups if limit]:
        _, limiting = next(each for each in reversed(cgroups) if each[0] == min(limits))
        counters = {limiting, cgroups[0][1] if limiting.name == "memory.oom_control" else limiting}
        files |= {str(file.parent.relative_to(root)): file for file in counters}
    lines = [(place, line.split()) for place, file in files.items() for line in _lines(file)]
    return {place: int(words[1]) for place, words in lines if words[0] == "oom_kill"}


def _cgroups(root: Path) -> list[tuple[int, Path]]:
    """Return the memory limit (0: none) and the file of events of this process's cgroup and of those above it."""
    cgroups = []
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0":
            top, limit_file, events_file = root / "sys/fs/cgroup", "memory.max", "memory.events"
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            limit_file, events_file = "memory.limit_in_bytes", "memory.oom_control"
        else:
            continue
        # a container may show a path as seen from outside, of which only the top exists here
        inside = top / path.lstrip("/")
        for folder in (inside, *inside.parents):
            if folder.is_relative_to(top):
                limit = next(iter(_lines(folder / limit_file)), "")
                cgroups.append((int(limit) if limit.isdigit() else 0, folder / events_file))
    return cgroups


def _lines(path: Path) -> list[str]:
    """Return the lines of a file, or an empty list if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def peak_memory_bytes(device: torch.device | None = None) -> int:
    """Return the peak memory of this process in bytes.

    Args:
        device: Device that the process computes on. On an accelerator the tensors there are counted, otherwise resident
            host memory.
    """
    if device is not None:
        from mpitrain.comm.memory import device as devices

        if devices.is_accelerator(device):
            return devices.peak_memory_bytes(device)
    # getrusage's figure survives exec: a small rank started by a large launcher would report the launcher's peak
    if (nbytes := proc.nbytes_of("self/status", "VmHWM")) is not None:
        return nbytes
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB on Linux


def memory_bytes() -> int:
    """Return the resident host memory of this process in bytes, or its peak where the system has no /proc."""
    nbytes = proc.nbytes_of("self/status", "VmRSS")
    return peak_memory_bytes() if nbytes is None else nbytes


def open_resident() -> tuple[Callable[[], int], Callable[[], None]]:
    """Return a function that returns `memory_bytes` in about 2 us, and a function that closes its file."""
    try:
        file, page = os.open(proc.PROC / "self/statm", os.O_RDONLY), os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return memory_bytes, lambda: None
    return lambda: int(os.pread(file, 64, 0).split(b" ", 2)[1]) * page, partial(os.close, file)


def host_memory_bytes() -> int:
    """Return the host memory of this process in bytes, with a page shared by n processes counted as 1/n.

    The sum over the processes of a node is the memory that they use together. Where the system has no /proc, this is
    `memory_bytes`.
    """
    nbytes = proc.nbytes_of("self/smaps_rollup", "Pss")  # takes about 10 ms for each GB
    return memory_bytes() if nbytes is None else nbytes
