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

_HOMES = {  # of the names that do not come from mpitrain.comm
    "Callback": "mpitrain.trainer.callback",
    "DistributedDataParallel": "mpitrain.shard.ddp",
    "Trainer": "mpitrain.trainer.trainer",
    "initialize": "mpitrain.trainer.initialize",
}
__all__ = ["ANY_SOURCE", "Arena", "Callback", "Communicator", "DistributedDataParallel", "Trainer", "Work"]
__all__ += ["compression", "init", "initialize"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "mpitrain.comm")), name)


def __dir__() -> list[str]:
    """The public names, for completion."""
    return list(__all__)
