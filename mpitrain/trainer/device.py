"""Device of a rank: its choice, sharing between ranks, threads, moving batches to it, and errors of full memory."""

from __future__ import annotations

import os
import resource
import socket
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from mpitrain.comm import Communicator
from mpitrain.comm.memory import device
from mpitrain.data.folders import agree_on_errors
from mpitrain.data.on_device import map_tensors
from mpitrain.errors import InputError, MpitrainError, refusal
from mpitrain.monitor.memory import host_memory_bytes, node_memory_bytes
from mpitrain.planner.out_of_memory import ADVICE, categories_text, failed_allocation
from mpitrain.storage.text import bytes_text
from mpitrain.trainer.engine import Engine
from mpitrain.trainer.memory import measure_rank


class OutOfMemory(MpitrainError):
    """Error of a host or device whose free memory is too small."""


def choose_device(kind: str, world: Communicator) -> tuple[torch.device, str]:
    """Choose this rank's device, and make it the current one of its kind. Collective.

    Args:
        kind: Value of `run.device`.
        world: All ranks.

    Returns:
        The device, and a description of all ranks' devices: "CPU", or "2 x NVIDIA H100 (2 ranks share each)".

    Raises:
        InputError: On all ranks, if a rank has no device of this kind, or `auto` finds different kinds on different
            ranks.
    """
    host = socket.gethostname()

    def find_device() -> torch.device:
        try:
            return device.of_rank(kind, world.local_rank)
        except InputError as error:
            raise InputError(f"run.device on host {host}: {error}; choose another run.device, or auto") from None

    chosen = agree_on_errors(world, find_device)
    device.use(chosen)
    devices = world.all_gather_object([chosen.type, host, world.node, device.identity(chosen), device.name(chosen)])
    hosts: dict[str, list[str]] = {}
    for device_type, where, *_ in devices:
        hosts.setdefault(device_type, []).append(where)
    if len(hosts) > 1:
        shown = []
        for device_type, where in sorted((device_type, sorted(set(where))) for device_type, where in hosts.items()):
            more = f" and {len(where) - 3} more" if len(where) > 3 else ""
            shown.append(f"{device_type} on host {', '.join(where[:3])}{more}")
        raise refusal(f"run.device {kind} found {', '.join(shown)}; set run.device to a kind that all hosts have")
    return chosen, _describe(chosen, [tuple(each) for _, _, *each in devices])


def _describe(chosen: torch.device, ranks: list[tuple[Any, ...]]) -> str:
    """Describe the devices of all ranks. ranks: node, device identity and device name of each rank."""
    if not device.is_accelerator(chosen):
        return device.name(chosen)
    sharing = Counter((node, identity) for node, identity, _ in ranks)
    names = Counter({(node, identity): name for node, identity, name in ranks}.values())
    text = ", ".join(f"{count} x {name}" for name, count in names.items())
    most = max(sharing.values())
    if most > 1:
        text += f" ({most} ranks share each)" if min(sharing.values()) == most else f" (up to {most} ranks share one)"
    return text


# -- model and batches on the device


def device_of_module(module: nn.Module, kind: str, world: Communicator) -> torch.device:
    """Return the device on which a user's module computes: its own, or one of the kind `kind`. Collective.

    Args:
        module: The user's module.
        kind: Value of `run.device`.
        world: All ranks.

    Raises:
        InputError: If the module is on several devices or on an accelerator of another kind, or no device of this kind
            exists.
    """
    devices = {t.device for t in (*module.parameters(), *module.buffers())} or {device.CPU}
    if len(devices) > 1:
        raise refusal(f"the model is on several devices: {', '.join(sorted(map(str, devices)))}; move it to one device")
    (on,) = devices
    if kind not in ("auto", on.type):
        if device.is_accelerator(on):
            raise refusal(f"run.device is {kind}, but the model is on {on}; move the model, or remove run.device")
        on, _ = choose_device(kind, world)
    device.use(on)
    return on


def to_device(value: Any, target: torch.device) -> Any:
    """Return a batch whose tensors are on the device. Tensors that are on an accelerator already are not copied.

    The host waits at most for copies, not for computation on the device. After the return, the caller may change the
    original batch.

    Args:
        value: A tensor, or nested tuples, lists and mappings of tensors.
        target: The device.
    """
    if not device.is_accelerator(target):
        return value
    return map_tensors(lambda t: t if device.is_accelerator(t.device) else _copy_to(t, target), value)


def _copy_to(tensor: torch.Tensor, to: torch.device) -> torch.Tensor:
    if not tensor.is_pinned():  # then the driver has read the tensor before the call returns
        return tensor.to(to, non_blocking=True)
    copy_stream, compute_stream = device.new_stream(to), device.current_stream(to)
    with copy_stream:
        copy = tensor.to(to, non_blocking=True)
    device.record_event(to, copy_stream).synchronize()  # so that later uses need not wait for the copy
    copy.record_stream(compute_stream)
    return copy


def memory_limit(on: torch.device, world: Communicator) -> float:
    """Return the bytes that this rank may use: its share of its node's memory, or of its device's. Collective.

    Args:
        on: Device on which the rank computes.
        world: All ranks.
    """
    if not device.is_accelerator(on):
        return node_memory_bytes() / world.local_size
    sharing = -(-world.local_size // device.count(on.type))
    if not world.played:
        mine = [world.node, device.identity(on)]
        sharing = world.all_gather_object(mine).count(mine)
    return device.total_memory_bytes(on) / sharing


def set_threads(world: Communicator, reproducible: bool) -> None:
    """Set the number of torch's threads, unless OMP_NUM_THREADS is set.

    Args:
        world: Ranks of the job; each gets the cores that it does not share with another rank.
        reproducible: If true, use one thread.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1 if reproducible else world.process.cores.per_rank)


# -- errors when memory is full


@contextmanager
def explain_out_of_memory(
    on: torch.device, engine: Callable[[], Engine | None] = lambda: None, advice: Callable[[], str] = lambda: ADVICE
) -> Iterator[None]:
    """Convert an error of a failed allocation into an OutOfMemory that says what filled the memory, and what helps.

    Args:
        on: Device on which the rank computes.
        engine: Function that returns the engine whose tensors fill the memory, once there is one.
        advice: Function that returns the settings which would help, with the bytes that each would save.
    """
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if not (allocation := failed_allocation(error)):
            raise
        filled = _describe_memory(on, engine())
        traceback.clear_frames(error.__traceback__)  # frees the tensors of the functions that were left
        helps = ADVICE
        with suppress(Exception):  # the advice needs memory, too
            helps = advice()
        raise OutOfMemory(f"{filled % allocation}; {helps}") from error


def _describe_memory(on: torch.device, engine: Engine | None) -> str:
    """Return the place, limit and content of the memory that is full, with a %s for the failed allocation."""
    content = categories_text(measure_rank(engine.memory(), on)) if engine is not None else ""
    if device.is_accelerator(on):
        taken, total = device.memory_bytes(on), device.total_memory_bytes(on)
        where, limit = f"device {on} ({device.name(on)}) of host {socket.gethostname()}", bytes_text(total)
        taken_text = f"this rank's tensors take {bytes_text(taken)}"
    else:
        where, limit = f"host {socket.gethostname()}", bytes_text(node_memory_bytes())
        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        limit += f" (and {bytes_text(soft)} of addresses, ulimit -v)" if soft != resource.RLIM_INFINITY else ""
        taken_text = f"this rank takes {bytes_text(host_memory_bytes())}"
    return f"{where} is out of memory: %s, and {taken_text} of {limit}{': ' * bool(content)}{content}"
