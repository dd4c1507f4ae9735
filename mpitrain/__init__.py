"""MPI-native training of PyTorch models. What a user imports; see README.md.

Names are loaded on first use: `mpitrain.data` must be usable without MPI, and thousands of processes import this.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpitrain.comm import ANY_SOURCE, Arena, Communicator, Work, compression, init
    from mpitrain.shard.ddp import DistributedDataParallel
    from mpitrain.trainer.callback import Callback
    from mpitrain.trainer.initialize import initialize
    from mpitrain.trainer.trainer import Trainer

_HOMES = {
    "ANY_SOURCE": "mpitrain.comm",
    "Arena": "mpitrain.comm",
    "Callback": "mpitrain.trainer.callback",
    "Communicator": "mpitrain.comm",
    "DistributedDataParallel": "mpitrain.shard.ddp",
    "Trainer": "mpitrain.trainer.trainer",
    "Work": "mpitrain.comm",
    "compression": "mpitrain.comm",
    "init": "mpitrain.comm",
    "initialize": "mpitrain.trainer.initialize",
}
__all__ = [
    "ANY_SOURCE",
    "Arena",
    "Callback",
    "Communicator",
    "DistributedDataParallel",
    "Trainer",
    "Work",
    "compression",
    "init",
    "initialize",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names, for completion."""
    return list(__all__)
