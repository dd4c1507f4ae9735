"""Choice of the way in which device memory is carried, and calls to NCCL."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from mpi4py import MPI
from reference import assert_equal, expected_reduction, values
from ways import take_device_addresses

from mpitrain.comm import Communicator, carry_device_memory
from mpitrain.comm.collectives.transports.by_programs import DeviceCall, Peer, Staged, Transport
from mpitrain.comm.collectives.transports.choice import Nccl, Transports
from mpitrain.errors import InputError

on_pretend = pytest.mark.parametrize("way", ["staged"], indirect=True)  # makes the pretend device available


@pytest.fixture
def fresh(world, device, monkeypatch) -> Iterator[Communicator]:
    """Yield a communicator of all ranks that has not carried device memory yet."""
    memory = world.process.device_memory
    for name, value in (("way", "auto"), ("device", None), ("mpi_reads", None)):
        monkeypatch.setattr(memory, name, value)
    monkeypatch.setattr(world.process.arenas, "maps_devices", True)
    communicator = world.split(0)
    yield communicator
    communicator.free()


@pytest.mark.simulated
@on_pretend
@pytest.mark.ranks(2)
def test_auto_measures_the_transports_and_all_ranks_choose_the_same_one(fresh, device, monkeypatch):
    take_device_addresses(monkeypatch)
    ways = {way.name: way for way in fresh.device_ways(device)}
    assert set(ways) == {"staged", "mpi", "peer", "nccl"}
    assert "nccl4py is not installed" in ways["nccl"].obstacle and not ways["nccl"].seconds
    assert all(not ways[name].obstacle and len(ways[name].seconds) == 3 for name in ("staged", "mpi", "peer"))
    assert len(set(map(str, fresh.all_gather_object([way.seconds for way in ways.values()])))) == 1
    for numel in (7, 100_000):
        x = values(numel, torch.float32, fresh.rank).to(device)
        fresh.all_reduce(x)
        assert_equal(
            x, expected_reduction("sum", [values(numel, torch.float32, r) for r in range(fresh.size)]), fresh.size
        )


@pytest.mark.simulated
@on_pretend
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("fast", ["staged", "peer"])
def test_measured_times_choose_no_other_order_of_a_sum(fresh, device, monkeypatch, fast):
    sizes = (1 << 16, 1 << 20, 1 << 24)
    seconds = {name: dict.fromkeys(sizes, 1.0 + (name != fast)) for name in ("staged", "peer")}
    monkeypatch.setattr(Transports, "_measure", lambda transports: seconds)
    performed = list[tuple[str, str]]()
    for kind in (Staged, Peer):

        def perform(transport: Transport, call: DeviceCall, original=kind.perform) -> None:
            performed.append((call.operation.name, transport.name))
            original(transport, call)

        monkeypatch.setattr(kind, "perform", perform)
    x = torch.ones(6000, device=device)
    fresh.all_reduce(x)
    fresh.reduce_scatter(x[: 6000 // fresh.size], x.clone())
    fresh.broadcast(x, 1)
    sums = "peer" if fresh.size > 2 else fast
    assert performed == [("all_reduce", sums), ("reduce_scatter", sums), ("broadcast", fast)]


@pytest.mark.simulated
@on_pretend
@pytest.mark.ranks(2)
def test_wrongly_mapped_device_memory_is_not_used(fresh, device, monkeypatch):
    """A mapping can show other memory if a device has another number in the other process."""

    def import_wrong_memory(handle: list[int]) -> torch.UntypedStorage:
        return torch.zeros(handle[4], dtype=torch.uint8, device=device).untyped_storage()

    if fresh.rank == 1:
        monkeypatch.setattr(torch.pretend, "import_memory", import_wrong_memory)
    (peer,) = (way for way in fresh.device_ways(device) if way.name == "peer")
    assert peer.obstacle == "the ranks cannot map each other's device memory"


@pytest.mark.simulated
@on_pretend
@pytest.mark.ranks(2)
@pytest.mark.parametrize(("transport", "why"), [("mpi", "accepts no addresses"), ("nccl", "nccl4py is not installed")])
def test_an_impossible_transport_is_refused_with_the_reason(fresh, device, transport, why):
    carry_device_memory(transport)
    with pytest.raises(InputError, match=rf"^comm.device {transport} is not possible: .*{why}.*; use auto$"):
        fresh.all_reduce(torch.ones(3, device=device))
    with pytest.raises(InputError, match=r"^comm\.device 'tcp' is not known; use auto, mpi, staged, peer, nccl"):
        carry_device_memory("tcp")


_MPI = {"sum": MPI.SUM, "avg": MPI.SUM, "product": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}


class _Id(bytes):
    @staticmethod
    def from_bytes(raw: bytes) -> bytes:
        return raw


class Library:
    """NCCL's bindings (nccl4py) as far as they are called: the same signatures, carried by MPI.

    It shows that calls are made with the right tensors on the caller's stream; it cannot test NCCL itself.
    """

    SUM, AVG, PROD, MIN, MAX = "sum", "avg", "product", "min", "max"

    def __init__(self, ranks: int, rank: int, uid: bytes) -> None:
        assert uid == bytes(range(128))
        self.comm = MPI.COMM_WORLD.Dup()
        assert (self.comm.size, self.comm.rank) == (ranks, rank)

    def _on_host(self, tensor: torch.Tensor, stream: int) -> np.ndarray:
        current = torch.accelerator.current_stream()
        assert stream == current.native_handle
        current.synchronize()
        return tensor.cpu().numpy()

    def allreduce(self, send: torch.Tensor, receive: torch.Tensor, op: str, *, stream: int) -> None:
        data = self._on_host(send, stream)
        self.comm.Allreduce(MPI.IN_PLACE, data, _MPI[op])
        receive.copy_(torch.from_numpy(data / self.comm.size if op == "avg" else data))

    def reduce(self, send: torch.Tensor, receive: torch.Tensor, op: str, root: int, *, stream: int) -> None:
        data = self._on_host(send, stream)
        total = np.empty_like(data)
        self.comm.Reduce(data, total, _MPI[op], root)
        if self.comm.rank == root:
            receive.copy_(torch.from_numpy(total))

    def broadcast(self, send: torch.Tensor, receive: torch.Tensor, root: int, *, stream: int) -> None:
        data = self._on_host(send, stream)
        self.comm.Bcast(data, root)
        receive.copy_(torch.from_numpy(data))

    def allgather(self, send: torch.Tensor, receive: torch.Tensor, *, stream: int) -> None:
        data = self._on_host(send, stream)
        out = np.empty(data.size * self.comm.size, data.dtype)
        self.comm.Allgather(data, out)
        receive.copy_(torch.from_numpy(out))

    def reduce_scatter(self, send: torch.Tensor, receive: torch.Tensor, op: str, *, stream: int) -> None:
        data = self._on_host(send, stream)
        out = np.empty(data.size // self.comm.size, data.dtype)
        self.comm.Reduce_scatter_block(data, out, _MPI[op])
        receive.copy_(torch.from_numpy(out))

    def destroy(self) -> None:
        self.comm.Free()


@pytest.mark.simulated
@on_pretend
@pytest.mark.ranks(2, 3)
def test_nccl_is_called_with_the_right_tensors(fresh, device, monkeypatch):
    library = types.ModuleType("nccl.core")
    for name in ("SUM", "AVG", "PROD", "MIN", "MAX"):
        setattr(library, name, getattr(Library, name))
    library.get_unique_id, library.UniqueId = lambda: bytes(range(128)), _Id
    library.Communicator = types.SimpleNamespace(init=Library)
    monkeypatch.setitem(sys.modules, "nccl", types.ModuleType("nccl"))
    monkeypatch.setitem(sys.modules, "nccl.core", library)
    carry_device_memory("nccl")
    if fresh.size > 2:  # there are only two devices
        with pytest.raises(InputError, match="not possible: several ranks share a device"):
            fresh.all_reduce(torch.ones(3, device=device))
        return
    performed = list[str]()
    original = Nccl.perform

    def perform(self: Nccl, call: DeviceCall) -> None:
        performed.append(call.operation.name)
        original(self, call)

    monkeypatch.setattr(Nccl, "perform", perform)
    rank, size, numel = fresh.rank, fresh.size, 1000
    everyone = [values(numel, torch.float32, r) for r in range(size)]
    for op in ("sum", "avg", "max"):
        x = everyone[rank].to(device)
        fresh.all_reduce(x, op)
        assert_equal(x, expected_reduction(op, everyone), size)
    x, out = everyone[rank].to(device), torch.empty(numel * size, device=device)
    fresh.all_gather(out, x)
    assert_equal(out, torch.cat(everyone))
    block = torch.empty(numel // size, device=device)
    fresh.reduce_scatter(block, x)
    assert_equal(block, expected_reduction("sum", everyone).chunk(size)[rank], size)
    fresh.reduce(x, 1)
    assert_equal(x, expected_reduction("sum", everyone) if rank == 1 else everyone[rank], size)
    fresh.broadcast(x, 1)
    assert_equal(x, expected_reduction("sum", everyone), size)
    assert performed == ["all_reduce"] * 3 + ["all_gather", "reduce_scatter", "reduce", "broadcast"]
    flags = torch.tensor([rank == 0, True, False], device=device)  # bool is logical here: not NCCL's sum
    fresh.all_reduce(flags)
    assert flags.tolist() == [True, True, False] and performed[-1] == "broadcast"
