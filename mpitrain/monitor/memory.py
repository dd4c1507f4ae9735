"""Bytes of memory this process holds and held at most.

Host figures count pages, so they include the pages of a node-shared window that this process has touched: the sum
over the ranks of a node counts those several times.
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
    """Return the memory that processes here may have between them: the machine's, or less by a limit of a cgroup.

    The limit is the least of this process's cgroup and those around it, which a batch system or a container sets.

    Args:
        root: Folder above proc/ and sys/.
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
        inside = top / path.lstrip("/")  # of a container perhaps seen from outside, where only the top is there
        for folder in (inside, *inside.parents):
            if folder.is_relative_to(top):
                limits += [int(limit) for limit in _lines(folder / name) if limit.isdigit()]
    return min(filter(None, limits), default=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _lines(path: Path) -> list[str]:
    """Return the lines of a file; none of one that cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def peak_memory_bytes(device: torch.device | None = None) -> int:
    """The most this process has held, in bytes.

    Args:
        device: On an accelerator, what its tensors took there counts, else resident host memory.
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
    """What this process holds in host memory now, in bytes. Where the system does not tell (no /proc), the peak."""
    nbytes = proc.nbytes_of("self/status", "VmRSS")
    return peak_memory_bytes() if nbytes is None else nbytes


def host_memory_bytes() -> int:
    """Resident host memory, of which pages that n processes share count as 1/n: the sum over a node is what they take.

    Where the system does not tell (no /proc), what `memory_bytes` says.
    """
    nbytes = proc.nbytes_of("self/smaps_rollup", "Pss")  # takes about 10 ms for each GB
    return memory_bytes() if nbytes is None else nbytes
