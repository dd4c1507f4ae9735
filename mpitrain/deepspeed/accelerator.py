"""`get_accelerator`, the device of this rank under DeepSpeed's names."""

from __future__ import annotations

from typing import Any

import torch

from mpitrain.backend import NAME
from mpitrain.comm import init
from mpitrain.comm.memory import device as devices


class Accelerator:
    """The kind of device that ranks compute on, an accelerator or the CPU.

    Names that are missing here are those of torch.accelerator.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.accelerator, name)

    def device_name(self, device_index: int | None = None) -> str:
        """Return the name of a device, such as "cuda:0"; the CPU has no number."""
        kind = devices.accelerator()
        return "cpu" if not kind else kind if device_index is None else f"{kind}:{device_index}"

    def current_device(self) -> int | str:
        """Return the number of this rank's device, or "cpu"."""
        return torch.accelerator.current_device_index() if devices.accelerator() else "cpu"

    def current_device_name(self) -> str:
        return self.device_name(torch.accelerator.current_device_index() if devices.accelerator() else None)

    def set_device(self, device_index: int) -> None:
        """Compute on the device that mpitrain assigns to this rank, whatever the number. device_index: ignored."""
        devices.use(devices.of_rank("auto", init().local_rank))

    def device_count(self) -> int:
        return devices.count(devices.accelerator()) if devices.accelerator() else 1

    def is_available(self) -> bool:
        return True

    def synchronize(self, device_index: int | None = None) -> None:
        devices.synchronize(devices.of_rank("auto", init().local_rank))

    def communication_backend_name(self) -> str:
        return NAME


_accelerator = Accelerator()


def get_accelerator() -> Accelerator:
    """Return the accelerator."""
    return _accelerator
