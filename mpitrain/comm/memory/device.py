"""Devices: the one place that knows which kinds there are.

A rank computes on one device, the CPU or an accelerator. Everything else asks here for streams, events, pinned memory,
memory figures and generators, and gets what PyTorch has for the kind of device: through `torch.accelerator` where that
is the same for all kinds, through `torch.get_device_module` where it is not. So CUDA, ROCm (which PyTorch calls
"cuda"), XPU and accelerators from outside of PyTorch run the same lines.

An accelerator works off its streams by itself, while the host goes on. What orders the two, and two streams:

    event = recorded(device)        everything that the caller has asked of the device so far
    stream.wait_event(event)        what is asked of that stream from now on comes after it
    event.synchronize()             the host goes on after it, and sees what was copied to it
"""

from __future__ import annotations

import ctypes
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
    """The kind of accelerator that this process has, as PyTorch names it ("cuda", "xpu", …); "" where it has none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None else ""


def is_accelerator(device: torch.device) -> bool:
    """Whether the device has memory and streams of its own."""
    return device.type not in _HOST


def count(kind: str) -> int:
    """The number of devices of a kind that this process sees."""
    return torch.accelerator.device_count() if kind == accelerator() else 0


def of_rank(kind: str, local_rank: int) -> torch.device:
    """The device that a rank computes on.

    That is the one that the launcher left it alone with; where it sees several, the one whose number is the rank's on
    its node, modulo how many there are.

    Args:
        kind: "auto" for whatever accelerator there is, else the CPU; or "cpu", "cuda", "xpu" and so on.
        local_rank: The rank's number on its node.

    Raises:
        InputError: There is no device of the kind.
    """
    found = accelerator()
    kind = (found or "cpu") if kind == "auto" else kind
    if kind == "cpu":
        return CPU
    if kind != found or not count(kind):
        has = f"has {found} devices" if found else "has no accelerator"
        raise InputError(f"there is no device of kind {kind!r}: this process {has} (PyTorch {torch.__version__})")
    return torch.device(kind, local_rank % count(kind))


def use(device: torch.device) -> None:
    """Make this the device that new tensors of its kind lie on, in the calling thread."""
    if is_accelerator(device):
        torch.accelerator.set_device_index(device)


def name(device: torch.device) -> str:
    """What the device is called, for people."""
    if not is_accelerator(device):
        return device.type.upper()
    ask = getattr(_module(device), "get_device_name", None)
    return str(ask(device)) if ask is not None else device.type


def identity(device: torch.device) -> str:
    """What tells the device apart from all others of its machine, whichever number it has in this process."""
    ask = getattr(_module(device), "get_device_properties", None)
    found = getattr(ask(device), "uuid", None) if ask is not None else None
    return str(device if found is None else found)


def matrix_peak(device: torch.device) -> float | None:
    """Floating-point operations a second of dense 16-bit matrix products, by the maker; None where not known."""
    return next((peak for part, peak in _MATRIX_PEAKS if part in name(device)), None)


_MATRIX_PEAKS = (
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("MI300X", 1307e12),
    ("MI250X", 191.5e12),  # of one of its two halves, each of which is a device
)


def _module(device: torch.device) -> ModuleType:
    found: ModuleType = torch.get_device_module(device)
    return found


# -- streams and events


def current_stream(device: torch.device) -> torch.Stream:
    """The stream that takes what the calling thread asks of the device now."""
    return torch.accelerator.current_stream(device)


def new_stream(device: torch.device) -> torch.Stream:
    """A stream beside the others. `with stream:` makes it the current one, and its device too."""
    return torch.Stream(device=device)


def recorded(device: torch.device, stream: torch.Stream | None = None, *, timed: bool = False) -> torch.Event:
    """An event behind everything that the stream was asked so far.

    Args:
        device: The stream's.
        stream: The caller's current one if it is None.
        timed: Whether `elapsed_time` between this event and another can be asked.
    """
    event = torch.Event(device=device.type, enable_timing=timed)
    event.record(stream if stream is not None else current_stream(device))
    return event


@contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """Make a stream the current one of its device, in this thread; `with stream:` can only be said by one at a time."""
    index, before = torch.accelerator.current_device_index(), current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(index)


def synchronize(device: torch.device) -> None:
    """Return when the caller's current stream has done what it was asked; at once on the CPU."""
    if is_accelerator(device):
        current_stream(device).synchronize()


def foreign_stream(device: torch.device, handle: int) -> torch.Stream | None:
    """The stream that another library made, by the address or number that it has in the driver; None if there is none.

    Args:
        device: The stream's device.
        handle: 1 and 2 stand for the default streams, as in `__cuda_array_interface__`.
    """
    make = getattr(_module(device), "ExternalStream", None)
    if make is None or handle in (1, 2):
        return None
    stream: torch.Stream = make(handle, device=device)
    return stream


