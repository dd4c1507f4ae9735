"""What an accelerator does: matrix products, copies in its memory, to it and between two of a node."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from mpitrain.comm import Communicator
from mpitrain.comm.memory import device as hardware
from mpitrain.speeds.cores import PRECISIONS, product

_SIZES, _QUICK_SIZES = (256, 512, 1024, 2048, 4096, 8192), (64, 256)


def measure(world: Communicator, kind: str, quick: bool) -> dict[str, Any] | None:
    """Speeds of rank 0's device while all devices do the same; None where there are none. Collective.

    Ranks that share a device leave it to the first of them.

    Args:
        world: The ranks.
        kind: As for run.device.
        quick: Whether little is measured.

    Raises:
        InputError: There is no such device.
    """
    device = hardware.of_rank(kind, world.local_rank)
    if not hardware.is_accelerator(device):
        return None
    hardware.use(device)
    place = hardware.identity(device)
    if place == str(device) and hardware.count(device.type) == 1:  # it has no name, and is a rank's only one
        place = f"rank {world.rank}"
    places = world.all_gather_object([world.node, place])
    found = None
    if places.index(places[world.rank]) == world.rank:
        found = _speeds(device, quick)
    world.barrier()
    seen = hardware.count(device.type)
    of_node = len({tuple(place) for place in places if place[0] == world.nodes[0]})
    return world.all_gather_object(None if found is None else found | {"count": max(seen, of_node)})[0]


def _speeds(device: torch.device, quick: bool) -> dict[str, Any]:
    sizes, numel = (_QUICK_SIZES, 1 << 18) if quick else (_SIZES, 64 << 20)
    seconds = 0.02 if quick else 0.2
    found: dict[str, Any] = {"kind": device.type, "name": hardware.name(device)}
    found["memory"] = hardware.total_memory_bytes(device)
    source, dest = (torch.ones(numel, device=device) for _ in range(2))
    found["memory_bandwidth"] = 2 * 4 * numel / _each(device, lambda: dest.copy_(source), seconds)
    host = hardware.pinned([numel], torch.float32, device)
    found["host_bandwidth"] = 4 * numel / _each(device, lambda: dest.copy_(host, non_blocking=True), seconds)
    found["matrix"] = {
        precision: {n: 2.0 * n**3 / _each(device, product(precision, n, device), seconds) for n in sizes}
        for precision in PRECISIONS
    }
    others = [n for n in range(hardware.count(device.type)) if n != device.index]
    if others:
        there = torch.ones(numel, device=torch.device(device.type, others[0]))
        tiny, few = there[:2], source[:2]
        found["link_bandwidth"] = 4 * numel / _each(device, lambda: dest.copy_(there), seconds)
        found["link_latency"] = _each(device, lambda: few.copy_(tiny), seconds)
    return found


def _each(device: torch.device, call: Callable[[], object], seconds: float) -> float:
    """Seconds of a call among many that the device works off one after the other, for about so many seconds."""
    count, took = 1, 0.0
    while took < seconds / 4:
        began = time.perf_counter()
        for _ in range(count):
            call()
        hardware.synchronize(device)
        took = time.perf_counter() - began
        per = took / count
        count *= 4
    count = max(1, round(seconds / per))
    began = time.perf_counter()
    for _ in range(count):
        call()
    hardware.synchronize(device)
    return (time.perf_counter() - began) / count
