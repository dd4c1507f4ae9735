"""Saving while training goes on: a copy of the state in host memory, and the thread that writes it.

The copy is one pass over the state, into memory that is kept from save to save. Of a device's state it is the one copy
to the host, into pinned memory, and the only wait for the device. Whatever goes wrong in the thread
is agreed upon by all ranks there, and raised where the training calls next.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from mpitrain.checkpoint.files import Part
from mpitrain.errors import refusal

if TYPE_CHECKING:
    from mpitrain.comm import Communicator

_ALIGNMENT = 64  # bytes
_ROUNDING = 2 << 20  # bytes; a huge page


class Snapshot:
    """Host memory for the parts of one rank, which grows when it must."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pinned = False

    def copy(self, parts: Sequence[Part]) -> list[Part]:
        """Copy parts into this memory, where they are valid until the next copy."""
        nbytes = needed(parts)
        away = [part.data for part in parts if not part.data.is_cpu]
        if nbytes > self._memory.numel() or (away and not self._pinned):
            self._make_room(nbytes, away)
        copies, begin = [], 0
        for part in parts:
            end = begin + part.data.numel() * part.data.element_size()
            into = self._memory[begin:end].view(part.data.dtype)
            into.copy_(part.data, non_blocking=True)
            copies.append(replace(part, data=into))
            begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        if away:
            from mpitrain.comm.memory.device import recorded

            recorded(away[0].device).synchronize()
        return copies

    def _make_room(self, nbytes: int, away: Sequence[torch.Tensor]) -> None:
        """Get memory; away: what of the parts lies on a device, so that the memory is to be pinned."""
        self._memory = torch.empty(0, dtype=torch.uint8)  # give the old memory back first
        self._pinned = bool(away)
        if away:
            from mpitrain.comm.memory.device import pinned

            self._memory = pinned((nbytes,), torch.uint8, away[0].device)
        else:  # in huge pages: touching small ones costs more than the copy
            block = mmap.mmap(-1, -(-nbytes // _ROUNDING) * _ROUNDING, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            block.madvise(mmap.MADV_HUGEPAGE)
            self._memory = torch.frombuffer(block, dtype=torch.uint8)


def needed(parts: Sequence[Part]) -> int:
    """How many bytes a snapshot of these parts takes."""
    return sum(-(-p.data.numel() * p.data.element_size() // _ALIGNMENT) * _ALIGNMENT for p in parts)


def require_threads(comm: Communicator) -> None:
    """Raise InputError where MPI cannot be called from the thread that saves."""
    from mpitrain.comm.inspection import mpi_facts

    level = mpi_facts(comm).thread_level
    if level != "MULTIPLE":
        raise refusal(
            f"checkpoint.background needs an MPI with THREAD_MULTIPLE, this one gives {level}; use another MPI or "
            "set checkpoint.background = false"
        )


class BackgroundTask:
    """A function that runs in a thread.

    Args:
        function: The function, which is called at once.

    Attributes:
        error: What it has raised, if anything.
        seconds: That it took, once it has ended.
    """

    def __init__(self, function: Callable[[], object]) -> None:
        self.error: BaseException | None = None
        self.seconds = 0.0
        self._function = function
        self._thread = threading.Thread(target=self._run, name="mpitrain-checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        began = time.perf_counter()
        try:
            self._function()
        except BaseException as error:  # raised by wait()
            self.error = error
        self.seconds = time.perf_counter() - began

    def wait(self) -> None:
        """Return when the function has ended. Raises what it raised."""
        self._thread.join()
        if self.error is not None:
            raise self.error