def stream_of_cupy(device: torch.device) -> torch.Stream | None:
    """CuPy's current stream, where the program uses CuPy and this is not the default stream."""
    cupy = sys.modules.get("cupy")
    if cupy is None or device.type != "cuda":
        return None
    handle = int(cupy.cuda.get_current_stream().ptr)
    return foreign_stream(device, handle) if handle else None


def native_handle(stream: torch.Stream) -> int:
    """The stream's address in the driver, for libraries that take it."""
    made: Any = stream  # whose types are older than it
    return int(made.native_handle)


# -- memory


def fetched(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Begin to copy a tensor to the host, behind what the current stream was asked so far.

    Returns:
        What waits for that copy alone, and gives it; of a tensor on the CPU, that tensor.
    """
    if not is_accelerator(tensor.device):
        return lambda: tensor
    copy = pinned(tensor.shape, tensor.dtype, tensor.device)
    copy.copy_(tensor, non_blocking=True)
    copied = recorded(tensor.device)

    def wait() -> torch.Tensor:
        copied.synchronize()
        return copy

    return wait


def pinned(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialized host tensor that the device copies to and from while the host goes on; plain for the CPU."""
    return torch.empty(shape, dtype=dtype, pin_memory=is_accelerator(device))


def pin(memory: torch.Tensor, device: torch.device) -> Callable[[], object] | None:
    """Make host memory that exists already pinned memory; shared memory, for instance.

    Returns:
        What undoes it; None where this kind of device has no way to do it: copies then wait for each other.
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
    """Bytes that this process' tensors take on the device now."""
    return torch.accelerator.memory_allocated(device)


def peak_memory_bytes(device: torch.device) -> int:
    """The most bytes that this process' tensors have taken on the device."""
    return torch.accelerator.max_memory_allocated(device)


def total_memory_bytes(device: torch.device) -> int:
    """Bytes that the device has."""
    return torch.accelerator.get_memory_info(device)[1]


def export_memory(tensor: torch.Tensor) -> list[Any]:
    """What another process of the node needs to map the tensor's storage; JSON can hold it.

    Raises:
        InputError: This kind of device has no memory that processes share.
    """
    storage = tensor.untyped_storage()
    if tensor.device.type == "cuda":
        made: Any = storage
        parts = made._share_cuda_()
        return [part.hex() if isinstance(part, bytes) else part for part in parts]
    share = getattr(_module(tensor.device), "export_memory", None)
    if share is None:
        raise InputError(f"processes cannot share memory of {tensor.device.type} devices; use comm.device staged")
    return list(share(storage))


def import_memory(told: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Another process' storage, as bytes. It must outlive what is returned.

    Args:
        told: What `export_memory` gave there.
        device: This process' device.
    """
    if device.type == "cuda":
        parts = [bytes.fromhex(part) if isinstance(part, str) else part for part in told]
        storage = torch.UntypedStorage._new_shared_cuda(*parts)
    else:
        storage = _module(device).import_memory(told)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def memory_kind(kind: str) -> str:
    """What MPI-4.1 (section 12.4.3) calls the memory of a kind of device."""
    if kind == "xpu":
        return "level_zero"
    return "rocm" if kind == "cuda" and torch.version.hip else kind


def mpi_reads(kind: str) -> bool | None:
    """Whether the MPI library of this process takes addresses of a kind of memory; None where it does not say.

    Open MPI and libraries made of it have a function for each kind that they can be built for.
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
    """The state of the device's default generator, a tensor of bytes on the host."""
    if not is_accelerator(device):
        return torch.get_rng_state()
    state: torch.Tensor = _module(device).get_rng_state(device)
    return state


def set_generator_state(device: torch.device, state: torch.Tensor) -> None:
    """Set the state of the device's default generator."""
    if not is_accelerator(device):
        torch.set_rng_state(state)
    else:
        _module(device).set_rng_state(state, device)


def seed_generator(device: torch.device, seed: int) -> None:
    """Seed the device's default generator, and no other."""
    if not is_accelerator(device):
        torch.default_generator.manual_seed(seed)
        return
    with torch.accelerator.device_index(device.index or 0):
        _module(device).manual_seed(seed)


@contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """Put the default generators of the CPU and of the device back to where they were before."""
    with torch.random.fork_rng(devices=[device], device_type=device.type) if is_accelerator(device) else nullcontext():
        host = torch.get_rng_state()
        try:
            yield
        finally:
            torch.set_rng_state(host)
