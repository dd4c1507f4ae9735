"""Horovod's interface on mpitrain's communication, for scripts written for Horovod."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

from mpitrain.errors import InputError

__version__ = "0.28.1"  # of the interface, which scripts compare

# module of mpitrain for each module that scripts import
_MODULES = {
    "horovod": "mpitrain.horovod",
    "horovod.torch": "mpitrain.horovod.torch",
    "horovod.torch.elastic": "mpitrain.horovod.torch.elastic",
    "horovod.torch.elastic.sampler": "mpitrain.horovod.torch.elastic",
    "horovod.torch.elastic.state": "mpitrain.horovod.torch.elastic",
    "horovod.torch.compression": "mpitrain.horovod.torch.compression",
    "horovod.torch.functions": "mpitrain.horovod.torch.objects",
    "horovod.torch.mpi_ops": "mpitrain.horovod.torch",
    "horovod.torch.optimizer": "mpitrain.horovod.torch.optimizer",
    "horovod.torch.sync_batch_norm": "mpitrain.horovod.torch.batch_norm",
}


def as_horovod() -> None:
    """Let `import horovod.torch as hvd` in this process import mpitrain's module, also if Horovod is installed.

    Raises:
        InputError: Horovod itself is already imported.
    """
    present = sys.modules.get("horovod")
    if present is not None and present is not sys.modules[__name__]:
        raise InputError(
            "horovod is already imported; call mpitrain.horovod.as_horovod() before the first import of it"
        )
    for name, home in _MODULES.items():
        sys.modules[name] = import_module(home)
    exceptions = ModuleType("horovod.common.exceptions", "Exceptions of horovod.common.")
    torch_module = sys.modules["horovod.torch"]
    vars(exceptions).update(
        HorovodInternalError=vars(torch_module)["HorovodInternalError"],
        HostsUpdatedInterrupt=vars(torch_module)["elastic"].HostsUpdatedInterrupt,
    )
    common = ModuleType("horovod.common", "Package of horovod.common.exceptions.")
    common.__path__ = []
    sys.modules.update({"horovod.common": common, "horovod.common.exceptions": exceptions})


def run(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuse: ranks are started by mpirun or srun.

    Raises:
        InputError: Always.
    """
    raise InputError("horovod.run does not start ranks here; start the script itself with mpirun -n N or srun")
