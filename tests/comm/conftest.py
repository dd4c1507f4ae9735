"""Fixtures that run a test in host memory, and on the simulated accelerator with each way of carrying device memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support import DEVICE, shown_device
from ways import WAYS, take_device_addresses

from mpitrain.comm import Communicator
from mpitrain.comm.collectives.transports.choice import accepts_addresses

_communicators: dict[str, Communicator] = {}


@pytest.fixture(params=["cpu", *WAYS])
def way(request: pytest.FixtureRequest) -> str:
    """Return "cpu", or the way in which device memory is carried."""
    return request.param


@pytest.fixture
def device(way: str, request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Yield the device on which the test's tensors lie."""
    if way == "cpu":
        yield torch.device("cpu")
        return
    with shown_device() as shown:
        yield shown


@pytest.fixture
def comm(world: Communicator, way: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Communicator:
    """Return a communicator of all ranks; each way of carrying device memory has one of its own, made once."""
    if way == "cpu":
        return world
    memory = world.process.device_memory
    if way == "mpi" and DEVICE != "pretend" and not accepts_addresses(DEVICE):
        pytest.skip(f"this MPI does not accept addresses of {DEVICE}")
    monkeypatch.setattr(memory, "way", way)
    monkeypatch.setattr(memory, "device", None)
    monkeypatch.setattr(memory, "mpi_reads", None)
    monkeypatch.setattr(world.process.arenas, "maps_devices", way == "peer")
    if way == "mpi" and DEVICE == "pretend":
        take_device_addresses(monkeypatch)
    if way not in _communicators:
        _communicators[way] = world.split(0)
    return _communicators[way]
