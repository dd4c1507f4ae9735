"""`torch.pretend`: what `torch.cuda` is for CUDA devices, as far as PyTorch and the package ask for it.

A device is given as a number, a torch.device or a name; None is the calling thread's current one.
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
    """What a device is: `uuid` tells it from the others of the machine, whichever number it has in this process."""

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
    """How many devices PyTorch sees: none while they are hidden; else as PRETEND_VISIBLE_DEVICES says, or two."""
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
    """A context in which the device is the current one; `torch.load` uses it."""
    return torch.accelerator.device_index(_number(device))


def get_device_name(device: _Device = None) -> str:
    """ "Pretend N", N its number on the machine."""
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
    """What `import_memory` needs in another process of this user and machine, in numbers that JSON can hold.

    It names this process' memory file by its entry in /proc, and the place therein. What is written to the memory must
    be done (synchronized) before the other process is told to read; freed memory reads as NaN there, too.
    """
    number = _library.physical_number(storage.device.index)
    return [*_library.export_memory(storage.data_ptr(), storage.nbytes()), number]


def import_memory(told: Sequence[int]) -> torch.UntypedStorage:
    """Another process' storage, on the device that it lies on, else, where that is not visible, on the current one.

    It stays mapped until this process ends.

    Raises:
        RuntimeError: The other process has ended, or belongs to another user.
    """
    *where, physical = told
    here = [number for number in range(device_count()) if _library.physical_number(number) == physical]
    with torch.accelerator.device_index(here[0] if here else current_device()):
        return _library.import_memory(where).untyped_storage()


def host_register(address: int, nbytes: int) -> None:
    """Make memory of the host pinned: `is_pinned()`, and copied from and to while the host goes on."""
    _library.host_register(address, nbytes)


def host_unregister(address: int) -> None:
    """Undo `host_register` of the same address."""
    _library.host_unregister(address)


def host_alias(address: int) -> int:
    """The address at which the CPU may touch what a tensor has at `address`: for a library that takes device memory."""
    return _library.host_alias(address)


# -- how late and how slow the devices are


def set_late_ms(milliseconds: int) -> None:
    """How late work runs that nothing waits for; -1: never. PRETEND_LATE_MS in the environment; -1 at first."""
    _library.set_late_ms(milliseconds)


def set_copy_bandwidth(bytes_per_second: float) -> None:
    """Copies between host and device take that long of their stream's time; 0: none. PRETEND_COPY_BANDWIDTH.

    Streams pass their time beside each other and beside the host, which sleeps where it waits. With `set_late_ms(0)`
    the copying itself is done in the background, too.
    """
    _library.set_copy_bandwidth(bytes_per_second)


def set_kernel_ms(milliseconds: float) -> None:
    """Each operation on the device takes that long of its stream's time. PRETEND_KERNEL_MS; 0 at first."""
    _library.set_kernel_ms(milliseconds)


def unfinished(device: _Device = None) -> int:
    """How many tasks the device's streams have not done, or the host has not waited for."""
    return _library.unfinished(_number(device))
