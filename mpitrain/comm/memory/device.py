"""Devices: the only module that distinguishes between kinds of devices.

A rank computes on one device, the CPU or an accelerator. All other modules use this one for streams, events, pinned
memory, memory statistics and random generators. It calls `torch.accelerator` if the function is the same for all kinds,
and `torch.get_device_module` otherwise. So CUDA, ROCm (which PyTorch calls "cuda"), XPU and accelerators from outside
of PyTorch run the same code.

An accelerator executes the work on its streams while the host continues. Events order the two, and streams among each
other:

    event = record_event(device)        marks all work that the caller has queued on the device so far
    stream.wait_event(event)        later work on that stream starts after it
    event.synchronize()             the host waits for it, and then sees data that were copied to the host
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch

from mpitrain.errors import InputError
from mpitrain.storage import proc

CPU = torch.device("cpu")
_HOST = ("cpu", "meta")  # devices that have neither streams nor memory of their own


# -- which devices there are


def accelerator() -> str:
    """Return the kind of this process's accelerator, as PyTorch names it ("cuda", "xpu", …); "" if it has none."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return device.type if device is not None else ""


def is_accelerator(device: torch.device) -> bool:
    """Return True if the device has its own memory and streams."""
    return device.type not in _HOST


def used_accelerator() -> torch.device | None:
    """Return the current accelerator if this process has used it, else None; this does not initialize it."""
    device = torch.accelerator.current_accelerator()
    if device is None or not getattr(_module(device), "is_initialized", bool)():
        return None
    return torch.device(device.type, torch.accelerator.current_device_index())


def count(kind: str) -> int:
    """Return the number of devices of a kind that this process sees."""
    return torch.accelerator.device_count() if kind == accelerator() else 0


def of_rank(kind: str, local_rank: int) -> torch.device:
    """Return the device that a rank computes on.

    If the launcher made only one device visible, this is the one; otherwise devices are assigned by local rank, modulo
    their number.

    Args:
        kind: "auto" for the accelerator if there is one, else the CPU; or "cpu", "cuda", "xpu" and so on.
        local_rank: Index of the rank on its node.

    Raises:
        InputError: There is no device of the kind.
    """
    available = accelerator()
    kind = (available or "cpu") if kind == "auto" else kind
    if kind == "cpu":
        return CPU
    if kind != available or not count(kind):
        has = f"has {available} devices" if available else "has no accelerator"
        raise InputError(f"there is no device of kind {kind!r}: this process {has} (PyTorch {torch.__version__})")
    return torch.device(kind, local_rank % count(kind))


def show_one(local_rank: int) -> None:
    """Let this process see only one of several accelerators, which is number 0 then.

    This must be called before anything uses them, because drivers read their variable once.

    Args:
        local_rank: Index of the rank on its node. Devices are assigned by it, modulo their number.
    """
    device = torch.accelerator.current_accelerator()  # without asking the driver
    if device is None:
        return
    variable = _VISIBLE.get(device.type, f"{device.type.upper()}_VISIBLE_DEVICES")
    shown = [each for each in os.environ.get(variable, "").split(",") if each]
    shown = shown or [str(number) for number in range(_module(device).device_count())]
    if len(shown) > 1:
        os.environ[variable] = shown[local_rank % len(shown)]


_VISIBLE = {"xpu": "ZE_AFFINITY_MASK"}  # variables that name the visible devices, where they follow no pattern


def use(device: torch.device) -> None:
    """Make this the current device of its kind in the calling thread; new tensors are allocated on it."""
    if is_accelerator(device):
        torch.accelerator.set_device_index(device)


def name(device: torch.device) -> str:
    """Return the name of the device for messages and reports."""
    if not is_accelerator(device):
        return device.type.upper()
    ask = getattr(_module(device), "get_device_name", None)
    return str(ask(device)) if ask is not None else device.type


def identity(device: torch.device) -> str:
    """Return an identification of the device that is unique on its machine.

    It is the UUID, which is the same in all processes, if the device has one. Otherwise it is PyTorch's name of the
    device, which may differ between processes.
    """
    ask = getattr(_module(device), "get_device_properties", None)
    uuid = getattr(ask(device), "uuid", None) if ask is not None else None
    return str(device if uuid is None else uuid)


