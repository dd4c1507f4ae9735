"""The module `torch.pretend`, with the functions of `torch.cuda` that PyTorch and the package use.

A device is a number, a torch.device or a name; None is the calling thread's current device.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

_library = torch.ops.pretend
_Device = torch.device | str | int | None


@dataclass(frozen=True)
class DeviceProperties:
    """Properties of a device; `uuid` identifies it on the machine, whatever its number in this process."""

    name: str
    uuid: str
    total_memory: int


def _number(device: _Device) -> int:
    if isinstance(device, int):
        return device
    parsed = torch.device(device) if device is not None else None
    return current_device() if parsed is None or parsed.index is None else parsed.index


# -- which devices there are


def is_available() -> bool:
    return device_count() > 0


def device_count() -> int:
    """Return the number of visible devices: 0 while hidden, else that of PRETEND_VISIBLE_DEVICES, or two."""
    return _library.device_count() if _library.is_shown() else 0


_initialized = True  # torch.utils.checkpoint asks for it: without, it does not restore the generators


def is_initialized() -> bool:
    return True


def init() -> None: ...


_lazy_init = init


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: _Device) -> None:
    torch.accelerator.set_device_index(_number(device))


def device(device: _Device = None) -> AbstractContextManager[object]:
    """Make the device the current one within this context; `torch.load` uses it."""
    return torch.accelerator.device_index(_number(device))


def get_device_name(device: _Device = None) -> str:
    """Return "Pretend N", where N is the device's number on the machine."""
    return f"Pretend {_library.physical_number(_number(device))}"


def get_device_properties(device: _Device = None) -> DeviceProperties:
    number = _number(device)
    total = torch.accelerator.get_memory_info(number)[1]
    return DeviceProperties(get_device_name(number), f"pretend-{_library.physical_number(number)}", total)


def _is_in_bad_fork() -> bool:
    return _library.in_forked_child()


# -- random numbers


def manual_seed(seed: int) -> None:
    _library.manual_seed(current_device(), seed)


def manual_seed_all(seed: int) -> None:
    for number in range(device_count()):
        _library.manual_seed(number, seed)


def initial_seed() -> int:
    return _library.initial_seed(current_device())


def get_rng_state(device: _Device = None) -> torch.Tensor:
    return _library.get_rng_state(_number(device))


def set_rng_state(state: torch.Tensor, device: _Device = None) -> None:
    _library.set_rng_state(_number(device), state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


# -- memory of other processes and of the host


def export_memory(storage: torch.UntypedStorage) -> list[int]:
    """Return the numbers that `import_memory` needs in another process of this user and machine; JSON can hold them.

    They name this process' memory file by its entry in /proc, and the offset in it. Writes to the memory must be
    complete (synchronized) before the other process reads; freed memory reads as NaN there, too.
    """
    number = _library.physical_number(storage.device.index)
    return [*_library.export_memory(storage.data_ptr(), storage.nbytes()), number]


def import_memory(handle: Sequence[int]) -> torch.UntypedStorage:
    """Return another process' storage on its device, or on the current device if that one is not visible.

    It stays mapped until this process ends.

    Raises:
        RuntimeError: The other process has ended, or belongs to another user.
    """
    *where, physical = handle
    here = [number for number in range(device_count()) if _library.physical_number(number) == physical]
    with torch.accelerator.device_index(here[0] if here else current_device()):
        return _library.import_memory(where).untyped_storage()


def host_register(address: int, nbytes: int) -> None:
    """Pin host memory: `is_pinned()` is true, and copies run while the host goes on."""
    _library.host_register(address, nbytes)


def host_unregister(address: int) -> None:
    """Undo `host_register` of the same address."""
    _library.host_unregister(address)


def host_alias(address: int) -> int:
    """Return the address at which the CPU may access a tensor's `address`, for libraries that take device memory."""
    return _library.host_alias(address)


# -- how late and how slow the devices are


def set_late_ms(milliseconds: int) -> None:
    """Set the delay of work that nothing waits for; -1: it never runs. Default: PRETEND_LATE_MS, or -1."""
    _library.set_late_ms(milliseconds)


def set_copy_bandwidth(bytes_per_second: float) -> None:
    """Set the bandwidth of copies between host and device; 0: unlimited. Default: PRETEND_COPY_BANDWIDTH.

    Copies take time on their streams, which run beside each other and the host. The host sleeps while it waits. With
    `set_late_ms(0)` the copying itself runs in the background, too.
    """
    _library.set_copy_bandwidth(bytes_per_second)


def set_kernel_ms(milliseconds: float) -> None:
    """Set the time that each operation takes on its stream. Default: PRETEND_KERNEL_MS, or 0."""
    _library.set_kernel_ms(milliseconds)


def unfinished(device: _Device = None) -> int:
    """Return the number of tasks that the device's streams have not done or the host has not waited for."""
    return _library.unfinished(_number(device))
