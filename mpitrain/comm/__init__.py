"""Communication: groups of ranks, all operations between them, and the memory they share.

This is the only package of mpitrain that imports mpi4py. Other packages use `init`, `Communicator`, `Arena`, `Mailbox`,
`Work` and `compression`. These names are loaded on first use, which starts MPI. The programs that operations run
(`algorithms`, `programs`, `selection`) can be used without MPI.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpitrain.comm import compression
    from mpitrain.comm.communicator import ANY_SOURCE, Communicator
    from mpitrain.comm.mailbox import Letter, Mailbox
    from mpitrain.comm.memory.arena import Arena
    from mpitrain.comm.runtime.work import Work
    from mpitrain.comm.world import carry_device_memory, init, set_timeout

_HOMES = {
    "ANY_SOURCE": "communicator",
    "Arena": "memory.arena",
    "Communicator": "communicator",
    "Letter": "mailbox",
    "Mailbox": "mailbox",
    "Work": "runtime.work",
    "carry_device_memory": "world",
    "init": "world",
    "set_timeout": "world",
}
__all__ = ["ANY_SOURCE", "Arena", "Communicator", "Letter", "Mailbox", "Work", "carry_device_memory", "compression"]
__all__ += ["init", "set_timeout"]


def __getattr__(name: str) -> Any:
    if name == "compression":
        return import_module("mpitrain.comm.compression")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module("torch")  # before MPI: ranks sleep in MPI_Init until the last one comes, but not in later operations
    import_module("mpitrain.comm.job.mpi")
    return getattr(import_module(f"mpitrain.comm.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """Return the public names, for completion."""
    return list(__all__)
