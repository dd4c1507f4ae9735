"""MPI-native training of PyTorch models. What a user imports; see README.md.

Names are loaded on first use: `mpitrain.data` must be usable without MPI, and thousands of processes import this.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpitrain.comm import ANY_SOURCE, Arena, Communicator, Work, compression, init
    from mpitrain.shard.ddp import DistributedDataParallel
    from mpitrain.trainer.initialize import initialize

_HOMES = {
    "ANY_SOURCE": "mpitrain.comm",
    "Arena": "mpitrain.comm",
    "Communicator": "mpitrain.comm",
    "DistributedDataParallel": "mpitrain.shard.ddp",
    "Work": "mpitrain.comm",
    "compression": "mpitrain.comm",
    "init": "mpitrain.comm",
    "initialize": "mpitrain.trainer.initialize",
}
__all__ = [
    "ANY_SOURCE",
    "Arena",
    "Communicator",
    "DistributedDataParallel",
    "Work",
    "compression",
    "init",
    "initialize",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
