"""Current and peak memory of this process in bytes.

Host figures count pages, including the pages of a node-shared window that this process has touched. A sum over the
ranks of a node therefore counts shared pages several times.
"""

from __future__ import annotations

import os
import resource
import sys
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
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0":
            top, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        inside = top / path.lstrip(
            "/"
        )  # a container may show a path as seen from outside, of which only the top exists here
        for folder in (inside, *inside.parents):
            if folder.is_relative_to(top):
                limits += [int(limit) for limit in _lines(folder / name) if limit.isdigit()]
    return min(filter(None, limits), default=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


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


def host_memory_bytes() -> int:
    """Return the host memory of this process in bytes, with a page shared by n processes counted as 1/n.

    The sum over the processes of a node is the memory that they use together. Where the system has no /proc, this is
    `memory_bytes`.
    """
    nbytes = proc.nbytes_of("self/smaps_rollup", "Pss")  # takes about 10 ms for each GB
    return memory_bytes() if nbytes is None else nbytes
