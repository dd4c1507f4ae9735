"""The device of a rank: who shares it, threads, model and batches on it, and what to say when it is full."""

from __future__ import annotations

import os
import re
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from mpitrain.comm import Communicator
from mpitrain.comm.memory import device
from mpitrain.data.on_device import mapped
from mpitrain.errors import InputError, MpitrainError, refusal
from mpitrain.storage.text import short
from mpitrain.trainer.folder import together


class DeviceFull(MpitrainError):
    """A device has not the memory that was asked of it."""


def choose(kind: str, world: Communicator) -> tuple[torch.device, str]:
    """Choose this rank's device, and make it the current one of its kind. Collective.

    Args:
        kind: As `run.device` says it.
        world: All ranks.

    Returns:
        The device; and those of all ranks, for people: "CPU", or "2 x NVIDIA H100 (2 ranks share each)".

    Raises:
        InputError: On all ranks, where any of them has no device of the kind, or where `auto` finds other kinds on
            some of them.
    """
    host = socket.gethostname()

    def found() -> torch.device:
        try:
            return device.of_rank(kind, world.local_rank)
        except InputError as error:
            raise InputError(f"run.device on host {host}: {error}; choose another run.device, or auto") from None

    chosen = together(world, found)
    device.use(chosen)
    told = world.all_gather_object([chosen.type, host, world.node, device.identity(chosen), device.name(chosen)])
    hosts: dict[str, list[str]] = {}
    for of, where, *_ in told:
        hosts.setdefault(of, []).append(where)
    if len(hosts) > 1:
        shown = []
        for of, where in sorted((of, sorted(set(where))) for of, where in hosts.items()):
            more = f" and {len(where) - 3} more" if len(where) > 3 else ""
            shown.append(f"{of} on host {', '.join(where[:3])}{more}")
        raise refusal(f"run.device {kind} finds {', '.join(shown)}; set run.device to one kind that all hosts have")
    return chosen, _text(chosen, [tuple(each) for _, _, *each in told])


def _text(chosen: torch.device, ranks: list[tuple[Any, ...]]) -> str:
    """ranks: of each its node, and its device's identity and name."""
    if not device.is_accelerator(chosen):
        return device.name(chosen)
    sharing = Counter((node, identity) for node, identity, _ in ranks)
    names = Counter({(node, identity): name for node, identity, name in ranks}.values())
    text = ", ".join(f"{count} x {name}" for name, count in names.items())
    most = max(sharing.values())
    if most > 1:
        text += f" ({most} ranks share each)" if min(sharing.values()) == most else f" (up to {most} ranks share one)"
    return text


# -- what is on it


def found_on(module: nn.Module, kind: str, world: Communicator) -> torch.device:
    """Return where a module of the user's is to compute: where it is, or on a device of the kind. Collective.

    Raises:
        InputError: It is on several devices, or on one of another kind, or there is none of the kind.
    """
    found = {t.device for t in (*module.parameters(), *module.buffers())} or {device.CPU}
    if len(found) > 1:
        raise refusal(f"the model is on {' and '.join(sorted(map(str, found)))}; move it to one device")
    (on,) = found
    if kind not in ("auto", on.type):
        if device.is_accelerator(on):
            raise refusal(f"run.device is {kind}, and the model is on {on}; move it, or leave run.device out")
        on, _ = choose(kind, world)
    device.use(on)
    return on


def moved(value: Any, to: torch.device) -> Any:
    """A batch on the device: a tensor, or tuples, lists and mappings of them; what is there already, as it is.

    The batch may be changed when this returns. The host waits for copies at the most, not for what the device computes.
    """
    if not device.is_accelerator(to):
        return value
    return mapped(lambda t: t if device.is_accelerator(t.device) else _copied(t, to), value)


def _copied(tensor: torch.Tensor, to: torch.device) -> torch.Tensor:
    if not tensor.is_pinned():  # then the driver has read it when it returns
        return tensor.to(to, non_blocking=True)
    beside, own = device.new_stream(to), device.current_stream(to)
    with beside:
        there = tensor.to(to, non_blocking=True)
    device.recorded(to, beside).synchronize()  # so that nobody else has to wait for it
    there.record_stream(own)
    return there


def set_threads(world: Communicator, reproducible: bool) -> None:
    """A thread for each core that this rank has for itself, unless OMP_NUM_THREADS says otherwise."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1 if reproducible else world.process.cores.each)


# -- when it is full


@contextmanager
def full_told(on: torch.device) -> Iterator[None]:
    """Turn an error inside, that the device's memory is used up, into a DeviceFull that says what to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        asked = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", str(error))
        more = f"{asked[1]} more" if asked else "what was asked"
        taken, total = short(device.memory_bytes(on)), short(device.total_memory_bytes(on))
        raise DeviceFull(
            f"device {on} ({device.name(on)}) has no room for {more}: its rank's tensors take {taken}B of {total}B; "
            "use a smaller train.microbatch, train.recompute, parallel.zero, parallel.offload host, or more ranks"
        ) from error