def matrix_peak(device: torch.device) -> float | None:
    """Return the peak of dense 16-bit matrix products in FLOP/s, from the manufacturer's data; None if unknown."""
    return next((peak for part, peak in _MATRIX_PEAKS if part in name(device)), None)


_MATRIX_PEAKS = (
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("MI300X", 1307e12),
    ("MI250X", 191.5e12),  # one of its two halves, each of which is a device
)


def _module(device: torch.device) -> ModuleType:
    module: ModuleType = torch.get_device_module(device)
    return module


# -- streams and events


def current_stream(device: torch.device) -> torch.Stream:
    """Return the stream that receives the calling thread's work on the device."""
    return torch.accelerator.current_stream(device)


def new_stream(device: torch.device) -> torch.Stream:
    """Return a new stream. `with stream:` makes it and its device current."""
    return torch.Stream(device=device)


def record_event(device: torch.device, stream: torch.Stream | None = None, *, timed: bool = False) -> torch.Event:
    """Return an event that marks all work queued on a stream so far.

    Args:
        device: Device of the stream.
        stream: Stream; None for the caller's current one.
        timed: True if `elapsed_time` between this event and another is needed.
    """
    event = torch.Event(device=device.type, enable_timing=timed)
    event.record(stream if stream is not None else current_stream(device))
    return event


@contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """Make a stream current in this thread during the block. Several threads may use one stream at once.

    `with stream:` does not allow that.
    """
    index, before = torch.accelerator.current_device_index(), current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(index)


def synchronize(device: torch.device) -> None:
    """Wait until the caller's current stream has finished its work; do nothing on the CPU."""
    if is_accelerator(device):
        current_stream(device).synchronize()


def foreign_stream(device: torch.device, handle: int) -> torch.Stream | None:
    """Return the torch stream object of a stream that another library made; None for the default stream.

    Also returns None if PyTorch cannot wrap streams of this kind of device.

    Args:
        device: Device of the stream.
        handle: Address or number of the stream in the driver. 1 and 2 denote the default streams, as in
            `__cuda_array_interface__`.
    """
    make = getattr(_module(device), "ExternalStream", None)
    if make is None or handle in (1, 2):
        return None
    stream: torch.Stream = make(handle, device=device)
    return stream


def stream_of_cupy(device: torch.device) -> torch.Stream | None:
    """Return CuPy's current stream; None if CuPy is not in use or its stream is the default stream."""
    cupy = sys.modules.get("cupy")
    if cupy is None or device.type != "cuda":
        return None
    handle = int(cupy.cuda.get_current_stream().ptr)
    return foreign_stream(device, handle) if handle else None


def native_handle(stream: torch.Stream) -> int:
    """Return the stream's address in the driver, for libraries that need it."""
    untyped_stream: Any = stream  # torch's type stubs lack this attribute
    return int(untyped_stream.native_handle)


# -- memory


