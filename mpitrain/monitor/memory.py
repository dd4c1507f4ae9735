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

if TYPE_CHECKING:
    import torch

STATUS = Path("/proc/self/status")
SHARED = Path("/proc/self/smaps_rollup")  # takes about 10 ms for each GB


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
    if (kibibytes := _status("VmHWM")) is not None:
        return kibibytes * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB on Linux


def memory_bytes(device: torch.device | None = None) -> int:
    """What this process holds now, in bytes. Where the system does not tell (no /proc), the peak.

    Args:
        device: On an accelerator, what its tensors take there counts, else resident host memory.
    """
    if device is not None:
        from mpitrain.comm.memory import device as devices

        if devices.is_accelerator(device):
            return devices.memory_bytes(device)
    if (kibibytes := _status("VmRSS")) is not None:
        return kibibytes * 1024
    return peak_memory_bytes()


def host_memory_bytes() -> int:
    """Resident host memory, of which pages that n processes share count as 1/n: the sum over a node is what they take.

    Where the system does not tell (no /proc), what `memory_bytes` says.
    """
    try:
        for line in SHARED.read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return memory_bytes()


def _status(name: str) -> int | None:
    """A figure of /proc/self/status in KiB; None where there is none."""
    if not os.path.exists(STATUS):
        return None
    for line in STATUS.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    return None
