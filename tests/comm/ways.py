"""Ways of carrying device memory that can be tested on the simulated accelerator."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch

from mpitrain.comm.memory import buffers

WAYS = ("staged", "mpi", "peer")


def take_device_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make MPI read and write the simulated accelerator's memory by its device addresses."""

    def translated(memory_at: Callable[[int, int], object]) -> Callable[[int, int], object]:
        def at(address: int, nbytes: int) -> object:
            with suppress(RuntimeError):  # it is host memory
                address = torch.pretend.host_alias(address)
            return memory_at(address, nbytes)

        return at

    monkeypatch.setenv("MPITRAIN_DEVICE_AWARE", "1")
    monkeypatch.setattr(buffers, "memory_at", translated(buffers.memory_at))
