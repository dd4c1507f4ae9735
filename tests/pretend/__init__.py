"""A simulated accelerator for PyTorch, which tests device code on machines without a device.

`torch.device("pretend", 0)` and `("pretend", 1)` behave like real accelerators, and expose errors that those let
pass:

- The CPU cannot touch their memory: reading an address that a tensor has there ends the process (SIGSEGV; EFAULT in
  system calls). Fresh and freed memory is NaN.
- Their streams run only when something waits for them, and copies to the host arrive only when the host waits. Code
  that forgets to wait computes with wrong data every time.
- They compute what the CPU computes, with its kernels.

It consists of a C++ library (`source/`), built once (`build.py`), and a device module (`device_module.py`), which is
`torch.pretend`. A process that loads it does not see it until `available(True)`:

    import pretend
    pretend.available(True)         # torch.accelerator.current_accelerator() is "pretend" from here on
    pretend.available(False)        # … and there is none again

Child processes get it through their environment: `support.pretend_environment()`.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from . import build

NAME = "pretend"


@functools.cache
def load() -> None:
    """Build and load the library, once; PyTorch sees no device yet.

    A process that computes gradients on the CPU first and loads it later has autograd threads for the CPU alone, and
    PyTorch makes no others: load it before the first backward.

    Raises:
        build.BuildError: There is no compiler, or it failed.
    """
    torch.ops.load_library(str(build.library()))
    atexit.register(torch.ops.pretend.set_late_ms, -1)  # nothing runs in the background while the process ends


@functools.cache
def _register() -> None:
    """Name the device, and give it its module: PyTorch cannot undo that."""
    from . import device_module

    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, device_module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    _exchange_by_dlpack()


def available(on: bool) -> None:
    """Let PyTorch see the devices, or hide them again; tensors that are there already stay usable."""
    load()
    if on:
        _register()
    torch.ops.pretend.show(on)


@contextmanager
def shown(rank: int = 0) -> Iterator[torch.device]:
    """Let PyTorch see the devices meanwhile, and make the one of a rank the current one: its number modulo theirs.

    Afterwards all work is done, the knobs stand where they were at first, and the devices are hidden again.

    Raises:
        RuntimeError: At the end, if an operation has failed on a device and nobody was told.
    """
    available(True)
    device = torch.device(NAME, rank % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device)
    torch.pretend.set_late_ms(-1)
    try:
        yield device
        for number in range(torch.accelerator.device_count()):
            torch.accelerator.synchronize(number)
    finally:
        torch.pretend.set_late_ms(-1)
        torch.pretend.set_copy_bandwidth(0)
        torch.pretend.set_kernel_ms(0)
        torch.accelerator.set_device_index(0)
        available(False)


def _exchange_by_dlpack() -> None:
    """`torch.from_dlpack(tensor)`: PyTorch asks for the name "privateuse1", which a device with a name has not."""
    original = torch.Tensor.__dlpack_device__

    def dlpack_device(self: torch.Tensor):
        from torch.utils.dlpack import DLDeviceType

        return (DLDeviceType.kDLExtDev, self.get_device()) if self.device.type == NAME else original(self)

    torch.Tensor.__dlpack_device__ = dlpack_device