def start_copy_to_host(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Begin to copy a tensor to the host, after the work queued on the current stream.

    Returns:
        Function that waits for this copy alone and returns it; for a tensor on the CPU it returns the tensor itself.
    """
    if not is_accelerator(tensor.device):
        return lambda: tensor
    copy = empty_pinned(tensor.shape, tensor.dtype, tensor.device)
    copy.copy_(tensor, non_blocking=True)
    copied = record_event(tensor.device)

    def wait() -> torch.Tensor:
        copied.synchronize()
        return copy

    return wait


def empty_pinned(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an uninitialized tensor in pinned host memory, so that copies to and from the device are asynchronous.

    Args:
        shape: Shape of the tensor.
        dtype: Element type.
        device: Device that copies. For the CPU, plain memory is returned.
    """
    return torch.empty(shape, dtype=dtype, pin_memory=is_accelerator(device))


def pin(memory: torch.Tensor, device: torch.device) -> Callable[[], object] | None:
    """Pin host memory that already exists, such as shared memory.

    Args:
        memory: Contiguous tensor in host memory.
        device: Device that copies to and from it.

    Returns:
        Function that unpins it; None if this kind of device cannot pin existing memory, so copies block the host.
    """
    address, nbytes = memory.data_ptr(), memory.numel() * memory.element_size()
    module = _module(device)
    if hasattr(module, "cudart"):
        runtime = module.cudart()
        if nbytes and int(runtime.cudaHostRegister(address, nbytes, 0)) == 0:
            return lambda: runtime.cudaHostUnregister(address)
    elif hasattr(module, "host_register"):
        module.host_register(address, nbytes)
        return lambda: module.host_unregister(address)
    return None


def memory_bytes(device: torch.device) -> int:
    """Return the bytes that tensors of this process occupy on the device now."""
    if not torch._C._accelerator_isAllocatorInitialized():
        return 0
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    statistics: dict[str, Any] = torch._C._accelerator_getDeviceStats(index)  # memory_allocated takes 8 times as long
    return int(statistics["allocated_bytes"]["all"]["current"])


def peak_memory_bytes(device: torch.device) -> int:
    """Return the largest number of bytes that tensors of this process have occupied on the device."""
    return torch.accelerator.max_memory_allocated(device)


def total_memory_bytes(device: torch.device) -> int:
    """Return the size of the device's memory in bytes."""
    return torch.accelerator.get_memory_info(device)[1]


def export_memory(tensor: torch.Tensor) -> list[Any]:
    """Return the data that another process of the node needs to map the tensor's storage. JSON can represent them.

    Raises:
        InputError: Processes cannot share memory of this kind of device.
    """
    storage = tensor.untyped_storage()
    if tensor.device.type == "cuda":
        cuda_storage: Any = storage
        parts = cuda_storage._share_cuda_()
        return [part.hex() if isinstance(part, bytes) else part for part in parts]
    share = getattr(_module(tensor.device), "export_memory", None)
    if share is None:
        raise InputError(f"processes cannot share memory of {tensor.device.type} devices; use comm.device staged")
    return list(share(storage))


def import_memory(handle: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Return the storage of another process's tensor as a flat uint8 tensor. The other process must keep it alive.

    Args:
        handle: Return value of `export_memory` in the other process.
        device: Device of this process.
    """
    if device.type == "cuda":
        parts = [bytes.fromhex(part) if isinstance(part, str) else part for part in handle]
        storage = torch.UntypedStorage._new_shared_cuda(*parts)
    else:
        storage = _module(device).import_memory(handle)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def memory_kind(kind: str) -> str:
    """Return MPI's name of the memory of a kind of device (MPI-4.1, section 12.4.3)."""
    if kind == "xpu":
        return "level_zero"
    return "rocm" if kind == "cuda" and torch.version.hip else kind


def mpi_reads(kind: str) -> bool | None:
    """Return whether the loaded MPI library accepts addresses in memory of a kind of device; None if it does not say.

    Open MPI and libraries derived from it have one query function for each kind that they support.
    """
    named = memory_kind(kind)
    function = f"MPIX_Query_{'ze' if named == 'level_zero' else named}_support"
    for path in sorted(set(proc.mapped("libmpi"))):
        try:
            query = getattr(ctypes.CDLL(path), function)
        except (OSError, AttributeError):
            continue
        query.restype = ctypes.c_int
        return bool(query())
    return None


# -- random numbers


def generator_state(device: torch.device) -> torch.Tensor:
    """Return the state of the device's default random generator, as a tensor of bytes on the host."""
    if not is_accelerator(device):
        return torch.get_rng_state()
    state: torch.Tensor = _module(device).get_rng_state(device)
    return state


def set_generator_state(device: torch.device, state: torch.Tensor) -> None:
    """Set the state of the device's default random generator.

    Args:
        device: CPU or accelerator.
        state: Result of `generator_state` for a device of the same kind.
    """
    if not is_accelerator(device):
        torch.set_rng_state(state)
    else:
        _module(device).set_rng_state(state, device)


def seed_generator(device: torch.device, seed: int) -> None:
    """Seed the default random generator of one device; generators of other devices do not change.

    Args:
        device: CPU or accelerator.
        seed: Seed, as for `torch.manual_seed`.
    """
    if not is_accelerator(device):
        torch.default_generator.manual_seed(seed)
        return
    with torch.accelerator.device_index(device.index or 0):
        _module(device).manual_seed(seed)


@contextmanager
def preserve_generators(device: torch.device) -> Iterator[None]:
    """Restore the default random generators of the CPU and of the device after the block."""
    with torch.random.fork_rng(devices=[device], device_type=device.type) if is_accelerator(device) else nullcontext():
        host = torch.get_rng_state()
        try:
            yield
        finally:
            torch.set_rng_state(host)
